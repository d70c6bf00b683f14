"""What one claim has delivered: the low watermark at least once, the grants at most once (PROTOCOL.md 8).

Knows offsets, never messages. Callers hold their lock around it; times are monotonic ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

RUN_MERGED_MAX = 1_000  # offsets; bounds the set of what is finished out of order
MARK_MS = 1_000  # delivery times are kept to this grain: a handler timeout is many seconds, a mark costs memory


class Run:
    """Messages of one claim that were fetched together, oldest first.

    Invariants:
      R1  0 <= low <= delivered <= len(offsets)
      R2  every index below low is finished; low itself is not
      R3  `finished` holds the finished indexes above low, and only such
    """

    __slots__ = ("delivered", "finished", "low", "marks", "offsets")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets
        self.delivered = 0
        self.low = 0
        self.finished: set[int] = set()
        self.marks: list[tuple[int, int]] = []  # (first index, mono_ms) of deliveries, one per MARK_MS at most

    def deliver(self, count: int, mono_ms: int) -> int:
        """Hands `count` more messages over; returns the index of the first."""
        first = self.delivered
        self.delivered = first + count
        marks = self.marks
        if not marks or mono_ms - marks[-1][1] >= MARK_MS:
            marks.append((first, mono_ms))
        return first

    def finish(self, index: int) -> bool:
        """Marks one message finished; False if it was already (an ack may come twice)."""
        low = self.low
        if index > low:
            if index in self.finished:
                return False
            self.finished.add(index)
            return True
        if index < low:
            return False
        low += 1
        finished = self.finished
        while finished and low in finished:
            finished.remove(low)
            low += 1
        self.low = low
        return True

    def finish_range(self, first: int, stop: int) -> int:
        """Marks [first, stop) finished; returns how many were not yet."""
        if first == self.low and not self.finished:
            self.low = stop
            return stop - first
        return sum(self.finish(index) for index in range(max(first, self.low), stop))

    @property
    def unfinished(self) -> int:
        """Delivered and not finished."""
        return self.delivered - self.low - len(self.finished)

    def delivered_ms(self, index: int) -> int:
        """When the message at `index` was handed over, to the grain of MARK_MS, never earlier than it was."""
        marks = self.marks
        for position in range(len(marks) - 1, -1, -1):
            if marks[position][0] <= index:
                first, mono_ms = marks[position]
                return mono_ms if index == first else mono_ms + MARK_MS
        return 0

    def touch(self, mono_ms: int) -> None:
        """The handler of the lowest unfinished message reports that it is still at work."""
        self.marks = [(self.low, mono_ms)]


class AtLeastOnce:
    """Low watermark of one claim: the lowest unfinished offset is the position (D1)."""

    __slots__ = ("_base", "_start", "inherited_attempts", "runs")

    def __init__(self, position: int, attempts: int = 0) -> None:
        """`position`: of the claim. `attempts`: how often the message there was delivered by earlier owners."""
        self._base = position
        self._start = position
        self.inherited_attempts = attempts
        self.runs: deque[Run] = deque()

    def add(self, offsets: Sequence[int]) -> Run:
        """The run that holds them. A trickle, fetched one by one, goes on in the newest run: a run costs 500 bytes."""
        last = self.runs[-1] if self.runs else None
        if last is not None and isinstance(last.offsets, range) and isinstance(offsets, range):
            if last.offsets.stop == offsets.start and len(last.offsets) + len(offsets) <= RUN_MERGED_MAX:
                last.offsets = range(last.offsets.start, offsets.stop)
                return last
        run = Run(offsets)
        self.runs.append(run)
        return run

    def forget_undelivered(self) -> int:
        """Drops what was fetched and not handed over; returns the offset after everything that was."""
        while self.runs and not self.runs[-1].delivered:
            self.runs.pop()
        if not self.runs:
            return self.position()
        last = self.runs[-1]
        last.offsets = last.offsets[: last.delivered]
        return last.offsets[-1] + 1

    def withdraw(self, run: Run, first: int) -> int:
        """Takes the newest delivery, of the messages from index `first` on, back; returns the first of their offsets.

        None of them is finished, and nothing was fetched after them.
        """
        offset = run.offsets[first]
        run.offsets, run.delivered = run.offsets[:first], first
        if not first:
            self.runs.pop()
        return offset

    def position(self) -> int:
        """The next offset that an heir must read: never beyond what was finished."""
        runs = self.runs
        while runs:
            run = runs[0]
            low = run.low
            if low < len(run.offsets):
                return run.offsets[low - 1] + 1 if low else self._base
            self._base = run.offsets[-1] + 1
            runs.popleft()
        return self._base

    @property
    def in_flight(self) -> int:
        return sum(run.unfinished for run in self.runs)

    @property
    def tracked(self) -> int:
        """Offsets that cost memory: everything from the position to the newest fetched one, finished or not (D1)."""
        self.position()
        return sum(len(run.offsets) for run in self.runs) - (self.runs[0].low if self.runs else 0)

    def attempts(self) -> int:
        """How often the lowest unfinished message was delivered, earlier owners included."""
        position = self.position()
        begun = bool(self.runs) and self.runs[0].delivered > self.runs[0].low
        return int(begun) + (self.inherited_attempts if position == self._start else 0)

    def delivery_count(self, offset: int) -> int:
        """1 for a first delivery; more for the message that earlier owners began, as far as the log tells."""
        return 1 + (self.inherited_attempts if offset == self._start else 0)

    def oldest_ms(self) -> int | None:
        """When the lowest unfinished message was handed over; None if none is in flight."""
        self.position()
        for run in self.runs:
            if run.unfinished:
                return run.delivered_ms(run.low)
        return None

    def touch(self, mono_ms: int) -> None:
        for run in self.runs:
            if run.unfinished:
                run.touch(mono_ms)
                return


class Grant(NamedTuple):
    """A range [start, to) that the log gave to this session once and for ever (F5.2)."""

    start: int
    to: int


class AtMostOnce:
    """Grants of one claim. What a grant holds is handed over once or never (D2, D3).

    Invariants:
      M1  delivered_to never falls: no offset below it is handed over again
      M2  at most one ClaimingMessages is in flight
    """

    __slots__ = ("asked", "asked_ms", "delivered_to", "dropped", "grants", "in_flight_since_ms")

    def __init__(self, position: int) -> None:
        self.grants: deque[Grant] = deque()
        self.asked: tuple[int, int, int] | None = None  # (from, start, to) in flight
        self.asked_ms = 0
        self.delivered_to = position
        self.dropped = 0
        self.in_flight_since_ms: int | None = None

    def granted(self, start: int, to: int) -> None:
        """A ClaimingMessages of this claim was read accepted."""
        self.asked = None
        self.grants.append(Grant(max(start, self.delivered_to), to))

    def holds(self, offset: int) -> bool:
        """Whether `offset`, the next that exists, may be handed over now: inside a grant and not behind what was.

        A grant may end in offsets that do not exist (compaction, transaction markers): they are passed.
        """
        while self.grants:
            grant = self.grants[0]
            if max(grant.start, self.delivered_to) < grant.to and offset < grant.to:
                break
            self.delivered_to = max(self.delivered_to, grant.to)
            self.grants.popleft()
        return bool(self.grants) and max(self.grants[0].start, self.delivered_to) <= offset < self.grants[0].to

    def granted_to(self) -> int:
        """End of the newest grant; what lies at or beyond it must be asked for."""
        return self.grants[-1].to if self.grants else self.delivered_to

    def deliver(self, offset: int, mono_ms: int) -> None:
        """Hands the message at `offset` over: the one that `holds` said yes to."""
        self.delivered_to = offset + 1
        if self.in_flight_since_ms is None:
            self.in_flight_since_ms = mono_ms

    def returned(self) -> None:
        """The handler asked for more: what it was given is behind it."""
        self.in_flight_since_ms = None

    def drop(self) -> int:
        """Gives up what is granted and not handed over; returns how many offsets that are (D3)."""
        lost = sum(max(0, grant.to - max(grant.start, self.delivered_to)) for grant in self.grants)
        if self.grants:
            self.delivered_to = max(self.delivered_to, self.grants[-1].to)
        self.grants.clear()
        self.dropped += lost
        return lost
