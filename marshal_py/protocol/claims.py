"""The claims of one client, each from its acceptance to its end, and what was delivered and finished under them.

A message is handed over, or delivered, when the user gets it, and finished when its ack has come. A handler is what the
user does with a message. AtLeastOnce and AtMostOnce track the offsets of one claim in the two modes (PROTOCOL.md 8, F5,
F6). They know offsets, never messages, and nothing here reads the world. Times are monotonic ms. Nothing here is
thread-safe: callers hold a lock; only `OffsetRun.acks` may be appended to without it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from typing import Final, NamedTuple

from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, OFFSET_MAX, ClaimState, ReleasingPartition, SeekingPartition

# --- Offsets that were fetched together: which were handed over, which are finished, since when handlers have them


MARK_MS = 1_000  # at most one time of delivery is kept in so long, because each costs memory


class OffsetRun:
    """Offsets of one claim that were fetched together, in ascending order, and which of them are finished.

    An index is a place in `offsets`. The messages below index `delivered` were handed over. One that its handler has
    given back is set aside: no handler has it until it is handed over again (Redeliveries). One that is queued waits
    for its handler to begin: until then it counts as fetched and not as delivered (D17).

    Invariants:
      R1  0 <= low <= delivered <= len(offsets)
      R2  every index below low is finished; low itself is not
      R3  `finished` holds exactly the finished indexes above low
      R4  queued indexes are below delivered and not finished
    """

    __slots__ = ("acks", "aside", "delivered", "finished", "low", "marks", "offsets", "queued", "sifted", "touched")

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
        self.queued: set[int] | None = None  # indexes of messages that wait for their handler; None if there are none

    def deliver(self, count: int, mono_ms: int) -> int:
        """Records that the next `count` messages are handed over at `mono_ms`; returns the index of the first."""
        first = self.delivered
        self.delivered = first + count
        marks = self.marks
        if not marks or mono_ms - marks[-1][1] >= MARK_MS:
            marks.append((first, mono_ms))
        return first

    def covered(self, first: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Returns the offsets that the messages [first, stop) stand for, as ranges [start, to). Between messages
        fetched together Kafka has none, but for a sifted run."""
        offsets = self.offsets
        if self.sifted:
            return tuple((offset, offset + 1) for offset in offsets[first:stop])
        return ((offsets[first - 1] + 1 if first else offsets[0], offsets[stop - 1] + 1),)

    def settle(self) -> None:
        """Marks the messages in `acks` finished; until then they count as unfinished everywhere."""
        acks, low = self.acks, self.low
        count = len(acks)
        if not count:
            return
        noted, in_order = acks[:count], range(low, low + count)
        plain = not self.finished and noted[0] == low and noted[-1] == in_order[-1]
        if plain and noted == list(in_order) and (not self.queued or self.queued.isdisjoint(in_order)):
            self.low = in_order.stop  # as nearly always
        else:
            for index in noted:
                self.finish(index)
        del acks[:count]  # last, and the same list: others append to it meanwhile, and an interrupted call is repeated

    def finish(self, index: int) -> bool:
        """Marks the message at `index` finished; returns False if it was already, because an ack may come twice."""
        self.begin(index)
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
        if first == self.low and not self.finished and not self.queued:
            self.low = stop
            return stop - first
        return sum(self.finish(index) for index in range(max(first, self.low), stop))

    def queue(self, indexes: Iterable[int]) -> None:
        """Records that messages wait for their handlers to begin, unless they are finished."""
        self.settle()
        waiting = {index for index in indexes if not self.is_finished(index)} | (self.queued or set())
        self.queued = waiting or None

    def begin(self, index: int) -> None:
        """Ends `queue`: a handler begins with the message."""
        if self.queued is None or index not in self.queued:
            return
        self.queued.remove(index)
        self.queued = self.queued or None

    def is_queued(self, index: int) -> bool:
        return self.queued is not None and index in self.queued

    def queued_spans(self) -> list[tuple[int, int]]:
        """Returns the offsets of queued messages as ascending spans [start, to)."""
        spans: list[tuple[int, int]] = []
        last = -1
        for index in sorted(self.queued or ()):
            offset = self.offsets[index]
            _extend(spans, offset, offset + 1, bool(spans) and index == last + 1)
            last = index
        return spans

    @property
    def taken(self) -> int:
        """Returns how many messages were handed over, with those that are queued, and are not finished."""
        return self.delivered - self.low - len(self.finished)

    @property
    def unfinished(self) -> int:
        """Returns how many messages were delivered and are not finished."""
        return self.taken - (len(self.queued) if self.queued else 0)

    def is_finished(self, index: int) -> bool:
        return index < self.low or index in self.finished

    @property
    def held(self) -> int:
        """Returns how many messages a Release waits for: those delivered, not finished, and not set aside."""
        return self.unfinished - self._given_back(self.queued or ())

    @property
    def awaited(self) -> int:
        """Returns how many messages will be answered without another hand-over: those held, and those queued here."""
        return self.taken - self._given_back(())

    def _given_back(self, others: Container[int]) -> int:
        """Returns how many unfinished messages were given back and are not among `others`."""
        aside = self.aside or {}
        return sum(not waits and index not in others and not self.is_finished(index) for index, waits in aside.items())

    def set_aside(self, index: int, *, waits: bool = False) -> None:
        """Records that the handler of an unfinished message is done with it. `waits`: a Release waits for it all the
        same."""
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
        """Returns when the message was handed over: never too low, at most MARK_MS too high."""
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
        """Returns (monotonic ms, index): since when the longest silent handler has been silent, and its message (D4). A
        report that it is at work breaks the silence."""
        finished, index, aside, queued = self.finished, self.low, self.aside or (), self.queued or ()
        if not self.touched and not aside and not queued:
            return (self.delivered_ms(index), index) if index < self.delivered else None
        touched = self.touched = {at: ms for at, ms in (self.touched or {}).items() if not self.is_finished(at)}
        while index < self.delivered and (index in touched or index in finished or index in aside or index in queued):
            index += 1
        silent = [(ms, at) for at, ms in touched.items() if at not in aside and at not in queued]
        if index < self.delivered:  # of the messages that were never touched, the lowest was handed over first
            silent.append((self.delivered_ms(index), index))
        return min(silent, default=None)


