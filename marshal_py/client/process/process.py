"""`process` of both consumers: handlers in parallel, on threads or as coroutines; each key in order (processing.py)."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Self

from marshal_py.client.connection import Context
from marshal_py.client.consuming import AsyncConsumeContext, ConsumeContext, Take
from marshal_py.client.event_loop import EventLoop
from marshal_py.client.membership import LEAVE_TIMEOUT_S
from marshal_py.client.messages.message import Message
from marshal_py.client.process.processing import (
    IDLE_S,
    LOOK_S,
    SHUT_S,
    AsyncBatchHandler,
    AsyncHandler,
    Processing,
    Running,
)
from marshal_py.client.process.worker_processes import NOT_BEGUN, Answer, Work, WorkerProcess, answered
from marshal_py.client.values.requests import check_timeout, check_wait
from marshal_py.errors import InvalidOption, ReentrantCall
from marshal_py.transport.serialization import K_co, V_co

START_AGAIN_S: Final = 0.5  # before a worker process is started again which could not begin


class Process(Running[K_co, V_co]):
    """Runs handlers for `Consumer.process` until it is stopped or drained, or the consumer ends.

    It is a context manager: leaving it stops it. The consumer itself goes on, and keeps its claims.
    """

    def __init__(
        self,
        context: Context,
        processing: Processing[K_co, V_co],
        handler: Callable[[Any], object],
        consume: Callable[[Take[K_co, V_co]], ConsumeContext[K_co, V_co]],
        sent: Work | None = None,
    ) -> None:
        """Prepares it; `start` begins. `consume(take)` begins to receive, on a thread that calls `take`.
        `sent`: what each worker process gets; None: the threads call the handler."""
        self._context, self._processing, self._consume = context, processing, consume
        self._handler, self._sent = handler, sent
        self._receiving: ConsumeContext[K_co, V_co]
        self._receiver: threading.Thread | None = None
        self._drained = False
        self._patience_s = LEAVE_TIMEOUT_S  # for handlers that run when it ends
        self._ended: threading.Event = threading.Event()
        workers = range(processing.settings.workers)
        self._workers = [
            threading.Thread(target=self._work, name=f"marshal-process-{number}", daemon=True) for number in workers
        ]
        self._watcher = threading.Thread(target=self._watch, name="marshal-process", daemon=True)

    def start(self) -> None:
        """Begins to receive, and to handle."""
        self._processing.attach()
        try:
            self._receiving = self._consume(self._take)
        except BaseException:
            self._processing.detach(refused=True)
            raise
        try:
            for thread in (self._watcher, *self._workers):
                thread.start()
        except BaseException:  # no more threads can be made: those that began end
            self._processing.halt()
            self._receiving.stop()
            self._processing.close()
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s` seconds (None: any time). Returns whether it has.

        Once it is told to end, its handlers have 10 s, or as long as `stop` says; then it waits for them no more.

        Raises what ended it, if that was an error; InvalidOption; ReentrantCall inside a handler or the key
        function, whose end it would wait for.
        """
        self._context.check_call("Process", "wait", waits=True)
        timeout_s = check_wait(timeout_s)
        if self._inside():
            raise ReentrantCall(
                "wait", "a handler or the key function of this process", "call stop() there, which returns at once"
            )
        if not self._ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def _inside(self) -> bool:
        return threading.current_thread() in (*self._workers, self._receiver)

    # --- ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it: no handler begins any more, and what waits comes again when messages are asked for.

        The call waits until the running handlers have returned, at most `timeout_s` seconds. Inside a handler it
        returns at once. What a handler acks later counts as long as the consumer holds the partition; a `process` that
        begins before may handle others of its key meanwhile. A second call only waits. Raises InvalidOption.
        """
        self._context.check_call("Process", "stop", waits=True)
        timeout_s = check_timeout(timeout_s)
        self._patience_s = max(self._patience_s, timeout_s)
        self._processing.halt()
        self._receiving.stop(0 if self._inside() else timeout_s)
        self._processing.close()
        if not self._inside():
            self._ended.wait(timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Asks for no more, handles what has come, waits until the log has the positions, and ends.

        After `timeout_s` seconds (default: the consumer's handler timeout) what still waits is given back. A message
        that is tried again later is not waited for, nor what waits behind it: they come again when messages are asked
        for next, here or at the next owner. Inside a handler the call returns False at once, and the rest follows.

        Returns whether everything that had come is handled and the log has the positions. Raises InvalidOption.
        """
        self._context.check_call("Process", "drain", waits=True)
        timeout_s = check_wait(timeout_s)
        self._processing.drain()
        if self._inside():
            self._receiving.begin_drain(timeout_s)
            return False
        self._drained = self._receiving.drain(timeout_s) or self._drained
        self._processing.close()
        self._ended.wait(LEAVE_TIMEOUT_S)
        return self._drained

    # --- its threads

    def _take(self, coming: Iterator[Message[K_co, V_co]]) -> None:
        self._receiver = threading.current_thread()  # which calls the key function
        self._processing.take(coming)

    def _watch(self) -> None:
        """Looks for claims that end, until the consume has ended and the last handler has returned."""
        processing = self._processing
        try:
            while not self._receiving.closed and not processing.over:
                if self._receiving.draining and not processing.draining:
                    processing.drain()
                processing.look()
                self._ended.wait(LOOK_S)  # nobody sets it before this thread does
        except Exception as error:  # a bug here: nobody else would know
            processing.fail(error)
        processing.halt()
        self._receiving.stop(0)
        processing.close()  # first: the end of the consumer waits for messages that were delivered
        self._receiving.stop()
        began_s = time.monotonic()
        for thread in self._workers:  # as long as a handler runs, its partition may move, and others wait for acks
            while thread.is_alive() and time.monotonic() < began_s + self._patience_s:
                thread.join(LOOK_S)
        self._processing.leave(sum(thread.is_alive() for thread in self._workers))
        self._ended.set()

    def _work(self) -> None:
        worker = None if self._sent is None else WorkerProcess(self._sent, self._is_over)
        try:
            self._work_with(worker)
        except Exception as error:  # of a process that could not begin, or a bug here: nobody else would know
            self._processing.fail(error)
        finally:
            if worker is not None:
                worker.close()

    def _is_over(self) -> bool:
        return self._processing.over or not threading.main_thread().is_alive()

    def _work_with(self, worker: WorkerProcess | None) -> None:
        """Has messages handled in this thread, or by its worker process."""
        processing, call = self._processing, self._call if worker is None else worker.call
        single = processing.settings.batch is None
        while worker is None or self._has_process(worker):
            given = self._next()
            if given is None:
                return
            try:
                answer = call(given if single else list(given))  # a copy: the handler may change its list
            except BaseException as raised:
                answer = Answer(error=raised, ends=True)
            if answer is NOT_BEGUN:
                processing.give_back_given(given)
            else:
                processing.settle_given(given, answer.result, answer.error, ends=answer.ends)

    def _has_process(self, worker: WorkerProcess) -> bool:
        """Waits until the worker has a process, before it takes a message: one that cannot begin fails none. Returns
        False when no handler may begin any more."""
        refused, thread = self._processing.refused, threading.get_ident()
        while not self._is_over():
            try:
                ready = worker.ready()
                refused.pop(thread, None)
                return ready
            except OSError as error:
                if thread not in refused:
                    self._context.logger.warning("no worker process can be started: %s; it is tried again", error)
                refused[thread] = str(error)
                self._ended.wait(START_AGAIN_S)  # until the end nobody sets it
        return False

    def _call(self, given: object) -> Answer:
        """Calls the handler in this thread."""
        try:
            result: Any = self._handler(given)
        except BaseException as raised:  # sys.exit() too: it would end this thread and nobody would know
            return Answer(error=raised)
        return answered(result)

    def _next(self) -> Any:
        """Waits for the next message or batch. Returns None when no handler may begin any more."""
        processing, single = self._processing, self._processing.settings.batch is None
        while not processing.over:
            if not single:
                processing.reopen()
                with processing.changed:
                    if wait_s := processing.batch_due_s():
                        processing.changed.wait(wait_s)
                        continue
                if batch := processing.begin_batch():
                    return batch
                continue
            given, shut = processing.begin()
            if given:
                return given
            with processing.changed:
                if shut:
                    processing.changed.wait(SHUT_S)
                elif not processing.ready():
                    processing.changed.wait(IDLE_S)
        return None


