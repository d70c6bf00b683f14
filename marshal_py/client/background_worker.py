"""A daemon thread for questions that wait for the network, so that the loop never does. Runs closures in order.

Each consumer has one: a coordinator of one group that does not answer holds up nobody else's start.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from marshal_py.errors import MarshalError

logger = logging.getLogger("marshal_py")


class Worker:
    """A queue and a thread. No executor of the standard library: theirs end before `atexit` handlers run."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[tuple[str, int], Callable[[], object]] | None] = queue.SimpleQueue()
        self._waiting: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, task: Callable[[], object], whose: object = None) -> None:
        """Runs `task` later. One of the same name for the same `whose` that still waits is not queued twice.

        `what`: in words, for the log of this process.
        """
        key = what, id(whose)
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
                # What is still wanted is asked again by the member's next tick; the log tells why it took longer.
                logger.warning("%s: %s", what, error, extra={"marshal_task": what})
            except BaseException:  # this thread serves every consumer of the Marshal: nothing may end it
                logger.exception("%s failed", what, extra={"marshal_task": what})
            del item, task  # else the last one would keep its consumer until the next comes

    def end(self) -> None:
        """Nothing more will be submitted: the thread ends when it has run what waits. Twice is once."""
        self._tasks.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Ends it and waits for what is queued, at most `timeout_s`."""
        self.end()
        self._thread.join(timeout_s)
