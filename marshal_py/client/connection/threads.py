"""A daemon thread that runs tasks which wait for the network, in order, so that the loop (loop.py) never waits for it.

Each consumer has such a thread of its own: if one group's coordinator does not answer, other consumers can still start.
A task that waits in its midst is a generator: it yields what it asks the cluster, or for how long it rests. The thread
carries that out at once; the simulator lets time pass, in which the rest of the process goes on. Such a task holds no
lock at a `yield`.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from marshal_py.client.values.info import ClaimInfo
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.errors import MarshalError
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.member.member_state import Ready

logger: Final = logging.getLogger("marshal_py")


class Ask(NamedTuple):
    """Calls `question`, which asks the cluster and may wait. Its result is the answer; its error is the task's."""

    question: Callable[[], Any]


class Rest(NamedTuple):
    """Waits so many seconds, or until the worker ends."""

    seconds: float


TaskSteps = Generator[Ask | Rest, Any, None]


def following(steps: TaskSteps, step: Ask) -> Ask | Rest:
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
                    logger.warning("%s: %s", what, error, extra={"marshal_task": what})
            except BaseException as error:  # nothing may end this thread: others wait for its answers
                if self._repeats.due(f"{what}: {error!r}"):
                    logger.exception("%s failed", what, extra={"marshal_task": what})
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
                    step = following(steps, step)
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
        """Ends the thread after the waiting calls, for `timeout_s` at most; inside a callback without a wait."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
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


# --- Which callbacks of one consumer's options a tick of its member leads to, in which order.
#
# They run on the thread of `Callbacks`. A consumer is active while it owns a partition.


class UserCallbacks:
    """Submits the callbacks of one consumer, and knows whether its user was told that it is active."""

    def __init__(
        self,
        options: ConsumerOptions,
        submit: Callable[[Callable[[], object]], None],
        claim_info: Callable[[Claim], ClaimInfo],
    ) -> None:
        self._options, self._submit, self._claim_info = options, submit, claim_info
        self._active = False

    def notify(self, ready: Ready, active: bool) -> None:
        """Submits what a tick led to. `active`: whether the consumer owns a partition after it."""
        options, submit = self._options, self._submit
        if options.on_lost is not None:
            for claim, reason in ready.lost:
                if claim.told:
                    submit(partial(options.on_lost, self._claim_info(claim), reason))
        if active != self._active:
            self._active = active
            changed = options.on_activated if active else options.on_deactivated
            if changed is not None:
                submit(changed)
        if options.on_claim is not None:
            for claim in ready.claimed:
                submit(partial(options.on_claim, self._claim_info(claim)))
        if options.on_revoking is not None:
            for claim in ready.revoking:
                submit(partial(options.on_revoking, self._claim_info(claim)))
