"""Writes messages to Kafka: `marshal produce`, the demo, tombstones. Knows nothing of coordination.

It is an idempotent producer with acks=all. If its queue is full, `write` waits; no message is dropped. When the cluster
refuses a message, the next `write` or `flush` raises the error.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, Final, Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from marshal_py.errors import (
    AccessDenied,
    ClusterUnreachable,
    InvalidOption,
    MarshalError,
    MessageTooLarge,
    PartitionError,
    TopicMissing,
    TopicRefused,
)
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.connecting import ConnectionErrors
from marshal_py.transport.embedded import LogGuard, record_bytes_max
from marshal_py.transport.ports import ClusterAdmin, Headers, OnWritten

FULL_POLL_S: Final = 0.1  # how long one poll waits for room in a full queue
FLUSH_SLICE_S: Final = 0.1
FLUSH_TIMEOUT_S: Final = 60.0  # more than librdkafka takes to find a new leader, less than a person waits

_WRITER: Final[Mapping[str, Any]] = {
    "acks": "all",  # an acknowledged message survives the loss of a broker
    "enable.idempotence": True,  # librdkafka's retries write nothing twice, except on the embedded broker
    # How large a message may be is for its topic to say (`max.message.bytes`). librdkafka's own limit is 1 MB, headers
    # included, so it would refuse to copy a message that its topic has taken. This is the most that it allows.
    "message.max.bytes": 1_000_000_000,
    "message.timeout.ms": 60_000,  # then the cluster counts as unreachable; the default is 5 minutes
}


class ProducingTransport(Protocol):
    """Declares what a KafkaProducer needs of a transport."""

    given: settings.Settings
    redirected: settings.Settings  # with the user's callbacks run where they may raise
    client_id: str
    embedded: bool

    def admin(self) -> ClusterAdmin: ...


class KafkaProducer:
    """A MessageWriter over confluent_kafka. `on_written(tp, offset)`: inside `write`, `poll` and `flush`, per
    acknowledged message."""

    def __init__(self, transport: ProducingTransport, on_written: OnWritten | None = None) -> None:
        self.written: int = 0  # acknowledged by the cluster
        self._given = transport.given
        self._servers = str(self._given["bootstrap.servers"])
        self._admin = transport.admin()
        self._guard = LogGuard() if transport.embedded else None
        self._on_written = on_written
        self._counts: dict[str, int] = {}  # topic -> partitions
        self._turn = 0
        self._error: MarshalError | None = None
        self._errors = ConnectionErrors(transport.redirected)
        ours = {**_WRITER, "error_cb": self._errors.on_error}
        self._producer = settings.create_client(
            Producer, {**settings.admin(transport.redirected, transport.client_id), **ours}
        )

    def write(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        count = self._partitions(topic)
        if partition is not None and not 0 <= partition < count:
            raise InvalidOption("partition", partition, f"topic {topic!r} has the partitions 0 to {count - 1}")
        if self._guard is not None:
            partition = self._choose_partition(key, count) if partition is None else partition
            self._guard.reserve(topic, partition, record_bytes_max(key, value, headers))
        self._enqueue(topic, value, key, list(headers), -1 if partition is None else partition, timestamp_ms)

    def _partitions(self, topic: str) -> int:
        """Returns the topic's count; asked first, because the embedded broker would create a missing topic."""
        count = self._counts.get(topic)
        if count is None:
            found = self._admin.partition_count(topic)
            if found is None:
                raise TopicMissing(topic)
            count = self._counts[topic] = found
        return count

    def _choose_partition(self, key: bytes | None, count: int) -> int:
        """Returns librdkafka's default partition for a key, in turn without one: the embedded broker's guard must know
        it before."""
        if key:
            return zlib.crc32(key) % count
        self._turn += 1
        return self._turn % count

    def _enqueue(
        self, topic: str, value: bytes | None, key: bytes | None, headers: list[Any], partition: int, timestamp_ms: int
    ) -> None:
        while True:
            self._producer.poll(0)
            self._raise_error()
            try:
                self._producer.produce(
                    topic, value, key, partition, headers=headers, timestamp=timestamp_ms, on_delivery=self._on_delivery
                )
                return
            except BufferError:
                self._producer.poll(FULL_POLL_S)
            except KafkaException as error:
                size_bytes = len(value or b"") + len(key or b"")
                raise self._refused(error.args[0], TopicPartition(topic, partition), size_bytes) from error

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        tp = TopicPartition(message.topic() or "", message.partition() or 0)
        if error is not None:
            self._error = self._error or self._refused(error, tp, len(message.value() or b""))
            return
        self.written += 1
        if self._on_written is not None:
            self._on_written(tp, message.offset() or 0)

    def _refused(self, error: KafkaError, tp: TopicPartition, size_bytes: int) -> MarshalError:
        return _as_marshal_error(error, tp, size_bytes, self._given, self._errors.reason(error.str()))

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def poll(self) -> None:
        """Handles the acknowledgements that have come, without waiting. Raises the error of an earlier message."""
        self._producer.poll(0)
        self._raise_error()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self._producer.flush(FLUSH_SLICE_S):
            if self._error is not None or time.monotonic() >= deadline:
                break
        self._raise_error()
        if left:
            reason = self._errors.reason("no answer in time")
            raise ClusterUnreachable(self._servers, f"{left} acknowledgements", reason)

    def settle(self, timeout_s: float) -> bool:
        """Waits until each message is acknowledged or refused, and raises nothing. Returns whether all are."""
        deadline = time.monotonic() + timeout_s
        while left := self._producer.flush(FLUSH_SLICE_S):
            if time.monotonic() >= deadline:
                break
        return not left

    def close(self) -> None:
        self._producer.purge()
        self._producer.flush(FLUSH_SLICE_S)
        self._admin.close()


