"""Tracks offsets that were fetched together: which were handed over, which are finished, since when handlers have them.

delivery.py has a run (OffsetRun) for each fetch of a claim in at-least-once mode. A handler is what the user does with
a message. Times are monotonic ms. Nothing here is thread-safe: callers hold a lock. Only `acks` may be appended to
without it.
"""

from __future__ import annotations

from collections.abc import Sequence

MARK_MS = 1_000  # at most one time of delivery is kept in so long, because each costs memory


class OffsetRun:
    """Holds offsets of one claim that were fetched together, in ascending order, and which of them are finished.

    An index is a place in `offsets`. The messages below index `delivered` were handed over. One that its handler has
    given back is set aside: no handler has it until it is handed over again (redelivery.py).

    Invariants:
      R1  0 <= low <= delivered <= len(offsets)
      R2  every index below low is finished; low itself is not
      R3  `finished` holds exactly the finished indexes above low
    """

    __slots__ = ("acks", "aside", "delivered", "finished", "low", "marks", "offsets", "sifted", "touched")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets: Sequence[int] = offsets
        # True if messages that exist between these offsets were left out, because earlier owners had finished them.
        self.sifted: bool = False
        self.delivered: int = 0
        self.low: int = 0
        self.finished: set[int] = set()
        # Indexes that handlers have acked and `settle` has not noted yet. Any thread appends to it without the lock,
        # because taking a lock costs three times as much as all the rest of an ack.
        self.acks: list[int] = []
        self.marks: list[tuple[int, int]] = []  # (first index, mono_ms) of deliveries, at most one per MARK_MS
        # Indexes that no handler has, although they were handed over -> whether a Release waits for them all the same.
        self.aside: dict[int, bool] | None = None
        self.touched: dict[int, int] | None = None  # index -> mono_ms at which its handler last reported to be at work

    def deliver(self, count: int, mono_ms: int) -> int:
        """Records that the next `count` messages are handed over at `mono_ms`; returns the index of the first."""
        first = self.delivered
        self.delivered = first + count
        marks = self.marks
        if not marks or mono_ms - marks[-1][1] >= MARK_MS:
            marks.append((first, mono_ms))
        return first

    def covered(self, first: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Returns the offsets that the messages with the indexes [first, stop) stand for, as ranges [start, to).

        They were fetched together. So between them, and after the message before them, is no message of Kafka's; in a
        sifted run there may be some.
        """
        offsets = self.offsets
        if self.sifted:
            return tuple((offset, offset + 1) for offset in offsets[first:stop])
        return ((offsets[first - 1] + 1 if first else offsets[0], offsets[stop - 1] + 1),)

    def settle(self) -> None:
        """Marks the messages in `acks` finished.

        Until then they count as unfinished everywhere. So what is read of a run between two calls belongs together.
        """
        acks, low = self.acks, self.low
        count = len(acks)
        if not count:
            return
        noted, in_order = acks[:count], range(low, low + count)
        if not self.finished and noted[0] == low and noted[-1] == in_order[-1] and noted == list(in_order):
            self.low = in_order.stop  # as nearly always
        else:
            for index in noted:
                self.finish(index)
        del acks[:count]  # last, and the same list: others append to it meanwhile, and an interrupted call is repeated

    def finish(self, index: int) -> bool:
        """Marks the message at `index` finished; returns False if it was already, because an ack may come twice."""
        low = self.low
        if index > low:
            if index in self.finished:
                return False
            self.finished.add(index)
            return True
        if index < low:
            return False
        low += 1
        while low in self.finished:
            low += 1
        # A signal handler may raise inside the loop above, but not between the last two steps (R2, R3).
        passed, forget = range(self.low + 1, low), self.finished.difference_update
        self.low = low
        if passed:
            forget(passed)
        return True

    def finish_range(self, first: int, stop: int) -> int:
        """Marks the indexes [first, stop) finished; returns how many of them were not finished before."""
        self.settle()
        if first == self.low and not self.finished:
            self.low = stop
            return stop - first
        return sum(self.finish(index) for index in range(max(first, self.low), stop))

    @property
    def unfinished(self) -> int:
        """Returns how many messages were handed over and are not finished."""
        return self.delivered - self.low - len(self.finished)

    def is_finished(self, index: int) -> bool:
        return index < self.low or index in self.finished

    @property
    def held(self) -> int:
        """Returns how many messages a Release waits for: those handed over, not finished, and not set aside."""
        aside = self.aside or {}
        return self.unfinished - sum(not waits and not self.is_finished(index) for index, waits in aside.items())

    def set_aside(self, index: int, *, waits: bool = False) -> None:
        """Records that the handler of the message at `index` is done with it, although the message is unfinished.

        `waits`: whether a Release waits for it all the same, because it will soon be finished.
        """
        if self.aside is None:
            self.aside = {}
        self.aside[index] = waits

    def take_up(self, index: int, mono_ms: int | None) -> None:
        """Ends `set_aside`: the message is handed over again at `mono_ms`, or is finished if that is None."""
        if self.aside is not None:
            self.aside.pop(index, None)
            self.aside = self.aside or None
        if mono_ms is not None:
            self.touch(index, index + 1, mono_ms)

    def delivered_ms(self, index: int) -> int:
        """Returns the monotonic ms at which the message at `index` was handed over.

        The result may be up to MARK_MS too high, because at most one time per MARK_MS is recorded. It is never too low.
        """
        marks = self.marks
        for position in range(len(marks) - 1, -1, -1):
            if marks[position][0] <= index:
                first, mono_ms = marks[position]
                return mono_ms if index == first else mono_ms + MARK_MS
        return 0

    def touch(self, first: int, stop: int, mono_ms: int) -> None:
        """Records that at `mono_ms` the handlers of the messages at the indexes [first, stop) were still at work."""
        if self.touched is None:
            self.touched = {}
        aside = self.aside or ()
        for index in range(max(first, self.low), min(stop, self.delivered)):
            if index not in self.finished and index not in aside:
                self.touched[index] = mono_ms

    def touch_all(self, mono_ms: int) -> None:
        """Records that at `mono_ms` the handlers of all messages that were handed over were still at work."""
        self.marks, self.touched = [(self.low, mono_ms)], None

    def oldest(self) -> tuple[int, int] | None:
        """Returns (monotonic ms, index): since when the longest silent handler has been silent, and its message (D4).

        A handler is silent since it got its message or last reported that it is at work. Returns None if no handler has
        a message.
        """
        finished, index, aside = self.finished, self.low, self.aside or ()
        if not self.touched and not aside:
            return (self.delivered_ms(index), index) if index < self.delivered else None
        touched = self.touched = {at: ms for at, ms in (self.touched or {}).items() if not self.is_finished(at)}
        while index < self.delivered and (index in touched or index in finished or index in aside):
            index += 1
        silent = [(ms, at) for at, ms in touched.items() if at not in aside]
        if index < self.delivered:  # of the messages that were never touched, the lowest was handed over first
            silent.append((self.delivered_ms(index), index))
        return min(silent, default=None)
