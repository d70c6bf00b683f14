"""The consumer of an asyncio program: the Consumer's own calls, waited for without blocking the event loop.

It decides nothing: it carries out the waits of `Consumer` in another way. Gates are checked and messages are
taken on the event loop's thread, with no `await` between that and the user's code. So a call that is cancelled has
taken nothing: what was fetched stays in the buffers, and the next call delivers it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack, overload

from marshal_py.client.connection import Poll, PollAhead, Steps, T, Wait, following
from marshal_py.client.consumer import Consumer
from marshal_py.client.consuming import AsyncConsumeContext, Handler, Reader, Take, iterator_of
from marshal_py.client.delivery.buffers import Reserved
from marshal_py.client.event_loop import EventLoop, Feed, Threads
from marshal_py.client.membership import HEALTHY_SILENCE_S, LEAVE_TIMEOUT_S, Call, Confirmations, Ending
from marshal_py.client.messages.answers import ACK_TIMEOUT_S, Ack
from marshal_py.client.messages.message import Batch, Message, Part, delivered_by
from marshal_py.client.process.process import AsyncProcess
from marshal_py.client.process.processing import (
    WINDOW,
    AfterDeadLetter,
    AsyncBatchHandler,
    AsyncHandler,
    Batches,
    Order,
    Processing,
    ProcessKeywords,
    Retry,
    Unkeyed,
    check_handler_timeout,
    check_settings,
    check_takes_one,
)
from marshal_py.client.receiving import Demand
from marshal_py.client.values.info import ConsumerInfo
from marshal_py.client.values.options import parameters_of
from marshal_py.client.values.requests import (
    AnyPartition,
    ConsumeRequest,
    OnError,
    Request,
    check_consume,
    check_timeout,
    check_wait,
)
from marshal_py.errors import ConcurrentUse, EventLoopMisuse, InvalidOption, MarshalError
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.transport.serialization import K_co, V_co

# Seconds. Other tasks of the event loop have their turn at least so often while messages are there without a wait.
TURN_S: Final = 0.005
TASKS: Final = 100  # of a `process`, by default
TURN_STEPS: Final = 10  # steps of the event loop per turn, because a task needs several to answer a request


class Iterating:
    """An iteration that runs: its reader, its task, and the messages that it is delivering."""

    __slots__ = ("messages", "reader", "task")

    reader: Reader
    task: asyncio.Task[Any] | None

    def __init__(self, reader: Reader) -> None:
        self.reader, self.task = reader, asyncio.current_task()
        self.messages: Generator[Message[Any, Any], None, None] | None = None

    def left(self) -> bool:
        """Returns whether nobody can continue it: its iterator was dropped, or its task has ended, whose error may keep
        the iterator in a frame."""
        return self.reader.iterator() is None or (self.task is not None and self.task.done())


class AsyncConsumer(Generic[K_co, V_co]):
    """Does what `Consumer` does, for asyncio. It is an asynchronous context manager: leaving it stops the consumer.

    It belongs to the event loop that has made it. `fetch`, `next` and iteration are for one task at a time. Acks do not
    wait, so they are not awaited; they may come from any task or thread.

    A call may be cancelled at any time: it has delivered nothing then, and the next call delivers the messages. A
    message that a cancelled handler had received is the handler's: without an ack it is delivered again, after a stop
    or to the next owner.
    """

    def __init__(self, consumer: Consumer[K_co, V_co], event_loop: EventLoop) -> None:
        self._consumer = consumer
        self._shared = event_loop
        self._feed = event_loop.feed(consumer._queue.pull, consumer._queue.source.poll_now)
        self._monotonic = consumer._context.monotonic
        self._turn_at = 0.0  # when other tasks had their last turn, in seconds of the monotonic clock
        self._running: Iterating | None = None
        consumer.identify, consumer.caller = _task, "task"
        self._ending = consumer._ending
        # The driver holds these two, so they do not hold this object: a consumer that is dropped must be noticed.
        self._ending.dispose = partial(_dispose, self._feed, event_loop.verbs)
        consumer._queue.delivery.confirm = partial(_confirm, event_loop.thread, consumer._confirmations)

    # --- life

    def __repr__(self) -> str:
        return f"Async{self._consumer!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.because(error)
        await self.stop()

    async def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Drops what is buffered, releases every claim and leaves the group, as `Consumer.stop` does.

        After a cancellation a second call completes the stop.
        """
        self._shared.check("stop")
        self._consumer._context.check_call("Consumer", "stop", waits=True)
        await self._complete(self._ending.stop(timeout_s))
        await self._close()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Fetches no more, delivers what is buffered, releases the claims and leaves, as `Consumer.drain` does.

        While an iteration runs, the call returns at once, and the iteration ends when the rest is delivered. With a
        handler of `consume` it waits for that.
        """
        self._arrive("drain")
        consumer = self._consumer
        consumer._context.check_call("Consumer", "drain", waits=True)
        timeout_s = check_wait(timeout_s)
        with consumer._context.lock:
            consumer._queue.drain()
        consumer._begin_drain(timeout_s)
        if not consumer._iterating:
            await self._finish_drain()
        elif isinstance(running := consumer._consuming, AsyncConsumeContext):
            if not await running.finish(self._ending.drain_left_s()):
                await self._finish_drain()

    async def _finish_drain(self) -> None:
        await self._complete(self._ending.finish_drain())
        await self._close()

    async def _close(self) -> None:
        if not self._ending.done:  # the threads of a Marshal that was closed have ended
            await self._shared.verbs.run(self._ending.close)
        self._feed.close()

    # --- fetching

    # Each of these verbs is that of Consumer, called for this object: it checks what is asked for, fills in defaults
    # and calls `_call`, `_first` or `_consume`, which wait here without blocking the event loop.

    @parameters_of(Consumer.fetch)
    async def fetch(self, *arguments: Any, **named: Any) -> Batch[K_co, V_co]:
        """Waits for messages and returns at most `max_messages` of them, as `Consumer.fetch` does."""
        fetch: Any = Consumer.fetch
        batch: Batch[K_co, V_co] = await fetch(self, *arguments, **named)
        return batch

    async def _call(self, call: Call, request: Request) -> Batch[K_co, V_co]:
        await self._give_turn()
        consumer = self._consumer
        begun = False  # as in Consumer.fetch
        try:
            self._enter(call)
            consumer._queue.begin()
            begun = True
            return await self._complete(consumer._receiving.fetch(request))
        except BaseException as error:
            if begun and consumer._inside is call and not isinstance(error, MarshalError | asyncio.CancelledError):
                with consumer._context.lock:
                    consumer._queue.take_back()
            raise
        finally:  # as in Consumer.fetch
            if consumer._inside is call:
                consumer._inside = None
                consumer._user = consumer._user if consumer._iterating else None

    @parameters_of(Consumer.next)
    async def next(self, *arguments: Any, **named: Any) -> Message[K_co, V_co] | None:
        """Returns the next message, or None after `expires_s` seconds without one, as `Consumer.next` does."""
        next_: Any = Consumer.next
        message: Message[K_co, V_co] | None = await next_(self, *arguments, **named)
        return message

    async def _first(self, request: Request) -> Message[K_co, V_co] | None:
        return next(iter(await self._call(Call("next"), request)), None)

    def __aiter__(self) -> AsyncIterator[Message[K_co, V_co]]:
        """Delivers messages one by one until a stop, a drain or a signal, as the iteration of `Consumer` does.

        While messages are buffered, `async for` does not wait; other tasks then have their turn every 5 ms. An `anext`
        that is cancelled, by a timeout for example, ends this iterator, and a new one continues: to wait for a limited
        time, call `next(expires_s)`.
        """
        return iterator_of(partial(self._messages, self._consumer._receiving.demand()))

    @parameters_of(Consumer[Any, Any].consume)
    def consume(self, *arguments: Any, **named: Any) -> AsyncConsumeContext[K_co, V_co]:
        """Receives messages without an end, through a buffer that is refilled, as `Consumer.consume` does.

        With a `handler`, a coroutine function or a plain one, a task calls `handler(message)` for each message, one
        after the other, and awaits what that returns, if it can be awaited. Without one, iterate over the returned
        context by `async for`. The call does not wait, so it is not awaited.
        """
        consume: Any = Consumer.consume
        context: AsyncConsumeContext[K_co, V_co] = consume(self, *arguments, **named)
        return context

    def _consume(
        self,
        request: ConsumeRequest,
        handler: Handler[K_co, V_co] | Take[K_co, V_co] | None,
        on_error: OnError | None = None,
        *,
        whole: bool = False,
    ) -> AsyncConsumeContext[K_co, V_co]:
        consumer = self._consumer
        self._arrive("consume")
        context = consumer._begin_consume(
            "process" if whole else "consume",
            request,
            on_error,
            lambda demand, on_error: AsyncConsumeContext(
                consumer, consumer._queue, demand, self._runs, self._complete, self._shared, handler, on_error, whole
            ),
        )
        context.start()
        return context

    @overload
    def process(
        self,
        handler: AsyncHandler[K_co, V_co],
        *,
        batch: None = None,
        timeout_s: float | None = None,
        **options: Unpack[ProcessKeywords[K_co, V_co]],
    ) -> AsyncProcess[K_co, V_co]: ...
    @overload
    def process(
        self,
        handler: AsyncBatchHandler[K_co, V_co],
        *,
        batch: Batches,
        timeout_s: float | None = None,
        **options: Unpack[ProcessKeywords[K_co, V_co]],
    ) -> AsyncProcess[K_co, V_co]: ...
    def process(
        self,
        handler: AsyncHandler[K_co, V_co] | AsyncBatchHandler[K_co, V_co],
        *,
        workers: int | None = None,
        order: Order | None = "key",
        key: Callable[[Message[K_co, V_co]], Hashable] | None = None,
        unkeyed: Unkeyed = "parallel",
        retry: Retry | None = None,
        retry_on: type[Exception] | Iterable[type[Exception]] = Exception,
        after_dead_letter: AfterDeadLetter = "continue",
        window: int = WINDOW,
        batch: Batches | None = None,
        timeout_s: float | None = None,
    ) -> AsyncProcess[K_co, V_co]:
        """Handles messages in parallel, as `Consumer.process` does: `workers` tasks (100) await `handler(message)`.

        `timeout_s`: after so many seconds a handler is cancelled, and its message is tried again as after a
        TimeoutError (default: any time; after `handler_timeout_s` the partition moves). The call does not wait, so it
        is not awaited.
        """
        consumer = self._consumer
        self._arrive("process")
        check_takes_one(handler, "a coroutine function")
        if timeout_s is not None:
            check_handler_timeout(timeout_s)
        settings = check_settings(
            consumer._receiving.driver.member.name,
            consumer._queue.options,
            TASKS if workers is None else workers,
            order,
            key,
            unkeyed,
            retry,
            retry_on,
            after_dead_letter,
            window,
            batch,
        )
        processing = Processing[K_co, V_co](consumer._receiving, settings)
        consume = partial(self._consume, check_consume(), whole=True)
        process = AsyncProcess(consumer._context, self._shared, processing, handler, timeout_s, consume)
        process.start()
        return process

    async def _messages(self, demand: Demand, reader: Reader) -> AsyncGenerator[Message[K_co, V_co], None]:
        async with aclosing(self._runs(demand, reader)) as runs:
            async for messages in runs:
                for message in messages:
                    yield message

    async def _runs(
        self, demand: Demand, reader: Reader
    ) -> AsyncGenerator[Generator[Message[K_co, V_co], None, None], None]:
        """Yields iterators, each over the next messages of one partition. `reader.iterator`: the program's."""
        iterating = Iterating(reader)
        consumer, call = self._consumer, Call(demand.verb)
        boot_ns = consumer._context.clock.boot_ns
        if self._running is not None and not self._running.left():
            await asyncio.sleep(0)  # asyncio holds what has cancelled this task, and so the loop that this has left
        try:
            self._enter(call)
            if consumer._iterating is not None:
                raise ConcurrentUse(demand.verb, consumer.caller, busy=ConcurrentUse.ITERATES)
            consumer._iterating, self._running = call, iterating
            steps = consumer._receiving.iterate(demand)
            step = next(steps, None)
            while step is not None:
                if isinstance(step, Reserved):
                    iterating.messages = step.messages(boot_ns)
                    consumer._inside = None  # between two messages the user is in no call of the consumer
                    yield iterating.messages
                    if consumer._iterating is not call:
                        return  # its task had ended, and another call came since
                    consumer._inside = call
                    await self._give_turn()
                    step = next(steps, None)
                else:
                    step = following(steps, await self._carry_out(step))
        except BaseException as error:
            if consumer._inside is call and not isinstance(error, MarshalError | asyncio.CancelledError):
                with consumer._context.lock:
                    consumer._queue.fetch_again()
            raise
        finally:  # as in Consumer.fetch
            if consumer._inside is call:
                consumer._inside = None
            if consumer._iterating is call:
                consumer._iterating = consumer._user = self._running = None
                if self._ending.draining:
                    await self._finish_drain()

    def _enter(self, call: Call) -> None:
        """Begins a call that only one task at a time may be in. Raises ConcurrentUse and what ended the consumer."""
        self._arrive(call.verb)
        self._consumer._enter(call)

    def _arrive(self, verb: str) -> None:
        """Ends an iteration that the program has left. Raises EventLoopMisuse in another event loop."""
        self._shared.check(verb)
        consumer, running = self._consumer, self._running
        if running is not None and running.left():
            # The program has left the loop, and asyncio closes its generator only later.
            if running.messages is not None:
                running.messages.close()
            consumer._iterating = consumer._user = self._running = None

    # --- waiting

    async def _complete(self, steps: Steps[T]) -> T:
        """Runs a call to its end and returns its result."""
        try:
            wait = next(steps)
            while True:
                wait = steps.send(await self._carry_out(wait))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _carry_out(self, wait: Wait) -> Any:
        if isinstance(wait, PollAhead):
            return self._feed.take(wait.max_messages) or ()
        if isinstance(wait, Poll):
            await self._give_turn()
            chunks = self._feed.take(wait.max_messages)
            if chunks or (chunks is not None and wait.timeout_s <= 0):
                return chunks
        try:
            return await (self._feed.poll(wait) if isinstance(wait, Poll) else self._shared.changes.wait(wait))
        finally:
            self._turn_at = self._monotonic()

    async def _give_turn(self) -> None:
        """Lets other tasks run, TURN_STEPS steps, if they had no turn for TURN_S."""
        if self._monotonic() - self._turn_at >= TURN_S:
            for _ in range(TURN_STEPS):
                await asyncio.sleep(0)
            self._turn_at = self._monotonic()

    # --- positions

    async def flush(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Waits until the log has accepted the positions of all messages acked before, as `Consumer.flush` does."""
        self._arrive("flush")
        self._consumer._pass("flush")
        await self._complete(self._consumer._flush(timeout_s))

    async def double_ack(
        self, message: Message[Any, Any] | Part[Any, Any] | Batch[Any, Any], timeout_s: float = ACK_TIMEOUT_S
    ) -> bool:
        """Acks a message, a part or a batch, and returns True once the log has accepted that: `Message.double_ack`.

        Raises ClaimLost, AckNotConfirmed after `timeout_s` seconds; before anything is acked InvalidOption, also for
        what another consumer has delivered, and EventLoopMisuse.
        """
        self._shared.check("double_ack")
        check_timeout(timeout_s)
        delivery = self._consumer._queue.delivery
        if not isinstance(message, Message | Part | Batch) or not delivered_by(message, delivery):
            raise InvalidOption("message", message, "a message, a part or a batch of this consumer")
        await self._complete(self._consumer._confirmations.accepted(message._acked, timeout_s))
        return True

    def healthy(self, max_silence_s: float = HEALTHY_SILENCE_S) -> bool:
        """Returns whether this consumer works, as `Consumer.healthy` does. It is not awaited."""
        return self._consumer.healthy(max_silence_s)

    def complete(self, handle: bytes) -> bool:
        """Acks the message whose `Message.handle` this is, as `Consumer.complete` does."""
        return self._consumer.complete(handle)

    def message(self, handle: bytes) -> Message[K_co, V_co]:
        """Returns the message whose handle this is, as `Consumer.message` does."""
        return self._consumer.message(handle)

    async def seek(self, partition: AnyPartition, offset: int, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Moves the position of a partition that this consumer owns, as `Consumer.seek` does.

        A call that is cancelled may move it all the same.
        """
        self._shared.check("seek")
        await self._shared.verbs.run(lambda: self._consumer.seek(partition, offset, timeout_s))

    def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Stops delivering these partitions to this consumer, which keeps the claims, as `Consumer.pause` does."""
        self._consumer.pause(partitions)

    def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Delivers these partitions again after `pause`, as `Consumer.resume` does."""
        self._consumer.resume(partitions)

    # --- looking

    def cached_info(self) -> ConsumerInfo:
        """Returns the state of this consumer as it knows it, without asking the cluster."""
        return self._consumer.cached_info()

    async def info(self, timeout_s: float = LEAVE_TIMEOUT_S) -> ConsumerInfo:
        """Reads the coordination log to its end, then returns the state, as `Consumer.info` does."""
        self._shared.check("info")
        end, deadline = await self._shared.verbs.run(lambda: self._consumer._log_end(timeout_s))
        await self._complete(self._consumer._read_to(end, deadline))
        return self._consumer.cached_info()

    def events(self) -> Iterator[Advisory]:
        """Yields the advisories that came since the last call, as `Consumer.events` does. It does not wait."""
        return self._consumer.events()


def _confirm(thread: int, confirmations: Confirmations, ack: Ack, timeout_s: float) -> None:
    """Acks and waits for the log in any thread but the event loop's (`thread`), where nothing is acked; for
    `double_ack`."""
    if threading.get_ident() == thread:
        raise EventLoopMisuse(
            "double_ack", "of a message would block the event loop: await consumer.double_ack(message)"
        )
    confirmations.wait(ack, timeout_s)


def _dispose(feed: Feed, threads: Threads, ending: Ending) -> None:
    """Closes a consumer that has ended by itself, or was dropped."""
    feed.close()
    threads.submit(ending.close)


def _task() -> int:
    return id(asyncio.current_task())
