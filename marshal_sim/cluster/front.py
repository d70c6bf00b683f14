"""The third front of a consumer, beside threads and asyncio: carries out what its calls wait for, in virtual time.

Each of these waits may be where the call is cancelled, as the task is that awaits it: before anything has come, or when
something has come and the task has not run since. Only a PollAhead is none, at which asyncio waits for nothing.

A call is a generator of the shipped client that yields waits (client/connection.py). Threads and event loops cut a
long wait into slices, for signals and for what other threads do without a word. Here a wait lasts until something has
happened in the process, or for a share of a heartbeat interval at most: nothing happens in between that a call could
notice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

from marshal_py.client.connection import Change, Context, PollAhead, Wait
from marshal_py.client.delivery.buffers import Reserved
from marshal_py.errors import MarshalError
from marshal_sim.cluster.busy_loops import BusyLoop
from marshal_sim.cluster.locks import Known, Locks
from marshal_sim.cluster.process import Process
from marshal_sim.cluster.source import SimulatedSource

SLICES: Final = 6  # a wait in which nothing happens ends so often per interval
WAITS_AT_ONCE_MAX: Final = 10_000  # waits that one call may carry out without any time between: more is an endless loop

T = TypeVar("T")
CallSteps = Generator[Wait | Reserved, Any, Any]


class Call:
    """Stands for one call of the user that runs. Once it calls `ended(result, error)`, at its end, or `cancelled()`."""

    __slots__ = ("cancelled", "due_ms", "ended", "name", "reserved", "steps", "wait")

    def __init__(
        self,
        steps: CallSteps,
        ended: Callable[[Any, MarshalError | None], None],
        reserved: Callable[[Call, Reserved], None] | None,
        cancelled: Callable[[], None] | None,
    ) -> None:
        self.steps, self.ended, self.reserved, self.cancelled = steps, ended, reserved, cancelled
        self.name: str = getattr(steps, "__name__", "")  # of the function that makes the steps
        self.wait: Wait | None = None
        self.due_ms: int = 0


class Front:
    """Runs the calls of one consumer's user, any number at a time: each stands for a thread of the program."""

    def __init__(
        self, process: Process, context: Context, source: SimulatedSource, interval_ms: int, locks: Locks | None
    ) -> None:
        self._process, self._context, self._source, self._locks = process, context, source, locks
        self._idle_ms = interval_ms // SLICES
        self._waiting: list[Call] = []
        self._woken = False

    def begin(
        self,
        steps: CallSteps,
        ended: Callable[[Any, MarshalError | None], None],
        reserved: Callable[[Call, Reserved], None] | None = None,
        cancelled: Callable[[], None] | None = None,
    ) -> Call:
        """Begins a call. `reserved(call, messages)` is called when an iteration has some; then `go_on` continues it.

        `cancelled()`: called instead of `ended` when the call is cancelled at a wait; None if it never is.
        """
        call = Call(steps, ended, reserved, cancelled)
        self.go_on(call)
        return call

    def go_on(self, call: Call, result: Any = None) -> None:
        """Continues a call with the result of its wait, until it waits again or ends."""
        for _ in range(WAITS_AT_ONCE_MAX):
            try:
                wait = self.run(call.steps.send, result)
            except StopIteration as end:
                call.ended(end.value, None)
                return
            except MarshalError as error:
                call.ended(None, error)
                return
            if isinstance(wait, Reserved):
                assert call.reserved is not None
                call.reserved(call, wait)
                return
            if not isinstance(wait, PollAhead) and self.cancels(call):
                return
            result = self._at_once(wait)
            if result is None:
                self._wait(call, wait)
                return
            result = result or None if isinstance(wait, Change) else result
        raise BusyLoop(f"a call of consumer {self._process.number} waits again and again, and no time passes")

    def run(self, code: Callable[..., T], *arguments: Any) -> T:
        """Runs `code` in a thread of the user, which may be stopped where it leaves a lock."""
        return code(*arguments) if self._locks is None else self._locks.run(code, *arguments)

    def gate(self) -> Known | None:
        """Returns what the gate knew when that thread last left a lock; None if none is ever stopped there."""
        return None if self._locks is None else self._locks.left

    def _at_once(self, wait: Wait) -> Any:
        """Returns the result of a wait that is over already; None if it is not."""
        if isinstance(wait, Change):
            over = wait.timeout_s <= 0 or self._context.changes != wait.seen
            return () if over else None
        chunks = self._source.poll(0.0, wait.max_messages)
        return chunks if chunks or isinstance(wait, PollAhead) or wait.timeout_s <= 0 else None

    def _wait(self, call: Call, wait: Wait) -> None:
        assert not isinstance(wait, PollAhead)  # it does not wait
        call.wait = wait
        self._waiting.append(call)
        self._call_at(call, max(round(wait.timeout_s * 1000), self._idle_ms))

    def _call_at(self, call: Call, delay_ms: int) -> None:
        environment = self._process.environment
        call.due_ms = environment.now_ms + delay_ms
        environment.schedule(delay_ms, self._process, self._timed_out, call)

    def _timed_out(self, call: Call) -> None:
        if call.wait is not None and call.due_ms <= self._process.environment.now_ms:
            self._resume(call)
            self._process.ran()

    def _resume(self, call: Call) -> None:
        wait, call.wait = call.wait, None
        assert wait is not None
        self._waiting.remove(call)
        if self.cancels(call):
            return
        assert not isinstance(wait, PollAhead)
        result = None if isinstance(wait, Change) else self._source.poll(0.0, wait.max_messages)
        environment = self._process.environment
        if held_ms := environment.network_faults.thread_ms():
            environment.schedule(held_ms, self._process, self._go_on_late, (call, result))
        else:
            self.go_on(call, result)

    def _go_on_late(self, state: tuple[Call, Any]) -> None:
        """Continues a call whose thread was stopped after its wait."""
        self.go_on(*state)
        self._process.ran()

    # --- what happens meanwhile

    def cancel(self) -> None:
        """Cancels a call at its present wait, as asyncio cancels the task that awaits it."""
        calls = [call for call in self._waiting if call.cancelled is not None]
        if calls:
            call = calls[int(self._process.environment.rng.random() * len(calls))]
            self._waiting.remove(call)
            call.wait = None
            self._cancel(call)

    def cancels(self, call: Call) -> bool:
        """Cancels a call that is at a wait, or between two messages, if the seed says so. Returns whether it did."""
        if call.cancelled is None or not self._process.environment.network_faults.cancels(call.name):
            return False
        self._cancel(call)
        return True

    def _cancel(self, call: Call) -> None:
        call.steps.close()
        assert call.cancelled is not None
        call.cancelled()

    def look(self) -> None:
        """Notes what has happened in the process: calls that wait for it will go on."""
        if self._waiting and not self._woken and any(map(self._over, self._waiting)):
            self._woken = True
            self._process.environment.schedule(0, self._process, self._wake)

    def _over(self, call: Call) -> bool:
        wait = call.wait
        if isinstance(wait, Change):
            return self._context.changes != wait.seen
        return self._source.has_messages

    def _wake(self, _: None) -> None:
        self._woken = False
        for call in [*self._waiting]:
            if call.wait is not None and self._over(call):
                self._resume(call)
        self._process.ran()

    def poke(self) -> None:
        """Notes that something has happened that a waiting call sees at the end of its slice, such as an ack."""
        for call in self._waiting:
            assert call.wait is not None
            assert not isinstance(call.wait, PollAhead)
            slice_ms = round(call.wait.timeout_s * 1000)
            if call.due_ms > self._process.environment.now_ms + slice_ms:
                self._call_at(call, slice_ms)
