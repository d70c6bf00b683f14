"""The user of one simulated AsyncConsumer: an asyncio program whose tasks are cancelled, and whose loop is blocked.

What he receives and how his handlers answer is as in user.py. He iterates, calls `fetch` or `next`, or consumes with
or without a handler. Each of his tasks may be cancelled at any of its waits. Then he makes the call again, in the same
task or in another one; he also limits waits, leaves iterations, and calls from two tasks at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.consumer import Consumer
from marshal_py.client.consuming import AsyncConsumeContext
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.messages.message import Message, claim_of
from marshal_py.errors import ConcurrentUse, ConsumerClosed, MarshalError
from marshal_sim.cluster.calls import DOUBLE_ACKS, HANDLES, HandlerCall, OtherCalls
from marshal_sim.cluster.event_loops import SimulatedEventLoop, VirtualLoop
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.source import SimulatedSource
from marshal_sim.cluster.user import BATCH_MAX, User
from marshal_sim.judge.evidence import Delivery, Drain

AIO_WAYS: Final = ("iterate", "fetch", "next", "consume", "handler")
LIMITED: Final = 0.2  # the share of waits that the user limits
LEFT: Final = 0.03  # of the messages after which he leaves an iteration or a consume
SAME_TASK: Final = 0.5  # of the cancelled calls, the share that the same task makes again
BESIDE: Final = 0.3  # the share of other tasks that flush, or ask for messages: that is what they do instead
FLUSHES: Final = 0.05  # of the messages after which the task that receives also flushes

T = TypeVar("T")
AnyMessage = Message[Any, Any]


class AsyncCalls(OtherCalls):
    """Makes the calls of one AsyncConsumer's user that do not receive: each that waits in a task of its own."""

    _user: AsyncUser

    def _cancel(self) -> None:
        self._user.cancel()

    def ack(self, message: AnyMessage, delivery: Delivery) -> None:
        """Acks a message; in some cases by a call that waits for the log, in a task."""
        if self._environment.rng.random() < DOUBLE_ACKS:
            delivery.ack_was_late()  # until the task runs
            self._user.begin_task(lambda: self._double_ack(message, delivery))
        elif not (message.ack() if delivery.offset % HANDLES else self._user.consumer.complete(message.handle())):
            delivery.ack_was_late()

    async def _double_ack(self, message: AnyMessage, delivery: Delivery) -> None:
        timeout_s = self._timeout_s()

        async def call() -> None:
            if not claim_of(message).sealed:
                delivery.ack_ms = self._environment.now_ms
            await self._user.consumer.double_ack(message, timeout_s)

        await self._confirm_by(call, delivery)

    def _flush(self) -> None:
        beside = not self._queue.at_most_once and self._environment.rng.random() < BESIDE
        self._user.begin_task(self._user.fetch_beside if beside else self.flush)

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
        shared = loop.call(lambda: SimulatedEventLoop(loop, self.process, driver.context, source))
        self._receiver = shared.receiver
        consumer = Consumer[Any, Any](driver.context, driver, {}, self._ending)
        self.consumer: AsyncConsumer[Any, Any] = AsyncConsumer(consumer, shared)
        self.way = AIO_WAYS[int(rng.random() * len(AIO_WAYS))]
        self._messages_max = 1 + int(rng.random() * BATCH_MAX)
        self._one_at_least = rng.random() < 0.5
        self._waiters: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []
        self._handled: AsyncConsumeContext[Any, Any] | None = None  # the newest with a handler
        self._in_handler = False  # of that
        self._others_fetch = 0  # tasks beside the one that receives

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

    def cancel(self) -> None:
        """Cancels one of the tasks."""
        self._loop.cancel_one()

    def go_on(self) -> None:
        """Wakes the receiver and the tasks that wait for what has happened."""
        self._receiver.look()
        waiting, self._waiters = self._waiters, []
        for one in waiting:
            future, condition = one
            if not condition():
                self._waiters.append(one)
            elif not future.done():
                future.set_result(None)

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
                await self._until(lambda: not self._busy() or self.way == "handler")
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
        """Notes deliveries and begins handlers. Between the gate and this no other task runs, but the loop may be
        blocked, and the process stopped."""
        calls, faults = [HandlerCall(one, self._delivery_of(one)) for one in messages], self.environment.network_faults
        if thread_ms := faults.thread_ms() or faults.gate_ms():
            self.held = calls[0]
            self._loop.block(thread_ms)
            self.held = None
            if self.process.dead:
                await self._loop.create_future()  # nothing runs any more
        for call in calls:
            self._begin_handler(call)

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
        if number in self.running:  # else its task was cancelled
            super()._finished(number)

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
