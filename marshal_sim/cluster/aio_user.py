"""The user of one simulated AsyncConsumer: an asyncio program whose tasks are cancelled, and whose loop is blocked.

What he receives and how his handlers answer is as in user.py. He iterates, calls `fetch` or `next`, consumes with or
without a handler, or calls `process`. Each of his tasks, and of the library's, may be cancelled at any of its waits.
Then he makes the call again, in the same task or in another one; he also limits waits, leaves iterations, and calls
from two tasks at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.connection import Change, Steps
from marshal_py.client.consumer import Consumer
from marshal_py.client.consuming import AsyncConsumeContext
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import LEAVE_TIMEOUT_S, WAIT_SLICE_S
from marshal_py.client.messages.message import Message, claim_of
from marshal_py.client.process.process import AsyncProcess
from marshal_py.client.process.processing import Retry
from marshal_py.client.receiving import seek
from marshal_py.client.values.requests import AnyPartition, check_partition
from marshal_py.errors import ConcurrentUse, ConsumerClosed, MarshalError
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_sim.cluster.calls import DOUBLE_ACKS, HANDLES, HandlerCall, OtherCalls, Together
from marshal_sim.cluster.event_loops import SimulatedEventLoop, VirtualLoop
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.handling import Answer, Journal, draw_answers, draw_asked
from marshal_sim.cluster.source import SimulatedSource
from marshal_sim.cluster.user import BATCH_MAX, PROCESSES, User
from marshal_sim.judge.evidence import Delivery, Drain

AIO_WAYS: Final = ("iterate", "fetch", "next", "consume", "handler")
LIMITED: Final = 0.2  # the share of waits that the user limits
LEFT: Final = 0.03  # of the messages after which he leaves an iteration or a consume
SAME_TASK: Final = 0.5  # of the cancelled calls, the share that the same task makes again
BESIDE: Final = 0.3  # the share of other tasks that flush, or ask for messages: that is what they do instead
AGAIN: Final = Retry(jitter=0.0)  # after a handler took too long
LOOKS: Final = 0.3  # the share of those that ask for the state of the consumer
FLUSHES: Final = 0.05  # of the messages after which the task that receives also flushes

T = TypeVar("T")
AnyMessage = Message[Any, Any]


class HandlerFailed(Exception):
    """Ends a `process`."""


class SteppedConsumer(Consumer[Any, Any]):
    """Is a Consumer whose `seek` returns its steps, so that it waits in virtual time."""

    _seeks = False  # in some thread

    def seek(self, partition: AnyPartition, offset: int, timeout_s: float = LEAVE_TIMEOUT_S) -> Any:
        self._check_open("seek", waits=True)
        return self._seek_alone(check_partition(partition), offset, timeout_s)

    def _seek_alone(self, tp: TopicPartition, offset: int, timeout_s: float) -> Steps[None]:
        while self._seeks:
            yield Change(WAIT_SLICE_S, self._context.changes)
        self._seeks = True
        try:
            yield from seek(self._driver, self._ending, tp, offset, self._context.monotonic() + timeout_s)
        finally:
            self._seeks = False


class AsyncCalls(OtherCalls):
    """Makes the calls of one AsyncConsumer's user that do not receive: each that waits in a task of its own."""

    _user: AsyncUser

    def _cancel(self) -> None:
        self._user.cancel()

    def ack(self, message: AnyMessage, delivery: Delivery) -> None:
        """Acks a message; in some cases by a call that waits for the log, in a task."""
        if self._environment.rng.random() < DOUBLE_ACKS:
            delivery.end_ms = delivery.ack_ms = -1  # until the task runs
            self._user.begin_task(lambda: self._double_ack(message, delivery))
        elif not (message.ack() if delivery.offset % HANDLES else self._user.consumer.complete(message.handle())):
            delivery.ack_was_late()

    async def _double_ack(self, message: AnyMessage, delivery: Delivery) -> None:
        timeout_s = self._timeout_s()

        async def call() -> None:
            if delivery.end_ms < 0:
                delivery.finish(self._environment.now_ms)
                if claim_of(message).sealed:
                    delivery.ack_was_late()
            await self._user.consumer.double_ack(message, timeout_s)

        await self._confirm_by(call, delivery)

    def _seek_to(self, tp: TopicPartition, position: int, timeout_s: float) -> None:
        self._user.begin_task(lambda: self._seek_by(tp, position, timeout_s))

    async def _seek_by(self, tp: TopicPartition, position: int, timeout_s: float) -> None:
        error = None
        try:
            await self._user.again(lambda: self._user.consumer.seek(tp, position, timeout_s))
        except MarshalError as failed:
            error = failed
        self._sought(tp, position, error)

    async def _look(self) -> None:
        """Asks for the state of the consumer."""
        timeout_s = self._timeout_s()
        with suppress(MarshalError):
            await self._user.again(lambda: self._user.consumer.info(timeout_s))

    def _flush(self) -> None:
        fetches = not self._queue.at_most_once and self._user.way != "process"
        beside = fetches and self._environment.rng.random() < BESIDE
        looks = self._environment.rng.random() < LOOKS
        self._user.begin_task(self._user.fetch_beside if beside else self._look if looks else self.flush)

    async def flush(self) -> None:
        """Flushes, or tries to while another task is in a call."""
        timeout_s = self._timeout_s()
        await self._confirm_by(lambda: self._user.consumer.flush(timeout_s), None)

    async def _confirm_by(self, call: Callable[[], Awaitable[object]], of: Delivery | None) -> None:
        since_ms, error = self._environment.now_ms, None
        try:
            await self._user.again(call)
        except (ConcurrentUse, ConsumerClosed):
            return
        except MarshalError as failed:
            error = failed
        self._confirmed(since_ms, error, of)


