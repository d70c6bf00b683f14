"""What the consumers of one Marshal share: its lock, clock, connections, workers and outbox. It decides nothing.

loop.py closes what is in the context. A part that decides something takes the lock as
`with context.outbox, context.lock`: records that were decided under the lock are sent once it is free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakSet

from marshal_py.client.values.options import RetentionPolicy
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

# --- What a call of a consumer waits for, as values. The call itself neither waits nor polls.
#
# A call is written once, as a generator (Steps) that yields a wait and continues with its result. Each front carries
# the waits out in its own way: `Consumer` on the user's thread, `AsyncConsumer` without blocking the event loop. A
# generator never holds the Marshal's lock at a `yield`. An exception of a wait ends the call; it is not thrown into the
# generator.


T = TypeVar("T")


class Poll(NamedTuple):
    """Waits up to `timeout_s` seconds for messages of the data source. Its result: chunks of `max_messages` at most."""

    timeout_s: float
    max_messages: int


class PollAhead(NamedTuple):
    """Asks the source for `max_messages` without a wait: what is there; nothing from a front that cannot."""

    max_messages: int


class Change(NamedTuple):
    """Waits `timeout_s` for a change of what the lock guards. `seen`: `Context.changes` at the last look; a newer one
    ends it."""

    timeout_s: float
    seen: int


Wait = Poll | PollAhead | Change
Steps = Generator[Wait, Any, T]


def complete(steps: Steps[T], carry_out: Callable[[Wait], Any]) -> T:
    """Runs a call to its end and returns its result. `carry_out` waits in the calling thread."""
    try:
        wait = next(steps)
        while True:
            # Without a variable: what was polled must be freed before the next is (PIECE_MESSAGES in settings.py).
            wait = steps.send(carry_out(wait))
    except StopIteration as end:
        result: T = end.value
        return result


def following(steps: Generator[T, Any, None], result: object) -> T | None:
    """Continues `steps` with the result of its last wait. Returns what it yields next, or None at its end."""
    try:
        return steps.send(result)
    except StopIteration:
        return None


LOGGER: Final = logging.getLogger("marshal_py")

# --- A daemon thread that runs tasks which wait for the network, in order, so that the loop never waits for it
#
# Each consumer has such a thread of its own: if one group's coordinator does not answer, other consumers can still
# start. A task that waits in its midst is a generator: it yields what it asks the cluster, or for how long it rests.
# The thread carries that out at once; the simulator lets time pass, in which the rest of the process goes on. Such a
# task holds no lock at a `yield`.


class Ask(NamedTuple):
    """Calls `question`, which asks the cluster and may wait. Its result is the answer; its error is the task's."""

    question: Callable[[], Any]


class Rest(NamedTuple):
    """Waits so many seconds, or until the worker ends."""

    seconds: float


TaskSteps = Generator[Ask | Rest, Any, None]


def next_step(steps: TaskSteps, step: Ask) -> Ask | Rest:
    """Asks the question of `step` and continues the task with the answer. Returns what the task yields next."""
    try:
        answer = step.question()
    except Exception as error:
        return steps.throw(error)
    return steps.send(answer)


class Tasks(Protocol):
    """Runs tasks one after the other, somewhere else than its callers: a Worker, or a simulated one."""

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        """Runs `task` later, unless one with the same `what` (its name, for the log) and `owner` waits."""

    def end(self) -> None:
        """Ends after the tasks that are waiting now; does not wait for that. Later tasks would never run."""

    @property
    def busy(self) -> bool:
        """Returns whether a task runs or waits."""

    @property
    def alive(self) -> bool: ...

    def close(self, timeout_s: float) -> None:
        """Ends after the tasks that are waiting now, and waits for that, at most `timeout_s` seconds."""


class Worker:
    """Runs tasks on a thread of its own. (The executors of the standard library end before `atexit` handlers run.)"""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[tuple[str, int], Callable[[], object]] | None] = queue.SimpleQueue()
        self._waiting: set[tuple[str, int]] = set()
        self._running = False
        self._ending = threading.Event()
        self._repeats = Repeats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, task: Callable[[], object], owner: object = None) -> None:
        key = what, id(owner)
        if key not in self._waiting:
            self._waiting.add(key)
            self._tasks.put((key, task))

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            key, task = item
            what = key[0]
            self._running = True  # before it is no longer waiting: `busy` must not see neither
            self._waiting.discard(key)
            try:
                steps = task()
                if isinstance(steps, Generator):
                    self._complete(steps)
                del steps
            except MarshalError as error:
                # The member's next tick asks again for what it still needs; this line says why that took longer.
                if self._repeats.due(f"{what}: {error}"):
                    LOGGER.warning("%s: %s", what, error, extra={"marshal_task": what})
            except BaseException as error:  # nothing may end this thread: others wait for its answers
                if self._repeats.due(f"{what}: {error!r}"):
                    LOGGER.exception("%s failed", what, extra={"marshal_task": what})
            self._running = False
            del item, task  # else the last task would keep its consumer in memory until the next comes

    def _complete(self, steps: TaskSteps) -> None:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Rest):
                    self._ending.wait(step.seconds)
                    step = next(steps)
                else:
                    step = next_step(steps, step)
        except StopIteration:
            pass

    def end(self) -> None:
        self._ending.set()
        self._tasks.put(None)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._running

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        self.end()
        self._thread.join(timeout_s)


# --- The thread that runs the user's callbacks, so that none of them runs where heartbeats are sent.
#
# Each Marshal has one, a daemon. Calls run one at a time, in the order in which they were submitted. An exception in
# a call, `SystemExit` included, is logged and has no other effect.


# Several times the partitions of the largest consumer; a callback that hangs must not use up all memory.
CALLS_WAITING_MAX: Final = 100_000


