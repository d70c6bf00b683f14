"""`Consumer.process`: handlers in parallel, on threads of their own, in the order of each key (processing.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

from marshal_py.client.connection import Context
from marshal_py.client.consuming import ConsumeContext, Take
from marshal_py.client.membership import LEAVE_TIMEOUT_S
from marshal_py.client.messages.message import Message
from marshal_py.client.process.processing import IDLE_S, LOOK_S, SHUT_S, Processing, Running
from marshal_py.client.process.worker_processes import NOT_BEGUN, Answer, Work, WorkerProcess, answered
from marshal_py.client.values.requests import check_timeout, check_wait
from marshal_py.errors import ReentrantCall
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ends it: no handler begins any more, and what waits comes again when messages are asked for.

        The call waits until the running handlers have returned, at most `timeout_s` seconds. Inside a handler it
        returns at once. What a handler acks later counts as long as the consumer holds the partition. A second call
        only waits. Raises InvalidOption.
        """
        self._context.check_call("Process", "stop", waits=True)
        check_timeout(timeout_s)
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
            given: Any = self._next() if single else self._next_batch()
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
        """Waits for the next message. Returns None when no handler may begin any more."""
        processing = self._processing
        while not processing.over:
            message, shut = processing.begin()
            if message is not None:
                return message
            with processing.changed:
                if shut:
                    processing.changed.wait(SHUT_S)
                elif not processing.ready():
                    processing.changed.wait(IDLE_S)
        return None

    def _next_batch(self) -> list[Message[K_co, V_co]] | None:
        """Waits for the next batch. Returns None when no handler may begin any more."""
        processing = self._processing
        while not processing.over:
            with processing.changed:
                wait_s = processing.batch_due_s()
                if wait_s:
                    processing.changed.wait(wait_s)
                    continue
            batch, shut = processing.begin_batch()
            if batch:
                return batch
            if shut:
                with processing.changed:
                    processing.changed.wait(SHUT_S)
        return None
