"""Messages made by hand, for tests of handlers. They are real messages of a claim that no log knows of.

Their answers are recorded and take effect as in a consumer: an ack counts, or comes too late if the claim is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

from marshal_py.client.acks import ACK_TIMEOUT_S, Acked, Delivered, DeliveryContext
from marshal_py.client.answers import Answers
from marshal_py.client.handles import Handles
from marshal_py.client.message import Message
from marshal_py.client.options import ConsumerOptions, Delivery
from marshal_py.errors import ClaimLost, InvalidOption
from marshal_py.protocol.claim import Claim, ClaimPhase
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce
from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.protocol.offset_run import OffsetRun
from marshal_py.protocol.ready import MemberOptions
from marshal_py.protocol.records import OFFSET_MAX
from marshal_py.protocol.world import World
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.memory_broker import MemoryMessage
from marshal_py.transport.serialization import K_co, V_co

INCARNATION: Final = bytes(16)  # of all these messages, so that their tokens can be compared
GROUP: Final = "test"


class Answer(NamedTuple):
    """Holds one call of a handler. `verb`: the method's name. `argument`: its first argument, if it says something."""

    verb: str
    argument: object = None


class RecordedMessage(Message[K_co, V_co], frozen=True, kw_only=True, gc=True):
    """Holds a message made by hand. `answers`: what the handler has called, in order."""

    answers: list[Answer]

    @property
    def verbs(self) -> list[str]:
        """Returns the names of the methods that the handler has called, in order: ["in_progress", "ack"]."""
        return [answer.verb for answer in self.answers]

    @property
    def acked(self) -> bool:
        """Tells whether the message was acked (or ended by `term`) in time."""
        tracker = self._delivered.claim.tracker
        return not tracker.in_flight if isinstance(tracker, AtLeastOnce) else tracker.in_flight_since_ms is None

    def lose_claim(self) -> None:
        """Takes the claim away, as when another member took over: `revoking` is True, and an ack comes too late."""
        with self._delivered.context.lock:
            self._delivered.claim.seal(ClaimPhase.GONE)

    def ack(self, wait: bool = False, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        if wait:
            return self.double_ack(timeout_s)
        self.answers.append(Answer("ack"))
        return super().ack()

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        self.answers.append(Answer("double_ack"))
        delivered = self._delivered
        delivered.context.confirm([delivered.acked(self._index, self._index + 1, super().ack())], timeout_s)
        return True

    def nak(self, delay_s: float | None = None) -> bool:
        self.answers.append(Answer("nak", delay_s))
        return super().nak(delay_s)

    def term(self, reason: str = "") -> bool:
        self.answers.append(Answer("term", reason))
        return super().term(reason)

    def handle(self) -> bytes:
        self.answers.append(Answer("handle"))
        return super().handle()

    def in_progress(self) -> None:
        self.answers.append(Answer("in_progress"))
        super().in_progress()


def make_message(
    value: Any = b"",
    *,
    key: Any = None,
    topic: str = "test",
    partition: int = 0,
    offset: int = 0,
    headers: Sequence[tuple[str, bytes]] = (),
    timestamp_ms: int | None = None,
    delivery: Delivery = "at_least_once",
    delivery_count: int = 1,
    epoch: int = 1,
    topic_id: str = "",
    revoking: bool = False,
) -> RecordedMessage[Any, Any]:
    """Makes a message that a handler can be called with. Nothing else is needed: no cluster, no consumer.

    `key`, `value`: what the handler shall see; with deserializers that is no longer bytes. `timestamp_ms`: since 1970,
    None is now. `delivery_count`: how often it was delivered, this time included. `epoch`: of its fencing token; a
    message with a greater epoch has a greater token. `revoking`: whether its partition is moving to another member.

    Raises InvalidOption for a delivery or a number that no message can have.
    """
    for name, number, least in (
        ("partition", partition, 0),
        ("offset", offset, 0),
        ("delivery_count", delivery_count, 1),
    ):
        if number < least:
            raise InvalidOption(name, number, f"{least} or more")
    if not 0 <= epoch <= OFFSET_MAX:
        raise InvalidOption("epoch", epoch, f"0 to {OFFSET_MAX}")
    if delivery not in ("at_least_once", "at_most_once"):
        raise InvalidOption("delivery", delivery, '"at_least_once" or "at_most_once"')
    if delivery == "at_most_once" and delivery_count > 1:
        raise InvalidOption("delivery_count", delivery_count, "1 in at-most-once mode, which delivers nothing twice")
    tp, clock = TopicPartition(topic, partition), SystemClock()
    now = clock.now()
    run: OffsetRun | None = None
    if delivery == "at_least_once":
        tracker: AtLeastOnce | AtMostOnce = AtLeastOnce(offset, delivery_count - 1)
        assert isinstance(tracker, AtLeastOnce)
        run = tracker.add([offset])
        run.deliver(1, now.mono_ms)
    else:
        tracker = AtMostOnce(offset)
        tracker.granted(offset, offset + 1)
        tracker.deliver(offset, now.mono_ms)
    claim = Claim(tp, epoch, 1, tracker, topic_id)
    if revoking:
        claim.stop("the test says so", None)
    member = Member(World(), GROUP, MemberOptions(client_id="test"), bytes)
    options = ConsumerOptions(delivery=delivery)
    answers = Answers(member, options, clock.now)
    context = DeliveryContext(member, threading.RLock(), clock.now, INCARNATION, RecordedMessage, options, answers)
    context.confirm, context.handle_of = _confirm, Handles(GROUP).make
    at_ms = round(time.time() * 1000) if timestamp_ms is None else timestamp_ms
    raw = MemoryMessage(topic, partition, offset, key, value, list(headers), at_ms)
    return RecordedMessage(cast(Any, raw), Delivered(context, claim, run), 0, value, answers=[])


def _confirm(acked: Sequence[Acked], timeout_s: float) -> None:
    """Does what a consumer does once the log has answered. Raises ClaimLost."""
    lost = sorted({str(one.claim.tp) for one in acked if one.late})
    if lost:
        raise ClaimLost(GROUP, tuple(lost))
