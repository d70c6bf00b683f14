"""Messages and batches, as users handle them. Their acks go through answers.py. Nothing here waits or does I/O."""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final, Generic, NamedTuple, NoReturn, SupportsIndex, cast, overload

from msgspec import Struct, structs

from marshal_py.client.messages.answers import ACK_TIMEOUT_S, Acked, Delivered, DeliveryContext
from marshal_py.client.values.finished import source_of
from marshal_py.client.values.requests import check_timeout
from marshal_py.errors import DeserializationFailed, HandleUnknown, InvalidOption, MessageNotPickled, NeedsAtLeastOnce
from marshal_py.protocol.claims import AtLeastOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.wire.identity import NONE, Instant, Token, TopicPartition
from marshal_py.transport.ports import RawMessage
from marshal_py.transport.serialization import K_co, V_co, context_of

STEP: Final = "1, because acks concern messages in a row"  # of a slice of a Part or a Batch
_UNREAD: Final = object()  # stands for a key or value that no deserializer has read yet


class Message(Struct, Generic[K_co, V_co], eq=False, frozen=True, gc=False):
    """One message that was delivered under a claim. Attributes are read-only.

    `key` and `value` are bytes (None for a tombstone), or what the consumer's deserializers made of them. A
    deserializer runs when the attribute is first read, and its result is kept. `timestamp` is ms since 1970, -1 if
    there is none. `token` fences writes to the outside (PROTOCOL.md K1).
    """

    # A Struct of msgspec, because one is made per message: four times as fast as a class of Python's.
    _raw: RawMessage
    _delivered: Delivered
    _index: int
    value: V_co  # not a property: nearly every user reads it, and a property costs as much as making the message

    @property
    def topic(self) -> str:
        return self._delivered.claim.tp.topic

    @property
    def partition(self) -> int:
        return self._delivered.claim.tp.partition

    @property
    def offset(self) -> int:
        offset = self._raw.offset()
        assert offset is not None
        return offset

    @property
    def key(self) -> K_co:
        key: Any = self._raw.key()
        return key  # type: ignore[no-any-return]  # bytes | None, which K_co is without a deserializer

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        return self._raw.headers() or []

    @property
    def timestamp(self) -> int:
        kind, at_ms = self._raw.timestamp()
        return at_ms if kind else -1

    @property
    def token(self) -> Token:
        return self._delivered.token

    @property
    def group(self) -> str:
        return self._delivered.context.member.name

    @property
    def covered(self) -> tuple[tuple[int, int], ...]:
        """Returns the offsets [start, to) that a table has with this message: its own and empty ones before
        (client/values/finished.py)."""
        run, index = self._delivered.run, self._index
        return ((self.offset, self.offset + 1),) if run is None else run.covered(index, index + 1)

    @property
    def pin_id(self) -> Token | None:
        """Returns the pin under which the message was delivered, in a group with the policy `pinned`; else None.

        Pins are compared as tokens are: a later one is greater.
        """
        pin = self._delivered.claim.pin
        return Token(self._delivered.token.incarnation, pin) if pin != NONE else None

    @property
    def topic_id(self) -> str:
        """Returns Kafka's id of the topic; "" if the cluster gives none. A topic that was recreated has another id."""
        return self._delivered.claim.topic_id

    @property
    def idempotency_key(self) -> str:
        """Returns a text that names the message for good, for a service that takes each key once.

        It is the same at each delivery and for each owner; another group has another one.
        """
        source = source_of(self.topic, self.partition, self.topic_id, str(self.token))
        return f"{self.group}/{source.topic}/{source.topic_id}/{source.partition}/{self.offset}"

    @property
    def revoking(self) -> bool:
        """Returns whether the partition is moving to another member or has moved.

        If so, ack what is done and begin nothing more. The next owner waits for these acks, at most
        `hand_over_timeout_s`, and a pause of the group one heartbeat interval. In at-least-once mode the next owner
        gets the messages that are not acked.
        """
        return self._delivered.claim.phase is not ClaimPhase.OPEN

    @property
    def delivery_count(self) -> int:
        """Returns how often the message has been delivered according to the log: 1 if this delivery is the first one.

        Deliveries before a crash are included. For the lowest unfinished message of a partition the number is never too
        low. It is too high by one for each owner that died before it had delivered the message. So a message that kills
        every consumer can be recognised. For other messages it is the number of deliveries that owners have reported.
        In at-most-once mode it is always 1.
        """
        tracker = self._delivered.claim.tracker
        return tracker.delivery_count(self.offset) if isinstance(tracker, AtLeastOnce) else 1

    def ack(self) -> bool:
        """Marks the message as done. Any thread may call it, in any order; a second call changes nothing.

        Returns False if the ack came too late: the claim has been released or lost, and in at-least-once mode the
        message will be delivered again. True says that this consumer held the claim as far as it had read the log, and
        reports the ack to it; only `double_ack` and `Consumer.flush` say that the log has it. At-most-once mode needs
        no acks; there a call only says that the handler has returned. Raises UsedAfterFork.
        """
        delivered, index = self._delivered, self._index
        run = delivered.run
        if run is None:
            return delivered.finish_one()
        # Without the lock, and first: if the claim is sealed after it, sealing has noted it (Claim.seal).
        run.acks.append(index)
        return delivered.in_time(index, index + 1) if delivered.claim.sealed else True

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks the message as done, and returns True once the log has accepted that it is.

        So a transaction that is committed after this call belongs to a message that nobody receives again. It takes one
        round trip of a heartbeat. A message more than 4,000 offsets above an unfinished one may have to wait for it,
        because the log has 512 bytes for what is finished above the position.

        Raises ClaimLost if the ack came too late, or if the claim was lost before the log had accepted the ack: the
        message is delivered again. Raises AckNotConfirmed after `timeout_s` seconds (at least 0), ReentrantCall,
        UsedAfterFork; InvalidOption before anything is acked. In at-most-once mode it only checks that the claim is
        still held.
        """
        check_timeout(timeout_s)
        self._delivered.context.confirm(self._acked, timeout_s)
        return True

    def _acked(self) -> list[Acked]:
        """Marks the message as done. Returns what the log must accept then."""
        return [self._delivered.acked(self._index, self._index + 1, self.ack())]

    def nak(self, delay_s: float | None = None) -> bool:
        """Gives the message back: this consumer delivers it again after `delay_s` seconds (PROTOCOL.md D14).

        `delay_s`: 0 to 86,400. None means 0.5 s after the first delivery, and twice as long after each further one, up
        to 60 s. The other messages keep their order, and `delivery_count` grows. If the consumer ends or the partition
        moves before, the next owner delivers the message at once. While 1,000 messages of a partition wait, nothing new
        of it is delivered, and while messages of `prefetch_bytes` wait, nothing new at all (event `nak_storm`).

        Returns False if the claim is over, so that the message is delivered again anyway, if the message is done, or if
        it was delivered again since: another handler has it then. Raises NeedsAtLeastOnce, InvalidOption,
        UsedAfterFork.
        """
        return self._delivered.nak(self._index, (self._raw,), delay_s)

    def term(self, reason: str = "") -> bool:
        """Ends the message for good: it is never delivered again, and an advisory `terminated` says so in the log.

        `reason`: for people who read the advisory, which has its first 255 bytes of utf-8. Returns False if the claim
        is over, so that the message will be delivered again, or if the message is done already. Raises
        NeedsAtLeastOnce, InvalidOption, UsedAfterFork.
        """
        return self._delivered.term(self._index, (self._raw,), reason)

    def in_progress(self) -> None:
        """Says that the handler is still working on this message: its `handler_timeout_s` starts again (D4).

        In at-least-once mode it concerns this message alone; `Batch.in_progress` concerns a whole batch. Raises
        UsedAfterFork.
        """
        self._delivered.touch(self._index, self._index + 1)

    def handle(self) -> bytes:
        """Returns a small value that names this message: 36 bytes and the topic's name.

        It can go anywhere: to another thread or task, through a queue to another process and back. There is nothing to
        do with it but to pass it to `Consumer.complete`, or to `Consumer.message`, in the process of this consumer.
        Raises UsedAfterFork.
        """
        context = self._delivered.context
        with context.lock:
            return context.handle_of(self)

    def __reduce__(self) -> NoReturn:
        raise MessageNotPickled(f"{self.topic}:{self.partition}@{self.offset}")

    def __repr__(self) -> str:
        return f"Message({self.topic}:{self.partition}@{self.offset}, token={self.token})"


# gc: what a deserializer made may refer to its message, and such a circle must be found.
class DecodedMessage(Message[K_co, V_co], frozen=True, gc=True):
    """A message of a consumer that has a deserializer.

    The deserializer runs when `key` or `value` is first read. What it raises, it raises in the handler, and the
    iteration continues.
    """

    _read_key: Any = _UNREAD
    _read_value: Any = _UNREAD

    @property
    def key(self) -> K_co:
        if self._read_key is _UNREAD:
            read, key = self._delivered.key_deserializer, self._raw.key()
            structs.force_setattr(self, "_read_key", key if read is None else read(key, context_of(self._raw, "key")))
        key_read: K_co = self._read_key
        return key_read

    @property  # type: ignore[misc]  # it hides the field, and is as read-only
    def value(self) -> V_co:
        if self._read_value is _UNREAD:
            read, value = self._delivered.value_deserializer, self._raw.value()
            read_value = value if read is None else read(value, context_of(self._raw, "value"))
            structs.force_setattr(self, "_read_value", read_value)
        value_read: V_co = self._read_value
        return value_read


class Part(Generic[K_co, V_co]):
    """The messages of one partition in a Batch, in the order of their offsets.

    `part[0]` is the first message, `part[10:20]` a Part of ten messages, which can be acked alone. Without
    deserializers a Part makes an object per message only if it is indexed or iterated.
    """

    __slots__ = ("_delivered", "_first", "_messages", "raw")

    def __init__(self, raw: Sequence[RawMessage], delivered: Delivered, first: int) -> None:
        self.raw: Sequence[RawMessage] = raw
        self._delivered = delivered
        self._first = first
        # With deserializers: the messages, once they were made, so that each key and value is read once.
        self._messages: Sequence[Message[K_co, V_co]] | None = None

    @property
    def topic_partition(self) -> TopicPartition:
        return self._delivered.claim.tp

    @property
    def token(self) -> Token:
        return self._delivered.token

    @property
    def topic_id(self) -> str:
        return self._delivered.claim.topic_id

    @property
    def covered(self) -> tuple[tuple[int, int], ...]:
        """Returns the offsets that a table has once it has these messages, as `Message.covered` does."""
        run, first = self._delivered.run, self._first
        if run is None:
            return tuple((offset, offset + 1) for offset in self.offsets)
        return run.covered(first, first + len(self.raw))

    @property
    def values(self) -> list[V_co]:
        """Returns the values of all messages.

        Raises DeserializationFailed, which names the first message whose value cannot be read. The others can be read
        one by one, for example by iterating over the part.
        """
        if self._delivered.value_deserializer is not None:
            return self._read("value")
        values: list[Any] = [raw.value() for raw in self.raw]
        return values

    @property
    def keys(self) -> list[K_co]:
        """Returns the keys of all messages. Raises DeserializationFailed, as `values` does."""
        if self._delivered.key_deserializer is not None:
            return self._read("key")
        keys: list[Any] = [raw.key() for raw in self.raw]
        return keys

    def _read(self, field: str) -> list[Any]:
        found = []
        for message in self:
            try:
                found.append(getattr(message, field))
            except Exception as error:
                where = message.topic, message.partition, message.offset
                raise DeserializationFailed(*where, field, repr(error)) from error
        return found

    @property
    def offsets(self) -> list[int]:
        return [raw.offset() or 0 for raw in self.raw]

    def ack(self) -> bool:
        """Marks all messages of this part as done. Returns False if that came too late, as `Message.ack` does."""
        return self._delivered.finish_range(self._first, self._first + len(self.raw))

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks all messages of this part as done, and waits until the log has accepted it: `Message.double_ack`."""
        check_timeout(timeout_s)
        self._delivered.context.confirm(self._acked, timeout_s)
        return True

    def _acked(self) -> list[Acked]:
        return [self._delivered.acked(self._first, self._first + len(self.raw), self.ack())]

    def nak(self, delay_s: float | None = None) -> bool:
        """Gives all messages of this part that are not done back, as `Message.nak` does."""
        return self._delivered.nak(self._first, self.raw, delay_s)

    def term(self, reason: str = "") -> bool:
        """Ends all messages of this part that are not done for good, as `Message.term` does."""
        return self._delivered.term(self._first, self.raw, reason)

    def in_progress(self) -> None:
        """Says that the handler is still working on this part, as `Batch.in_progress` does for a batch."""
        self._delivered.touch(self._first, self._first + len(self.raw))

    def __reduce__(self) -> NoReturn:
        raise MessageNotPickled(f"{self.topic_partition}@{self.offsets[0] if self.raw else ''}")

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Message[K_co, V_co]]:
        delivered, first = self._delivered, self._first
        make = delivered.make
        if delivered.key_deserializer is not None or delivered.value_deserializer is not None:
            yield from self._decoded()
            return
        for index, raw in enumerate(self.raw):
            yield make(raw, delivered, first + index, raw.value())

    def _decoded(self) -> Sequence[Message[K_co, V_co]]:
        if self._messages is None:
            delivered, make, first = self._delivered, self._delivered.make, self._first
            self._messages = [make(raw, delivered, first + at, raw.value()) for at, raw in enumerate(self.raw)]
        return self._messages

    @overload
    def __getitem__(self, at: SupportsIndex) -> Message[K_co, V_co]: ...
    @overload
    def __getitem__(self, at: slice) -> Part[K_co, V_co]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Message[K_co, V_co] | Part[K_co, V_co]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self.raw))
            if step != 1:
                raise InvalidOption("the step of a slice", step, STEP)
            part: Part[K_co, V_co] = Part(self.raw[start:stop], self._delivered, self._first + start)
            part._messages = None if self._messages is None else self._messages[start:stop]
            return part
        delivered, index = self._delivered, range(len(self.raw))[at]
        if delivered.key_deserializer is not None or delivered.value_deserializer is not None:
            return self._decoded()[index]
        raw = self.raw[index]
        message: Message[K_co, V_co] = delivered.make(raw, delivered, self._first + index, raw.value())
        return message

    def __repr__(self) -> str:
        span = f"@{self.raw[0].offset()}..{self.raw[-1].offset()}" if self.raw else ""
        return f"Part({self.topic_partition}{span}, messages={len(self.raw)})"


