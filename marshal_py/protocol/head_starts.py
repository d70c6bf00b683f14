"""When it is this member's turn to try each partition that nobody owns (PROTOCOL.md A2).

Rank k waits k thirds of an interval from when the partition was first seen free. A tick looks at those whose wait may
be over, and at no other: in a large group thousands may be free that others will take.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heappop, heappush

from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.watch import Watch
from marshal_py.protocol.world import Group, Partition, Topic


class HeadStarts:
    """The free partitions, and the waits of one member on them."""

    def __init__(self, third_ms: int) -> None:
        self._third_ms = third_ms
        self._later: list[tuple[int, TopicPartition, int, int]] = []  # (wait clock, partition, version, wait), a heap
        self._due: dict[TopicPartition, int] = {}  # partition -> version
        self._looks = -1
        self._shape = -1

    def due(self, group: Group, watch: Watch, looks: int, rank: Callable[[TopicPartition], int],
            topics: Container[str]) -> dict[TopicPartition, int]:  # fmt: skip
        """Partitions, with their version, that may be tried now. `looks` grows when ranks may have changed."""
        changed = group.changed_since(self._shape) if looks == self._looks else None
        self._looks, self._shape = looks, group.shape
        free = watch.free()
        if changed is None or any(isinstance(entry, Topic | Group) for entry in changed):
            self._due.clear()
            self._later.clear()
            for tp in free:
                self._wait(tp, watch, rank, topics)
        else:
            for entry in changed:
                if isinstance(entry, Partition):
                    self._due.pop(entry.tp, None)
                    if entry.tp in free:
                        self._wait(entry.tp, watch, rank, topics)
        self._end_waits(watch)
        return self._due

    def _wait(self, tp: TopicPartition, watch: Watch, rank: Callable[[TopicPartition], int],
              topics: Container[str]) -> None:  # fmt: skip
        if tp.topic not in topics:
            return
        version, began = watch.free()[tp]
        wait_ms = rank(tp) * self._third_ms
        if wait_ms:
            heappush(self._later, (began + wait_ms, tp, version, wait_ms))
        else:
            self._due[tp] = version

    def _end_waits(self, watch: Watch) -> None:
        """A wait that began before an unproven step counts from there (T3): it is put back."""
        later, free = self._later, watch.free()
        while later and later[0][0] <= watch.clock.counted_ms:
            _, tp, version, wait_ms = heappop(later)
            if tp not in free or free[tp][0] != version:
                continue
            if watch.free_waited_ms(tp) >= wait_ms:
                self._due[tp] = version
            else:
                heappush(later, (watch.clock.counted_ms + 1 + wait_ms - watch.free_waited_ms(tp), tp, version, wait_ms))
