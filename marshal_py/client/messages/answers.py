"""What handlers answer: `ack`, `nak` (deliver it again later), `term` (never again), dead letters, and what is overdue.

The tracker of the claim (protocol/claims.py) knows which messages are finished and which wait, and
delivery_queue.py delivers these again. With a dead-letter topic, messages that are ended or were delivered
`max_deliver` times go there. Everything is called with the Marshal's lock held, but for what writes dead letters and
for Delivered, which takes it. This file knows nothing of messages but how to make one: message.py imports it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from marshal_py.client.connection import Ask, Context, ForkedLock, Rest, Tasks, TaskSteps
from marshal_py.client.values.options import BOUNDS, ConsumerOptions
from marshal_py.client.values.requests import payload_bytes
from marshal_py.errors import InvalidOption, MarshalError, MessageTooLarge, NeedsAtLeastOnce
from marshal_py.protocol.claims import (
    AtLeastOnce,
    AtMostOnce,
    Claim,
    ClaimPhase,
    OffsetRun,
    Spans,
    finished_spans,
    log_has,
    spans_of,
)
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.advisory import AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, Instant, Token, TopicPartition
from marshal_py.transport.ports import MessageWriter, RawMessage
from marshal_py.transport.serialization import Deserializer

# --- Reports single messages in the group's log and to the consumer's user, in a bounded number of records.
#
# Handlers may terminate thousands of messages per second, and each Note is a record that every member of the group
# reads. So only the first few of a period get a Note each; the rest of the period shares one per partition and kind.
# Called with the Marshal's lock held.


NOTES_EACH_MAX: Final = 16  # Notes of single messages per period, a third of a heartbeat interval


class _More(NamedTuple):
    """Sums up the messages of a period that got no Note of their own."""

    epoch: int
    low: int
    high: int
    messages: int
    text: str


class Reports:
    """Reports the messages of one consumer."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._left = NOTES_EACH_MAX
        self._more: dict[tuple[AdvisoryKind, TopicPartition], _More] = {}

    def note(self, kind: AdvisoryKind, claim: Claim, offset: int, text: str) -> None:
        """Reports that `kind` happened to the message at `offset`; `text` says why."""
        if self._left:
            self._left -= 1
            self._member.note(kind, claim.tp, offset, offset + 1, text, claim.epoch)
            self._member.request_tick()
            return
        key = kind, claim.tp
        known = self._more.get(key)
        if known is None or known.epoch != claim.epoch:
            self._send(key)
            known = _More(claim.epoch, offset, offset, 0, "")
        low, high = min(known.low, offset), max(known.high, offset)
        self._more[key] = _More(claim.epoch, low, high, known.messages + 1, text)

    def end_period(self) -> None:
        """Reports what was summed up. Called every third of a heartbeat interval."""
        self._left = NOTES_EACH_MAX
        for key in [*self._more]:
            self._send(key)

    def _send(self, key: tuple[AdvisoryKind, TopicPartition]) -> None:
        more = self._more.pop(key, None)
        if more is not None:
            text = f"{more.messages} messages of this range; the last one: {more.text}"
            self._member.note(key[0], key[1], more.low, more.high + 1, text, more.epoch)
            self._member.request_tick()


# --- Writes messages to the dead-letter topic: those delivered too often, and those that handlers ended by `term`.
#
# A message is done when Kafka has acknowledged its dead letter, and not before; so a crash between the two repeats the
# letter and loses none. The letters are written on a thread of their own, which begins with the first one. What the
# cluster refuses is tried again until the claim ends, with growing delays. A message that is too large for the
# dead-letter topic gets a letter without its content: the source topic has that, and the letter says where. The headers
# are those of Kafka's own dead-letter topics (KIP-1191).


LETTERS_AT_ONCE: Final = 500  # written between two waits for acknowledgements
WRITE_TIMEOUT_S: Final = 30.0  # for their acknowledgements, then they are written again
RETRY_S: Final = 1.0  # after the first failure; it doubles with each further one
RETRY_S_MAX: Final = 60.0
REASONS_MAX: Final = 100  # remembered, so that each is reported once; texts may name sizes and places
HEADERS: Final = "__dlq.errors."  # headers with this prefix are ours; a letter that failed before has older ones


