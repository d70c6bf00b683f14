"""Carries out the acks of messages. Messages that were delivered together share one object, which takes the lock.

This file is below message.py: it knows nothing of messages but how to make one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from marshal_py.client.forks import ForkedLock
from marshal_py.client.options import Deserializer
from marshal_py.protocol.claim import Claim
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce, OffsetRun
from marshal_py.protocol.identity import Instant, Token
from marshal_py.protocol.member import Member


class DeliveryContext:
    """Shared by all deliveries of one consumer. `delivered`: how many messages it has delivered.

    `make(raw, delivered, index, value)` makes a message.
    """

    __slots__ = (
        "clock_now",
        "delivered",
        "incarnation",
        "key_deserializer",
        "lock",
        "make",
        "member",
        "value_deserializer",
    )

    def __init__(
        self,
        member: Member,
        lock: AbstractContextManager[object],
        clock_now: Callable[[], Instant],
        incarnation: bytes,
        make: Callable[..., Any],
        key_deserializer: Deserializer | None,
        value_deserializer: Deserializer | None,
    ) -> None:
        self.member, self.lock, self.clock_now, self.incarnation = member, lock, clock_now, incarnation
        self.make, self.key_deserializer, self.value_deserializer = make, key_deserializer, value_deserializer
        self.delivered = 0

    def forked(self, made_in_pid: int) -> None:
        """In a child process acks are refused (forks.py)."""
        self.lock = ForkedLock("Message", made_in_pid)


class Delivered:
    """Messages of one claim that were delivered together."""

    __slots__ = ("claim", "context", "key_deserializer", "make", "run", "token", "value_deserializer")

    def __init__(self, context: DeliveryContext, claim: Claim, run: OffsetRun | None) -> None:
        """`run`: where their offsets are tracked; None in at-most-once mode."""
        self.context, self.claim, self.run = context, claim, run
        self.key_deserializer = context.key_deserializer
        self.value_deserializer = context.value_deserializer
        self.make = context.make
        self.token = Token(context.incarnation, claim.epoch)

    def finish_late(self) -> bool:
        """Counts the ack of a message whose claim has been released or lost; it has no effect. The lock is held."""
        return not self.context.member.ack_is_late(self.claim)

    def returned(self) -> None:
        """In at-most-once mode an ack only says that the handler has returned."""
        if isinstance(self.claim.tracker, AtMostOnce):
            self.claim.tracker.returned()

    def finish_range(self, first: int, stop: int) -> bool:
        """Acks the messages [first, stop) of the run. False if the acks came too late."""
        with self.context.lock:
            if self.claim.sealed:
                return self.finish_late()
            if self.run is not None:
                self.run.finish_range(first, stop)
            else:
                self.returned()
            return True

    def touch(self, first: int, stop: int) -> None:
        """Restarts the handler timeout of the messages [first, stop); in at-most-once mode that of all messages."""
        with self.context.lock:
            tracker, mono_ms = self.claim.tracker, self.context.clock_now().mono_ms
            if isinstance(tracker, AtLeastOnce):
                if self.run is not None:
                    tracker.touch(self.run, first, stop, mono_ms)
            elif tracker.in_flight_since_ms is not None:
                tracker.in_flight_since_ms = mono_ms
