"""Finds where a reader of a log begins: at its first record, or at a confirmed snapshot (PROTOCOL.md N9, N10).

It looks for snapshots backwards from the log's end, in windows that grow. So a start costs as much as has happened
since the newest snapshot, not as much as has ever happened. Tools that show the past continue from one snapshot to the
next older one, as far as they need (`bases`). It only reads.

Who writes to a log, or advises to change its topic, asks first whether it is one (`refuse_foreign`): a name given by
mistake may be that of a topic with the messages of somebody else. A coordination topic is known by its first records. A
topic without records may become one.

In all functions `number` is the log's number, `bounds` its first and end offset, and `root` the Genesis that counts for
all logs; None for log 0, which holds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from marshal_py.errors import ClusterUnreachable, ForeignTopic, HistoryTruncated
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.snapshot import Key, SnapshotStore, Stored
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Genesis
from marshal_py.transport.ports import Bounds, ClusterAdmin, CoordinationLog, LogRecord

COLD_FOLD_RECORDS: Final = 4_096  # so many fold in less than 50 ms: looking for a snapshot would hardly be faster
WINDOW_RECORDS: Final = 512  # in the first window; the next windows are each WINDOW_GROWTH times as wide
WINDOW_GROWTH: Final = 2
WINDOW_RECORDS_MAX: Final = 15_000  # a store remembers STORED_MAX snapshots, and they may come every 500 records (N8)
LOOK_BACK_RECORDS: Final = 300_000  # searched in a whole log: if clients write snapshots, one is among these records
SOON_RECORDS: Final = 2_048  # after its checkpoint a snapshot is in the log; what lies so near is read together
ATTEMPTS: Final = 5  # to read a log that is truncated at the same time, which happens seldom
SILENCE_S: Final = 30.0  # without a record before a known end; then the cluster counts as unreachable

Placed = tuple[int, bytes | None]  # offset and value


def find(
    log: CoordinationLog,
    number: int,
    bounds: Bounds,
    incarnation: bytes | None,
    wanted: int,
    look_back: int | None = None,
) -> SnapshotStore:
    """Reads a log backwards, `look_back` records at most (None: all), until `wanted` confirmed snapshots are found.
    Each window is read once: a SnapshotStore joins chunks in any order."""
    store = SnapshotStore(incarnation)
    for _ in _search(log, number, bounds, store, look_back):
        if len(store.confirmed(bounds.first)) >= wanted:
            break
    return store


def _search(
    log: CoordinationLog, number: int, bounds: Bounds, store: SnapshotStore, look_back: int | None
) -> Iterator[None]:
    """Reads a log backwards, window by window; puts the snapshots of each window into the store before it yields."""
    end, width = bounds.end, WINDOW_RECORDS
    least = bounds.first if look_back is None else max(bounds.first, bounds.end - look_back)
    while end > least:
        start = max(least, end - width)
        for records in log.read(number, start, end, SILENCE_S):
            for record in records:
                found = codec.open_snapshot(record.value) if record.offset < end else None
                if found is not None:
                    store.take(found, record.offset)
        yield
        end, width = start, min(width * WINDOW_GROWTH, WINDOW_RECORDS_MAX)


def _confirmed(
    log: CoordinationLog, number: int, bounds: Bounds, incarnation: bytes | None, look_back: int | None = None
) -> Iterator[Stored]:
    """Yields confirmed snapshots, newest first; reads no further back than asked, and forgets what it has yielded."""
    store, told = SnapshotStore(incarnation), set[Key]()
    for _ in _search(log, number, bounds, store, look_back):
        for stored in store.confirmed(bounds.first):
            if stored.key not in told:
                told.add(stored.key)
                store.forget_above(stored.at)
                yield stored


def genesis_of(log: CoordinationLog, world: World, end: int) -> Genesis | None:
    """Folds the log into `world` until that has its Genesis, and returns it; None if there is none below `end`."""
    for records in log.read(world.log, world.next_offset, end, SILENCE_S):
        for record in records:
            if world.genesis is None:
                rationalizer.apply(world, record.offset, record.value)
        if world.genesis is not None:
            break
    return world.genesis


def incarnation_of(log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds) -> bytes | None:
    """Returns the incarnation that `root`, or log 0's first Genesis, names; None without one."""
    found = root
    if root is None and not bounds.first:
        found = genesis_of(log, World(number), bounds.end)
    return None if found is None else found.incarnation


