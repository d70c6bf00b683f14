"""One client's own view of what it owns: each claim from its acceptance to its end (PROTOCOL.md T12, T16, 8).

A claim is OPEN (delivering), DRAINING (stopped, handlers finish), RELEASING (its Release was sent; it never delivers
again) or gone. Nothing here asks the world; member.py tells it what was read.
"""

from __future__ import annotations

from enum import IntEnum

from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce
from marshal_py.protocol.identity import NONE, TopicPartition


class ClaimPhase(IntEnum):
    OPEN = 0
    DRAINING = 1
    RELEASING = 2
    GONE = 3


class Claim:
    """A claim that was read accepted."""

    __slots__ = (
        "drain_until_ms",
        "end_offset",
        "epoch",
        "generation",
        "offer",
        "one_by_one",
        "parking",
        "phase",
        "reason",
        "release_sent_ms",
        "released_position",
        "revoking_reported",
        "sealed",
        "sealed_ms",
        "successor",
        "topic_id",
        "tp",
        "tracker",
    )

    def __init__(
        self, tp: TopicPartition, epoch: int, generation: int, tracker: AtLeastOnce | AtMostOnce, topic_id: str = ""
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id  # as the log had it: it stays while a partition of the topic is claimed (F9.10)
        self.epoch = epoch
        self.generation = generation
        self.tracker = tracker
        self.phase = ClaimPhase.OPEN
        self.sealed = False  # RELEASING or GONE: acks come too late
        self.reason = ""
        self.successor = NONE
        self.drain_until_ms: int | None = None  # monotonic; None: until the handlers are done
        self.release_sent_ms: int | None = None
        self.released_position = NONE
        self.sealed_ms = 0  # monotonic, once sealed
        self.parking = ""  # why its Release parks the partition (F6.4)
        self.revoking_reported = False  # whether the user knows that it will be released
        self.one_by_one = False  # its messages are handed over singly for a while (poison_guard.py)
        self.offer: tuple[int, int] | None = None  # fetched and not yet granted, in at-most-once mode: [start, to)
        self.end_offset = NONE  # end of the partition as last seen, for lag

    def stop(self, reason: str, drain_until_ms: int | None, successor: int = NONE) -> None:
        """Ends delivery; what handlers hold may finish until the deadline. The earliest deadline counts."""
        if self.phase is ClaimPhase.OPEN:
            self.phase = ClaimPhase.DRAINING
            self.reason, self.successor, self.drain_until_ms = reason, successor, drain_until_ms
        elif self.phase is ClaimPhase.DRAINING and drain_until_ms is not None:
            if self.drain_until_ms is None or drain_until_ms < self.drain_until_ms:
                self.drain_until_ms = drain_until_ms
                self.reason, self.successor = reason, successor

    def park(self, parking: str, reason: str, drain_until_ms: int) -> None:
        """Ends delivery for good: whatever else was to become of the claim, its Release parks the partition (F6.4)."""
        self.stop(reason, drain_until_ms)
        self.parking, self.reason, self.successor = parking, reason, NONE

    def seal(self, phase: ClaimPhase) -> None:
        """RELEASING or GONE: from here on nothing is delivered and no ack counts (T16)."""
        self.phase, self.sealed = phase, True

    def reopen(self) -> None:
        """The reason to let go went away before the Release was sent."""
        if self.phase is ClaimPhase.DRAINING:
            self.phase, self.reason, self.successor, self.drain_until_ms = ClaimPhase.OPEN, "", NONE, None
            self.revoking_reported = False

    def drained(self, now_ms: int) -> bool:
        """Whether the Release may go out: no handler holds a message of it, or the time for that is over (T12)."""
        if self.drain_until_ms is not None and now_ms >= self.drain_until_ms:
            return True
        if isinstance(self.tracker, AtLeastOnce):
            return self.tracker.in_flight == 0
        return self.tracker.in_flight_since_ms is None

    def position(self) -> int:
        """Where the next owner goes on, as far as this client knows; at most once behind all that was handed over."""
        return self.tracker.position() if isinstance(self.tracker, AtLeastOnce) else self.tracker.handed_to

    def lag(self, position: int) -> int:
        return max(0, self.end_offset - position) if self.end_offset != NONE else 0

    def handler_since_ms(self) -> int | None:
        """Since when the most silent handler has been silent: at most once, since when any has been at work (D4)."""
        if isinstance(self.tracker, AtLeastOnce):
            oldest = self.tracker.oldest()
            return None if oldest is None else oldest[0]
        return self.tracker.in_flight_since_ms