class Batch(Generic[K_co, V_co]):
    """The messages of one `fetch`, of one or more partitions, in offset order per partition.

    `batch[0]` is the first message, `batch[10:20]` a Batch of ten messages, which can be acked alone.
    """

    __slots__ = ("parts",)

    parts: Sequence[Part[K_co, V_co]]

    def __init__(self, parts: Sequence[Part[K_co, V_co]]) -> None:
        self.parts = parts

    def ack(self) -> bool:
        """Marks all messages as done. Returns False if that came too late for some of them, as `Message.ack` does."""
        return all([part.ack() for part in self.parts])

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks all messages as done, and waits until the log has accepted it, as `Message.double_ack` does.

        If it raises ClaimLost, the error names the partitions that were lost; the log has accepted the others. Returns
        True, also if the batch is empty.
        """
        check_timeout(timeout_s)
        if self.parts:
            self.parts[0]._delivered.context.confirm(self._acked, timeout_s)
        return True

    def _acked(self) -> list[Acked]:
        return [acked for part in self.parts for acked in part._acked()]

    def nak(self, delay_s: float | None = None) -> bool:
        """Gives all messages that are not done back, as `Message.nak` does.

        Returns False if that did nothing for one of its parts.
        """
        return all([part.nak(delay_s) for part in self.parts])

    def term(self, reason: str = "") -> bool:
        """Ends all messages that are not done for good, as `Message.term` does.

        Returns False if that did nothing for one of its parts.
        """
        return all([part.term(reason) for part in self.parts])

    def in_progress(self) -> None:
        """Says that the handler is still working on the batch: its `handler_timeout_s` starts again (D4).

        Raises UsedAfterFork.
        """
        for part in self.parts:
            part.in_progress()

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __iter__(self) -> Iterator[Message[K_co, V_co]]:
        for part in self.parts:
            yield from part

    @overload
    def __getitem__(self, at: SupportsIndex) -> Message[K_co, V_co]: ...
    @overload
    def __getitem__(self, at: slice) -> Batch[K_co, V_co]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Message[K_co, V_co] | Batch[K_co, V_co]:
        if isinstance(at, slice):
            return self._slice(at)
        index = range(len(self))[at]
        for part in self.parts:
            if index < len(part):
                break
            index -= len(part)
        return part[index]

    def _slice(self, at: slice) -> Batch[K_co, V_co]:
        start, stop, step = at.indices(len(self))
        if step != 1:
            raise InvalidOption("the step of a slice", step, STEP)
        found = []
        for part in self.parts:
            count = len(part)
            if max(0, start) < min(count, stop):
                found.append(part[max(0, start) : stop])
            start, stop = start - count, stop - count
        return Batch(found)

    def __repr__(self) -> str:
        return f"Batch([{', '.join(map(repr, self.parts))}])"


def delivered_by(one: Message[Any, Any] | Part[Any, Any] | Batch[Any, Any], context: DeliveryContext) -> bool:
    """Returns whether the consumer with this context has delivered all of it."""
    parts = one.parts if isinstance(one, Batch) else (one,)
    return all(part._delivered.context is context for part in parts)


def claim_of(message: Message[Any, Any]) -> Claim:
    """Returns the claim under which a message was delivered."""
    return message._delivered.claim


def position_of(message: Message[Any, Any]) -> int:
    """Returns the position of the message's partition: all below it is finished."""
    claim = message._delivered.claim
    with message._delivered.context.lock:
        claim.settle()
        return claim.position()


