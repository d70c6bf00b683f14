"""`AsyncConsumer.consume`: the consume of consuming.py, for `async for`, or with a handler in a task of its own.

Between a message and the user's code there is no `await`, so a loop that is cancelled while it waits has taken nothing:
another loop continues. A handler that is cancelled, as at the end of the program, has its message given back.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from marshal_py.client.aio.event_loop import EventLoop
from marshal_py.client.connection import Steps
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.messages.message import Message
from marshal_py.client.receive.consuming import Consuming, Handler, Reader, Take, iterator_of, logger
from marshal_py.client.receive.membership import LEAVE_TIMEOUT_S, Membership
from marshal_py.client.receive.receiving import ConsumeDemand
from marshal_py.client.values.requests import OnError
from marshal_py.transport.serialization import K_co, V_co

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

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s` seconds, as `ConsumeContext.wait` does."""
        self._event_loop.check("wait")
        self._context.check_call("ConsumeContext", "wait", waits=True)
        ended: bool = await self._complete(self._until_over(timeout_s))
        return ended

    # --- ending

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it and drops what is buffered, as `ConsumeContext.stop` does. It cancels no handler.

        With a handler the call waits until a running handler has returned, at most `timeout_s` seconds.
        """
        self._event_loop.check("stop")
        self._context.check_call("ConsumeContext", "stop", waits=True)
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
            logger.exception("a consume has ended")
            self._end(error)
        finally:
            self._end(None)


def _is_cancelled(error: BaseException) -> bool:
    """Returns whether this task is to end. Else a CancelledError is of something that the handler has awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