# --- Tracks the messages of one claim that their handlers have given back, until they are delivered again (D14).
#
# A message that was given back waits for its time. No handler has it meanwhile, so it does not delay a Release and is
# not silent (D4); the position stays below it. An owner that dies, or whose partition moves, just forgets its delay.


# Messages of one partition that wait at once; while there are so many, nothing new of it is delivered. Each keeps its
# message in memory, and a thousand handlers in a row that fail show that the next one will fail, too.
WAITING_MAX = 1_000


class GivenBack(NamedTuple):
    """A message that waits: its place in the `offsets` of its run, the driver's own object for it, its size. `queued`:
    no handler had begun with it when it was given back, so its next hand-over is the one that it was queued for."""

    due_ms: int
    offset: int
    at: int
    run: OffsetRun
    message: object
    size_bytes: int
    queued: bool


class Redeliveries:
    """The messages of one claim that wait, and how often this claim has delivered each message again."""

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
        """Makes a message wait until `due_ms`, if it does not wait already. Returns False if it is finished."""
        offset = run.offsets[index]
        if run.is_finished(index) or offset in self.posted:
            return False
        if offset not in self.waiting:
            # A signal handler may raise between two of these; then the handler still has the message (D4).
            heappush(self._due, (due_ms, offset))
            self.waiting[offset] = GivenBack(due_ms, offset, index, run, message, size_bytes, run.is_queued(index))
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
            entry = self._due[0]
            if self._waits(entry):
                one = self.waiting[entry[1]]
                one.run.begin(one.at)
                one.run.take_up(one.at, now_ms)  # first: a signal handler may raise before the rest
                self._drop(one.offset)
                if not one.queued:
                    self.again[one.offset] = self.again.get(one.offset, 0) + 1
                heappop(self._due)
                return one
            heappop(self._due)
        return None

    def put_back(self, one: GivenBack) -> None:
        """Undoes `take`, because the user did not get the message."""
        if one.queued:
            one.run.queue([one.at])
        else:
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


# --- All runs of one claim, in at-least-once mode


RUN_MERGED_MAX = 1_000  # offsets; bounds the set of indexes that are finished out of order
SPANS_REPORTED = 256  # no list of more fits into PROGRESS_BYTES_MAX: each takes three bytes at least


