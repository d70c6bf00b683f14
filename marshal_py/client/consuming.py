"""One `consume`, of either front: how its messages are received, how it ends, and what an error of a handler does.

ConsumeContext has a thread for the handler, AsyncConsumeContext a task. A ConsumeDemand decides when to ask the
consumer's source for how many messages: it counts, and the source answers from what librdkafka has fetched. What waits
is written as Steps, which each front carries out. Nothing here runs on the thread that sends the heartbeats.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from itertools import chain
from typing import Any, Final, Generic, Self

from marshal_py.client.connection import Change, Steps, T
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.event_loop import EventLoop
from marshal_py.client.membership import LEAVE_TIMEOUT_S, WAIT_SLICE_S, Membership
from marshal_py.client.messages.message import Message
from marshal_py.client.receiving import ConsumeDemand, Demand
from marshal_py.client.values.info import awaited, taken
from marshal_py.client.values.requests import OnError, check_timeout, check_wait
from marshal_py.errors import AckNotConfirmed, ClaimLost, ConcurrentUse, ConsumerClosed, InvalidOption, ReentrantCall
from marshal_py.transport.serialization import K_co, V_co

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
    text = repr(error)  # code of the program: not under the lock, which heartbeats need
    with driver.context.outbox, driver.context.lock:
        due = driver.handler_failures.due(_cause(error))
        driver.advise("handler_failed", topic, partition, message.token.epoch, offset, text=text)
    if due:
        at = driver.member.name, topic, partition, offset
        driver.context.logger.error("group %s: a handler failed on %s:%d at offset %d", *at, exc_info=error)


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
            if self._ending.error_waits:  # else a stop, as of a `process` that has seen this end first, would hide it
                self._ending.raise_if_ended()
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


# --- `Consumer.consume`: the messages go to a callback, on a thread of their own, or to a `for` loop


class ConsumeContext(Consuming[K_co, V_co]):
    """Receives messages for `Consumer.consume` until it is stopped or drained, or the consumer ends.

    Without a handler, iterate over it; leaving the loop pauses it, and another loop continues. It is a context manager:
    leaving it stops it. The consumer itself continues, and keeps its claims, until it is stopped.
    """

    def __init__(
        self,
        consumer: Membership,
        queue: DeliveryQueue,
        demand: ConsumeDemand,
        runs: Callable[[Demand], Iterator[Iterator[Message[K_co, V_co]]]],
        handler: Handler[K_co, V_co] | Take[K_co, V_co] | None,
        on_error: OnError,
        whole: bool,
    ) -> None:
        """Prepares a context for `start`. `runs(demand)` yields iterators over messages."""
        super().__init__(consumer, queue, demand, handler, on_error, whole)
        self._runs = runs
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread of the handler, if there is a handler."""
        if self._handler is not None:
            self._thread = threading.Thread(target=self._handle, name="marshal-consume", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s` seconds (None: any time). Returns whether it has.

        Raises what ended it, if that was an error; InvalidOption; ReentrantCall inside the handler or the loop, whose
        end it would wait for (with 0 seconds it does not wait, and returns False there).
        """
        self._context.check_call("ConsumeContext", "wait", waits=True)
        return self._context.complete(self._until_over(timeout_s))

    # --- ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it and drops what is buffered; the consumer fetches that again when it is asked for messages.

        With a handler the call waits until a running handler has returned, at most `timeout_s` seconds. Inside the
        handler, or inside the loop, it returns at once, and no message follows. While another thread runs the loop, it
        returns at once too, and the loop ends some milliseconds later or after its present message. A `drain` that runs
        ends without waiting for more acks. A second call does nothing. Raises InvalidOption.
        """
        self._context.check_call("ConsumeContext", "stop", waits=True)
        timeout_s = check_timeout(timeout_s)
        self._demand.stopped = True
        if self._thread is None:
            self._stop_loop()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Asks for no more, delivers what has come, and waits until it is answered and the log has the positions.

        With a handler the call waits for that. Inside the handler, and without a handler, it returns at once, and the
        loop ends when it has received what has come. After `timeout_s` seconds (default: the handler timeout) what
        is still buffered is dropped, and the consume ends, as soon as a handler that still runs has returned: the call
        does not wait for that. What is not acked then stays with its handlers. A message that was given back (`nak`,
        or a handler that raised) is not waited for: it comes again when messages are asked for next, here or at the
        next owner.

        Returns whether everything is delivered and acked, and the log has the positions: False if a message was given
        back, if the time was over, if `stop` or an error ended it before, and where the call returns at once. A later
        call returns the outcome. Raises InvalidOption.
        """
        self._context.check_call("ConsumeContext", "drain", waits=True)
        self.finish(self.begin_drain(timeout_s))
        return self._drained

    def finish(self, timeout_s: float) -> bool:
        """Waits for a drain's end within `timeout_s`, then for the log. False if a handler still runs; True at once on
        its thread, or without one."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        if self._handles():
            return False
        self._thread.join(LEAVE_TIMEOUT_S)
        return True

    # --- receiving

    def __iter__(self) -> Iterator[Message[K_co, V_co]]:
        """Delivers messages one by one, checking the lease before each. Raises the same as `Consumer.fetch`."""
        self._check_loop()
        return chain.from_iterable(iterator_of(self._receive))

    def _receive(self, reader: Reader) -> Iterator[Iterator[Message[K_co, V_co]]]:
        if self._begin(reader):
            with self._receiving(reader):
                yield from self._runs(self._demand)
                self._context.complete(self._confirmed())

    def _handle(self) -> None:
        handle, demand = self._handler, self._demand
        assert handle is not None
        try:
            runs = iterator_of(self._receive)
            messages: Iterator[Any] = runs if self._whole else chain.from_iterable(runs)
            for message in messages:
                try:
                    result = handle(message)
                except BaseException as error:  # sys.exit() too: it would end this thread and nobody would know
                    self._failed(message, error, ends=not isinstance(error, Exception))
                else:
                    if result is not None and inspect.iscoroutine(result):
                        result.close()  # Python would warn that nobody has awaited it
                        rule = f"a function whose work is done when it returns, not a coroutine; {AWAIT_IT}"
                        self._failed(message, InvalidOption("handler", handle, rule), ends=True)
                if demand.stopped:
                    self._drop()
        except Exception as error:
            self._context.logger.error("group %s: a consume has ended", self._driver.member.name, exc_info=error)
            self._end(error)
        finally:
            self._end(None)


# --- `AsyncConsumer.consume`: for `async for`, or with a handler in a task of its own
#
# Between a message and the user's code there is no `await`, so a loop that is cancelled while it waits has taken
# nothing: another loop continues. A handler that is cancelled, as at the end of the program, has its message given
# back.


# Makes the iterations over messages of a demand, one after the other; the program holds the Reader's iterator.
Runs = Callable[[ConsumeDemand, Reader], AsyncGenerator[Iterator[Message[K_co, V_co]], None]]


class AsyncConsumeContext(Consuming[K_co, V_co]):
    """Receives messages for `AsyncConsumer.consume` until it is stopped or drained, or the consumer ends.

    Without a handler, iterate over it by `async for`; leaving the loop pauses it, and another loop continues. It is an
    asynchronous context manager: leaving it stops it. The consumer itself continues, and keeps its claims.
    """

    def __init__(
        self,
        consumer: Membership,
        queue: DeliveryQueue,
        demand: ConsumeDemand,
        runs: Runs[K_co, V_co],
        complete: Callable[[Steps[Any]], Coroutine[Any, Any, Any]],
        event_loop: EventLoop,
        handler: Handler[K_co, V_co] | Take[K_co, V_co] | None,
        on_error: OnError,
        whole: bool,
    ) -> None:
        """Prepares a context; `start` begins it. `complete(steps)` carries out what a call waits for."""
        super().__init__(consumer, queue, demand, handler, on_error, whole)
        self._runs, self._complete, self._event_loop = runs, complete, event_loop
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task of the handler, if there is a handler."""
        if self._handler is not None:
            self._task = asyncio.get_running_loop().create_task(self._handle(), name="marshal-consume")
            self._task.add_done_callback(lambda _: self._end(None))  # also of one that is cancelled before it begins

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s` seconds, as `ConsumeContext.wait` does."""
        self._event_loop.check("wait")
        self._context.check_call("ConsumeContext", "wait", waits=True)
        ended: bool = await self._complete(self._until_over(timeout_s))
        return ended

    # --- ending

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        reading = self._reading()
        if reading is not None and reading.who == self._consumer.identify():
            loop = reading.iterator()  # an error has left it, and asyncio would close it only once nothing holds it
            if isinstance(loop, AsyncGenerator):
                await loop.aclose()

    async def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it and drops what is buffered, as `ConsumeContext.stop` does. It cancels no handler.

        With a handler the call waits until a running handler has returned, at most `timeout_s` seconds.
        """
        self._event_loop.check("stop")
        self._context.check_call("ConsumeContext", "stop", waits=True)
        timeout_s = check_timeout(timeout_s)
        self._demand.stopped = True
        if self._task is None:
            self._stop_loop()
        elif self._task is not asyncio.current_task():
            await asyncio.wait([self._task], timeout=timeout_s)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Delivers what is buffered and ends, as `ConsumeContext.drain` does, with the same result.

        With a handler the call waits for that. Inside the handler, and without a handler, it returns at once. A message
        that was given back is not waited for.
        """
        self._event_loop.check("drain")
        self._context.check_call("ConsumeContext", "drain", waits=True)
        await self.finish(self.begin_drain(timeout_s))
        return self._drained

    async def finish(self, timeout_s: float) -> bool:
        """Waits for the end of a drain, as `ConsumeContext.finish` does, with the same result."""
        if self._task is None or self._task is asyncio.current_task():
            return True
        await asyncio.wait([self._task], timeout=timeout_s)
        if self._handles():
            return False
        await asyncio.wait([self._task], timeout=LEAVE_TIMEOUT_S)
        return True

    # --- receiving

    def __aiter__(self) -> AsyncIterator[Message[K_co, V_co]]:
        """Delivers messages one by one, for `async for`. Raises the same as `AsyncConsumer.fetch`."""
        self._check_loop()
        return iterator_of(self._receive)

    async def _receive(self, reader: Reader) -> AsyncGenerator[Any, None]:
        """Yields messages; the iterators over those that come together if its handler takes them whole."""
        if self._reading() is not None:
            await asyncio.sleep(0)  # as in AsyncConsumer
        if self._begin(reader):
            with self._receiving(reader):
                async with aclosing(self._runs(self._demand, reader)) as runs:
                    async for messages in runs:
                        for message in (messages,) if self._whole else messages:
                            yield message
                await self._complete(self._confirmed())

    async def _handle(self) -> None:
        handle, demand = self._handler, self._demand
        assert handle is not None
        try:
            async with aclosing(iterator_of(self._receive)) as received:
                async for message in received:
                    try:
                        result = handle(message)
                        if result is not None and inspect.isawaitable(result):
                            await result
                    except BaseException as error:
                        if _is_cancelled(error):
                            self._give_back(message)
                            raise
                        ends = not isinstance(error, Exception | asyncio.CancelledError)
                        self._failed(message, error, ends=ends)
                    if demand.stopped:
                        self._drop()
        except Exception as error:
            self._context.logger.error("group %s: a consume has ended", self._driver.member.name, exc_info=error)
            self._end(error)


def _is_cancelled(error: BaseException) -> bool:
    """Returns whether this task is to end. Else a CancelledError is of something that the handler has awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
