"""Holds one client's own view of what it owns: each claim from its acceptance to its end (PROTOCOL.md T12, T16, 8).

A claim is OPEN (delivering), DRAINING (delivery has stopped, handlers finish), RELEASING (its Release was sent; it
never delivers again) or GONE. Nothing here reads the world: the parts of the member report what was read. Times are
monotonic ms.
"""

from __future__ import annotations

from enum import IntEnum

from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.wire.identity import NONE, TopicPartition


class ClaimPhase(IntEnum):
    OPEN = 0
    DRAINING = 1
    RELEASING = 2
    GONE = 3


class Claim:
    """Holds the state of a claim of this client that the fold accepted."""

    __slots__ = (
        "drain_until_ms",
        "end_before",
        "end_offset",
        "epoch",
        "final",
        "generation",
        "offer",
        "one_by_one",
        "out_of_line_ms",
        "parking",
        "phase",
        "pin",
        "reason",
        "release_sent_ms",
        "released_position",
        "revoking_reported",
        "sealed",
        "sealed_ms",
        "seek_sent",
        "seek_to",
        "successor",
        "told",
        "topic_id",
        "tp",
        "tracker",
    )

    def __init__(
        self, tp: TopicPartition, epoch: int, generation: int, tracker: AtLeastOnce | AtMostOnce, topic_id: str = ""
    ) -> None:
        self.tp: TopicPartition = tp
        self.topic_id: str = topic_id  # in the log; it cannot change while a partition of the topic is claimed (F9.10)
        self.epoch: int = epoch
        self.generation: int = generation
        self.tracker: AtLeastOnce | AtMostOnce = tracker
        self.phase: ClaimPhase = ClaimPhase.OPEN
        self.sealed: bool = False  # RELEASING or GONE: acks come too late
        self.reason: str = ""
        self.successor: int = NONE
        self.drain_until_ms: int | None = None  # monotonic; None: until the handlers are done
        self.release_sent_ms: int | None = None
        self.released_position: int = NONE
        # The position and progress that the log had when one of its records ended the claim. None before, and if this
        # client gave the claim up by itself: then nobody knows which of its heartbeats the log still accepts.
        self.final: tuple[int, bytes] | None = None
        self.sealed_ms: int = 0  # monotonic, once sealed
        self.seek_to: int = NONE  # its user moves it there: a SeekingPartition takes the place of its Release
        self.seek_sent: bool = False
        self.parking: str = ""  # why its Release parks the partition (F6.4)
        self.told: bool = False  # whether the user has learned of it
        self.revoking_reported: bool = False  # whether the user knows that it will be released
        self.one_by_one: bool = False  # its messages are handed over singly for a while (poison_guard.py)
        self.offer: tuple[int, int] | None = None  # wanted and not yet granted, in at-most-once mode: [start, to)
        self.out_of_line_ms: int | None = None  # monotonic, since when a restricted policy takes it away (A7)
        self.pin: int = NONE  # epoch of the own pin when it was accepted, under policy `pinned` (A11)
        self.end_offset: int = NONE  # end of the partition as last seen
        self.end_before: int = NONE  # the same as the log had it when the claim began, with lag weights (A14)

    def stop(self, reason: str, drain_until_ms: int | None, successor: int = NONE) -> None:
        """Ends delivery; handlers may finish until `drain_until_ms`, or as long as they need if it is None.

        `reason`: for people, why. `successor`: the session that should get the partition, or NONE. If delivery has
        ended already, the reason and the successor of the call with the earlier deadline stay.
        """
        if self.phase is ClaimPhase.OPEN:
            self.phase = ClaimPhase.DRAINING
            self.reason, self.successor, self.drain_until_ms = reason, successor, drain_until_ms
        elif self.phase is ClaimPhase.DRAINING and drain_until_ms is not None:
            if self.drain_until_ms is None or drain_until_ms < self.drain_until_ms:
                self.drain_until_ms = drain_until_ms
                self.reason, self.successor = reason, successor

    def park(self, parking: str, reason: str, drain_until_ms: int) -> None:
        """Ends delivery permanently. The Release will park the partition: nobody may then claim it (F6.4).

        `parking`: why, as the name of an error (parking.py). `reason`: the text of the Release. Both replace what an
        earlier call of `stop` has set.
        """
        self.stop(reason, drain_until_ms)
        self.parking, self.reason, self.successor = parking, reason, NONE

    def seal(self, phase: ClaimPhase) -> None:
        """Enters RELEASING or GONE: from then on nothing is delivered and no ack counts (T16).

        An ack is first appended to its run, without the lock, and then looks at `sealed`. So it either is noted here or
        finds that it may have come too late. The position to release must be asked for after this call.
        """
        before, self.phase, self.sealed = self.sealed, phase, True
        if not before:
            self._settle()

    def settle(self) -> None:
        """Notes the acks that came without the lock, unless the claim is sealed: then they come too late.

        Drivers call it before they ask for anything, but not between two questions whose answers belong together, such
        as the position and the progress of one heartbeat.
        """
        if not self.sealed:
            self._settle()

    def _settle(self) -> None:
        if isinstance(self.tracker, AtLeastOnce):
            self.tracker.settle()

    def seek(self, position: int, now_ms: int) -> None:
        """Seals the claim at once, to be replaced by a new one that begins at `position` (F6.6, T20)."""
        self.seal(ClaimPhase.RELEASING)
        self.released_position = self.position()
        self.reason, self.seek_to, self.sealed_ms, self.revoking_reported = "seek", position, now_ms, True

    def give_up_seek(self) -> None:
        """Has the claim released at its old position instead."""
        self.seek_to, self.release_sent_ms = NONE, None

    def reopen(self) -> None:
        """Delivers again, because the reason to release the claim went away before its Release was sent."""
        if self.phase is ClaimPhase.DRAINING:
            self.phase, self.reason, self.successor, self.drain_until_ms = ClaimPhase.OPEN, "", NONE, None
            self.revoking_reported = False

    def drained(self, now_ms: int) -> bool:
        """Returns whether the Release may be sent (T12).

        It may if no handler has a message of the claim, or if the deadline is over. A message that its handler gave
        back and that waits to be delivered again is the next owner's (D14).
        """
        if self.drain_until_ms is not None and now_ms >= self.drain_until_ms:
            return True
        if isinstance(self.tracker, AtLeastOnce):
            return self.tracker.held == 0
        return self.tracker.in_flight_since_ms is None

    def position(self) -> int:
        """Returns the offset at which the next owner starts, as far as this client knows.

        In at-most-once mode it is the offset after the highest one that was handed over.
        """
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
        """Returns the monotonic ms since when the longest silent handler has been silent (D4).

        In at-most-once mode it is when the handler got the first of its messages. Returns None if no handler has a
        message.
        """
        if isinstance(self.tracker, AtLeastOnce):
            oldest = self.tracker.oldest()
            return None if oldest is None else oldest[0]
        return self.tracker.in_flight_since_ms
