"""Tracks the messages of one claim that their handlers have given back, until they are delivered again (D14).

A message that was given back waits for its time. No handler has it meanwhile, so it does not delay a Release and is not
silent (D4); the position stays below it. An owner that dies, or whose partition moves, just forgets its delay. Times
are monotonic ms. Nothing here is thread-safe: callers hold a lock.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from marshal_py.protocol.claims.offset_run import OffsetRun

# Messages of one partition that wait at once; while there are so many, nothing new of it is delivered. Each keeps its
# message in memory, and a thousand handlers in a row that fail show that the next one will fail, too.
WAITING_MAX = 1_000


class GivenBack(NamedTuple):
    """Holds a message that waits: its place in the `offsets` of its run, the driver's own object for it, its size."""

    due_ms: int
    offset: int
    at: int
    run: OffsetRun
    message: object
    size_bytes: int


class Redeliveries:
    """Holds the messages of one claim that wait, and how often this claim has delivered each message again."""

    __slots__ = ("_due", "again", "posted", "size_bytes", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, GivenBack] = {}  # by offset
        self.size_bytes: int = 0  # of `waiting`, as far as the driver has said it
        self._due: list[tuple[int, int]] = []  # heap of (due_ms, offset), with entries that are not waiting any more
        self.posted: set[int] = set()  # offsets on their way to a dead-letter topic; they are not delivered again
        self.again: dict[int, int] = {}  # offset -> how often this claim has delivered it after the first time

    @property
    def full(self) -> bool:
        """Returns whether so many messages wait that nothing new of the partition may be delivered."""
        return len(self.waiting) + len(self.posted) >= WAITING_MAX

    def give_back(self, run: OffsetRun, index: int, message: object, due_ms: int, size_bytes: int = 0) -> bool:
        """Makes a message that was handed over wait until `due_ms`. Returns False if it is finished.

        Does nothing if it waits already.
        """
        offset = run.offsets[index]
        if run.is_finished(index) or offset in self.posted:
            return False
        if offset not in self.waiting:
            # A signal handler may raise between two of these; then the handler still has the message (D4).
            heappush(self._due, (due_ms, offset))
            self.waiting[offset] = GivenBack(due_ms, offset, index, run, message, size_bytes)
            self.size_bytes += size_bytes
            run.set_aside(index)
        return True

    def post(self, run: OffsetRun, index: int) -> bool:
        """Notes that a message goes to a dead-letter topic. Returns False if it is finished or on its way already."""
        offset = run.offsets[index]
        if run.is_finished(index) or offset in self.posted:
            return False
        if offset in self.waiting:
            self._drop(offset)
        self.posted.add(offset)
        run.set_aside(index, waits=True)
        return True

    def is_due(self, now_ms: int) -> bool:
        return self.next_ms() <= now_ms if self._due else False

    def next_ms(self) -> int:
        """Returns when the next message is due. There must be one that waits or has waited."""
        while len(self._due) > 1 and not self._waits(self._due[0]):
            heappop(self._due)
        return self._due[0][0]

    def _waits(self, entry: tuple[int, int]) -> bool:
        """Returns whether a heap entry is of a message that still waits; forgets a message that is finished."""
        found = self.waiting.get(entry[1])
        if found is None or found.due_ms != entry[0]:
            return False
        if found.run.is_finished(found.at):
            self._forget(found)
            return False
        return True

    def _forget(self, one: GivenBack) -> None:
        self._drop(one.offset)
        one.run.take_up(one.at, None)

    def _drop(self, offset: int) -> None:
        self.size_bytes -= self.waiting.pop(offset).size_bytes

    def take(self, now_ms: int) -> GivenBack | None:
        """Returns the next message that is due, which is handed over again at `now_ms`; None if none is due."""
        while self._due and self._due[0][0] <= now_ms:
            entry = heappop(self._due)
            if self._waits(entry):
                one = self.waiting[entry[1]]
                one.run.take_up(one.at, now_ms)  # first: a signal handler may raise before the rest
                self._drop(one.offset)
                self.again[one.offset] = self.again.get(one.offset, 0) + 1
                return one
        return None

    def put_back(self, one: GivenBack) -> None:
        """Undoes `take`, because the user did not get the message."""
        self.again[one.offset] = self.again.get(one.offset, 1) - 1
        self.give_back(one.run, one.at, one.message, one.due_ms, one.size_bytes)

    def forget_finished(self, position: int) -> None:
        """Forgets what lies below the position, and messages that were finished while they waited."""
        for one in [one for one in self.waiting.values() if one.run.is_finished(one.at)]:
            self._forget(one)
        self.size_bytes = sum(one.size_bytes for one in self.waiting.values())  # a signal handler may raise in between
        if len(self._due) > 2 * WAITING_MAX:  # most are of messages that were acked long before their time
            self._due = sorted((one.due_ms, one.offset) for one in self.waiting.values())  # a sorted list is a heap
        self.posted = {offset for offset in self.posted if offset >= position}
        for offset in [offset for offset in self.again if offset < position]:
            del self.again[offset]
