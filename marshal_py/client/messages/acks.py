"""Carries out the acks of messages. Messages that were delivered together share one Delivered, which takes the lock.

A run (OffsetRun) records which messages of one fetch of one claim were delivered and acked. This file is imported by
message.py: it knows nothing of messages but how to make one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from marshal_py.client.connection.context import ForkedLock
from marshal_py.client.messages.answers import Answers, check_delay, check_reason
from marshal_py.client.values.options import BOUNDS, ConsumerOptions
from marshal_py.protocol.claims.claim import Claim, ClaimPhase, Spans, finished_spans, log_has, spans_of
from marshal_py.protocol.claims.delivery import AtLeastOnce, AtMostOnce, OffsetRun
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.fencing_token import Token
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.transport.ports import RawMessage
from marshal_py.transport.serialization import Deserializer

ACK_TIMEOUT_S: Final = 10.0  # how long `double_ack` waits by default: as long as a consumer's `stop`


class Acked(NamedTuple):
    """The offsets that were acked in one claim, as spans (`spans_of`). `late`: the ack came too late."""

    claim: Claim
    spans: Spans
    late: bool = False


Ack = Callable[[], Sequence[Acked]]  # marks messages as done, and returns what the log must accept then


class DeliveryContext:
    """What all deliveries of a consumer share. `delivered`: its count. `make(raw, delivered, index, value)`: the user's
    message of fetched `raw`, index in the run, bytes."""

    __slots__ = (
        "answers",
        "at_work",
        "clock_now",
        "confirm",
        "delivered",
        "handle_of",
        "incarnation",
        "key_deserializer",
        "lock",
        "lost_acks",
        "make",
        "member",
        "value_deserializer",
    )

    clock_now: Callable[[], Instant]
    incarnation: bytes
    key_deserializer: Deserializer | None
    lock: AbstractContextManager[object]
    make: Callable[..., Any]
    member: Member
    value_deserializer: Deserializer | None

    def __init__(
        self,
        member: Member,
        lock: AbstractContextManager[object],
        clock_now: Callable[[], Instant],
        incarnation: bytes,
        make: Callable[..., Any],
        options: ConsumerOptions,
        answers: Answers,
    ) -> None:
        self.member, self.lock, self.clock_now, self.incarnation = member, lock, clock_now, incarnation
        self.make = make
        self.key_deserializer, self.value_deserializer = options.key_deserializer, options.value_deserializer
        self.answers: Answers = answers
        self.delivered: int = 0
        self.lost_acks: LostAcks = LostAcks()
        # Makes the handle of a message, with the lock held; set by the consumer (message.py).
        self.handle_of: Callable[[Any], bytes]
        # Checks that the caller may wait, acks, and waits until the log has accepted what the call returned; set by
        # the consumer (confirmations.py). A caller that is refused has acked nothing.
        self.confirm: Callable[[Ack, float], None]
        # Hears which offsets of a claim a handler says to be at work on, with the lock held; set by the queue.
        self.at_work: Callable[[Claim, Sequence[int]], None] = _nobody_hears

    def forked(self, made_in_pid: int) -> None:
        """Makes acks raise UsedAfterFork in a forked child process, where it is called (`ForkedLock`)."""
        self.lock = ForkedLock("Message", made_in_pid)
        for claim in self.member.claims.values():
            claim.sealed = True  # so that acks ask for the lock


def _nobody_hears(claim: Claim, offsets: Sequence[int]) -> None:
    """Ignores what a handler says to be at work on: no `process` waits for it."""


class Delivered:
    """What messages of one claim that were delivered together have in common: claim, run, token."""

    __slots__ = ("again", "claim", "context", "key_deserializer", "make", "run", "token", "value_deserializer")

    claim: Claim
    context: DeliveryContext
    run: OffsetRun | None
    again: int

    def __init__(self, context: DeliveryContext, claim: Claim, run: OffsetRun | None, again: int = 0) -> None:
        """A delivery under `claim`. `run` tracks acks; None in at-most-once mode. `again`: how often this claim
        delivered it again, with this time."""
        self.context, self.claim, self.run, self.again = context, claim, run, again
        self.key_deserializer: Deserializer | None = context.key_deserializer
        self.value_deserializer: Deserializer | None = context.value_deserializer
        self.make: Callable[..., Any] = context.make
        self.token: Token = Token(context.incarnation, claim.epoch)

    def finish_late(self) -> bool:
        """Counts, under the lock, an ack after its claim's release or loss; returns False."""
        return not self.context.member.ack_is_late(self.claim)

    def in_time(self, first: int, stop: int) -> bool:
        """Returns whether the messages with the indexes [first, stop) of `run` were acked when the claim was sealed."""
        with self.context.lock:
            if self.run is None:
                return self.finish_late()
            if all(map(self.run.is_finished, range(first, stop))):
                return True
            self.context.lost_acks.late(self.claim.tp)
            return self.finish_late()

    def returned(self, count: int) -> None:
        """Notes acks in at-most-once mode, where they only say that the handler is done with so many messages."""
        if isinstance(self.claim.tracker, AtMostOnce):
            self.claim.tracker.acked(count, self.context.clock_now().mono_ms)

    def finish_range(self, first: int, stop: int) -> bool:
        """Acks [first, stop) of `run`; False if the claim ended before."""
        with self.context.lock:
            if self.claim.sealed:
                return self.in_time(first, stop)
            if self.run is not None:
                self.run.finish_range(first, stop)
            else:
                self.returned(stop - first)
            return True

    def finish_one(self) -> bool:
        """Notes the ack of one message in at-most-once mode, otherwise as `finish_range`."""
        with self.context.lock:
            if self.claim.sealed:
                return self.finish_late()
            self.returned(1)
            return True

    def nak(self, first: int, messages: Sequence[RawMessage], delay_s: float | None) -> bool:
        """Has `messages`, from `first` in `run` on, delivered again after `delay_s`. False if the claim ended, or all
        are done or delivered again."""
        check_delay(delay_s)
        context = self.context
        with context.lock:
            context.answers.tracker_of(self.claim, "nak")
            if self.claim.sealed:
                return self.finish_late()
            assert self.run is not None
            self.run.settle()
            return context.answers.nak(self.claim, self.run, first, messages, delay_s, self.again)

    def put_back(self, index: int, message: RawMessage, delay_s: float) -> None:
        """Has a message delivered later that is queued for its handler, without counting a delivery (D17)."""
        with self.context.lock:
            if not self.claim.sealed:
                assert self.run is not None
                self.run.settle()
                self.context.answers.put_back(self.claim, self.run, index, message, delay_s)

    def term(self, first: int, messages: Sequence[RawMessage], reason: str) -> bool:
        """Finishes `messages`, whose first index in `run` is `first`, for good; otherwise as `nak`."""
        reason, context = check_reason(reason), self.context
        with context.lock:
            context.answers.tracker_of(self.claim, "term")
            if self.claim.sealed:
                return self.finish_late()
            assert self.run is not None
            self.run.settle()
            return context.answers.term(self.claim, self.run, first, messages, reason)

    def acked(self, first: int, stop: int, in_time: bool) -> Acked:
        """Returns what an ack of the indexes [first, stop) of `run` has to have confirmed; `in_time` is its result."""
        return Acked(self.claim, () if self.run is None else spans_of(self.run.offsets[first:stop]), not in_time)

    def touch(self, first: int, stop: int) -> None:
        """Restarts the handler timeout of [first, stop) of `run`, in at-most-once mode of the claim. Nothing once it is
        sealed: acks that came since are too late, and must not be noted."""
        with self.context.lock:
            if self.run is not None:
                self.context.at_work(self.claim, self.run.offsets[first:stop])
            if self.claim.sealed:
                return
            tracker, mono_ms = self.claim.tracker, self.context.clock_now().mono_ms
            if isinstance(tracker, AtLeastOnce):
                if self.run is not None:
                    self.run.settle()
                    tracker.touch(self.run, first, stop, mono_ms)
            elif tracker.in_flight_since_ms is not None:
                tracker.in_flight_since_ms = mono_ms