def raw_key(message: Message[Any, Any]) -> bytes | None:
    """Returns the key as Kafka has it, whatever a deserializer makes of it."""
    key: bytes | None = message._raw.key()
    return key


def weighed(message: Message[Any, Any]) -> tuple[Claim, int]:
    """Returns the claim under which a message was delivered, and the size in bytes of its key and value."""
    raw = message._raw
    return message._delivered.claim, len(raw) + len(raw.key() or b"")


def queue(messages: Sequence[Message[Any, Any]], silent_since_ms: Callable[[], int | None]) -> None:
    """Has messages that were delivered together wait for their handlers: until `begin` they count as not delivered
    (D17). With the lock held. `silent_since_ms` tells since when all handlers are silent, in monotonic ms; None if they
    are not."""
    if messages and not messages[0]._delivered.claim.sealed:
        tracker, run = _tracked(messages[0]._delivered)
        tracker.queue(run, [message._index for message in messages], silent_since_ms)


def begin(message: Message[Any, Any], mono_ms: int) -> None:
    """Notes that the handler of a queued message begins, which delivers it. With the lock held, and the gate open."""
    tracker, run = _tracked(message._delivered)
    tracker.begin(run, message._index, mono_ms)


def is_done(message: Message[Any, Any]) -> bool:
    """Returns whether a message is finished, or goes to a dead-letter topic. With the lock held."""
    if claim_of(message).sealed:
        return False  # later acks are too late, and must not be noted
    tracker, run = _tracked(message._delivered)
    run.settle()
    posted = tracker.redeliveries is not None and message.offset in tracker.redeliveries.posted
    return posted or run.is_finished(message._index)


