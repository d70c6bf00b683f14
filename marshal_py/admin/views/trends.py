"""Computes how the figures of groups change, from pictures of them one after the other. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import asdict

from marshal_py.admin.views.group_info import GroupHealth
from marshal_py.history.lag import WINDOW_MS


class GroupTrend(GroupHealth, frozen=True):
    """A group, and how it changes: per second, over a minute or between two pictures. `zero_s`: in how many seconds its
    lag is 0 at this speed, None for never. All are None where one picture alone is known."""

    lag_per_second: float | None
    zero_s: float | None
    redelivered_per_second: float | None
    dead_letters_per_second: float | None


class _Figures(NamedTuple):
    time_ms: int
    lag: int | None
    unknown: int
    redelivered: int
    dead_letters: int


class Trends:
    """Keeps the figures of the newest pictures."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[_Figures]] = {}

    def read(self, groups: Iterable[GroupHealth], time_ms: int) -> tuple[GroupTrend, ...]:
        """Notes a picture of all groups, and returns it with the trends. `time_ms`: since 1970."""
        kept, self._kept = self._kept, {}
        found = []
        for one in groups:
            now = _Figures(time_ms, one.lag, one.unknown, one.redelivered, one.dead_letters)
            figures = self._kept[one.group] = kept.get(one.group, deque())
            if figures and not _comparable(figures[-1], now):
                figures.clear()
            figures.append(now)
            while len(figures) > 2 and figures[1].time_ms <= time_ms - WINDOW_MS:
                figures.popleft()
            found.append(GroupTrend(**{**asdict(one), **_change(figures[0], now)}))
        return tuple(found)


def _comparable(before: _Figures, now: _Figures) -> bool:
    """Returns whether the difference says something: a reader that began anew counts from 0 again."""
    grown = before.redelivered <= now.redelivered and before.dead_letters <= now.dead_letters
    return grown and before.unknown == now.unknown and before.time_ms < now.time_ms


def _change(before: _Figures, now: _Figures) -> dict[str, float | None]:
    found: dict[str, float | None] = dict.fromkeys(GroupTrend.__annotations__)
    if now.lag == 0:
        found["zero_s"] = 0.0
    if before is now:
        return found
    elapsed_s = (now.time_ms - before.time_ms) / 1000
    if now.lag is not None and before.lag is not None:
        growth = (now.lag - before.lag) / elapsed_s
        found["lag_per_second"] = round(growth, 1)
        if now.lag and growth < 0:
            found["zero_s"] = round(now.lag / -growth, 1)
    found["redelivered_per_second"] = round((now.redelivered - before.redelivered) / elapsed_s, 2)
    found["dead_letters_per_second"] = round((now.dead_letters - before.dead_letters) / elapsed_s, 2)
    return found
