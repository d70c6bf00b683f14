"""One look of CPython's garbage collector per burst of messages, instead of one per 700 of them.

The collector counts objects made, and looks when 700 more were made than freed. A burst of thousands that are all kept
for a while starts it a dozen times and moves the messages into its older generations, whose looks are dear: a fifth of
an at-most-once consumer's time. So its first threshold is raised for the time of one call into librdkafka.

That is a setting of the whole process, so it is handled with care: raised by the first of several threads and put back
by the last, also in a forked child; never touched where the program has it at 0 (switched off); and where somebody set
another meanwhile, his stays. `gc.disable` and `gc.enable` are not used: what a program does with them holds.
"""

from __future__ import annotations

import gc
import os
import threading
from types import TracebackType
from typing import Final

BURST_OBJECTS: Final = 1_000_003  # more than any burst; odd, so that it is known as ours when it is put back


class Burst:
    """A context manager that any threads may be inside at once. There is one per process, below."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = gc.get_threshold()
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            now = gc.get_threshold()
            if self._inside == 1 and now[0]:
                self._before = now
                gc.set_threshold(BURST_OBJECTS, *now[1:])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put_back()

    def _put_back(self) -> None:
        if gc.get_threshold()[0] == BURST_OBJECTS:
            gc.set_threshold(*self._before)

    def _forked(self) -> None:
        """In a child the threads that were inside are gone, and one of them may have held the lock."""
        self._lock, self._inside = threading.Lock(), 0
        self._put_back()


BURST: Final = Burst()