# --- The acks of one consumer that the log will not have: their messages are delivered again, though they were acked.
#
# An ack is lost if it comes too late (the claim was released or lost before), or if its claim is lost before the log
# has accepted it. `flush` reports that, so a program that acks and then flushes knows as much as one that calls
# `double_ack`. Called with the Marshal's lock held.


class Loss(NamedTuple):
    """When acks of a partition were lost last, by number of loss. `certain`: the log says so; else it may still get
    them."""

    number: int
    certain: bool


class LostAcks:
    """Keeps the lost acks of one consumer until a flush has reported them: one entry per partition at most."""

    def __init__(self) -> None:
        self.count: int = 0
        self._losses: dict[TopicPartition, Loss] = {}

    def late(self, tp: TopicPartition) -> None:
        """Notes an ack that came too late."""
        self._note(tp, certain=True)

    def ended(self, claims: Iterable[Claim], group: Group | None) -> None:
        """Notes what is lost with these claims, if they are GONE. `group`: as the log was when they ended."""
        for claim in claims:
            if claim.phase is not ClaimPhase.GONE or not isinstance(claim.tracker, AtLeastOnce):
                continue
            if claim.seek_to != NONE:
                continue  # its own user has moved it, and wants the messages again
            if not log_has(finished_spans(claim.tracker), claim, group):
                self._note(claim.tp, certain=claim.final is not None)

    def _note(self, tp: TopicPartition, *, certain: bool) -> None:
        self.count += 1
        self._losses[tp] = Loss(self.count, certain)

    def after(self, number: int) -> dict[TopicPartition, bool]:
        """Returns the partitions with losses after the loss `number`, and whether each is certain."""
        return {tp: loss.certain for tp, loss in self._losses.items() if loss.number > number}

    def reported(self, tps: Iterable[TopicPartition]) -> None:
        """Forgets the losses of these partitions, because the program knows of them."""
        for tp in tps:
            self._losses.pop(tp, None)