class AtLeastOnce:
    """Tracks one claim in at-least-once mode. Its position is the lowest unfinished offset (D1). Earlier owners'
    finished messages above it are not delivered again; their deliveries of the others are counted (D11)."""

    __slots__ = (
        "_attempts", "_base", "_delivered_before", "_fetched_to", "_finished_before", "_first", "_floor", "_reported",
        "_silent_since_ms", "_touched", "counts_exactly", "in_ranges", "redeliveries", "runs",
    )  # fmt: skip

    def __init__(self, position: int, attempts: int = 0, in_flight: int = 0, known: bytes = b"") -> None:
        """Begins at `position`, which was delivered `attempts` times. `in_flight`: what the last owner had delivered
        and not finished; `known`: its progress, in the bytes of progress.py (4.2)."""
        self._base = self._floor = self._fetched_to = position
        ranges = progress.decode(position, known)
        self._finished_before = [(start, to) for start, to, times in ranges if not times]
        self._reported: Sequence[tuple[int, int]] = [*self._finished_before]  # finished, as last reported to the log
        self._delivered_before = progress.deliveries(position, attempts, in_flight, ranges)
        self._attempts = attempts
        self._first = NONE  # the message at the claim's position: the first that exists there; NONE until it is fetched
        self._touched = False  # whether a handler has reported that it is at work
        self.runs: deque[OffsetRun] = deque()
        self.redeliveries: Redeliveries | None = None  # None until a handler gives a message back
        self._silent_since_ms: Callable[[], int | None] | None = None  # of all handlers, if messages are queued (D17)
        self.in_ranges: bool = False  # its owner delivers ranges, which fail as a whole: no message is to blame (D11)
        self.counts_exactly: bool = False  # `attempts` counts no delivery that has not happened (PoisonGuard)

    # --- what earlier owners have done

    def finished_to(self) -> int:
        """Returns the offset after the last message that earlier owners finished above the position, or 0. A partition
        that ends below it was truncated (D1)."""
        return self._finished_before[-1][1] if self._finished_before else 0

    def discard_inherited(self) -> None:
        """Forgets what earlier owners reported, because a truncated partition has lost those messages (D1)."""
        self._finished_before, self._reported, self._delivered_before, self._attempts = [], [], [], 0

    def nothing_there(self) -> None:
        """Forgets deliveries by earlier owners, because the partition ends at the position: there were none (D11)."""
        if not self.runs and not self._finished_before:
            self._delivered_before, self._attempts = [], 0

    def admit(self, offsets: Sequence[int]) -> tuple[Sequence[int], OffsetRun | None]:
        """Adds fetched ascending offsets without those that earlier owners finished. Returns them (the same object if
        none was left out) and their run (None if all were)."""
        spans, kept = self._finished_before, offsets
        if offsets[0] < self._floor or (spans and spans[0][0] <= offsets[-1] and spans[-1][1] > offsets[0]):
            kept = [offset for offset in offsets if not self._was_finished(offset)]
        if len(kept) == len(offsets):
            return offsets, self.add(offsets)
        run = self.add(kept) if kept else None
        if run is not None:
            run.sifted = True
        self.reached(offsets[-1] + 1)
        return kept, run

    def reached(self, offset: int) -> None:
        """Notes that all messages below `offset` were added or left out: other offsets there hold no message (D1)."""
        self._fetched_to = max(self._fetched_to, offset)

    def _was_finished(self, offset: int) -> bool:
        if offset < self._floor:
            return True  # inside a span that the position passed before all of it was fetched
        at = bisect_right(self._finished_before, offset, key=lambda span: span[0]) - 1
        return at >= 0 and offset < self._finished_before[at][1]

    def next_finished(self, offset: int) -> tuple[int, int]:
        """Returns the first span [start, end) that earlier owners finished and that ends above `offset`; (OFFSET_MAX,
        OFFSET_MAX) without one."""
        if offset < self._floor:
            return offset, self._floor
        return next((span for span in self._finished_before if span[1] > offset), (OFFSET_MAX, OFFSET_MAX))

    # --- what this claim does

    def settle(self) -> None:
        """Notes the acks that came without the lock (OffsetRun.acks). Everything else here reads what was noted."""
        for run in self.runs:
            if run.acks:
                run.settle()

    def add(self, offsets: Sequence[int]) -> OffsetRun:
        """Adds fetched offsets and returns their run. Small fetches share one, because each costs 500 bytes."""
        if self._first == NONE:
            self._first = offsets[0]
        self._fetched_to = max(self._fetched_to, offsets[-1] + 1)
        last = self.runs[-1] if self.runs else None
        if last is not None and isinstance(last.offsets, range) and isinstance(offsets, range):
            if last.offsets.stop == offsets.start and len(last.offsets) + len(offsets) <= RUN_MERGED_MAX:
                last.offsets = range(last.offsets.start, offsets.stop)
                return last
        run = OffsetRun(offsets)
        self.runs.append(run)
        return run

    def forget_undelivered(self) -> int:
        """Drops the offsets that were fetched and not handed over; returns the offset from which to fetch again."""
        while self.runs and not self.runs[-1].delivered:
            self.runs.pop()
        if not self.runs:
            self._fetched_to = max(self._floor, self._base)
            return self.position()
        last = self.runs[-1]
        last.offsets = last.offsets[: last.delivered]
        self._fetched_to = last.offsets[-1] + 1
        return self._fetched_to

    def withdraw(self, run: OffsetRun, first: int) -> int:
        """Undoes the newest delivery, of `run` from index `first` on; returns its first offset. Nothing of it may be
        finished, and nothing fetched after it."""
        offset = run.offsets[first]
        run.offsets, run.delivered = run.offsets[:first], first
        if run.touched:
            run.touched = {at: ms for at, ms in run.touched.items() if at < first}
        self._fetched_to = offset
        if not first:
            self.runs.pop()
        return offset

    def position(self) -> int:
        """Returns the offset at which a new owner must begin to read; every message below it is finished."""
        low = max(self._low(), self._floor)
        spans = self._finished_before
        if spans:
            ahead = self.unfinished_from()
            while spans and spans[0][0] <= max(low, ahead):  # offsets between are finished, or do not exist
                low = max(low, spans.pop(0)[1])
            self._floor = low
        return low

    def _low(self) -> int:
        """Returns the offset up to which this claim has finished every message; drops the runs below it."""
        runs = self.runs
        while runs:
            run = runs[0]
            low = run.low
            if low < len(run.offsets):
                return run.offsets[low - 1] + 1 if low else self._base
            self._base = run.offsets[-1] + 1
            runs.popleft()
        self._base = max(self._base, self._fetched_to)
        return self._base

    def unfinished_from(self) -> int:
        """Returns the lowest fetched offset that is not finished; if all are, the one after the last fetched."""
        self._low()
        if not self.runs:
            return self._fetched_to
        run = self.runs[0]
        return run.offsets[run.low]

    def first_taken(self) -> tuple[int, int] | None:
        """Returns (monotonic ms, offset): since when the program has had the lowest unfinished message, in work or
        waiting; None if it has none. As far as its acks were noted (`Claim.settle`)."""
        self._low()
        run = self.runs[0] if self.runs else None
        if run is None or run.low >= run.delivered:
            return None
        return run.delivered_ms(run.low), run.offsets[run.low]

    @property
    def finished_above(self) -> int:
        """Returns how many messages are finished above the lowest unfinished one."""
        return sum(len(run.finished) + (run.low if at else 0) for at, run in enumerate(self.runs))

    @property
    def in_flight(self) -> int:
        """Returns how many messages were delivered and are not finished."""
        return sum(run.unfinished for run in self.runs)

    @property
    def taken(self) -> int:
        """Returns how many messages are in flight or queued for a handler (D17)."""
        return sum(run.taken for run in self.runs)

    @property
    def held(self) -> int:
        """Returns how many messages handlers have: those in flight, without those that were given back."""
        return sum(run.held for run in self.runs)

    @property
    def awaited(self) -> int:
        """Returns how many messages handlers have, or will have without another hand-over."""
        return sum(run.awaited for run in self.runs)

    def queue(self, run: OffsetRun, indexes: Iterable[int], silent_since_ms: Callable[[], int | None]) -> None:
        """Records that messages that were handed over are queued for their handlers, and not yet delivered (D17). Of
        all that is queued, the newest `silent_since_ms` tells since when no handler is left that is not silent."""
        self._silent_since_ms = silent_since_ms
        run.queue(indexes)

    def begin(self, run: OffsetRun, index: int, mono_ms: int) -> None:
        """Records that the handler of a queued message begins: now it is delivered (D17)."""
        self._touched = True
        run.begin(index)
        run.touched = run.touched or {}
        run.touched[index] = mono_ms

    @property
    def tracked(self) -> int:
        """Returns how many offsets take memory: all from the position to the newest fetched one (D1)."""
        self.position()
        return sum(len(run.offsets) for run in self.runs) - (self.runs[0].low if self.runs else 0)

    def tracks(self, count: int) -> bool:
        """Returns whether `count` offsets take memory (`tracked`). It counts them only if there may be so many."""
        return bool(self.runs) and self._fetched_to - self.runs[0].offsets[0] >= count and self.tracked >= count

    # --- what it reports

    def progress(self) -> bytes:
        """Returns, for heartbeats and Releases, what is finished above the position and how often the rest was
        delivered, in the bytes of progress.py (4.2, D1)."""
        position = self.position()
        if self.redeliveries is not None:
            self.redeliveries.forget_finished(position)
        before, mine, in_flight = self._delivered_before, self.handed_to(), self.in_flight
        again = self._again(position)
        queued = progress.union(span for run in self.runs if run.queued for span in run.queued_spans())
        known = again or self._finished_before or self._out_of_order() or (before and before[-1].to > position + 1)
        known = known or bool(queued and in_flight)
        if not known and (in_flight <= 1 or mine - position == in_flight):
            return b""  # nearly always
        finished = progress.union([*self._finished_spans(position), *self._finished_before, *self._reported])
        finished = [(max(start, position), to) for start, to in finished if to > position]
        self._reported = progress.fitting(position, finished, self._reported)
        done = [Range(start, to, 0) for start, to in self._reported]
        before_me = self._delivered_again(position, mine, queued)
        before_me = progress.without(before_me, [(one.start, one.to) for one in again])
        again = progress.without(sorted([*before_me, *again]), finished)
        open_spans = progress.without([Range(position, mine, 1)], finished)
        beyond = bool(again) and again[-1].to > mine
        holes = in_flight > 1 and sum(to - start for start, to, _ in open_spans) != in_flight
        if in_flight and (queued or beyond or holes):
            # The number in flight alone would not say which messages these are: some offsets do not exist, or their
            # messages are queued, or others above were delivered by earlier owners.
            spans = progress.union([*finished, *queued, *((start, to) for start, to, _ in again)])
            again += progress.without([Range(position + 1, mine, 1)], spans)
        return progress.encode(position, sorted([*done, *again]))

    def _out_of_order(self) -> bool:
        """Returns whether a message above the lowest unfinished one is finished."""
        return any(run.finished or (run.low and at) for at, run in enumerate(self.runs))

    def _finished_spans(self, position: int) -> list[tuple[int, int]]:
        """Returns spans [start, to) that this claim has finished above the position: the lowest that may be reported.

        Two finished offsets are in one span if no offset between them was fetched, because such offsets do not exist or
        were finished by earlier owners.
        """
        spans: list[tuple[int, int]] = []
        joins = False  # whether the newest span reaches the end of the previous run
        for run in self.runs:
            offsets = run.offsets
            if run.low:
                above = offsets[0] >= position  # in the lowest run, all below `low` is below the position
                joins = above and _extend(spans, offsets[0], offsets[run.low - 1] + 1, joins)
            at = run.low
            for index in sorted(run.finished):
                joins = _extend(spans, offsets[index], offsets[index] + 1, joins and index == at)
                at = index + 1
            joins = joins and at == len(offsets)
            if len(spans) > SPANS_REPORTED and not progress.mappable(spans):
                break
        return spans

    def _delivered_again(self, position: int, mine: int, queued: Sequence[tuple[int, int]]) -> list[Range]:
        """Returns the ranges above the position that earlier owners delivered, with counts; below `mine`, including
        this claim's delivery, unless it delivers ranges, or the message is `queued`."""
        counted = []
        for start, to, times in self._delivered_before:
            start = max(start, position + 1)
            if start < min(to, mine):
                once_more = progress.without([Range(start, min(to, mine), times + (not self.in_ranges))], queued)
                rest = progress.without(
                    [Range(start, min(to, mine), times)], [(one.start, one.to) for one in once_more]
                )
                counted += sorted([*once_more, *rest])
            if max(start, mine) < to:
                counted.append(Range(max(start, mine), to, times))
        return counted

    def _again(self, position: int) -> list[Range]:
        """Returns the messages above the position that this claim has delivered again, with all their deliveries."""
        if self.redeliveries is None:
            return []
        ranges: list[Range] = []
        for offset in sorted(self.redeliveries.again):
            count = self.redeliveries.again[offset]
            times = self.delivery_count(offset) - self._queued(offset)
            if offset <= position or not count:
                continue
            if ranges and ranges[-1].to == offset and ranges[-1].times == times:
                ranges[-1] = ranges[-1]._replace(to=offset + 1)
            else:
                ranges.append(Range(offset, offset + 1, times))
        return ranges

    def _queued(self, offset: int) -> bool:
        """Returns whether the message at `offset` is queued for its handler."""
        place = self.place_of(offset)
        return place is not None and place[0].is_queued(place[1])

    def handed_to(self) -> int:
        """Returns the offset after the last message that this claim has delivered, or where it began."""
        for run in reversed(self.runs):
            queued = run.queued or ()
            for index in range(run.delivered - 1, -1, -1):
                if index not in queued:
                    return run.offsets[index] + 1
        return self._base

    def attempts(self) -> int:
        """Returns how often the message at the position counts as delivered if this owner dies now (F4.5): once more
        than is known, because nobody will know; as `deliveries()` with `counts_exactly`; nothing is added with
        `in_ranges`."""
        if self.counts_exactly:
            return self.deliveries()
        number = self.delivery_count(self._message())
        return max(1, number - 1) if self.in_ranges else number

    def deliveries(self) -> int:
        """Returns how often earlier owners and this one delivered the message at the position."""
        run = self.runs[0] if self.runs else None
        once = run is not None and run.delivered > run.low and not run.is_queued(run.low)
        before = self.delivery_count(self._message()) - 1
        return max(before, int(once)) if self.in_ranges else before + once

    def delivery_count(self, offset: int) -> int:
        """Returns the number of the delivery of the message at `offset` that is running now, or comes next (D11)."""
        return 1 + self._delivered_before_at(offset) + self.redelivered(offset)

    def redelivered(self, offset: int) -> int:
        """Returns how often this claim has delivered the message at `offset` again."""
        return 0 if self.redeliveries is None else self.redeliveries.again.get(offset, 0)

    def _message(self) -> int:
        """Returns the offset of the message at the position; NONE until a message is fetched. What was fetched may be
        forgotten, or finished by earlier owners, so that nothing is known to be there: then the position itself."""
        position = self.position()  # drops the runs that are finished
        return NONE if self._first == NONE else max(position, self.unfinished_from())

    def _delivered_before_at(self, offset: int) -> int:
        ranges = self._delivered_before
        at = bisect_right(ranges, offset, key=lambda known: known.start) - 1 if ranges else -1
        times = ranges[at].times if at >= 0 and offset < ranges[at].to else 0
        return max(times, self._attempts) if offset == self._first else times

    def oldest(self) -> tuple[int, int] | None:
        """Returns (monotonic ms, offset): since when the longest silent handler has been silent, and its message (D4);
        or since when all are, and the lowest queued one (D17)."""
        self.position()
        found: tuple[int, int] | None = None
        since_ms = self._silent_since_ms() if self._silent_since_ms is not None else None
        if since_ms is not None:
            aside = [(run, run.aside or ()) for run in self.runs]
            queued = [run.offsets[at] for run, others in aside for at in run.queued or () if at not in others]
            found = (since_ms, min(queued)) if queued else None
        for run in self.runs:
            oldest = run.oldest()
            if oldest is not None and (found is None or oldest[0] < found[0]):
                found = (oldest[0], run.offsets[oldest[1]])
            if found is not None and not self._touched:
                break  # messages were handed over in order
        return found

    def give_back(self, run: OffsetRun, index: int, message: object, due_ms: int, size_bytes: int = 0) -> bool:
        """Records that a handler gave its message back until `due_ms` (D14). `message` is kept for the driver, as
        `size_bytes` of memory. Returns False if it is finished."""
        return self._redeliveries().give_back(run, index, message, due_ms, size_bytes)

    def post(self, run: OffsetRun, index: int) -> bool:
        """Records that a message is on its way to a dead-letter topic: unfinished, and with no handler (D15). Returns
        False if it is finished, or on its way already."""
        return self._redeliveries().post(run, index)

    def finish_posted(self, run: OffsetRun, index: int, offset: int) -> None:
        """Finishes a message whose dead letter is written. Its run may have been forgotten since, and fetched again."""
        self._redeliveries().posted.discard(offset)
        place = self.place_of(offset) or (run, index)
        place[0].take_up(place[1], None)
        place[0].finish(place[1])

    def _redeliveries(self) -> Redeliveries:
        if self.redeliveries is None:
            self.redeliveries = Redeliveries()
        self._touched = True  # later messages may from now on be handed over before earlier ones
        return self.redeliveries

    def next_delivered(self, offset: int, times: int) -> int:
        """Returns the lowest offset from `offset` on that earlier owners delivered `times` times, else OFFSET_MAX."""
        found = [max(start, offset) for start, to, known in self._delivered_before if known >= times and to > offset]
        if self._attempts >= times and self._first >= offset:
            found.append(self._first)
        return min(found, default=OFFSET_MAX)

    def place_of(self, offset: int) -> tuple[OffsetRun, int] | None:
        """Returns where a message that was handed over is: its run and its index; None if its run is done with."""
        for run in self.runs:
            index = bisect_left(run.offsets, offset, 0, run.delivered)
            if index < run.delivered and run.offsets[index] == offset:
                return run, index
        return None

    def touch(self, run: OffsetRun, first: int, stop: int, mono_ms: int) -> None:
        """Records that at `mono_ms` the handlers of the messages at the indexes [first, stop) of `run` were at work."""
        self._touched = True
        run.touch(first, stop, mono_ms)

    def touch_all(self, mono_ms: int) -> None:
        """Records that at `mono_ms` the consumer of a range of offsets was at work on all that was handed over (D9)."""
        for run in self.runs:
            if run.unfinished:
                run.touch_all(mono_ms)


