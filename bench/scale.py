"""What do 10,000 partitions and 1,000 members cost one consumer: its target, its ticks, each record that it reads?

One process, no broker, virtual time. One Member (or two) reads a log in memory; the other sessions are only records
that a script writes, with a heartbeat every third of the interval. CPU time, without that of the script and the fold.

- *target*: computing once which member should own which partition.
- *idle tick*: a tick while nothing changes. In the second row most partitions are free and not this member's to claim.
- *churn*: sessions leave and join one after the other, each partition handed over by a release and a claim, one record
  at a time; the clock advances by the CPU time that the member needs. *late* is the longest delay of the member's
  heartbeat, which is due every third of the interval.
- *1 -> 2 members*: a second member joins a group whose only member owns all partitions, until the last hand-over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any, Final

from bench.environment import BenchEnvironment, Result, spread
from bench.fold import GROUP, INCARNATION
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.policies import DEFAULT_POLICY
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions, Ready
from marshal_py.protocol.policy import OPEN, candidate_order
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import (
    ClaimingPartition,
    Genesis,
    Heartbeat,
    Join,
    Leave,
    Record,
    ReleasingPartition,
    Topology,
)

PARTITIONS: Final = 10_000
PARTITIONS_TINY: Final = 60
MEMBERS: Final = 1_000
MEMBERS_TINY: Final = 6
ROUNDS: Final = 5  # of a target
CHANGES: Final = 20  # sessions that leave, and as many that join
IDLE_INTERVALS: Final = 5
INTERVAL_MS: Final = 2_000
STEP_MS: Final = 1
REST_MS, REST_TICKS = 500, 10  # less than an interval, so that no session is silent for too long
READ_AT_ONCE: Final = 2_000  # records between two ticks, as the client folds them
TURNS_MAX: Final = 100_000
TOPIC: Final = "orders"


class Fleet:
    """A log, the world that it folds to, the measured members, and scripted sessions that are only records."""

    def __init__(self, partitions: int, sessions: int, cpu_s: Callable[[], float] = time.process_time) -> None:
        """`cpu_s`: the CPU time by which the members' ticks make time pass."""
        self.random = Random(1)
        self.cpu_s = cpu_s
        self.values: list[bytes] = []  # the log
        self.now_ms = 1_000_000.0
        self.world = World()
        self.members: list[Member] = []
        self.took_s: dict[str, list[float]] = {"tick": [], "read": []}
        self.sent: list[Record] = []
        self.beats_ms: list[float] = []
        self.beat = 0
        self.append(Genesis(INCARNATION, 1, HASH_NAME, rationalizer.PROTOCOL_VERSION), "")
        self.scripted = [self.join(number) for number in range(sessions)]
        self.append(Topology(TOPIC, partitions, -1))

    @property
    def group(self) -> Group:
        return self.world.groups[GROUP]

    def now(self) -> Instant:
        ms = int(self.now_ms)
        return Instant(ms, ms, ms)

    def append(self, record: Record, group: str = GROUP) -> int:
        value, offset = codec.encode(record, group, INCARNATION), self.world.next_offset
        self.values.append(value)
        verdict = rationalizer.apply(self.world, offset, value)
        for member in self.members:
            began = self.cpu_s()
            member.receive(verdict, self.now())
            self.took_s["read"].append(self.cpu_s() - began)
        return offset

    def join(self, number: int) -> int:
        return self.append(Join(f"client-{number}", self.random.randbytes(16), 1, INTERVAL_MS, (TOPIC,)))

    def member(self, partitions: int) -> Member:
        """A measured member that has joined."""
        options = MemberOptions(client_id=f"real-{len(self.members)}", topics=(TOPIC,), interval_ms=INTERVAL_MS)
        member = Member(self.world, GROUP, options, self.random.randbytes)
        member.learn_topic(TOPIC, partitions)
        self.members.append(member)
        self.turn(member)
        assert member.session != NONE
        return member

    def turn(self, member: Member) -> Ready:
        """One tick of a member. Its records are in the log at once, and its requests are answered."""
        began = self.cpu_s()
        ready = member.tick(self.now())
        took_s = self.cpu_s() - began
        self.took_s["tick"].append(took_s)
        self.now_ms += took_s * 1000
        assert not ready.ended, ready.error
        if any(type(record) is Heartbeat for record in ready.send):
            self.beats_ms.append(self.now_ms)
        for at, record in enumerate(ready.send, 1):
            self.append(record)
            if at % READ_AT_ONCE == 0:
                self.now_ms += STEP_MS
        for tp, _ in ready.start_prefetch:
            member.prefetched(tp)
        for want in ready.resolve:
            member.start_resolved(want.tp, 0, 0, self.now())
        return ready

    def heartbeats(self) -> None:
        """Writes a heartbeat of every scripted session."""
        self.beat += 1
        for session in self.scripted:
            self.append(Heartbeat(session, self.beat))

    def hand_out(self) -> None:
        """Each scripted session claims what the target gives it."""
        for tp, session in target(self.group).items():
            known = self.group.partitions.get(tp)
            if session in self.scripted and (known is None or known.owner == NONE):
                self.append(ClaimingPartition(session, *tp, NONE if known is None else known.version, 0))

    def rest(self) -> None:
        """Ticks the members until they have claimed their partitions and have nothing left to do."""
        for _ in range(REST_TICKS):
            self.now_ms += REST_MS // REST_TICKS
            for member in self.members:
                self.turn(member)


