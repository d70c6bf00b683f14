"""A simulated consumer whose handlers give messages back and end them, and which writes dead letters (D14, D15).

What an answer does is decided by the shipped code: client/messages/answers.py and the tracker of the claim. This file
has what the driver does around it: it delivers again what is due, and writes the letters, which takes a while and may
fail. A letter that is not written when its process dies is never written.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final, Protocol

from marshal_py.client.messages.answers import Answers
from marshal_py.client.messages.dead_letters import Letter
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.claims.offset_run import OffsetRun
from marshal_py.protocol.claims.redelivery import Redeliveries
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.ready import MemberOptions
from marshal_py.protocol.wire.identity import NONE
from marshal_py.transport.memory_broker import MemoryMessage
from marshal_py.transport.ports import RawMessage
from marshal_sim.cluster.client import Client, ClientEnvironment
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.faults import spread
from marshal_sim.cluster.feed import Feed, HandlerCall
from marshal_sim.judge.evidence import DeadLetter, Delivery, Evidence

DELIVERIES_MAX: Final = 3  # of one message: low, so that a run sees dead letters
NAKS: Final = 0.25  # the share of answers that give a message back
TERMS: Final = 0.05  # the share of answers that end one
DELAY_INTERVALS: Final = 3  # the longest delay that a handler names: longer than a hand-over waits for its handlers
WRITE_INTERVALS: Final = 1  # the longest time that a letter takes
FAILS: Final = 0.2  # the share of attempts to write a letter that fail


class AnsweringEnvironment(ClientEnvironment, Protocol):
    """Declares what such a client needs of the cluster around it, beyond what every client needs."""

    healed: bool
    evidence: Evidence


class _Letters:
    """Takes the letters that a client's Answers have written."""

    def __init__(self, client: AnsweringClient) -> None:
        self._client = client
        self.written: int = 0
        self.held_bytes: int = 0

    def post(self, letter: Letter) -> None:
        self._client.write_letter(letter)


