"""Where the fold of a log begins: at its Genesis, or at a confirmed snapshot where the records before it are deleted.

Of several snapshots the oldest is taken: readers of history want as much of it as there is. Pure, and without Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from marshal_py.errors import HistoryTruncated
from marshal_py.protocol import snapshot
from marshal_py.protocol.codec import open_envelope, open_snapshot
from marshal_py.protocol.records import Genesis
from marshal_py.protocol.snapshot import SnapshotStore, Stored
from marshal_py.protocol.world import World

Placed = tuple[int, bytes | None]  # offset and value


class Beginning(NamedTuple):
    """Of one log. `stored`: the snapshot that stands in for deleted records, None if the log begins at offset 0."""

    log: int
    root: Genesis
    stored: Stored | None = None

    def world(self) -> World:
        """A fresh world that stands where the fold begins."""
        root = None if self.log == 0 else self.root
        if self.stored is None:
            return World(self.log, root)
        world = snapshot.load(self.stored, self.log, root)
        assert world is not None  # `beginning` looked
        return world


def root_among(first: int, values: Iterable[Placed]) -> Genesis | None:
    """The root (L3) from the values of log 0, which begin at offset `first` and come in order; None if there is none.

    Where the log's beginning is deleted, a confirmed snapshot names it.
    """
    if first == 0:
        opened = (open_envelope(value, -1) for _, value in values)
        return next((found[5] for found in opened if found is not None and isinstance(found[5], Genesis)), None)
    confirmed = _shelf(None, values).confirmed(first)
    return confirmed[-1].genesis if confirmed else None


def beginning(log: int, first: int, root: Genesis, values: Iterable[Placed]) -> Beginning:
    """`values`: of the log, from its first offset on; not read if that is 0. Raises HistoryTruncated (N10)."""
    if first == 0:
        return Beginning(log, root)
    for stored in reversed(_shelf(root.incarnation, values).confirmed(first)):
        if snapshot.load(stored, log, None if log == 0 else root) is not None:
            return Beginning(log, root, stored)
    raise HistoryTruncated(log, first)


def _shelf(incarnation: bytes | None, values: Iterable[Placed]) -> SnapshotStore:
    store = SnapshotStore(incarnation)
    for offset, value in values:
        record = open_snapshot(value)
        if record is not None:
            store.take(record, offset)
    return store
