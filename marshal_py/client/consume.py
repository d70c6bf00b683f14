"""`Consumer.consume`: receives messages without an end, through a buffer that is refilled at a threshold (ADR-37).

The messages go to a callback, on a thread of their own, or to a `for` loop. A ConsumeDemand decides when to ask the
consumer's source for how many messages: refill.py counts, and the source answers from what librdkafka has fetched.
A ConsumeContext ends it. Nothing here runs on the thread that sends the heartbeats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Final, Generic, Self

from marshal_py.client.buffers import ENDLESS, Allowance, message_bytes
from marshal_py.client.consumer_driver import ConsumerDriver
from marshal_py.client.context import Context
from marshal_py.client.counters import in_flight
from marshal_py.client.delivery_queue import DeliveryQueue
from marshal_py.client.demand import Demand
from marshal_py.client.ending import LEAVE_TIMEOUT_S, Ending
from marshal_py.client.group_limits import GroupLimits
from marshal_py.client.idle_heartbeat import IdleHeartbeat
from marshal_py.client.intake import Intake
from marshal_py.client.membership import WAIT_SLICE_S
from marshal_py.client.message import Message
from marshal_py.client.refill import Refill
from marshal_py.client.requests import ConsumeRequest, OnError
from marshal_py.client.waits import Change, Steps
from marshal_py.errors import ConsumerClosed, InvalidOption
from marshal_py.protocol.advisory import Advisory
from marshal_py.transport.ports import Chunk
from marshal_py.transport.serialization import K_co, V_co

logger: Final = logging.getLogger("marshal_py")

Handler = Callable[[Message[K_co, V_co]], object]
ACKS_SLICE_S: Final = 0.02  # how often a drain looks whether the last messages are acked


class ConsumeDemand(Demand):
    """Asks for messages up to a limit of pending ones, whenever these have fallen to the threshold."""

    verb = "the iteration of consume"
    looks = False  # a look brings messages without a limit

    def __init__(
        self,
        context: Context,
        intake: Intake,
        queue: DeliveryQueue,
        request: ConsumeRequest,
        limits: GroupLimits,
        watch: IdleHeartbeat,
    ) -> None:
        super().__init__(intake, watch)
        self._context, self._queue, self._limits = context, queue, limits
        self._in_bytes = request.in_bytes
        self._refill = Refill(request.limit, request.threshold, round(request.expires_s * 1000))
        self._largest_bytes = 0  # the largest message so far: so many of it as fit are taken at once
        self.stopped = False
        self.drain_until: float | None = None  # monotonic; None while it does not drain

    def pending(self) -> tuple[int, int]:
        """Returns how many messages and bytes were asked for and not delivered. Takes the lock.

        Bytes are counted if they are what is limited, else they are 0. Then messages that have not come are unknown.
        """
        messages, size_bytes = self._buffered()
        if self._in_bytes:
            return messages, self._refill.pending(size_bytes)
        return self._refill.pending(messages), 0

    def _buffered(self) -> tuple[int, int]:
        with self._context.lock:
            return self._queue.to_deliver(self._in_bytes)

    # --- for Consumer

    def over(self) -> bool:
        return self.stopped or (self.drain_until is not None and time.monotonic() >= self.drain_until)

    def ends(self, shut: bool) -> bool:
        if self.drain_until is None or shut:
            return False
        return not (self._queue.at_most_once and self._buffered()[0])  # their grants will come

    def refill(self) -> Steps[None]:
        if self.drain_until is None:
            self._refill.request(self._buffered()[self._in_bytes], self._context.clock.now().mono_ms, self._allowed)
            if wanted := self._piece():
                self._came((yield from self.intake.pull(0.0, wanted, wanted)))

    def allows(self) -> Allowance:
        if self.drain_until is not None:
            return ENDLESS
        units = self._refill.before_threshold(self._buffered()[self._in_bytes])
        return Allowance(size_bytes=units) if self._in_bytes else Allowance(units)

    def wait(self, timeout_s: float) -> Steps[None]:
        wanted = 0 if self.drain_until is not None else self._piece()
        self._watched(self._came((yield from self.intake.pull(timeout_s, wanted, wanted))))

    def _allowed(self, asked: int) -> int:
        return self._limits.most(asked, self._in_bytes)

    # --- what comes

    def _piece(self) -> int:
        """Returns how many messages to take from the source at once: 0 if none may come.

        Where bytes are limited, a message that may be too large waits, unless nothing else is buffered.
        """
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


class ConsumeContext(Generic[K_co, V_co]):
    """Receives messages for `Consumer.consume` until it is stopped or drained, or the consumer ends.

    Without a handler, iterate over it; leaving the loop pauses it, and another loop continues. It is a context manager:
    leaving it stops it. The consumer itself goes on, and keeps its claims, until it is stopped.
    """

    def __init__(
        self,
        context: Context,
        driver: ConsumerDriver,
        ending: Ending,
        queue: DeliveryQueue,
        demand: ConsumeDemand,
        runs: Callable[[Demand], Iterator[Iterator[Message[K_co, V_co]]]],
        flush: Callable[[], None],
        handler: Handler[K_co, V_co] | None,
        on_error: OnError,
    ) -> None:
        """Prepares a context; `start` begins it.

        `runs(demand)` yields iterators over messages, one after the other. `flush()` waits until the log has accepted
        the positions.
        """
        self._context, self._driver, self._ending, self._queue = context, driver, ending, queue
        self._demand, self._runs, self._flush, self._handler = demand, runs, flush, handler
        self._on_error = on_error
        self._reader: int | None = None  # the thread that receives; None between two loops
        self._dropped = False  # the buffer, by `stop`
        self._drained = False
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread of the handler, if there is a handler."""
        if self._handler is not None:
            self._thread = threading.Thread(target=self._handle, name="marshal-consume", daemon=True)
            self._thread.start()

    # --- looking

    def __repr__(self) -> str:
        state = "closed" if self.closed else "draining" if self._demand.drain_until is not None else "open"
        return f"ConsumeContext({self._driver.member.name!r}, {state})"

    @property
    def closed(self) -> bool:
        """Tells whether it has ended, so that no more messages come from it."""
        return self._over.is_set() or self._ending.over

    @property
    def error(self) -> BaseException | None:
        """Returns what ended it: what the handler raised, or the error that ended the consumer; None otherwise."""
        return self._error

    def pending(self) -> tuple[int, int]:
        """Returns how many messages and bytes are pending, as `ConsumerInfo` says."""
        return (0, 0) if self.closed else self._demand.pending()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s` seconds (None: any time). Returns whether it has.

        Raises what ended it, if that was an error.
        """
        self._context.check_call("ConsumeContext", "wait", waits=True)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._over.wait(WAIT_SLICE_S if deadline is None else min(WAIT_SLICE_S, deadline - time.monotonic())):
            if self.closed and self._thread is None and self._reader is None:
                return True  # the consumer has ended, and no loop is there to notice
            if deadline is not None and time.monotonic() >= deadline:
                return False
        if self._error is not None:
            raise self._error
        return True

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
        if self._thread is not None:
            self.join(timeout_s)
            return
        with self._context.lock:
            if self._reader == threading.get_ident():
                self._drop()
            elif self._reader is None:
                self._end(None)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Asks for no more, delivers what is buffered, and waits until it is acked and the log has the positions.

        With a handler the call waits for that. Inside the handler, and without a handler, it returns at once, and the
        loop ends when it has received what is buffered. After `timeout_s` seconds (default: the handler timeout) what
        is still buffered is dropped, and the consume ends; what is not acked then stays with its handlers.

        Returns whether everything is delivered and acked, and the log has the positions: False if the time was over, if
        `stop` or an error ended it before, and where the call returns at once. A later call returns the outcome.
        """
        self._context.check_call("ConsumeContext", "drain", waits=True)
        if timeout_s is None:
            timeout_s = self._driver.options.handler_timeout_s
        if self._demand.drain_until is None:
            self._demand.drain_until = time.monotonic() + timeout_s
        self.join(timeout_s + LEAVE_TIMEOUT_S)
        return self._drained

    def join(self, timeout_s: float) -> None:
        """Waits for the handler's thread to end. Does nothing on this thread, and without a handler."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # --- receiving

    def __iter__(self) -> Iterator[Message[K_co, V_co]]:
        """Delivers messages one by one, checking the lease before each. Raises the same as `Consumer.fetch`."""
        if self._handler is not None:
            raise InvalidOption("handler", self._handler, "with a handler the messages go to it: do not iterate")
        return chain.from_iterable(self._receive())

    def _receive(self) -> Iterator[Iterator[Message[K_co, V_co]]]:
        with self._context.lock:
            if self._over.is_set():
                return
            self._reader = threading.get_ident()
        try:
            yield from self._runs(self._demand)
            if self._demand.drain_until is not None and not self._demand.over():
                if self._context.complete(self._acked()):
                    self._flush()
                    self._drained = True
        except ConsumerClosed:  # stopped or drained meanwhile, or another call has raised why the consumer has ended
            self._end(self._driver.error)
            if self._driver.error is not None:
                raise self._driver.error from None
        except Exception as error:
            self._end(error)
            raise
        else:
            self._end(None)
        finally:
            self._reader = None
            if self._demand.over():  # stopped inside the loop, which was left then
                self._end(None)

    def _acked(self) -> Steps[bool]:
        """Waits until all messages are acked, or the drain must end. Returns whether all are acked."""
        while not self._demand.over() and not self._ending.over:
            with self._context.lock:
                if not sum(map(in_flight, self._driver.member.claims.values())):
                    return True
                seen = self._context.changes
            yield Change(ACKS_SLICE_S, seen)
        return False

    def _drop(self) -> None:
        """Drops what is buffered. Called on the thread that receives, or while none does."""
        if not self._dropped:
            self._dropped = True
            with self._context.lock:
                self._queue.fetch_again()

    def _end(self, error: BaseException | None) -> None:
        if self._over.is_set():
            return
        if self._demand.over() and not self._ending.over:
            self._drop()
        self._error = self._error or error
        self._over.set()

    # --- with a handler, on its thread

    def _handle(self) -> None:
        handle, demand = self._handler, self._demand
        assert handle is not None
        try:
            for message in chain.from_iterable(self._receive()):
                try:
                    handle(message)
                except BaseException as error:  # sys.exit() too: it would end this thread and nobody would know
                    self._failed(message, error)
                if demand.stopped:
                    self._drop()
        except Exception:
            logger.exception("a consume has ended")
        finally:
            self._end(None)

    def _failed(self, message: Message[Any, Any], error: BaseException) -> None:
        """Reports `error`, which the handler raised. Gives the message back, and may end the consume with the error."""
        logger.error("a handler failed", exc_info=error)
        member = self._driver.member
        with self._context.outbox, self._context.lock:
            self._driver.publish(
                Advisory(
                    "handler_failed",
                    member.name,
                    member.options.client_id,
                    message.topic,
                    message.partition,
                    message.token.epoch,
                    message.offset,
                    text=repr(error),
                    session=member.session,
                    log=self._driver.log,
                )
            )
        if self._on_error == "nak" and isinstance(error, Exception):
            message.nak()
            return
        if not self._queue.at_most_once:
            message.nak(0)  # the next call for messages delivers it, here or elsewhere
        self._error = error
        self._demand.stopped = True