def put_back(message: Message[Any, Any], delay_s: float = 0.0) -> None:
    """Gives back a message that is queued for its handler, without counting a delivery."""
    message._delivered.put_back(message._index, message._raw, delay_s)


def waits_s(message: Message[Any, Any], now: Instant) -> float:
    """Returns in how many seconds a message that was given back is due; 0 if it does not wait. With the lock held."""
    tracker, _ = _tracked(message._delivered)
    found = None if tracker.redeliveries is None else tracker.redeliveries.waiting.get(message.offset)
    return 0.0 if found is None else max(0, found.due_ms - now.mono_ms) / 1000


def _tracked(delivered: Delivered) -> tuple[AtLeastOnce, OffsetRun]:
    tracker, run = delivered.claim.tracker, delivered.run
    assert isinstance(tracker, AtLeastOnce)
    assert run is not None
    return tracker, run


def waiting_again(claim: Claim, context: DeliveryContext) -> list[Message[Any, Any]]:
    """Returns the messages of a claim that were given back and wait to be delivered again. With the lock held."""
    tracker = claim.tracker
    if not isinstance(tracker, AtLeastOnce) or tracker.redeliveries is None:
        return []
    found = []
    for one in tracker.redeliveries.waiting.values():
        raw = cast(RawMessage, one.message)
        found.append(context.make(raw, Delivered(context, claim, one.run), one.at, raw.value()))
    return found


