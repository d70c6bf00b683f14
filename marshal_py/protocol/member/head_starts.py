"""Decides when it is this member's turn to try each partition that nobody owns (PROTOCOL.md A2).

A member of rank k waits k thirds of an interval from when it first saw the partition free. A heap keeps these waits, so
that a tick looks only at partitions whose wait is over: in a large group thousands may be free that others will take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from marshal_py.protocol.fold.world import Group, Partition, Topic
from marshal_py.protocol.time.failure_detector import FailureDetector
from marshal_py.protocol.wire.identity import TopicPartition


class HeadStarts:
    """Keeps the free partitions of one member's topics: those that it may try now, and those whose turn is later."""

    def __init__(self, third_ms: int) -> None:
        self._third_ms = third_ms
        self._later: list[tuple[int, TopicPartition, int]] = []  # (end of the wait, partition, version), a heap
        self._due: dict[TopicPartition, int] = {}  # partition -> version
        # (revision, floor_ms of the clock, topics) as of the last call
        self._seen: tuple[int, int, frozenset[str]] = (-1, -1, frozenset())
        self._shape = -1

    def due(
        self,
        group: Group,
        detector: FailureDetector,
        revision: int,
        rank: Callable[[TopicPartition], int | None],
        topics: frozenset[str],
    ) -> dict[TopicPartition, int]:
        """Returns the partitions of `topics` that this member may try to claim now, with their versions.

        `rank` returns this member's rank for a partition, None if it may not claim it. `revision` is a number that
        grows when ranks may have changed.
        """
        free, seen = detector.free(), (revision, detector.clock.floor_ms, topics)
        changed = group.changed_since(self._shape) if seen == self._seen else None
        self._seen, self._shape = seen, group.shape
        if changed is None or any(isinstance(entry, Topic | Group) for entry in changed):
            self._due.clear()
            self._later.clear()
            looked_at: Iterable[TopicPartition] = free
        else:
            looked_at = [entry.tp for entry in changed if isinstance(entry, Partition)]
        for tp in looked_at:
            self._due.pop(tp, None)
            if tp in free and tp.topic in topics:
                turn = rank(tp)
                if turn is not None:
                    self._wait(tp, detector, turn * self._third_ms)
        while self._later and self._later[0][0] <= detector.clock.counted_ms:
            _, tp, version = heappop(self._later)
            if tp in free and free[tp][0] == version:
                self._due[tp] = version
        return self._due

    def _wait(self, tp: TopicPartition, detector: FailureDetector, wait_ms: int) -> None:
        version, began = detector.free()[tp]
        if wait_ms:
            heappush(self._later, (detector.clock.over_at(began, wait_ms), tp, version))
        else:
            self._due[tp] = version
