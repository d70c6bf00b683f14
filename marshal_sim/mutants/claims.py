"""Planted bugs in what an owner asks for (PROTOCOL.md D2), gives back (F6.3, T16, D16, A12), reports (D1, T11) and must
own (A11).

In names, R stands for grants that a Release gives back, L for what the log says of lost grants, P for progress and O
for overflow. mutants.py alone calls this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.protocol import claims as claim_records
from marshal_py.protocol import policy
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member import rebalance
from marshal_py.protocol.member.candidacy import Overflow
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.rebalance import FallingBehind
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE, ReleasingPartition, SeekingPartition

Patch = tuple[Any, str, Any]
RELEASE: Final = 6  # the record's type
BUSY: Final[dict[str, Any]] = {"rate": 100, "intervals": 2}  # messages every 20 ms, for a short time
OVERFLOW: Final[dict[str, Any]] = {"policy": "overflow", "intervals": 12}  # few intervals with faults


def _released(change: Any) -> list[Patch]:
    def release(session: int, partition: Partition, claim: Claim) -> ReleasingPartition | SeekingPartition:
        record = claim_records.release(session, partition, claim)
        return change(record, partition, claim) if isinstance(claim.tracker, AtMostOnce) else record

    return [(rebalance, "release", release)]


def x30() -> list[Patch]:
    return [(policy, "owns", lambda group, cover, session: True)]


def o1() -> list[Patch]:
    return [(policy, "served", lambda group, order, helping: list(order))]


def o2() -> list[Patch]:
    judge = Overflow._judge

    def stays_met(self: Overflow, group: Group) -> None:
        met = self.met
        judge(self, group)
        self.met |= met

    return [(Overflow, "_judge", stays_met)]


def d16a() -> list[Patch]:
    act = FallingBehind.act

    def keeps_windows(self: FallingBehind, group: Any, now: Any) -> None:
        begun = dict(self._looks)
        act(self, group, now)
        if not self._looks:
            self._looks = begun

    return [(FallingBehind, "act", keeps_windows)]


def d16b() -> list[Patch]:
    return [(rebalance, "KEPT", 0)]


def d16c() -> list[Patch]:
    begin = FallingBehind.__init__

    def eager(self: FallingBehind, member: Any, candidacy: Any, back_off: Any) -> None:
        begin(self, member, candidacy, lambda tp, until_ms: None)

    return [(FallingBehind, "__init__", eager)]


def r1() -> list[Patch]:
    holes: dict[int, tuple[AtMostOnce, int]] = {}  # keeps the tracker: its id stays its own
    drop = AtMostOnce.drop

    def dropped(self: AtMostOnce) -> int:
        first = min((max(grant.start, self.delivered_to) for grant in self.grants), default=NONE)
        if first != NONE:
            holes.setdefault(id(self), (self, first))
        return drop(self)

    def lowest(record: ReleasingPartition, partition: Partition, claim: Claim) -> ReleasingPartition:
        hole = holes.get(id(claim.tracker))
        return record if hole is None else replace(record, give=min(record.give, hole[1]))

    return [(AtMostOnce, "drop", dropped), *_released(lowest)]


def r2() -> list[Patch]:
    def running(record: ReleasingPartition, partition: Partition, claim: Claim) -> ReleasingPartition:
        return replace(record, give=max(partition.floor, record.give - claim.tracker.in_flight))

    return _released(running)


def r3() -> list[Patch]:
    read = Member._read
    first: dict[int, tuple[Claim, int]] = {}

    def received(self: Member, verdict: Any, now: Any) -> None:
        read(self, verdict, now)
        record = verdict.record
        if isinstance(record, ReleasingPartition) and record.session == self.session and not verdict.accepted:
            claim = self.claims.get(record.epoch)
            if claim is not None and isinstance(claim.tracker, AtMostOnce):
                first.setdefault(id(claim), (claim, claim.released_position))
                claim.phase, claim.sealed = ClaimPhase.OPEN, False

    def fixed(record: ReleasingPartition, partition: Partition, claim: Claim) -> ReleasingPartition:
        kept = first.get(id(claim))
        return record if kept is None else replace(record, give=min(record.give, kept[1]))

    return [(Member, "_read", received), *_released(fixed)]


def d2() -> list[Patch]:
    return [(rebalance, "GRANT_PACE_MS", 0)]


def l1() -> list[Patch]:
    deliver = AtMostOnce.deliver

    def handled_at_once(self: AtMostOnce, offset: int, mono_ms: int, count: int = 1) -> None:
        deliver(self, offset, mono_ms, count)
        self.handled_to = self.handed_to

    return [(AtMostOnce, "deliver", handled_at_once)]


def l2() -> list[Patch]:
    def unsaid(self: AtMostOnce) -> None:
        self.in_flight, self.in_flight_since_ms = 0, None

    return [(AtMostOnce, "returned", unsaid)]


def p1() -> list[Patch]:
    position = AtLeastOnce.position

    def leaps(self: AtLeastOnce) -> int:
        return max([position(self), *(to for _, to in self._finished_before)])

    return [(AtLeastOnce, "position", leaps)]


def p2() -> list[Patch]:
    encode = progress.encode

    def merged(position: int, ranges: Iterable[Range]) -> bytes:
        finished = [known for known in ranges if not known.times]
        return encode(position, [Range(finished[0].start, finished[-1].to, 0)] if finished else ())

    return [(progress, "encode", merged)]


def p5() -> list[Patch]:
    return [(AtLeastOnce, "progress", lambda self: b"")]


def p6() -> list[Patch]:
    def admit(self: AtLeastOnce, offsets: Sequence[int]) -> tuple[Sequence[int], OffsetRun | None]:
        return offsets, self.add(offsets)

    return [(AtLeastOnce, "admit", admit)]


def p7() -> list[Patch]:
    runs = progress._runs
    return [(progress, "_runs", lambda first, bits: runs(first + 1, bits))]


# --- of the fold


def l3(_rationalizer: Any) -> list[Patch]:
    free = rationalizer.free

    def forgets(group: Group, partition: Partition, successor: int, floor: int = NONE) -> None:
        free(group, partition, successor)

    return [(rationalizer, "free", forgets)]


def r5(rationalizer: Any) -> list[Patch]:
    """Plants R5: a Release may give back what its owner has reported as handled, and owners do."""
    rules, release = list(rationalizer._RULES), rationalizer._RULES[RELEASE]

    def below_the_floor(group: Group, offset: int, record: ReleasingPartition, body: bytes) -> str:
        claim = group.claims.get(record.epoch)
        if claim is None or record.observed == NONE:
            return str(release(group, offset, record, body))
        floor, claim.floor = claim.floor, min(claim.floor, record.give)
        reason: str = release(group, offset, record, body)
        if reason:
            claim.floor = floor
        return reason

    rules[RELEASE] = below_the_floor
    return [(rationalizer, "_RULES", tuple(rules)), *_from_its_beginning()]


def _from_its_beginning() -> list[Patch]:
    def all_of_it(record: ReleasingPartition, partition: Partition, claim: Claim) -> ReleasingPartition:
        return replace(record, give=claim.tracker.began) if isinstance(claim.tracker, AtMostOnce) else record

    return _released(all_of_it)


def p3(_rationalizer: Any) -> list[Patch]:
    begin = rationalizer.begin_generation

    def keeps(group: Any, partition: Partition) -> None:
        known = partition.progress
        begin(group, partition)
        partition.progress = known

    return [(rationalizer, "begin_generation", keeps)]


# Name, what it does wrong, the bug, the faults that make it likely to show, and other options.
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...], dict[str, Any]], ...]] = (
    ("X30", "delivers without the pin", x30, ("arrive", "step_down"), {"policy": "pinned"}),
    ("O1", "takes part whatever its conditions", o1, ("arrive",), {"clients": 4, **OVERFLOW}),
    ("O2", "takes part for ever", o2, ("arrive",), {"clients": 6, **OVERFLOW}),
    (
        "R1",
        "gives back from the lowest message that was not handed over",
        r1,
        ("lag", "delay", "arrive", "leave"),
        {"mode": AT_MOST_ONCE},
    ),
    ("R2", "gives back what its handler has", r2, ("leave", "arrive", "slow_handler"), {"mode": AT_MOST_ONCE}),
    (
        "R3",
        "delivers again after a Release was rejected, and gives back as before",
        r3,
        ("admin", "arrive", "delay", "reorder"),
        {"mode": AT_MOST_ONCE},
    ),
    ("D2", "asks for grants without a pace", d2, ("arrive",), {"mode": AT_MOST_ONCE, "clients": 1, **BUSY}),
    (
        "L1",
        "a heartbeat reports as handled what a handler still has",
        l1,
        ("crash", "slow_handler"),
        {"mode": AT_MOST_ONCE},
    ),
    ("L2", "no heartbeat reports what is handled", l2, ("crash",), {"mode": AT_MOST_ONCE}),
    ("P1", "the position leaps over what is unfinished", p1, ("crash", "slow_handler"), {"mode": AT_LEAST_ONCE}),
    ("P2", "finished ranges are made one", p2, ("crash", "slow_handler"), {"mode": AT_LEAST_ONCE}),
    (
        "P5",
        "nothing is reported of what is finished above the position",
        p5,
        ("crash", "slow_handler"),
        {"mode": AT_LEAST_ONCE},
    ),
    ("P6", "a new owner skips nothing", p6, ("crash", "slow_handler"), {"mode": AT_LEAST_ONCE}),
    (
        "P7",
        "a bitmap is read one off",
        p7,
        ("lanes", "arrive", "leave", "crash"),
        {"mode": AT_LEAST_ONCE, "rate": 60, "intervals": 12},
    ),
    (
        "D16A",
        "who falls behind releases one partition after the other",
        d16a,
        ("behind", "slow_handler"),
        {"partitions": 6},
    ),
    (
        "D16B",
        "who falls behind releases its only partition",
        d16b,
        ("behind", "slow_handler", "arrive"),
        {"clients": 2},
    ),
    (
        "D16C",
        "who falls behind takes back what it released",
        d16c,
        ("behind", "slow_handler", "crash"),
        {"clients": 2, "partitions": 6},
    ),
)
