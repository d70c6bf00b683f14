"""What a forked child finds of its parent's Marshals: locks that raise UsedAfterFork instead of being taken.

The threads and sockets of a Marshal do not exist in a child, and a thread that is gone may have held the lock there. So
everything that lies behind the lock is refused by it: nothing has to ask for its process before, an ack least of all.
"""

from __future__ import annotations

import os
import threading
from typing import NoReturn, Protocol
from weakref import WeakSet

from marshal_py.errors import UsedAfterFork


class ForkedLock(threading.Condition):
    """Stands in a child where the lock of an object was that the parent had made."""

    def __init__(self, what: str, made_in_pid: int) -> None:
        super().__init__()
        self._what, self._made_in_pid = what, made_in_pid

    def __enter__(self) -> NoReturn:
        raise UsedAfterFork(self._what, self._made_in_pid, os.getpid())


class Forkable(Protocol):
    """Holds a lock of a Marshal."""

    def forked(self) -> None:
        """Called in a child, once per fork, while it has one thread: puts a ForkedLock where the lock was."""


_made: WeakSet[Forkable] = WeakSet()


def watch_forks(one: Forkable) -> None:
    """Has `one.forked` called in every child that is forked while it is there."""
    _made.add(one)


def _in_child() -> None:
    for one in list(_made):
        one.forked()


os.register_at_fork(after_in_child=_in_child)