def _extend(spans: list[tuple[int, int]], start: int, to: int, joins: bool) -> bool:
    """Appends the span [start, to); if `joins`, extends the newest span to `to` instead. Returns True."""
    if joins:
        spans[-1] = (spans[-1][0], to)
    else:
        spans.append((start, to))
    return True


# --- Which offsets of one claim were granted, handed over and handled, in at-most-once mode (PROTOCOL.md D2, F5)
#
# A message is handled when the user asks for more.


class Grant(NamedTuple):
    """A range [start, to) that the log granted to this session; it is never granted again (F5.2)."""

    start: int
    to: int


class AtMostOnce:
    """Tracks one claim in at-most-once mode: each message of a grant is handed over once or never (D2, D3).

    Invariants:
      M1  delivered_to never falls: no offset below it is handed over again
      M2  handed_to is the offset after the highest one handed over or skipped under this epoch, or where it began
      M3  handled_to is handed_to as it was when the user asked for more for the last time
    """

    __slots__ = (
        "asked", "began", "delivered_to", "dropped", "grants", "handed_to", "handled_to", "in_flight",
        "in_flight_since_ms",
    )  # fmt: skip

    def __init__(self, position: int) -> None:
        self.grants: deque[Grant] = deque()
        self.asked: tuple[int, int, int] | None = None  # the (from, start, to) of the range asked for, until it is read
        self.began: int = position
        self.delivered_to: int = position
        self.handed_to: int = position
        self.handled_to: int = position
        self.dropped: int = 0
        self.in_flight: int = 0  # messages that the handler has
        self.in_flight_since_ms: int | None = None

    def granted(self, start: int, to: int) -> None:
        """Adds the grant [start, to), which the caller has read in the log as accepted."""
        self.asked = None
        self.grants.append(Grant(max(start, self.delivered_to), to))

    def holds(self, offset: int) -> bool:
        """Returns whether the next message that exists, at `offset`, lies in a grant and above all that was handed
        over. Grants may end in offsets without a message; these are dropped."""
        while self.grants:
            grant = self.grants[0]
            if max(grant.start, self.delivered_to) < grant.to and offset < grant.to:
                break
            self.delivered_to = max(self.delivered_to, grant.to)
            self.grants.popleft()
        return bool(self.grants) and max(self.grants[0].start, self.delivered_to) <= offset < self.grants[0].to

    def granted_to(self) -> int:
        """Returns the offset at which the newest grant ends, and the next grant must begin."""
        return self.grants[-1].to if self.grants else self.delivered_to

    def next_granted(self) -> int:
        """Returns the lowest offset that is granted and was not handed over; where delivery continues if none is."""
        return max(self.grants[0].start, self.delivered_to) if self.grants else self.delivered_to

    def deliver(self, offset: int, mono_ms: int, count: int = 1) -> None:
        """Records that `count` messages are handed over, the last at `offset`. The caller has asked `holds` for
        each."""
        self.delivered_to = self.handed_to = offset + 1
        self.in_flight += count
        if self.in_flight_since_ms is None:
            self.in_flight_since_ms = mono_ms

    def skipped(self, offset: int) -> None:
        """Records that no message is left below `offset`: what is granted of it is used up, and not given back."""
        to = min(offset, self.granted_to())
        if self.handed_to == self.delivered_to < to:  # otherwise messages were dropped, which may be given back
            if self.handled_to == self.handed_to:
                self.handled_to = to
            self.delivered_to = self.handed_to = to

    def acked(self, count: int, mono_ms: int) -> None:
        """Records acks of `count` messages: the handler is at work on the others (D4), and if it has none left, a
        release need not wait. What was handled is known when it asks for more."""
        self.in_flight = max(0, self.in_flight - count)  # a message may be acked twice
        self.in_flight_since_ms = mono_ms if self.in_flight else None

    def returned(self) -> None:
        """Records that the handler has finished all messages that it got, because it asked for more."""
        self.in_flight, self.in_flight_since_ms, self.handled_to = 0, None, self.handed_to

    def drop(self) -> int:
        """Drops what was granted and not handed over; returns how many offsets it has dropped (D3)."""
        lost = sum(max(0, grant.to - max(grant.start, self.delivered_to)) for grant in self.grants)
        if self.grants:
            self.delivered_to = max(self.delivered_to, self.grants[-1].to)
        self.grants.clear()
        self.dropped += lost
        return lost


