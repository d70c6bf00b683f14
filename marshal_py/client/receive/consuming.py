"""One `consume`, of either front: how its messages are received, how it ends, and what an error of a handler does.

consume.py has a thread for the handler, async_consume.py a task. A ConsumeDemand decides when to ask the consumer's
source for how many messages: it counts, and the source answers from what librdkafka has fetched. What waits is written
as Steps, which each front carries out. Nothing here runs on the thread that sends the heartbeats.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic

from marshal_py.client.connection import Change, Steps, T
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.messages.message import Message
from marshal_py.client.receive.membership import LEAVE_TIMEOUT_S, WAIT_SLICE_S, Membership
from marshal_py.client.receive.receiving import ConsumeDemand
from marshal_py.client.values.info import awaited, taken
from marshal_py.client.values.requests import OnError, check_wait
from marshal_py.errors import AckNotConfirmed, ClaimLost, ConcurrentUse, ConsumerClosed, InvalidOption, ReentrantCall
from marshal_py.transport.serialization import K_co, V_co

logger: Final = logging.getLogger("marshal_py")

Handler = Callable[[Message[K_co, V_co]], object]
Take = Callable[[Iterator[Message[K_co, V_co]]], None]  # takes messages that come together
AWAIT_IT: Final = "the consumer of marshal_py.aio awaits coroutine functions"
ACKS_SLICE_S: Final = 0.02  # how often a drain looks whether the last messages are answered


class Reader:
    """Stands for a loop that receives, in the thread or task `who`. Compared by identity."""

    __slots__ = ("iterator", "who")

    def __init__(self) -> None:
        self.who: int = 0
        self.iterator: Callable[[], object] = str  # returns None once the program has dropped the loop's iterator


def iterator_of(receive: Callable[[Reader], T]) -> T:
    """Returns the iterator of a loop, which `receive(reader)` makes for the Reader that stands for the loop."""
    reader = Reader()
    iterator = receive(reader)
    reader.iterator = weakref.ref(iterator)
    return iterator


def report_failure(driver: ConsumerDriver, message: Message[Any, Any], error: BaseException) -> None:
    """Publishes that a handler raised `error`, as the event `handler_failed`, and logs it once a minute per cause."""
    topic, partition, offset = message.topic, message.partition, message.offset
    with driver.context.outbox, driver.context.lock:
        due = driver.handler_failures.due(_cause(error))
        driver.advise("handler_failed", topic, partition, message.token.epoch, offset, text=repr(error))
    if due:
        at = driver.member.name, topic, partition, offset
        logger.error("group %s: a handler failed on %s:%d at offset %d", *at, exc_info=error)


def _cause(error: BaseException) -> str:
    """Returns the kind of an error and the line that raised it: its text may name the message."""
    at, where = error.__traceback__, ""
    while at is not None:
        where, at = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}", at.tb_next
    return f"{type(error).__qualname__} {where}"


class Consuming(Generic[K_co, V_co]):
    """One `consume` of a consumer, until it is stopped or drained, or the consumer ends."""

    def __init__(
        self,
        consumer: Membership,
        queue: DeliveryQueue,
        demand: ConsumeDemand,
        handler: Handler[K_co, V_co] | Take[K_co, V_co] | None,
        on_error: OnError,
        whole: bool,
    ) -> None:
        """Prepares it; nothing is received yet. `whole`: `handler` is a Take, which reports its errors itself."""
        self._consumer, self._queue, self._demand = consumer, queue, demand
        self._context, self._driver, self._ending = consumer._context, consumer._driver, consumer._ending
        self._handler: Callable[[Any], object] | None = handler
        self._on_error, self._whole = on_error, whole
        self._reader: Reader | None = None  # the loop that receives; None between two loops
        self._dropped = False  # the buffer, by `stop`
        self._drained = False
        self._lost_before = 0  # how many acks of the consumer were lost before the drain began
        self._over = False
        self._error: BaseException | None = None

    # --- looking

    def __repr__(self) -> str:
        state = "closed" if self.closed else "draining" if self.draining else "open"
        return f"{type(self).__name__}({self._driver.member.name!r}, {state})"

    @property
    def closed(self) -> bool:
        """Returns whether it has ended, so that no more messages come from it."""
        return self._over or self._ending.over

    @property
    def draining(self) -> bool:
        """Returns whether it asks for no more, and ends when it has delivered what has come."""
        return self._demand.drain_until is not None

    @property
    def error(self) -> BaseException | None:
        """Returns what ended it: what the handler raised, or the error that ended the consumer; None otherwise."""
        return self._error or (None if self._over else self._driver.error)

    def pending(self) -> tuple[int, int]:
        """Returns how many messages and bytes are pending, as `ConsumerInfo` says."""
        return (0, 0) if self.closed else self._demand.pending()

    def _until_over(self, timeout_s: float | None) -> Steps[bool]:
        """Waits for its end within `timeout_s`; returns whether it has ended, or raises why. Raises ReentrantCall in
        its own handler or loop."""
        timeout_s = check_wait(timeout_s)
        deadline = None if timeout_s is None else self._context.monotonic() + timeout_s
        while True:
            with self._context.lock:
                seen = self._context.changes
            if self._over:
                break
            if self.closed and self._handler is None and self._reading() is None:
                break  # the consumer has ended, and no loop is there to notice
            left_s = WAIT_SLICE_S if deadline is None else deadline - self._context.monotonic()
            if left_s <= 0:
                return False
            self._check_waiter()
            yield Change(min(WAIT_SLICE_S, left_s), seen)
        if self.error is not None:
            raise self.error
        return True

    def _check_waiter(self) -> None:
        """Raises ReentrantCall if the caller receives the messages: then the consume cannot end while it waits."""
        reading = self._reading()
        if reading is not None and reading.who == self._consumer.identify():
            inside = (
                "a loop over this consume that has not ended"
                if self._handler is None
                else "the handler of this consume"
            )
            way_out = (
                f"call stop() or drain() there, which return at once, and wait() in another {self._consumer.caller}"
            )
            raise ReentrantCall("wait", inside, way_out)

    # --- ending

    def _stop_loop(self) -> None:
        """Ends it where there is no handler. The demand is stopped."""
        with self._context.lock:
            reader = self._reading()
            if reader is None:
                self._end(None)
            elif reader.who == self._consumer.identify():
                self._drop()

    def begin_drain(self, timeout_s: float | None) -> float:
        """Lets it deliver what is buffered and then end. Returns for how many seconds it may drain."""
        timeout_s = check_wait(timeout_s)
        if timeout_s is None:
            timeout_s = self._driver.options.handler_timeout_s
        if self._demand.drain_until is None:
            with self._context.lock:
                self._lost_before = self._queue.delivery.lost_acks.count
            self._demand.drain_until = self._context.monotonic() + timeout_s
        return timeout_s

    def _handles(self) -> bool:
        """Returns whether a handler runs now."""
        return not self._over and self._consumer._delivers

    def _drop(self) -> None:
        """Drops what is buffered. Called where the messages are received, or while nobody receives."""
        if not self._dropped:
            self._dropped = True
            with self._context.lock:
                self._queue.fetch_again()

    def _end(self, error: BaseException | None) -> None:
        if self._over:
            return
        if self._demand.over() and not self._ending.over:
            self._drop()
        self._error = self._error or error
        self._over = True
        with self._context.lock:
            self._context.changed.notify_all()  # somebody may wait for the end

    # --- receiving

    def _reading(self) -> Reader | None:
        """Returns the loop that receives; None between two loops."""
        reader = self._reader
        return None if reader is None or reader.iterator() is None else reader

    def _check_loop(self) -> None:
        """Raises InvalidOption if the messages go to a handler, so that there is nothing to iterate over."""
        if self._handler is not None:
            raise InvalidOption("handler", self._handler, "with a handler the messages go to it: do not iterate")

    def _begin(self, reader: Reader) -> bool:
        """Makes `reader` the loop that receives. Returns False if it has ended. Raises ConcurrentUse."""
        with self._context.lock:
            if self._over:
                return False
            me, reading = self._consumer.identify(), self._reading()
            if reading is not None:
                busy = ConcurrentUse.ITERATES if reading.who == me else ConcurrentUse.FETCHES
                raise ConcurrentUse(self._demand.verb, self._consumer.caller, busy)
            reader.who, self._reader = me, reader
            return True

    @contextmanager
    def _receiving(self, reader: Reader) -> Iterator[None]:
        """Surrounds a loop that receives, and ends the consume with it, unless the user has left the loop."""
        try:
            yield
        except ConsumerClosed:  # stopped or drained meanwhile, or another call has raised why the consumer has ended
            self._end(self._driver.error)
            if self._driver.error is not None:
                raise self._driver.error from None
        except (ConcurrentUse, ReentrantCall):  # of this loop alone
            raise
        except Exception as error:
            self._end(error)
            raise
        else:
            self._end(None)
        finally:
            if self._reader is reader:
                self._reader = None
                if self._demand.over():  # stopped inside the loop, which was left then
                    self._end(None)

    def _confirmed(self) -> Steps[None]:
        """Waits at the end of a drain until no handler has a message and the log has the positions."""
        if self._demand.drain_until is not None and (yield from self._answered()):
            with self._context.lock:
                acked = not sum(map(taken, self._driver.member.claims.values()))
            # A loss, or no answer, is no error of the consume: `drain` tells it by its result.
            with suppress(ClaimLost, AckNotConfirmed):
                yield from self._consumer._confirmations.flush(LEAVE_TIMEOUT_S, self._lost_before)
                self._drained = acked

    def _answered(self) -> Steps[bool]:
        """Waits until no handler has a message (True), or the drain must end. What was given back comes only with the
        next question."""
        while not self._demand.over() and not self._ending.over:
            with self._context.lock:
                if not sum(map(awaited, self._driver.member.claims.values())):
                    return True
                seen = self._context.changes
            yield Change(ACKS_SLICE_S, seen)
        return False

    # --- a handler that raises

    def _failed(self, message: Message[Any, Any], error: BaseException, *, ends: bool) -> None:
        """Reports `error`, which the handler raised, and gives the message back. `ends`: whatever `on_error` says."""
        report_failure(self._driver, message, error)
        if self._on_error == "nak" and not ends:
            message.nak()
            return
        self._give_back(message)
        self._error = error
        self._demand.stopped = True

    def _give_back(self, message: Message[Any, Any]) -> None:
        """Has the next call for messages deliver it, here or elsewhere. In at-most-once mode it does not come again."""
        if not self._queue.at_most_once:
            message.nak(0)
