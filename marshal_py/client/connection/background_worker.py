"""A daemon thread that runs tasks which wait for the network, in order, so that the loop (loop.py) never waits for it.

Each consumer has such a thread of its own: if one group's coordinator does not answer, other consumers can still start.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from marshal_py.client.connection.repeats import Repeats
from marshal_py.errors import MarshalError

logger: Final = logging.getLogger("marshal_py")


class Worker:
    """Runs tasks on a thread of its own. (The executors of the standard library end before `atexit` handlers run.)"""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[tuple[str, int], Callable[[], object]] | None] = queue.SimpleQueue()
        self._waiting: set[tuple[str, int]] = set()
        self._running = False
        self._repeats = Repeats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        """Runs `task` later. Does nothing if a task with the same `what` and `owner` is already waiting.

        `what` names the task, in words for the log of this process.
        """
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
                task()
            except MarshalError as error:
                # The member's next tick asks again for what it still needs; this line says why that took longer.
                if self._repeats.due(f"{what}: {error}"):
                    logger.warning("%s: %s", what, error, extra={"marshal_task": what})
            except BaseException as error:  # nothing may end this thread: others wait for its answers
                if self._repeats.due(f"{what}: {error!r}"):
                    logger.exception("%s failed", what, extra={"marshal_task": what})
            self._running = False
            del item, task  # else the last task would keep its consumer in memory until the next comes

    def end(self) -> None:
        """Ends the thread after the tasks that are waiting now; does not wait for that. Later tasks would never run."""
        self._tasks.put(None)

    @property
    def busy(self) -> bool:
        """Tells whether a task runs or waits."""
        return bool(self._waiting) or self._running

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the tasks that are waiting now, and waits for that, at most `timeout_s` seconds."""
        self.end()
        self._thread.join(timeout_s)
