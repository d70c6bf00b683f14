"""Lag over time: the moments, positions that stand still between records, ends that are unknown."""

from __future__ import annotations

from itertools import pairwise

from marshal_py.history.lag_series import MOMENTS_MAX, MOMENTS_MIN, PositionSampler, moments_between
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import ClaimState, Heartbeat
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

HOUR_MS = 3_600_000
ZERO, ONE = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)


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


def sampled() -> tuple[PositionSampler, World]:
    """A record per second: at 3 s the claim at position 100, at 4 s position 130."""
    book = DifferentialLog()
    session, epoch = book.owner()
    book.must(Heartbeat(session, 1, (ClaimState(epoch, 130, 5),)))
    world, sampler = World(), PositionSampler([2_000, 3_500, 4_000, 9_000])
    for offset, value in enumerate(book.values):
        sampler.before(world.groups.get(GROUP), 1_000 * offset)
        apply(world, offset, value)
    return sampler, world


def test_lags_of_the_ends_at_the_moments() -> None:
    sampler, world = sampled()
    series = sampler.series(world.groups[GROUP], [{ZERO: 90}, {ZERO: 110, ONE: 7}, {}, {ZERO: 135}])
    assert series.positions == {ZERO: [None, 100, 130, 130]}
    assert series.lags == {ZERO: [None, 10, None, 5]}
    assert series.total == [None, 10, None, 5]


def test_lags_as_owners_wrote_them_and_ends_behind_a_position() -> None:
    sampler, world = sampled()
    assert sampler.series(world.groups[GROUP]).lags == {ZERO: [None, 0, 5, 5]}
    sampler, world = sampled()
    late = sampler.series(world.groups[GROUP], [{ZERO: 1}] * 4)
    assert late.lags == {ZERO: [None, 0, 0, 0]}, "the topic's clocks and the log's differ"