def _as_marshal_error(
    error: KafkaError, tp: TopicPartition, size_bytes: int, given: settings.Settings, reason: str
) -> MarshalError:
    """Returns why a message was not written. `reason`: in words, if the cluster did not answer."""
    match error.code():
        case KafkaError.MSG_SIZE_TOO_LARGE | KafkaError.INVALID_MSG_SIZE | KafkaError.RECORD_LIST_TOO_LARGE:
            return MessageTooLarge("a message", size_bytes, error.str())
        case KafkaError._UNKNOWN_TOPIC | KafkaError.UNKNOWN_TOPIC_OR_PART:
            return TopicMissing(tp.topic)
        case KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return AccessDenied(settings.principal_of(given), "Write", "topic", tp.topic)
        case KafkaError._MSG_TIMED_OUT | KafkaError._TIMED_OUT | KafkaError._TRANSPORT:
            return ClusterUnreachable(str(given["bootstrap.servers"]), f"acknowledgements of {tp.topic}", reason)
    return PartitionError(*tp, f"writing is refused: {error.str()}")


# --- Writes messages to Kafka in transactions: all of one, or none. A second writer of the same name fences the first


TIMEOUT_S: Final = 60.0  # to begin, and for each commit
_PURGED: Final = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # by the end of a transaction: no reason
_FENCED: Final = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}


class TransactionalWriter:
    """Writes within `with writer.transaction()`. Once it is made, all transactions before it are over."""

    def __init__(self, transport: Any, name: str) -> None:
        """Raises AccessDenied, AuthenticationFailed, ClusterUnreachable; InvalidOption for a transport that is not
        Kafka's."""
        given = getattr(transport, "given", None)
        if given is None:
            raise InvalidOption("transport", type(transport).__name__, "one to Kafka, which has transactions")
        self._name, self._given, self._transport = name, given, transport
        self._topics: set[str] = set()  # to which it writes
        self._refused: MarshalError | None = None  # why the first message of the transaction was not written
        ours = {"transactional.id": name, "message.max.bytes": 1_000_000_000}  # how large: that is for the topic to say
        self._producer = settings.create_client(
            Producer, {**settings.admin(transport.redirected, transport.client_id), **ours}
        )
        with self._errors():
            self._producer.init_transactions(TIMEOUT_S)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what the block has written, or aborts it if that raises. Raises TopicRefused if another writer has
        the name now; AccessDenied, ClusterUnreachable; for a message MessageTooLarge, TopicMissing, PartitionError."""
        with self._errors():
            self._refused = None
            self._producer.begin_transaction()
            try:
                yield
                self._producer.commit_transaction(TIMEOUT_S)
            except BaseException as error:
                if not (isinstance(error, KafkaException) and error.args[0].fatal()):
                    with suppress(KafkaException):  # the first error counts; the next writer of the name aborts, too
                        self._producer.abort_transaction(TIMEOUT_S)
                raise

    def write(self, topic: str, value: bytes | None, key: bytes | None, headers: Headers, partition: int) -> None:
        """Queues one message."""
        self._topics.add(topic)
        while True:
            try:
                self._producer.produce(
                    topic, value, key, partition, headers=list(headers), on_delivery=self._on_delivery
                )
                return
            except BufferError:
                self._producer.poll(0.1)

    def close(self) -> None:
        """Drops what is not committed."""
        self._producer.purge()

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._refused is None and error.code() not in _PURGED:
            tp = TopicPartition(message.topic() or "", message.partition() or 0)
            size_bytes = len(message.value() or b"")
            self._refused = _as_marshal_error(error, tp, size_bytes, self._given, error.str())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            who = settings.principal_of(self._given)
            if error.code() in _FENCED:
                raise TopicRefused(self._name, "another writer has begun meanwhile") from raised
            if self._refused is not None:
                raise self._refused from raised
            if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                raise AccessDenied(who, "Write", "transactional-id", self._name) from raised
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise AccessDenied(who, "Write", "topic", self._denied()) from raised
            if error.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                servers = str(self._given["bootstrap.servers"])
                raise ClusterUnreachable(servers, f"transaction {self._name!r}", error.str()) from raised
            raise TopicRefused(self._name, error.str()) from raised

    def _denied(self) -> str:
        """Returns the topic to which this client may not write: Kafka does not name it."""
        with closing(self._transport.admin()) as admin:
            lacking = [topic for topic in sorted(self._topics) if "Write" not in admin.allowed("topic", topic)]
            return next(iter(lacking or sorted(self._topics)))
