"""The Consumer: one member of a group, as the user holds it. Waits and hands over; the member decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import Any, Final, Self

from marshal_py.client.consumer_driver import ConsumerDriver
from marshal_py.client.delivery_queue import DeliveryQueue
from marshal_py.client.ending import LEAVE_TIMEOUT_S, Ending
from marshal_py.client.info import ClaimInfo, ConsumerInfo
from marshal_py.client.intake import GRANT_SLICE_S, Intake
from marshal_py.client.loop import Loop
from marshal_py.client.message import Batch, Message
from marshal_py.client.planner import Planner
from marshal_py.errors import ConcurrentUse, ConsumerClosed, InvalidOption, MarshalError, ReentrantCall
from marshal_py.protocol.advisory import Advisory
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.identity import NONE, TopicPartition

WAIT_SLICE_S: Final = 0.1  # a waiting fetch looks up at least so often: for signals, errors, a stop from elsewhere
HAND_OVER_S: Final = 1.0  # a hand-over takes some ms; a deployment must not wait for one that does not come
FETCH_EXPIRES_S: Final = 30.0
FETCH_MESSAGES: Final = 1_000


class _Call:
    """One call of a fetching verb, known by its identity."""

    __slots__ = ("verb",)

    def __init__(self, verb: str) -> None:
        self.verb = verb


class Consumer:
    """One member of a group. A context manager; leaving it stops the consumer and releases its claims.

    `fetch`, `next` and iteration are for one thread at a time; acks may come from any.

    In at-least-once mode messages that were not acked come again after a crash; those above them that were acked, and
    told in a heartbeat, do not (up to 512 bytes of ranges per partition). In at-most-once mode the log grants messages
    before they are handed over, about a second's work at a time. A crash loses what was granted and not handed over. A
    stop, a pause or a planned move gives it back, and the next owner begins there.
    """

    def __init__(
        self, loop: Loop, driver: ConsumerDriver, connection: Mapping[str, Any], closed: Callable[[Consumer], object]
    ) -> None:
        self.connection = connection  # librdkafka's settings of a data consumer: what others need to read its ranges
        self._loop = loop
        self._driver = driver
        self._member = driver.member
        assert isinstance(driver.queue, DeliveryQueue)
        self._flow = driver.queue
        self._intake = Intake(loop, driver, driver.queue)
        self._planner: Planner | None = None
        self._user: int | None = None  # thread that is inside a fetching verb, or in the body of an iteration
        self._inside: _Call | None = None  # its call; None in the body
        self._entry = threading.RLock()  # around the two: threads that arrive together must not both pass
        self._iterating: _Call | None = None
        self._closed = closed
        self._ending = Ending(loop, driver, self._forget)

    # --- life

    @property
    def group(self) -> str:
        return self._member.name

    @property
    def client_id(self) -> str:
        return self._member.options.client_id

    @property
    def closed(self) -> bool:
        """Whether it has stopped, by itself or by the user."""
        return self._ending.over

    @property
    def stopping(self) -> bool:
        """Whether it is stopped, draining, or asked to stop by a signal: the condition of a loop around `fetch`."""
        return self._ending.draining or self._ending.over or self._ending.must_stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Drops what is buffered, releases every claim at its position, leaves the group.

        Twice is once. After a call that was interrupted (ctrl-C) the next one does what is left.
        In at-least-once mode what was handed over and not acked will be delivered again; what was acked will not, also
        above that. In at-most-once mode what was granted and not handed over is given back to the next owner. Without
        the cluster it returns after `timeout_s`; the claims are then freed when the others have waited it out, and
        grants are lost. Raises ReentrantCall.
        """
        self._loop.check_call("Consumer", "stop", waits=True)
        self._ending.stop(timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Fetches no more; what is buffered is still handed over to a running iteration, then releases and leaves.

        Of a large buffer `prefetch_messages` are handed over; the next owners begin behind them. Called inside the
        iteration it returns at once, and the iteration ends when that is done. Otherwise it
        waits for the acks of what was handed over, at most `timeout_s` (default: the handler timeout).
        Raises ReentrantCall.
        """
        self._loop.check_call("Consumer", "drain", waits=True)
        wait_s = self._driver.options.handler_timeout_s if timeout_s is None else timeout_s
        with self._loop.lock:
            self._flow.drain()
        self._ending.drain(wait_s)
        if not self._iterating:
            self._ending.finish_drain()

    def request_stop(self, hand_over_s: float = HAND_OVER_S) -> None:
        """Ends iteration and waiting fetches soon. Takes no lock: signal handlers and callbacks may call it anywhere.

        Where others take over, messages still come for at most `hand_over_s` while these fetch ahead, so that no
        partition waits (A6). A second call, or 0, ends at once.
        """
        self._ending.request_stop(hand_over_s)

    def _forget(self) -> None:
        self._closed(self)

    # --- fetching

    def _enter(self, call: _Call) -> None:
        """Begins a call of a verb that is for one thread at a time, and not for one inside another."""
        self._loop.check_call("Consumer", call.verb, waits=True)
        me = threading.get_ident()
        with self._entry:
            if self._user is not None and self._user != me:
                raise ConcurrentUse(call.verb)
            if self._inside is not None:
                raise ReentrantCall(call.verb, f"{self._inside.verb} of the same consumer")
            self._ending.raise_if_ended()
            if self._planner is not None and call.verb != "flush":
                raise ConsumerClosed("fetching side of the Consumer", "it plans ranges that others read")
            self._user, self._inside = me, call

    def fetch(
        self, max_messages: int = FETCH_MESSAGES, *, max_bytes: int | None = None, expires_s: float = FETCH_EXPIRES_S
    ) -> Batch:
        """Up to `max_messages` messages (and `max_bytes`, key + value + headers + topic, but at least one).

        An even share of each partition that has some. Ends by count, bytes or `expires_s`, or when a bound lets no more
        come: unacked_max, prefetch_bytes, or in at-most-once mode the grants, two of each partition with about a
        second's work of all of them. `expires_s=0` takes what is there now. May be empty. The lease is checked once,
        when the batch is handed over. Raises what ended the consumer; ConcurrentUse; ReentrantCall; ConsumerClosed.
        """
        if max_messages < 1:
            raise InvalidOption("max_messages", max_messages, "at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "at least 1, or None")
        if expires_s < 0:
            raise InvalidOption("expires_s", expires_s, "0 takes what is there now")
        call = _Call("fetch")
        try:
            self._enter(call)
            self._flow.begin()
            return self._fetch(max_messages, max_bytes, time.monotonic() + expires_s)
        except BaseException as error:
            if self._inside is call and not isinstance(error, MarshalError):
                with self._loop.lock:
                    self._flow.take_back()
            raise
        finally:  # without a call before it is done: no signal can come between
            if self._inside is call:
                self._inside = None
                self._user = self._user if self._iterating else None

    def _fetch(self, max_messages: int, max_bytes: int | None, deadline: float) -> Batch:
        """Waits until the batch can be full, or the deadline; then gates and takes, in one step."""
        queue, loop = self._flow, self._loop
        while True:
            left_s = deadline - time.monotonic()
            with loop.outbox, loop.lock:
                queue.user_returned()  # acks may have come meanwhile, from other threads
                self._driver.tell_careful()
                looks = queue.looks()
            if looks and not self._ending.draining:
                self._intake.look()
            with loop.lock:
                full = queue.suffices(max_messages, max_bytes)
            over = left_s <= 0 or self._ending.draining or self._ending.must_stop()
            if full or over:
                if not full and left_s <= 0 and not self._ending.draining:
                    self._intake.pull(0.0, max_messages)
                with loop.lock:
                    parts = queue.take(max_messages, max_bytes, loop.clock.now())
                if parts and queue.at_most_once:
                    self._intake.look_ahead()
                if parts or over:
                    return Batch([part for part, _ in parts])
                self._ending.raise_if_ended()
                self._intake.wait_for_gate(min(WAIT_SLICE_S, left_s))
                continue
            self._ending.raise_if_ended()
            self._intake.pull(min(left_s, WAIT_SLICE_S), max_messages)

    def next(self, expires_s: float = FETCH_EXPIRES_S) -> Message | None:
        """The next message, or None if none came within `expires_s`. Raises as `fetch`."""
        batch = self.fetch(1, expires_s=expires_s)
        return next(iter(batch), None)

    def __iter__(self) -> Iterator[Message]:
        """Messages one by one, each behind its own check of the lease, until stop, drain or a signal.

        Raises what ended the consumer. Leaving the loop leaves the consumer running.
        """
        # Chained in C: a generator that delegates to others would be entered once more per message.
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterator[Message]]:
        """The iteration in pieces: what was reserved at once."""
        call = _Call("iteration")
        try:
            self._enter(call)
            if self._iterating is not None:
                raise ConcurrentUse("iteration")
            self._iterating = call
            yield from self._reservations(call)
        except BaseException as error:
            if self._inside is call and not isinstance(error, MarshalError):
                with self._loop.lock:
                    self._flow.fetch_again()
            raise
        finally:  # as in fetch
            if self._inside is call:
                self._inside = None
            if self._iterating is call:
                self._iterating = self._user = None
                if self._ending.draining:
                    self._ending.finish_drain()

    def _reservations(self, call: _Call) -> Iterator[Iterator[Message]]:
        queue, loop = self._flow, self._loop
        now, boot_ns = loop.clock.now, loop.clock.boot_ns
        while not self._ending.because and not self._ending.must_stop():
            if self._driver.troubles:
                self._ending.raise_if_ended()
            with loop.lock:
                queue.user_returned()
                looks = queue.looks()
            if looks and not self._ending.draining:
                self._intake.look()
            with loop.outbox, loop.lock:
                reserved = queue.reserve(now())
                self._driver.tell_careful()
                if queue.at_most_once:
                    self._driver.ask_grants(now())
            if reserved is not None:
                self._inside = None  # what the user does between two messages is not inside of anything
                yield reserved.messages(boot_ns)
                self._inside = call
                continue
            if self._ending.draining:
                waits = queue.at_most_once and self._intake.asks_grants()
                if not waits or time.monotonic() >= self._ending.drain_until:
                    return
                with loop.outbox, loop.lock:  # what is buffered is handed over as its grant comes
                    loop.changed.wait(GRANT_SLICE_S)
                continue
            self._ending.raise_if_ended()
            with loop.lock:
                shut = queue.deliverable() > 0
            if shut:
                self._intake.wait_for_gate(WAIT_SLICE_S)
            else:
                self._intake.pull(WAIT_SLICE_S)

    # --- planning

    def plan_ranges(self) -> Planner:
        """Turns this consumer into a planner of ranges that others read, for good; it fetches nothing any more.

        What was fetched and not handed over is planned again. Raises ConcurrentUse, ReentrantCall, ConsumerClosed.
        """
        if self._planner is None:
            call = _Call("plan_ranges")
            try:
                self._enter(call)
                self._planner = Planner(self, self._loop, self._driver, self._ending.raise_if_ended)
            finally:  # as in fetch
                if self._inside is call:
                    self._inside = self._user = None
        return self._planner

    # --- positions

    def flush(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Returns once the log has accepted every position that is acked now.

        Raises ClusterUnreachable, ConcurrentUse, ReentrantCall, ConsumerClosed.
        """
        call = _Call("flush")
        try:
            self._enter(call)
        finally:  # as in fetch
            if self._inside is call:
                self._inside = None
                self._user = self._user if self._iterating else None
        loop, member = self._loop, self._member
        with loop.outbox, loop.lock:
            wanted = {
                c.epoch: c.tracker.position() for c in member.claims.values() if isinstance(c.tracker, AtLeastOnce)
            }
            member.urgent = True
            loop.kick(self._driver)

        def done() -> bool:
            group = member.group
            return (
                self._driver.ended
                or group is None
                or all(
                    epoch not in group.claims or group.claims[epoch].position >= position
                    for epoch, position in wanted.items()
                )
            )

        loop.wait_for(done, "the positions to be accepted", time.monotonic() + timeout_s, self._driver.log)
        self._ending.raise_if_ended()

    def pause(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Stops handing over these partitions here; the claims stay and their leases are kept. Raises ReentrantCall."""
        self._loop.check_call("Consumer", "pause")
        with self._loop.outbox, self._loop.lock:
            self._driver.queue.pause(TopicPartition(*tp) for tp in partitions)

    def resume(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Ends a local pause. Raises ReentrantCall."""
        self._loop.check_call("Consumer", "resume")
        with self._loop.outbox, self._loop.lock:
            self._driver.queue.resume(TopicPartition(*tp) for tp in partitions)

    # --- looking

    def claims(self) -> Mapping[TopicPartition, ClaimInfo]:
        """What this consumer owns now, as far as it has read the log. Raises ReentrantCall."""
        self._loop.check_call("Consumer", "claims")
        with self._loop.lock:
            return self._claims()

    def _claims(self) -> dict[TopicPartition, ClaimInfo]:
        return {c.tp: self._loop.claim_info(self._driver, c) for c in self._member.claims.values()}

    def cached_info(self) -> ConsumerInfo:
        """What this consumer knows of itself, without asking anybody. Raises ReentrantCall."""
        self._loop.check_call("Consumer", "cached_info")
        with self._loop.lock:
            claims = self._claims()
            in_flight = sum(
                c.tracker.in_flight for c in self._member.claims.values() if isinstance(c.tracker, AtLeastOnce)
            )
            return ConsumerInfo(
                self.group,
                self.client_id,
                self._member.session,
                self._driver.options.delivery,
                self._member.paused,
                claims,
                self._lag(claims.values()),
                in_flight,
                self._member.grants_dropped,
                self._member.late_acks,
                self._loop.waiting_for() or self._driver.waiting_for(),
            )

    def _lag(self, claims: Collection[ClaimInfo]) -> int:
        """What is known to be left, -1 if nobody knows: a topic is gone, or there is nothing but parked partitions."""
        if self._driver.missing or (not claims and self._driver.parked()):
            return -1
        return sum(max(0, claim.lag) for claim in claims)

    def info(self, timeout_s: float = LEAVE_TIMEOUT_S) -> ConsumerInfo:
        """The same after reading the coordination log to its end. Raises ClusterUnreachable, ReentrantCall."""
        self._loop.check_call("Consumer", "info", waits=True)
        end = self._loop.log.bounds(self._driver.log, timeout_s).end
        world = self._loop.worlds[self._driver.log]
        self._loop.wait_for(
            lambda: world.next_offset >= end,
            "the end of the coordination log",
            time.monotonic() + timeout_s,
            self._driver.log,
        )
        return self.cached_info()

    def events(self) -> Iterator[Advisory]:
        """Advisories that came since the last call: claimed, revoking, lost, fenced, evicted, ..."""
        self._loop.check_call("Consumer", "events")
        events = self._driver.events
        while events:
            yield events.popleft()

    def wait_joined(self, timeout_s: float) -> None:
        """Returns once the group has this member. Raises what ended it, ClusterUnreachable."""
        self._loop.wait_for(
            lambda: self._member.session != NONE or self._driver.ended,
            "the group to be joined",
            time.monotonic() + timeout_s,
            self._driver.log,
        )
        if self._driver.ended:
            self._ending.raise_if_ended()
