"""Messages and batches made by hand, for tests of handlers. They are real ones, of claims that no log knows of.

Answers are recorded and take effect as in a consumer: an ack counts, or comes too late if the claim is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, cast

from msgspec import structs

from marshal_py.client.messages.answers import Ack, Acked, Answers, Delivered, DeliveryContext
from marshal_py.client.messages.message import Batch, Handles, Message, Part
from marshal_py.client.values.options import ConsumerOptions, Delivery
from marshal_py.errors import ClaimLost, InvalidOption
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.memory import MemoryMessage
from marshal_py.transport.ports import RawMessage
from marshal_py.transport.serialization import K_co, V_co

INCARNATION: Final = bytes(16)  # of all these messages, so that their tokens can be compared
GROUP: Final = "test"


class Answer(NamedTuple):
    """One call of a handler. `verb`: the method's name. `argument`: its first argument, if it says something."""

    verb: str
    argument: object = None


class RecordedMessage(Message[K_co, V_co], frozen=True, kw_only=True, gc=True):
    """A message made by hand. `answers`: what the handler has called, in order."""

    answers: list[Answer]

    @property
    def verbs(self) -> list[str]:
        """Returns the names of the methods that the handler has called, in order: ["in_progress", "ack"]."""
        return [answer.verb for answer in self.answers]

    @property
    def acked(self) -> bool:
        """Returns whether the message was acked (or ended by `term`) in time."""
        tracker, run = self._delivered.claim.tracker, self._delivered.run
        if isinstance(tracker, AtMostOnce):
            return tracker.in_flight_since_ms is None
        self._delivered.claim.settle()
        return run is not None and run.is_finished(self._index)

    def lose_claim(self) -> None:
        """Takes the claim away, as when another member took over: `revoking` is True, and an ack comes too late.

        In a batch that concerns all messages of the partition.
        """
        with self._delivered.context.lock:
            self._delivered.claim.seal(ClaimPhase.GONE)

    def ack(self) -> bool:
        self.answers.append(Answer("ack"))
        return super().ack()


class RecordedDelivery(Delivered):
    """What messages made by hand have in common, and records in each of them what a handler calls."""

    __slots__ = ("messages",)

    messages: list[RecordedMessage[Any, Any]]  # by their index in the run

    def _note(self, first: int, stop: int, answer: Answer) -> None:
        for message in self.messages[first:stop]:
            message.answers.append(answer)

    def finish_range(self, first: int, stop: int) -> bool:
        self._note(first, stop, Answer("ack"))
        return super().finish_range(first, stop)

    def acked(self, first: int, stop: int, in_time: bool) -> Acked:
        for message in self.messages[first:stop]:
            message.answers[-1] = Answer("double_ack")  # the ack that it begins with was recorded
        return super().acked(first, stop, in_time)

    def nak(self, first: int, messages: Sequence[RawMessage], delay_s: float | None) -> bool:
        self._note(first, first + len(messages), Answer("nak", delay_s))
        return super().nak(first, messages, delay_s)

    def term(self, first: int, messages: Sequence[RawMessage], reason: str) -> bool:
        self._note(first, first + len(messages), Answer("term", reason))
        return super().term(first, messages, reason)

    def touch(self, first: int, stop: int) -> None:
        self._note(first, stop, Answer("in_progress"))
        super().touch(first, stop)


class RecordedBatch(Batch[K_co, V_co], Generic[K_co, V_co]):
    """A batch made by hand. `messages`: all of its messages, in the order of its parts."""

    __slots__ = ("messages",)

    def __init__(self, parts: Sequence[Part[K_co, V_co]], messages: Sequence[RecordedMessage[K_co, V_co]]) -> None:
        super().__init__(parts)
        self.messages: Sequence[RecordedMessage[K_co, V_co]] = messages

    @property
    def acked(self) -> bool:
        """Returns whether every message was acked (or ended by `term`) in time."""
        return all(message.acked for message in self.messages)


def make_message(
    value: Any = b"",
    *,
    key: Any = None,
    topic: str = "test",
    partition: int = 0,
    offset: int = 0,
    headers: Sequence[tuple[str, bytes | None]] = (),
    timestamp_ms: int | None = None,
    delivery: Delivery = "at_least_once",
    delivery_count: int = 1,
    epoch: int = 1,
    topic_id: str = "",
    revoking: bool = False,
) -> RecordedMessage[Any, Any]:
    """Makes a message that a handler can be called with. Nothing else is needed: no cluster, no consumer.

    `key`, `value`: what the handler should see; with deserializers that is no longer bytes. `timestamp_ms`: since 1970,
    None is now. `delivery_count`: how often it was delivered, this time included. `epoch`: of its fencing token; a
    message with a greater epoch has a greater token. `revoking`: whether its partition is moving to another member.

    Raises InvalidOption for a topic, a delivery or a number that no message can have.
    """
    for name, number, least in (
        ("partition", partition, 0),
        ("offset", offset, 0),
        ("delivery_count", delivery_count, 1),
        ("epoch", epoch, 0),
    ):
        if type(number) is not int or not least <= number <= OFFSET_MAX:
            raise InvalidOption(name, number, f"an int from {least} to {OFFSET_MAX}")
    if timestamp_ms is not None and type(timestamp_ms) is not int:
        raise InvalidOption("timestamp_ms", timestamp_ms, "an int, or None")
    if not isinstance(topic, str):
        raise InvalidOption("topic", topic, "a text")
    if delivery not in ("at_least_once", "at_most_once"):
        raise InvalidOption("delivery", delivery, '"at_least_once" or "at_most_once"')
    if delivery == "at_most_once" and delivery_count > 1:
        raise InvalidOption("delivery_count", delivery_count, "1 in at-most-once mode, which delivers nothing twice")
    at_ms = round(time.time() * 1000) if timestamp_ms is None else timestamp_ms
    raw = MemoryMessage(topic, partition, offset, key, value, list(headers), at_ms)
    shared = _deliver(TopicPartition(topic, partition), {offset: delivery_count}, delivery, epoch, topic_id, revoking)
    message: RecordedMessage[Any, Any] = RecordedMessage(cast(Any, raw), shared, 0, value, answers=[])
    shared.messages = [message]
    return message


