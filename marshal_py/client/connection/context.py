"""What the parts of one Marshal share: its lock, clock, connections and workers. It decides nothing.

loop.py closes what is in the context. A part that decides something takes the lock as
`with context.outbox, context.lock`: records that were decided under the lock are sent once it is free.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, NamedTuple, NoReturn, Protocol
from weakref import WeakSet

from marshal_py.client.connection.threads import Calls, Tasks, Worker
from marshal_py.client.values.options import RetentionPolicy
from marshal_py.client.values.waits import Change, Steps, T, Wait, complete
from marshal_py.errors import (
    BackgroundThreadEnded,
    ClusterUnreachable,
    ConsumerClosed,
    CoordinationError,
    MarshalError,
    ReentrantCall,
    UsedAfterFork,
)
from marshal_py.transport.clock import mono_ms
from marshal_py.transport.ports import Clock, ClusterAdmin, CoordinationLog

# --- Hands records to the producer in the order in which they were decided, but not under the Marshal's lock
#
# They are put into the outbox under the lock. The thread that leaves the lock then produces them, so that librdkafka
# is never called under the lock. A thread that wants to produce while another one does so does not wait: the other
# one sends its records, too.


# Entries, as many as the producer queues. What is put into a full outbox is dropped; a later tick decides it again.
QUEUED_MAX: Final = 10_000


class Sending(NamedTuple):
    """Records of one log that are produced together. `refused(error)`, without the lock: one can never be sent."""

    log: int
    key: bytes
    values: Sequence[bytes]
    refused: Callable[[MarshalError], None]


class _Turn:
    """One turn to produce: the call of `send` that took it produces, and alone gives it up; a signal handler may call
    `send` inside."""

    __slots__ = ("thread",)

    def __init__(self, thread: int) -> None:
        self.thread = thread


class Outbox:
    """The records that were decided and not yet handed to the producer."""

    def __init__(self, log: CoordinationLog, held: Callable[[], bool]) -> None:
        """Makes an empty outbox. `held()` tells whether the thread that calls it holds the Marshal's lock."""
        self._log, self._held = log, held
        self._waiting: deque[Sending] = deque()
        self._turn: _Turn | None = None  # of the thread that produces
        self._turns = threading.RLock()  # held while a thread takes the turn

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, log: int, key: bytes, values: Sequence[bytes], refused: Callable[[MarshalError], None]) -> None:
        """Adds records for the next `send`, under the lock, which keeps their order. With QUEUED_MAX waiting they are
        dropped."""
        if len(self._waiting) < QUEUED_MAX:
            self._waiting.append(Sending(log, key, values, refused))

    def __enter__(self) -> None:
        """Does nothing: `with context.outbox, context.lock` sends on leaving what was decided under the lock."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waiting and not self._held():
            self.send()

    def send(self) -> None:
        """Produces what waits, without the lock or a wait for the broker. If another thread is producing, that one does
        it. A signal handler may run anywhere inside: its records, and the interrupted ones, are sent; if it raises
        (ctrl-C), another thread can produce."""
        while self._waiting:
            mine = _Turn(threading.get_ident())
            try:
                with self._turns:
                    if self._turn is None:
                        self._turn = mine
                turn = self._turn
                if turn is not None and turn.thread != mine.thread:
                    return  # that thread sends until nothing is waiting
                if turn is not None:
                    self._produce_all()
            finally:  # no function is called before it is done, so no signal can come between
                if self._turn is mine:
                    self._turn = None

    def _produce_all(self) -> None:
        while self._waiting:
            # Taken out afterwards: an exception (Ctrl-C) in between sends it twice rather than not at all.
            first = self._waiting[0]
            error = self._produce(first)
            if self._waiting and self._waiting[0] is first:
                self._waiting.popleft()
            if error is not None:
                first.refused(error)

    def _produce(self, sending: Sending) -> MarshalError | None:
        try:
            for value in sending.values:
                self._log.append(sending.log, sending.key, value)
        except MarshalError as error:
            return error
        return None


class Changes(threading.Condition):
    """Wakes threads that `wait`, with the lock entered once. Never enter the condition by `with`: that is Python code,
    and ctrl-C inside could leave the lock locked. `with context.outbox, context.lock` enters and leaves in C."""

    def __init__(self, lock: threading.RLock, outbox: Outbox) -> None:
        super().__init__(lock)
        self._outbox = outbox
        self.count: int = 0  # changes so far
        self.listeners: tuple[Callable[[], object], ...] = ()  # called at each change, with the lock held

    def notify(self, n: int = 1) -> None:
        self.count += 1
        super().notify(n)
        for listener in self.listeners:
            listener()

    def __enter__(self) -> NoReturn:
        raise AssertionError("enter the outbox and the lock: with context.outbox, context.lock")

    def wait(self, timeout: float | None = None) -> bool:
        """Waits as Condition.wait does. But if records are waiting in the outbox, it sends them and returns at once."""
        if not self._outbox:
            return super().wait(timeout)
        try:
            self.release()
            self._outbox.send()
        finally:
            self.acquire()
        return True


LOGGER: Final = logging.getLogger("marshal_py")
POLL_S_MAX: Final = 0.1  # a waiting thread wakes up at least that often, as other threads may make a step due earlier


class Context:
    """What the loop, the consumers and the log maintenance of one Marshal share."""

    coordination: CoordinationLog
    admin: ClusterAdmin
    clock: Clock
    servers: str
    topic: str
    draw: Callable[[int], bytes]
    retention: RetentionPolicy
    callbacks: Calls
    monotonic: Callable[[], float]
    new_worker: Callable[[str], Tasks]
    logger: logging.Logger

    def __init__(
        self,
        coordination: CoordinationLog,
        admin: ClusterAdmin,
        clock: Clock,
        servers: str,
        topic: str,
        draw: Callable[[int], bytes],
        retention: RetentionPolicy,
        callbacks: Calls,
        monotonic: Callable[[], float] = time.monotonic,
        new_worker: Callable[[str], Tasks] = Worker,
        logger: logging.Logger = LOGGER,
    ) -> None:
        """Makes a context whose background thread has not started. `servers`: for errors. `topic`: for coordination.
        `draw(n)`: n random bytes. `monotonic`: seconds, by which calls wait. `new_worker(name)`: what runs tasks that
        wait for the cluster."""
        self.coordination, self.admin, self.clock = coordination, admin, clock
        self.servers, self.topic, self.draw = servers, topic, draw
        self.retention, self.callbacks = retention, callbacks
        self.monotonic, self.new_worker, self.logger = monotonic, new_worker, logger
        lock = threading.RLock()
        self.lock: AbstractContextManager[object] = lock
        self._held: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # as threading.Condition asks it
        self.outbox: Outbox = Outbox(coordination, self._held)
        self._changes = Changes(lock, self.outbox)
        self.changed: threading.Condition = self._changes
        self.stalls: Stalls = Stalls()
        self.end_budget: EndBudget = EndBudget(monotonic)
        self.worker: Tasks = new_worker("marshal-worker")
        # Reads take seconds, and no consumer's start may wait for them.
        self.history_worker: Tasks = new_worker("marshal-history")
        self.broken: dict[int, CoordinationError] = {}  # logs that cannot be trusted any more, with the reason
        self.ended: BackgroundThreadEnded | None = None  # what every method raises once the thread is gone
        self.closed: bool = False  # the Marshal: what still waits, such as a join, waits in vain
        self.thread: threading.Thread | None = None  # the background thread
        self.heard_ms: int = clock.now().mono_ms  # when the newest record of a coordination log was read
        self.pid: int = os.getpid()
        watch_forks(self)

    def forked(self) -> None:
        """Makes all that needs the lock raise UsedAfterFork in a forked child, where it is called (context.py)."""
        self.lock = self.changed = ForkedLock("Marshal", self.pid)
        self.outbox = Outbox(self.coordination, self._held)  # the parent sends what is waiting

    def check_call(self, what: str, verb: str, *, waits: bool = False) -> None:
        """Each public method calls this first. `what`, `verb`: object and method, for errors. `waits`: for the
        background thread, so not on it (but on that of callbacks). Raises UsedAfterFork, ReentrantCall."""
        if os.getpid() != self.pid:
            raise UsedAfterFork(what, self.pid, os.getpid())
        if self._held():
            raise ReentrantCall(verb, "a call of the same thread that holds the Marshal's lock")
        if waits and threading.current_thread() is self.thread:
            raise ReentrantCall(verb, "the background thread of the Marshal, which sends the heartbeats")

    def check_alive(self) -> None:
        """Raises BackgroundThreadEnded if the background thread has ended."""
        if self.ended is not None:
            raise self.ended

    @property
    def changes(self) -> int:
        """Returns how many changes of what the lock guards there were. A Change waits for the next one (waits.py)."""
        return self._changes.count

    def listen(self, listener: Callable[[], object]) -> None:
        """Has `listener` called at each change, with the lock held: it may neither wait nor take a lock."""
        with self.lock:
            self._changes.listeners = (*self._changes.listeners, listener)

    def await_change(self, change: Change) -> None:
        """Waits in the calling thread, and sends what was decided before."""
        with self.outbox, self.lock:
            if self.changes == change.seen:
                self.changed.wait(change.timeout_s)

    def wait_for(self, condition: Callable[[], bool], what: str, deadline: float, log: int) -> None:
        """Waits in the calling thread until `condition` returns true, as `until` says."""
        self.complete(self.until(condition, what, deadline, log))

    def complete(self, steps: Steps[T]) -> T:
        """Completes a call that waits for changes alone, in the calling thread. Returns its result."""
        return complete(steps, self.carry_out)

    def carry_out(self, wait: Wait) -> None:
        assert isinstance(wait, Change)
        self.await_change(wait)

    def until(self, condition: Callable[[], bool], what: str, deadline: float, log: int) -> Steps[None]:
        """Waits until `condition`, called under the lock, is true. `what`: for errors. `deadline`: monotonic seconds,
        then ClusterUnreachable. Raises what broke coordination partition `log` or refuses this client,
        BackgroundThreadEnded, and ConsumerClosed after a close."""
        self.check_alive()  # a caller that reads to the end must not get what was read before the thread ended
        while True:
            with self.outbox, self.lock:
                if condition():
                    return
                self.check_alive()
                if self.closed:
                    raise ConsumerClosed("Marshal", "it was closed")
                if log in self.broken:
                    raise self.broken[log]
                if (refused := self.coordination.refused()) is not None:
                    raise refused
                left_s = deadline - self.monotonic()
                if left_s <= 0:
                    raise ClusterUnreachable(self.servers, what, self.coordination.waiting_for() or "no answer in time")
                seen = self.changes
            yield Change(min(left_s, POLL_S_MAX), seen)

    def stalled_ms(self) -> int:
        """Returns for how many ms the background thread has not run lately. A test's clock does not change it."""
        return self.stalls.recent_ms(mono_ms())

    def waiting_for(self) -> str:
        """Returns, for people, what the connection waits for, or "". The client library says whether there is a
        problem."""
        if self.ended is not None:
            return str(self.ended)
        problem = self.coordination.waiting_for()
        if not problem:
            return ""
        silent_s = (self.clock.now().mono_ms - self.heard_ms) / 1000
        return f"an answer of {self.servers}: no record has come from it for {silent_s:.0f} s ({problem})"


