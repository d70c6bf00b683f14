"""One `process` of a simulated user: handlers in parallel, in the order of each lane (docs/process.md).

Processing, of the shipped client, decides which message is handled next and what an answer does. This file stands for
the threads around it: one receives by a consume, workers handle messages or lists of them, and one looks for partitions
that move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from marshal_py.client.consuming import Consuming, Reader
from marshal_py.client.delivery.buffers import Reserved
from marshal_py.client.membership import Membership
from marshal_py.client.messages.message import Message, claim_of
from marshal_py.client.process.processing import (
    IDLE_S,
    LOOK_S,
    SHUT_S,
    AfterDeadLetter,
    Batches,
    Order,
    Processing,
    Reject,
    Retry,
    Unkeyed,
    check_settings,
)
from marshal_py.client.receiving import Receiving
from marshal_py.client.values.requests import check_consume
from marshal_py.errors import MarshalError
from marshal_py.protocol.claims import ClaimPhase
from marshal_py.protocol.member.member import Member
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.front import Call, CallSteps, Front
from marshal_sim.cluster.locks import Known
from marshal_sim.cluster.process import Process
from marshal_sim.cluster.source import key_of
from marshal_sim.judge.evidence import LaneStep

WORKERS_LEAST: Final = 3  # so many keep up with the messages of all partitions, also where one hangs
WORKERS_MORE: Final = 6
ORDERS: Final[tuple[Order | None, ...]] = ("key", "key", "key", "partition", None)
UNKEYED: Final[tuple[Unkeyed, ...]] = ("parallel", "ordered")
AFTER_DEAD_LETTER: Final[tuple[AfterDeadLetter, ...]] = ("continue", "key")
WINDOWS: Final = (4, 40, 4_000)  # offsets in work
BATCHES: Final = (None, 3, None, 6)  # by the number of the process
BATCH_WAIT_S: Final = 0.005  # short: where max_acks_pending is lower than a list is long, each list waits for it
PENDING_MAX: Final = 12  # messages that a consume has asked for
EXPIRES_S: Final = 30.0
LOOKS_PER_TIMEOUT: Final = 8  # looks within the handler timeout where nothing moves
RETRIES: Final = 0.15  # the share of handlers that ask for another try
REJECTS: Final = 0.03  # of those that end their message
FAILURES: Final = 0.004  # of those whose error ends the `process`
RAISES: Final = 0.1  # the share of lists whose handler raises, instead of an outcome per message
ENDS: Final = 0.01  # the share of messages at which the user ends the `process`, half of the time by a drain
RETRY_INTERVALS: Final = 3  # the longest delay that a handler names: longer than a hand-over waits for its handlers

AnyMessage = Message[Any, Any]


class Consume(Consuming[Any, Any]):
    """Receives for a simulated `process`: its handler puts each message into its lane."""

    def receive(self, receiving: Receiving) -> CallSteps:
        """Receives until it ends."""
        reader = Reader()
        reader.iterator = lambda: self
        if self._begin(reader):
            with self._receiving(reader):
                yield from receiving.iterate(self._demand)
                yield from self._confirmed()

    def stop(self) -> None:
        """Has it end at the next message, or when it next looks."""
        self._demand.stopped = True

    def cancelled(self) -> None:
        """Ends it, as the end of its task does."""
        self._end(None)


class Answer(NamedTuple):
    """Says what a handler does with its message: it returns, raises `error`, or fails so that the `process` ends."""

    error: Retry | Reject | None = None
    delay_ms: int = 0  # before the message may come again
    fails: bool = False


def draw_asked(environment: ClientEnvironment, number: int) -> dict[str, Any]:
    """Draws what the user of process `number` asks `process` for, and tells the judges which messages share a lane."""
    rng = environment.rng
    order, unkeyed = ORDERS[int(rng.random() * len(ORDERS))], UNKEYED[int(rng.random() * len(UNKEYED))]
    workers, window = WORKERS_LEAST + int(rng.random() * WORKERS_MORE), WINDOWS[int(rng.random() * len(WINDOWS))]
    after = AFTER_DEAD_LETTER[int(rng.random() * len(AFTER_DEAD_LETTER))]
    if order != "key":
        unkeyed = "parallel"  # the others go together with lanes of keys, or of anything
    if order is None:
        after = "continue"
    evidence = environment.evidence
    evidence.lanes[number] = _lane_of(order, unkeyed)
    evidence.workers[number] = min(workers, evidence.workers.get(number, workers))
    if after == "key":
        evidence.follows.add(number)
    batch = BATCHES[number % len(BATCHES)]
    lists = None if batch is None else Batches(batch, BATCH_WAIT_S)
    asked = {"workers": workers, "order": order, "unkeyed": unkeyed, "after_dead_letter": after, "window": window}
    return {**asked, "batch": lists}


def draw_answers(environment: ClientEnvironment, interval_ms: int, count: int, *, lists: bool) -> list[Answer]:
    """Draws what a handler says of each of its messages. If the handler of a list raises, that is for all of them."""
    raises = lists and environment.rng.random() < RAISES
    answers = [_draw_answer(environment, interval_ms) for _ in range(1 if raises else count)] * (count if raises else 1)
    return next(([one] * count for one in answers if one.fails), answers)


def _draw_answer(environment: ClientEnvironment, interval_ms: int) -> Answer:
    """Draws one. Once all is healed handlers return."""
    draw = 1.0 if environment.healed else environment.rng.random()
    if draw < FAILURES:
        return Answer(fails=True)
    if draw < FAILURES + REJECTS and environment.answers:
        return Answer(Reject("no order"))
    if draw < FAILURES + REJECTS + RETRIES:
        delay_ms = spread(environment.rng, 1, RETRY_INTERVALS * interval_ms)
        return Answer(Retry(after_s=delay_ms / 1000), delay_ms)
    return Answer()


def _lane_of(order: Order | None, unkeyed: Unkeyed) -> Callable[[str, int, int], Hashable]:
    """Returns what names the lane of the message at an offset, within its partition; None: a lane of its own."""

    def lane(_topic: str, _partition: int, offset: int) -> Hashable:
        if order == "partition":
            return "the partition"
        key = key_of(offset) if order == "key" else None
        return "no key" if key is None and (order, unkeyed) == ("key", "ordered") else key

    return lane


class Journal:
    """Notes for the auditor what a `process` does with its messages, at its calls (S30)."""

    def __init__(self, environment: ClientEnvironment, number: int, member: Member, processing: Any) -> None:
        """`processing`: the Processing of process `number`, which begins."""
        self._steps: list[LaneStep] = environment.evidence.lane_steps.setdefault(number, [])
        self._member, self._processing = member, processing
        self._single = processing.settings.batch is None
        self._calls = 0  # under way
        self._steps.append(LaneStep("attached"))
        take, begin, begin_batch = processing.take, processing.begin, processing.begin_batch
        settle, give_back = processing.settle, processing.give_back
        processing.take = lambda coming: self._take(take, coming)
        processing.begin = lambda: self._begin(begin)
        processing.begin_batch = lambda: self._begin(lambda: (begin_batch(), False))[0]
        processing.give_back = lambda message: self._end("back", give_back, message)
        processing.settle = lambda message, error, **named: self._end(
            "ended" if error is None or isinstance(error, Reject) else "back", partial(settle, **named), message, error
        )

    def _take(self, take: Callable[[Iterable[AnyMessage]], None], coming: Iterable[AnyMessage]) -> None:
        came: list[AnyMessage] = []
        with self._call() as noted:
            take(came.append(message) or message for message in coming)  # type: ignore[func-returns-value]
        noted("over" if self._processing.over or self._processing.draining else "came", came)

    def _begin(self, begin: Callable[[], tuple[Any, bool]]) -> tuple[Any, bool]:
        with self._call() as noted:
            given, shut = begin()
        if self._processing.waits_for_gate():
            noted("shut", ())
        if given:
            noted("begun", given if isinstance(given, list) else [given])
        return given, shut

    def _end(self, what: str, end: Callable[..., None], message: AnyMessage, *error: Any) -> None:
        with self._call() as noted:
            end(message, *error)
        noted(what, [message])

    @contextmanager
    def _call(self) -> Iterator[Callable[[str, Sequence[AnyMessage]], None]]:
        since, alone = len(self._steps), not self._calls
        self._calls += 1

        def noted(what: str, messages: Sequence[AnyMessage]) -> None:
            places = tuple((claim_of(one).epoch, *claim_of(one).tp, one.offset) for one in messages)
            claims = self._member.claims.items() if what == "begun" and self._single else ()
            may = frozenset(epoch for epoch, claim in claims if claim.phase is ClaimPhase.OPEN)
            self._steps.append(LaneStep(what, places, since, alone, may))

        try:
            yield noted
        finally:
            self._calls -= 1
            alone = alone and len(self._steps) == since


class Handling:
    """Runs one `process`, until it ends."""

    def __init__(
        self,
        environment: ClientEnvironment,
        process: Process,
        membership: Membership,
        receiving: Receiving,
        front: Front,
        asked: dict[str, Any],
        handle: Callable[[list[AnyMessage]], None],
        received: Callable[[MarshalError | None], None],
        ended: Callable[[MarshalError | None], None],
    ) -> None:
        """`handle(messages)` begins the handler of messages whose gates are open: of one, except with `batch`.

        `received(error)` is called when nothing comes any more, `ended(error)` when the last handler has returned, too.
        """
        self._environment, self._process, self._front = environment, process, front
        driver = receiving.driver
        name, options = driver.member.name, driver.options
        settings = check_settings(name, options, key=None, retry=None, retry_on=Exception, **asked)
        self._receiving, self._settings, self._handle = receiving, settings, handle
        self._tell_received, self._tell_ended = received, ended
        self._member = receiving.driver.member
        self._look_ms = round(receiving.driver.options.handler_timeout_s * 1000) // LOOKS_PER_TIMEOUT
        self._processing: Processing[Any, Any] = Processing(receiving, settings, environment.rng.random)
        Journal(environment, process.number, self._member, self._processing)
        demand = receiving.consuming(check_consume(PENDING_MAX, expires_s=EXPIRES_S))
        self._consume = Consume(membership, receiving.queue, demand, self._processing.take, "nak", whole=True)
        self._call: Call | None = None  # of the consume, until what it reserved is taken
        self._reservation: Reserved
        self._working: list[list[AnyMessage]] = []  # what each handler has
        self._phases: dict[int, ClaimPhase] = {}  # by epoch, as they were when this looked
        self._beginning = 0  # workers that look for a message
        self.gate: Known | None = None  # of the newest message, if its thread may have been stopped since
        self._taking = self._stopped = self._tries_again = self._received = self._over = False
        self._error: MarshalError | None = None

    def begin(self) -> None:
        self._front.run(self._processing.attach)
        cancelled = self._cancelled if self._environment.cancels else None
        self._front.begin(self._consume.receive(self._receiving), self._consumed, self._reserved, cancelled)
        self._watch(None)

    # --- the thread that receives

    def _reserved(self, call: Call, reserved: Reserved) -> None:
        """Puts what is reserved into lanes. The thread may be stopped before."""
        self._call, self._reservation = call, reserved
        if held_ms := self._environment.network_faults.thread_ms():
            self._stopped = True
            self._environment.schedule(held_ms, self._process, self._take_late)
        self._take()

    def _take_late(self, _: None) -> None:
        self._stopped = False
        self._take()
        self._process.ran()

    def _take(self) -> None:
        if self._taking:
            return  # the loop below is further up in the stack
        self._taking = True
        while (call := self._call) is not None and not self._stopped:
            self._call = None
            self._put()
            if not self._front.cancels(call):
                self._front.go_on(call)
        self._taking = False

    def _put(self) -> None:
        self._front.run(self._processing.take, self._reservation.messages(self._process.boot_ns))
        self.work()
        rng = self._environment.rng
        if not self._environment.healed and rng.random() < ENDS:
            self._stop_or_drain(rng.random() < 0.5)

    def _consumed(self, _: Any, error: MarshalError | None) -> None:
        """Notes that the consume has ended."""
        self._received, self._error = True, error
        self._tell_received(error)
        self._look()

    def _cancelled(self) -> None:
        """Ends the consume with its task, which is cancelled; the `process` ends then."""
        self._consume.cancelled()
        self._consumed(None, None)

    # --- workers

    def work(self) -> None:
        """Begins handlers, as many as there are workers for. One whose handler hangs is replaced with its claim."""
        while len(self._held()) + self._beginning < self._settings.workers:
            self._beginning += 1
            messages, wait_s = self._next()
            self._beginning -= 1
            if not messages or self._process.dead:
                if 0 < wait_s < IDLE_S and not self._tries_again:
                    self._tries_again = True
                    self._environment.schedule(max(1, round(wait_s * 1000)), self._process, self._try_again)
                return
            self._working.append(messages)
            self._handle(messages)

    def _next(self) -> tuple[list[AnyMessage], float]:
        """Returns the messages of the next handler, and without any after how many seconds to ask again."""
        processing = self._processing
        if self._settings.batch is None:
            message, shut = self._front.run(processing.begin)
            self.gate = self._front.gate()
            return [] if message is None else [message], SHUT_S if shut else 0.0
        while True:
            processing.reopen()
            with processing.changed:
                wait_s = IDLE_S if processing.over else processing.batch_due_s()
            if wait_s:
                return [], wait_s
            if batch := processing.begin_batch():
                return batch, 0.0

    def _held(self) -> list[list[AnyMessage]]:
        """Returns what handlers have under claims that are not lost."""
        return [messages for messages in self._working if not all(claim_of(one).sealed for one in messages)]

    def _try_again(self, _: None) -> None:
        self._tries_again = False
        self._process.ran()  # which lets the workers look

    def answers(self, count: int) -> list[Answer]:
        """Draws what a handler of so many messages says of each."""
        lists, interval_ms = self._settings.batch is not None, self._member.options.interval_ms
        return draw_answers(self._environment, interval_ms, count, lists=lists)

    def settle(self, messages: Sequence[AnyMessage], answers: Sequence[Answer]) -> None:
        """Ends a handler, which does what the answers say."""
        self._front.run(self._settle, messages, answers)
        self._working = [one for one in self._working if one[0] is not messages[0]]

    def _settle(self, messages: Sequence[AnyMessage], answers: Sequence[Answer]) -> None:
        processing, fails = self._processing, answers[0].fails
        if fails:
            for message in messages:
                processing.give_back(message)
            processing.fail(RuntimeError("a handler failed"))
        if self._settings.batch is not None and fails:
            processing.batch_ended()
        elif self._settings.batch is not None:
            processing.settle_batch(messages, [answer.error for answer in answers], None)
        elif not fails:
            processing.settle(messages[0], answers[0].error)

    def go_on(self) -> None:
        """Has a worker go on whose handler has ended."""
        self._look() if self._processing.over else self.work()

    # --- the thread that looks

    def _watch(self, _: None) -> None:
        """Looks again and again, as long as this `process` runs."""
        if not self._over:
            self._environment.schedule(self._look_ms, self._process, self._watch)
            self._look()
            self._process.ran()

    def notice(self) -> None:
        """Looks soon if a partition has begun to move or is gone, as the thread does that looks all the time."""
        phases = {epoch: claim.phase for epoch, claim in self._member.claims.items()}
        if phases != self._phases and not self._over:
            self._phases = phases
            delay_ms = 1 + int(self._environment.rng.random() * LOOK_S * 1000)
            self._environment.schedule(delay_ms, self._process, self._look_soon)

    def _look_soon(self, _: None) -> None:
        self._look()
        self._process.ran()

    def _look(self) -> None:
        consume, processing = self._consume, self._processing
        if self._over:
            return
        if not consume.closed and not processing.over:
            if consume.draining and not processing.draining:
                self._front.run(processing.drain)
            self._front.run(processing.look)
            self.work()
            return
        self._front.run(processing.halt)
        consume.stop()
        self._front.poke()
        self._front.run(processing.close)
        # One that hangs, and has lost its claim, is not waited for.
        if self._received and not self._over and not self._held():
            self._over = True
            self._tell_ended(self._error)

    # --- its user

    def drain(self, wait_s: float) -> bool:
        """Has it end with its consumer, which drains. Returns whether it still receives."""
        if not self._received:
            self._consume.begin_drain(wait_s)
        return not self._received

    def _stop_or_drain(self, drains: bool) -> None:
        """Ends it, as a call of another thread."""
        if drains:
            self._front.run(self._processing.drain)
            self._consume.begin_drain(None)
        else:
            self._front.run(self._processing.halt)
        self._look()
        self._front.poke()
