"""Messages and batches, as users handle them. Their acks go through acks.py. Nothing here waits or does I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from marshal_py.client.acks import ACK_TIMEOUT_S, Acked, Delivered
from marshal_py.protocol.claim import ClaimPhase
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.transport.ports import RawMessage
from marshal_py.transport.serialization import context_of


class Message(Struct, eq=False, frozen=True, gc=False):
    """Holds one message that was delivered under a claim. Attributes are read-only.

    `key` and `value` are bytes (None for a tombstone), or what the consumer's deserializers made of them. `timestamp`
    is ms since 1970, -1 if there is none. `token` fences writes to the outside (PROTOCOL.md K1).
    """

    # A Struct of msgspec, because one is made per message: four times as fast as a class of Python's.
    _raw: RawMessage
    _delivered: Delivered
    _index: int
    value: Any  # not a property: nearly every user reads it, and a property costs as much as making the message

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
    def key(self) -> Any:
        read = self._delivered.key_deserializer
        return self._raw.key() if read is None else read(self._raw.key(), context_of(self._raw, "key"))

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        return self._raw.headers() or []

    @property
    def timestamp(self) -> int:
        kind, at_ms = self._raw.timestamp()
        return at_ms if kind else -1

    @property
    def token(self) -> Token:
        return self._delivered.token

    @property
    def topic_id(self) -> str:
        """Returns Kafka's id of the topic; "" if the cluster gives none. A topic that was recreated has another id."""
        return self._delivered.claim.topic_id

    @property
    def revoking(self) -> bool:
        """Tells whether the partition is moving to another member or has moved.

        If so, ack what is done and begin nothing more. The next owner waits for these acks, at most
        `hand_over_timeout_s`. In at-least-once mode it gets the messages that are not acked.
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

    def ack(self, wait: bool = False, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks the message as done. Any thread may call it, in any order; a second call changes nothing.

        Returns False if the ack came too late: the claim has been released or lost, and in at-least-once mode the
        message will be delivered again. At-most-once mode needs no acks; there a call only says that the handler has
        returned. Raises UsedAfterFork.

        With `wait` it does what `double_ack` does.
        """
        if wait:
            return self.double_ack(timeout_s)
        delivered, index = self._delivered, self._index
        # Not acquire() and `try`, although that is faster: the handler of a signal may raise between the two.
        with delivered.context.lock:
            if delivered.claim.sealed:
                return delivered.finish_late()
            run = delivered.run
            if run is None:
                delivered.returned()
            elif index == run.low and not run.finished:
                run.low = index + 1  # in order, as nearly always
            else:
                run.finish(index)
            return True

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks the message as done, and returns True once the log has accepted that it is.

        So a transaction that is committed after this call belongs to a message that nobody receives again. It takes one
        round trip of a heartbeat. A message above unfinished ones may have to wait for them, because the log has room
        for a limited number of finished ranges (512 bytes).

        Raises ClaimLost if the ack came too late, or if the claim was lost before the log had accepted the ack: the
        message is delivered again. Raises AckNotConfirmed after `timeout_s` seconds, ReentrantCall, UsedAfterFork. In
        at-most-once mode it only checks that the claim is still held.
        """
        delivered, index = self._delivered, self._index
        delivered.context.confirm([delivered.acked(index, index + 1, self.ack())], timeout_s)
        return True

    def in_progress(self) -> None:
        """Says that the handler is still working on this message: its `handler_timeout_s` starts again (D4).

        In at-least-once mode it concerns this message alone; `Batch.in_progress` concerns a whole batch. Raises
        UsedAfterFork.
        """
        self._delivered.touch(self._index, self._index + 1)

    def __repr__(self) -> str:
        return f"Message({self.topic}:{self.partition}@{self.offset}, token={self.token})"


class DecodedMessage(Message, frozen=True):
    """Holds a message of a consumer that has a deserializer for values.

    The deserializer runs when `value` is read. What it raises, it raises in the handler, and the iteration continues.
    """

    @property  # type: ignore[misc]  # it hides the field, and is as read-only
    def value(self) -> Any:
        read = self._delivered.value_deserializer
        assert read is not None
        return read(self._raw.value(), context_of(self._raw, "value"))


class Part:
    """Holds the messages of one partition in a Batch. It makes no object per message unless it is iterated."""

    __slots__ = ("_delivered", "_first", "raw")

    def __init__(self, raw: Sequence[RawMessage], delivered: Delivered, first: int) -> None:
        self.raw = raw
        self._delivered = delivered
        self._first = first

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
    def values(self) -> list[Any]:
        read = self._delivered.value_deserializer
        if read is None:
            return [raw.value() for raw in self.raw]
        return [read(raw.value(), context_of(raw, "value")) for raw in self.raw]

    @property
    def keys(self) -> list[Any]:
        read = self._delivered.key_deserializer
        if read is None:
            return [raw.key() for raw in self.raw]
        return [read(raw.key(), context_of(raw, "key")) for raw in self.raw]

    @property
    def offsets(self) -> list[int]:
        return [raw.offset() or 0 for raw in self.raw]

    def ack(self, wait: bool = False, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks all messages of this part as done. Returns False if that came too late, as `Message.ack` does.

        With `wait` it does what `double_ack` does. Raises UsedAfterFork.
        """
        if wait:
            return self.double_ack(timeout_s)
        return self._delivered.finish_range(self._first, self._first + len(self.raw))

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks all messages of this part as done, and waits until the log has accepted it: `Message.double_ack`."""
        self._delivered.context.confirm([self._acked()], timeout_s)
        return True

    def _acked(self) -> Acked:
        return self._delivered.acked(self._first, self._first + len(self.raw), self.ack())

    def in_progress(self) -> None:
        """Says that the handler is still working on this part, as `Batch.in_progress` does for a batch."""
        self._delivered.touch(self._first, self._first + len(self.raw))

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Message]:
        delivered, first = self._delivered, self._first
        make = delivered.make
        for index, raw in enumerate(self.raw):
            yield make(raw, delivered, first + index, raw.value())


class Batch:
    """Holds the messages of one `fetch`, of one or more partitions, in offset order per partition."""

    __slots__ = ("parts",)

    parts: Sequence[Part]

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def ack(self, wait: bool = False, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks all messages as done. Returns False if that came too late for some of them, as `Message.ack` does.

        With `wait` it does what `double_ack` does. Raises UsedAfterFork.
        """
        if wait:
            return self.double_ack(timeout_s)
        return all([part.ack() for part in self.parts])

    def double_ack(self, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Marks all messages as done, and waits until the log has accepted it, as `Message.double_ack` does.

        If it raises ClaimLost, the error names the partitions that were lost; the log has accepted the others. Returns
        True, also if the batch is empty.
        """
        if self.parts:
            self.parts[0]._delivered.context.confirm([part._acked() for part in self.parts], timeout_s)
        return True

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

    def __iter__(self) -> Iterator[Message]:
        for part in self.parts:
            yield from part
