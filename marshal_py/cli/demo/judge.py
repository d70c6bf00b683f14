"""The verdict on a run of the demo, from journals and the topic's own ends alone. Pure; asks the library nothing.

Messages are told apart by (partition, offset). The embedded broker may write an order twice when its producer retries:
these are two messages of the topic, and both must be handled.
"""

from __future__ import annotations

from msgspec import Struct

from marshal_py.cli.demo.totals import Totals

AT_MOST_ONCE = "at_most_once"


class Milestones(Struct, kw_only=True):
    """What was done to the group, and when. Times are of the monotonic clock."""

    killed: str = ""
    killed_at: float = 0.0
    joiner: str = ""
    joiner_started_at: float = 0.0
    production_ended_at: float = 0.0


class Judgement(Struct, frozen=True, kw_only=True):
    """The fields of `marshal demo --json`, in their order. Seconds are None where the moment never came."""

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


def judge(tally: Totals, ends: dict[int, int], marks: Milestones, delivery: str, seconds: float) -> Judgement:
    """`ends`: the topic's end offsets after the producer has ended; the topic was empty before."""
    produced = {(partition, offset) for partition, end in ends.items() for offset in range(end)} | tally.acknowledged
    handled = produced & tally.handled.keys()
    missing = len(produced) - len(handled)
    repeats = sum(count - 1 for count in tally.handled.values())
    foreign = len(tally.handled.keys() - produced)  # delivered and never written: as bad as a wrong checksum
    once = delivery == AT_MOST_ONCE
    lost, doubled = (0, repeats) if once else (missing, 0)
    return Judgement(
        produced=len(produced),
        handled=len(handled),
        lost=lost,
        redelivered=0 if once else repeats,
        doubled=doubled,
        dropped=missing if once else 0,
        failover_s=_failover_s(tally, marks),
        join_gap_s=_join_gap_s(tally, marks),
        moved_on_join=_moved_on_join(tally, marks),
        delivery=delivery,
        seconds=round(seconds, 1),
        ok=not (lost or doubled or foreign or tally.unsound),
    )


def _failover_s(tally: Totals, marks: Milestones) -> float | None:
    """The longest silence of a partition between the killed consumer's last delivery and its heir's first."""
    silences = []
    for handlings in tally.handlings.values():
        before = [h for h in handlings if h.at <= marks.killed_at]
        after = [h for h in handlings if h.at > marks.killed_at and h.worker != marks.killed]
        if not before or not after:
            continue
        last = max(before, key=lambda h: h.at)
        if last.worker == marks.killed:
            silences.append(min(h.at for h in after) - last.at)
    return round(max(silences), 2) if silences else None


def _join_gap_s(tally: Totals, marks: Milestones) -> float | None:
    """From the start of the joining process, its interpreter included, to its first delivery."""
    mine = [h.at for handlings in tally.handlings.values() for h in handlings if h.worker == marks.joiner]
    return round(min(mine) - marks.joiner_started_at, 2) if mine else None


def _moved_on_join(tally: Totals, marks: Milestones) -> int:
    """Partitions of living consumers that had another owner when production ended. The dead one's moved anyway."""
    moved = 0
    for partition in range(tally.partitions):
        was = tally.owner_at(partition, marks.joiner_started_at)
        now = tally.owner_at(partition, marks.production_ended_at)
        moved += was not in ("", marks.killed, now)
    return moved


def sentence(result: Judgement, unsound: int) -> str:
    """The last line for people."""
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