class AnsweringClient(Client):
    """Simulates a consumer whose handlers answer in every way that they can. In at-most-once mode they only ack."""

    environment: AnsweringEnvironment

    def __init__(
        self,
        environment: AnsweringEnvironment,
        number: int,
        group: str,
        options: MemberOptions,
        clock: MachineClock,
        concurrency: int,
    ) -> None:
        super().__init__(environment, number, group, options, clock, concurrency)
        self._answers: Answers | None = None
        self._letters: dict[int, tuple[Letter, DeadLetter]] = {}  # on their way, by a number
        self._letter_number = 0
        self._answered: Delivery | None = None  # the delivery that a handler answers just now
        self._due_wakes: dict[int, int] = {}  # by claim: the true time for which a wake-up is scheduled
        self._period_ms = 0  # when the reports of the present period began

    @property
    def answers(self) -> Answers:
        if self._answers is None:
            assert self.member is not None
            options = ConsumerOptions(max_deliver=DELIVERIES_MAX, dead_letter_topic="dead")
            self._answers = Answers(self.member, options, self.now)
            self._answers.letters = _Letters(self)
        return self._answers

    def act(self, _: None) -> None:
        super().act(_)
        now_ms = self.now().mono_ms
        if self._answers is not None and now_ms - self._period_ms >= self.options.interval_ms // 3:
            self._period_ms = now_ms
            self._answers.reports.end_period()

    # --- delivering again

    def _pump(self, feed: Feed) -> None:
        super()._pump(feed)
        found = _redeliveries(feed.claim)
        if found is None or not found.waiting or feed.blocked:
            return
        epoch, due_ms = feed.claim.epoch, self.clock.true_ms(found.next_ms())
        if due_ms > self.environment.now_ms and self._due_wakes.get(epoch) != due_ms:
            self._due_wakes[epoch] = due_ms
            self.environment.schedule(due_ms - self.environment.now_ms, self, self._wake, feed)

    def _wake(self, feed: Feed) -> None:
        self._due_wakes.pop(feed.claim.epoch, None)
        if feed.claim.phase is not ClaimPhase.GONE:
            self._pump(feed)

    def _next_offset(self, feed: Feed) -> int:
        """Returns what is due again first; then the next new message, unless too many wait or it goes to a letter."""
        claim, tracker = feed.claim, feed.claim.tracker
        if not isinstance(tracker, AtLeastOnce):
            return super()._next_offset(feed)
        now, found = self.now(), tracker.redeliveries
        if found is not None:
            due = [one for one in found.waiting.values() if one.due_ms <= now.mono_ms]
            due = [one for one in due if not one.run.is_finished(one.at)]
            if due:
                return min(due).offset
            if found.full:
                return NONE
        assert self.member is not None
        while (offset := super()._next_offset(feed)) != NONE and self.member.may_deliver(claim.epoch, now):
            if tracker.next_delivered(offset, DELIVERIES_MAX) != offset:
                break
            self.answers.post_undelivered(claim, feed.runs[0], _raw(offset), tracker.delivery_count(offset) - 1)
        return offset

    def _take(self, feed: Feed, offset: int, mono_ms: int) -> tuple[OffsetRun, int]:
        found = _redeliveries(feed.claim)
        if found is None or offset not in found.waiting:
            return super()._take(feed, offset, mono_ms)
        one = found.take(mono_ms)
        assert one is not None
        self.answers.redelivered += 1
        return one.run, one.at

    # --- answers

    def _answer(self, claim: Claim, call: HandlerCall, member: Member) -> None:
        environment, delivery, run = self.environment, call.delivery, call.run
        draw = environment.rng.random()
        if run is None or environment.healed or draw >= NAKS + TERMS:
            super()._answer(claim, call, member)
            return
        delay_ms = spread(environment.rng, 1, DELAY_INTERVALS * self.options.interval_ms)
        if member.ack_is_late(claim):
            delivery.give_back(environment.now_ms, delay_ms)
            return
        self._answered, message = delivery, [_raw(delivery.offset)]
        if draw < TERMS:
            self.answers.term(claim, run, call.place, message, "no order")
        else:
            assert isinstance(claim.tracker, AtLeastOnce)
            again = claim.tracker.redelivered(delivery.offset)  # one handler at a time has a message
            self.answers.nak(claim, run, call.place, message, delay_ms / 1000, again)
        if self._answered is not None:  # no letter takes its place
            delivery.give_back(environment.now_ms, delay_ms)
        self._answered = None

    # --- dead letters

    def write_letter(self, letter: Letter) -> None:
        """Writes a letter some time later."""
        note = DeadLetter((self.group, *letter.claim.tp), self.number, letter.claim.epoch, letter.offset)
        note.delivery, self._answered = self._answered, None
        self.environment.evidence.letters.append(note)
        self._begin_letter(letter, note)

    def _begin_letter(self, letter: Letter, note: DeadLetter) -> None:
        self._letter_number += 1
        self._letters[self._letter_number] = (letter, note)
        self._send_letter(self._letter_number)

    def _send_letter(self, number: int) -> None:
        delay_ms = spread(self.environment.rng, 1, WRITE_INTERVALS * self.options.interval_ms)
        self.environment.schedule(delay_ms, None, self._arrive, number)

    def _arrive(self, number: int) -> None:
        """Writes a letter to its topic, or fails to. Then the process hears of it, if it lives."""
        environment = self.environment
        down = environment.broker.writes_down_until_ms > environment.now_ms
        if not down and (environment.healed or environment.rng.random() >= FAILS):
            note = self._letters[number][1]
            note.written_ms = environment.now_ms
            environment.schedule(environment.network_faults.read_ms(), self, self._acknowledged, number)
        else:
            environment.schedule(self.options.interval_ms // 10, self, self._send_letter, number)

    def _acknowledged(self, number: int) -> None:
        """Counts a message as done, as DeadLetters in client/messages/dead_letters.py does."""
        letter, note = self._letters.pop(number)
        assert self.member is not None
        if note.delivery is not None:
            note.delivery.finish(self.environment.now_ms)
        assert self.answers.letters is not None
        self.answers.letters.written += 1
        if letter.needed:
            assert isinstance(letter.claim.tracker, AtLeastOnce)
            letter.claim.tracker.finish_posted(letter.run, letter.at)
            self.answers.reports.note("dead_letter", letter.claim, letter.offset, letter.reason)
        self.act(None)

    # --- a cloned machine

    def _blank(self, number: int, clock: MachineClock, memo: dict[int, Any]) -> Client:
        clone = AnsweringClient(self.environment, number, self.group, self.options, clock, self.concurrency)
        for letter, note in self._letters.values():
            claim, run = deepcopy(letter.claim, memo), deepcopy(letter.run, memo)
            copied = DeadLetter(note.key, number, note.epoch, note.offset)
            self.environment.evidence.letters.append(copied)
            clone._begin_letter(letter._replace(claim=claim, run=run), copied)
        return clone


def _redeliveries(claim: Claim) -> Redeliveries | None:
    return claim.tracker.redeliveries if isinstance(claim.tracker, AtLeastOnce) else None


def _raw(offset: int) -> RawMessage:
    """Returns what stands for a message: nobody reads it, and it has no size."""
    return MemoryMessage("", 0, offset, None, None, None, 0)
