"""The asyncio event loop of one simulated process, in virtual time, and what the shipped asyncio front needs beside it.

What is ready runs in one event of the process; a timer is an event of its own. While user code blocks the loop, the
rest of the process goes on: its threads, its coordination loop, its receiver. The asyncio front makes its loop, its
verbs and its feeds by client/event_loop.py, of which only the threads are replaced.
"""

from __future__ import annotations

import asyncio
import math
import sys
from asyncio.tasks import _enter_task, _leave_task
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor, Future
from contextvars import Context as Variables
from typing import Any, Final, TypeVar

from marshal_py.client.connection import Context
from marshal_py.client.event_loop import EventLoop, Feed, Request, Threads
from marshal_py.transport.ports import Chunk
from marshal_sim.cluster.busy_loops import BusyLoop
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.front import Front
from marshal_sim.cluster.locks import DEPTH_MAX
from marshal_sim.cluster.process import Process
from marshal_sim.cluster.source import SimulatedSource

AT_ONCE_MAX: Final = 100_000  # callbacks without any time between: more is an endless loop
CANCELLED_AMID: Final = 8  # so many callbacks of one event run at most before a task is cancelled
ROUNDS_MAX: Final = 100  # cancellations of one task at the end of a run

# Of the abstract class all but what this file has is missing; nothing here asks for sockets, processes or signals.
Loop: Any = asyncio.AbstractEventLoop

T = TypeVar("T")
Clock = Callable[[], float]