# --- One client's own view of what it owns: its claims (PROTOCOL.md T12, T16, 8)
#
# A claim is OPEN (delivering), DRAINING (delivery has stopped, handlers finish), RELEASING (its Release was sent; it
# never delivers again) or GONE. The parts of the member report what was read.


class ClaimPhase(IntEnum):
    OPEN = 0
    DRAINING = 1
    RELEASING = 2
    GONE = 3


@dataclass(slots=True, eq=False)
class Claim:
    """The state of a claim of this client that the fold accepted."""

    tp: TopicPartition
    epoch: int
    generation: int
    tracker: AtLeastOnce | AtMostOnce
    topic_id: str = ""  # in the log; it cannot change while a partition of the topic is claimed (F9.10)
    phase: ClaimPhase = ClaimPhase.OPEN
    sealed: bool = False  # RELEASING or GONE: acks come too late
    reason: str = ""
    successor: int = NONE
    drain_until_ms: int | None = None  # monotonic; None: until the handlers are done
    release_sent_ms: int | None = None
    # What each copy of its Release says, from the seal on: where the next owner starts; in at-least-once mode how often
    # that message was delivered, how many are in flight, and the progress.
    released_position: int = NONE
    released: tuple[int, int, bytes] = (0, 0, b"")
    # The position and progress that the log had when one of its records ended the claim. None before, and if this
    # client gave the claim up by itself: then nobody knows which of its heartbeats the log still accepts.
    final: tuple[int, bytes] | None = None
    sealed_ms: int = 0  # monotonic, once sealed
    seek_to: int = NONE  # its user moves it there: a SeekingPartition takes the place of its Release
    seek_sent: bool = False
    parking: str = ""  # why its Release parks the partition (F6.4)
    told: bool = False  # whether the user has learned of it
    revoking_reported: bool = False  # whether the user knows that it will be released
    one_by_one: bool = False  # its messages are handed over singly for a while (PoisonGuard)
    offer: tuple[int, int] | None = None  # wanted and not yet granted, in at-most-once mode: [start, to)
    out_of_line_ms: int | None = None  # monotonic, since when a restricted policy takes it away (A7)
    pin: int = NONE  # epoch of the own pin when it was accepted, under policy `pinned` (A11)
    end_offset: int = NONE  # end of the partition as last seen
    end_before: int = NONE  # the same as the log had it when the claim began, with lag weights (A14)

    def stop(self, reason: str, drain_until_ms: int | None, successor: int = NONE) -> None:
        """Ends delivery; handlers may finish until `drain_until_ms` (None: as long as they need). Of two calls, the one
        with the earlier deadline gives `reason` (for people) and `successor` (a session, or NONE)."""
        if self.phase is ClaimPhase.OPEN:
            self.phase = ClaimPhase.DRAINING
            self.reason, self.successor, self.drain_until_ms = reason, successor, drain_until_ms
        elif self.phase is ClaimPhase.DRAINING and drain_until_ms is not None:
            if self.drain_until_ms is None or drain_until_ms < self.drain_until_ms:
                self.drain_until_ms = drain_until_ms
                self.reason, self.successor = reason, successor

    def park(self, parking: str, reason: str, drain_until_ms: int) -> None:
        """Ends delivery permanently; the Release will park the partition (F6.4). `parking`: an error's name
        (records.py). It and `reason`, the Release's text, replace what `stop` has set."""
        self.stop(reason, drain_until_ms)
        self.parking, self.reason, self.successor = parking, reason, NONE

    def seal(self, phase: ClaimPhase) -> None:
        """Enters RELEASING or GONE: nothing is delivered any more, and no ack counts (T16). An ack is appended to its
        run without the lock and then looks at `sealed`, so it is noted here or comes too late: ask for the position
        afterwards."""
        before, self.phase, self.sealed = self.sealed, phase, True
        if not before:
            self._settle()

    def seal_for_release(self, now_ms: int) -> None:
        """Enters RELEASING, and notes what the Release says: its copies are sent until one is read."""
        self.seal(ClaimPhase.RELEASING)
        self.sealed_ms, self.released_position = now_ms, self.position()
        tracker = self.tracker
        if isinstance(tracker, AtLeastOnce):
            self.released = tracker.deliveries(), tracker.in_flight, tracker.progress()

    def settle(self) -> None:
        """Notes the acks that came without the lock, unless the claim is sealed. Never call it between two questions
        whose answers belong together, such as the position and the progress of one heartbeat."""
        if not self.sealed and isinstance(self.tracker, AtLeastOnce):
            self.tracker.settle()

    def _settle(self) -> None:
        if isinstance(self.tracker, AtLeastOnce):
            self.tracker.settle()

    def seek(self, position: int, now_ms: int) -> None:
        """Seals the claim at once, to be replaced by a new one that begins at `position` (F6.6, T20)."""
        self.seal_for_release(now_ms)
        self.reason, self.seek_to, self.revoking_reported = "seek", position, True

    def give_up_seek(self) -> None:
        """Has the claim released at its old position instead."""
        self.seek_to, self.release_sent_ms = NONE, None

    def reopen(self) -> None:
        """Delivers again, because the reason to release the claim went away before its Release was sent."""
        if self.phase is ClaimPhase.DRAINING:
            self.phase, self.reason, self.successor, self.drain_until_ms = ClaimPhase.OPEN, "", NONE, None
            self.revoking_reported = False

    def drained(self, now_ms: int) -> bool:
        """Returns whether the Release may be sent: no handler has a message, or the deadline is over (T12). A message
        that waits to be delivered again is the next owner's (D14)."""
        if self.drain_until_ms is not None and now_ms >= self.drain_until_ms:
            return True
        if isinstance(self.tracker, AtLeastOnce):
            return self.tracker.held == 0
        return self.tracker.in_flight_since_ms is None

    def position(self) -> int:
        """Returns where the next owner starts; in at-most-once mode after the highest offset that was handed over."""
        return self.tracker.position() if isinstance(self.tracker, AtLeastOnce) else self.tracker.handed_to

    def saw_end(self, end_offset: int) -> None:
        """Notes where the partition ends, as the driver has last seen it; NONE if it does not know."""
        self.end_offset = end_offset
        if isinstance(self.tracker, AtLeastOnce) and end_offset == self.tracker.position():
            self.tracker.nothing_there()

    def lag(self, position: int) -> int:
        end = self.end_before if self.end_offset == NONE else self.end_offset
        return max(0, end - position) if end != NONE else 0

    def handler_since_ms(self) -> int | None:
        """Returns since when the longest silent handler has been silent (D4), None without one; in at-most-once mode,
        since it got its first message."""
        if isinstance(self.tracker, AtLeastOnce):
            oldest = self.tracker.oldest()
            return None if oldest is None else oldest[0]
        return self.tracker.in_flight_since_ms