# --- Notices messages whose handlers are silent for long, before the handler timeout ends their claims (PROTOCOL.md
# D4).
#
# Such a message is easily forgotten: others are acked and the partition seems to move, but its position does not.
# Called with the Marshal's lock held, every third of a heartbeat interval.


QUARTERS: Final = 4  # an event at each quarter of the handler timeout: early enough to look, and only three of them


class UnackedWatch:
    """Reports the oldest unacked message of each claim while it grows old, and a claim that tracks too many."""

    def __init__(self, member: Member, options: ConsumerOptions) -> None:
        self._member = member
        self._timeout_ms = round(1000 * options.handler_timeout_s)
        self._reported: dict[int, int] = {}  # epoch -> quarters of the timeout that were reported of its oldest message
        self._full: set[int] = set()  # epochs of which it was reported that nothing more is fetched

    def look(self, claims: Iterable[Claim], now: Instant) -> None:
        """Reports what has changed since the last look."""
        reported, self._reported = self._reported, {}
        full, self._full = self._full, set()
        for claim in claims:
            if claim.sealed:
                continue
            quarters, offset, age_ms = self._age(claim, now)
            if quarters:
                self._reported[claim.epoch] = quarters
            if quarters > reported.get(claim.epoch, 0):
                text = (
                    f"the oldest unacked message is {age_ms / 1000:.0f} s old; at {self._timeout_ms / 1000:g} s "
                    f"(handler_timeout_s) its partition is released"
                )
                self._advise(claim, offset, text)
            if isinstance(claim.tracker, AtLeastOnce) and claim.tracker.tracked >= BOUNDS.unacked:
                self._full.add(claim.epoch)
                if claim.epoch not in full:
                    text = f"{claim.tracker.tracked} messages are tracked above it: no more are fetched"
                    self._advise(claim, claim.position(), text)

    def _age(self, claim: Claim, now: Instant) -> tuple[int, int, int]:
        """Returns the quarters of the timeout that the longest silent handler was silent, its message (NONE in
        at-most-once mode), and its age."""
        oldest = claim.tracker.oldest() if isinstance(claim.tracker, AtLeastOnce) else None
        since_ms = claim.handler_since_ms() if oldest is None else oldest[0]
        if since_ms is None:
            return 0, NONE, 0
        age_ms = max(0, now.mono_ms - since_ms)
        return min(QUARTERS - 1, age_ms * QUARTERS // self._timeout_ms), NONE if oldest is None else oldest[1], age_ms

    def _advise(self, claim: Claim, offset: int, text: str) -> None:
        self._member.advise("unacked", claim.tp, epoch=claim.epoch, offset=offset, text=text)
        self._member.request_tick()