class Letter(NamedTuple):
    """A message on its way to the dead-letter topic. `deliveries`: by the log. `reason`: why. `refused`: what the topic
    said of its size; then it has no content."""

    claim: Claim
    run: OffsetRun
    at: int
    message: RawMessage
    deliveries: int
    reason: str
    refused: str = ""

    def is_needed(self) -> bool:
        """Returns whether it must still be written: the claim is held, and nobody has acked the message meanwhile.
        Called with the Marshal's lock held."""
        if self.claim.sealed:
            return False
        self.run.settle()
        return not self.run.is_finished(self.at)

    @property
    def offset(self) -> int:
        return self.message.offset() or 0


class DeadLetters:
    """Writes the dead letters of one consumer."""

    def __init__(
        self, topic: str, member: Member, context: Context, reports: Reports, open_writer: Callable[[], MessageWriter]
    ) -> None:
        """Prepares letters to `topic`. Nothing is opened or started before the first one."""
        self.topic: str = topic
        self.written: int = 0
        self.held_bytes: int = 0  # of the keys and values of the letters that wait
        self._member, self._context, self._reports, self._open_writer = member, context, reports, open_writer
        self._waiting: deque[Letter] = deque()
        self._worker: Tasks | None = None
        self._writer: MessageWriter | None = None
        self._closed = False
        self._failed: set[str] = set()  # why attempts failed since a letter has waited without a break
        self._retry_s = RETRY_S

    @property
    def pending(self) -> bool:
        """Returns whether a letter is on its way. Called with the Marshal's lock held."""
        return any(letter.is_needed() for letter in self._waiting)

    def post(self, letter: Letter) -> None:
        """Has a letter written soon. Called with the Marshal's lock held; waits for nothing."""
        if self._worker is None:
            self._worker = self._context.new_worker(f"marshal-dead-letters-{self._member.name}")
        self._waiting.append(letter)
        self.held_bytes += payload_bytes((letter.message,))
        self._worker.submit(f"group {self._member.name}: dead letters", self._write_all)

    def close(self) -> None:
        """Writes nothing more, and disconnects soon."""
        self._closed = True
        if self._worker is not None:
            self._worker.submit(f"group {self._member.name}: the end of dead letters", self._close_writer)
            self._worker.end()

    # --- on the thread

    def _write_all(self) -> TaskSteps:
        """Writes until no letter waits. After a failure one letter at a time is tried, so that one stops no other."""
        at_once = LETTERS_AT_ONCE
        while not self._closed and (letters := self._next(at_once)):
            try:
                yield Ask(partial(self._write, letters))
            except Exception as error:
                at_once = 1
                self._close_writer()
                if isinstance(error, MessageTooLarge) and self._leave_out(letters, error):
                    continue
                if not isinstance(error, MarshalError):
                    self._context.logger.exception("group %s: a dead letter was not written", self._member.name)
                self._note_failure(str(error) or repr(error), letters[0])
                yield Rest(self._retry_s)
                self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
            else:
                self._finish(letters)

    def _leave_out(self, letters: Sequence[Letter], error: MessageTooLarge) -> bool:
        """Has a letter that is too large written without content. False if none is left to try. Which one of several it
        is, is not known."""
        letter = letters[0]
        if len(letters) == 1 and not letter.refused:
            with self._context.lock:
                self._waiting[0] = letter._replace(refused=error.reason)  # only this thread takes any away
            return True
        return len(letters) > 1

    def _next(self, at_once: int) -> list[Letter]:
        with self._context.lock:
            needed = [letter for letter in self._waiting if letter.is_needed()]
            self._waiting = deque(needed)
            self.held_bytes = sum([payload_bytes((letter.message,)) for letter in needed])
            if not needed or len(self._failed) >= REASONS_MAX:
                self._failed.clear()
            return needed[:at_once]

    def _write(self, letters: Sequence[Letter]) -> None:
        if self._writer is None:
            self._writer = self._open_writer()
        for letter in letters:
            value, key = (None, None) if letter.refused else (letter.message.value(), letter.message.key())
            self._writer.write(self.topic, value, key, self._headers(letter))
        self._writer.flush(WRITE_TIMEOUT_S)

    def _headers(self, letter: Letter) -> list[tuple[str, bytes | None]]:
        own = {
            "topic": letter.claim.tp.topic,
            "partition": str(letter.claim.tp.partition),
            "offset": str(letter.offset),
            "group": self._member.name,
            "delivery.count": str(letter.deliveries),
            "message": letter.reason,
        }
        kept = [(name, value) for name, value in letter.message.headers() or () if not name.startswith(HEADERS)]
        if letter.refused:
            kept, own["left.out"] = [], f"key, value ({len(letter.message)} bytes) and headers: {letter.refused}"
            own["topic.id"] = letter.claim.topic_id
        return [*kept, *((HEADERS + name, text.encode()) for name, text in own.items())]

    def _finish(self, letters: Sequence[Letter]) -> None:
        """Counts the messages as done, because Kafka has acknowledged their letters."""
        self._retry_s = RETRY_S
        with self._context.outbox, self._context.lock:
            for letter in letters:
                self.written += 1
                if letter.is_needed():
                    assert isinstance(letter.claim.tracker, AtLeastOnce)
                    letter.claim.tracker.finish_posted(letter.run, letter.at, letter.offset)
                    place = f"in {self.topic}" + ", without its content, which is too large for it" * bool(
                        letter.refused
                    )
                    self._reports.note("dead_letter", letter.claim, letter.offset, f"{place}: {letter.reason}")
            self._member.request_tick()
            self._context.changed.notify_all()

    def _note_failure(self, reason: str, letter: Letter) -> None:
        """Tells the user once for each reason, moves the letter behind the others, and tries again later."""
        with self._context.lock:
            if self._waiting and self._waiting[0] is letter:
                self._waiting.rotate(-1)
            if reason not in self._failed:
                self._failed.add(reason)
                text = f"not written to {self.topic}, tried again: {reason}"
                self._member.advise(
                    "dead_letter_failed", letter.claim.tp, epoch=letter.claim.epoch, offset=letter.offset, text=text
                )
                self._member.request_tick()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


