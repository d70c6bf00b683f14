"""The data client of one simulated consumer: what KafkaSource, librdkafka and Station make of fetches and refusals.

The bookkeeping is the shipped one (transport/assignments.py). Here is only what lies below it, a client that fetches
what it was told to, whose fetches fail and whose refusals come late, and the question that follows a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final, Protocol

from marshal_py.protocol.identity import TopicPartition
from marshal_py.simulator.process import Environment, Process
from marshal_py.transport.assignments import Assignments
from marshal_py.transport.ports import Broken, OutOfRange

BATCH: Final = 8  # messages per fetch: small, so that claims end in mid-batch often


class Asked:
    """A fetch that is under way, or the refusal of one; one at a time per partition."""

    __slots__ = ("position", "refused", "tp")

    def __init__(self, tp: TopicPartition, position: int) -> None:
        self.tp, self.position = tp, position
        self.refused = False  # and that was told


class Reader(Protocol):
    """Who gets the messages."""

    def fetched(self, tp: TopicPartition, round_: int, offsets: Sequence[int]) -> None: ...
    def restart(self, tp: TopicPartition, position: int) -> None: ...
    def beyond(self, tp: TopicPartition, position: int, end: int) -> None: ...
    def unreadable(self, broken: Broken) -> None: ...


class DataClient:
    """Fetches for one consumer process. Everything happens through `Stage.at`, so that nothing does while it stops."""

    def __init__(self, environment: Environment, who: Process, reader: Reader) -> None:
        self.environment, self.who, self.reader = environment, who, reader
        self.assignments = Assignments()
        self._asked: dict[TopicPartition, Asked] = {}

    def copy(self, twin: Process, reader: Reader, memo: dict[int, Any]) -> DataClient:
        """For a cloned machine: the same memory; the requests that were under way are the other's."""
        other = DataClient(self.environment, twin, reader)
        other.assignments = deepcopy(self.assignments, memo)
        return other

    def assign(self, tp: TopicPartition, position: int) -> None:
        self.assignments.assign({tp: position})
        self.poll(tp)

    def drop(self, tp: TopicPartition) -> None:
        self.assignments.unassign([tp])
        self._tell()

    def poll(self, tp: TopicPartition) -> None:
        """Fetches the next messages, unless that is under way."""
        self._tell()
        assignment = self.assignments.fetched.get(tp)
        if assignment is None or tp in self._asked:
            return
        environment = self.environment
        asked = self._asked[tp] = Asked(tp, assignment.reached)
        if environment.broker.ends[tp] != asked.position:
            environment.at(environment.network_faults.read_ms(environment.rng), self.who, self._came, asked)
        else:
            environment.broker.wait(
                tp,
                lambda: environment.at(
                    environment.network_faults.read_ms(environment.rng), self.who, self._came, asked
                ),
            )

    def _tell(self) -> None:
        """As KafkaSource does before it polls."""
        changes = self.assignments.take(self.environment.now_ms)
        for tp in changes.unassign:
            self._asked.pop(tp, None)

    def _came(self, asked: Asked) -> None:
        environment, tp = self.environment, asked.tp
        if self._asked.get(tp) is not asked:
            return  # it was told otherwise meanwhile
        if environment.broker.reads_down_until_ms > environment.now_ms:
            environment.broker.held.append(
                lambda: environment.at(environment.network_faults.read_ms(environment.rng), self.who, self._came, asked)
            )
            return
        if environment.broker.fails_until_ms.get(tp, 0) > environment.now_ms:
            self.assignments.fail(tp, "injected", environment.now_ms)
            self._judged(tp)
            return
        if environment.broker.ends[tp] < asked.position:
            self._refused(asked)
            return
        late_ms = environment.network_faults.refusal_ms(environment.rng)
        if late_ms:  # fetches no more, and says so later
            environment.network_faults.flying.append(lambda: environment.at(0, self.who, self._refused, asked))
            environment.at(late_ms, self.who, self._refused, asked)
            return
        del self._asked[tp]
        offsets = environment.broker.fetch(tp, asked.position, BATCH)
        if offsets:
            self.reader.fetched(tp, self.assignments.received(tp, offsets[-1] + 1), offsets)
        else:
            self.assignments.drained(environment.now_ms)
            self.poll(tp)

    def _refused(self, asked: Asked) -> None:
        """The client tells of a refusal, whatever is assigned by now: it does not know whose it is."""
        if asked.refused:
            return  # it was told when everything healed
        asked.refused = True
        self.assignments.refuse(asked.tp, asked.position, "", self.environment.now_ms)
        self._judged(asked.tp)

    def _judged(self, tp: TopicPartition) -> None:
        """As Station does with what the source could not fetch."""
        environment = self.environment
        for refused in self.assignments.out_of_range():
            environment.at(environment.network_faults.question_ms(environment.rng), self.who, self._placed, refused)
        for broken in self.assignments.broken():
            self.reader.unreadable(broken)
        self._tell()
        due_ms = self.assignments.due_ms(tp)
        if due_ms is not None:
            environment.at(max(1, due_ms - environment.now_ms), self.who, self.poll, tp)

    def _placed(self, refused: OutOfRange) -> None:
        """D6, D12: what the cluster says of the partition by now."""
        if not self.assignments.current(refused.tp, refused.round):
            return
        end = self.environment.broker.ends[refused.tp]
        if refused.position > end:
            self.reader.beyond(refused.tp, refused.position, end)
        else:
            self.reader.restart(refused.tp, refused.position)