# --- Builds the records of one claim: its entry in a heartbeat (PROTOCOL.md T11) and its Release (T16, F6).


def claim_state(partition: Partition, claim: Claim) -> ClaimState | None:
    """Returns the heartbeat entry of a claim; None if the world already holds the same values (T11)."""
    tracker = claim.tracker
    if isinstance(tracker, AtMostOnce):
        entry = ClaimState(claim.epoch, tracker.handled_to, claim.lag(tracker.delivered_to), tracker.in_flight)
        held = ClaimState(claim.epoch, partition.floor, partition.lag, partition.in_flight)
        return entry if entry != held else None
    position = tracker.position()
    entry = ClaimState(
        claim.epoch, position, claim.lag(position), tracker.in_flight, tracker.attempts(), tracker.progress()
    )
    held = ClaimState(
        claim.epoch, partition.position, partition.lag, partition.in_flight, partition.attempts, partition.progress
    )
    return entry if entry != held else None


def will_entry(claim: Claim) -> ClaimState | None:
    """Returns what a claim keeps for the witness (T19), None if its will does not release it. The message at the
    position counts as delivered once more: the owner will be dead (F4.5)."""
    tracker = claim.tracker
    if isinstance(tracker, AtMostOnce) or claim.tp.partition < 0:
        return None
    return ClaimState(claim.epoch, tracker.position(), 0, tracker.in_flight, tracker.attempts(), tracker.progress())


