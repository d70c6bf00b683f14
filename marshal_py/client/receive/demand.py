"""What an iteration asks for: every message, a limited number, or as many as the buffer of a `consume` has room for.

`Consumer` delivers, and asks its demand at every step: when the iteration is over, how many messages may come next, and
how to wait for more (waits.py). Called without the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from marshal_py.client.connection.context import Context
from marshal_py.client.delivery.buffers import ENDLESS, Allowance, Reserved
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.redelivery import Redelivered
from marshal_py.client.driver.idle_heartbeat import IdleHeartbeat
from marshal_py.client.receive.intake import Intake
from marshal_py.client.receive.refill import Refill
from marshal_py.client.values.requests import ConsumeRequest, message_bytes
from marshal_py.client.values.waits import Steps
from marshal_py.transport.ports import Chunk

# How often one step of a consume asks its source while only messages come whose partitions wait for acks. Of a small
# `max_messages` they come one by one: after so many the call looks whether it must end.
HELD_PULLS_MAX: Final = 100


class Demand:
    """Asks for every message, without an end."""

    intake: Intake
    watch: IdleHeartbeat | None

    verb = "iteration"
    refills = False  # whether `refill` does anything

    def __init__(self, intake: Intake, watch: IdleHeartbeat | None = None) -> None:
        self.intake, self.watch = intake, watch

    def over(self) -> bool:
        """Returns whether the iteration ends now."""
        return False

    def looks(self) -> bool:
        """Returns whether a slow user's consumer may read the source's queue to its end (prefetch.py)."""
        return True

    def refill(self) -> Steps[None]:
        """Brings messages without waiting, if that is due before the next are delivered."""
        yield from ()

    def allows(self) -> Allowance:
        return ENDLESS

    def ends(self, shut: bool) -> bool:
        """Returns whether the iteration ends as nothing can be delivered. `shut`: the gate is, or the next message is
        too large."""
        return False

    def delivered(self, reserved: Reserved) -> None:
        """Notes what was delivered of `reserved`."""

    def resume(self) -> None:
        """Notes that the user is in the call again, and waits for messages only from now on."""
        if self.watch is not None:
            self.watch.message()

    def wait(self, timeout_s: float) -> Steps[bool]:
        """Waits up to `timeout_s` seconds for messages. Returns whether any came."""
        return bool((yield from self.intake.pull(timeout_s)))

    def _watched(self, came: bool) -> bool:
        if self.watch is not None:
            self.watch.message() if came else self.watch.check()
        return came


class ConsumeDemand(Demand):
    """Asks for messages up to a limit of pending ones, whenever these have fallen to the threshold."""

    verb = "the iteration of consume"
    refills = True

    def __init__(
        self, context: Context, intake: Intake, queue: DeliveryQueue, request: ConsumeRequest, watch: IdleHeartbeat
    ) -> None:
        super().__init__(intake, watch)
        self._context, self._queue = context, queue
        self._in_bytes = request.in_bytes
        self._refill = Refill(request.limit, request.threshold, round(request.expires_s * 1000))
        self._largest_bytes = 0  # the largest message so far: so many of it as fit are taken at once
        self.stopped = False
        self.drain_until: float | None = None  # monotonic; None while it does not drain
        # A look may have brought more than was asked for, and a drain delivers no more than could be pending.
        self._drain_left = request.limit

    def pending(self) -> tuple[int, int]:
        """Returns messages and (if limited) bytes asked for and not delivered; without partitions that wait for acks.
        Takes the lock."""
        messages, size_bytes = self._buffered()
        if self._in_bytes:
            limit = self._refill.limit
            if size_bytes > limit:  # a look has brought more than was asked for: about so many of it are pending
                messages = max(1, messages * limit // size_bytes)
            return messages, self._refill.pending(size_bytes)
        return self._refill.pending(messages), 0

    def _buffered(self) -> tuple[int, int]:
        with self._context.lock:
            return self._queue.to_deliver(self._in_bytes)

    # --- for Consumer

    def looks(self) -> bool:
        return self.drain_until is None

    def over(self) -> bool:
        return self.stopped or (self.drain_until is not None and self._context.monotonic() >= self.drain_until)

    def ends(self, shut: bool) -> bool:
        if self.drain_until is not None and self.intake.waits_in_lanes():
            return False
        if self._drain_left <= 0:
            return True
        if self.drain_until is None:
            return False
        if shut:
            return self._nothing_fits()
        if self._queue.at_most_once:
            return not self._buffered()[0]  # their grants will come
        return not self.intake.waits_for_handlers()

    def _nothing_fits(self) -> bool:
        """Returns whether a drain has delivered what its bytes allow: each next message is larger than the rest."""
        if not self._in_bytes or self._drain_left == self._refill.limit:
            return False
        with self._context.lock:
            heads = [
                buffer.fetched[0]
                for buffer, claim in self._queue.delivering()
                if buffer.fetched and self._queue.window.room(claim, buffer)
            ]
            return all(message_bytes(head.messages[head.at]) > self._drain_left for head in heads)

    def refill(self) -> Steps[None]:
        """Asks for what is missing, again while all that comes waits for acks and so keeps nothing else from coming."""
        for _ in range(HELD_PULLS_MAX if self.drain_until is None else 0):
            self._refill.request(self._buffered()[self._in_bytes], self._context.clock.now().mono_ms)
            wanted = self._piece()
            came = bool(wanted) and self._came((yield from self.intake.pull(0.0, wanted, wanted)))
            if not came or self._buffered()[0]:
                return

    def allows(self) -> Allowance:
        if self.drain_until is None:
            units, one_fits = self._refill.before_threshold(self._buffered()[self._in_bytes]), True
        else:
            units, one_fits = max(0, self._drain_left), self._drain_left == self._refill.limit
        return Allowance(size_bytes=units, one_fits=one_fits) if self._in_bytes else Allowance(units)

    def delivered(self, reserved: Reserved) -> None:
        if self.drain_until is not None and not isinstance(reserved, Redelivered):
            self._drain_left -= sum(map(message_bytes, reserved.raw())) if self._in_bytes else reserved.taken

    def wait(self, timeout_s: float) -> Steps[bool]:
        wanted = 0 if self.drain_until is not None else self._piece()
        return self._watched(self._came((yield from self.intake.pull(timeout_s, wanted, wanted))))

    # --- what comes

    def _piece(self) -> int:
        """Returns how many messages to take at once. One that may be too large in bytes waits, unless nothing else is
        buffered."""
        to_come = self._refill.to_come
        if not self._in_bytes or not to_come:
            return to_come
        fitting = to_come // self._largest_bytes if self._largest_bytes else 0
        return fitting or (0 if self._buffered()[0] else 1)

    def _came(self, chunks: Sequence[Chunk]) -> bool:
        """Counts what came. Returns whether that is anything."""
        if not self._in_bytes:
            self._refill.came(sum(len(chunk.messages) for chunk in chunks))
        elif chunks:
            sizes = [message_bytes(message) for chunk in chunks for message in chunk.messages]
            self._largest_bytes = max(self._largest_bytes, *sizes)
            self._refill.came(sum(sizes))
            if self._refill.to_come < self._largest_bytes:
                self._refill.give_up()
        return bool(chunks)
