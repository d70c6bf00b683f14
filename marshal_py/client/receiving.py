"""How one consumer receives: the steps of `fetch`, iteration and `consume`, which every front carries out.

`Consumer` waits on the user's thread, `AsyncConsumer` without blocking the event loop, and the simulator in virtual
time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from marshal_py.client.connection import Change, Context, Poll, PollAhead, Steps, Wait
from marshal_py.client.delivery.buffers import ENDLESS, Allowance, Redelivered, Reserved
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.prefetch import LOOK_MS, LOOK_PIECES_MAX, before_fetching, grants_awaited, has_backlog
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import WAIT_SLICE_S, Ending
from marshal_py.client.messages.message import Batch
from marshal_py.client.values.options import BOUNDS
from marshal_py.client.values.requests import ConsumeRequest, Request, message_bytes
from marshal_py.errors import (
    ClaimLost,
    ClusterError,
    ClusterUnreachable,
    InvalidOption,
    NeedsAtLeastOnce,
    PositionOutOfRange,
)
from marshal_py.protocol.claims import AtLeastOnce, ClaimPhase
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.transport.ports import Chunk
from marshal_py.transport.settings import PIECE_MESSAGES

# --- Watches whether the cluster still answers while a call waits for messages (ADR-37, section "Idle heartbeats").
#
# JetStream's server sends a heartbeat when it has no message. Kafka's brokers do not, so the client asks: once per
# interval without a message it requests the end offsets of its partitions from their leaders, on the consumer's worker
# thread. A message or an answer is proof of life. Two intervals without any of them are worth an event, and no more
# than that: the wait continues. While the connection is known to be lost, the watch rests.


MISSED: Final = 2  # so many intervals without proof of life make an event


class HeartbeatTimer:
    """Counts the time without proof of life. It has no clock: times are ms of the monotonic clock."""

    def __init__(self, interval_ms: int, now_ms: int) -> None:
        self.interval_ms = interval_ms
        self._since_ms: int | None = now_ms  # of the last proof of life; None while the timer is paused
        self._asked_ms = now_ms

    def alive(self, now_ms: int) -> None:
        """Starts the timer again, since there was proof of life at `now_ms`."""
        if self._since_ms is None or now_ms > self._since_ms:
            self._since_ms = now_ms

    def pause(self) -> None:
        """Resets the timer and stops it until `resume`."""
        self._since_ms = None

    def resume(self, now_ms: int) -> None:
        if self._since_ms is None:
            self._since_ms = self._asked_ms = now_ms

    def ask(self, now_ms: int) -> bool:
        """Returns whether to ask the cluster now: once per interval, and only if there was no proof of life in it."""
        if self._since_ms is None or now_ms - max(self._since_ms, self._asked_ms) < self.interval_ms:
            return False
        self._asked_ms = now_ms
        return True

    def missed(self, now_ms: int) -> bool:
        """Returns whether there was no proof of life for MISSED intervals. If so, the timer starts again."""
        if self._since_ms is None or now_ms - self._since_ms < MISSED * self.interval_ms:
            return False
        self._since_ms = now_ms
        return True


class IdleHeartbeat:
    """Watches the cluster for one call, which reports messages by `message` and calls `check` while it waits."""

    def __init__(self, context: Context, driver: ConsumerDriver, interval_s: float) -> None:
        self._context, self._driver, self._interval_s = context, driver, interval_s
        self._answered_ms = 0  # written by the worker thread
        self._timer = HeartbeatTimer(round(interval_s * 1000), self._now_ms())

    def _now_ms(self) -> int:
        return self._context.clock.now().mono_ms

    def message(self) -> None:
        """Notes that messages have come, or that the call waits only from now on."""
        self._timer.alive(self._now_ms())

    def check(self) -> None:
        """Asks the cluster if that is due, and reports the event `heartbeat_missed`. Does not wait."""
        timer, now_ms = self._timer, self._now_ms()
        if self._context.waiting_for():
            timer.pause()
            return
        timer.resume(now_ms)
        timer.alive(self._answered_ms)
        if timer.ask(now_ms):
            self._driver.submit("the idle heartbeat", self._ask)
        if timer.missed(now_ms):
            self._report()

    def _ask(self) -> None:
        with self._context.lock:
            claimed = [claim.tp for claim in self._driver.member.claims.values()]
        try:
            if claimed:  # otherwise no partition is waited for
                self._context.admin.bounds(claimed)
        except ClusterUnreachable:
            return  # the event says it, if it lasts
        except ClusterError:
            pass  # a refusal is an answer
        self._answered_ms = self._now_ms()

    def _report(self) -> None:
        text = f"no message, and no answer of the cluster, for {MISSED * self._interval_s:g} s"
        with self._context.outbox, self._context.lock:
            self._driver.advise("heartbeat_missed", text=text)


# --- Brings messages from a consumer's source into its buffers, while a call of the user waits for some
#
# An Intake decides when to ask the source for how many messages. It does not wait itself: it yields what to wait for
# (connection.py). In at-most-once mode it also asks for grants: a range of offsets that the log lets it deliver (D2).
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
        if not queue.at_most_once or before_fetching(queue.rate):
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
            if queue.at_most_once and not (chunks and before_fetching(queue.rate)):
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
            return self._queue.left() > 0 and grants_awaited(self._queue.delivering())

    def look_ahead(self) -> Steps[None]:
        """Fetches the next messages and asks for grants while the user handles a batch (D2); when half of `ahead` is
        buffered, as asking costs time."""
        queue, context = self._queue, self._context
        with context.lock:
            room = self.ahead - queue.buffered()
            if before_fetching(queue.rate) and has_backlog(queue.delivering(), queue.source):
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


# --- What an iteration asks for: every message, a limited number, or as many as the buffer of a `consume` has room for
#
# The receiving calls deliver, and ask their demand at every step: when the iteration is over, how many messages may
# come next, and how to wait for more. Called without the lock.

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

    def delivers(self, reserved: Reserved) -> None:
        """Notes what the user gets next."""

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
        self._reserved: Reserved | None = None  # what the user got last

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
        self._count()
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
        self._count()
        if self.drain_until is None:
            units, one_fits = self._refill.before_threshold(self._buffered()[self._in_bytes]), True
        else:
            units, one_fits = max(0, self._drain_left), self._drain_left == self._refill.limit
        return Allowance(size_bytes=units, one_fits=one_fits) if self._in_bytes else Allowance(units)

    def delivers(self, reserved: Reserved) -> None:
        self._reserved = reserved

    def _count(self) -> None:
        """Counts, in a drain, what the user got last, once he asks again, maybe in another loop."""
        reserved, self._reserved = self._reserved, None
        if self.drain_until is not None and reserved is not None and not isinstance(reserved, Redelivered):
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


# --- The calls


class Receiving:
    """Receives for one consumer. One call at a time may run; its front sees to that."""

    driver: ConsumerDriver
    queue: DeliveryQueue

    def __init__(self, context: Context, driver: ConsumerDriver, ending: Ending) -> None:
        assert isinstance(driver.queue, DeliveryQueue)
        self._context, self.driver, self._ending = context, driver, ending
        self.queue = driver.queue
        self.intake: Intake = Intake(context, driver, driver.queue)

    def demand(self) -> Demand:
        """Returns what an iteration asks for: every message, without an end."""
        return Demand(self.intake)

    def consuming(self, request: ConsumeRequest) -> ConsumeDemand:
        """Returns what a `consume` asks for."""
        watch = IdleHeartbeat(self._context, self.driver, request.idle_heartbeat_s)
        return ConsumeDemand(self._context, self.intake, self.queue, request, watch)

    def fetch(self, request: Request) -> Steps[Batch[Any, Any]]:
        """Waits until the batch is full enough, a stop or the expiry; then checks the gate and takes in one step under
        the lock. `queue.begin` comes before. Raises ConsumerClosed."""
        self._ending.raise_if_stopping()
        queue, context = self.queue, self._context
        _, max_bytes, min_messages, expires_s, _ = request
        deadline = context.monotonic() + expires_s
        idle_heartbeat_s = request.idle_heartbeat_s
        watch = None if idle_heartbeat_s is None else IdleHeartbeat(context, self.driver, idle_heartbeat_s)
        came, look_again = False, 0.0
        while True:
            now_s = context.monotonic()
            left_s = deadline - now_s
            if not came or now_s >= look_again:  # else it has just done this
                look_again = now_s + LOOK_MS / 1000
                with context.outbox, context.lock:
                    queue.user_returned()  # acks may have come from other threads
                    self.driver.report_finished()
                    looks = queue.looks()
                if looks and not self._ending.draining:
                    yield from self.intake.look()
            with context.lock:
                full, missing = queue.suffices(min_messages, max_bytes), request.most - queue.buffered()
            over = left_s <= 0 or self._ending.draining or self._ending.must_stop()
            if full or over:
                if not full and left_s <= 0 and not self._ending.draining:
                    yield from self.intake.pull(0.0, missing)
                with context.outbox, context.lock:
                    parts = queue.take(request.most, max_bytes, context.clock.now())
                    self.driver.report_finished()
                if parts and queue.at_most_once:
                    yield from self.intake.look_ahead()
                if parts or over:
                    return Batch([part for part, _ in parts])
                self._ending.raise_if_ended()
                came = False
                yield from self.intake.wait_for_gate(min(WAIT_SLICE_S, left_s))
                continue
            self._ending.raise_if_ended()
            came = bool((yield from self.intake.pull(min(left_s, self.intake.wait_s()), missing)))
            if watch is not None:
                watch.message() if came else watch.check()

    def iterate(self, demand: Demand) -> Generator[Wait | Reserved, Any, None]:
        """Yields what to wait for, and messages to deliver, until a stop, a drain or a signal, or `demand` is over."""
        queue, context = self.queue, self._context
        now = context.clock.now
        demand.resume()
        came = False
        while not self._ending.reason and not self._ending.must_stop() and not demand.over():
            if self.driver.pending_errors:
                self._ending.raise_if_ended()
            if not came:  # else it has just done this
                with context.lock:
                    queue.user_returned()
                    looks = queue.looks()
                if not self._ending.draining:
                    if looks and demand.looks():
                        yield from self.intake.look()
                    if demand.refills:
                        yield from demand.refill()
            skipped, came = came, False
            with context.outbox, context.lock:
                moment = now()
                reserved = queue.reserve(moment, demand.allows())
                self.driver.report_finished()
                if queue.at_most_once:
                    self.driver.ask_grants(moment)
                seen, shut = context.changes, reserved is None and queue.deliverable(moment) > 0
            if reserved is not None:
                demand.delivers(reserved)
                yield reserved
                demand.resume()
                continue
            if skipped:  # what came was finished already: low buffers are filled again before the next wait
                continue
            if self._ending.draining:
                if self._ending.error_waits:
                    self._ending.raise_if_ended()
                if demand.ends(shut):
                    return
                waits = self.intake.asks_grants() if queue.at_most_once else self.intake.waits_for_handlers()
                if not waits or context.monotonic() >= self._ending.drain_until:
                    return
                yield Change(GRANT_SLICE_S, seen)  # buffered messages are delivered as their grants or acks come
                continue
            self._ending.raise_if_ended()
            if demand.ends(shut):
                return
            if shut:
                yield from self.intake.wait_for_gate(WAIT_SLICE_S)
            else:
                came = yield from demand.wait(self.intake.wait_s())
        with context.lock:
            queue.user_done()


# --- How a consumer moves the position of a partition that it owns: the question to the cluster, the record, the wait
#
# The member writes the record and replaces the claim (PROTOCOL.md T20). Nothing here holds the lock while it waits.


def seek(driver: ConsumerDriver, ending: Ending, tp: TopicPartition, offset: int, deadline: float) -> Steps[None]:
    """Returns when the log has the position; one thread at a time. `deadline`: monotonic seconds. Raises as
    `Consumer.seek`."""
    context, member = driver.context, driver.member
    if driver.queue.at_most_once:
        raise NeedsAtLeastOnce("seek", member.name)
    if type(offset) is not int:
        raise InvalidOption("offset", offset, "a whole number, as message.offset is")
    if tp not in _owned(driver):
        raise _not_claimed(driver, tp)
    bounds = context.admin.bounds([tp], timeout_s=max(0.0, deadline - context.monotonic()))[tp]
    if not bounds.first <= offset <= bounds.end:
        raise PositionOutOfRange(*tp, offset, bounds.first, bounds.end)
    with context.outbox, context.lock:
        claim = member.seek(tp, offset, context.clock.now())
        driver.kick()
    if claim is not None:
        what = f"the position of {tp}"
        yield from context.until(lambda: claim.phase is ClaimPhase.GONE or driver.ended, what, deadline, driver.log)
        if driver.ended and claim.final is None:  # a stop that has not read back that it left
            ending.check_open()
    if claim is None or claim.seek_to == NONE:
        raise _not_claimed(driver, tp)


def _owned(driver: ConsumerDriver) -> set[TopicPartition]:
    with driver.context.lock:
        return {claim.tp for claim in driver.member.claims.values()}


def _not_claimed(driver: ConsumerDriver, tp: TopicPartition) -> ClaimLost:
    return ClaimLost(driver.member.name, (str(tp),), tuple(map(str, sorted(_owned(driver) - {tp}))))
