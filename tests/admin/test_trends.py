"""How figures change from one picture of a group to the next."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from marshal_py.cli.top.picture import Trends
from marshal_py.history.lag import WINDOW_MS
from tests.support.healths import health


def changes(*pictures: tuple[int, dict[str, Any]]) -> tuple[float | None, ...]:
    """Returns growth, time to 0, redelivered and dead letters per second after these pictures: (seconds, figures)."""
    trends = Trends()
    for seconds, figures in pictures:
        (found,) = trends.read([replace(health("billing"), **figures)], 1_000_000 + 1_000 * seconds)
    return found.lag_per_second, found.zero_s, found.redelivered_per_second, found.dead_letters_per_second


@pytest.mark.parametrize(
    ("pictures", "expected"),
    [
        ([(0, {"lag": 5})], (None, None, None, None)),
        ([(0, {"lag": 0})], (None, 0.0, None, None)),
        ([(0, {"lag": 100}), (2, {"lag": 80})], (-10.0, 8.0, 0.0, 0.0)),
        ([(0, {"lag": 100}), (2, {"lag": 120})], (10.0, None, 0.0, 0.0)),
        ([(0, {"lag": None}), (2, {"lag": 120})], (None, None, 0.0, 0.0)),
        ([(0, {}), (2, {"redelivered": 3, "advisories": {"dead_letter": 1}})], (0.0, 0.0, 1.5, 0.5)),
        ([(0, {"lag": 9, "unknown": 1}), (2, {"lag": 1})], (None, None, None, None)),  # of other partitions
        ([(0, {"redelivered": 9}), (2, {"redelivered": 1})], (None, 0.0, None, None)),  # of a reader that began anew
        ([(2, {"lag": 9}), (0, {"lag": 1})], (None, None, None, None)),  # of the past, back in time
        ([(0, {"lag": 900}), (5, {"lag": 100}), (5 + WINDOW_MS // 1000, {"lag": 40})], (-1.0, 40.0, 0.0, 0.0)),
    ],
)
def test_changes(pictures: list[tuple[int, dict[str, Any]]], expected: tuple[float | None, ...]) -> None:
    assert changes(*pictures) == expected


def test_a_group_that_is_gone_is_forgotten() -> None:
    trends = Trends()
    for second, names in enumerate([["a", "b"], ["b"], ["a", "b"]]):
        found = trends.read(map(health, names), 1_000 * second)
    assert [(one.group, one.lag_per_second) for one in found] == [("a", None), ("b", 0.0)]
