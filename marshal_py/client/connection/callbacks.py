"""The thread that runs the user's callbacks, so that none of them runs where heartbeats are sent.

Each Marshal has one, a daemon. Calls run one at a time, in the order in which they were submitted. An exception in a
call, `SystemExit` included, is logged and has no other effect.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Protocol

logger: Final = logging.getLogger("marshal_py")

# Several times the partitions of the largest consumer; a callback that hangs must not use up all memory.
CALLS_WAITING_MAX: Final = 100_000


class Calls(Protocol):
    """Runs the user's callbacks somewhere else than its callers: Callbacks, or a simulated one."""

    dropped: int

    def submit(self, call: Callable[[], object]) -> None:
        """Has `call` run later, or drops it if too many are waiting. Does not wait itself."""

    def close(self, timeout_s: float) -> None:
        """Ends after the calls that are waiting now. Waits for that at most `timeout_s` seconds."""


class Callbacks:
    """Runs calls on a thread. While `waiting_max` calls are waiting, new ones are dropped, counted and logged."""

    def __init__(self, waiting_max: int = CALLS_WAITING_MAX) -> None:
        self.dropped: int = 0
        self._waiting_max = waiting_max
        self._full = False  # whether an overflow was logged: one line for all calls that it drops
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="marshal-callbacks", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Has `call` run later on the thread, or drops it if too many are waiting. Does not wait itself."""
        if self._calls.qsize() >= self._waiting_max:
            self.dropped += 1
            if not self._full:
                logger.error("%d callbacks wait for one that does not return: new ones are dropped", self._waiting_max)
            self._full = True
            return
        self._full = False
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:  # sys.exit() too: it must not end the calls of every other consumer
                logger.exception("a callback failed")
            del call  # else the last call would keep its consumer in memory until the next comes

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the calls that are waiting now.

        Waits for that at most `timeout_s` seconds; inside a callback it does not wait.
        """
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
