"""How far behind a group is, and how it moves: lag over time, how fast it consumes, whose messages stay in handlers.

All of it is pure, from the records of a log that is folded; times are the records' timestamps.

Lag is that of even moments: whole steps of the clock, so that two answers about the same hour name the same moments.
Between two records positions stand still, so a moment has the positions of the last record before it.

The rate comes from the positions of the last minute. When an admin moves a position, counting starts again, because a
move is not consumption. The rate of a partition that stops decreases every second and is 0 after a minute.

An owner reports how far its handlers are, what they have finished above that, and how many messages they have, whenever
that changes. How far handlers are is the position; in at-most-once mode, where grants move the position, it is the
floor (F2.3). No record is looked at for this: looks at the state, some of them a second, tell it as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from marshal_py.protocol.fold.world import Group, Partition, World
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE, LAG_UNKNOWN

MOMENTS_MAX: Final = 120  # of one answer: more than a picture or a line of text shows
LOOKUPS_MAX: Final = 12_000  # moments times partitions: a broker looks up some ten thousand per second
MOMENTS_MIN: Final = 24
DAY_MS: Final = 86_400_000
STEPS_MS: Final = (
    *(100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000),
    *(1_800_000, 3_600_000, 7_200_000, 14_400_000, 21_600_000, 43_200_000, DAY_MS),
)


# Looks up the ends of partitions at each of some times (ms since 1970); nothing if they cannot be known.
EndsAt = Callable[[Sequence[TopicPartition], Sequence[int]], Sequence[Mapping[TopicPartition, int]]]


class Sample(NamedTuple):
    """The position of a partition at a moment, None if it had none, and its lag as `told_lag`. `lost`: whether it was
    parked for a reason that makes every lag unknown."""

    position: int | None
    lag: int | None
    lost: bool


class LagSeries(NamedTuple):
    """Positions and lags by partition, one per moment (ms, as the records' timestamps), and the total. None is unknown:
    no position yet, no end known; the total leaves it out. `lag_of`: what the lag was computed from, in words."""

    moments: list[int]
    positions: dict[TopicPartition, list[int | None]]
    lags: dict[TopicPartition, list[int | None]]
    total: list[int | None]
    lag_of: str


def grows_since(lags: Sequence[int | None]) -> int | None:
    """Returns the index at which a lag that is now at its highest, or nearly, was last at its lowest, or nearly; None
    if it does not grow."""
    known = [(at, lag) for at, lag in enumerate(lags) if lag is not None]
    least, most = min((lag for _, lag in known), default=0), max((lag for _, lag in known), default=0)
    margin = (most - least) // 20
    if most == least or known[-1][1] < most - margin:
        return None
    return max(at for at, lag in known if lag <= least + margin)


def moments_between(from_ms: int, to_ms: int, partitions: int = 1) -> list[int]:
    """Returns the moments of a span of time: its beginning, whole steps of the clock, its end. `partitions`: how many
    the group has; with many there are fewer moments."""
    count_max = min(MOMENTS_MAX, max(MOMENTS_MIN, LOOKUPS_MAX // max(1, partitions))) - 2
    least_ms = max(1, -(-(to_ms - from_ms) // count_max))
    step = next((step for step in STEPS_MS if step >= least_ms), -(-least_ms // DAY_MS) * DAY_MS)
    return [from_ms, *range((from_ms // step + 1) * step, to_ms, step), *([to_ms] if to_ms > from_ms else ())]


class PositionSampler:
    """Collects a group's positions at moments of a period: from its beginning on, or from the first record before which
    the group is known."""

    def __init__(self, from_ms: int, to_ms: int) -> None:
        self._from_ms, self._to_ms = from_ms, max(from_ms, to_ms)
        self._moments: list[int] = []
        self._samples: list[dict[TopicPartition, Sample]] = []
        self._next_ms: float = from_ms

    def before(self, group: Group | None, time_ms: float) -> None:
        """Takes the samples of all moments before `time_ms`, the timestamp of a record that is not folded yet.
        `group`: as it has been since the record before."""
        if group is None or self._next_ms >= time_ms:
            return
        if not self._moments:
            if time_ms < self._to_ms:
                self._from_ms = max(self._from_ms, round(time_ms))
            count = sum(topic.count for topic in group.topics.values())
            self._moments = moments_between(self._from_ms, self._to_ms, count)
            self._next_ms = self._from_ms
        while self._next_ms < time_ms:
            self._samples.append(
                {
                    tp: Sample(
                        None if part.position == NONE else part.position,
                        told_lag(group, part),
                        part.parked in LAG_UNKNOWN,
                    )
                    for tp, part in group.partitions.items()
                    if tp.partition >= 0
                }
            )
            done = len(self._samples)
            self._next_ms = self._moments[done] if done < len(self._moments) else float("inf")

    def series(self, group: Group | None, ends_at: EndsAt | None = None) -> LagSeries:
        """Returns the lag at all moments. `group`: at the end of the log. `ends_at`: looks up the ends; without it, or
        if it finds none, the lag is the one that owners wrote."""
        self.before(group, float("inf"))
        named = sorted({tp for sample in self._samples for tp in sample})
        ends = ends_at(named, self._moments) if ends_at is not None else ()
        positions = {tp: [_position(sample.get(tp)) for sample in self._samples] for tp in named}
        lags = {tp: [_lag(at, sample.get(tp), ends, tp) for at, sample in enumerate(self._samples)] for tp in named}
        known = [[lag for tp in named if (lag := lags[tp][at]) is not None] for at in range(len(self._moments))]
        total = [sum(each) if each else None for each in known]
        lag_of = "the log's positions and the topic's ends" if ends else "what owners wrote"
        return LagSeries(self._moments, positions, lags, total, lag_of)


def told_lag(group: Group, partition: Partition) -> int | None:
    """Returns the lag of a partition that its owners last wrote; None if none of them has lived to write it. An owner
    leaves out of its heartbeats what is so in the world already, where a lag begins at 0."""
    if partition.lag:
        return partition.lag
    owner = group.sessions.get(partition.owner)
    return 0 if owner is not None and owner.extended > partition.epoch else None


def _position(sample: Sample | None) -> int | None:
    return None if sample is None else sample.position


def _lag(
    at: int, sample: Sample | None, ends: Sequence[Mapping[TopicPartition, int]], tp: TopicPartition
) -> int | None:
    """A topic's clock may be behind the log's: what was read by then is not beyond the end by its timestamps."""
    if sample is None or sample.position is None or sample.lost:
        return None
    if not ends:
        return sample.lag
    end = ends[at].get(tp)
    return None if end is None else max(0, end - sample.position)


WINDOW_MS: Final = 60_000  # long enough to even out batches, short enough to be current
LOOK_MS: Final = 1_000  # so far apart looks the pace at a world: a look costs as much as some records
SPARSE: Final = 8  # looks at the past are this part of its age apart
SAMPLE_MS: Final = 5_000  # of the speed: 13 samples per partition, because there may be thousands of partitions


class _Seen(Struct, gc=False):
    """What was seen of a partition that somebody owns. The times, in ms since 1970, say since when that is so:
    `stood_ms` of epoch and position, `finished_ms` also of what is done, `busy_ms` also of messages in handlers."""

    generation: int
    epoch: int
    position: int
    done: int
    progress: bytes
    busy: bool
    stood_ms: int
    finished_ms: int
    busy_ms: int
    samples: array[int]  # times and positions in turn


class Pace:
    """Knows how fast the owners of partitions get on, and since when they do not: by looks at the worlds of the logs
    while these are read, so to within LOOK_MS, and what is longer ago to within a SPARSE-th of that. What was so at
    the first look was so since then."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[TopicPartition, _Seen]] = {}  # by group
        self._moved_ms: dict[str, int] = {}  # by group
        self._due_ms: dict[int, int] = {}  # by log: when the next look is
        self._unseen: dict[int, tuple[World, int]] = {}  # by log: read since the last look, and the newest timestamp

    def read(self, world: World, time_ms: int, now_ms: int = 0) -> None:
        """Looks at a world, if it is time. `time_ms`: of the record that was folded last. `now_ms`: long before it
        there are fewer looks."""
        due_ms = self._due_ms.get(world.log)
        if due_ms is None or time_ms >= due_ms:
            self._due_ms[world.log] = time_ms + max(LOOK_MS, (now_ms - time_ms) // SPARSE)
            self._unseen.pop(world.log, None)
            self._look(world, time_ms)
        else:
            self._unseen[world.log] = world, time_ms

    def catch_up(self) -> None:
        """Looks at all worlds that have changed. Questions are about the last look."""
        for world, time_ms in self._unseen.values():
            self._look(world, time_ms)
        self._unseen.clear()

    def _look(self, world: World, now_ms: int) -> None:
        for group in world.groups.values():
            seen, at_most_once = self._seen.setdefault(group.name, {}), group.mode == AT_MOST_ONCE
            for epoch, now in group.claims.items():
                if now.tp.partition < 0:
                    continue
                known, done, busy = seen.get(now.tp), now.floor if at_most_once else now.position, now.in_flight > 0
                if known is None or known.generation != now.generation:
                    samples = array("q", (now_ms, now.position))
                    at = now_ms, now_ms, now_ms
                    seen[now.tp] = _Seen(
                        now.generation, epoch, now.position, done, now.progress, busy, *at, samples=samples
                    )
                    continue
                samples = known.samples
                if now.position < known.position:  # what was granted and not handled was given back (F6.3)
                    samples = known.samples = array("q", (now_ms, now.position))
                elif now_ms - samples[-2] >= SAMPLE_MS:
                    samples.extend((now_ms, now.position))
                    while samples[0] < now_ms - WINDOW_MS:
                        del samples[:2]
                if known.epoch == epoch and known.done == done and known.progress == now.progress:
                    if busy and not known.busy:
                        known.busy_ms = now_ms
                    known.busy = busy
                    if known.position == now.position:
                        continue
                else:
                    known.finished_ms = known.busy_ms = now_ms
                if known.epoch != epoch or known.position != now.position:
                    known.stood_ms = now_ms
                if known.position < now.position:
                    self._moved_ms[group.name] = now_ms
                known.epoch, known.position, known.done = epoch, now.position, done
                known.progress, known.busy = now.progress, busy

    def forget(self, groups: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._seen = {name: each for name, each in self._seen.items() if name in groups}
        self._moved_ms = {name: at_ms for name, at_ms in self._moved_ms.items() if name in groups}

    # --- how fast

    def moved_ms(self, group: str) -> int | None:
        """Returns when, in ms since 1970, consumers moved a position of the group forward; None if that was not
        seen."""
        return self._moved_ms.get(group)

    def per_second(self, group: str, tp: TopicPartition, now_ms: int) -> float:
        """Returns messages per second over the last WINDOW_MS; 0 if the position did not move."""
        known = self._seen.get(group, {}).get(tp)
        if known is None or known.samples[-2] < now_ms - WINDOW_MS:
            return 0.0
        samples = known.samples
        at = next(at for at in range(0, len(samples), 2) if samples[at] >= now_ms - WINDOW_MS)
        elapsed_ms = now_ms - samples[at]
        return 1000 * (known.position - samples[at + 1]) / elapsed_ms if elapsed_ms > 0 else 0.0

    # --- since when they get no further

    def stands(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the position of a partition has not moved, in ms since 1970, though its owner has finished
        messages above it."""
        return {now.tp: known.stood_ms for now, known in self._owned(group) if now.progress}

    def since(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when no message of a partition was finished, in ms since 1970, where handlers have some."""
        return {now.tp: known.busy_ms for now, known in self._owned(group) if now.in_flight}

    def blocked(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the owner of a partition has finished nothing in any of its partitions, in ms since 1970.
        A claim counts as finishing something: before it, there was nothing to finish."""
        last: dict[int, int] = {}
        for now, known in self._owned(group):
            last[now.owner] = max(known.finished_ms, last.get(now.owner, 0))
        return {now.tp: last[now.owner] for now, _ in self._owned(group)}

    def _owned(self, group: Group) -> list[tuple[Partition, _Seen]]:
        """Returns the claims of a group, as they are and as they were seen."""
        seen = self._seen.get(group.name, {})
        return [(now, seen[now.tp]) for now in group.claims.values() if now.tp in seen]
