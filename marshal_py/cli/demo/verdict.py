"""Adds up the journals of a run of the demo, and judges them by the topic's end offsets. Pure; asks nothing.

A message is identified by (partition, offset). When the embedded broker writes an order twice because its producer
retried, these are two messages, and both must be handled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from msgspec import Struct

from marshal_py.cli.demo.children import Claimed, Delivered, Entry, Lost, Written

AT_MOST_ONCE = "at_most_once"


class Handling(NamedTuple):
    """One delivery: when, to which worker, which offset."""

    at: float
    worker: str
    offset: int


class Ownership(NamedTuple):
    """A claim that a worker has read as accepted. A later claim has a greater epoch."""

    at: float
    epoch: int
    worker: str


class Totals:
    """All journals added up. `handled` counts the deliveries of each message; `handlings` lists the same deliveries."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.acknowledged: set[tuple[int, int]] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.handlings: dict[int, list[Handling]] = defaultdict(list)
        self.claims: dict[int, list[Ownership]] = defaultdict(list)
        self.owners: dict[int, Ownership] = {}
        self.next_offset: dict[int, int] = defaultdict(int)  # one after the highest offset that was handled
        self.end: dict[int, int] = defaultdict(int)  # one after the highest offset that was acknowledged
        self.unsound: int = 0

    def add(self, worker: str, entry: Entry) -> None:
        match entry:
            case Delivered(at=at, partition=partition, offset=offset):
                self.handled[partition, offset] += 1
                self.handlings[partition].append(Handling(at, worker, offset))
                self.next_offset[partition] = max(self.next_offset[partition], offset + 1)
                self.unsound += not entry.checksum_fits
            case Written(partition=partition, offset=offset):
                self.acknowledged.add((partition, offset))
                self.end[partition] = max(self.end[partition], offset + 1)
            case Claimed(at=at, partition=partition, epoch=epoch):
                claim = Ownership(at, epoch, worker)
                self.claims[partition].append(claim)
                if partition not in self.owners or self.owners[partition].epoch < epoch:
                    self.owners[partition] = claim
            case Lost(partition=partition):
                if partition in self.owners and self.owners[partition].worker == worker:
                    del self.owners[partition]
            case _:
                pass

    def owner_at(self, partition: int, at: float) -> str:
        """Returns the worker with the newest claim at that time; "" if nobody had claimed the partition."""
        claims = [claim for claim in self.claims[partition] if claim.at <= at]
        return max(claims, key=lambda claim: claim.epoch).worker if claims else ""

    def __str__(self) -> str:
        shares = Counter(claim.worker for claim in self.owners.values())
        owners = " ".join(f"{worker}:{count}" for worker, count in sorted(shares.items()))
        lag = sum(max(0, self.end[number] - self.next_offset[number]) for number in range(self.partitions))
        return f"produced {len(self.acknowledged)}  handled {len(self.handled)}  lag {lag}  {owners}"


class Milestones(Struct, kw_only=True):
    """What was done to the group, and when, in seconds of the monotonic clock."""

    killed: str = ""
    killed_at: float = 0.0
    joiner: str = ""
    joiner_started_at: float = 0.0
    production_ended_at: float = 0.0


class Judgement(Struct, frozen=True, kw_only=True):
    """The output of `marshal demo --json`. A duration is None if its end never came."""

    produced: int
    handled: int
    lost: int
    redelivered: int
    doubled: int
    dropped: int
    failover_s: float | None
    join_gap_s: float | None
    moved_on_join: int
    delivery: str
    seconds: float
    ok: bool


def judge(totals: Totals, ends: dict[int, int], milestones: Milestones, delivery: str, seconds: float) -> Judgement:
    """Returns the judgement on a run. `ends`: end offset of each partition after the producer has stopped. The topic
    was empty before the run, so every offset below an end is a message of the run."""
    produced = {(partition, offset) for partition, end in ends.items() for offset in range(end)} | totals.acknowledged
    handled = produced & totals.handled.keys()
    missing = len(produced) - len(handled)
    repeats = sum(count - 1 for count in totals.handled.values())
    foreign = len(totals.handled.keys() - produced)  # delivered but never written: as bad as a wrong checksum
    once = delivery == AT_MOST_ONCE
    lost, doubled = (0, repeats) if once else (missing, 0)
    return Judgement(
        produced=len(produced),
        handled=len(handled),
        lost=lost,
        redelivered=0 if once else repeats,
        doubled=doubled,
        dropped=missing if once else 0,
        failover_s=_failover_s(totals, milestones),
        join_gap_s=_join_gap_s(totals, milestones),
        moved_on_join=_moved_on_join(totals, milestones),
        delivery=delivery,
        seconds=round(seconds, 1),
        ok=not (lost or doubled or foreign or totals.unsound),
    )


def _failover_s(totals: Totals, milestones: Milestones) -> float | None:
    """Returns the longest time that a partition was without deliveries because its consumer was killed. It lasts from
    the killed consumer's last delivery to its successor's first. None if there was no such partition."""
    silences = []
    for handlings in totals.handlings.values():
        before = [h for h in handlings if h.at <= milestones.killed_at]
        after = [h for h in handlings if h.at > milestones.killed_at and h.worker != milestones.killed]
        if not before or not after:
            continue
        last = max(before, key=lambda h: h.at)
        if last.worker == milestones.killed:
            silences.append(min(h.at for h in after) - last.at)
    return round(max(silences), 2) if silences else None


def _join_gap_s(totals: Totals, milestones: Milestones) -> float | None:
    """Returns the time from the start of the joining process, interpreter included, to its first delivery. None if it
    got no message."""
    mine = [h.at for handlings in totals.handlings.values() for h in handlings if h.worker == milestones.joiner]
    return round(min(mine) - milestones.joiner_started_at, 2) if mine else None


def _moved_on_join(totals: Totals, milestones: Milestones) -> int:
    """Returns how many partitions moved away from live consumers between the join and the end of production. Partitions
    of the killed consumer do not count, because they had to move."""
    moved = 0
    for partition in range(totals.partitions):
        was = totals.owner_at(partition, milestones.joiner_started_at)
        now = totals.owner_at(partition, milestones.production_ended_at)
        moved += was not in ("", milestones.killed, now)
    return moved


def sentence(result: Judgement, unsound: int) -> str:
    """Returns the last line of the demo, for people."""
    promise = "no message delivered twice" if result.delivery == AT_MOST_ONCE else "no message lost"
    parts = [f"{result.produced} produced", f"{result.handled} handled"]
    if result.delivery == AT_MOST_ONCE:
        parts += [f"{result.doubled} doubled", f"{result.dropped} dropped"]
    else:
        parts += [f"{result.lost} lost", f"{result.redelivered} redelivered"]
    if unsound:
        parts.append(f"{unsound} with a wrong checksum")
    if result.failover_s is not None:
        parts.append(f"take-over {result.failover_s:.1f} s after the last message of the killed consumer")
    if result.join_gap_s is not None:
        parts.append(f"the fourth consumer worked {result.join_gap_s:.1f} s after its start")
    parts.append(f"{result.moved_on_join} partitions moved to it")
    return f"{'Kept' if result.ok else 'BROKEN'}: {promise}. " + ", ".join(parts) + "."
