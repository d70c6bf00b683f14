"""Says which partition of a consumer delivers next. Called with the Marshal's lock held."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from marshal_py.protocol.wire.identity import TopicPartition


class Turns:
    """Holds the claimed partitions in the order of their turns. Who has had a turn goes behind the others."""

    __slots__ = ("_before", "_order", "_reserved")

    def __init__(self) -> None:
        self._order: deque[TopicPartition] = deque()
        self._reserved: TopicPartition | None = None
        self._before = 0

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._order)

    def add(self, tp: TopicPartition) -> None:
        self._order.append(tp)

    def remove(self, tp: TopicPartition) -> None:
        if tp in self._order:
            self._order.remove(tp)

    def each(self) -> Iterator[TopicPartition]:
        """Gives every partition one turn. The next call begins behind the last partition that this one has yielded."""
        for _ in range(len(self._order)):
            tp = self._order[0]
            self._order.rotate(-1)
            yield tp

    def reserved(self, tp: TopicPartition, delivered: int) -> None:
        """Notes whose turn it is, and how many messages the consumer had delivered when it began."""
        self._reserved, self._before = tp, delivered

    def resume(self, delivered: int) -> None:
        """Gives the partition that had the last turn another one, if the consumer has delivered nothing since.

        Messages are reserved for some ms. A thread that gets no processor time for so long would deliver none of them,
        and the partition would wait for all others.
        """
        last = self._reserved
        if last is not None and last in self._order and delivered == self._before:
            self._order.remove(last)
            self._order.appendleft(last)
        self._reserved = None
