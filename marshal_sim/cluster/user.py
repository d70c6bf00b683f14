"""The user of one simulated consumer: which calls he makes, how long his handlers take, and what they answer.

He receives in one of three ways: iteration, `fetch`, or `consume` without a handler. Each message goes to a handler at
once; so many run side by side as he has threads. Or he has them handled by `process` (handling.py). In at-most-once
mode the next call says that all before is done, so he waits for his handlers first. A handler that has lost its claim,
because it hangs, is waited for no longer. Everything that a handler gets and how it ends goes into the journal, which
the auditor reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

from marshal_py.client.delivery.buffers import Reserved
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import Ending, Membership
from marshal_py.client.messages.answers import Letter
from marshal_py.client.messages.message import Message, claim_of
from marshal_py.client.receiving import Receiving
from marshal_py.client.values.requests import check_consume, check_fetch
from marshal_py.errors import MarshalError
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_sim.cluster.busy_loops import BusyLoop
from marshal_sim.cluster.calls import HandlerCall, OtherCalls, Together
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.front import WAITS_AT_ONCE_MAX, Call, Front
from marshal_sim.cluster.handling import Answer, Handling, draw_asked
from marshal_sim.cluster.process import Process
from marshal_sim.cluster.source import origin_of
from marshal_sim.judge.evidence import DeadLetter, Delivery, Drain, Span

WAYS: Final = ("iterate", "fetch", "consume")
BATCH_MAX: Final = 8  # messages per fetch, and pending ones per consume
CONSUME_EXPIRES_S: Final = 30.0  # as long as `consume` asks by default: longer than any message may take
NAKS: Final = 0.25  # the share of answers that give a message back
TERMS: Final = 0.05  # the share of answers that end one
PROCESSES: Final = 0.5  # of the users that may, the share that handles messages by `process`
DELAY_INTERVALS: Final = 3  # the longest delay that a handler names: longer than a hand-over waits for its handlers


class User:
    """Receives from one consumer, until that ends."""

    environment: ClientEnvironment

    def __init__(
        self,
        environment: ClientEnvironment,
        process: Process,
        driver: ConsumerDriver,
        ending: Ending,
        front: Front,
        concurrency: int,
    ) -> None:
        """`concurrency`: handlers per partition."""
        self.environment, self.process, self.front = environment, process, front
        self._receiving = Receiving(driver.context, driver, ending)
        self._ending = ending
        rng = environment.rng
        self.way: str = WAYS[int(rng.random() * len(WAYS))]
        self._batch = 1 + int(rng.random() * BATCH_MAX)
        self._some = rng.random() < 0.5  # a fetch returns with the first message
        self._concurrency, self._answers = concurrency, environment.answers
        self._member = driver.member
        self._options = driver.member.options
        self._at_most_once: bool = self._receiving.queue.at_most_once
        # Of the newest fetch: when it looked at the gates, how much of the log was read, and the instance.
        self._taken: tuple[int, int, bytes] | None = None
        if environment.locks:
            self._note_gates(self._receiving.queue)
        self.running: dict[int, HandlerCall] = {}
        self.letters: list[tuple[DeadLetter, Letter]] = []  # posted, and not known to be written
        self._number = self._lists = 0
        self._messages: Iterator[Message[Any, Any]] | None = None  # of the present reservation
        self.held: HandlerCall | None = None  # taken, and its handler has not begun
        self._iteration: Call | None = None
        self._began = self._in_call = self._going = self.over = False
        self._finished_since: list[Delivery] = []  # in at-most-once mode, since he last asked for more
        self._answering: dict[tuple[int, int], HandlerCall] = {}  # whose handlers answer just now: by epoch and offset
        self._others: OtherCalls | None = None
        if environment.calls:
            self._others = self._other_calls(driver)
        self._acks_each: bool = not environment.calls or rng.random() < 0.5  # in at-most-once mode, too
        self._handling: Handling | None = None  # the present `process`
        self._choose(driver)

    def _other_calls(self, driver: ConsumerDriver) -> OtherCalls:
        return OtherCalls(self, driver, self._ending)

    def _choose(self, driver: ConsumerDriver) -> None:
        """Chooses how to receive, where this differs from user to user."""
        environment = self.environment
        if environment.lanes and not self._at_most_once and environment.rng.random() < PROCESSES:
            self.way = "process"
            self._asked = draw_asked(environment, self.process.number)
            self._membership = Membership(driver.context, driver, {}, self._ending)

    # --- receiving

    def begin(self) -> None:
        """Makes the first call."""
        if not self._began:
            self._began = True
            self._receive()
            if self._others is not None:
                self._others.begin(self.running)

    def _receive(self) -> None:
        """Begins the next call. In `iterate` and `consume` there is one, until it ends."""
        ending, interval_s = self._ending, self._options.interval_ms / 1000
        if ending.over or ending.draining or ending.must_stop():  # as a loop around `fetch` does
            self._end(None)
            return
        if self.way == "process":
            self._process()
            return
        self._ask_again()
        receiving = self._receiving
        if self.way == "fetch":
            receiving.queue.begin()
            request = check_fetch(self._batch, None, interval_s, 1 if self._some else self._batch, None)
            self.front.begin(receiving.fetch(request), self._fetched, cancelled=self._cancelled)
            return
        demand = receiving.demand()
        if self.way == "consume":
            asked = check_consume(self._batch)
            demand = receiving.consuming(asked)
        self.front.begin(receiving.iterate(demand), self._iterated, self._reserved, self._cancelled)

    def _note_gates(self, queue: DeliveryQueue) -> None:
        """Has the queue note when a fetch takes messages: its thread may be stopped before it returns them."""
        take = queue.take

        def taken(*arguments: Any) -> Any:
            self._taken = self.environment.now_ms, self.process.world.next_offset, self._member.newest_instance
            return take(*arguments)

        queue.take = taken  # type: ignore[assignment, method-assign]

    def _fetched(self, batch: Any, error: MarshalError | None) -> None:
        self._returns()
        if error is not None:
            self._end(error)
            return
        for message in batch:  # all of them were delivered when the call returned
            delivery = self._delivery_of(message)
            if self._taken is not None:
                delivery.gate_ms, delivery.read_to, delivery.instance = self._taken
            self._begin_handler(HandlerCall(message, delivery))
        self.go_on()

    def _reserved(self, iteration: Call, reserved: Reserved) -> None:
        self._iteration = iteration
        self._returns()
        self._messages = reserved.messages(self.process.boot_ns)
        self.go_on()

    def _iterated(self, _: Any, error: MarshalError | None) -> None:
        """Notes that the iteration has ended, because the consumer stops, drains or has ended."""
        self._end(error)
        if error is None and self._ending.draining:
            self._finish_drain()

    def _cancelled(self) -> None:
        """Asks again, for a call was cancelled. A drain then ends as in `AsyncConsumer`."""
        self._returns()
        self._iteration = None
        if self.way != "fetch" and self._ending.draining:
            self._iterated(None, None)
        else:
            self._again(self.go_on)

    def _end(self, error: MarshalError | None) -> None:
        """Ends the user's loop. He did nothing that a call could object to, so only the end of the consumer does."""
        self.over = True
        self._returns()
        if error is not None and not self._ending.over:
            raise error

    # --- its end, which any of its threads may ask for at any time

    def leave(self, wait_s: float, timeout_s: float) -> None:
        """Drains the consumer if its handlers have time, `wait_s`, else stops it. Other calls may come amid that."""
        self.drain(wait_s) if wait_s else self.stop(timeout_s)
        if self._others is not None:
            self._others.amid(self.stop, self.drain)

    def drain(self, wait_s: float) -> None:
        """Drains the consumer, as `Consumer.drain` does: an iteration that runs delivers the rest first."""
        now_ms, number = self.environment.now_ms, self.process.number
        until_ms = self._ends_drains(now_ms + 1_000 * wait_s)
        self.environment.evidence.drains.append(Drain(self._member.name, number, now_ms, until_ms))
        self._receiving.queue.drain()
        self._ending.drain(wait_s)
        receives = self.way != "process" or (self._handling is not None and self._handling.drain(wait_s))
        if self.way == "fetch" or self.over or not self._began or not receives:
            self._finish_drain()

    def _finish_drain(self) -> None:
        self.front.begin(self._ending.finish_drain(), self._left, cancelled=self._finish_drain_later)

    def _finish_drain_later(self) -> None:
        self._again(self._finish_drain)

    def stop(self, timeout_s: float) -> None:
        """Stops the consumer, as `Consumer.stop` does."""
        self._ends_drains(self.environment.now_ms)
        self.front.begin(self._ending.stop(timeout_s), self._left, cancelled=lambda: self._again(self.stop, timeout_s))

    def _left(self, _: None, error: MarshalError | None) -> None:
        assert error is None
        self._ending.close()

    def _again(self, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call again that was cancelled."""
        if self.environment.cancels:
            call(*arguments)
        else:
            self._later(call, *arguments)

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call within an interval."""

        def again(_: None) -> None:
            call(*arguments)
            self.process.ran()

        self.environment.schedule(spread(self.environment.rng, 1, self._options.interval_ms), self.process, again)

    def _ends_drains(self, until_ms: float) -> float:
        """Notes that the drains of this consumer give its handlers no time after `until_ms`: of several deadlines the
        earliest counts. Returns that."""
        drains, number = self.environment.evidence.drains, self.process.number
        for at, one in enumerate(drains):
            if one.client == number:
                until_ms = min(until_ms, one.until_ms)
                drains[at] = one._replace(until_ms=until_ms)
        return until_ms

    # --- by `process`

    def _process(self) -> None:
        """Begins a `process`. One that ends is followed by another, as a program does after an error."""
        environment, handling = self.environment, None

        def handle(messages: list[Message[Any, Any]]) -> None:
            self._take(messages, handling)

        self._handling = handling = Handling(
            environment,
            self.process,
            self._membership,
            self._receiving,
            self.front,
            self._asked,
            handle,
            self._received,
            self._processed,
        )
        handling.begin()

    def _received(self, error: MarshalError | None) -> None:
        """Notes that a `process` receives no more: a drain of the consumer goes on then."""
        if error is None and self._ending.draining:
            self._finish_drain()

    def _processed(self, error: MarshalError | None) -> None:
        """Notes that a `process` has ended."""
        self._handling = None
        if error is not None or self._ending.over or self._ending.draining:
            self._end(error)
            return
        self._later(self._receive)

    # --- between calls

    def go_on(self) -> None:
        """Takes more messages if a handler is free, else waits for one."""
        if self.way == "process":
            if self._handling is not None:
                self._handling.notice()
                self._handling.work()
            return
        if self._going:
            return  # the loop below, which is further up in the stack, continues
        self._going = True
        empty = 0  # reservations without a message, since no time passes here
        while self._began and not (self.over or self._in_call or self.held or self._busy()):
            if self._messages is None:
                self._ask()
                empty += 1
                if empty > WAITS_AT_ONCE_MAX:
                    raise BusyLoop(f"an iteration of consumer {self.process.number} has messages and delivers none")
                continue
            message = next(self._messages, None)
            if message is None:
                self._messages = None
            else:
                empty = 0
                self._take([message])
        self._going = False

    def _busy(self) -> bool:
        """Tells whether every handler has a message. One that has lost its claim is not waited for."""
        if not self.running:
            return False
        claims = self._member.claims
        here = [call for call in self.running.values() if call.delivery.epoch in claims]
        return bool(here) if self._at_most_once else len(here) >= self._concurrency * max(1, len(self._member.claims))

    def _ask(self) -> None:
        call = self._iteration
        if call is None:
            self._receive()
            return
        self._ask_again()
        if not self.front.cancels(call):
            self.front.go_on(call)

    def _ask_again(self) -> None:
        """Notes that the user is in a call: in at-most-once mode it tells the library what is finished."""
        self._in_call = True
        if self.way == "fetch" and not self._some:
            return  # he asks for a full batch, and waits for it
        self._asks()
        self._told()

    def _asks(self) -> None:
        """Notes that the user waits for messages."""
        now_ms = self.environment.now_ms
        spans = self.environment.evidence.asking.setdefault(self.process.number, [])
        if spans and spans[-1].until_ms == now_ms:
            spans[-1].until_ms = -1
        elif not spans or spans[-1].until_ms >= 0:
            spans.append(Span(now_ms))

    def _told(self) -> None:
        """Notes that the library knows, in at-most-once mode, what is finished."""
        for delivery in self._finished_since:
            delivery.ack_ms = self.environment.now_ms
        self._finished_since.clear()

    def _returns(self) -> None:
        """Notes that the user is in no call that waits for messages."""
        self._in_call = False
        spans = self.environment.evidence.asking.get(self.process.number)
        if spans and spans[-1].until_ms < 0:
            spans[-1].until_ms = self.environment.now_ms

    def _take(self, messages: list[Message[Any, Any]], of: Handling | None = None) -> None:
        """Begins a handler. The process may be stopped before, since the gate was looked at."""
        faults, together = self.environment.network_faults, Together()
        calls = together.calls = [HandlerCall(one, self._delivery_of(one), of, together) for one in messages]
        together.left, first = len(calls), calls[0].delivery
        if of is not None and of.gate is not None:
            first.gate_ms, first.read_to, first.instance = of.gate
        if thread_ms := faults.thread_ms():
            self._hold(calls[0])
            self.environment.schedule(thread_ms, self.process, self._take_late, calls)
        elif held_ms := faults.gate_ms():
            self._hold(calls[0])
            self.process.held_steps.appendleft((self._take_late, calls))
            self.process.freeze(held_ms)
        else:
            self._begin_handlers(calls)

    def _hold(self, call: HandlerCall) -> None:
        if call.of is None:  # of the thread that receives; a `process` has others
            self.held = call

    def _take_late(self, calls: list[HandlerCall]) -> None:
        self.held = None if calls[0].of is None else self.held
        self._begin_handlers(calls)
        self.go_on()
        self.process.ran()

    def consumer_ended(self) -> None:
        """Notes the delivery of a message whose thread is stopped: it goes on after the end of the consumer. In
        at-least-once mode the message comes again elsewhere."""
        if self.held is not None and self._at_most_once:
            self.held.delivery.begin_ms = self.environment.now_ms
            self.environment.delivered(self.held.delivery)

    # --- handlers

    def _delivery_of(self, message: Message[Any, Any]) -> Delivery:
        """Returns the delivery of a message for which the gate is open now."""
        member, now_ms = self._member, self.environment.now_ms
        delivery = Delivery(
            member.name,
            self.process.number,
            member.newest_instance,
            message.token.epoch,
            message.topic,
            message.partition,
            message.offset,
            self.process.world.next_offset,
            now_ms,
            now_ms,
        )
        delivery.life, delivery.leader_epoch = origin_of(message.timestamp)
        return delivery

    def _begin_handlers(self, calls: list[HandlerCall]) -> None:
        if len(calls) > 1:
            self._lists += 1
        for call in calls:
            call.delivery.together = self._lists if len(calls) > 1 else 0
            self._begin_handler(call)

    def _begin_handler(self, call: HandlerCall) -> None:
        """Notes a delivery, and begins its handler."""
        call.delivery.begin_ms = self.environment.now_ms
        self.environment.delivered(call.delivery)
        self.run_handler(call)

    def begin_held(self, message: Message[Any, Any] | None, held: Delivery) -> None:
        """Begins the handler of a message that this machine's original has taken and not begun (T18)."""
        delivery = held.inherited_by(self.process.number)
        delivery.inherited = False
        self.environment.delivered(delivery)
        self.run_handler(HandlerCall(message, delivery))

    def run_handler(self, call: HandlerCall) -> None:
        delivery = call.delivery
        duration_ms = self.environment.handler_ms(TopicPartition(delivery.topic, delivery.partition))
        self._number += 1
        self.running[self._number] = call
        self.environment.schedule(duration_ms, self.process, self._finished, self._number)

    def _finished(self, number: int) -> None:
        """Ends a handler, which answers."""
        self.environment.events += 1
        call = self.running.pop(number)
        if call.of is None or call.together is None:
            self._answer(call)
        elif call.together.left > 1:
            call.together.left -= 1  # its handler works on the others of its list
        else:
            self._settle(call.together.calls, call.of)
        self.front.poke()
        self.go_on()
        self.process.ran()

    def _answer(self, call: HandlerCall) -> None:
        environment, delivery, message = self.environment, call.delivery, call.message
        draw = environment.rng.random() if self._answers else 1.0
        if self._at_most_once or environment.healed or draw >= NAKS + TERMS:
            if not self._at_most_once:
                delivery.finish(environment.now_ms)
                if message is not None and self._others is not None:
                    self._others.ack(message, delivery)
                elif message is not None and not message.ack():
                    delivery.ack_was_late()
                return
            delivery.end_ms = environment.now_ms
            self._finished_since.append(delivery)
            if message is not None and self._acks_each:
                message.ack()
            return
        delay_ms = spread(environment.rng, 1, DELAY_INTERVALS * self._options.interval_ms)
        self._answering = {(delivery.epoch, delivery.offset): call}
        if message is not None and draw < TERMS:
            message.term("no order")
        elif message is not None:
            message.nak(delay_ms / 1000)
        if self._answering:  # no letter takes its place
            delivery.give_back(environment.now_ms, delay_ms)
        self._answering = {}

    def _settle(self, calls: list[HandlerCall], handling: Handling) -> None:
        """Ends a handler of a `process`, which answers for it. What is behind a message that comes again, in its lane,
        comes again, too."""
        messages = [call.message for call in calls if call.message is not None]
        answers, now_ms = handling.answers(len(messages)), self.environment.now_ms
        others = self._answering  # whose threads are stopped where they answer
        self._answering = {(call.delivery.epoch, call.delivery.offset): call for call in calls}
        try:
            handling.settle(messages, answers)
        finally:  # this one may have been, and its process died
            late = [claim_of(message).sealed or self.process.dead for message in messages]
            self._settled(calls, answers, late, now_ms)
            self._answering = others
        handling.go_on()

    def _settled(self, calls: list[HandlerCall], answers: list[Answer], late: list[bool], now_ms: int) -> None:
        """Notes what became of what a handler had. `late`: whether the claim of each was over before."""
        lane_of = self.environment.evidence.lanes.get(self.process.number)  # None: of a topic that is gone
        again: set[tuple[int, Hashable]] = set()
        for call, answer, was_late in zip(calls, answers, late, strict=True):
            delivery = call.delivery
            name = None if lane_of is None else lane_of(delivery.topic, delivery.partition, delivery.offset)
            lane = delivery.epoch, (delivery.offset, None) if name is None else name
            if self._answering.pop((delivery.epoch, delivery.offset), None) is None:
                continue  # a letter takes its place
            if answer.error is not None or answer.fails or lane in again:
                delivery.give_back(now_ms, 0 if lane in again else answer.delay_ms)
                again.add(lane)
                continue
            delivery.end_ms, delivery.ack_ms = now_ms, self.environment.now_ms
            if was_late:
                delivery.ack_was_late()

    # --- dead letters

    def posted(self, letter: Letter) -> None:
        """Notes a letter that is on its way, and whose handler has ended the message, if one has."""
        call = self._answering.pop((letter.claim.epoch, letter.offset), None)  # None: of another one of a `process`
        key = (self._member.name, letter.claim.tp.topic, letter.claim.tp.partition)
        note = DeadLetter(key, self.process.number, letter.claim.epoch, letter.offset)
        note.delivery = None if call is None else call.delivery
        note.posted_ms = self.environment.now_ms
        self.environment.evidence.letters.append(note)
        self.letters.append((note, letter))

    def letter_written(self, place: TopicPartition, offset: int) -> None:
        """Notes that the topic has the letter of a message."""
        same = [one for one in self.letters if (one[1].claim.tp, one[0].offset) == (place, offset)]
        for note, _ in sorted(same, key=lambda one: not one[1].is_needed()):  # one of an earlier claim may be left
            if note.written_ms < 0:
                note.written_ms = self.environment.now_ms
                return

    def look_at_letters(self) -> None:
        """Notes which messages are finished because their letters are written."""
        for note, letter in self.letters:
            if note.delivery is not None and note.written_ms >= 0 and letter.run.is_finished(letter.at):
                note.delivery.finish(self.environment.now_ms)
        self.letters = [one for one in self.letters if one[0].written_ms < 0 or not one[1].run.is_finished(one[1].at)]
