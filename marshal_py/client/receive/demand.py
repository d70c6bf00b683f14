"""What an iteration asks for: every message, a limited number, or as many as the buffer of a `consume` has room for.

`Consumer` delivers, and asks its demand at every step: when the iteration is over, how many messages may come next, and
how to wait for more (waits.py). Called without the lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

from marshal_py.client.connection.context import Context
from marshal_py.client.delivery import grants
from marshal_py.client.delivery.buffers import ENDLESS, Allowance, Reserved
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.prefetch import LOOK_PIECES_MAX
from marshal_py.client.delivery.redelivery import Redelivered
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.idle_heartbeat import IdleHeartbeat
from marshal_py.client.receive.membership import WAIT_SLICE_S
from marshal_py.client.values.options import BOUNDS
from marshal_py.client.values.requests import ConsumeRequest, message_bytes
from marshal_py.client.values.waits import Change, Poll, PollAhead, Steps
from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.transport.ports import Chunk
from marshal_py.transport.settings import PIECE_MESSAGES

# --- Brings messages from a consumer's source into its buffers, while a call of the user waits for some
#
# This file decides when to ask the source for how many messages. It does not wait itself: it yields what to wait for
# (waits.py). In at-most-once mode it also asks for grants: a range of offsets that the log lets it deliver (D2).
# delivery_queue.py sorts the messages into buffers, and prefetch.py bounds these.


GRANT_SLICE_S: Final = 0.005  # how long to wait for a grant before checking again
# How long one wait for messages may last while none has come for IDLE_S and none is unfinished: a wake takes CPU time.
IDLE_WAIT_S: Final = 0.25
IDLE_S: Final = 1.0
LOOK_AHEAD_GRANTS: Final = 2  # in at-most-once mode as many messages are fetched in advance as this many grants hold


class Intake:
    """Moves messages from the source of one consumer to its buffers."""

    def __init__(self, context: Context, driver: ConsumerDriver, queue: DeliveryQueue) -> None:
        self._context, self._driver, self._queue = context, driver, queue
        self.monotonic: Callable[[], float] = context.monotonic
        self._came_at = self.monotonic()  # when the last messages came
        # In at-most-once mode: how many messages are fetched beyond those that the user has.
        self.ahead: int = LOOK_AHEAD_GRANTS * BOUNDS.grant if queue.at_most_once else 0

    def wait_s(self) -> float:
        """Returns for how long to wait at once, after which signals, stops, acks without the lock and due redeliveries
        are seen."""
        if self.monotonic() - self._came_at < IDLE_S:
            return WAIT_SLICE_S
        with self._context.lock:
            trackers = [claim.tracker for claim in self._driver.member.claims.values()]
        unfinished = any([isinstance(tracker, AtLeastOnce) and bool(tracker.runs) for tracker in trackers])
        return WAIT_SLICE_S if unfinished else IDLE_WAIT_S

    def pull(self, timeout_s: float, wanted: int = PIECE_MESSAGES, most: int = sys.maxsize) -> Steps[Sequence[Chunk]]:
        """Moves messages to the buffers, or waits `timeout_s` for some or for grants. `wanted`, or PIECE_MESSAGES if
        more, but for a slow user in at-most-once mode; `most` bounds all, with 0 it only waits. Returns what came."""
        queue, context = self._queue, self._context
        if queue.at_most_once:
            seen = context.changes
            if self.asks_grants():
                yield Change(min(timeout_s, GRANT_SLICE_S), seen)
                timeout_s = 0.0
        elif timeout_s > 0 and queue.window.bounds:
            with context.lock:
                wait_s, seen = queue.window.wait_s(queue.buffers.values(), queue.delivered), context.changes
            if wait_s is not None:
                yield Change(min(timeout_s, wait_s), seen)
                timeout_s = 0.0
        # Where grants are for fetched messages, a larger piece allows a larger grant.
        most = min(most, BOUNDS.prefetch)
        if not queue.at_most_once or grants.before_fetching(queue.rate):
            most = min(most, max(wanted, PIECE_MESSAGES))
        with context.lock:
            most = queue.takes(most)
        if most <= 0:
            yield Change(min(timeout_s, GRANT_SLICE_S), context.changes)
            return ()
        chunks: Sequence[Chunk] = yield Poll(timeout_s, most)
        if not chunks:
            return ()
        self.add(chunks)
        return chunks if chunks[-1].messages else ()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Sorts messages that have come into the buffers. In at-most-once mode it also asks for their grants."""
        queue = self._queue
        with self._context.outbox, self._context.lock:
            self._add(chunks)
            if queue.at_most_once and not (chunks and grants.before_fetching(queue.rate)):
                self._driver.ask_grants(self._context.clock.now())

    def look(self) -> Steps[None]:
        """Reads the source's queue to its end, so that no partition waits behind thousands of messages of another."""
        queue, context = self._queue, self._context
        for _ in range(LOOK_PIECES_MAX):
            with context.lock:
                piece = queue.prefetch.piece(queue.buffers.values())
            chunks: list[Chunk] = (yield Poll(0.0, piece)) if piece else []
            if not chunks:
                return
            with context.lock:
                self._add(chunks)

    def _add(self, chunks: Sequence[Chunk]) -> None:
        if chunks and chunks[-1].messages:
            self._came_at = self.monotonic()
        self._queue.add(chunks)

    def wait_for_gate(self, timeout_s: float) -> Steps[None]:
        """Waits `timeout_s` for a change, as the gate is shut: fenced, paused, or claims being released."""
        with self._context.outbox, self._context.lock:
            self._queue.wait_for_gate()
            seen = self._context.changes
        yield Change(timeout_s, seen)
        yield from self.pull(0.0)  # what is fetched ahead of a claim (A3), and librdkafka's own callbacks

    def waits_for_handlers(self) -> bool:
        """Returns whether buffered messages come only once handlers have answered others (`max_acks_pending`), or
        delivered ones wait for their handlers (D17)."""
        if self.waits_in_lanes():
            return True
        with self._context.lock:
            return self._queue.window.waits_for_handlers(self._queue.buffers.values())

    def waits_in_lanes(self) -> bool:
        """Returns whether delivered messages wait for their handlers (D17). Without those that were given back."""
        with self._context.lock:
            claims = [claim for claim in self._driver.member.claims.values() if claim.phase is ClaimPhase.OPEN]
            return any(
                isinstance(claim.tracker, AtLeastOnce) and claim.tracker.awaited > claim.tracker.held
                for claim in claims
            )

    def asks_grants(self) -> bool:
        """Asks for grants, in at-most-once mode. Returns True while fetched messages wait for a grant."""
        with self._context.outbox, self._context.lock:
            self._driver.ask_grants(self._context.clock.now())
            return self._queue.left() > 0 and grants.awaited(self._queue.delivering())

    def look_ahead(self) -> Steps[None]:
        """Fetches the next messages and asks for grants while the user handles a batch (D2); when half of `ahead` is
        buffered, as asking costs time."""
        queue, context = self._queue, self._context
        with context.lock:
            room = self.ahead - queue.buffered()
            if grants.before_fetching(queue.rate) and grants.backlog(queue.delivering(), queue.source):
                room = 0  # so that few messages wait in Python for their grants
            taken = queue.takes(room) if room >= self.ahead // 2 else 0
        self.add((yield PollAhead(taken)) if taken else ())


