"""Reads explicit ranges of offsets from Kafka by one librdkafka client, without a group or a commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from marshal_py.errors import AccessDenied, ClusterUnreachable, RangeLost
from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.connecting import metadata
from marshal_py.transport.connection_errors import ConnectionErrors, principal_of

POLL_S: Final = 0.25
DRAIN_MAX: Final = 10_000
FETCH: Final[Mapping[str, Any]] = {
    "enable.partition.eof": True,  # the only sign of a range whose last offsets are missing at the log's end
    "fetch.wait.max.ms": 10,
    "queued.max.messages.kbytes": 65_536,
}
_REFUSED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})


class KafkaReader:
    """Implements MessageReader over confluent_kafka. One thread at a time."""

    def __init__(self, given: Mapping[str, Any], client_id: str, fetch_wait_ms: int | None) -> None:
        self._errors = ConnectionErrors(given)
        own = {**FETCH, **given, "error_cb": self._errors.on_error}
        self._configuration = settings.data_reader(own, client_id, client_id, fetch_wait_ms)
        self._servers = str(given["bootstrap.servers"])
        self._consumer: Consumer | None = None
        self._reading = 0  # number of the newest reading: only that one's end ends the assignment
        self._known: set[str] = set()  # topics whose leaders the client has looked up

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[Message]]:
        """Yields messages as MessageReader.read says."""
        consumer = self._client()
        self._reading = reading = self._reading + 1
        try:
            for topic in {tp.topic for tp in starts} - self._known:
                metadata(consumer, topic, timeout_s)
                self._known.add(topic)
            consumer.assign([KafkaPartition(*tp, start) for tp, start in starts.items()])
            yield from self._read(consumer, dict(starts), dict(ends), timeout_s)
        except KafkaException as error:
            reason = self._errors.reason(str(error.args[0]))
            raise ClusterUnreachable(self._servers, f"messages of {next(iter(starts))}", reason) from error
        finally:
            if self._consumer is consumer and self._reading == reading:
                consumer.unassign()

    def _client(self) -> Consumer:
        if self._consumer is None:
            self._consumer = settings.create_client(Consumer, self._configuration)
        return self._consumer

    def _read(
        self, consumer: Consumer, at: dict[TopicPartition, int], ends: dict[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[Message]]:
        """Yields the messages in the ranges. `at`: the start of each partition that is still being read.

        A partition is finished when a message at or beyond its last wanted offset has come, or its end. So offsets that
        are missing in between do no harm.
        """
        deadline = time.monotonic() + timeout_s
        while at:
            first = consumer.poll(max(0.0, min(POLL_S, deadline - time.monotonic())))
            found = [] if first is None else [first, *consumer.consume(DRAIN_MAX, 0)]
            if any(map(Message.error, found)):
                for event in [message for message in found if message.error() is not None]:
                    self._note(event, at, ends)
                found = [message for message in found if message.error() is None]
            wanted = [message for message in found if _offset(message) < ends.get(_place(message), 0)]
            for message in found:
                tp = _place(message)
                if tp in at and _offset(message) + 1 >= ends[tp]:
                    self._done(consumer, tp, at)
            if wanted:
                deadline = time.monotonic() + timeout_s
                yield wanted
            elif time.monotonic() >= deadline:
                tp = next(iter(at))
                reason = self._errors.reason("no answer in time")
                raise ClusterUnreachable(self._servers, f"messages of {tp} up to {ends[tp]}", reason)
        return

    def _done(self, consumer: Consumer, tp: TopicPartition, at: dict[TopicPartition, int]) -> None:
        del at[tp]
        if at:
            consumer.incremental_unassign([KafkaPartition(*tp)])

    def _note(self, event: Message, at: dict[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> None:
        """Handles an event that is an error. `at`: the start of each partition that is still being read.

        If a partition has no further messages, it is removed from `at`. Raises RangeLost if the start is outside the
        partition, AccessDenied without the right to read. Any other error is only noted, because librdkafka retries it.
        """
        error, tp = event.error(), _place(event)
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            at.pop(tp, None)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and tp in at:
            raise RangeLost(tp.topic, tp.partition, at[tp], ends[tp], error.str())
        elif error.code() in _REFUSED:
            raise AccessDenied(principal_of(self._configuration), "Read", "topic", tp.topic)
        else:
            self._errors.note(error.str())

    def close(self) -> None:
        """Closes the client. A later `read` creates another one."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _offset(message: Message) -> int:
    return message.offset() or 0


def _place(message: Message) -> TopicPartition:
    return TopicPartition(message.topic() or "", message.partition() or 0)