def is_short(bounds: Bounds) -> bool:
    """Returns whether a log is whole, and folded before a snapshot would be found."""
    return bounds.first == 0 and bounds.end <= COLD_FOLD_RECORDS


def open_world(log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds, at: int | None = None) -> World:
    """Returns the world to continue from, at `world.next_offset`. `at`: the first record that must be seen; None: only
    the state counts. Raises HistoryTruncated, TopicRecreated, ClusterUnreachable."""
    for left in reversed(range(ATTEMPTS)):
        if is_short(bounds):
            return World(number, root)
        around = bounds if at is None else Bounds(bounds.first, min(bounds.end, at + SOON_RECORDS))
        look_back = None if bounds.first else LOOK_BACK_RECORDS
        try:
            return base_of(log, number, root, around, bounds.end if at is None else at, look_back)
        except HistoryTruncated:
            # Truncated while it was read, or between the two questions of which bounds consist: the end is older then
            # than the beginning, and the snapshot lies behind it. So look again if the log has moved.
            newer = log.bounds(number, SILENCE_S)
            if newer == bounds or not left:
                raise
            bounds = newer
    raise AssertionError("the last attempt returns or raises")


def bases(
    log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds, at: int, look_back: int | None = None
) -> Iterator[World]:
    """Yields the worlds at or below checkpoint `at` to read on from, newest first: of loadable confirmed snapshots,
    then the empty one if the beginning is there. `look_back`: records to search at most."""
    incarnation = incarnation_of(log, number, root, bounds)
    if incarnation is not None or bounds.first:  # else nothing has begun here
        for stored in _confirmed(log, number, bounds, incarnation, look_back):
            world = snapshot.load(stored, number, root) if stored.at <= at else None
            if world is not None:
                yield world
    if not bounds.first:
        yield World(number, root)


def base_of(
    log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds, at: int, look_back: int | None = None
) -> World:
    """Returns the first of `bases`. Raises HistoryTruncated (N10)."""
    world = next(bases(log, number, root, bounds, at, look_back), None)
    if world is None:
        raise HistoryTruncated(number, bounds.first)
    return world


def oldest_world(log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds) -> World:
    """Returns the world of the earliest possible fold, for tools that show the past. Raises HistoryTruncated (N10)."""
    for _ in range(ATTEMPTS):
        if not bounds.first:
            return World(number, root)
        with suppress(HistoryTruncated):
            found = _confirmed(log, number, bounds, incarnation_of(log, number, root, bounds))
            for stored in reversed(deque(found, maxlen=snapshot.STORED_MAX)):
                world = snapshot.load(stored, number, root)
                if world is not None:
                    return world
        asked, bounds = bounds, log.bounds(number, SILENCE_S)
        if asked == bounds:
            break  # else it was truncated while it was read
    raise HistoryTruncated(number, bounds.first)


def cut_of(log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds, before: int) -> int:
    """Returns the offset to delete below if all from `before` on must stay readable (N12): the newest confirmed
    snapshot's checkpoint at or below it, as nobody could fold what lies before; else the first offset."""
    # A snapshot comes soon after its checkpoint.
    around = Bounds(bounds.first, min(bounds.end, before + SOON_RECORDS))
    world = next(bases(log, number, root, around, before), None)
    return bounds.first if world is None else max(bounds.first, world.began_at)


def record_at(log: CoordinationLog, number: int, offset: int) -> LogRecord | None:
    """Reads one record of a log again; None if it was deleted."""
    return records_at(log, number, [offset]).get(offset)


def records_at(log: CoordinationLog, number: int, offsets: Iterable[int]) -> dict[int, LogRecord]:
    """Reads single records of a log again, those that lie near each other together. Deleted ones are left out."""
    first, found, wanted = log.bounds(number, SILENCE_S).first, dict[int, LogRecord](), sorted(set(offsets))
    while wanted := [offset for offset in wanted if offset >= first]:
        near = [offset for offset in wanted if offset < wanted[0] + SOON_RECORDS]
        try:
            for records in log.read(number, near[0], near[-1] + 1, SILENCE_S):
                found |= {record.offset: record for record in records if record.offset in near}
        except HistoryTruncated as error:  # while it was read
            first = max(first + 1, error.first_offset)
        else:
            wanted = wanted[len(near) :]
    return found


