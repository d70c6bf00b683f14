"""A daemon thread for questions that wait for the network, so that the loop never does. It runs closures in order.

Each consumer has one of its own: if the coordinator of one group does not answer, other consumers can still start.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from marshal_py.errors import MarshalError

logger = logging.getLogger("marshal_py")


class Worker:
    """A queue and a thread. The executors of the standard library do not fit: they end before `atexit` handlers run."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[tuple[str, int], Callable[[], object]] | None] = queue.SimpleQueue()
        self._waiting: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        """Runs `task` later, unless one of the same name and `owner` is waiting already.

        `what`: its name, in words for the log of this process.
        """
        key = what, id(owner)
        if key not in self._waiting:
            self._waiting.add(key)
            self._tasks.put((key, task))

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            key, task = item
            what = key[0]
            self._waiting.discard(key)
            try:
                task()
            except MarshalError as error:
                # The member's next tick asks again for what it still needs; this line says why that took longer.
                logger.warning("%s: %s", what, error, extra={"marshal_task": what})
            except BaseException:  # nothing may end this thread: others wait for its answers
                logger.exception("%s failed", what, extra={"marshal_task": what})
            del item, task  # else the last one would keep its consumer until the next comes

    def end(self) -> None:
        """Ends the thread once it has run the tasks that wait. Nothing may be submitted after this."""
        self._tasks.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Ends the thread and waits for the tasks in the queue, at most `timeout_s` seconds."""
        self.end()
        self._thread.join(timeout_s)
