"""Reads explicit ranges of offsets from Kafka without a group or a commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from marshal_py.errors import AccessDenied, ClusterUnreachable, RangeLost
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.connecting import metadata
from marshal_py.transport.connection_errors import ConnectionErrors, principal_of

POLL_S: Final = 0.25
NEAR: Final = 2_000  # offsets of a partition: a read of at most so many fetches little
FETCH: Final[Mapping[str, Any]] = {
    "enable.partition.eof": True,  # the only sign of a range whose last offsets are missing at the log's end
    "fetch.wait.max.ms": 10,
    "queued.max.messages.kbytes": 65_536,
}
# A fetch brings at least one batch of messages and otherwise up to so much of each partition. The default of 1 MB is
# right for long ranges, and costs tens of milliseconds where one message is wanted.
FETCH_LITTLE: Final[Mapping[str, Any]] = {**FETCH, "fetch.message.max.bytes": 65_536}
_REFUSED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})


class KafkaReader:
    """A MessageReader over confluent_kafka, with a client for long ranges and one for short ones. One thread at a
    time."""

    def __init__(self, given: Mapping[str, Any], client_id: str, fetch_wait_ms: int | None) -> None:
        self._errors = ConnectionErrors(given)
        self._configurations = [
            settings.data_reader(
                {**fetch, **given, "error_cb": self._errors.on_error}, client_id, client_id, fetch_wait_ms
            )
            for fetch in (FETCH, FETCH_LITTLE)
        ]
        self._servers = str(given["bootstrap.servers"])
        self._clients: dict[bool, _Client] = {}  # by whether they read short ranges
        self._assigned: Consumer | None = None  # the client of the newest reading
        self._reading = 0  # number of the newest reading: only that one's end ends the assignment

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[Message]]:
        """Yields messages as MessageReader.read says."""
        client = self._client(near=all(ends[tp] - start <= NEAR for tp, start in starts.items()))
        consumer = client.consumer
        if self._assigned is not None and self._assigned is not consumer:
            self._assigned.unassign()  # its reading has been left unfinished
        self._assigned = consumer
        self._reading = reading = self._reading + 1
        try:
            for tp in starts:
                if tp.topic not in client.known:
                    metadata(consumer, tp.topic, timeout_s)
                    client.known.add(tp.topic)
            consumer.assign([KafkaPartition(*tp, start) for tp, start in starts.items()])
            yield from self._read(consumer, dict(starts), dict(ends), timeout_s)
        except KafkaException as error:
            reason = self._errors.reason(str(error.args[0]))
            raise ClusterUnreachable(self._servers, f"messages of {next(iter(starts))}", reason) from error
        finally:
            if self._assigned is consumer and self._reading == reading:
                consumer.unassign()
                self._assigned = None

    def _client(self, near: bool) -> _Client:
        found = self._clients.get(near)
        if found is None:
            found = _Client(settings.create_client(Consumer, self._configurations[near]), set())
            self._clients[near] = found
        return found

    def _read(
        self, consumer: Consumer, at: dict[TopicPartition, int], ends: dict[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[Message]]:
        """Yields the ranges' messages. `at`: the starts of unfinished partitions; one ends with a message at or beyond
        its last offset, or its end if that is not below, so missing offsets do no harm and a lagging replica is waited
        for. Only there messages are looked at one by one; the rest loops in C."""
        deadline, topic = time.monotonic() + timeout_s, next((tp.topic for tp in at), "")
        while at:
            found = consumer.consume(settings.PIECE_MESSAGES, 0)
            if not found:
                first = consumer.poll(max(0.0, min(POLL_S, deadline - time.monotonic())))
                found = [] if first is None else [first]
            if any(map(Message.error, found)):
                for event in [message for message in found if message.error() is not None]:
                    self._note(event, at, ends)
                found = [message for message in found if message.error() is None]
            numbers = list(map(Message.partition, found))
            backwards = numbers[::-1]
            beyond = {}
            for number in set(numbers):
                last = found[-1 - backwards.index(number)]
                tp = TopicPartition(topic, number or 0)
                if tp not in ends or (last.offset() or 0) + 1 >= ends[tp]:
                    beyond[number] = ends.get(tp, 0)
                    if tp in at:
                        self._done(consumer, tp, at)
            if beyond:
                found = [
                    message
                    for message, number in zip(found, numbers, strict=True)
                    if number not in beyond or (message.offset() or 0) < beyond[number]
                ]
            if found:
                deadline = time.monotonic() + timeout_s
                yield found
            elif time.monotonic() >= deadline:
                tp = next(iter(at))
                reason = self._errors.reason("no answer in time")
                raise ClusterUnreachable(self._servers, f"messages of {tp} up to {ends[tp]}", reason)

    def _done(self, consumer: Consumer, tp: TopicPartition, at: dict[TopicPartition, int]) -> None:
        del at[tp]
        if at:
            consumer.incremental_unassign([KafkaPartition(*tp)])

    def _note(self, event: Message, at: dict[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> None:
        """Handles an error event; a partition without further messages leaves `at`. Raises RangeLost outside the
        partition, AccessDenied; librdkafka retries others."""
        error, tp = event.error(), _place(event)
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            if (event.offset() or 0) >= ends.get(tp, 0):  # else a replica that has not received the last messages yet
                at.pop(tp, None)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and tp in at:
            raise RangeLost(tp.topic, tp.partition, at[tp], ends[tp], error.str())
        elif error.code() in _REFUSED:
            raise AccessDenied(principal_of(self._configurations[False]), "Read", "topic", tp.topic)
        else:
            self._errors.note(error.str())

    def close(self) -> None:
        """Closes the clients. A later `read` creates others."""
        clients, self._clients, self._assigned = self._clients, {}, None
        for client in clients.values():
            client.consumer.close()


class _Client(NamedTuple):
    """A client of librdkafka. `known`: the topics whose leaders it has looked up."""

    consumer: Consumer
    known: set[str]


def _place(message: Message) -> TopicPartition:
    return TopicPartition(message.topic() or "", message.partition() or 0)
