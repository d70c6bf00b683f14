"""Keeps the books of assignments: what to fetch, what the client fetches, and which assignment an answer belongs to.

It has no clock, thread or client: KafkaSource and the simulator's consumer run the same class. An assignment is
identified by a number, its round. Every answer names a round, and an answer of an earlier round changes nothing.

Two sides use it. Callers assign, unassign and pause, one at a time (under the Marshal's lock), and so only note what
they want. The thread that holds the client takes the difference (`take`), passes it to the client, and reports what
follows. Both sides may run at the same time: each writes its own fields, and shared ones change in single steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import Broken, OutOfRange

RETRY_MS: Final = 100  # after the first failure of a fetch; doubled after each further failure
RETRY_MS_MAX: Final = 5_000
FAILURES_MAX: Final = 10  # in a row: they take about 26 s, and a leader election or a broker's restart is over by then
FORGET_FAILURES_MS: Final = 10_000  # after this long without a failure, counting starts again


class State(IntEnum):
    FETCHING = 0
    WAITING = 1  # a fetch failed and will be retried
    STOPPED = 2  # the cluster refused it: nothing is fetched until the next assignment


@dataclass(eq=False, slots=True)
class Assignment:
    """One assignment of one partition. `reached`: the next offset to fetch."""

    round: int
    reached: int
    leader_epoch: int = -1  # in which the message just below `reached` was written; -1: unknown
    reached_before: int = -1  # at the last look of `is_quiet`
    state: State = State.FETCHING
    paused: bool = False  # wanted by the caller
    paused_in_client: bool = False
    has_received: bool = False  # at least one message
    failures: int = 0  # in a row
    tried_ms: int = 0  # time of the retry: while WAITING the next one, afterwards the last one


@dataclass(slots=True)
class Changes:
    """What to pass to the client, in this order: resume, unassign, assign, pause."""

    # `resume` is part of `unassign`: a client remembers a pause beyond the assignment.
    resume: list[TopicPartition] = field(default_factory=list)
    unassign: list[TopicPartition] = field(default_factory=list)
    assign: dict[TopicPartition, int] = field(default_factory=dict)
    # Of some in `assign`: of what has come from there before.
    leader_epochs: dict[TopicPartition, int] = field(default_factory=dict)
    pause: set[TopicPartition] = field(default_factory=set)


class Assignments:
    """All assignments of one source."""

    def __init__(self) -> None:
        self._wanted: dict[TopicPartition, Assignment] = {}
        self._changed: set[TopicPartition] = set()  # where the client perhaps does not do what is wanted
        self._round = 0
        self.fetched: dict[TopicPartition, Assignment] = {}  # what the client fetches
        self._failed: dict[TopicPartition, Assignment] = {}  # WAITING, or retried not long ago
        self._refused: dict[TopicPartition, OutOfRange] = {}
        self._broken: dict[TopicPartition, Broken] = {}

    # --- called by whoever wants messages

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Notes that these partitions are to be fetched from these positions on, each in a new round. What was fetched
        already is fetched again with its leader epoch: else the client would not notice if it is lost (KIP-320)."""
        for tp, position in positions.items():
            self._round += 1
            before = self._wanted.get(tp)
            one = self._wanted[tp] = Assignment(self._round, position)
            if before is not None and position <= before.reached:
                one.leader_epoch = before.leader_epoch
            self._changed.add(tp)

    def unassign(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            if self._wanted.pop(tp, None) is not None:
                self._changed.add(tp)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Notes that these partitions are not to be fetched until they are assigned again."""
        for tp in tps:
            wanted = self._wanted.get(tp)
            if wanted is not None:
                wanted.paused = True
                self._changed.add(tp)

    def round(self, tp: TopicPartition) -> int:
        """Returns the number of the partition's current assignment, even a refused one; 0 if there is none."""
        wanted = self._wanted.get(tp)
        return 0 if wanted is None else wanted.round

    def fetching(self, tp: TopicPartition) -> bool:
        """Returns whether the partition has a current assignment that has not been stopped."""
        wanted = self._wanted.get(tp)
        return wanted is not None and wanted.state is not State.STOPPED

    def received_up_to(self, tp: TopicPartition) -> int:
        """Returns the offset after the last message of the current assignment; -1 if none has come."""
        wanted = self._wanted.get(tp)
        return wanted.reached if wanted is not None and wanted.has_received else -1

    def current(self, tp: TopicPartition, round_: int) -> bool:
        """Returns whether `round_` is the round of the partition's current assignment."""
        return self.round(tp) == round_ != 0

    def out_of_range(self) -> list[OutOfRange]:
        """Returns the positions of current assignments that the cluster has refused since the last call."""
        found: list[OutOfRange] = []
        while self._refused:
            tp, refused = self._refused.popitem()
            if self.current(tp, refused.round):
                found.append(refused)
        return found

    def broken(self) -> list[Broken]:
        """Returns the current assignments that have failed for good since the last call."""
        found: list[Broken] = []
        while self._broken:
            tp, broken = self._broken.popitem()
            if self.current(tp, broken.round):
                found.append(broken)
        return found

    # --- called by the thread that holds the client

    def pending(self, now_ms: int) -> bool:
        """Returns whether `take` would return a change."""
        if not self._failed:
            return bool(self._changed)
        return bool(self._changed) or any(self._due(one, now_ms) for one in list(self._failed.values()))

    def due_ms(self, tp: TopicPartition) -> int | None:
        """Returns when a failed fetch of `tp` will be retried, on the clock of `now_ms`; None if no retry is due."""
        one = self._failed.get(tp)
        return one.tried_ms if one is not None and one.state is State.WAITING else None

    def _due(self, one: Assignment, now_ms: int) -> bool:
        return one.state is State.WAITING and now_ms >= one.tried_ms

    def take(self, now_ms: int) -> Changes:
        """Returns the changes that make the client fetch what is wanted. The caller must pass them to the client."""
        changes = Changes()
        self._compare(changes)  # before a retry, so that the failed fetch ends first
        for tp, one in list(self._failed.items()):
            if self._wanted.get(tp) is not one:
                del self._failed[tp]
            elif self._due(one, now_ms):
                one.state, one.tried_ms = State.FETCHING, now_ms
                self._changed.add(tp)
        self._compare(changes)
        return changes

    def _compare(self, changes: Changes) -> None:
        while self._changed:
            tp = self._changed.pop()
            wanted, fetched = self._wanted.get(tp), self.fetched.get(tp)
            target = wanted if wanted is not None and wanted.state is State.FETCHING else None
            if fetched is not target:
                if fetched is not None:
                    self._end(tp, fetched, changes)
                if target is not None:
                    self.fetched[tp] = target
                    changes.assign[tp] = target.reached
                    if target.leader_epoch >= 0:
                        changes.leader_epochs[tp] = target.leader_epoch
            if target is not None and target.paused and not target.paused_in_client:
                target.paused_in_client = True
                changes.pause.add(tp)

    def _end(self, tp: TopicPartition, fetched: Assignment, changes: Changes) -> None:
        del self.fetched[tp]
        if tp in changes.assign:  # changed again before the client heard of it
            del changes.assign[tp]
            changes.leader_epochs.pop(tp, None)
            changes.pause.discard(tp)
        else:
            changes.unassign.append(tp)
            if fetched.paused_in_client:
                changes.resume.append(tp)
        fetched.paused_in_client = False

    def unassigned_by_client(self, tps: Iterable[TopicPartition]) -> None:
        """Notes that the client fetches none of these partitions any more. The next `take` assigns the wanted ones."""
        for tp in tps:
            fetched = self.fetched.pop(tp, None)
            if fetched is not None:
                fetched.paused_in_client = False
            self._changed.add(tp)

    def forget_leader_epochs(self) -> None:
        """Notes that topics were created again, whose leader epochs begin anew."""
        for one in list(self._wanted.values()):
            one.leader_epoch = -1

    def received(self, tp: TopicPartition, to: int, leader_epoch: int | None = None) -> int:
        """Notes that messages below `to` have come, the last one of `leader_epoch` (None: unknown). Returns the round
        that fetched them, 0 if none does."""
        fetched = self.fetched.get(tp)
        if fetched is None:
            return 0
        if fetched.state is State.FETCHING:
            fetched.leader_epoch = -1 if leader_epoch is None else leader_epoch
            fetched.has_received, fetched.reached, fetched.failures = True, to, 0
        return fetched.round

    def is_quiet(self, tp: TopicPartition, end: int) -> bool:
        """Returns whether a fetched partition lacks offsets below `end` and none has come since the last call. They may
        hold no messages; the client knows (`skipped`)."""
        fetched = self.fetched.get(tp)
        if fetched is None or fetched.state is not State.FETCHING or fetched.paused_in_client or fetched.reached >= end:
            return False
        before, fetched.reached_before = fetched.reached_before, fetched.reached
        return before == fetched.reached

    def skipped(self, tp: TopicPartition, to: int) -> int:
        """Notes that the client has passed offsets below `to` without a message. Returns the round, 0 if none fetches
        or has reached `to`."""
        fetched = self.fetched.get(tp)
        if fetched is None or fetched.state is not State.FETCHING or to <= fetched.reached:
            return 0
        fetched.leader_epoch, fetched.reached = -1, to  # what was passed may be of a later epoch
        return fetched.round

    def drained(self, now_ms: int) -> None:
        """Notes that the client has no more events: a retry without failure for FORGET_FAILURES_MS counts as
        successful."""
        for tp, one in list(self._failed.items()):
            if one.state is State.FETCHING and (not one.failures or now_ms - one.tried_ms >= FORGET_FAILURES_MS):
                one.failures = 0
                del self._failed[tp]

    def refuse(self, tp: TopicPartition, position: int, truncated: str, now_ms: int) -> None:
        """Handles a refused fetch position (-1: not named). It may be an earlier assignment's, so if it is not the
        current one's next offset the fetch is retried, and refused again if that is out of range too. `truncated`: the
        client's text if the log lost its newest records; that stops the assignment once a message has come."""
        fetched = self._current_fetch(tp)
        if fetched is None:
            return
        if position < 0:
            position = fetched.reached
        if position != fetched.reached and not (truncated and fetched.has_received):
            self._fail(tp, fetched, f"position {position} was refused, which is not the one being fetched", now_ms)
        else:
            fetched.state = State.STOPPED
            self._refused[tp] = OutOfRange(tp, position, fetched.round, truncated)
            self._changed.add(tp)

    def fail(self, tp: TopicPartition, reason: str, now_ms: int) -> None:
        """Retries a failed fetch from the same offset; after FAILURES_MAX in a row it stops, and `broken` reports
        it."""
        fetched = self._current_fetch(tp)
        if fetched is not None:
            self._fail(tp, fetched, reason, now_ms)

    def _fail(self, tp: TopicPartition, fetched: Assignment, reason: str, now_ms: int) -> None:
        fetched.failures += 1
        self._changed.add(tp)
        if fetched.failures >= FAILURES_MAX:
            fetched.state = State.STOPPED
            self._failed.pop(tp, None)
            self._broken[tp] = Broken(tp, reason, fetched.round, False)
        else:
            fetched.state = State.WAITING
            fetched.tried_ms = now_ms + min(RETRY_MS << (fetched.failures - 1), RETRY_MS_MAX)
            self._failed[tp] = fetched

    def refuse_permanently(self, tp: TopicPartition, reason: str) -> None:
        """Stops the assignment because the cluster will not serve the partition, so that no retry would help."""
        fetched = self._current_fetch(tp)
        if fetched is not None:
            fetched.state = State.STOPPED
            self._broken[tp] = Broken(tp, reason, fetched.round, True)
            self._changed.add(tp)

    def _current_fetch(self, tp: TopicPartition) -> Assignment | None:
        """Returns the assignment for which an error came; None if the partition is not fetched: the error is an ended
        one's."""
        fetched = self.fetched.get(tp)
        if fetched is None or fetched is not self._wanted.get(tp) or fetched.state is not State.FETCHING:
            return None
        return fetched