def release(session: int, partition: Partition, claim: Claim) -> ReleasingPartition | SeekingPartition:
    """Returns the Release of a claim, or the SeekingPartition that replaces it (F6.6). In at-least-once mode: where the
    next owner starts (F6.2); in at-most-once mode: gives back what was not handed over (F6.3)."""
    tracker = claim.tracker
    if claim.seek_to != NONE:
        return SeekingPartition(session, claim.epoch, claim.seek_to)
    if isinstance(tracker, AtMostOnce):
        return ReleasingPartition(
            session,
            claim.epoch,
            NONE,
            claim.successor,
            claim.reason,
            observed=partition.position,
            give=claim.released_position,
            in_flight=tracker.in_flight,
            parked=claim.parking,
        )
    attempts, in_flight, progress_bytes = claim.released
    return ReleasingPartition(
        session,
        claim.epoch,
        claim.released_position,
        claim.successor,
        claim.reason,
        attempts=attempts,
        in_flight=in_flight,
        progress=progress_bytes,
        parked=claim.parking,
    )


# --- Which acks of a claim the log has: spans of finished offsets, compared with what the log says of the partition.
#
# An ack counts once the log has it: below the position, or in the ranges that are finished above it (progress.py). A
# span is the offsets [start, to). All of it is about at-least-once mode; in the other mode the grants have moved the
# position.


Spans = Sequence[tuple[int, int]]


def spans_of(offsets: Sequence[int]) -> Spans:
    """Returns these offsets, which are ascending, as spans."""
    if isinstance(offsets, range) and offsets.step == 1:
        return [(offsets.start, offsets.stop)] if offsets else []
    return progress.union((offset, offset + 1) for offset in offsets)


def finished_spans(tracker: AtLeastOnce) -> Spans:
    """Returns all that the claim has finished, as far as its acks were noted (`Claim.settle`)."""
    position = tracker.position()
    # All below the position: the log may have the last of it as finished above a lower position.
    spans = [(-1, position)]
    for run in tracker.runs:
        spans += [(start, to) for start, to in spans_of(run.offsets[: run.low]) if to > position]
        spans += [(run.offsets[index], run.offsets[index] + 1) for index in run.finished]
    return progress.union(spans)


