"""Reads what a group did over a span of time from the coordination topic: its picture, and its lag. Never writes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from marshal_py.history.lag import LagSeries, PositionSampler
from marshal_py.history.picture import Picture, PictureReader
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.transport.ports import LogRecord


class Period(NamedTuple):
    """A span of time, in ms since 1970. `cut`: reading ends before the first later record; otherwise it goes on to the
    log's end, whatever its writers' clocks said."""

    from_ms: int
    to_ms: int
    cut: bool = False


def picture_of(observer: Observer, group: str, period: Period) -> Picture | None:
    """Returns the picture of a group in a period, None if its log does not know it. It begins later if older records
    are not there. Raises HistoryTruncated."""
    world, records = _reach(observer, group, period)
    reader = PictureReader(world, group, period.from_ms, period.to_ms)
    for record in records:
        reader.read(record.offset, record.timestamp_ms, record.value)
    return reader.finish(observer.ends_at) if group in world.groups else None


def lag_over_time(observer: Observer, group: str, period: Period) -> LagSeries | None:
    """Returns a group's lag in a period, as `picture_of` does."""
    world, records = _reach(observer, group, period)
    sampler = PositionSampler(period.from_ms, period.to_ms)
    for record in records:
        sampler.before(world.groups.get(group), record.timestamp_ms)
        rationalizer.apply(world, record.offset, record.value)
    known = world.groups.get(group)
    return None if known is None else sampler.series(known, observer.ends_at)


def _reach(observer: Observer, group: str, period: Period) -> tuple[World, Iterator[LogRecord]]:
    """Returns the world before a period, and the records of it."""
    (log,) = observer.logs_of(group)
    world, records = observer.history(log, observer.first_since([log], period.from_ms)[log])
    if period.cut:
        records = takewhile(lambda record: record.timestamp_ms <= period.to_ms, records)
    return world, records
