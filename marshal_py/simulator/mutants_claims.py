"""Planted bugs in what an owner gives back (PROTOCOL.md F6.3, T16), reports above its position (D1) and must own (A11).

In names, R stands for grants that a Release gives back, and P for progress. mutants.py alone calls this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from marshal_py.protocol import claim_records, progress, releases, transitions
from marshal_py.protocol.assignment import covering
from marshal_py.protocol.claim import Claim, ClaimPhase
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce
from marshal_py.protocol.identity import NONE
from marshal_py.protocol.offset_run import OffsetRun
from marshal_py.protocol.progress import Range
from marshal_py.protocol.record_handler import RecordHandler
from marshal_py.protocol.records import ReleasingPartition, SeekingPartition
from marshal_py.protocol.world import Partition
from marshal_py.simulator.oracle import Partition as OraclePartition

Patch = tuple[Any, str, Any]


def _released(change: Any) -> list[Patch]:
    def release(session: int, partition: Partition, claim: Claim) -> ReleasingPartition | SeekingPartition:
        record = claim_records.release(session, partition, claim)
        return change(record, partition, claim) if isinstance(claim.tracker, AtMostOnce) else record

    return [(releases, "release", release)]


def x30() -> list[Patch]:
    return [(covering, "owns", lambda group, cover, session: True)]


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
        return replace(record, give=max(partition.began, record.give - claim.tracker.in_flight))

    return _released(running)


def r3() -> list[Patch]:
    receive = RecordHandler.receive
    first: dict[int, tuple[Claim, int]] = {}

    def received(self: RecordHandler, verdict: Any, now: Any) -> None:
        receive(self, verdict, now)
        record = verdict.record
        if isinstance(record, ReleasingPartition) and record.session == self.member.session and not verdict.accepted:
            claim = self.member.claims.get(record.epoch)
            if claim is not None and isinstance(claim.tracker, AtMostOnce):
                first.setdefault(id(claim), (claim, claim.released_position))
                claim.phase, claim.sealed = ClaimPhase.OPEN, False

    def fixed(record: ReleasingPartition, partition: Partition, claim: Claim) -> ReleasingPartition:
        kept = first.get(id(claim))
        return record if kept is None else replace(record, give=min(record.give, kept[1]))

    return [(RecordHandler, "receive", received), *_released(fixed)]


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


# --- of the fold, and the same in the oracle


def p3(_rationalizer: Any) -> list[Patch]:
    begin = transitions.begin_generation

    def keeps(group: Any, partition: Partition) -> None:
        known = partition.progress
        begin(group, partition)
        partition.progress = known

    return [(transitions, "begin_generation", keeps)]


def p3_in_the_oracle() -> list[Patch]:
    new_generation = OraclePartition.new_generation

    def keeps(self: OraclePartition) -> None:
        known = self.progress
        new_generation(self)
        self.progress = known

    return [(OraclePartition, "new_generation", keeps)]
