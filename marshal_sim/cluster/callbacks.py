"""The callbacks of one simulated consumer's user, and the thread that runs them.

Some raise, and some take seconds. The user notes each for the auditor (S28), and whether it runs on that thread.
Nothing here changes what else happens in a run: the numbers come from a stream of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final

from marshal_py.client import connection
from marshal_py.client.values.info import ClaimInfo
from marshal_py.protocol.wire.identity import NONE
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.ports import SILENT
from marshal_sim.cluster.process import Process
from marshal_sim.judge.evidence import CallbackRun

RAISES: Final = 0.2  # the share of callbacks that raise
BLOCKS: Final = 0.2  # the share of those that take long
BLOCKED_INTERVALS: Final = 3  # so long at most: a claim may come and go meanwhile


class SimulatedCallbacks:
    """Implements Calls: runs one callback after the other, each some time after the one before."""

    dropped = 0

    def __init__(self, process: Process) -> None:
        self._process, self._waiting = process, deque[Callable[[], object]]()
        self.blocked_ms = 0  # how long the callback that runs takes
        self.inside: bool = False  # in a callback
        self._alive, self._busy = True, False

    @property
    def idle(self) -> bool:
        """Returns whether every callback has run."""
        return not self._waiting

    def submit(self, call: Callable[[], object]) -> None:
        self._waiting.append(call)
        if not self._busy:
            self._busy = True
            self._process.environment.schedule(1, self._process, self._next)

    def _next(self, _: None) -> None:
        self._busy = bool(self._waiting)
        if self._waiting:
            self._run()
            self._process.environment.schedule(1 + self.blocked_ms, self._process, self._next)

    def _run(self) -> None:
        call, self.blocked_ms, self.inside = self._waiting.popleft(), 0, self._alive
        if self._alive:
            try:
                connection.run_callback(call, SILENT)
            except BaseException:  # it has ended the thread, and the others wait in vain
                self._alive = False
        self.inside = False

    def close(self, timeout_s: float) -> None:
        """Runs what waits, since the consumer has ended."""
        while self._waiting:
            self._run()


class CallbackUser:
    """Takes the callbacks of one consumer."""

    def __init__(self, environment: ClientEnvironment, process: Process, thread: SimulatedCallbacks) -> None:
        self._environment, self._process, self._thread = environment, process, thread
        self._interval_ms = 0
        self._rng = Random(f"callbacks {process.number}")

    def options(self, interval_ms: int) -> dict[str, Any]:
        """Returns the options of the consumer that are callbacks."""
        self._interval_ms = interval_ms
        return {
            "on_claim": lambda info: self._called("claim", info),
            "on_revoking": lambda info: self._called("revoking", info),
            "on_lost": lambda info, _: self._called("lost", info),
            "on_activated": lambda: self._called("activated"),
            "on_deactivated": lambda: self._called("deactivated"),
        }

    def _called(self, what: str, info: ClaimInfo | None = None) -> None:
        epoch = NONE if info is None else info.token.epoch
        runs = self._environment.evidence.callbacks.setdefault(self._process.number, [])
        runs.append(CallbackRun(what, epoch, self._environment.now_ms, self._thread.inside))
        if self._environment.healed:
            return
        draw = self._rng.random()
        if draw < BLOCKS:
            self._thread.blocked_ms = spread(self._rng, 1, BLOCKED_INTERVALS * self._interval_ms)
        if draw > 1 - RAISES:
            raise RuntimeError("the user's callback failed")