# --- Naks and terms


NAK_DELAY_S: Final = 0.5  # after the first delivery, if the user names no delay: a stumble of a database is over then
NAK_DELAY_DOUBLED_S_MAX: Final = 60.0  # it doubles with each delivery up to this: a poison message costs little
NAK_DELAY_S_MAX: Final = 86_400.0  # of a delay that the user names, which keeps the position back all the time
POISON_DELIVERIES: Final = 5  # of one message: after so many it is reported, and again each time the number doubles
GIVEN_BACK: Final = "given back at delivery_count {}"  # why a letter is written instead of a further delivery
# Why a letter is written instead of a delivery. It says no more than the log knows: owners that died may have delivered
# less often than is counted, and a handler's ack may have died with its process.
UNANSWERED: Final = "the log counts {} deliveries, which may be too many, and has no ack"
REASON_CHARS_MAX: Final = 500  # of `term`, in a dead letter; a Note holds half as much


class LetterWriter(Protocol):
    """Writes letters to the dead-letter topic; `written` counts them. `held_bytes`: of those that are not written."""

    @property
    def written(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...

    def post(self, letter: Letter) -> None: ...


class Answers:
    """Carries out the answers of one consumer's handlers, and counts them since the consumer was made."""

    def __init__(self, member: Member, options: ConsumerOptions, clock_now: Callable[[], Instant]) -> None:
        self._member, self._options, self._now = member, options, clock_now
        self.reports: Reports = Reports(member)
        self.letters: LetterWriter | None = None  # set by the consumer's maker if there is a dead-letter topic
        self.naks: int = 0
        self.waited: bool = False  # whether a message was ever given back or put back
        self.redelivered: int = 0
        self.terminated: int = 0
        self.undelivered: int = 0  # messages that went to the dead-letter topic before this consumer delivered them

    def tracker_of(self, claim: Claim, verb: str) -> AtLeastOnce:
        """Returns the claim's tracker. Raises NeedsAtLeastOnce in at-most-once mode, which has no such answers."""
        if not isinstance(claim.tracker, AtLeastOnce):
            raise NeedsAtLeastOnce(verb, self._member.name)
        return claim.tracker

    def nak(
        self,
        claim: Claim,
        run: OffsetRun,
        first: int,
        messages: Sequence[RawMessage],
        delay_s: float | None,
        again: int,
    ) -> bool:
        """Makes messages wait. `first`: in `run`. `delay_s` None grows. `again`: which delivery is answered; those
        delivered again since stay. False if all are done."""
        tracker, now_ms = self.tracker_of(claim, "nak"), self._now().mono_ms
        was_full = tracker.redeliveries is not None and tracker.redeliveries.full
        before_bytes, most_bytes = self.waiting_bytes(), self._options.prefetch_bytes
        waits, self.waited = False, True
        for index, message in enumerate(messages, first):
            if tracker.redelivered(run.offsets[index]) != again:
                continue
            count = tracker.delivery_count(run.offsets[index])
            delay = grown_delay_s(count) if delay_s is None else delay_s
            if self._exhausted(count):
                if self._post(claim, run, index, message, count, GIVEN_BACK.format(count)):
                    waits = True
                    self.naks += 1
            elif tracker.give_back(run, index, message, now_ms + round(1000 * delay), payload_bytes((message,))):
                waits = True
                self.naks += 1
                self._report_poison(claim, run.offsets[index], count)
        if not was_full and tracker.redeliveries is not None and tracker.redeliveries.full:
            text = f"{len(tracker.redeliveries.waiting)} messages wait to be delivered again"
            self._report_storm(claim, f"{text}: nothing new of the partition is delivered meanwhile")
        if before_bytes < most_bytes <= (size_bytes := self.waiting_bytes()):
            text = f"messages of {size_bytes} bytes wait to be delivered again, and prefetch_bytes is {most_bytes}"
            self._report_storm(claim, f"{text}: the consumer receives nothing new of any partition meanwhile")
        return waits

    def put_back(self, claim: Claim, run: OffsetRun, index: int, message: RawMessage, delay_s: float) -> None:
        """Makes a message wait that is queued for a handler which has not begun (D17)."""
        self.waited, due_ms = True, self._now().mono_ms + round(1000 * delay_s)
        self.tracker_of(claim, "nak").give_back(run, index, message, due_ms, payload_bytes((message,)))

    def term(self, claim: Claim, run: OffsetRun, first: int, messages: Sequence[RawMessage], reason: str) -> bool:
        """Finishes messages for good, and reports each with the reason. Returns False if all of them were finished."""
        tracker, ended = self.tracker_of(claim, "term"), 0
        for index, message in enumerate(messages, first):
            if self.letters is not None:
                count = tracker.delivery_count(run.offsets[index])
                ended += self._post(claim, run, index, message, count, reason or "ended by its handler")
            elif run.finish(index):
                ended += 1
                self.reports.note("terminated", claim, run.offsets[index], reason)
        self.terminated += ended
        return ended > 0

    def waiting_bytes(self) -> int:
        """Returns the bytes that wait to be delivered again or to become dead letters, which no handler has."""
        size_bytes = 0 if self.letters is None else self.letters.held_bytes
        for claim in self._member.claims.values() if self.waited else ():
            if isinstance(claim.tracker, AtLeastOnce) and claim.tracker.redeliveries is not None:
                size_bytes += claim.tracker.redeliveries.size_bytes
        return size_bytes

    # --- dead letters

    def _exhausted(self, delivery_count: int) -> bool:
        return self.deliveries_max is not None and delivery_count >= self.deliveries_max

    def _post(
        self, claim: Claim, run: OffsetRun, index: int, message: RawMessage, deliveries: int, reason: str
    ) -> bool:
        """Sends a message to the dead-letter topic. Returns False if it is finished or on its way already."""
        assert self.letters is not None
        if not self.tracker_of(claim, "term").post(run, index):
            return False
        self.letters.post(Letter(claim, run, index, message, deliveries, reason))
        return True

    @property
    def deliveries_max(self) -> int | None:
        """Returns after how many deliveries a message goes to the dead-letter topic; None if it never does."""
        return self._options.max_deliver if self.letters is not None else None

    def post_undelivered(self, claim: Claim, run: OffsetRun, message: RawMessage, deliveries: int) -> int:
        """Sends the next message of `run` to the dead-letter topic instead of delivering it once more. Returns its
        index there."""
        index = run.deliver(1, self._now().mono_ms)
        self._post(claim, run, index, message, deliveries, UNANSWERED.format(deliveries))
        self.undelivered += 1
        return index

    def _report_poison(self, claim: Claim, offset: int, count: int) -> None:
        """Reports a message that was delivered POISON_DELIVERIES times, twice as many, four times as many, ..."""
        times, rest = divmod(count, POISON_DELIVERIES)
        if rest == 0 and times & (times - 1) == 0:
            self.reports.note(
                "poison_message", claim, offset, f"{count} deliveries, and its handler gave it back again"
            )

    def _report_storm(self, claim: Claim, text: str) -> None:
        self._member.advise("nak_storm", claim.tp, epoch=claim.epoch, offset=claim.position(), text=text)
        self._member.request_tick()


def grown_delay_s(delivery_count: int) -> float:
    """Returns how many seconds `nak` waits by default after the given number of deliveries: it doubles with each."""
    doubled = min(delivery_count - 1, 16)  # more would pass the bound anyway
    return min(NAK_DELAY_DOUBLED_S_MAX, NAK_DELAY_S * (1 << doubled))


def check_delay(delay_s: float | None) -> None:
    """Raises InvalidOption if `nak` cannot wait so long."""
    if delay_s is None:
        return
    number = isinstance(delay_s, int | float) and not isinstance(delay_s, bool)
    if not number or not 0 <= delay_s <= NAK_DELAY_S_MAX:
        rule = f"a number of seconds from 0 to {NAK_DELAY_S_MAX:g}, or None for one that grows with each delivery"
        raise InvalidOption("delay_s", delay_s, rule)


def check_reason(reason: str) -> str:
    """Returns the reason of a `term`, cut to REASON_CHARS_MAX characters. What utf-8 has no bytes for, such as half a
    surrogate pair, becomes an escape. Raises InvalidOption if it is no text."""
    if not isinstance(reason, str):
        raise InvalidOption("reason", reason, "a text for people who look at the group's advisories")
    return reason[:REASON_CHARS_MAX].encode(errors="backslashreplace").decode()


# --- Acks. Messages that were delivered together share one Delivered, which takes the lock
#
# A run (OffsetRun) records which messages of one fetch of one claim were delivered and acked.


ACK_TIMEOUT_S: Final = 10.0  # how long `double_ack` waits by default: as long as a consumer's `stop`


class Acked(NamedTuple):
    """The offsets that were acked in one claim, as spans (`spans_of`). `late`: the ack came too late."""

    claim: Claim
    spans: Spans
    late: bool = False


Ack = Callable[[], Sequence[Acked]]  # marks messages as done, and returns what the log must accept then


def _nobody_hears(*_: object) -> None:
    """Ignores what only a `process` asks for."""


@dataclass(slots=True, eq=False)
class DeliveryContext:
    """What all deliveries of a consumer share. `delivered`: its count. `make(raw, delivered, index, value)`: the user's
    message of fetched `raw`, index in the run, bytes."""

    member: Member
    lock: AbstractContextManager[object]
    clock_now: Callable[[], Instant]
    incarnation: bytes
    make: Callable[..., Any]
    options: InitVar[ConsumerOptions]
    answers: Answers
    key_deserializer: Deserializer | None = field(init=False)
    value_deserializer: Deserializer | None = field(init=False)
    # Makes the handle of a message, with the lock held; set by the consumer (message.py).
    handle_of: Callable[[Any], bytes] = field(init=False)
    # Checks that the caller may wait, acks, and waits until the log has accepted what the call returned; set by
    # the consumer (membership.py). A caller that is refused has acked nothing.
    confirm: Callable[[Ack, float], None] = field(init=False)
    # Hears which offsets of a claim a handler says to be at work on, with the lock held; set by the queue.
    at_work: Callable[[Claim, Sequence[int]], None] = _nobody_hears
    # Hears of messages that became dead letters before they were delivered, likewise.
    counted_out: Callable[[Any], None] = _nobody_hears
    # Hears which offsets of a claim a handler has ended by `term`, likewise.
    terminated: Callable[[Claim, Sequence[int]], None] = _nobody_hears
    delivered: int = 0
    lost_acks: LostAcks = field(default_factory=lambda: LostAcks())

    def __post_init__(self, options: ConsumerOptions) -> None:
        self.key_deserializer, self.value_deserializer = options.key_deserializer, options.value_deserializer

    def forked(self, made_in_pid: int) -> None:
        """Makes acks raise UsedAfterFork in a forked child process, where it is called (`ForkedLock`)."""
        self.lock = ForkedLock("Message", made_in_pid)
        for claim in self.member.claims.values():
            claim.sealed = True  # so that acks ask for the lock


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
            ended = context.answers.term(self.claim, self.run, first, messages, reason)
            if ended:
                context.terminated(self.claim, self.run.offsets[first : first + len(messages)])
            return ended

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


# --- Notices messages whose handlers are silent for long, before the handler timeout ends their claims (D4)
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