def log_has(spans: Spans, claim: Claim, group: Group | None) -> bool:
    """Returns whether the log names all of `spans` as finished: when it ended the claim, or now if it has not."""
    state = claim.final
    if state is None:
        if group is None or claim.epoch not in group.claims:
            return False
        partition = group.claims[claim.epoch]
        state = partition.position, partition.progress
    position, known = state
    if spans and spans[-1][1] <= position:
        return True
    finished = [(start, to) for start, to, times in progress.decode(position, known) if not times]
    return not progress.without([Range(max(start, position), to, 0) for start, to in spans if to > position], finished)


# --- Finds a message that kills each process that handles it, by handing messages over one at a time (PROTOCOL.md D11).
#
# The log counts deliveries of the message at the position, also those that may not have happened, because an owner that
# dies at once reports nothing. So the count may go to a message a few before the one that killed it, or to one of
# another partition. When two owners have died like this, the next one is careful for one interval: of all such claims
# it hands over one message at a time, and each only when the log shows that all before it are finished and that this
# one counts as delivered, and no other. Then the deliveries of the message that kills are counted, and those of no
# other.


DELIVERIES: Final = 2  # of the message at the position by earlier owners; fewer may be ordinary crashes


def careful(group: Group, partition: Partition) -> bool:
    """Returns whether the new owner must hand messages over one by one. `partition.attempts` counts its own delivery
    already (F4.5)."""
    return group.mode == AT_LEAST_ONCE and partition.attempts > DELIVERIES


def suspicion(group: Group, partition: Partition) -> str:
    """Returns why the message at a new claim's position is reported, or "": a careful owner delivered it and did not
    finish it. Only those, and owners that ended before they could report, go beyond DELIVERIES."""
    if group.mode != AT_LEAST_ONCE or partition.attempts <= DELIVERIES + 1:
        return ""
    return f"{partition.attempts - 1} deliveries by earlier owners, and none finished it: it may end their processes"


class PoisonGuard:
    """Knows which claims of one member hand their messages over one by one, and which of them may do so now."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._claims: dict[int, tuple[Claim, int]] = {}  # epoch -> the claim; monotonic ms until which it is careful
        self._reported: dict[int, tuple[int, int]] = {}  # epoch -> newest position and attempts that a heartbeat has
        self._chosen: int = NONE  # epoch of the claim whose message counts as delivered
        self._begun_at: int = NONE  # what that claim had handed over when it was chosen: the offset after it
        self._ended: bool = False

    def begin(self, claim: Claim, now: Instant) -> bool:
        """Makes a new claim careful for one interval, if it must be. Returns whether it is: the next heartbeat is then
        due at once."""
        if self._ended:
            return False
        assert isinstance(claim.tracker, AtLeastOnce)
        claim.one_by_one = claim.tracker.counts_exactly = True
        self._claims[claim.epoch] = claim, now.mono_ms + self.interval_ms
        self._reported[claim.epoch] = _figures(claim)
        return True

    def end_all(self) -> None:
        """Has no claim be careful from now on, because ranges are delivered and not messages."""
        self._ended = True
        for claim, _ in [*self._claims.values()]:
            self.end(claim)

    def opens(self, claim: Claim, group: Group, now: Instant, awaits_echo: bool) -> bool:
        """Returns whether a careful claim may hand over its next message: no message of a careful claim is with a
        handler, and the log has what must be known if the process dies of it: those before it are finished, it counts
        as delivered, and those of other careful claims do not. `awaits_echo`: a heartbeat is on its way that may change
        this."""
        tracker, partition = claim.tracker, group.partitions[claim.tp]
        assert isinstance(tracker, AtLeastOnce)
        if now.mono_ms >= self._claims[claim.epoch][1]:
            tracker.counts_exactly = False
            if partition.attempts < tracker.attempts():
                return False
            self.end(claim)
            return True
        if self._chosen != claim.epoch and not self._choose(claim):
            return False
        if awaits_echo or tracker.in_flight or claim.position() > partition.position:
            return False
        return all(group.partitions[one.tp].attempts == _figures(one)[1] for one, _ in self._claims.values())

    def _choose(self, claim: Claim) -> bool:
        """Has the next message of a claim count as delivered, unless that of another one may still be handed over."""
        before = self._claims.get(self._chosen)
        if before is not None:
            tracker = before[0].tracker
            assert isinstance(tracker, AtLeastOnce)
            if tracker.held or tracker.handed_to() == self._begun_at:
                return False
            tracker.counts_exactly = True
        assert isinstance(claim.tracker, AtLeastOnce)
        claim.tracker.counts_exactly = False
        self._chosen, self._begun_at = claim.epoch, claim.tracker.handed_to()
        return True

    def end(self, claim: Claim) -> None:
        claim.one_by_one = False
        if isinstance(claim.tracker, AtLeastOnce):
            claim.tracker.counts_exactly = False
        self._claims.pop(claim.epoch, None)
        self._reported.pop(claim.epoch, None)

    @property
    def watches(self) -> bool:
        """Returns whether any claim is careful."""
        return bool(self._claims)

    def report_due(self, group: Group) -> bool:
        """Returns, once per figures of a claim, whether a careful claim waits for a heartbeat to tell the log."""
        due = False
        for epoch, (claim, _) in self._claims.items():
            figures, partition = _figures(claim), group.partitions[claim.tp]
            if claim.sealed or figures in ((partition.position, partition.attempts), self._reported.get(epoch)):
                continue
            self._reported[epoch] = figures
            due = True
        return due


def _figures(claim: Claim) -> tuple[int, int]:
    """Returns the position of a claim in at-least-once mode, and how often the message there counts as delivered."""
    assert isinstance(claim.tracker, AtLeastOnce)
    return claim.tracker.position(), claim.tracker.attempts()
