"""Adds up what the processes of the demo tell, and judges it by the topic's end offsets. Pure; asks nothing.

A message is identified by (partition, offset). When the embedded broker writes an order twice because its producer
retried, these are two messages, and both must be handled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from msgspec import Struct

from marshal_py.cli.demo.worker import Entry

AT_MOST_ONCE: Final = "at_most_once"
KILLED: Final = "consumer-2"
JOINER: Final = "consumer-4"


class Totals:
    """All that was told. `handled` counts the deliveries of each message, `deliveries` lists them with the worker."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.joined: set[str] = set()
        self.acknowledged: set[tuple[int, int]] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.deliveries: list[tuple[str, Entry]] = []
        self.claims: list[tuple[str, Entry]] = []
        self.owners: dict[int, tuple[int, str]] = {}  # by partition: the epoch of the newest claim, and whose it is
        self.next_offset: dict[int, int] = defaultdict(int)  # one after the highest offset that was handled
        self.end: dict[int, int] = defaultdict(int)  # one after the highest offset that was acknowledged

    def add(self, worker: str, entry: Entry) -> None:
        partition, number = entry.partition, entry.number
        match entry.kind:
            case "joined":
                self.joined.add(worker)
            case "delivered":
                self.handled[partition, number] += 1
                self.deliveries.append((worker, entry))
                self.next_offset[partition] = max(self.next_offset[partition], number + 1)
            case "written":
                self.acknowledged.add((partition, number))
                self.end[partition] = max(self.end[partition], number + 1)
            case "claimed":
                self.claims.append((worker, entry))
                self.owners[partition] = max(self.owners.get(partition, (number, worker)), (number, worker))
            case "lost" if self.owners.get(partition, (0, ""))[1] == worker:
                del self.owners[partition]

    def has_worked(self, worker: str) -> bool:
        return any(name == worker for name, _ in self.deliveries)

    def owner_at(self, partition: int, at: float) -> str:
        """Returns the worker with the newest claim at that time; "" if nobody had claimed the partition."""
        claims = ((one.number, name) for name, one in self.claims if one.partition == partition and one.at <= at)
        return max(claims, default=(0, ""))[1]

    def __str__(self) -> str:
        shares = Counter(worker for _, worker in self.owners.values())
        owners = " ".join(f"{worker}:{count}" for worker, count in sorted(shares.items()))
        lag = sum(max(0, self.end[number] - self.next_offset[number]) for number in range(self.partitions))
        return f"produced {len(self.acknowledged)}  handled {len(self.handled)}  lag {lag}  {owners}"


class Milestones(Struct):
    """When something was done to the group, in seconds of the monotonic clock."""

    killed: float = 0.0
    joiner_started: float = 0.0
    production_ended: float = 0.0


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
    foreign = len(totals.handled.keys() - produced)  # delivered but never written
    once = delivery == AT_MOST_ONCE
    lost, doubled = (0, repeats) if once else (missing, 0)
    first = min((one.at for name, one in totals.deliveries if name == JOINER), default=None)
    return Judgement(
        produced=len(produced),
        handled=len(handled),
        lost=lost,
        redelivered=0 if once else repeats,
        doubled=doubled,
        dropped=missing if once else 0,
        failover_s=_failover_s(totals, milestones.killed),
        join_gap_s=None if first is None else round(first - milestones.joiner_started, 2),  # interpreter included
        moved_on_join=_moved_on_join(totals, milestones),
        delivery=delivery,
        seconds=round(seconds, 1),
        ok=not (lost or doubled or foreign),
    )


def _failover_s(totals: Totals, killed_at: float) -> float | None:
    """Returns the longest time that a partition was without deliveries because its consumer was killed. It lasts from
    the killed consumer's last delivery to its successor's first. None if there was no such partition."""
    silences = []
    for partition in range(totals.partitions):
        found = [(one.at, name) for name, one in totals.deliveries if one.partition == partition]
        last_at, last = max((each for each in found if each[0] <= killed_at), default=(0.0, ""))
        first_at = min((at for at, name in found if at > killed_at and name != KILLED), default=None)
        if last == KILLED and first_at is not None:
            silences.append(first_at - last_at)
    return round(max(silences), 2) if silences else None


def _moved_on_join(totals: Totals, milestones: Milestones) -> int:
    """Returns how many partitions moved away from live consumers between the join and the end of production. Partitions
    of the killed consumer do not count, because they had to move."""
    moved = 0
    for partition in range(totals.partitions):
        was = totals.owner_at(partition, milestones.joiner_started)
        moved += was not in ("", KILLED, totals.owner_at(partition, milestones.production_ended))
    return moved


def sentence(result: Judgement) -> str:
    """Returns the last line of the demo, for people."""
    promise = "no message delivered twice" if result.delivery == AT_MOST_ONCE else "no message lost"
    parts = [f"{result.produced} produced", f"{result.handled} handled"]
    if result.delivery == AT_MOST_ONCE:
        parts += [f"{result.doubled} doubled", f"{result.dropped} dropped"]
    else:
        parts += [f"{result.lost} lost", f"{result.redelivered} redelivered"]
    if result.failover_s is not None:
        parts.append(f"take-over {result.failover_s:.1f} s after the last message of the killed consumer")
    if result.join_gap_s is not None:
        parts.append(f"the fourth consumer worked {result.join_gap_s:.1f} s after its start")
    parts.append(f"{result.moved_on_join} partitions moved to it")
    return f"{'Kept' if result.ok else 'BROKEN'}: {promise}. " + ", ".join(parts) + "."
