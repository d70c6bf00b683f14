"""A daemon thread that runs tasks which wait for the network, in order, so that the loop (loop.py) never waits for it.

Each consumer has such a thread of its own: if one group's coordinator does not answer, other consumers can still start.
A task that waits in its midst is a generator: it yields what it asks the cluster, or for how long it rests. The thread
carries that out at once; the simulator lets time pass, in which the rest of the process goes on. Such a task holds no
lock at a `yield`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, Protocol

from marshal_py.client.connection.repeats import Repeats
from marshal_py.errors import MarshalError

logger: Final = logging.getLogger("marshal_py")


class Ask(NamedTuple):
    """Calls `question`, which asks the cluster and may wait. Its result is the answer; its error is the task's."""

    question: Callable[[], Any]


class Rest(NamedTuple):
    """Waits so many seconds, or until the worker ends."""

    seconds: float


TaskSteps = Generator[Ask | Rest, Any, None]


def following(steps: TaskSteps, step: Ask) -> Ask | Rest:
    """Asks the question of `step` and continues the task with the answer. Returns what the task yields next."""
    try:
        answer = step.question()
    except Exception as error:
        return steps.throw(error)
    return steps.send(answer)


class Tasks(Protocol):
    """Runs tasks one after the other, somewhere else than its callers: a Worker, or a simulated one."""

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        """Runs `task` later. Does nothing if a task with the same `what` and `owner` is already waiting.

        `what` names the task, in words for the log of this process.
        """

    def end(self) -> None:
        """Ends after the tasks that are waiting now; does not wait for that. Later tasks would never run."""

    @property
    def busy(self) -> bool:
        """Tells whether a task runs or waits."""

    @property
    def alive(self) -> bool: ...

    def close(self, timeout_s: float) -> None:
        """Ends after the tasks that are waiting now, and waits for that, at most `timeout_s` seconds."""


class Worker:
    """Runs tasks on a thread of its own. (The executors of the standard library end before `atexit` handlers run.)"""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[tuple[str, int], Callable[[], object]] | None] = queue.SimpleQueue()
        self._waiting: set[tuple[str, int]] = set()
        self._running = False
        self._ending = threading.Event()
        self._repeats = Repeats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        key = what, id(owner)
        if key not in self._waiting:
            self._waiting.add(key)
            self._tasks.put((key, task))

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            key, task = item
            what = key[0]
            self._running = True  # before it is no longer waiting: `busy` must not see neither
            self._waiting.discard(key)
            try:
                steps = task()
                if isinstance(steps, Generator):
                    self._complete(steps)
                del steps
            except MarshalError as error:
                # The member's next tick asks again for what it still needs; this line says why that took longer.
                if self._repeats.due(f"{what}: {error}"):
                    logger.warning("%s: %s", what, error, extra={"marshal_task": what})
            except BaseException as error:  # nothing may end this thread: others wait for its answers
                if self._repeats.due(f"{what}: {error!r}"):
                    logger.exception("%s failed", what, extra={"marshal_task": what})
            self._running = False
            del item, task  # else the last task would keep its consumer in memory until the next comes

    def _complete(self, steps: TaskSteps) -> None:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Rest):
                    self._ending.wait(step.seconds)
                    step = next(steps)
                else:
                    step = following(steps, step)
        except StopIteration:
            pass

    def end(self) -> None:
        self._ending.set()
        self._tasks.put(None)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._running

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        self.end()
        self._thread.join(timeout_s)
