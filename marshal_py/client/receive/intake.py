"""Brings messages from a consumer's source into its buffers, while a call of the user waits for some.

This file decides when to ask the source for how many messages. It does not wait itself: it yields what to wait for
(waits.py). In at-most-once mode it also asks for grants: a range of offsets that the log lets it deliver (D2).
delivery_queue.py sorts the messages into buffers, and prefetch.py bounds these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

from marshal_py.client.connection.context import Context
from marshal_py.client.delivery import grants
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.prefetch import LOOK_PIECES_MAX
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.receive.membership import WAIT_SLICE_S
from marshal_py.client.values.bounds import BOUNDS
from marshal_py.client.values.waits import Change, Poll, PollAhead, Steps
from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.transport.ports import Chunk
from marshal_py.transport.settings import PIECE_MESSAGES

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