# --- Ack handles: small values that name a message of a consumer, for another process to send back
#
# A handle is bytes without meaning outside its consumer: a random number of the consumer, then epoch, offset,
# partition and topic, and a keyed checksum of all of them, so that a handle that was damaged on its way names no
# other message. The consumer that made it completes it. What a handle needs besides is kept here until the message is
# done, and for a while after: a second `complete` asks for it.


CONSUMER_BYTES: Final = 8  # random, so that a handle of another consumer or process is recognised
CHECKSUM_BYTES: Final = 8  # at the end; one damaged handle of 2^64 would be believed
_FORMAT: Final = struct.Struct(f">{CONSUMER_BYTES}sqqi")
KEPT_MIN: Final = 1_000  # messages; with more than twice as many as after the last look, those that are done go


class Place(NamedTuple):
    """Says what a handle names: a message of a claim."""

    epoch: int
    offset: int
    tp: TopicPartition


class _Kept(NamedTuple):
    """A message that has a handle, and where its ack is noted. `message`: None once the handle was completed, so that
    its content can go."""

    delivered: Delivered
    at: int
    message: Message[Any, Any] | None

    def is_open(self) -> bool:
        """Returns whether the message still waits for an answer that counts."""
        claim, run = self.delivered.claim, self.delivered.run
        claim.settle()
        return not claim.sealed and run is not None and not run.is_finished(self.at)


