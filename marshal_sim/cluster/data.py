"""The data client of one simulated consumer: how fetches succeed, fail and are refused.

The bookkeeping is the shipped one (transport/assignments.py). This file holds what librdkafka, KafkaSource and
ConsumerDriver do around it: fetches that may fail, refusals that may come late, and the look-up after a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final, Protocol

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.assignments import Assignments
from marshal_py.transport.ports import Broken, OutOfRange
from marshal_sim.cluster.process import Environment, Process

BATCH: Final = 8  # messages per fetch: small, so that claims end in mid-batch often


class Fetch:
    """Describes a fetch of one partition that is under way, or that was refused. There is at most one per partition."""

    __slots__ = ("position", "refused", "tp")

    position: int
    tp: TopicPartition

    def __init__(self, tp: TopicPartition, position: int) -> None:
        self.tp, self.position = tp, position
        self.refused: bool = False  # it was refused, and this was reported


class FetchReceiver(Protocol):
    """Takes the messages of partitions, and hears what became of failed fetches."""

    def fetched(self, tp: TopicPartition, round_: int, offsets: Sequence[int]) -> None: ...
    def restart(self, tp: TopicPartition, position: int) -> None: ...
    def beyond(self, tp: TopicPartition, position: int, end: int) -> None: ...
    def unreadable(self, broken: Broken) -> None: ...


class DataClient:
    """Makes the fetches of one consumer process. They make no progress while the process is stopped."""

    environment: Environment
    process: Process
    receiver: FetchReceiver

    def __init__(self, environment: Environment, process: Process, receiver: FetchReceiver) -> None:
        self.environment, self.process, self.receiver = environment, process, receiver
        self.assignments: Assignments = Assignments()
        self._fetches: dict[TopicPartition, Fetch] = {}

    def copy(self, clone: Process, receiver: FetchReceiver, memo: dict[int, Any]) -> DataClient:
        """Returns the data client of a cloned machine. It has the same memory; requests under way stay with the
        original.
        """
        other = DataClient(self.environment, clone, receiver)
        other.assignments = deepcopy(self.assignments, memo)
        return other

    def assign(self, tp: TopicPartition, position: int) -> None:
        self.assignments.assign({tp: position})
        self.poll(tp)

    def drop(self, tp: TopicPartition) -> None:
        self.assignments.unassign([tp])
        self._apply_changes()

    def poll(self, tp: TopicPartition) -> None:
        """Fetches the next messages of a partition, unless a fetch is under way."""
        self._apply_changes()
        assignment = self.assignments.fetched.get(tp)
        if assignment is None or tp in self._fetches:
            return
        environment = self.environment
        fetch = self._fetches[tp] = Fetch(tp, assignment.reached)
        if environment.broker.ends[tp] != fetch.position:
            environment.schedule(environment.network_faults.read_ms(), self.process, self._fetched, fetch)
        else:
            environment.broker.wait(
                tp,
                lambda: environment.schedule(environment.network_faults.read_ms(), self.process, self._fetched, fetch),
            )

    def _apply_changes(self) -> None:
        """Applies changed assignments, as KafkaSource does before it polls."""
        changes = self.assignments.take(self.environment.now_ms)
        for tp in changes.unassign:
            self._fetches.pop(tp, None)

    def _fetched(self, fetch: Fetch) -> None:
        environment, tp = self.environment, fetch.tp
        if self._fetches.get(tp) is not fetch:
            return  # the assignment has changed meanwhile
        if environment.broker.reads_down_until_ms > environment.now_ms:
            environment.broker.held.append(
                lambda: environment.schedule(environment.network_faults.read_ms(), self.process, self._fetched, fetch)
            )
            return
        if environment.broker.fails_until_ms.get(tp, 0) > environment.now_ms:
            self.assignments.fail(tp, "injected", environment.now_ms)
            self._handle_failures(tp)
            return
        if environment.broker.ends[tp] < fetch.position:
            self._refused(fetch)
            return
        late_ms = environment.network_faults.refusal_ms()
        if late_ms:  # it stops fetching, and reports the refusal later
            environment.network_faults.in_flight.append(
                lambda: environment.schedule(0, self.process, self._refused, fetch)
            )
            environment.schedule(late_ms, self.process, self._refused, fetch)
            return
        del self._fetches[tp]
        offsets = environment.broker.fetch(tp, fetch.position, BATCH)
        if offsets:
            self.receiver.fetched(tp, self.assignments.received(tp, offsets[-1] + 1), offsets)
        else:
            self.assignments.drained(environment.now_ms)
            self.poll(tp)

    def _refused(self, fetch: Fetch) -> None:
        """Reports a refused fetch even if the assignment has changed: librdkafka does not say which one a refusal
        belongs to.
        """
        if fetch.refused:
            return  # it was reported when everything healed
        fetch.refused = True
        self.assignments.refuse(fetch.tp, fetch.position, "", self.environment.now_ms)
        self._handle_failures(fetch.tp)

    def _handle_failures(self, tp: TopicPartition) -> None:
        """Hands on the partitions that could not be fetched, as ConsumerDriver does."""
        environment = self.environment
        for refused in self.assignments.out_of_range():
            environment.schedule(environment.network_faults.question_ms(), self.process, self._located, refused)
        for broken in self.assignments.broken():
            self.receiver.unreadable(broken)
        self._apply_changes()
        due_ms = self.assignments.due_ms(tp)
        if due_ms is not None:
            environment.schedule(max(1, due_ms - environment.now_ms), self.process, self.poll, tp)

    def _located(self, refused: OutOfRange) -> None:
        """Compares a refused position with the partition's present end; restarts or gives up the fetch (D6, D12)."""
        if not self.assignments.current(refused.tp, refused.round):
            return
        end = self.environment.broker.ends[refused.tp]
        if refused.position > end:
            self.receiver.beyond(refused.tp, refused.position, end)
        else:
            self.receiver.restart(refused.tp, refused.position)
