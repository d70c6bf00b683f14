"""Lag over time: the moments, positions that stand still between records, ends that are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from marshal_py.history.lag import MOMENTS_MAX, MOMENTS_MIN, EndsAt, LagSeries, PositionSampler, moments_between
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import BEYOND_END, ClaimState, Heartbeat
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

HOUR_MS = 3_600_000
ZERO = TopicPartition(TOPIC, 0)


def test_moments_are_whole_steps_between_the_ends() -> None:
    begin = 1_763_700_000_123
    found = moments_between(begin, begin + HOUR_MS)
    assert (found[0], found[-1]) == (begin, begin + HOUR_MS)
    assert {later - sooner for sooner, later in pairwise(found[1:-1])} == {60_000}
    assert all(moment % 60_000 == 0 for moment in found[1:-1])
    assert moments_between(5, 5) == [5]
    for hours in (0.001, 1, 30, 10_000):
        for partitions, least, most in ((0, 2, MOMENTS_MAX), (1_000, 2, MOMENTS_MIN), (200, 2, 60)):
            assert least <= len(moments_between(0, int(hours * HOUR_MS), partitions)) <= most


def series_of(ends_at: EndsAt | None = None) -> LagSeries:
    """A record per second: at 1 s the Join, at 3 s the claim at position 100, at 4 s position 130."""
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130, 5),)))
    world, sampler = World(), PositionSampler(0, 6_000)
    for offset, value in enumerate(book.values):
        sampler.before(world.groups.get(GROUP), 1_000 * offset)
        apply(world, offset, value)
    return sampler.series(world.groups[GROUP], ends_at)


def test_lags_of_the_ends_at_the_moments() -> None:
    asked: list[object] = []

    def ends_at(tps: Sequence[TopicPartition], times: Sequence[int]) -> list[dict[TopicPartition, int]]:
        asked.extend(tps)
        return [{} if time == 3_500 else {ZERO: 110 if time < 4_500 else 135} for time in times]

    series = series_of(ends_at)
    assert asked == [ZERO]
    assert (series.moments[0], series.moments[-1]) == (2_000, 6_000), "from the second record of the group on"
    found = {time: (series.positions[ZERO][at], series.lags[ZERO][at]) for at, time in enumerate(series.moments)}
    assert [found[time] for time in (2_000, 2_900, 3_000, 3_500, 4_000, 6_000)] == [
        (None, None),
        (None, None),
        (100, 10),
        (100, None),
        (130, 0),
        (130, 5),
    ], "clocks of topic and log differ, so a lag is not negative"
    assert series.total == series.lags[ZERO]


def test_lags_as_owners_wrote_them() -> None:
    for series in (series_of(), series_of(lambda tps, times: [])):
        assert (series.lags[ZERO][-1], series.lag_of) == (5, "what owners wrote")
        assert series.lags[ZERO][0] is None


def test_a_group_without_records_in_the_period() -> None:
    """Its state at the beginning lasts."""
    book = DifferentialLog()
    book.owner()
    series = PositionSampler(5_000, 6_000).series(book.world.groups[GROUP])
    assert (series.moments[0], series.moments[-1], set(series.positions[ZERO])) == (5_000, 6_000, {100})
    assert PositionSampler(5_000, 6_000).series(None).moments == []


def test_the_lag_of_a_position_that_is_no_offset_of_present_messages_is_unknown() -> None:
    book = DifferentialLog()
    book.owner()
    group = book.world.groups[GROUP]
    group.partitions[ZERO].parked = BEYOND_END
    for ends_at in (None, lambda tps, times: [dict.fromkeys(tps, 50) for _ in times]):
        series = PositionSampler(5_000, 6_000).series(group, ends_at)
        assert set(series.lags[ZERO]) == set(series.total) == {None}
        assert set(series.positions[ZERO]) == {100}


def test_a_lag_that_no_owner_has_written_is_unknown() -> None:
    """An owner that says nothing of a partition in its heartbeat has found what is so: nothing waits."""
    book = DifferentialLog()
    session, _ = book.owner()
    assert set(PositionSampler(5_000, 6_000).series(book.world.groups[GROUP]).lags[ZERO]) == {None}
    book.must(Heartbeat(session, 1, ()))
    assert set(PositionSampler(5_000, 6_000).series(book.world.groups[GROUP]).lags[ZERO]) == {0}
