"""`Consumer.consume`: receives messages without an end, through a buffer that is refilled at a threshold (ADR-37).

The messages go to a callback, on a thread of their own, or to a `for` loop. consuming.py has what asyncio shares.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, Self

from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.messages.message import Message
from marshal_py.client.receive.consuming import AWAIT_IT, Consuming, Handler, Reader, Take, iterator_of, logger
from marshal_py.client.receive.membership import LEAVE_TIMEOUT_S, Membership
from marshal_py.client.receive.receiving import ConsumeDemand, Demand
from marshal_py.client.values.requests import OnError
from marshal_py.errors import InvalidOption
from marshal_py.transport.serialization import K_co, V_co


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it and drops what is buffered; the consumer fetches that again when it is asked for messages.

        With a handler the call waits until a running handler has returned, at most `timeout_s` seconds. Inside the
        handler, or inside the loop, it returns at once, and no message follows. While another thread runs the loop, it
        returns at once too, and the loop ends some milliseconds later or after its present message. A `drain` that runs
        ends without waiting for more acks. A second call does nothing.
        """
        self._context.check_call("ConsumeContext", "stop", waits=True)
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
            logger.exception("a consume has ended")
            self._end(error)
        finally:
            self._end(None)
