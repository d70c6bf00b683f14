"""The calls of a simulated user that do not receive: `flush`, `double_ack`, `seek`, `pause`, `resume`, `in_progress`.

Other threads of the program make them while it receives, so each may come at any step of a call that waits. A call that
waits may also be cancelled, as asyncio does. When the consumer stops or drains, some calls follow closely, `stop`,
`drain` and `close` among them. What a call promised is noted for the auditor. When all is healed the user resumes what
he has paused, and makes none but `in_progress` from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from marshal_py.client import receiving
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import LEAVE_TIMEOUT_S, Confirmations, Ending
from marshal_py.client.messages.answers import Ack, Acked
from marshal_py.client.messages.message import Handles, Message
from marshal_py.errors import AckNotConfirmed, ClaimLost, MarshalError
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.front import CallSteps, Front
from marshal_sim.cluster.handling import Handling
from marshal_sim.cluster.process import Process
from marshal_sim.judge.evidence import Confirmation, Delivery, Seek, Touch, UserPause

DOUBLE_ACKS: Final = 0.2  # the share of acks that wait for the log
HANDLES: Final = 4  # of so many other acks one comes by a handle
GAP_INTERVALS: Final = 2  # between two calls at most
AMID_MAX: Final = 6  # calls amid a stop or a drain
BACK_MAX: Final = 20  # by so many offsets a seek goes back or on at most
FRESH_INTERVALS: Final = 2  # a handler reports that it is at work for so long: one that hangs does not


class HandlerCall(NamedTuple):
    """Describes one message that a handler works on. `message` is None if nobody counts on its answer any more.

    `of`: the `process` whose handler it is; None for the other ways to receive. `together`: all that this handler has.
    """

    message: Message[Any, Any] | None
    delivery: Delivery
    of: Handling | None = None
    together: Together | None = None


class Together:
    """What one handler of a `process` has, in order, and how many of it it still works on."""

    def __init__(self) -> None:
        self.calls: list[HandlerCall] = []
        self.left: int = 0


class Caller(Protocol):
    """Declares what the calls need of the user who makes them."""

    environment: ClientEnvironment
    process: Process
    front: Front


class OtherCalls:
    """Makes the calls of one user that do not receive, one after the other."""

    def __init__(self, user: Caller, driver: ConsumerDriver, ending: Ending) -> None:
        assert isinstance(driver.queue, DeliveryQueue)
        self._user = user
        self._environment, self._process, self._front = user.environment, user.process, user.front
        self._driver, self._ending, self._queue = driver, ending, driver.queue
        self._member, self._interval_ms = driver.member, driver.member.options.interval_ms
        self._confirmations = Confirmations(driver.context, driver, driver.queue.delivery.lost_acks)
        self._running: Mapping[int, HandlerCall] = {}
        self._paused: dict[TopicPartition, float] = {}  # since when
        self._handles = Handles(driver.member.name)
        driver.queue.delivery.confirm, driver.queue.delivery.handle_of = self._confirm, self._handles.make
        self._confirming: Delivery | None = None  # what the present double_ack is about
        self._seeks = False

    def begin(self, running: Mapping[int, HandlerCall]) -> None:
        """Begins to make calls. `running`: the handlers at work."""
        self._running = running
        self._schedule()

    def _schedule(self) -> None:
        delay_ms = spread(self._environment.rng, 1, GAP_INTERVALS * self._interval_ms)
        self._environment.schedule(delay_ms, self._process, self._call)

    def _call(self, _: None) -> None:
        environment = self._environment
        if self._ending.over:
            self._resume([*self._paused])
        elif environment.healed:  # but handlers report that they are at work: one hangs then (S24)
            self._resume([*self._paused])
            self._in_progress()
            self._schedule()
        else:
            calls = (self._flush, self._seek, self._pause, self._pause, self._in_progress, self._cancel)
            calls[int(environment.rng.random() * len(calls))]()
            self._schedule()
        self._front.poke()
        self._process.ran()

    def _cancel(self) -> None:
        self._front.cancel()

    # --- amid a stop or a drain

    def amid(self, stop: Callable[[float], None], drain: Callable[[float], None]) -> None:
        """Has some calls follow within an interval, most of them within some ms, as a stop takes no longer."""
        rng = self._environment.rng
        for _ in range(int(rng.random() * (AMID_MAX + 1))):
            self._environment.schedule(spread(rng, 1, self._interval_ms), self._process, self._amid, (stop, drain))

    def _amid(self, ends: tuple[Callable[[float], None], Callable[[float], None]]) -> None:
        ending, rng, (stop, drain) = self._ending, self._environment.rng, ends
        if self._environment.healed or ending.done:
            return
        context, draw = self._driver.context, int(rng.random() * 10)
        if draw < 2:
            drain(self._timeout_s())
        elif draw == 2:
            stop(LEAVE_TIMEOUT_S)
        elif draw == 3:  # `close` stops all consumers, within what is left of the time of all
            stop(max(0.0, context.end_budget.deadline(LEAVE_TIMEOUT_S) - context.monotonic()))
        elif draw == 4:
            self._cancel()
        elif not ending.over:  # else they raise ConsumerClosed
            (self._flush, self._flush, self._seek, self._seek, self._pause)[draw - 5]()
        self._front.poke()
        self._process.ran()

    # --- acks

    def ack(self, message: Message[Any, Any], delivery: Delivery) -> None:
        """Acks a message, in some cases by a call that waits for the log, in others by its handle, from elsewhere."""
        if self._environment.rng.random() >= DOUBLE_ACKS:
            in_time = message.ack() if delivery.offset % HANDLES else self._complete(message.handle())
            if not in_time:
                delivery.ack_was_late()
            return
        self._confirming = delivery
        message.double_ack(self._timeout_s())

    def _complete(self, handle: bytes) -> bool:
        """Acks by a handle, which another process has sent back, perhaps to a consumer that has stopped."""
        with self._driver.context.outbox, self._driver.context.lock:
            return self._handles.complete(handle, self._queue.delivery)

    def _confirm(self, ack: Ack, timeout_s: float) -> None:
        """Waits for the ack of a `double_ack` in a thread of its own, so that its handler holds nobody up."""
        of, since_ms = self._confirming, self._environment.now_ms

        def acks() -> Sequence[Acked]:
            acked = ack()
            if of is not None and any(one.late for one in acked):
                of.ack_was_late()
            return acked

        def again() -> None:
            self._confirming = of
            self._confirm(ack, timeout_s)

        steps = self._confirmations.accepted(acks, timeout_s)
        self._begin(steps, lambda _, error: self._confirmed(since_ms, error, of), again)

    def _flush(self) -> None:
        since_ms = self._environment.now_ms
        steps = self._confirmations.flush(self._timeout_s())
        self._begin(steps, lambda _, error: self._confirmed(since_ms, error, None), self._flush)

    def _begin(
        self,
        steps: CallSteps,
        ended: Callable[[Any, MarshalError | None], None],
        again: Callable[[], None],
        given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins a call. One that is cancelled is made `again` at once if the run cancels calls anywhere; else, and if
        the consumer has ended, it is `given_up`."""

        def cancelled() -> None:
            (again if self._environment.cancels and not self._ending.over else given_up)()

        self._front.begin(steps, ended, cancelled=cancelled)

    def _timeout_s(self) -> float:
        return spread(self._environment.rng, 1, 4 * self._interval_ms) / 1000

    def _confirmed(self, since_ms: int, error: MarshalError | None, of: Delivery | None) -> None:
        lost: frozenset[tuple[str, int]] | None = frozenset()
        if isinstance(error, ClaimLost) or (isinstance(error, AckNotConfirmed) and error.over):
            lost = frozenset(map(_place, error.lost if isinstance(error, ClaimLost) else error.places))
        elif error is not None:
            lost = None
        now_ms, evidence = self._environment.now_ms, self._environment.evidence
        evidence.confirmations.append(Confirmation(self._member.name, self._process.number, since_ms, now_ms, lost, of))

    # --- positions

    def _owned(self) -> TopicPartition | None:
        claims = [*self._member.claims.values()]
        return claims[int(self._environment.rng.random() * len(claims))].tp if claims else None

    def _seek(self) -> None:
        tp, environment = self._owned(), self._environment
        if tp is None or self._seeks or self._queue.at_most_once:
            return
        end = environment.broker.ends.get(tp, 0)
        back = int(environment.rng.random() * BACK_MAX)
        timeout_s = self._timeout_s()
        self._seeks = True
        self._seek_to(tp, max(0, end - back), timeout_s)

    def _seek_to(self, tp: TopicPartition, position: int, timeout_s: float) -> None:
        deadline = self._driver.context.monotonic() + timeout_s
        steps = receiving.seek(self._driver, self._ending, tp, position, deadline)
        self._begin(
            steps,
            lambda _, error: self._sought(tp, position, error),
            lambda: self._seek_to(tp, position, timeout_s),
            self._seek_given_up,
        )

    def _seek_given_up(self) -> None:
        self._seeks = False  # whether the position has moved is unknown

    def _sought(self, tp: TopicPartition, position: int, error: MarshalError | None) -> None:
        self._seeks = False
        if error is None:
            key, environment = (self._member.name, *tp), self._environment
            environment.evidence.seeks.append(
                Seek(key, self._process.number, position, environment.now_ms, self._process.world.next_offset)
            )

    # --- partitions that are not to be delivered

    def _pause(self) -> None:
        """Pauses a partition, or resumes it if it is paused."""
        tp = self._owned()
        if tp is None or tp in self._paused:
            self._resume([*self._paused] if tp is None else [tp])
            return
        with self._driver.context.outbox, self._driver.context.lock:
            self._queue.pause([tp])
        self._paused[tp] = self._environment.now_ms

    def _resume(self, tps: list[TopicPartition]) -> None:
        with self._driver.context.outbox, self._driver.context.lock:
            self._queue.resume(tps)
        for tp in tps:
            pause = UserPause(
                (self._member.name, *tp), self._process.number, self._paused.pop(tp), self._environment.now_ms
            )
            self._environment.evidence.user_pauses.append(pause)

    def _in_progress(self) -> None:
        for call in self._running.values():
            fresh_ms = self._environment.now_ms - call.delivery.begin_ms
            if call.message is not None and fresh_ms < FRESH_INTERVALS * self._interval_ms:
                call.message.in_progress()
                d = call.delivery
                self._environment.evidence.touches.append(Touch(d.key, d.epoch, d.offset, self._environment.now_ms))


def _place(text: str) -> tuple[str, int]:
    """Returns topic and partition of what an error names: a partition, with or without an offset."""
    topic, _, number = text.partition("@")[0].rpartition(":")
    return topic, int(number)