# --- Decides when `consume` asks for more, and for how much (ADR-37, section "Buffering messages")
#
# It has no clock. It counts messages or bytes; a unit below is one of them. What is pending was asked for and has not
# been delivered: it is still to come, or buffered. What is buffered is not counted here a second time: it is passed
# in, so that buffers which are dropped with a lost claim need no correction.


class Refill:
    """Keeps the units that were asked for and have not come, for one limit and its threshold."""

    limit: int
    threshold: int

    def __init__(self, limit: int, threshold: int, expires_ms: int) -> None:
        """Asks for what is missing to `limit` pending when `threshold` are left; what has not come `expires_ms` after
        the last request is given up."""
        self.limit, self.threshold = limit, threshold
        self._expires_ms = expires_ms
        self._until_ms = 0
        self.to_come: int = 0

    def pending(self, buffered: int) -> int:
        """Returns how many units are pending: at most `limit`, though a look (prefetch.py) may buffer more."""
        return min(self.limit, self.to_come + buffered)

    def request(self, buffered: int, now_ms: int) -> int:
        """Returns how many units to ask for now, which then count as pending; 0 if none."""
        if self.to_come and now_ms >= self._until_ms:
            self.to_come = 0
        pending = self.pending(buffered)
        if pending > self.threshold or pending >= self.limit:
            return 0
        asked = self.limit - buffered - self.to_come
        if asked <= 0:
            return 0
        self.to_come += asked
        self._until_ms = now_ms + self._expires_ms
        return asked

    def came(self, units: int) -> None:
        self.to_come = max(0, self.to_come - units)

    def give_up(self) -> None:
        """Gives up what has not come, for example because the next message is larger than what is left."""
        self.to_come = 0

    def before_threshold(self, buffered: int) -> int:
        """Returns how many units may be delivered until the next request is due; at least 1."""
        return max(1, self.pending(buffered) - self.threshold)


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
