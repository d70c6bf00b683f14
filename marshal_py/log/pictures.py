"""Reads what a group did over a span of time from the coordination topic: its picture, and its lag. Never writes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from marshal_py.history.lag_series import LagSeries, PositionSampler, moments_between
from marshal_py.history.picture import Picture, PictureReader
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import LogRecord


class Period(NamedTuple):
    """A span of time, in ms since 1970. `cut`: reading ends before the first later record; otherwise it goes on to the
    log's end, whatever its writers' clocks said."""

    from_ms: int
    to_ms: int
    cut: bool = False

    def excludes(self, record: LogRecord) -> bool:
        return self.cut and record.timestamp_ms > self.to_ms


def picture_of(observer: Observer, group: str, period: Period) -> Picture | None:
    """Returns the picture of a group in a period, None if its log does not know it. It begins later if older records
    are not there. Raises HistoryTruncated."""
    world, records, from_ms = _reach(observer, group, period.from_ms)
    reader = PictureReader(world, group, from_ms, period.to_ms)
    for record in records:
        if period.excludes(record):
            break
        reader.read(record.offset, record.timestamp_ms, record.value)
    known = world.groups.get(group)
    if known is None:
        return None
    return reader.finish(observer.ends_at(_partitions(known), reader.sampler.moments))


def lag_over_time(observer: Observer, group: str, period: Period) -> LagSeries | None:
    """Returns a group's lag in a period, as `picture_of` does."""
    world, records, from_ms = _reach(observer, group, period.from_ms)
    known = world.groups.get(group)
    count = len(_partitions(known)) if known is not None else 0
    sampler = PositionSampler(moments_between(from_ms, period.to_ms, count))
    for record in records:
        if period.excludes(record):
            break
        sampler.before(world.groups.get(group), record.timestamp_ms)
        rationalizer.apply(world, record.offset, record.value)
    known = world.groups.get(group)
    return None if known is None else sampler.series(known, observer.ends_at(_partitions(known), sampler.moments))


def newest_ms(observer: Observer, group: str) -> int:
    """Returns the timestamp of the newest record of the group's log, which is the present of a dump; 0 if there is
    none."""
    logs = observer.logs_of(group)
    ends = {log: bounds.end - 1 for log, bounds in observer.bounds(logs).items()}
    return max((at for log, end in ends.items() for at in observer.times_of(log, [end]).values()), default=0)


def _reach(observer: Observer, group: str, from_ms: int) -> tuple[World, Iterator[LogRecord], int]:
    """Returns the world at or before a time, the records after it, and the time from which on these tell all."""
    (log,) = observer.logs_of(group)
    world, records = observer.history(log, observer.first_since([log], from_ms)[log])
    first = next(records, None)
    if first is None:
        return world, records, from_ms
    return world, chain([first], records), max(from_ms, first.timestamp_ms)


def _partitions(group: Group) -> list[TopicPartition]:
    return [TopicPartition(name, number) for name, topic in group.topics.items() for number in range(topic.count)]