# --- One budget of time for all ends of a Marshal: the stops and drains of its consumers, and its own `close`.
#
# While the cluster does not answer, each of them waits in vain. Together they must stay well below the 30 s that
# Kubernetes gives a container, so what one of them has used up the next ones do not get again.


END_TIMEOUT_S: Final = 20.0  # of all ends together while the cluster does not answer
END_S_MIN: Final = 1.0  # each gets so much: many round trips, if the cluster answers again


class EndBudget:
    """Counts what the ends of one Marshal have used, until one of them is answered. Needs no lock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until: float | None = None  # monotonic

    def deadline(self, timeout_s: float) -> float:
        """Returns until when (monotonic, seconds) an end that may take `timeout_s` seconds may wait for the cluster."""
        now = self._monotonic()
        if self._until is None or now >= self._until + END_TIMEOUT_S:
            self._until = now + max(END_TIMEOUT_S, timeout_s)
        return now + min(timeout_s, max(END_S_MIN, self._until - now))

    def answered(self) -> None:
        """Notes that an end was answered: the next one has all its time."""
        self._until = None


# --- Makes the Marshals of a parent process unusable in a forked child: their locks raise UsedAfterFork there.
#
# The threads and sockets of a Marshal do not exist in a child, and a thread that is gone may have held the lock.
# Since the lock itself raises the error, no method has to check first in which process it runs, which would slow down
# acks.


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


# --- Measures how long the background thread did not run although it should have. It decides nothing.
#
# The thread says until when it waits, and when it woke. The time between is a stall: another thread kept the
# interpreter's lock inside a call into C, the process was stopped, or the machine had no processor for it.


STALL_MS_MIN: Final = 200  # a busy machine is late by less than this
RECENT_MS: Final = 2_000  # a lease that ends longer after a stall has ended for another reason


class Stalls:
    """Counts the stalls of one thread; any thread may read the counts. Times are of this machine's monotonic clock."""

    def __init__(self) -> None:
        self.total_ms: int = 0
        self.longest_ms: int = 0
        self._due_ms: int | None = None  # until when it waits; None while it runs
        self._last_ms = 0
        self._ended_ms = -RECENT_MS

    def waits(self, until_ms: int) -> None:
        self._due_ms = until_ms

    def woke(self, now_ms: int) -> None:
        assert self._due_ms is not None
        late_ms, self._due_ms = now_ms - self._due_ms, None
        if late_ms >= STALL_MS_MIN:
            self.total_ms += late_ms
            self.longest_ms = max(self.longest_ms, late_ms)
            self._last_ms, self._ended_ms = late_ms, now_ms

    def recent_ms(self, now_ms: int) -> int:
        """Returns how many ms the newest stall has lasted, if it goes on or ended less than RECENT_MS ago; else 0."""
        due_ms = self._due_ms
        if due_ms is not None and now_ms - due_ms >= STALL_MS_MIN:
            return now_ms - due_ms
        return self._last_ms if now_ms - self._ended_ms < RECENT_MS else 0
