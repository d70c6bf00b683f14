"""One `process` of either front: which message a handler begins with, what its answer does, what happens at a move.

`Process` has threads for the handlers, `AsyncProcess` tasks. Both receive through a `consume`, whose handler puts each
message into its lane (lanes.py). So the gate is checked when a message comes, and again when its handler begins. What
waits in lanes is not delivered yet (PROTOCOL.md D17): it counts no delivery, not against `handler_timeout_s`, and no
Release waits for it. It stays in its lane while its partition is about to move, and goes on if it does not.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, TypedDict

from marshal_py.client.connection import ForkedLock, watch_forks
from marshal_py.client.consuming import AWAIT_IT, Consuming, report_failure
from marshal_py.client.delivery.delivery_queue import GATE_MS
from marshal_py.client.delivery.prefetch import Taker
from marshal_py.client.messages.message import (
    Message,
    begin,
    claim_of,
    is_done,
    put_back,
    queue,
    raw_key,
    waiting_again,
    waits_s,
)
from marshal_py.client.process.lanes import AnyMessage, Lane, LaneKey, Lanes, comes_alone, first_of
from marshal_py.client.receiving import Receiving
from marshal_py.client.values.info import HandlerTimes, LaneInfo, ProcessStats, oldest_unfinished_ms
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.client.values.requests import check_timeout
from marshal_py.errors import InvalidOption, NeedsAtLeastOnce
from marshal_py.protocol.claims import AtLeastOnce, Claim, ClaimPhase
from marshal_py.protocol.wire.identity import Instant
from marshal_py.protocol.wire.progress import BITMAP_OFFSETS_MAX
from marshal_py.transport.serialization import K_co, V_co, check_plain

# --- What a handler may raise, and after which delay a message is tried again


Order = Literal["key", "partition"]
Unkeyed = Literal["parallel", "ordered"]
AfterDeadLetter = Literal["continue", "key"]

DELIVERIES: Final = 5  # before a message becomes a dead letter, unless somebody says otherwise (KIP-932's default)
DELAY_S_MAX: Final = 86_400.0  # of one retry: that of `Message.nak`


class Reject(Exception):
    """A handler raises it of `Consumer.process`: this message is never to be tried again.

    It goes to the dead-letter topic, or, without one, an advisory `terminated` keeps the reason. `reason`: for people.
    Raises InvalidOption.
    """

    def __init__(self, reason: str = "") -> None:
        if not isinstance(reason, str):
            raise InvalidOption("reason", reason, "a text for people, such as str(error)")
        super().__init__(reason)
        self.reason: str = reason


class Retry(Exception):
    """Says when a message is tried again: as the option `retry` for all, raised by a handler for its message.

    The n-th delivery is followed by a delay of `first_s * factor ** (n - 1)` seconds, at most `max_s`, which differs at
    random by the share `jitter` in either direction. `after_s`: this delay instead; for a handler that knows. After
    `deliveries` of them a message goes to the dead-letter topic, or ends with an advisory `terminated`; None: after the
    consumer's `max_deliver`, or 5 with a `dead_letter_topic`, else never.

    Raises InvalidOption.
    """

    def __init__(
        self,
        first_s: float = 0.5,
        factor: float = 2.0,
        max_s: float = 60.0,
        jitter: float = 0.2,
        deliveries: int | None = None,
        *,
        after_s: float | None = None,
    ) -> None:
        _check("first_s", first_s, 0.0, DELAY_S_MAX)
        _check("factor", factor, 1.0, 100.0)
        _check("max_s", max_s, 0.0, DELAY_S_MAX)
        _check("jitter", jitter, 0.0, 1.0)
        if after_s is not None:
            _check("after_s", after_s, 0.0, DELAY_S_MAX)
        whole = isinstance(deliveries, int) and not isinstance(deliveries, bool)
        if deliveries is not None and not (whole and deliveries >= 1):
            raise InvalidOption("deliveries", deliveries, "a whole number of at least 1, or None")
        super().__init__("not now" if after_s is None else f"not before {after_s:g} s")
        self.first_s: float = first_s
        self.factor: float = factor
        self.max_s: float = max_s
        self.jitter: float = jitter
        self.deliveries: int | None = deliveries
        self.after_s: float | None = after_s

    def __reduce__(self) -> tuple[object, ...]:
        options: dict[str, Any] = {"deliveries": self.deliveries, "after_s": self.after_s}
        return partial(Retry, self.first_s, self.factor, self.max_s, self.jitter, **options), ()

    def delay_s(self, delivery_count: int, draw: Callable[[], float]) -> float:
        """Returns how many seconds to wait after so many deliveries. `draw()`: a random number in [0, 1)."""
        if self.after_s is not None:
            return self.after_s
        power = min(delivery_count - 1, 64)  # more would pass the bound, and overflow
        delay_s = min(self.max_s, self.first_s * self.factor**power)
        return min(DELAY_S_MAX, delay_s * (1 + self.jitter * (2 * draw() - 1)))


def _check(name: str, value: object, least: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= most:  # type: ignore[operator]
        raise InvalidOption(name, value, f"a number from {least:g} to {most:g}")


# --- What `process` was asked for, checked


WINDOW: Final = BITMAP_OFFSETS_MAX  # then the log can name all that is finished (E10)
WINDOW_MAX: Final = 100_000
WORKERS: Final = 16  # threads, by default
WORKERS_MAX: Final = 10_000
BATCH_MAX: Final = 10_000  # messages: more take longer to handle than to fetch
BATCH_WAIT_S_MAX: Final = 3_600.0
TIMEOUT_S_MAX: Final = 2_000_000.0  # of a handler, 23 days: poll() takes no more milliseconds

Executor = Literal["threads", "processes"]


@dataclass(frozen=True)
class Batches:
    """Has a handler take lists: of up to `size` messages, once so many wait, or `wait_s` seconds after the first.

    Raises InvalidOption.
    """

    size: int
    wait_s: float = 0.1

    def __post_init__(self) -> None:
        _check_count("size", self.size, BATCH_MAX)
        _check("wait_s", self.wait_s, 0.0, BATCH_WAIT_S_MAX)


Outcomes = Sequence[BaseException | None] | None
BatchHandler = Callable[[list[Message[K_co, V_co]]], Outcomes]
AsyncHandler = Callable[[Message[K_co, V_co]], Awaitable[object]]
AsyncBatchHandler = Callable[[list[Message[K_co, V_co]]], Awaitable[Outcomes]]


class ProcessKeywords(TypedDict, Generic[K_co, V_co], total=False):
    """The options of a `process` which both fronts share, and which do not decide what its handler takes."""

    workers: int | None
    order: Order | None
    key: Callable[[Message[K_co, V_co]], Hashable] | None
    unkeyed: Unkeyed
    retry: Retry | None
    retry_on: type[Exception] | Iterable[type[Exception]]
    after_dead_letter: AfterDeadLetter
    window: int


@dataclass(frozen=True)
class Settings:
    """What `process` was asked for, checked. `deliveries`: after so many a failing message ends; None: never."""

    workers: int
    order: Order | None
    key: Callable[[AnyMessage], Hashable] | None
    unkeyed: Unkeyed
    retry: Retry
    retry_on: tuple[type[BaseException], ...]
    after_dead_letter: AfterDeadLetter
    window: int
    deliveries: int | None
    batch: Batches | None


def check_settings(
    group: str,
    options: ConsumerOptions,
    workers: int,
    order: Order | None,
    key: Callable[[AnyMessage], Hashable] | None,
    unkeyed: Unkeyed,
    retry: Retry | None,
    retry_on: type[BaseException] | Iterable[type[BaseException]],
    after_dead_letter: AfterDeadLetter,
    window: int,
    batch: Batches | None = None,
) -> Settings:
    """Returns the settings of a `process`. Raises InvalidOption, NeedsAtLeastOnce."""
    if options.delivery == "at_most_once":
        raise NeedsAtLeastOnce("process", group)
    _check_count("workers", workers, WORKERS_MAX)
    _check_count("window", window, WINDOW_MAX)
    if batch is not None and not isinstance(batch, Batches):
        raise InvalidOption("batch", batch, "Batches(100, wait_s=0.1), or None for one message at a time")
    _check_choice("order", order, ("key", "partition", None))
    _check_choice("unkeyed", unkeyed, ("parallel", "ordered"))
    _check_choice("after_dead_letter", after_dead_letter, ("continue", "key"))
    if order != "key" and unkeyed == "ordered":
        raise InvalidOption("unkeyed", unkeyed, 'left out, or together with order="key"')
    if order is None and after_dead_letter == "key":
        raise InvalidOption(
            "after_dead_letter", after_dead_letter, "left out: with order=None no message follows another"
        )
    if key is not None and (order != "key" or not callable(key)):
        raise InvalidOption("key", key, 'a function of a message that returns its key, together with order="key"')
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidOption("retry", retry, "a Retry(...), or None for its defaults")
    retry = Retry() if retry is None else retry
    one = isinstance(retry_on, type | str) or not isinstance(retry_on, Iterable)
    kinds: tuple[type[BaseException], ...] = (retry_on,) if one else tuple(retry_on)  # type: ignore[assignment, arg-type]
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidOption("retry_on", kind, "a class of exceptions below Exception, or several")
    deliveries = retry.deliveries or options.max_deliver
    if options.dead_letter_topic is not None:  # there the consumer itself ends messages after `max_deliver`
        deliveries = min(deliveries or DELIVERIES, options.max_deliver or sys.maxsize)
    return Settings(workers, order, key, unkeyed, retry, kinds, after_dead_letter, window, deliveries, batch)


def check_takes_one(handler: object, kind: str = "a function") -> None:
    """Raises InvalidOption if it cannot be called with one message. `kind`: what it must be."""
    rule = f"{kind} of one message, or with batch= of a list of them"
    if not callable(handler):
        raise InvalidOption("handler", handler, rule)
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # what is not written in Python may not tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise InvalidOption("handler", handler, rule) from error


def check_handler(handler: object) -> None:
    """Raises InvalidOption if no thread and no process can call it."""
    check_takes_one(handler)
    check_plain("handler", handler, AWAIT_IT)


def check_executor(executor: Executor, timeout_s: float | None) -> None:
    """Raises InvalidOption if nothing can handle messages like that."""
    _check_choice("executor", executor, ("threads", "processes"))
    if timeout_s is None:
        return
    if executor == "threads":
        rule = (
            'left out: nothing can end a thread; executor="processes" has it, and the consumer of marshal_py.aio; and'
            " see handler_timeout_s"
        )
        raise InvalidOption("timeout_s", timeout_s, rule)
    check_handler_timeout(timeout_s)


def check_handler_timeout(timeout_s: float) -> None:
    """Raises InvalidOption if no handler can be given so long."""
    rule = f"a number of seconds above 0, up to {TIMEOUT_S_MAX:g}, or None"
    check_timeout(timeout_s, rule)
    if timeout_s == 0 or math.inf > timeout_s > TIMEOUT_S_MAX:
        raise InvalidOption("timeout_s", timeout_s, rule)


def _check_count(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidOption(name, value, f"a whole number from 1 to {most}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise InvalidOption(name, value, "one of " + ", ".join(map(repr, choices)))


def check_returned(result: object) -> None:
    """Raises InvalidOption if a handler that returned this has not handled its message."""
    rule = ""
    if isinstance(result, BaseException):
        rule = "None: it acks its message. To have it tried again or ended, raise Retry, Reject or another exception"
    elif inspect.iscoroutine(result):
        result.close()  # Python would warn that nobody has awaited it
        rule = f"None, with its work done, not a coroutine; {AWAIT_IT}"
    elif inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        rule = "None, with its work done: nobody goes on with what it returned"
    elif isinstance(result, Future):
        rule = "None, with its work done: wait for the future's result() in the handler"
    if rule:
        raise InvalidOption("what the handler returned", result, rule)


def outcomes_of(result: object, count: int) -> Sequence[BaseException | None]:
    """Returns what a handler of batches says of each of its `count` messages. Raises InvalidOption."""
    if result is None:
        return [None] * count
    rule = f"None, or a list of {count} outcomes, one per message: None, Retry(...), Reject(...) or another exception"
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise InvalidOption("what the handler returned", result, rule)
    if len(result) != count:
        raise InvalidOption("what the handler returned", f"{len(result)} outcomes", rule)
    for outcome in result:
        if outcome is not None and not isinstance(outcome, BaseException):
            raise InvalidOption("an outcome", outcome, rule)
    return result


# --- The messages of one process


LOOK_S: Final = 0.05  # between two looks for claims that end
SHUT_S: Final = 0.01  # before a handler is tried again whose message came, and whose gate has shut since
HELD_UP_S: Final = 10.0  # how long a message holds up its position before that is reported; then twice as long, ...
HELD_UP_LOOK_S: Final = 1.0  # between two looks for such messages
HOLDS: Final = {"working": "a handler has it", "retrying": "it is tried again later"}
STEPS: Final = 8  # in so many parts of `window` messages come, while enough of them wait for their handlers
KEY_CHARS_MAX: Final = 80  # of a key in a report
IDLE_S: Final = 0.5  # how long a worker waits for a message before it looks whether it must end
FOLLOWS: Final = "it follows a dead letter of its key"


def _text_of(key: Hashable) -> str:
    """Returns a key as text. Of what is not Python's own only its type: its `repr` is the user's code."""
    plain = (str, bytes, int, float, bool, type(None))
    values = key if type(key) is tuple else (key,)
    return repr(key) if all(type(one) in plain for one in values) else type(key).__name__


class Processing(Generic[K_co, V_co]):
    """The messages of one `process`, and what both fronts do with them. `changed` guards the lanes. Who needs the
    Marshal's lock, too, takes that first: the queue asks `end_of` under it."""

    def __init__(self, receiving: Receiving, settings: Settings, draw: Callable[[], float] = random.random) -> None:
        """Prepares a process of the consumer that receives by `receiving`. `draw()`: a random number in [0, 1)."""
        driver, queue = receiving.driver, receiving.queue
        self.settings = settings
        lock = driver.context.new_lock()
        self._lock: AbstractContextManager[object] = lock  # of `changed`; entered in C
        self.changed: threading.Condition = threading.Condition(lock)
        self._closing: AbstractContextManager[object] = driver.context.new_lock()  # held by `close` alone
        self.over: bool = False
        self.draining: bool = False
        self._halted = False
        self.error: BaseException | None = None  # of the handler or the key function, which ends it
        self._driver, self._queue, self._draw = driver, queue, draw
        self._context, self._monotonic = driver.context, driver.context.monotonic
        self._lanes = Lanes()
        self._worked_at = self._monotonic()
        self._share_bytes, self._timeout_s = driver.options.prefetch_bytes, driver.options.handler_timeout_s
        # Until when a claim may deliver, in ns of the boot clock, and when that was found.
        self._gates: dict[Claim, tuple[int, Instant]] = {}
        self._begun_s: dict[int, float] = {}  # by id of a message that a handler has: since when
        self._at_work_s: dict[tuple[int, int], float] = {}  # by epoch and offset: when its handler last said so
        self._finished = self._retried = self._ended = 0
        self._terminated: set[int] = set()  # by id: messages that work, whose handler has called `term`
        self._counted_out: deque[AnyMessage] = deque()  # dead letters before they were delivered; not yet marked
        self._times = HandlerTimes()
        # By claim: the offset at its position, since when it is there, the age at which that is reported next.
        self._held_up: dict[Claim, tuple[int, int, float]] = {}
        self._held_up_look_s = self._monotonic() + HELD_UP_LOOK_S
        self.refused: dict[int, str] = {}  # by thread: why its worker process cannot be started
        batch = settings.batch
        self._of_batches = (1, 0.0) if batch is None else (batch.size, batch.wait_s)
        self._batches = 0  # in work
        self._taking = False  # a worker takes the next one
        self._filling_since: float | None = None  # since when messages wait for the next batch to be full
        self._pid = os.getpid()
        watch_forks(self)
        self._before: Taker | None = None  # what bounded the consumer when this began

    def forked(self) -> None:
        """Makes what asks the lanes raise UsedAfterFork in a forked child process. Called in the child."""
        self._lock = self.changed = ForkedLock("Process", self._pid)

    def _lane_of(self, message: AnyMessage) -> LaneKey:
        tp, settings = claim_of(message).tp, self.settings
        if settings.order == "partition":
            return LaneKey(tp)
        key = None
        if settings.order == "key":
            key = raw_key(message) if settings.key is None else settings.key(message)
            if key is not None or settings.unkeyed == "ordered":
                return LaneKey(tp, key)
        return LaneKey(tp, None, message.offset)

    # --- receiving

    def attach(self) -> None:
        """Begins to bound what the consumer delivers, and has lanes wait for what was given back before."""
        with self._context.lock:
            again = [
                message
                for claim in self._driver.member.claims.values()
                for message in waiting_again(claim, self._queue.delivery)
            ]
        keyed = [(self._lane_of(message), message) for message in again]
        with self._lock:
            for key, message in keyed:
                self._lanes.add_parked(key, message)
        with self._context.lock:  # last: what the key function raises leaves the consumer as it was
            self._before, self._queue.window.process = self._queue.window.process, self

    def detach(self, *, refused: bool = False) -> None:
        """Bounds nothing any more. `refused`: another `process` runs, which bounds again what it did before."""
        with self._context.lock:
            if self._queue.window.process is self:  # else a later `process` has begun
                self._queue.window.process = self._before if refused else None

    def end_of(self, claim: Claim) -> int:
        """Returns the offset below which messages of a claim may come. Called with the Marshal's lock held. It is
        `window` above the lowest unfinished message, so that a heartbeat can name all that is finished between; in
        steps while lanes are ready for all workers, as one message takes as long to receive as hundreds. Nothing comes
        while the claim's share of `prefetch_bytes` waits in lanes, nor while anything of a careful claim (D11) does."""
        tracker, held = claim.tracker, self._lanes.held.get(claim)
        assert isinstance(tracker, AtLeastOnce)  # check_settings
        full = held is not None and held.size_bytes >= self._share_bytes
        if self.over or full or (claim.one_by_one and tracker.awaited):
            return 0
        end = tracker.unfinished_from() + self.settings.window
        if held is None:
            return end
        if not 0 < end - held.end < self.settings.window // STEPS or not self.supplied():
            held.end = end
        return held.end

    def supplied(self) -> bool:
        """Returns whether a lane is ready for each worker."""
        return self.ready() >= self.settings.workers

    def take(self, coming: Iterable[Message[K_co, V_co]]) -> None:
        """Takes messages of a partition that come, and puts them into their lanes. What the key function raises ends
        the `process`; no handler had the messages, so they count no delivery."""
        with self._context.lock:  # so nobody finds them delivered, and not queued
            messages = list(coming)
            queue(messages, self._silent_since_ms)
        self._mark_counted_out()
        keyed: list[tuple[LaneKey, AnyMessage]] = []
        try:
            for message in () if self.over else messages:
                key = self._lane_of(message)
                hash(key)
                keyed.append((key, message))
        except BaseException as error:  # sys.exit() too: it would end this thread
            report_failure(self._driver, messages[len(keyed)], error)
            self.fail(error)
        behind: list[tuple[AnyMessage | None, AnyMessage]] = []
        with self._lock:
            if self.over:
                behind = [(None, message) for message in messages]
            for key, message in () if self.over else keyed:
                if self.draining and (parked := self._lanes.park_behind(key, message)) is not None:
                    behind.append((parked, message))
                    continue
                self._lanes.add(key, message)
            self.changed.notify(len(messages))
            if self.settings.batch is not None:
                self.batch_due_s()  # its `wait_s` begins now, also while all workers have one
        for before, message in behind:
            self._put_behind(before, [message])

    def _mark_counted_out(self) -> None:
        """Has what comes behind messages that became dead letters before they were delivered follow them. Without a
        key, because the key function raises, nothing follows."""
        while self._counted_out and self.settings.after_dead_letter == "key":
            message = self._counted_out.popleft()
            try:
                key = self._lane_of(message)
                hash(key)
            except Exception as error:
                report_failure(self._driver, message, error)
                continue
            with self._lock:
                self._lanes.mark_dead_lane(claim_of(message), key)

    def _put_behind(self, parked: AnyMessage | None, messages: Iterable[AnyMessage]) -> None:
        """Gives back messages that wait, until the one is due that is tried again before them; without one, because all
        ends, until that is seen."""
        delay_s = LOOK_S
        if parked is not None:
            with self._context.lock:
                delay_s = waits_s(parked, self._context.clock.now())
        for message in messages:
            put_back(message, delay_s)

    # --- handling

    def begin(self) -> tuple[Message[K_co, V_co] | None, bool]:
        """Returns the next message for a handler, or None; and whether one waits only because its gate is shut."""
        self.reopen()
        while True:
            self._worked_at = self._monotonic()
            with self._context.lock, self._lock:
                message = None if self.over else self._lanes.next()
                if message is None:
                    return None, bool(self._lanes.shut)
                begins = self._begins(message)
            if begins:
                return message, False
            if begins is False:
                self._pass_over(message)

    def reopen(self) -> None:
        """Has the lanes of claims begin again whose gate has opened, or which are over."""
        if not self._lanes.shut:
            return
        with self._context.lock, self._lock:
            now, member, paused = self._context.clock.now(), self._driver.member, self._queue.user_paused
            for claim in list(self._lanes.shut):
                if claim.sealed or (claim.tp not in paused and member.may_deliver(claim.epoch, now)):
                    self._lanes.reopen(claim)

    def _begins(self, message: AnyMessage) -> bool | None:
        """Has a message that works begin, if a handler may have it now. None: it waits again, because its gate is shut.
        False: pass over it, as its partition has moved, or it follows a dead letter. Called with both locks held, so
        that no Release is sent in between.

        As in an iteration, the clocks of the lease are read every GATE_MS, and the boot clock alone in between."""
        claim, clock = claim_of(message), self._context.clock
        until_ns, now = self._gates.get(claim, (0, None))
        if claim.tp in self._queue.user_paused:
            self._lanes.put_back(message)
            return None
        if now is None or claim.one_by_one or claim.phase is not ClaimPhase.OPEN or clock.boot_ns() >= until_ns:
            now = clock.now()
            open_ms = self._driver.member.open_ms(claim.epoch, now)
            self._gates[claim] = (now.boot_ms + min(open_ms, GATE_MS)) * 1_000_000, now
            if open_ms <= 0 and claim.sealed:
                return False
            if open_ms <= 0:
                self._lanes.put_back(message)
                return None
        begin(message, now.mono_ms)
        if self._lanes.follows_dead(message):
            return False
        self._begun_s[id(message)] = self._worked_at
        return True

    def _pass_over(self, message: AnyMessage) -> None:
        """Ends a message that follows a dead letter of its key; without a claim it is of no concern any more."""
        self._finish(message, ended=not claim_of(message).sealed and message.term(FOLLOWS))

    def settle(self, message: Message[K_co, V_co], error: BaseException | None, *, ends: bool | None = None) -> None:
        """Carries out a handler's answer: it returned (`error` None) or raised. `ends`: whether the error ends the
        `process` (None: as `retry_on` says). So does one that is raised here, as by an error that cannot be written as
        text."""
        try:
            if error is None and id(message) in self._terminated:  # an ack might take its dead letter back
                self._is_dead(message, ended=True)
            elif error is None:
                self._finish(message, finished=message.ack())
            else:
                self._refuse(message, error, ends)
        except BaseException as failure:
            self.fail(failure)
            with self._lock:
                self._returned(message)
                self._lanes.drop(message)
            message.nak(0)

    def _refuse(self, message: Message[K_co, V_co], error: BaseException, ends: bool | None) -> None:
        if isinstance(error, Reject) and not ends:
            self._end(message, error.reason or "rejected by its handler")
        elif ends is False or (not ends and isinstance(error, (Retry, *self.settings.retry_on))):
            self._retry(message, error)
        else:
            report_failure(self._driver, message, error)
            self.give_back(message)
            self.fail(error)

    def give_back(self, message: Message[K_co, V_co]) -> None:
        """Gives back a message whose handler was cancelled or must not run again here, or which must come again behind
        another of its lane."""
        with self._lock:
            self._returned(message)
            self._lanes.park(message)
        if not message.nak(0):
            with self._lock:
                self._lanes.unpark(message)
                self.changed.notify()

    # --- handling batches

    def batch_due_s(self) -> float:
        """Returns after how many seconds a worker looks for a batch again; 0: it is due. With `changed` held, and after
        `reopen`."""
        (size, wait_s), lanes = self._of_batches, self._lanes
        if self._taking:
            return IDLE_S
        count = lanes.takeable(size)
        if not count:
            self._filling_since = None
            return SHUT_S if lanes.shut else IDLE_S
        now_s = self._monotonic()
        if self._filling_since is None:
            self._filling_since = now_s
        if count >= size or self.draining:
            return 0.0
        return min(SHUT_S if lanes.shut else IDLE_S, max(0.0, self._filling_since + wait_s - now_s))

    def begin_batch(self) -> list[Message[K_co, V_co]]:
        """Returns the messages of the next batch, none if none is due or may begin. One worker takes at a time: two
        would each take a part of what is there.

        Of a lane they are in a row, so that other workers find other lanes.
        """
        self.reopen()
        with self._lock:
            if self.batch_due_s():
                return []
            self._taking = True
        try:
            return self._take_batch()
        finally:
            with self._lock:
                self._taking = False
                if self.batch_due_s() < IDLE_S:  # so long a worker waits that looked meanwhile
                    self.changed.notify()

    def _take_batch(self) -> list[Message[K_co, V_co]]:
        batch: list[Message[K_co, V_co]] = []
        (size, _), alone = self._of_batches, False
        while len(batch) < size and not alone:
            self._worked_at = self._monotonic()
            with self._context.lock, self._lock:
                message = None if self.over else (self._lanes.join(batch[-1]) if batch else None) or self._lanes.next()
                if message is None:
                    break
                alone = comes_alone(message)
                if alone and batch:
                    self._lanes.wait_again(message)
                    self.changed.notify()  # another worker may take it
                    break
                begins = self._begins(message)
            if begins:
                batch.append(message)
                continue
            alone = False
            if begins is False:
                self._pass_over(message)
        if batch:
            with self._lock:
                self._batches += 1
                self._filling_since = None
        return sorted(batch, key=lambda one: (one.topic, one.partition, one.offset))

    def settle_batch(
        self,
        batch: Sequence[Message[K_co, V_co]],
        result: object,
        error: BaseException | None,
        *,
        ends: bool | None = None,
    ) -> None:
        """Carries out a handler's answer for a batch: it returned `result`, an outcome per message or None, or raised.

        What is behind a message that is tried again, in its lane, is tried again after it, whatever its own outcome
        was. Else the older message would come after the newer one.
        """
        outcomes: Sequence[BaseException | None] = [error] * len(batch)
        if error is None:
            try:
                outcomes = outcomes_of(result, len(batch))
            except Exception as refused:
                outcomes, ends = [refused] * len(batch), True
        with self._lock:
            begun_s = self._begun_s.get(id(batch[0]))
            if begun_s is not None:
                self._times.add(self._monotonic() - begun_s)
        again: set[LaneKey] = set()
        for message, outcome in zip(batch, outcomes, strict=True):
            with self._lock:
                lane, follows = self._lanes.key_of(message), self._lanes.follows_dead(message)
            if lane in again:
                with self._lock:
                    self._retried += 1
                self.give_back(message)
            elif follows:
                self._finish(message, ended=message.term(FOLLOWS))
            else:
                self.settle(message, outcome, ends=ends)
                if outcome is not None:
                    with self._context.lock:
                        done = is_done(message)
                    if not done:
                        again.add(lane)
        self.batch_ended()

    def give_back_batch(self, batch: Sequence[Message[K_co, V_co]]) -> None:
        """Gives back the messages of a batch whose handler was cancelled."""
        for message in batch:
            self.give_back(message)
        self.batch_ended()

    def settle_given(self, given: Any, result: object, error: BaseException | None, *, ends: bool | None) -> None:
        """Carries out the answer for what a handler was given: a message, or a batch."""
        if self.settings.batch is None:
            self.settle(given, error, ends=ends)
        else:
            self.settle_batch(given, result, error, ends=ends)

    def give_back_given(self, given: Any) -> None:
        """Gives back what a handler was given: a message, or a batch."""
        self.give_back(given) if self.settings.batch is None else self.give_back_batch(given)

    def batch_ended(self) -> None:
        with self._lock:
            self._batches -= 1
            self.changed.notify_all()

    # --- ending

    def fail(self, error: BaseException) -> None:
        """Ends the `process` with `error`."""
        with self._lock:
            self.error = self.error or error
            self.over = True
            self.changed.notify_all()

    def _finish(self, message: AnyMessage, finished: int = 0, ended: int = 0) -> None:
        """Has the lane of a message go on. Whoever calls this looks next for what is ready, so nobody else is woken."""
        with self._lock:
            self._returned(message)
            self._finished += finished
            self._ended += ended
            self._lanes.done(message)

    def _returned(self, message: AnyMessage) -> None:
        self._terminated.discard(id(message))
        self._worked_at = now_s = self._monotonic()
        begun_s = self._begun_s.pop(id(message), None)
        if begun_s is not None and self.settings.batch is None:
            self._times.add(now_s - begun_s)

    def _end(self, message: Message[K_co, V_co], reason: str) -> None:
        """Ends a message for good: it goes to the dead letters."""
        self._is_dead(message, ended=message.term(reason))

    def _is_dead(self, message: AnyMessage, *, ended: bool) -> None:
        """Notes that a message goes to the dead letters (not so if `ended` is False), and has its lane go on."""
        if ended and self.settings.after_dead_letter == "key":
            with self._lock:
                self._lanes.mark_dead(message)
        self._finish(message, ended=ended)

    def _retry(self, message: Message[K_co, V_co], error: BaseException) -> None:
        count, settings = message.delivery_count, self.settings
        if not isinstance(error, Retry):
            report_failure(self._driver, message, error)
        if settings.deliveries is not None and count >= settings.deliveries:
            self._end(message, f"{error!r} at delivery {count}")
            return
        delay_s = (error if isinstance(error, Retry) else settings.retry).delay_s(count, self._draw)
        with self._lock:  # first: the message may come again before `nak` returns
            self._returned(message)
            self._lanes.park(message)
            self._retried += 1
            behind = self._lanes.behind(message) if self.draining or self.over else []
        if not message.nak(delay_s):
            with self._lock:
                self._lanes.unpark(message)
                self.changed.notify()
        for one in behind:  # they wait as long, so that they come again in their order
            put_back(one, delay_s)

    # --- looking

    def look(self) -> None:
        """Forgets what waits of claims that are over. A handler that has been silent for the handler timeout, and has
        lost its claim, holds up its lane no more."""
        with self._context.lock, self._lock:
            claims, silent_s = len(self._driver.member.claims), self._monotonic() - self._timeout_s
            self._at_work_s = {place: said_s for place, said_s in self._at_work_s.items() if said_s > silent_s}
            self._share_bytes = self._driver.options.prefetch_bytes // max(1, claims)
            done = [message for message in self._lanes.all_parked() if is_done(message)]
            for message in done:  # acked elsewhere while it waited
                self._lanes.unpark(message)
            over = [claim for claim in self._lanes.held if claim.sealed]
            for claim in over:
                self._gates.pop(claim, None)
                self._lanes.take_waiting(claim)
                if not self._lanes.held[claim].messages:
                    self._lanes.forget_claim(claim)
            now_s = self._monotonic()
            for message in self._lanes.in_vain():
                said_s = self._at_work_s.get((message.token.epoch, message.offset), 0.0)
                if now_s - max(said_s, self._begun_s.get(id(message), now_s)) >= self._timeout_s:
                    self._lanes.abandon(message)
            if over or done:
                self.changed.notify_all()
        if now_s >= self._held_up_look_s:
            self._held_up_look_s = now_s + HELD_UP_LOOK_S
            self._report_held_up()

    def _report_held_up(self) -> None:
        """Reports messages that have held up the position of their partition for long: others above are finished. A
        message that waits for its first handler does not, however many are above it."""
        with self._context.outbox, self._context.lock:
            now_ms, known = self._context.clock.now().mono_ms, self._held_up
            self._held_up = {}
            for claim in self._driver.member.claims.values():
                tracker = claim.tracker
                assert isinstance(tracker, AtLeastOnce)  # check_settings
                claim.settle()
                first = tracker.first_taken()
                if first is None or not tracker.finished_above:
                    continue
                offset, since_ms, due_s = first[1], now_ms, HELD_UP_S
                with self._lock:
                    lane = self._lanes.busy_with(claim.tp, offset)
                if claim in known and known[claim][0] == offset:
                    _, since_ms, due_s = known[claim]
                elif lane is None:
                    continue
                age_s = (now_ms - since_ms) / 1000
                if lane is not None and age_s >= due_s:
                    self._note_held_up(claim, offset, age_s, tracker, lane)
                    due_s = 2 * max(age_s, HELD_UP_S)
                self._held_up[claim] = offset, since_ms, due_s

    def _note_held_up(self, claim: Claim, offset: int, age_s: float, tracker: AtLeastOnce, lane: Lane) -> None:
        key, state = lane.key.key, _state(lane)
        named = "" if key is None else f" of key {_text_of(key):.{KEY_CHARS_MAX}}"
        above = f"{tracker.finished_above} above it are done"
        text = f"the message{named} has held up the position for {age_s:.0f} s, and {above}"
        self._queue.answers.reports.note("held_up", claim, offset, f"{text}: {HOLDS[state]}")

    def drain(self) -> None:
        """Has nothing wait behind messages that are tried again later: a drain does not wait for these."""
        with self._lock:
            self.draining = True
            self.changed.notify_all()
            parked = [lane.parked[0] for lane in self._lanes.unfinished() if lane.parked]
            behind = [(message, self._lanes.behind(message)) for message in parked]
        for message, messages in behind:
            self._put_behind(message, messages)

    def halt(self) -> None:
        """Begins with no more messages, and tells once for how many handlers it waits."""
        with self._lock:
            working = 0 if self._halted else self._handlers()
            self.over = self._halted = True
            self.changed.notify_all()
        if working:
            name = self._driver.member.name
            self._context.logger.info(
                "group %s: process ends, and waits for %d handlers", name, working, extra={"marshal_group": name}
            )

    def leave(self, running: int) -> None:
        """Tells that handlers have not returned in time: they go on, and nobody waits for them any more."""
        if running:
            name = self._driver.member.name
            self._context.logger.warning(
                "group %s: process has ended, and %d handlers have not returned",
                name,
                running,
                extra={"marshal_group": name},
            )

    def close(self) -> None:
        """Begins with no more messages, and gives back what waits. The consume has been told to end."""
        self.halt()
        with self._closing:  # when another thread's call returns, a `process` may begin that must find what waited here
            with self._lock:
                given = self._lanes.take_waiting()
            for message in sorted(given, key=lambda one: (one.topic, one.partition, one.offset)):
                put_back(message)
            self.detach()

    # --- telling

    def _handlers(self) -> int:
        """Returns how many handlers run."""
        return self._lanes.working if self.settings.batch is None else self._batches

    def at_work(self, claim: Claim, offsets: Sequence[int]) -> None:
        """Notes that handlers say that they are at work on messages: they are not silent (D4). Called with the
        Marshal's lock held."""
        self._worked_at = now_s = self._monotonic()
        for offset in offsets:
            self._at_work_s[claim.epoch, offset] = now_s

    def counted_out(self, message: AnyMessage) -> None:
        """Notes a message that became a dead letter before it was delivered. Called with the Marshal's lock held, so
        the key function is asked later."""
        if self.settings.after_dead_letter == "key":
            self._counted_out.append(message)

    def terminated(self, claim: Claim, offsets: Sequence[int]) -> None:
        """Notes that handlers have ended their messages by `term`. Called with the Marshal's lock held."""
        with self._lock:
            for message in self._lanes.working_of(claim):
                if message.offset in offsets:
                    self._terminated.add(id(message))

    def silent_s(self) -> float:
        """Returns for how many seconds no handler has begun, returned or said that it is at work (`in_progress`) while
        all workers have one; 0 if not all have.

        It takes no lock, because the Marshal's lock may be held."""
        busy = not self._halted and self._handlers() >= self.settings.workers
        return self._monotonic() - self._worked_at if busy else 0.0

    def unstarted(self) -> str:
        """Returns why no worker process can be started; "" if one has, or nobody needs one. It takes no lock."""
        reasons = list(self.refused.values())
        return reasons[0] if len(reasons) == self.settings.workers and not self._halted else ""

    def _silent_since_ms(self) -> int | None:
        """Returns since when all handlers are silent; None while one is free: then what waits is not silent (D17)."""
        silent_s = self.silent_s()
        return self._context.clock.now().mono_ms - round(1000 * silent_s) if silent_s else None

    def ready(self) -> int:
        """Returns how many messages may begin at once, as far as is known without a look at their gates."""
        return 0 if self.over else len(self._lanes.ready)

    def waits_for_gate(self) -> bool:
        """Returns whether messages wait for a gate that was shut when they were to begin."""
        return not self.over and bool(self._lanes.shut)

    def stats(self) -> ProcessStats:
        with self._context.lock:
            now_ms = self._context.clock.now().mono_ms
            claims = self._driver.member.claims.values()
            oldest_ms = max((oldest_unfinished_ms(claim, now_ms) for claim in claims), default=0)
        with self._lock:
            lanes, times = self._lanes, self._times
            waiting_for = lanes.waiting_for(self.settings.batch is not None)
            if self.settings.batch is not None and self._batches < self.settings.workers and self.batch_due_s():
                waiting_for["batch"], waiting_for["worker"] = waiting_for["worker"], 0
            return ProcessStats(
                lanes.working,
                lanes.waiting,
                lanes.parked,
                self._finished,
                self._retried,
                self._ended,
                waiting_for,
                oldest_ms / 1000,
                tuple(times.counts),
                times.sum_s,
            )

    def lanes(self) -> list[LaneInfo]:
        with self._lock:
            found = [_described(lane) for lane in self._lanes.unfinished()]
        return sorted(found, key=lambda lane: (lane.topic, lane.partition, lane.offset))


def _state(lane: Lane) -> str:
    return "working" if lane.working is not None else "retrying" if lane.blocked else "ready"


def _described(lane: Lane) -> LaneInfo:
    first = first_of(lane)
    return LaneInfo(first.topic, first.partition, lane.key.key, first.offset, len(lane.waiting), _state(lane))


class Running(Generic[K_co, V_co]):
    """What programs ask a `process` of either front."""

    _processing: Processing[K_co, V_co]
    _receiving: Consuming[K_co, V_co]
    _ended: threading.Event | asyncio.Event

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._receiving!r})"

    @property
    def closed(self) -> bool:
        """Returns whether it has ended, and its handlers have returned, or had no more time for it."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Returns what ended it: what a handler or the key function raised, or the error that ended the consumer."""
        return self._processing.error or self._receiving.error

    def stats(self) -> ProcessStats:
        """Returns how many messages are where now, and how many were answered how."""
        return self._processing.stats()

    def lanes(self) -> list[LaneInfo]:
        """Returns the lanes with unfinished messages, by topic, partition and offset."""
        return self._processing.lanes()
