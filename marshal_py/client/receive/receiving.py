"""How one consumer receives: the steps of `fetch`, iteration and `consume`, which every front carries out.

`Consumer` waits on the user's thread, `AsyncConsumer` without blocking the event loop, and the simulator in virtual
time.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from marshal_py.client.connection.context import Context
from marshal_py.client.delivery.buffers import Reserved
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.prefetch import LOOK_MS
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.idle_heartbeat import IdleHeartbeat
from marshal_py.client.messages.message import Batch
from marshal_py.client.receive.demand import GRANT_SLICE_S, ConsumeDemand, Demand, Intake
from marshal_py.client.receive.ending import Ending
from marshal_py.client.receive.membership import WAIT_SLICE_S
from marshal_py.client.values.requests import ConsumeRequest, Request
from marshal_py.client.values.waits import Change, Steps, Wait
from marshal_py.errors import ClaimLost, InvalidOption, NeedsAtLeastOnce, PositionOutOfRange
from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.wire.identity import NONE, TopicPartition


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
                yield reserved
                demand.delivered(reserved)
                demand.resume()
                continue
            if skipped:  # what came was finished already: low buffers are filled again before the next wait
                continue
            if self._ending.draining:
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
        if claim.phase is not ClaimPhase.GONE:  # a stop that has not read back that it left
            ending.check_open()
    if claim is None or claim.seek_to == NONE:
        raise _not_claimed(driver, tp)


def _owned(driver: ConsumerDriver) -> set[TopicPartition]:
    with driver.context.lock:
        return {claim.tp for claim in driver.member.claims.values()}


def _not_claimed(driver: ConsumerDriver, tp: TopicPartition) -> ClaimLost:
    return ClaimLost(driver.member.name, (str(tp),), tuple(map(str, sorted(_owned(driver) - {tp}))))
