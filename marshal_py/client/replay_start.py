"""Finds where a reader of a log begins: at its first record, or at a confirmed snapshot (PROTOCOL.md N9, N10).

It looks for snapshots backwards from the log's end, in windows that grow. So a start costs as much as has happened
since the newest snapshot, not as much as has ever happened. It only reads.

In all functions `number` is the log's number, `bounds` its first and end offset, and `root` the Genesis that counts for
all logs; None for log 0, which holds it.
"""

from __future__ import annotations

from typing import Final

from marshal_py.errors import ClusterUnreachable, HistoryTruncated
from marshal_py.protocol import codec, rationalizer, snapshot
from marshal_py.protocol.records import Genesis
from marshal_py.protocol.snapshot import SnapshotStore
from marshal_py.protocol.world import World
from marshal_py.transport.ports import Bounds, CoordinationLog

COLD_FOLD_RECORDS: Final = 8_192  # so many fold in some 10 ms: looking for a snapshot would not be faster
WINDOW_RECORDS: Final = 4_096  # in the first window; the next windows are each WINDOW_GROWTH times as wide
WINDOW_GROWTH: Final = 4
LOOK_BACK_RECORDS: Final = 300_000  # searched in a whole log: if clients write snapshots, one is among these records
ATTEMPTS: Final = 5  # to read a log that is truncated at the same time, which happens seldom
SILENCE_S: Final = 30.0  # without a record before a known end; then the cluster counts as unreachable


def find(
    log: CoordinationLog,
    number: int,
    bounds: Bounds,
    incarnation: bytes | None,
    wanted: int,
    look_back: int | None = None,
) -> SnapshotStore:
    """Reads a log backwards from its end until `wanted` confirmed snapshots are found; returns what it found.

    `look_back`: how many records it reads at most; None for all. Each window is read once, because a SnapshotStore
    joins chunks in any order.
    """
    store, end, width = SnapshotStore(incarnation), bounds.end, WINDOW_RECORDS
    least = bounds.first if look_back is None else max(bounds.first, bounds.end - look_back)
    while end > least and len(store.confirmed(bounds.first)) < wanted:
        start = max(least, end - width)
        for records in log.read(number, start, end, SILENCE_S):
            for record in records:
                found = codec.open_snapshot(record.value) if record.offset < end else None
                if found is not None:
                    store.take(found, record.offset)
        end, width = start, width * WINDOW_GROWTH
    return store


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
    """Returns the incarnation of a log: the one that `root` names, or for log 0 the one that its first Genesis names.

    Returns None if log 0 holds no Genesis, or if its beginning is deleted.
    """
    found = root
    if root is None and not bounds.first:
        found = genesis_of(log, World(number), bounds.end)
    return None if found is None else found.incarnation


def open_world(log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds) -> World:
    """Returns the world from which a reader continues; it must read from `world.next_offset` on.

    Raises HistoryTruncated if the log's beginning is deleted and no confirmed snapshot replaces it; TopicRecreated,
    ClusterUnreachable.
    """
    for left in reversed(range(ATTEMPTS)):
        if bounds.first == 0 and bounds.end <= COLD_FOLD_RECORDS:
            return World(number, root)
        try:
            return base_of(log, number, root, bounds, bounds.end, None if bounds.first else LOOK_BACK_RECORDS)
        except HistoryTruncated as error:
            if error.first_offset <= bounds.first or not left:
                raise
            bounds = log.bounds(number, SILENCE_S)  # truncated while it was read: read again
    raise AssertionError("the last attempt returns or raises")


def base_of(
    log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds, at: int, look_back: int | None = None
) -> World:
    """Returns the world of the newest confirmed snapshot that can be loaded and lies at or below the checkpoint `at`.

    If there is none, it returns the empty world of the log's beginning. `look_back`: how many records it reads at most
    to find one; None for all. Raises HistoryTruncated if the log's beginning is deleted and no such snapshot replaces
    it (N10).
    """
    incarnation = incarnation_of(log, number, root, bounds)
    if incarnation is None and not bounds.first:
        return World(number, root)  # nothing has begun here
    for wanted in (1, snapshot.STORED_MAX):  # nearly always the newest one is sound and old enough
        store = find(log, number, bounds, incarnation, wanted, look_back)
        for stored in store.confirmed(bounds.first):
            world = snapshot.load(stored, number, root) if stored.at <= at else None
            if world is not None:
                return world
        if not bounds.first and not store.whole:
            break
    if bounds.first:
        raise HistoryTruncated(number, bounds.first)
    return World(number, root)


def oldest_world(log: CoordinationLog, number: int, root: Genesis | None, bounds: Bounds) -> World:
    """Returns the world with which a fold of the log can begin earliest.

    It is the empty world, or the world of the oldest snapshot if the log's beginning is deleted. It is for tools that
    show the past; a reader that only continues begins at the newest snapshot (`open_world`). Raises HistoryTruncated if
    no snapshot replaces the deleted beginning (N10).
    """
    if not bounds.first:
        return World(number, root)
    store = find(log, number, bounds, incarnation_of(log, number, root, bounds), snapshot.STORED_MAX)
    for stored in reversed(store.confirmed(bounds.first)):
        world = snapshot.load(stored, number, root)
        if world is not None:
            return world
    raise HistoryTruncated(number, bounds.first)


def refold(log: CoordinationLog, base: World, to: int, group: str = "") -> World:
    """Reads the log once more and folds it into `base` up to the checkpoint at offset `to`; returns `base`.

    `group`: the group whose digests `base` keeps at the checkpoints on the way; "" for none. Raises what reading and
    folding raise, and ClusterUnreachable if the log was not read up to `to`.
    """
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