class AsyncUser(User):
    """Receives from one AsyncConsumer, until that ends."""

    def _other_calls(self, driver: ConsumerDriver) -> OtherCalls:
        return AsyncCalls(self, driver, self._ending)

    def _choose(self, driver: ConsumerDriver) -> None:
        source, rng = driver.source, self.environment.rng
        assert isinstance(source, SimulatedSource)
        loop = self._loop = VirtualLoop(self.environment, self.process, driver.context)
        shared = loop.call(lambda: SimulatedEventLoop(loop, self.process, driver.context, source, self.front))
        self._receiver = shared.receiver
        consumer = SteppedConsumer(driver.context, driver, {}, self._ending)
        self.consumer: AsyncConsumer[Any, Any] = AsyncConsumer(consumer, shared)
        self.way = AIO_WAYS[int(rng.random() * len(AIO_WAYS))]
        self._messages_max = 1 + int(rng.random() * BATCH_MAX)
        self._one_at_least = rng.random() < 0.5
        returned = self._receiving.queue.user_returned

        def told() -> None:
            returned()
            self._told()

        self._receiving.queue.user_returned = told  # type: ignore[method-assign]
        self._waiters: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []
        self._handled: AsyncConsumeContext[Any, Any] | None = None  # the newest with a handler
        self._in_handler = False  # of that
        self._others_fetch = 0  # tasks beside the one that receives
        self._process_now: AsyncProcess[Any, Any] | None = None  # the newest
        # By the first message of each handler that has ended, and whose answer is not carried out yet.
        self._ends: dict[int, tuple[list[HandlerCall], list[Answer], list[bool], int]] = {}
        if self.environment.lanes and not self._at_most_once and rng.random() < PROCESSES:
            self.way = "process"
            self._asked = draw_asked(self.environment, self.process.number)
            timeout_s = spread(rng, self._options.interval_ms, 4 * self._options.interval_ms) / 1000
            self._asked |= {"timeout_s": timeout_s if rng.random() < LIMITED else None}

    def end_tasks(self) -> None:
        self._loop.end()

    # --- tasks

    def begin(self) -> None:
        """Begins to receive."""
        if not self._began:
            self._began = True
            self.begin_task(self._receive_always)
            if self._others is not None:
                self._others.begin(self.running)

    def begin_task(self, code: Callable[[], Awaitable[None]]) -> None:
        """Runs `code` in a task, in another one if that is cancelled before it runs. What it raises ends the run."""
        started: list[None] = []

        async def run() -> None:
            started.append(None)
            await code()

        def again(_: asyncio.Task[None]) -> None:
            if not started and not self._loop.ending:
                self.begin_task(code)

        self._loop.create_task(run()).add_done_callback(again)

    async def again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call, and once more when it was cancelled, until it ends by itself."""
        while True:
            try:
                return await call()
            except asyncio.CancelledError:
                self._go_on_if_run()

    def _go_on_if_run(self) -> None:
        """Lets a cancelled task continue, unless the run is over."""
        if self._loop.ending:
            raise
        task = asyncio.current_task()
        assert task is not None
        while task.cancelling():
            task.uncancel()

    def _ask_again(self) -> None:
        """Notes that a task is in a call. The library learns that later, when other tasks have had their turn."""
        if self.way != "fetch" or self._one_at_least:
            self._asks()

    def cancel(self) -> None:
        """Cancels one of the tasks."""
        self._loop.cancel_one()

    def go_on(self) -> None:
        """Wakes the receiver and the tasks that wait for what has happened."""
        self._receiver.look()
        waiting, self._waiters = self._waiters, []
        for one in waiting:
            future, condition = one
            if future.done():  # its task was cancelled
                continue
            if condition():
                future.set_result(None)
            else:
                self._waiters.append(one)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            future = self._loop.create_future()
            self._waiters.append((future, condition))
            await future

    # --- receiving

    async def _receive_always(self) -> None:
        """Receives until the consumer ends. A task that is cancelled goes on, or is followed by another one."""
        while not self._over_or_leaving():
            try:
                await self._until(lambda: not self._busy() or self.way in ("handler", "process"))
                await self._receive_some()
            except TimeoutError:
                self._returns()
            except ConcurrentUse:
                self._returns()
                if not self._others_fetch:
                    raise
                await self.again(lambda: self._until(lambda: not self._others_fetch))
            except ConsumerClosed as error:
                self._returns()
                if not self._ending.stopping:
                    raise error
            except MarshalError as error:
                self._end(error)
            except asyncio.CancelledError:
                self._returns()
                self._go_on_if_run()
                if self.environment.rng.random() >= SAME_TASK:
                    self.begin_task(self._receive_always)
                    return
        self._returns()
        self.over = True
        if self._ending.draining and not self._ending.done:
            await self.again(lambda: self.consumer.drain(self._ending.drain_left_s()))

    def _over_or_leaving(self) -> bool:
        ending = self._ending
        return self.over or ending.over or ending.draining or ending.must_stop()

    async def _receive_some(self) -> None:
        """Makes one call, or one iteration until it ends or is left."""
        consumer, wait_s = self.consumer, self._options.interval_ms / 1000
        if self.way == "fetch":
            least = 1 if self._one_at_least else self._messages_max
            self._ask_again()
            batch = await self._limited(
                consumer.fetch(max_messages=self._messages_max, expires_s=wait_s, min_messages=least)
            )
            self._returns()
            await self._take_all([*batch])
        elif self.way == "next":
            self._ask_again()
            message = await self._limited(consumer.next(expires_s=wait_s))
            self._returns()
            if message is not None:
                await self._take_all([message])
        elif self.way == "iterate":
            await self._iterate(consumer)
        elif self.way == "consume":
            async with consumer.consume(max_messages=self._messages_max) as received:
                await self._iterate(received)
        elif self.way == "process":
            await self._process_some()
        else:
            if not self._in_handler:
                self._ask_again()
            if self._handled is None or self._handled.closed:
                self._handled = consumer.consume(self._handle, max_messages=self._messages_max)
            if await self._handled.wait(wait_s) or self.environment.rng.random() >= LEFT:
                return
            await self._handled.stop()

    async def _iterate(self, received: Any) -> None:
        messages = aiter(received)
        while True:
            self._ask_again()
            try:
                message = await self._limited(anext(messages))
            except StopAsyncIteration:
                return
            finally:
                self._returns()
            await self._take_all([message])
            if self.environment.rng.random() < LEFT:
                return

    async def _limited(self, call: Awaitable[T]) -> T:
        """Waits for a call; some for a limited time."""
        rng = self.environment.rng
        if rng.random() >= LIMITED or self.environment.healed:
            return await call
        async with asyncio.timeout(spread(rng, 1, 2 * self._options.interval_ms) / 1000):
            return await call

    async def _take_all(self, messages: list[AnyMessage]) -> None:
        """Begins the handlers of messages, then waits until one more may run."""
        if messages:
            await self._deliver(messages)
            if self.environment.rng.random() < FLUSHES and isinstance(self._others, AsyncCalls):
                await self._others.flush()
            await self._until(lambda: not self._busy())

    async def _deliver(self, messages: list[AnyMessage]) -> None:
        await self._hand_over([HandlerCall(one, self._delivery_of(one)) for one in messages])

    async def _hand_over(self, calls: list[HandlerCall]) -> None:
        """Notes deliveries and begins handlers. Between the gate and this no other task runs, but the loop may be
        blocked, and the process stopped."""
        faults = self.environment.network_faults
        if thread_ms := faults.thread_ms() or faults.gate_ms():
            self.held = calls[0]
            self._loop.block(thread_ms)
            self.held = None
            if self.process.dead:
                await self._loop.create_future()  # nothing runs any more
        self._begin_handlers(calls)

    async def _handle(self, message: AnyMessage) -> None:
        """Handles a message for `consume`, one after the other."""
        self._returns()
        self._in_handler = True
        await self._deliver([message])
        number, epoch = self._number, claim_of(message).epoch
        try:
            await self._until(lambda: number not in self.running or epoch not in self._member.claims)
        except asyncio.CancelledError:
            call = self.running.pop(number, None)
            if call is not None and self._at_most_once:
                call.delivery.end_ms = self.environment.now_ms
            elif call is not None:
                call.delivery.give_back(self.environment.now_ms, 0)
            raise
        else:
            self._ask_again()
        finally:
            self._in_handler = False

    def _finished(self, number: int) -> None:
        call = self.running.get(number)  # None: its task was cancelled
        if call is not None and call.together is not None:
            self.environment.events += 1
            call.together.left -= 1  # its task waits for this
            self.go_on()
            self.process.ran()
        elif call is not None:
            super()._finished(number)

    # --- by `process`

    async def _process_some(self) -> None:
        """Runs a `process` until it ends, or he ends it. Only then, and when its handlers have returned, he begins
        another one, as their messages are out of order else."""
        environment, rng, interval_ms = self.environment, self.environment.rng, self._options.interval_ms
        if self._process_now is not None:
            await self._process_now.stop()  # also where the task that looks was cancelled
            while not self._process_now.closed:
                await self._process_now.stop()
        claims = self._member.claims
        await self._until(lambda: not any(one.delivery.epoch in claims for one in self.running.values()))
        process = self._process_now = self.consumer.process(self._work_on, retry=AGAIN, retry_on=OSError, **self._asked)
        processing = self._receiving.queue.window.process
        Journal(environment, self.process.number, self._member, processing)
        self._note_answers(processing)
        with suppress(HandlerFailed):
            async with process:
                while not await process.wait(interval_ms / 1000):
                    if not environment.healed and rng.random() < LEFT:
                        if rng.random() < LIMITED:
                            await process.drain(spread(rng, 1, 2 * interval_ms) / 1000)
                        break

    def _note_answers(self, processing: Any) -> None:
        """Has a `process` tell when it has carried out the answer of a handler."""

        def noted(answer: Callable[..., None]) -> Callable[..., None]:
            def note(given: Any, *arguments: Any, **named: Any) -> None:
                answer(given, *arguments, **named)
                ended = self._ends.pop(id(given[0] if isinstance(given, list) else given), None)
                if ended is not None:
                    self._settled(*ended)

            return note

        processing.settle_given = noted(processing.settle_given)
        processing.give_back_given = noted(processing.give_back_given)

    async def _work_on(self, given: Any) -> Any:
        """Handles a message, or a list of them."""
        messages = given if isinstance(given, list) else [given]
        together = Together()
        calls = together.calls = [HandlerCall(one, self._delivery_of(one), None, together) for one in messages]
        together.left = len(calls)
        claims, answers = self._member.claims, [Answer(fails=True)] * len(calls)
        try:
            await self._hand_over(calls)
            await self._until(lambda: not (together.left and any(one.delivery.epoch in claims for one in calls)))
            answers = draw_answers(self.environment, self._options.interval_ms, len(calls), lists=given is messages)
        finally:
            for number in [number for number, one in self.running.items() if one.together is together]:
                del self.running[number]
            late = [claim_of(one).sealed for one in messages]
            self._answering |= {(one.delivery.epoch, one.delivery.offset): one for one in calls}
            self._ends[id(messages[0])] = calls, answers, late, self.environment.now_ms
        if answers[0].fails:
            raise HandlerFailed
        if given is messages:
            return [one.error for one in answers]
        if answers[0].error is not None:
            raise answers[0].error
        return None

    # --- its end

    def drain(self, wait_s: float) -> None:
        """Drains the consumer in a task."""
        self.begin_task(lambda: self._drain(wait_s))

    async def _drain(self, wait_s: float) -> None:
        now_ms, number = self.environment.now_ms, self.process.number
        until_ms = self._ends_drains(now_ms + 1_000 * wait_s)
        self.environment.evidence.drains.append(Drain(self._member.name, number, now_ms, until_ms))
        await self.again(lambda: self.consumer.drain(wait_s))

    def stop(self, timeout_s: float) -> None:
        """Stops the consumer in a task."""
        self.begin_task(lambda: self._stop(timeout_s))

    async def _stop(self, timeout_s: float) -> None:
        self._ends_drains(self.environment.now_ms)
        await self.again(lambda: self.consumer.stop(timeout_s))

    # --- from another task

    async def fetch_beside(self) -> None:
        """Asks for messages beside the task that receives: one of the two gets some, the other an error."""
        self._others_fetch += 1
        try:
            batch = await self.consumer.fetch(max_messages=1, expires_s=self._options.interval_ms / 1000)
            await self._deliver([*batch])
        except (MarshalError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                self._go_on_if_run()
            elif not isinstance(error, ConcurrentUse) and not self._ending.stopping:
                raise
        finally:
            self._others_fetch -= 1
            self.go_on()