def refold(log: CoordinationLog, base: World, to: int, group: str = "") -> World:
    """Folds the log once more into `base` to checkpoint `to`; keeps the digests of `group` ("": none). Raises
    ClusterUnreachable if it does not get there."""
    if group:
        base.watched.add(group)
    for records in log.read(base.log, base.next_offset, to, SILENCE_S):
        for record in records:
            if record.offset >= to:
                break
            rationalizer.apply(base, record.offset, record.value)
    if base.next_offset != to:
        raise ClusterUnreachable("the cluster", f"offset {to} of coordination partition {base.log}", "it was not read")
    return base


# --- among records that somebody else has read, such as Spark. Of several snapshots it takes the oldest: readers of
# history want as much of it as possible.


class Beginning(NamedTuple):
    """Where a log's fold begins. `stored`: the snapshot that replaces deleted records; None: offset 0."""

    log: int
    root: Genesis
    stored: Stored | None = None

    def world(self) -> World:
        """Returns a new world, in the state where the fold begins."""
        root = None if self.log == 0 else self.root
        if self.stored is None:
            return World(self.log, root)
        world = snapshot.load(self.stored, self.log, root)
        assert world is not None  # `beginning` checked that
        return world


def root_among(first: int, values: Iterable[Placed]) -> Genesis | None:
    """Returns the root (L3) among log 0's `values` from `first` on, or None. If `first` is not 0, a confirmed snapshot
    names it."""
    if first == 0:
        opened = (codec.open_envelope(value, -1) for _, value in values)
        return next((found[5] for found in opened if found is not None and isinstance(found[5], Genesis)), None)
    confirmed = _snapshots(None, values).confirmed(first)
    return confirmed[-1].genesis if confirmed else None


def beginning(log: int, first: int, root: Genesis, values: Iterable[Placed]) -> Beginning:
    """Returns where a log's fold begins. `values`, from `first` on, are not read if that is 0. Raises HistoryTruncated
    (N10)."""
    if first == 0:
        return Beginning(log, root)
    for stored in reversed(_snapshots(root.incarnation, values).confirmed(first)):
        if snapshot.load(stored, log, None if log == 0 else root) is not None:
            return Beginning(log, root, stored)
    raise HistoryTruncated(log, first)


def _snapshots(incarnation: bytes | None, values: Iterable[Placed]) -> SnapshotStore:
    store = SnapshotStore(incarnation, oldest=True)
    for offset, value in values:
        record = codec.open_snapshot(value)
        if record is not None:
            store.take(record, offset)
    return store


SAMPLE_RECORDS: Final = 1_000  # garbage in front of the first record (E1) is seldom that much
SAMPLE_SILENCE_S: Final = 5.0  # between two of them: offsets at the end may hold no record, and nothing comes for them


def refuse_foreign(admin: ClusterAdmin, log: CoordinationLog, topic: str) -> None:
    """Raises ForeignTopic if none of the first records of `topic` is ours. `log`: reads it; log 0 unless its records
    are gone."""
    tps = [TopicPartition(topic, number) for number in range(admin.partition_count(topic) or 0)]
    for left in reversed(range(ATTEMPTS)):
        found = {tp: bounds for tp, bounds in admin.bounds(tps).items() if bounds.first < bounds.end} if tps else {}
        try:
            if found and not _begins_with_ours(log, (first := min(found)).partition, found[first]):
                raise ForeignTopic(topic, str(first))
            return
        except HistoryTruncated:  # records were deleted between the two requests: others are the first now
            if not left:
                raise


def _begins_with_ours(log: CoordinationLog, number: int, bounds: Bounds) -> bool:
    read, end = 0, min(bounds.end, bounds.first + SAMPLE_RECORDS)
    try:
        for records in log.read(number, bounds.first, end, SAMPLE_SILENCE_S):
            if any(codec.is_ours(record.value) for record in records):
                return True
            read += len(records)
    except ClusterUnreachable:
        if not read:
            raise
    return False
