"""The Consumer: one member of a group, whose user fetches messages. It waits and delivers; the Member decides.

delivery_queue.py says what a gate and a grant are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

from marshal_py.client import receiving
from marshal_py.client.connection import Context, Poll, PollAhead, Wait, complete, following
from marshal_py.client.consuming import AWAIT_IT, ConsumeContext, Consuming, Handler, Take
from marshal_py.client.delivery.buffers import Reserved
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import HEALTHY_SILENCE_S, LEAVE_TIMEOUT_S, Call, Ending, Membership
from marshal_py.client.messages.message import Batch, Handles, Message
from marshal_py.client.process.process import Process
from marshal_py.client.process.processing import (
    WINDOW,
    WORKERS,
    AfterDeadLetter,
    Batches,
    BatchHandler,
    Executor,
    Order,
    Outcomes,
    Processing,
    ProcessKeywords,
    Retry,
    Unkeyed,
    check_executor,
    check_handler,
    check_settings,
)
from marshal_py.client.process.worker_processes import PlainMessage, work_of
from marshal_py.client.receiving import ConsumeDemand, Demand, Receiving
from marshal_py.client.values import requests
from marshal_py.client.values.requests import CONSUME_EXPIRES_S, FETCH_EXPIRES_S, AnyPartition, OnError, Request
from marshal_py.errors import ConcurrentUse, InvalidOption, MarshalError
from marshal_py.protocol.wire.identity import NONE
from marshal_py.transport.serialization import K_co, V_co, check_plain

C = TypeVar("C", bound=Consuming[Any, Any])


class Consumer(Membership, Generic[K_co, V_co]):
    """Fetches messages as one member of a group. It is a context manager: leaving it stops it and releases its claims.

    `fetch`, `next` and iteration are for one thread at a time; acks may come from any thread.

    In at-least-once mode messages that were not acked are delivered again after a crash. An acked message above an
    unacked one is not delivered again if a heartbeat has reported its ack (within 4,000 offsets, PROTOCOL.md E10). In
    at-most-once mode the log grants messages before they are delivered, about a second's work at a time. A crash loses
    messages that were granted and not delivered. A stop, a pause or a planned move gives them back, and the next owner
    begins with them.
    """

    def __init__(self, context: Context, driver: ConsumerDriver, connection: Mapping[str, Any], ending: Ending) -> None:
        super().__init__(context, driver, connection, ending)
        assert isinstance(driver.queue, DeliveryQueue)
        self._queue = driver.queue
        self._receiving = Receiving(context, driver, ending)
        driver.queue.delivery.confirm = self._confirmations.wait
        self._handles = Handles(driver.member.name)
        self._seeking = threading.RLock()  # held by `seek` alone
        driver.queue.delivery.handle_of = self._handles.make
        self._consuming: Consuming[K_co, V_co] | None = None

    def drain(self, timeout_s: float | None = None) -> None:
        """Fetches no more, lets a running iteration deliver what is buffered, releases the claims and leaves the group.

        At most 1,000 more are delivered, of a `consume` no more than its own limit; the next owners begin
        after the last delivered message. While an iteration runs, `drain` returns at once, and the iteration ends when
        these messages are delivered. Otherwise, and with a handler of `consume`, the call waits for the acks of
        delivered messages, at most `timeout_s` seconds (default: the handler timeout). Raises InvalidOption,
        ReentrantCall.
        """
        self._context.check_call("Consumer", "drain", waits=True)
        timeout_s = requests.check_wait(timeout_s)
        with self._context.lock:
            self._queue.drain()
        self._begin_drain(timeout_s)
        running, left_s = self._consuming, self._ending.drain_left_s()
        if not self._iterating or (isinstance(running, ConsumeContext) and not running.finish(left_s)):
            self._finish_drain()

    def _begin_drain(self, timeout_s: float | None) -> None:
        super()._begin_drain(timeout_s)
        if self._consuming is not None and not self._consuming.closed:
            self._consuming.begin_drain(self._ending.drain_left_s())  # its limit bounds what is still delivered

    # --- fetching

    def _enter(self, call: Call) -> None:
        consuming = self._consuming
        if consuming is not None and not consuming.closed and call.verb not in (ConsumeDemand.verb, "flush"):
            raise ConcurrentUse(call.verb, busy=ConcurrentUse.CONSUMES)
        super()._enter(call)

    def fetch(
        self,
        max_messages: int | None = None,
        *,
        max_bytes: int | None = None,
        expires_s: float = FETCH_EXPIRES_S,
        min_messages: int = 1,
        idle_heartbeat_s: float | None = None,
    ) -> Batch[K_co, V_co]:
        """Waits for a message, and returns all that are there: at most `max_messages`, an even share of each partition.

        It does not wait for the full count, as the first message of a slow topic would wait for the last one; iterate
        over what it returns to receive messages as they arrive. With `min_messages` it waits for so many, or for
        `max_bytes`, at most `expires_s` seconds (0: it takes what is there now; infinity: it never expires). Then the
        result may be empty. It returns sooner when a bound keeps more messages from coming: `max_acks_pending`,
        `prefetch_bytes`, or in at-most-once mode the grants (two per partition, about a second's work in all). The
        lease is checked once, when the batch is delivered.

        The default of `max_messages` is 1,000, or any number if `max_bytes` is given; with both, the limit that is
        reached first counts. `max_bytes` bounds the sum of keys, values, headers and topics, but one message always
        fits.

        `idle_heartbeat_s` (0.5 to 30, at most half of `expires_s`): how often to ask the cluster for a sign of life
        while no message comes. When two in a row are missing, the event `heartbeat_missed` comes, and the wait
        continues. By default half of `expires_s`, at most 30, if `expires_s` is above 30; else nobody asks.

        Raises ConsumerClosed, also after a signal (`stop_on_signals`); ConcurrentUse, ReentrantCall, InvalidOption, and
        the error that ended the consumer.
        """
        request = requests.check_fetch(max_messages, max_bytes, expires_s, min_messages, idle_heartbeat_s)
        return self._call(Call("fetch"), request)

    def _call(self, call: Call, request: Request) -> Batch[K_co, V_co]:
        begun = False  # before that, a signal would take back what the fetch before this one gave to the user
        try:
            self._enter(call)
            self._queue.begin()
            begun = True
            return complete(self._receiving.fetch(request), self._carry_out)
        except BaseException as error:
            if begun and self._inside is call and not isinstance(error, MarshalError):
                with self._context.lock:
                    self._queue.take_back()
            raise
        finally:  # no function is called before it is done, so no signal can come between
            if self._inside is call:
                self._inside = None
                self._user = self._user if self._iterating else None

    def _carry_out(self, wait: Wait) -> Any:
        if isinstance(wait, Poll):
            return self._queue.pull(wait.timeout_s, wait.max_messages)
        if isinstance(wait, PollAhead):
            return self._queue.pull(0.0, wait.max_messages)
        return self._context.carry_out(wait)

    def next(
        self, expires_s: float = FETCH_EXPIRES_S, *, idle_heartbeat_s: float | None = None
    ) -> Message[K_co, V_co] | None:
        """Returns the next message, or None after `expires_s` seconds without one. It is a `fetch` of one message.

        `idle_heartbeat_s` and the errors are those of `fetch`.
        """
        return self._first(requests.check_fetch(1, None, expires_s, 1, idle_heartbeat_s))

    def _first(self, request: Request) -> Message[K_co, V_co] | None:
        return next(iter(self._call(Call("next"), request)), None)

    def __iter__(self) -> Iterator[Message[K_co, V_co]]:
        """Delivers messages one by one, checking the lease before each, until a stop, a drain or a signal.

        Leaving the user's loop does not stop the consumer. Raises the same as `fetch`.
        """
        # Chained in C: a generator that delegates to others would be entered once more per message.
        return chain.from_iterable(self._runs(self._receiving.demand()))

    def consume(
        self,
        handler: Handler[K_co, V_co] | None = None,
        *,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        expires_s: float = CONSUME_EXPIRES_S,
        idle_heartbeat_s: float | None = None,
        threshold_messages: int | None = None,
        threshold_bytes: int | None = None,
        on_error: OnError | None = None,
    ) -> ConsumeContext[K_co, V_co]:
        """Receives messages without an end, through a buffer that is refilled while they are handled.

        With a `handler`, a plain function, a thread calls `handler(message)` for each message, one after the other; the
        handler acks. Without one, iterate over the returned context. The lease is checked before each message.

        At most `max_messages` (default 1,000) or `max_bytes` are pending, that is, asked for and not delivered; not
        both can be given. Messages of a partition that waits for acks (`max_acks_pending`) do not count. When they have
        fallen to `threshold_messages` or `threshold_bytes` (default: half of the limit, rounded up), what is missing is
        asked for. What has not come after `expires_s` seconds (at least 1) is asked for again. `idle_heartbeat_s` is
        that of `fetch`; the default is half of `expires_s`, at most 30. A message that is larger than `max_bytes` comes
        alone.

        `on_error`: what happens, beside the event `handler_failed`, when the handler raises an Exception. With "nak",
        the default in at-least-once mode, the message is delivered again later, as after `Message.nak()`, and the
        others continue. With "stop", the default in at-most-once mode, the consume ends with that error. It always ends
        with another BaseException, such as SystemExit. In at-least-once mode the message is given back then, and comes
        again as soon as messages are asked for.

        A consumer has one consume at a time, and no `fetch`, `next` or iteration beside it.

        Raises ConcurrentUse, ReentrantCall, ConsumerClosed, InvalidOption, NeedsAtLeastOnce.
        """
        request = requests.check_consume(
            max_messages, max_bytes, expires_s, idle_heartbeat_s, threshold_messages, threshold_bytes
        )
        if handler is not None and not callable(handler):
            raise InvalidOption("handler", handler, "a function of one message, or None to iterate")
        return self._consume(request, handler, on_error)

    def _consume(
        self,
        request: requests.ConsumeRequest,
        handler: Handler[K_co, V_co] | Take[K_co, V_co] | None,
        on_error: OnError | None = None,
        *,
        whole: bool = False,
    ) -> ConsumeContext[K_co, V_co]:
        if handler is not None:
            check_plain("handler", handler, AWAIT_IT)
        context = self._begin_consume(
            "process" if whole else "consume",
            request,
            on_error,
            lambda demand, on_error: ConsumeContext(self, self._queue, demand, self._runs, handler, on_error, whole),
        )
        context.start()
        return context

    @overload
    def process(
        self,
        handler: Handler[K_co, V_co],
        *,
        batch: None = None,
        timeout_s: None = None,
        **options: Unpack[ProcessKeywords[K_co, V_co]],
    ) -> Process[K_co, V_co]: ...
    @overload
    def process(
        self,
        handler: BatchHandler[K_co, V_co],
        *,
        batch: Batches,
        timeout_s: None = None,
        **options: Unpack[ProcessKeywords[K_co, V_co]],
    ) -> Process[K_co, V_co]: ...
    @overload
    def process(
        self,
        handler: Callable[[PlainMessage[K_co, V_co]], object],
        *,
        executor: Literal["processes"],
        batch: None = None,
        timeout_s: float | None = None,
        **options: Unpack[ProcessKeywords[K_co, V_co]],
    ) -> Process[K_co, V_co]: ...
    @overload
    def process(
        self,
        handler: Callable[[list[PlainMessage[K_co, V_co]]], Outcomes],
        *,
        executor: Literal["processes"],
        batch: Batches,
        timeout_s: float | None = None,
        **options: Unpack[ProcessKeywords[K_co, V_co]],
    ) -> Process[K_co, V_co]: ...
    def process(
        self,
        handler: Callable[[Any], Any],
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
        executor: Executor = "threads",
        timeout_s: float | None = None,
    ) -> Process[K_co, V_co]:
        """Handles messages in parallel, without an end: `workers` threads (16) call `handler(message)`.

        A handler that returns has acked its message. One that raises has it tried again, after the delay of `retry`
        (default: `Retry()`); `Retry(after_s=...)` says when, `Reject(reason)` says never. An error that `retry_on` does
        not name ends the process: `wait` raises it, and the message comes again at the next start.

        `order`: with "key" messages of one key of a partition are handled one after the other, in the order of their
        offsets, also when one is tried again, when the partition moves, and after a crash; with "partition" all of a
        partition; with None each on its own. While a message waits to be tried again, those behind it in this order
        wait, and no thread does. `key`: a function that returns what to take as key (default: Kafka's key).
        `unkeyed`: whether messages without a key are handled on their own ("parallel") or as one key ("ordered").
        `after_dead_letter`: with "key" messages behind one that became a dead letter follow it, as long as this
        consumer owns the partition.

        `batch`: with `Batches(100, wait_s=0.1)` the handler takes a list of up to 100 messages. It returns None, which
        acks all, or an outcome for each: None, or an exception that it does not raise. What it raises is a failed
        attempt of each. A message that is tried again comes alone.

        `executor`: with "processes" each of `workers` (as many as the machine has cores) is a process of its own, and
        the handler, at the top level of a module, gets a `PlainMessage`. A process that dies has failed with its
        message. One whose handler takes longer than `timeout_s` is killed.

        From the lowest unfinished message of a partition to its newest there are at most `window` offsets in work, and
        of each partition at most its share of the option `prefetch_bytes` waits.

        A consumer has one process or consume at a time, and no `fetch`, `next` or iteration beside it. Raises
        ConcurrentUse, ReentrantCall, ConsumerClosed, InvalidOption, NeedsAtLeastOnce.
        """
        check_handler(handler)
        check_executor(executor, timeout_s)
        in_processes = executor == "processes"
        if workers is None:
            workers = (os.cpu_count() or 1) if in_processes else WORKERS
        settings = check_settings(
            self._member.name,
            self._queue.options,
            workers,
            order,
            key,
            unkeyed,
            retry,
            retry_on,
            after_dead_letter,
            window,
            batch,
        )
        sent, settings = work_of(handler, settings, timeout_s) if in_processes else (None, settings)
        processing = Processing[K_co, V_co](self._receiving, settings)
        consume = partial(self._consume, requests.check_consume(), whole=True)
        process = Process(self._context, processing, handler, consume, sent)
        process.start()
        return process

    def _begin_consume(
        self,
        verb: str,
        request: requests.ConsumeRequest,
        on_error: OnError | None,
        make: Callable[[ConsumeDemand, OnError], C],
    ) -> C:
        """Returns the consume that `make` makes, which is this consumer's from now on."""
        on_error = requests.check_on_error(on_error, self._queue.at_most_once, self._member.name)
        call = Call(verb)
        try:
            self._enter(call)
            if self._iterating is not None:
                raise ConcurrentUse(verb, self.caller, busy=ConcurrentUse.ITERATES)
            self._consuming = consuming = make(self._receiving.consuming(request), on_error)
            return consuming
        finally:  # as in fetch
            if self._inside is call:
                self._inside = None
                self._user = self._user if self._iterating else None

    def _pending(self) -> tuple[int, int]:
        return (0, 0) if self._consuming is None else self._consuming.pending()

    def _runs(self, demand: Demand) -> Iterator[Iterator[Message[K_co, V_co]]]:
        """Yields one iterator after the other, each over the next messages of one partition."""
        call = Call(demand.verb)
        try:
            self._enter(call)
            if self._iterating is not None:
                raise ConcurrentUse(demand.verb, self.caller, busy=ConcurrentUse.ITERATES)
            self._iterating = call
            yield from self._reservations(call, demand)
        except BaseException as error:
            if self._inside is call and not isinstance(error, MarshalError):
                with self._context.lock:
                    self._queue.fetch_again()
            raise
        finally:  # as in fetch
            if self._inside is call:
                self._inside = None
            if self._iterating is call:
                self._iterating = self._user = None
                if self._ending.draining:
                    self._finish_drain()

    def _reservations(self, call: Call, demand: Demand) -> Iterator[Iterator[Message[K_co, V_co]]]:
        boot_ns = self._context.clock.boot_ns
        steps = self._receiving.iterate(demand)
        step = next(steps, None)
        while step is not None:
            if isinstance(step, Reserved):
                self._inside = None  # between two messages the user is in no call of the consumer
                yield step.messages(boot_ns)
                self._inside = call
                step = next(steps, None)
            else:
                step = following(steps, self._carry_out(step))

    def healthy(self, max_silence_s: float = HEALTHY_SILENCE_S) -> bool:
        """Returns whether this consumer works, for the probe of a container. It sends nothing; any thread may call it.

        False: it has not joined or has ended; the cluster does not answer; it reads no sign of life of its own back, so
        that it may deliver nothing; or the program has not asked for messages for `max_silence_s` seconds, because a
        handler is stuck, or of a `process` no handler has returned for so long while all workers have one, or none of
        its worker processes can start. A standby, a paused group and an empty topic are healthy.
        `cached_info().waiting_for` has the reason, of a silence after 60 s. Raises InvalidOption, ReentrantCall.
        """
        requests.check_timeout(max_silence_s, option="max_silence_s")
        self._context.check_call("Consumer", "healthy")
        with self._context.lock:
            lives = self._member.session != NONE and not self._ending.over
            return lives and not self._lacks(max_silence_s)

    def _program_lacks(self, max_silence_s: float) -> str:
        if self._ending.over:
            return ""
        process = self._queue.window.process
        if process is not None and (why := process.unstarted()):
            return f"its worker processes, none of which can start: {why}"
        if process is not None and (silent_s := process.silent_s()) > max_silence_s:
            return f"its handlers: every worker has one, and none has returned for {silent_s:.0f} s"
        silent_s = (self._context.clock.now().mono_ms - self._queue.asked_ms) / 1000
        if silent_s > max_silence_s:
            return f"its program, which has asked for no message for {silent_s:.0f} s: a handler is stuck, or slow"
        return ""

    # --- answers from elsewhere

    def complete(self, handle: bytes) -> bool:
        """Acks the message whose `Message.handle` this is. Any thread may call it, in the process of this consumer.

        The result is that of `Message.ack`; a second call changes nothing. `message(handle).double_ack()` waits for the
        log. Raises HandleUnknown for a handle that another consumer has made, UsedAfterFork, ReentrantCall.
        """
        self._context.check_call("Consumer", "complete")
        with self._context.lock:
            return self._handles.complete(handle, self._queue.delivery)

    def message(self, handle: bytes) -> Message[K_co, V_co]:
        """Returns the message whose handle this is, to answer by `nak`, `term` or `in_progress`.

        Raises HandleUnknown if another consumer has made the handle, or if the message is done or its claim is over;
        NeedsAtLeastOnce, UsedAfterFork, ReentrantCall.
        """
        self._context.check_call("Consumer", "message")
        with self._context.lock:
            return self._handles.message(handle, self._queue.delivery)

    # --- positions

    def seek(self, partition: AnyPartition, offset: int, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Moves the position of a partition that this consumer owns: the message at `offset` is delivered next.

        The log has accepted the position when the call returns, so that a later owner begins there, too. The claim is a
        new one, with a new token; `on_lost` with the reason "seek" and `on_claim` report that. Acks of messages that
        were delivered before come too late. Any thread may call it, also within an iteration; a second call waits until
        the first is done.

        Raises InvalidOption; NeedsAtLeastOnce in at-most-once mode; PositionOutOfRange; ClaimLost if this consumer does
        not own the partition, or releases it meanwhile because of a pause or a stop; ClusterUnreachable after
        `timeout_s` seconds, ConsumerClosed, ReentrantCall. `Group.set_position` moves partitions that others own.
        """
        self._check_open("seek", waits=True)
        requests.check_timeout(timeout_s)
        with self._seeking:
            deadline = self._context.monotonic() + timeout_s
            tp = requests.check_partition(partition)
            self._context.complete(receiving.seek(self._driver, self._ending, tp, offset, deadline))
