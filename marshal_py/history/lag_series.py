"""Computes a group's lag over time: its positions at even moments of a log that is folded, and the ends then. Pure.

The moments are whole steps of the clock, so that two answers about the same hour name the same moments. Between two
records positions stand still, so a moment has the positions of the last record before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import LAG_UNKNOWN

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