def target(group: Group) -> dict[TopicPartition, int]:
    return dict(OPEN[DEFAULT_POLICY](group, candidate_order(group, set())))


def ms(seconds: list[float]) -> Any:
    return spread([each * 1000 for each in seconds])


def _targets(partitions: int, members: int, rounds: int) -> list[list[Any]]:
    rows: list[list[Any]] = []
    cases: list[tuple[str, int, int]] = [
        (f"{members:,} members, nobody owns anything", members, 0),
        (f"{members:,} members, each owns its part", members, members),
        (f"1 -> {members:,} members", members, 1),
        ("1 -> 2 members", 2, 1),
    ]
    for name, sessions, owners in cases:
        fleet = Fleet(partitions, sessions)
        share = candidate_order(fleet.group, set())[:owners]
        for number in range(partitions if owners else 0):
            fleet.append(ClaimingPartition(share[number * owners // partitions], TOPIC, number, NONE, 0))
        took: list[float] = []
        for _ in range(rounds):
            began = time.process_time()
            found = target(fleet.group)
            took.append(time.process_time() - began)
        assert len(found) == partitions
        rows.append([f"target, {name}", ms(took), ms(took)["high"], 50.0, len(found)])
    return rows


def _idle(partitions: int, members: int) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for name, owned in (("at rest", True), ("all but its own are free", False)):
        fleet = Fleet(partitions, members - 1)
        member = fleet.member(partitions)
        fleet.rest()
        if owned:
            fleet.hand_out()
        fleet.rest()
        fleet.took_s["tick"].clear()
        third_ms = INTERVAL_MS // 3
        for _ in range(3 * IDLE_INTERVALS):
            fleet.heartbeats()
            end_ms = fleet.now_ms + third_ms
            while fleet.now_ms < end_ms:
                fleet.now_ms = min(end_ms, max(float(member.deadline_ms), fleet.now_ms + STEP_MS))
                fleet.turn(member)
        took = ms(fleet.took_s["tick"])
        rows.append([f"idle tick, {name}", took, took["high"], 1.0, len(fleet.took_s["tick"])])
    return rows


def _churn(partitions: int, members: int, changes: int) -> list[list[Any]]:
    fleet = Fleet(partitions, members - 1)
    member = fleet.member(partitions)
    fleet.rest()
    fleet.hand_out()
    fleet.rest()
    for kept in fleet.took_s.values():
        kept.clear()
    fleet.beats_ms.clear()
    shape, beat_due_ms = fleet.group.shape, fleet.now_ms

    def write(record: Record) -> None:
        nonlocal beat_due_ms
        fleet.append(record)
        fleet.now_ms += STEP_MS + fleet.took_s["read"][-1] * 1000
        if member.tick_requested or fleet.now_ms >= member.deadline_ms:
            fleet.turn(member)
        if fleet.now_ms >= beat_due_ms:
            beat_due_ms = fleet.now_ms + INTERVAL_MS // 3
            fleet.heartbeats()

    for change in range(changes):
        leaver = fleet.scripted.pop(change * 7 % len(fleet.scripted))
        _leave(fleet, leaver, write)
        write(Join(f"new-{change}", fleet.random.randbytes(16), 1, INTERVAL_MS, (TOPIC,)))
        newcomer = max(fleet.group.sessions)
        fleet.scripted.append(newcomer)
        for tp, session in target(fleet.group).items():
            known = fleet.group.partitions[tp]
            if session == newcomer and known.owner in fleet.scripted:
                write(ReleasingPartition(known.owner, known.epoch, known.position, newcomer, "hand-over"))
                write(ClaimingPartition(newcomer, *tp, known.version))
    changed = fleet.group.shape - shape
    spent_s = sum(fleet.took_s["tick"]) + sum(fleet.took_s["read"])
    gaps = [after - before for before, after in pairwise(fleet.beats_ms)]
    late_ms = max(0.0, max(gaps, default=0.0) - INTERVAL_MS // 3)
    took = ms(fleet.took_s["tick"])
    return [
        ["churn, per change of shape", spent_s * 1000 / changed, None, 1.0, changed],
        ["churn, tick", took, took["high"], 100.0, len(fleet.took_s["tick"])],
        ["churn, heartbeat late", late_ms, None, float(INTERVAL_MS // 3), changed],
    ]


def _leave(fleet: Fleet, leaver: int, write: Callable[[Record], None]) -> None:
    """The leaver releases each partition for its owner in the target without it, and leaves; the new owners claim."""
    group = fleet.group
    after = OPEN[DEFAULT_POLICY](group, candidate_order(group, {leaver}))
    mine = [group.claims[epoch] for epoch in sorted(group.sessions[leaver].epochs)]
    for known in mine:
        write(ReleasingPartition(leaver, known.epoch, known.position, after[known.tp], "stopped"))
    write(Leave(leaver))
    for known in mine:
        if after[known.tp] in fleet.scripted:
            write(ClaimingPartition(after[known.tp], *known.tp, known.version))


def _second(partitions: int) -> list[list[Any]]:
    fleet = Fleet(partitions, 0)
    first = fleet.member(partitions)
    _until(fleet, lambda: len(first.claims) == partitions)
    alone = ms(fleet.took_s["tick"])
    fleet.took_s["tick"].clear()
    fleet.took_s["read"].clear()
    second = fleet.member(partitions)
    half = partitions // 2
    _until(fleet, lambda: len(first.claims) == len(second.claims) == half)
    took = ms(fleet.took_s["tick"])
    reads = sum(fleet.took_s["read"]) * 1000 / len(fleet.took_s["read"])
    return [
        ["the first of all members, tick", alone, alone["high"], 100.0, partitions],
        ["1 -> 2 members, tick", took, took["high"], 100.0, len(fleet.took_s["tick"])],
        ["1 -> 2 members, reading a record", reads, max(fleet.took_s["read"]) * 1000, None, len(fleet.took_s["read"])],
    ]


def _until(fleet: Fleet, done: Callable[[], bool]) -> None:
    for _ in range(TURNS_MAX):
        if done():
            return
        fleet.now_ms += STEP_MS
        for member in fleet.members:
            if member.tick_requested or fleet.now_ms >= member.deadline_ms:
                fleet.turn(member)
    raise TimeoutError("the members did not come to rest")


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    partitions, members = (PARTITIONS_TINY, MEMBERS_TINY) if tiny else (PARTITIONS, MEMBERS)
    rows: list[list[Any]] = []
    for part in (
        lambda: _targets(partitions, members, 1 if tiny else ROUNDS),
        lambda: _idle(partitions, members),
        lambda: _churn(partitions, members, 2 if tiny else CHANGES),
        lambda: _second(partitions),
    ):
        rows += part()
        environment.say(rows[-1][0])
    columns = ["what", "ms", "highest, ms", "goal, ms", "of how many"]
    return Result(
        "scale",
        columns,
        rows,
        [
            "one process, CPU time, virtual time; the highest includes Python's pauses",
            f"churn: a record each {STEP_MS} ms; the member looks at the target ten times per interval at most",
        ],
    )
