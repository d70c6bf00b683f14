"""How far behind a group is, and how it moves: lag over time, how fast it consumes, whose messages stay in handlers.

All of it is pure, from the records of a log that is folded; times are the records' timestamps.

Lag is that of even moments: whole steps of the clock, so that two answers about the same hour name the same moments.
Between two records positions stand still, so a moment has the positions of the last record before it.

The rate comes from the positions of the last minute. When an admin moves a position, counting starts again, because a
move is not consumption. The rate of a partition that stops decreases every second and is 0 after a minute.

An owner reports how far its handlers are, what they have finished above that, and how many messages they have, whenever
that changes. If handlers have messages and finish none, that is so since the first heartbeat that told of it. How far
handlers are is the position; in at-most-once mode, where grants move the position, it is the floor (F2.3).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    LAG_UNKNOWN,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    SeekingPartition,
)

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
SAMPLE_MS: Final = 250  # samples are this far apart, because in at-most-once mode there are thousands of grants


class ConsumptionRate:
    """Computes the rates of one log's partitions, from samples that are at least `sample_ms` apart."""

    def __init__(self, sample_ms: int = SAMPLE_MS) -> None:
        self._sample_ms = sample_ms
        # Time, position and generation of each sample in turn, the newest one whatever its age: there may be thousands
        # of partitions.
        self._samples: dict[tuple[str, TopicPartition], array[int]] = {}
        self._moved_ms: dict[str, int] = {}  # by group

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> None:
        """Notes the positions of a folded record. `time_ms`: its timestamp. `group`: after the record, or None."""
        if group is None or not verdict.accepted:
            return
        match verdict.record:
            case Heartbeat() as record:
                for entry in record.claims:
                    partition = group.claims.get(entry.epoch)
                    if partition is not None and partition.owner == record.session:
                        self._note(group, partition, time_ms)
            case ClaimingPartition():
                self._note(group, group.claims[verdict.offset], time_ms)
            case ClaimingMessages() as record:
                for index in verdict.granted:
                    self._note(group, group.claims[record.ranges[index].epoch], time_ms)

    def _note(self, group: Group, partition: Partition, time_ms: int) -> None:
        if partition.tp.partition < 0:
            return
        key = group.name, partition.tp
        kept = self._samples.get(key)
        if kept is None:
            kept = self._samples[key] = array("q")
        if kept and kept[-1] != partition.generation:
            del kept[:]
        if kept and kept[-2] < partition.position:
            self._moved_ms[group.name] = time_ms
        if len(kept) > 3 and time_ms - kept[-6] < self._sample_ms:
            del kept[-3:]
        kept.extend((time_ms, partition.position, partition.generation))
        while kept[0] < time_ms - WINDOW_MS:
            del kept[:3]

    def forget(self, groups: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._samples = {key: each for key, each in self._samples.items() if key[0] in groups}
        self._moved_ms = {group: at_ms for group, at_ms in self._moved_ms.items() if group in groups}

    def moved_ms(self, group: str) -> int | None:
        """Returns the newest record's time, in ms since 1970, by which consumers moved a position of the group forward;
        None if no such record was read."""
        return self._moved_ms.get(group)

    def per_second(self, group: str, tp: TopicPartition, now_ms: int) -> float:
        """Returns messages per second over the last WINDOW_MS; 0 if the position did not move. `now_ms` never falls."""
        kept = self._samples.get((group, tp), array("q"))
        while len(kept) > 3 and kept[0] < now_ms - WINDOW_MS:
            del kept[:3]
        elapsed_ms = max(now_ms, kept[-3]) - kept[0] if len(kept) > 3 else 0
        return 1000 * (kept[-2] - kept[1]) / elapsed_ms if elapsed_ms > 0 else 0.0


def handled_to(group: Group, partition: Partition) -> int:
    """Returns the offset up to which the handlers of a partition's owner are done, as far as the log says."""
    return partition.floor if group.mode == AT_MOST_ONCE else partition.position


class Unanswered:
    """Keeps, for the partitions of one log, since when handlers have messages and get no further."""

    def __init__(self) -> None:
        self._first_ms = 0  # timestamp of the first record that was read
        # (epoch, how far, progress above it, since when in ms since 1970)
        self._since: dict[tuple[str, TopicPartition], tuple[int, int, bytes, int]] = {}  # with messages in handlers
        self._finished: dict[tuple[str, TopicPartition], tuple[int, int, bytes, int]] = {}
        self._stood: dict[tuple[str, TopicPartition], tuple[int, int, int]] = {}  # epoch, position, since when

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> None:
        """Notes what a folded record says. `group`: its group after the record. `time_ms`: its timestamp."""
        self._first_ms = self._first_ms or time_ms
        record = verdict.record
        if (
            group is None
            or not verdict.accepted
            or not isinstance(record, Heartbeat | ClaimingPartition | SeekingPartition)
        ):
            return
        epochs = [entry.epoch for entry in record.claims] if isinstance(record, Heartbeat) else [verdict.offset]
        for epoch in epochs:
            partition = group.claims.get(epoch)
            if partition is None:
                continue
            key = group.name, partition.tp
            done = handled_to(group, partition)
            now = epoch, done, partition.progress
            stands = epoch, partition.position
            if self._stood.get(key, (0, 0, 0))[:2] != stands:
                self._stood[key] = *stands, time_ms
            if self._finished.get(key, (0, 0, b"", 0))[:3] != now:
                self._finished[key] = *now, time_ms
            if not partition.in_flight:
                self._since.pop(key, None)
            elif self._since.get(key, (0, 0, b"", 0))[:3] != now:
                self._since[key] = *now, time_ms

    def forget(self, groups: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._since = {key: each for key, each in self._since.items() if key[0] in groups}
        self._finished = {key: each for key, each in self._finished.items() if key[0] in groups}
        self._stood = {key: each for key, each in self._stood.items() if key[0] in groups}

    def stands(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the position of a partition has not moved, in ms since 1970, though its owner has finished
        messages above it. The same holds for the first record that was read."""
        found = {}
        for epoch, partition in group.claims.items():
            if partition.tp.partition >= 0 and partition.progress:
                kept = self._stood.get((group.name, partition.tp))
                same = kept is not None and kept[:2] == (epoch, partition.position)
                found[partition.tp] = kept[2] if kept is not None and same else self._first_ms
        return {tp: since_ms for tp, since_ms in found.items() if since_ms}

    def since(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when no message of a partition was finished, in ms since 1970, where handlers have some. If it
        was so before the first record that was read, that record's time stands for it."""
        found = {}
        for partition in group.claims.values():
            if partition.tp.partition >= 0 and partition.in_flight:
                kept = self._since.get((group.name, partition.tp))
                now = partition.epoch, handled_to(group, partition), partition.progress
                found[partition.tp] = kept[3] if kept is not None and kept[:3] == now else self._first_ms
        return {tp: since_ms for tp, since_ms in found.items() if since_ms}

    def blocked(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the owner of a partition has finished nothing in any of its partitions, in ms since 1970.
        A claim counts as finishing something: before it, there was nothing to finish."""
        last: dict[int, int] = {}
        for epoch, partition in group.claims.items():
            kept = self._finished.get((group.name, partition.tp))
            same = kept is not None and kept[:3] == (epoch, handled_to(group, partition), partition.progress)
            time_ms = kept[3] if kept is not None and same else self._first_ms
            last[partition.owner] = max(time_ms, last.get(partition.owner, 0))
        return {each.tp: last[each.owner] for each in group.claims.values() if each.tp.partition >= 0}
