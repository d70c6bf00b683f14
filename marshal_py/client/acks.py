"""Where the acks of messages go: one object per hand-over, which their messages share. Takes the Marshal's lock.

Below message.py, which makes messages of it, so that the types of a message can be asked for at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marshal_py.protocol.claim import Claim
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce, OffsetRun
from marshal_py.protocol.identity import Token

if TYPE_CHECKING:
    from marshal_py.client.delivery_queue import DeliveryQueue


class Delivered:
    """Where the acks of messages that were handed over together go."""

    __slots__ = ("claim", "key_deserializer", "make", "queue", "run", "token", "value_deserializer")

    def __init__(self, queue: DeliveryQueue, claim: Claim, run: OffsetRun | None) -> None:
        self.queue, self.claim, self.run = queue, claim, run
        self.key_deserializer = queue.options.key_deserializer
        self.value_deserializer = queue.options.value_deserializer
        self.make = queue.make
        self.token = Token(queue.incarnation, claim.epoch)

    def finish_late(self) -> bool:
        """The ack of a message whose claim has been released or lost: counted, of no effect. The lock is held."""
        return not self.queue.member.ack_is_late(self.claim)

    def returned(self) -> None:
        """In at-most-once mode an ack only tells that the handler has returned."""
        if isinstance(self.claim.tracker, AtMostOnce):
            self.claim.tracker.returned()

    def finish_range(self, first: int, stop: int) -> bool:
        with self.queue.lock:
            if self.claim.sealed:
                return self.finish_late()
            if self.run is not None:
                self.run.finish_range(first, stop)
            else:
                self.returned()
            return True

    def touch(self, first: int, stop: int) -> None:
        """The handlers of these messages are at work; in at-most-once mode one handler has all."""
        with self.queue.lock:
            tracker, mono_ms = self.claim.tracker, self.queue.clock_now().mono_ms
            if isinstance(tracker, AtLeastOnce):
                if self.run is not None:
                    tracker.touch(self.run, first, stop, mono_ms)
            elif tracker.in_flight_since_ms is not None:
                tracker.in_flight_since_ms = mono_ms
