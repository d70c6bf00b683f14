"""Where the fold of a log begins: at its Genesis, or at a confirmed snapshot if the records before it are deleted.

Of several snapshots it takes the oldest, because readers of history want as much of it as possible. Pure functions;
must not import Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from marshal_py.errors import HistoryTruncated
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.snapshot import SnapshotStore, Stored
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire.codec import open_envelope, open_snapshot
from marshal_py.protocol.wire.records import Genesis

Placed = tuple[int, bytes | None]  # offset and value


class Beginning(NamedTuple):
    """Names the place where one log's fold begins.

    `stored` is the snapshot that replaces deleted records; None means offset 0.
    """

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
    """Returns the root, which is the Genesis that holds for all logs (L3), or None if there is none.

    `values` are the records of log 0 in order, from its first offset `first` on. If `first` is not 0, the log's
    beginning is deleted, and a confirmed snapshot names the root.
    """
    if first == 0:
        opened = (open_envelope(value, -1) for _, value in values)
        return next((found[5] for found in opened if found is not None and isinstance(found[5], Genesis)), None)
    confirmed = _snapshots(None, values).confirmed(first)
    return confirmed[-1].genesis if confirmed else None


def beginning(log: int, first: int, root: Genesis, values: Iterable[Placed]) -> Beginning:
    """Returns the place where the fold of a log begins.

    `values` are the log's records from the offset `first` on; they are not read if `first` is 0. Raises
    HistoryTruncated if the beginning is deleted and no confirmed snapshot replaces it (N10).
    """
    if first == 0:
        return Beginning(log, root)
    for stored in reversed(_snapshots(root.incarnation, values).confirmed(first)):
        if snapshot.load(stored, log, None if log == 0 else root) is not None:
            return Beginning(log, root, stored)
    raise HistoryTruncated(log, first)


def _snapshots(incarnation: bytes | None, values: Iterable[Placed]) -> SnapshotStore:
    store = SnapshotStore(incarnation)
    for offset, value in values:
        record = open_snapshot(value)
        if record is not None:
            store.take(record, offset)
    return store