class Handles:
    """Makes and reads the handles of one consumer."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._consumer = secrets.token_bytes(CONSUMER_BYTES)
        self._key = secrets.token_bytes(blake2b.MAX_KEY_SIZE)
        self._kept: dict[Place, _Kept] = {}  # in at-least-once mode
        self._look_at = 2 * KEPT_MIN

    def make(self, message: Message[Any, Any]) -> bytes:
        """Returns the message's handle, and keeps the message until it is completed. Called with the lock held."""
        delivered, offset = message._delivered, message.offset
        claim = delivered.claim
        if delivered.run is not None:
            self._kept[Place(claim.epoch, offset, claim.tp)] = _Kept(delivered, message._index, message)
            if len(self._kept) >= self._look_at:
                self._kept = {place: one for place, one in self._kept.items() if one.is_open()}
                self._look_at = 2 * max(KEPT_MIN, len(self._kept))
        named = _FORMAT.pack(self._consumer, claim.epoch, offset, claim.tp.partition) + claim.tp.topic.encode()
        return named + self._checksum(named)

    def _checksum(self, named: bytes) -> bytes:
        return blake2b(named, digest_size=CHECKSUM_BYTES, key=self._key).digest()

    def read(self, handle: bytes) -> Place:
        """Returns what a handle names. Raises HandleUnknown if this consumer has not made it, or not like this."""
        if not isinstance(handle, bytes):
            raise HandleUnknown(
                self._group, f"a handle is bytes, as message.handle() returns; this is of type {type(handle).__name__}"
            )
        if len(handle) <= _FORMAT.size + CHECKSUM_BYTES or not handle.startswith(self._consumer):
            raise HandleUnknown(self._group, "this consumer has not made it; complete it where message.handle() ran")
        named = handle[:-CHECKSUM_BYTES]
        if not hmac.compare_digest(handle[-CHECKSUM_BYTES:], self._checksum(named)):
            raise HandleUnknown(self._group, "it was damaged on its way; send the bytes of message.handle() unchanged")
        _, epoch, offset, partition = _FORMAT.unpack_from(named)
        return Place(epoch, offset, TopicPartition(named[_FORMAT.size :].decode(), partition))

    def message(self, handle: bytes, context: DeliveryContext) -> Message[Any, Any]:
        """Returns a handle's message; under the lock. At-least-once groups alone keep them. Raises HandleUnknown,
        NeedsAtLeastOnce."""
        place = self.read(handle)
        kept = self._kept.get(place)
        if kept is None or kept.message is None or not kept.is_open():
            claim = context.member.claims.get(place.epoch)
            if claim is not None and not isinstance(claim.tracker, AtLeastOnce):
                raise NeedsAtLeastOnce("message", self._group)
            raise HandleUnknown(self._group, f"its message {place.tp}@{place.offset} is done, or its claim is over")
        return kept.message

    def complete(self, handle: bytes, context: DeliveryContext) -> bool:
        """Acks a handle's message, under the lock; returns whether in time. Raises HandleUnknown."""
        epoch, offset, tp = place = self.read(handle)
        kept = self._kept.get(place)
        if kept is not None:
            self._kept[place] = kept._replace(message=None)
        claim = context.member.claims.get(epoch)
        if claim is None and kept is not None:
            return kept.delivered.in_time(kept.at, kept.at + 1)
        if claim is None:
            context.member.late_acks += 1
            context.lost_acks.late(tp)
            return False
        if not isinstance(claim.tracker, AtLeastOnce):
            return Delivered(context, claim, None).finish_one()
        run, index = claim.tracker.place_of(offset) or (None, 0)
        return run is None or Delivered(context, claim, run).finish_range(index, index + 1)