class VirtualLoop(Loop):  # type: ignore[misc]
    """Runs the tasks of one process. `tasks`: those that have not ended, in the order in which they were made."""

    def __init__(self, environment: ClientEnvironment, process: Process, context: Context) -> None:
        self._environment, self._process, self._context = environment, process, context
        self._ready: deque[asyncio.Handle] = deque()
        self._due = self._running = self._closed = False
        self._ran_ms, self._ran = -1, 0
        self.ending: bool = False  # the run is over
        self._failed: BaseException | None = None
        self.tasks: dict[asyncio.Task[Any], None] = {}

    # --- as asyncio asks

    def time(self) -> float:
        return self._context.monotonic()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: Variables | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self.tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or error

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Variables | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._run_soon()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Variables | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Variables | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._arm(timer)
        return timer

    def _arm(self, timer: asyncio.TimerHandle) -> None:
        now_ms = self._environment.now_ms
        due_ms = self._process.clock.true_ms(due_mono_ms(timer))
        self._environment.schedule(max(1, due_ms - now_ms), self._process, self._timer_due, timer)

    def _timer_due(self, timer: asyncio.TimerHandle) -> None:
        if timer.cancelled() or self._closed:
            return
        if self._process.now().mono_ms < due_mono_ms(timer):  # the machine has slept meanwhile
            self._arm(timer)
            return
        self._ready.append(timer)
        self._run_soon()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: an event of a timer that was cancelled comes to nothing."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Has a callback that raises end the run. What asyncio only logs, such as a task that is dropped, is none."""
        if "handle" in context:
            self._failed = self._failed or context.get("exception")

    # --- running

    def call(self, function: Callable[[], T]) -> T:
        """Calls `function` in this loop, which does not run."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            return function()
        finally:
            asyncio._set_running_loop(before)

    def _run_soon(self) -> None:
        if not self._due and not self._running and not self._closed:
            self._due = True
            self._environment.schedule(0, self._process, self._run)

    def _run(self, _: None) -> None:
        """Runs what is ready until nothing is, or the process is stopped."""
        self._due = False
        if self._running or self._closed:
            return
        self._enter(lambda: not self._process.frozen and not self._process.dead)
        if self._ready:
            self._run_soon()  # it is stopped: this waits with everything else
        if self._failed is not None:
            raise self._failed
        self._process.ran()

    def _enter(self, may: Callable[[], bool]) -> None:
        """Runs callbacks as the running loop, while `may()`. One of the user's tasks may be cancelled amid them."""
        cancels_after = self._draw_cancellation()
        before, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        self._running = True
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._dropped)
        try:
            while self._ready and may():
                if cancels_after == 0:
                    self.cancel_one()
                cancels_after -= 1
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                self._count()
        finally:
            self._running = False
            asyncio._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)

    def _draw_cancellation(self) -> int:
        environment = self._environment
        if self.ending or not environment.network_faults.cancels_task():
            return -1
        return int(environment.rng.random() * CANCELLED_AMID)

    def _count(self) -> None:
        now_ms = self._environment.now_ms
        self._ran = self._ran + 1 if now_ms == self._ran_ms else 1
        self._ran_ms = now_ms
        if self._ran > AT_ONCE_MAX:
            raise BusyLoop(f"the event loop of consumer {self._process.number} runs on, and no time passes")

    def _dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Closes an asynchronous generator that the program has dropped, as the loops of asyncio do."""
        if not self._closed:
            self.call_soon(self._close_generator, generator)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(generator.aclose())

    def cancel_one(self) -> None:
        """Cancels one of the tasks, as a program does at any time."""
        if self.tasks:
            tasks = [*self.tasks]
            tasks[int(self._environment.rng.random() * len(tasks))].cancel()

    def block(self, blocked_ms: int) -> None:
        """Blocks the loop, called in a task, while all else goes on."""
        environment, task = self._environment, asyncio.current_task(self)
        if environment.stopped_threads >= DEPTH_MAX or self._closed:
            return
        assert task is not None
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        _leave_task(self, task)
        asyncio._set_running_loop(None)
        try:
            environment.go_on_for(blocked_ms, self._process)
        finally:
            asyncio._set_running_loop(self)
            _enter_task(self, task)
            sys.set_asyncgen_hooks(*hooks)

    # --- its end

    def end(self) -> None:
        """Cancels what still runs, as `asyncio.run` does. Called after the run, whose evidence is complete."""
        self.ending = True
        for _ in range(ROUNDS_MAX):
            for task in self.tasks:
                task.cancel()
            self._enter(lambda: True)
            if not self.tasks:
                break
        self._closed = True
        self._ready.clear()


def due_mono_ms(timer: asyncio.TimerHandle) -> int:
    return math.ceil(timer.when() * 1000)


class SimulatedPool(Executor):
    """Stands for a pool of threads: each function runs some time after it was submitted. One that waits for the log
    returns its steps, which a thread would complete."""

    def __init__(self, process: Process, front: Front) -> None:
        self._process, self._front = process, front

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        future, environment = Future[T](), self._process.environment

        def run(_: None) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args, **named)
                except Exception as error:
                    future.set_exception(error)
                else:
                    self._complete(result, future)
                self._process.ran()

        environment.schedule(environment.network_faults.read_ms(), self._process, run)
        return future

    def _complete(self, result: Any, future: Future[Any]) -> None:
        if not isinstance(result, Generator):
            future.set_result(result)
            return

        def ended(value: object, error: Exception | None) -> None:
            future.set_result(value) if error is None else future.set_exception(error)

        self._front.begin(result, ended)


class SimulatedFeed(Feed):
    """Is a feed whose receiver polls in virtual time."""

    def __init__(self, loop: VirtualLoop, process: Process, source: SimulatedSource, monotonic: Clock) -> None:
        super().__init__(loop, source.poll, source.poll_now, monotonic)
        self._process, self._source = process, source
        self._served: Request | None = None  # which the receiver polls for now
        self._until_ms = 0  # of this poll
        self._woken = self._over = False

    def _start(self) -> None:
        """Wakes the receiver."""
        if not self._woken and not self._over:
            self._woken = True
            self._process.environment.schedule(0, self._process, self._turn)

    def close(self) -> None:
        super().close()
        self._start()

    def look(self) -> None:
        """Notes what has happened in the process: a poll ends with the first messages."""
        if self._served is not None and self._source.has_messages:
            self._start()

    def _slice_over(self, _: None) -> None:
        self._start()

    def _turn(self, _: None) -> None:
        self._woken, environment = False, self._process.environment
        request = self._served
        if request is not None and (self._source.has_messages or environment.now_ms >= self._until_ms):
            self._served = None
            self._serve(request)
        if self._served is None and self._closed:
            self._over = True
            self._receive()  # which only answers
        elif self._served is None and (request := self._wanted) is not None:
            slice_ms = math.ceil(self._slice_s(request) * 1000)
            self._served, self._until_ms = request, environment.now_ms + slice_ms
            environment.schedule(slice_ms, self._process, self._slice_over)
            self.look()
        self._process.ran()


class SimulatedEventLoop(EventLoop):
    """Is what the consumers of one AsyncMarshal share, with threads in virtual time."""

    def __init__(
        self, loop: VirtualLoop, process: Process, context: Context, source: SimulatedSource, front: Front
    ) -> None:
        super().__init__(Threads(SimulatedPool(process, front)), context)
        self.receiver: SimulatedFeed = SimulatedFeed(loop, process, source, context.monotonic)

    def feed(self, pull: Callable[[float, int], list[Chunk]], poll_now: Callable[[int], list[Chunk] | None]) -> Feed:
        """Returns the feed of the one consumer."""
        return self.receiver
