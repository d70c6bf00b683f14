"""The log of a busy group, as raw records: members that heartbeat, a crash and its take-over, a pause with a move."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    ClaimingPartition,
    ClaimState,
    Evict,
    Heartbeat,
    Join,
    Move,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Topology,
)
from marshal_py.transport.ports import LogRecord
from tests.support.differential_log import INCARNATION, genesis
from tests.support.dumps import BEGIN_MS

GROUP = "billing"
TOPIC = "orders"
INTERVAL_MS = 2_000
MEMBERS = 12


class BusyGroup:
    """Writes log 0 of a topic with one partition; `records` has what is written so far."""

    def __init__(self, partitions: int, members: int = MEMBERS, seed: int = 1) -> None:
        self.world = World()
        self.records: list[LogRecord] = []
        self.now_ms = BEGIN_MS
        self._rng = Random(seed)
        self._sequence: dict[int, int] = {}
        self._append(genesis(1))
        for number in range(members):
            self.join(f"worker-{number}.example.org-{number * 77}")
        self.tell(Topology(TOPIC, partitions, -1))
        self.claim_free()

    @property
    def sessions(self) -> list[int]:
        return sorted(self.world.groups[GROUP].sessions)

    def tell(self, record: Record, after_ms: int = 1) -> int:
        self.now_ms += after_ms
        return self._append(codec.encode(record, GROUP, INCARNATION))

    def _append(self, value: bytes) -> int:
        offset = self.world.next_offset
        verdict = apply(self.world, offset, value)
        assert verdict.accepted, verdict
        self.records.append(LogRecord(0, offset, value, self.now_ms))
        return offset

    def join(self, client: str) -> None:
        instance = self._rng.randbytes(16)
        self.tell(Join(client, instance, AT_LEAST_ONCE, INTERVAL_MS, (TOPIC,)), 100)

    def claim_free(self) -> None:
        """Each partition without an owner gets one: those with the fewest claims first."""
        group = self.world.groups[GROUP]
        for number in range(group.topics[TOPIC].count):
            part = group.partitions.get(TopicPartition(TOPIC, number))
            if part is None or part.owner < 0:
                session = min(group.sessions.values(), key=lambda one: (len(one.epochs), one.id)).id
                version = -1 if part is None else part.version
                start = 0 if part is None or part.position < 0 else -1
                self.tell(ClaimingPartition(session, TOPIC, number, observed=version, start=start))

    def heartbeats(self, count: int) -> None:
        """Members heartbeat in turn, each with the positions that moved."""
        sessions = self.sessions
        for number in range(count):
            session = sessions[number % len(sessions)]
            self._heartbeat(session, INTERVAL_MS // 3 // len(sessions))

    def _heartbeat(self, session: int, after_ms: int) -> None:
        group, rng = self.world.groups[GROUP], self._rng
        epochs = sorted(group.sessions[session].epochs)
        moved = rng.sample(epochs, min(len(epochs), 4))
        claims = tuple(
            ClaimState(epoch, group.claims[epoch].position + rng.randrange(1, 60), rng.randrange(0, 400), 1)
            for epoch in sorted(moved)
        )
        sequence = self._sequence[session] = self._sequence.get(session, 0) + 1
        self.tell(Heartbeat(session, sequence, claims), after_ms)

    def crash(self) -> int:
        """The oldest member dies silently; another one evicts it; its partitions get owners. Returns its session."""
        dead, *alive = self.sessions
        observed = self.world.groups[GROUP].sessions[dead].extended
        for _ in range(3):
            for session in alive:
                self._heartbeat(session, INTERVAL_MS // len(alive))
        self.tell(Evict(dead, observed, 2 * INTERVAL_MS + 137, "worker-1"))
        self.now_ms += 40
        self.claim_free()
        return dead

    def rewind(self, by: int = 100) -> None:
        """An admin pauses the group, moves every position back, and resumes."""
        group = self.world.groups[GROUP]
        change = group.pause_change
        token = self.tell(ReleaseGroup(change, change, 60_000, reason="bug 17 fixed", by="anna@ops"))
        for epoch in sorted(group.claims):
            part = group.claims[epoch]
            self.tell(ReleasingPartition(part.owner, epoch, part.position), 5)
        moves = tuple(
            Move(tp.topic, tp.partition, part.version, max(0, part.position - by))
            for tp, part in sorted(group.partitions.items())
        )
        self.tell(SetPosition(token, moves, True, "anna@ops"), 2_000)
        self.claim_free()


def busy_group(records: int, partitions: int = 100) -> Iterator[LogRecord]:
    """Yields the log of a group with all of it, of at least so many records."""
    group = BusyGroup(partitions)
    each = max(0, records - 6 * partitions) // 3
    group.heartbeats(each)
    group.crash()
    group.heartbeats(each)
    group.rewind()
    group.heartbeats(max(0, records - len(group.records)))
    yield from group.records