def make_batch(messages: Iterable[Any]) -> RecordedBatch[Any, Any]:
    """Makes a batch, as `fetch` returns one, of messages from `make_message`, or of values.

    A value becomes a message of partition 0 of the topic "test"; its offset is its place in `messages`. The messages of
    one partition are a part, in the order of their offsets. What a handler calls on the batch, on a part or on a
    message is recorded in the `answers` of each message that it concerns.

    Raises InvalidOption for messages that `fetch` does not return together: the same offset twice, one that was
    answered before, messages of both modes, or those of one partition under different claims (`epoch`, `topic_id`,
    `revoking`).
    """
    given = [
        one if isinstance(one, RecordedMessage) else make_message(one, offset=at) for at, one in enumerate(messages)
    ]
    by_partition: dict[TopicPartition, list[RecordedMessage[Any, Any]]] = {}
    for message in given:
        if message.answers or message._delivered.run is None is not given[0]._delivered.run:
            raise InvalidOption("messages", message, "messages of one mode that were not answered yet")
        by_partition.setdefault(TopicPartition(message.topic, message.partition), []).append(message)
    parts, ordered = [], []
    for tp, found in by_partition.items():
        found.sort(key=lambda message: message.offset)
        counts = {message.offset: message.delivery_count for message in found}
        if len(counts) < len(found):
            raise InvalidOption("messages", f"an offset of {tp} twice", "each message once")
        claims = {(message.token.epoch, message.topic_id, message.revoking) for message in found}
        if len(claims) > 1:
            rule = "the same epoch, topic_id and revoking for all messages of a partition"
            raise InvalidOption("messages", f"those of {tp}", rule)
        mode: Delivery = "at_most_once" if found[0]._delivered.run is None else "at_least_once"
        shared = _deliver(tp, counts, mode, *claims.pop())
        shared.messages = found
        for index, message in enumerate(found):
            structs.force_setattr(message, "_delivered", shared)
            structs.force_setattr(message, "_index", index)
        parts.append(Part[Any, Any]([message._raw for message in found], shared, 0))
        ordered += found
    return RecordedBatch(parts, ordered)


def _deliver(
    tp: TopicPartition, counts: dict[int, int], delivery: Delivery, epoch: int, topic_id: str, revoking: bool
) -> RecordedDelivery:
    """Makes a claim, and delivers messages under it. `counts`: their offsets, ascending, and their delivery counts."""
    offsets, clock = list(counts), SystemClock()
    now = clock.now()
    run: OffsetRun | None = None
    tracker: AtLeastOnce | AtMostOnce
    if delivery == "at_least_once":
        before = [Range(offset, offset + 1, count - 1) for offset, count in counts.items() if count > 1]
        tracker = AtLeastOnce(offsets[0], counts[offsets[0]] - 1, known=progress.encode(offsets[0], before))
        if any(tracker.delivery_count(offset) != count for offset, count in counts.items()):
            raise InvalidOption("messages", f"{len(before)} of {tp} with a delivery_count above 1", "about 100 at most")
        run = tracker.add(offsets)
        run.deliver(len(offsets), now.mono_ms)
    else:
        tracker = AtMostOnce(offsets[0])
        tracker.granted(offsets[0], offsets[-1] + 1)
        tracker.deliver(offsets[-1], now.mono_ms, len(offsets))
    claim = Claim(tp, epoch, 1, tracker, topic_id)
    if revoking:
        claim.stop("the test says so", None)
    member = Member(World(), GROUP, MemberOptions(client_id="test"), bytes)
    options = ConsumerOptions(delivery=delivery)
    answers, handles = Answers(member, options, clock.now), Handles(GROUP)
    context = DeliveryContext(member, threading.RLock(), clock.now, INCARNATION, _made, options, answers)

    def handle_of(message: RecordedMessage[Any, Any]) -> bytes:
        message.answers.append(Answer("handle"))
        return handles.make(message)

    context.confirm, context.handle_of = _confirm, handle_of
    return RecordedDelivery(context, claim, run)


def _made(raw: RawMessage, delivered: RecordedDelivery, index: int, value: object) -> RecordedMessage[Any, Any]:
    """Returns the message that a Part asks for: it was made before."""
    return delivered.messages[index]


def _confirm(ack: Ack, timeout_s: float) -> None:
    """Acks, and does what a consumer does once the log has answered. Raises ClaimLost."""
    lost = sorted({str(one.claim.tp) for one in ack() if one.late})
    if lost:
        raise ClaimLost(GROUP, tuple(lost))
