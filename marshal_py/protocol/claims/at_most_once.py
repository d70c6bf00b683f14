"""Tracks which offsets of one claim were granted, handed over and handled, in at-most-once mode (PROTOCOL.md D2, F5).

It knows offsets, never messages. A message is handed over when the user gets it, and handled when the user asks for
more. Times are monotonic ms. Not thread-safe: callers hold a lock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Grant(NamedTuple):
    """Holds a range [start, to) that the log granted to this session; it is never granted again (F5.2)."""

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
        "asked",
        "began",
        "delivered_to",
        "dropped",
        "grants",
        "handed_to",
        "handled_to",
        "in_flight",
        "in_flight_since_ms",
    )

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
        """Returns whether the message at `offset`, the next one that exists, may be handed over.

        It may if it lies in a grant and above all messages that were handed over. A grant may end in offsets without a
        message (compaction, transaction markers); such a grant is dropped.
        """
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
        """Records that `count` messages are handed over, the last of them at `offset`.

        The caller has asked `holds` for each of them.
        """
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

    def acked(self) -> None:
        """Records that the handler has acked a message, so that a release need not wait for it.

        It may have others, of a batch or of a reservation, so this says nothing about which ones are handled.
        """
        self.in_flight, self.in_flight_since_ms = 0, None

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