# --- coroutines: AsyncConsumer.process


HANDLES: Final = "marshal-process-handler"  # names the tasks
TURN_S: Final = 0.005  # how long handlers that do not wait keep other tasks from running


def _has_set(before: contextvars.Context) -> bool:
    """Returns whether context variables were set since. Compares no values, as contexts do: that runs code of users."""
    now = contextvars.copy_context()
    for variable, value in before.items():  # a plain loop over nothing, nearly always, and this runs for each message
        if now[variable] is not value:
            return True
    return len(now) != len(before)


class AsyncProcess(Running[K_co, V_co]):
    """Runs handlers for `AsyncConsumer.process` until it is stopped or drained, or the consumer ends.

    It is an asynchronous context manager: leaving it stops it. The consumer itself goes on, and keeps its claims.
    """

    def __init__(
        self,
        context: Context,
        event_loop: EventLoop,
        processing: Processing[K_co, V_co],
        handler: AsyncHandler[K_co, V_co] | AsyncBatchHandler[K_co, V_co],
        timeout_s: float | None,
        consume: Callable[[Take[K_co, V_co]], AsyncConsumeContext[K_co, V_co]],
    ) -> None:
        """Prepares it; `start` begins. `consume(take)` begins to receive, in a task that calls `take`."""
        self._context, self._event_loop, self._processing = context, event_loop, processing
        self._monotonic = context.monotonic
        self._handler: Callable[[Any], object] = handler
        self._single: bool = processing.settings.batch is None
        self._timeout_s, self._consume = timeout_s, consume
        self._receiving: AsyncConsumeContext[K_co, V_co]
        self._watcher: asyncio.Task[None]
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None  # has not begun; it will begin the next one
        self._turn_until = 0.0  # monotonic
        self._turning = False  # all tasks wait for the next turn
        self._newest: asyncio.Task[None] | None = None  # which has begun a handler last
        self._drained = False
        self._patience_s = LEAVE_TIMEOUT_S  # for handlers that run when it ends
        self._ended: asyncio.Event = asyncio.Event()

    def start(self) -> None:
        """Begins to receive, and to handle."""
        self._processing.attach()
        try:
            self._receiving = self._consume(self._take)
        except BaseException:
            self._processing.detach(refused=True)
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="marshal-process")
        self._watcher.add_done_callback(self._watched)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most `timeout_s` seconds (None: any time), as `Process.wait` does: so once it is
        told to end, its handlers have 10 s. It cancels none that goes on."""
        self._event_loop.check("wait")
        self._context.check_call("AsyncProcess", "wait", waits=True)
        timeout_s = check_wait(timeout_s)
        if self._inside():
            raise ReentrantCall("wait", "a handler of this process", "call stop() there, which returns at once")
        if not await self._over(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    async def _over(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ended.wait()
        except TimeoutError:
            return self._ended.is_set()

    def _inside(self) -> bool:
        return asyncio.current_task() in self._tasks

    # --- ending

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it, as `Process.stop` does. It cancels no handler."""
        self._event_loop.check("stop")
        self._context.check_call("AsyncProcess", "stop", waits=True)
        timeout_s = check_timeout(timeout_s)
        self._patience_s = max(self._patience_s, timeout_s)
        self._processing.halt()
        await self._receiving.stop(0 if self._inside() else timeout_s)
        self._processing.close()
        if not self._inside():
            await self._over(timeout_s)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Asks for no more, handles what has come, waits until the log has the positions, and ends: `Process.drain`."""
        self._event_loop.check("drain")
        self._context.check_call("AsyncProcess", "drain", waits=True)
        timeout_s = check_wait(timeout_s)
        self._processing.drain()
        if self._inside():
            self._receiving.begin_drain(timeout_s)
            return False
        self._drained = await self._receiving.drain(timeout_s) or self._drained
        self._processing.close()
        await self._over(LEAVE_TIMEOUT_S)
        return self._drained

    # --- its tasks

    async def _watch(self) -> None:
        """Looks for claims that end, until the consume has ended and the last handler has returned."""
        processing, receiving = self._processing, self._receiving
        try:
            while not receiving.closed and not processing.over:
                if receiving.draining and not processing.draining:
                    processing.drain()
                processing.look()
                self._begin()
                await self._over(LOOK_S)  # nobody sets it before this task has ended
        except Exception as error:  # nobody awaits this task
            processing.fail(error)
        processing.halt()
        await receiving.stop(0)
        processing.close()  # first: the end of the consumer waits for messages that were delivered
        await receiving.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._patience_s)
        processing.leave(len(self._tasks))

    def _watched(self, _: asyncio.Task[None]) -> None:
        """Ends it with that task, which may be cancelled at the end of the program, as all are, before it begins."""
        self._receiving.begin_drain(0)
        self._processing.close()
        self._ended.set()

    def _take(self, coming: Iterator[Message[K_co, V_co]]) -> None:
        self._processing.take(coming)
        self._begin()

    def _begin(self, *, at_once: bool = False) -> None:
        """Has one more task handle messages, if any is ready, or `at_once`. That begins the next one when it has one:
        so handlers that do not wait need no more than two."""
        free = 0 if self._processing.over else self._processing.settings.workers - len(self._tasks)
        if free and self._starting is None and (at_once or (self._due() and self._processing.ready())):
            self._starting = self._run(self._work())

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=HANDLES)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # a bug here: nobody else would know
            self._processing.fail(error)
        if self._starting is task:  # it was cancelled before
            self._starting = None
        if self._processing.waits_for_gate():  # else nobody may look again: all workers were busy when that was due
            self._look_again(SHUT_S)
        self._begin()

    async def _work(self) -> None:
        """Handles messages or batches while any is ready, and gives other tasks a turn every TURN_S, unless others have
        begun while its handler waited: then the next one begins in the turn in which that one ended. It takes them
        itself: a task that is cancelled before it begins has none. It ends where it must not go on with what a handler
        left to it, which is a cancellation that was caught, or context variables that were set."""
        task, self._starting = self._starting, None
        assert task is not None
        unset = contextvars.copy_context()
        while given := self._next():
            if self._starting is None:
                self._begin()
            self._newest = task
            await self._handle(given)
            if task.cancelling() or _has_set(unset):
                return
            if self._newest is task and self._monotonic() >= self._turn_until:
                if not self._turning:
                    self._turning = True
                    asyncio.get_running_loop().call_soon(self._turn)
                await asyncio.sleep(0)

    def _turn(self) -> None:
        """Begins the next turn of all tasks together: so what else runs waits for one turn, and not for one of each."""
        self._turning, self._turn_until = False, self._monotonic() + TURN_S

    def _next(self) -> Any:
        """Takes the next message or batch. If something waits for its gate alone, a task looks again soon."""
        if not self._single:
            return self._processing.begin_batch() if self._due() else None
        given, shut = self._processing.begin()
        if shut and not given:
            self._look_again(SHUT_S)
        return given

    def _due(self) -> bool:
        """Returns whether what is ready need not wait for more. If a batch has to, this looks again when it is due."""
        if self._single:
            return True
        self._processing.reopen()
        with self._processing.changed:
            wait_s = self._processing.batch_due_s()
        if 0 < wait_s < IDLE_S:
            self._look_again(wait_s)
        return not wait_s

    def _look_again(self, wait_s: float) -> None:
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._again)

    def _again(self) -> None:
        self._later = None
        self._begin(at_once=True)

    async def _handle(self, given: Any) -> None:
        """Has a message or a batch handled. Raises CancelledError if all tasks are cancelled: the end of the program. A
        cancellation of its task alone is the handler's, and so its error."""
        processing = self._processing
        limit: asyncio.Timeout | None = None
        try:
            result = self._handler(given if self._single else list(given))  # a copy: it may be changed
            if not inspect.isawaitable(result):
                rule = "a coroutine function; Consumer.process calls plain ones, on threads"
                answer = Answer(error=InvalidOption("handler", self._handler, rule), ends=True)
            elif self._timeout_s is None:
                answer = answered(await result)
            else:
                async with asyncio.timeout(self._timeout_s) as limit:
                    answer = answered(await result)
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and (self._watcher.cancelling() or self._watcher.done()):
                processing.give_back_given(given)
                raise
            if limit is not None and limit.expired() and isinstance(raised, TimeoutError) and not raised.args:
                raised.args = (f"the handler took longer than timeout_s={self._timeout_s:g}",)  # a letter has this text
            answer = Answer(error=raised)
        processing.settle_given(given, answer.result, answer.error, ends=answer.ends)
