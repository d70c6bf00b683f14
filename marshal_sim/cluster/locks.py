"""The locks of one simulated process. Where a thread of its user leaves one, it may be stopped for a while.

Meanwhile everything else goes on, the other threads of the process too: its loop, its worker, its handlers, its other
calls. The shipped client makes its locks by `Context.new_lock`, so no line of it is copied or changed.

This does not reach: what happens between two releases; acks, which take no lock; the loop, which does its turn under
one lock; the worker; planners of ranges, whose gate is read after the plan; the collecting of a list for `process`,
each of whose messages has a gate; the locks of `Consumer` and `Ending`. Of several threads that are stopped so, the one
that was stopped last goes on first.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.process import Process, ThreadGone

DEPTH_MAX: Final = 3  # threads that are stopped at once, of all processes

T = TypeVar("T")
Known = tuple[int, int, bytes]  # the time in ms, how much of the log was read, and the newest instance


class Locks:
    """Makes the locks of one process, and knows whether a thread of the user runs that holds none."""

    def __init__(
        self, environment: ClientEnvironment, process: Process, ended: Callable[[], bool], known: Callable[[], Known]
    ) -> None:
        """`ended()`: whether the consumer of the process has ended, so that the thread still goes on. `known()`: what
        its gate knows now."""
        self._environment, self._process, self._ended, self._known = environment, process, ended, known
        self._in_thread = False
        self.left: Known | None = None  # what its gate knew when the present thread of the user last left a lock
        self.held = 0

    def new(self) -> SimulatedLock:
        return SimulatedLock(self)

    def run(self, code: Callable[..., T], *arguments: Any) -> T:
        """Runs `code` in a thread of the user, which may be stopped where it leaves a lock."""
        before, self._in_thread = self._in_thread, True
        try:
            return code(*arguments)
        finally:
            self._in_thread = before

    def released(self) -> None:
        """Stops the thread that has left a lock, if the seed says so."""
        environment, process = self._environment, self._process
        if not self._in_thread or self.held:
            return
        left = self.left = self._known()
        if process.dead or environment.stopped_threads >= DEPTH_MAX:
            return
        if stopped_ms := environment.network_faults.lock_ms():
            self._in_thread = False
            environment.go_on_for(stopped_ms, process)
            self._in_thread, self.left = True, left
            if process.dead and not self._ended():
                raise ThreadGone


class SimulatedLock(RLock):  # type: ignore[misc]  # final in typeshed alone
    """Is a lock that has no second thread to wait for, and tells when it is left."""

    def __new__(cls, _locks: Locks) -> Self:
        return super().__new__(cls)  # newer Pythons refuse an argument

    def __init__(self, locks: Locks) -> None:
        self._locks, self._depth = locks, 0

    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.acquire()
        self._depth += 1
        self._locks.held += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        self._depth -= 1
        self._locks.held -= 1
        if not self._depth:
            self._locks.released()
