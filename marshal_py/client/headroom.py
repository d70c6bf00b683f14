"""Messages in hand are not what CPython's garbage collector is looking for.

The collector counts objects made, and looks when 700 more were made than freed. Every batch of a thousand messages that
is kept until the next one comes starts it once, and what it finds alive it looks at again and again: a seventh of
the time of a consumer that handles batches. So a consumer says how many messages it and its user keep for a moment, and
while it is open the collector's first threshold is that much higher; the program's own objects still have their 700.

That is a setting of the whole process, so it is handled with care: raised by what all open consumers together keep, and
put back by the last of them, also in a forked child; never touched where the program has it at 0 (switched off); and
where somebody sets another meanwhile, his stays. `gc.disable` and `gc.enable` are not used: what a program does with
them holds.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Final

MESSAGES_MAX: Final = 50_000  # per consumer; who keeps more pays for one look per so many, and bounds his own garbage


class Headroom:
    """What all consumers of this process keep. There is one, below; any thread may call it."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forked)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[object, int] = {}  # messages, by who keeps them
        self._before = self._raised = 0  # the program's own threshold, and ours; 0: not raised

    def keep(self, owner: object, messages: int) -> None:
        """`owner` keeps up to `messages` at a time from now on. Never less than it said before."""
        messages = min(messages, MESSAGES_MAX)
        if messages > self._kept.get(owner, 0):
            with self._lock:
                self._kept[owner] = messages
                self._set()

    def leave(self, owner: object) -> None:
        """`owner` keeps nothing any more. Twice is once."""
        with self._lock:
            if self._kept.pop(owner, None) is not None:
                self._set()

    def _set(self) -> None:
        now = gc.get_threshold()[0]
        if self._raised in (0, now):  # otherwise it is somebody else's, until nobody keeps anything
            self._before = self._before if self._raised else now
            if self._before:
                self._raised = self._before + sum(self._kept.values())
                gc.set_threshold(self._raised)
        if not self._kept:
            self._raised = 0

    def _forked(self) -> None:
        """In a child the consumers do not work, and a thread that is gone may have held the lock."""
        if self._raised and gc.get_threshold()[0] == self._raised:
            gc.set_threshold(self._before)
        self._forget()


HEADROOM: Final = Headroom()