def run_callback(call: Callable[[], object], logger: logging.Logger = LOGGER) -> None:
    """Calls `call`, and logs what that raises."""
    try:
        call()
    except BaseException:  # sys.exit() too: it must not end the calls of every other consumer
        logger.exception("a callback failed")


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
                LOGGER.error("%d callbacks wait for one that does not return: new ones are dropped", self._waiting_max)
            self._full = True
            return
        self._full = False
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            run_callback(call)
            del call  # else the last call would keep its consumer in memory until the next comes

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the waiting calls, for `timeout_s` at most; inside a callback without a wait."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


# --- Writes the lines of the background thread, and those that are decided under the Marshal's lock, to the log of this
# process.
#
# Handlers of logging are the program's code: they may wait, for a pipe or a server, and raise. So they run on a thread
# of their own, "marshal-log", which begins with the first line.


LINES_WAITING_MAX: Final = 10_000  # behind a handler that does not return; later ones are dropped, and counted


class LogLines:
    """The lines of one Marshal, in order. They have the time and the thread of the call."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dropped = 0

    def enabled(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def write(
        self,
        level: int,
        text: str,
        *arguments: object,
        error: BaseException | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Has a line written soon. `error`: its traceback follows. Waits for nothing."""
        if not self.enabled(level):
            return
        file, number, function, _ = self._logger.findCaller(stacklevel=2)
        with_traceback = None if error is None else (type(error), error, error.__traceback__)
        record = self._logger.makeRecord(
            self._logger.name, level, file, number, text, arguments, with_traceback, function, extra
        )
        if self._closed:
            self._logger.handle(record)
        elif self._lines.qsize() >= LINES_WAITING_MAX:
            self._dropped += 1
        else:
            self._lines.put(record)
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="marshal-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (record := self._lines.get()) is not None:
            with contextlib.suppress(Exception):  # of a handler: logging itself passes over what emitting raises
                self._logger.handle(record)
            if self._dropped and self._lines.empty():
                self._tell_dropped()
            del record
        if self._dropped:
            self._tell_dropped()

    def _tell_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        with contextlib.suppress(Exception):
            self._logger.error("%d lines were left out, as a handler of logging did not return", dropped)

    def close(self, timeout_s: float) -> None:
        """Writes what waits, for `timeout_s` at most. What comes later is written by the thread that calls."""
        self._closed = True
        self._lines.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


# --- Keeps the log of a process short while something goes on failing: a cause is written once a minute, not per
# attempt.
#
# It decides nothing but that. One thread at a time may use an object of it.


REPEAT_S: Final = 60.0  # a log that begins later, or is cut, shows within a minute what is still wrong
CAUSES_MAX: Final = 100  # causes that are remembered; the oldest is forgotten
DURATION: Final = re.compile(r"\d+(\.\d+)?\s?(ms|s)\b")  # librdkafka's texts have some: each attempt has another one


class Repeats:
    """Remembers which causes were written, and when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._written: dict[str, float] = {}

    def due(self, text: str) -> bool:
        """Returns, and counts, whether to write the cause `text` now. Durations make no difference."""
        cause, now_s = DURATION.sub("", text), self._clock()
        written_s = self._written.get(cause)
        if written_s is not None and now_s - written_s < REPEAT_S:
            return False
        self._written.pop(cause, None)
        self._written[cause] = now_s
        if len(self._written) > CAUSES_MAX:
            del self._written[next(iter(self._written))]
        return True


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


POLL_S_MAX: Final = 0.1  # a waiting thread wakes up at least that often, as other threads may make a step due earlier


@dataclass(eq=False)
class Context:
    """What the loop, the consumers and the log maintenance of one Marshal share. Its background thread starts later."""

    coordination: CoordinationLog
    admin: ClusterAdmin
    clock: Clock
    servers: str  # for errors
    topic: str  # for coordination
    draw: Callable[[int], bytes]  # n -> n random bytes
    retention: RetentionPolicy
    callbacks: Calls
    monotonic: Callable[[], float] = time.monotonic  # seconds, by which calls wait
    new_worker: Callable[[str], Tasks] = Worker  # name -> what runs tasks that wait for the cluster
    logger: logging.Logger = LOGGER
    new_lock: Callable[[], Any] = threading.RLock

    def __post_init__(self) -> None:
        lock = self.new_lock()
        self.lock: AbstractContextManager[object] = lock
        self._held: Callable[[], bool] = lock._is_owned  # as threading.Condition asks it
        self.outbox: Outbox = Outbox(self.coordination, self._held)
        self._changes = Changes(lock, self.outbox)
        self.changed: threading.Condition = self._changes
        self.lines: LogLines = LogLines(self.logger)
        self.stalls: Stalls = Stalls()
        self.end_budget: EndBudget = EndBudget(self.monotonic)
        self.worker: Tasks = self.new_worker("marshal-worker")
        # Reads take seconds, and no consumer's start may wait for them.
        self.history_worker: Tasks = self.new_worker("marshal-history")
        self.broken: dict[int, CoordinationError] = {}  # logs that cannot be trusted any more, with the reason
        self.ended: BackgroundThreadEnded | None = None  # what every method raises once the thread is gone
        self.closed: bool = False  # the Marshal: what still waits, such as a join, waits in vain
        self.thread: threading.Thread | None = None  # the background thread
        self.heard_ms: int = self.clock.now().mono_ms  # when the newest record of a coordination log was read
        self.pid: int = os.getpid()
        watch_forks(self)

    def forked(self) -> None:
        """Makes all that needs the lock raise UsedAfterFork in a forked child, where it is called."""
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
        """Returns how many changes of what the lock guards there were. A Change waits for the next one."""
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
