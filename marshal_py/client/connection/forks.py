"""Makes the Marshals of a parent process unusable in a forked child: their locks raise UsedAfterFork there.

The threads and sockets of a Marshal do not exist in a child, and a thread that is gone may have held the lock. Since
the lock itself raises the error, no method has to check first in which process it runs, which would slow down acks.
"""

from __future__ import annotations

import os
import threading
from typing import NoReturn, Protocol
from weakref import WeakSet

from marshal_py.errors import UsedAfterFork


class ForkedLock(threading.Condition):
    """Replaces, in a child process, the lock of an object that the parent made. Taking it raises UsedAfterFork."""

    def __init__(self, what: str, made_in_pid: int) -> None:
        super().__init__()
        self._what, self._made_in_pid = what, made_in_pid

    def __enter__(self) -> NoReturn:
        raise UsedAfterFork(self._what, self._made_in_pid, os.getpid())


class Forkable(Protocol):
    """Must be told about a fork, because it holds the lock of a Marshal."""

    def forked(self) -> None:
        """Makes the object unusable in a forked child process. Called once in each child, while it has one thread."""


_made: WeakSet[Forkable] = WeakSet()


def watch_forks(one: Forkable) -> None:
    """Has `one.forked` called in every child process that is forked while `one` exists."""
    _made.add(one)


def _in_child() -> None:
    for one in list(_made):
        one.forked()


os.register_at_fork(after_in_child=_in_child)
