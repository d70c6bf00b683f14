"""Data messages from Kafka: explicit assignment, no group membership, no commits, no resets.

Groups what librdkafka hands out into chunks of one partition without a Python step per message where it can: this is
the hot path of every consumer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from marshal_py.errors import ClusterUnreachable
from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.connecting import metadata
from marshal_py.transport.ports import Chunk, OutOfRange

# Errors on a partition that pass by themselves; librdkafka retries them.
_PASSING: Final = frozenset({
    KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._PARTITION_EOF, KafkaError._TIMED_OUT,
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT,
    KafkaError._RESOLVE, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_ID,
})  # fmt: skip


LEARN_TIMEOUT_S: Final = 10.0
LEARN_RUNNING_S: Final = 1.0  # while partitions are fetched, for nothing is fetched meanwhile; librdkafka looks itself


class KafkaSource:
    """DataSource over one Consumer of librdkafka."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self._consumer = settings.made(Consumer, configuration)
        self._servers = str(configuration["bootstrap.servers"])
        self._lock = threading.Lock()  # around the assignment: any thread assigns while one polls
        self._polling = threading.Lock()  # librdkafka frees a client while another thread is inside it: close waits
        self._turn = threading.Lock()  # held by who waits for `_polling`, so that a poller does not overtake it
        self._rounds: dict[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._silent: set[TopicPartition] = set()  # assigned, and nothing has come of them since
        self._paused: set[TopicPartition] = set()
        self._round = 0
        self._topics: set[str] = set()  # every topic that was ever assigned: messages of it may still be on their way
        self._out: list[OutOfRange] = []
        self._broken: list[tuple[TopicPartition, str]] = []
        self._closed = False

    def learn(self, topics: Iterable[str]) -> None:
        # Without this a consumer that is already connected learns of a new topic at librdkafka's next look, up to a
        # second later: a third of what a take-over may cost.
        for topic in topics:
            # confluent_kafka (2.16) lets `list_topics` wait, beyond its own limit, until nobody polls: beside
            # a thread that polls again and again it would never come back.
            with self._turn, self._polling:
                if self._closed:
                    return
                timeout_s = LEARN_RUNNING_S if self._rounds else LEARN_TIMEOUT_S
                try:
                    metadata(self._consumer, topic, timeout_s)
                except KafkaException as error:
                    raise ClusterUnreachable(self._servers, f"metadata of {topic}", str(error.args[0])) from error

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        with self._lock:
            if self._closed:
                return
            self._assign(positions)

    def _assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._drop([tp for tp in positions if tp in self._rounds])
        for tp, offset in positions.items():
            self._round += 1
            self._rounds[tp] = self._round
            self._positions[tp] = offset
            self._silent.add(tp)
            self._topics.add(tp.topic)
        self._consumer.incremental_assign([KafkaPartition(*tp, offset) for tp, offset in positions.items()])

    def unassign(self, tps: Iterable[TopicPartition]) -> None:
        with self._lock:
            if not self._closed:
                self._drop([tp for tp in tps if tp in self._rounds])

    def _drop(self, tps: list[TopicPartition]) -> None:
        if not tps:
            return
        for tp in tps:
            del self._rounds[tp], self._positions[tp]
        self._silent.difference_update(tps)
        # librdkafka remembers a pause beyond the assignment: the partition would stay silent when it is assigned again.
        paused = [KafkaPartition(*tp) for tp in tps if tp in self._paused]
        if paused:
            self._consumer.resume(paused)
            self._paused.difference_update(tps)
        self._consumer.incremental_unassign([KafkaPartition(*tp) for tp in tps])

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        with self._lock:
            assigned = [tp for tp in tps if tp in self._rounds]
            if assigned and not self._closed:
                self._consumer.pause([KafkaPartition(*tp) for tp in assigned])
                self._paused.update(assigned)

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        # A paused partition lost what librdkafka had fetched of it, so a fresh assignment costs nothing more.
        self.assign(positions)

    def round(self, tp: TopicPartition) -> int:
        return self._rounds.get(tp, 0)

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        with self._lock:
            rounds = self._rounds.copy()
        with self._turn:
            pass  # whoever waits for the client goes first
        with self._polling:
            messages = [] if self._closed else self._consume(timeout_s, max_messages)
        if not messages:
            return []
        # By truth, not by comparison: KafkaError compared to None leaves an exception behind in C (2.16).
        if any(map(Message.error, messages)):
            messages = self._take_errors(messages, rounds)
        return self._chunks(messages, rounds)

    def _consume(self, timeout_s: float, max_messages: int) -> list[Message]:
        messages: list[Message] = self._consumer.consume(max_messages, 0)
        if messages or timeout_s <= 0:
            return messages
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        return [first, *self._consumer.consume(max_messages - 1, 0)] if max_messages > 1 else [first]

    def _chunks(self, messages: list[Message], rounds: Mapping[TopicPartition, int]) -> list[Chunk]:
        """Cuts at every change of partition. The loops over messages run inside C."""
        count = len(messages)
        if not count:
            return []
        partitions = list(map(Message.partition, messages))
        many_topics = len(self._topics) != 1
        topics = list(map(Message.topic, messages)) if many_topics else [messages[0].topic()]
        if partitions.count(partitions[0]) == count and (not many_topics or topics.count(topics[0]) == count):
            return [self._chunk(topics[0], partitions[0], messages, rounds)]
        keys = zip(topics, partitions, strict=True) if many_topics else partitions
        chunks: list[Chunk] = []
        at = 0
        for _, same in groupby(keys):
            until = at + len(list(same))
            topic = topics[at] if many_topics else topics[0]
            chunks.append(self._chunk(topic, partitions[at], messages[at:until], rounds))
            at = until
        return chunks

    def _chunk(self, topic: str | None, partition: int | None, messages: list[Message],
               rounds: Mapping[TopicPartition, int]) -> Chunk:  # fmt: skip
        assert topic is not None
        assert partition is not None
        tp = TopicPartition(topic, partition)
        self._silent.discard(tp)
        return Chunk(tp, rounds.get(tp, 0), messages)

    def _take_errors(self, messages: list[Message], rounds: Mapping[TopicPartition, int]) -> list[Message]:
        """`rounds`: before these were fetched. An error of an earlier assignment says nothing of the one that is.

        librdkafka (2.16) may tell of a refused position after the partition was assigned anew; it fetches nothing then.
        """
        good: list[Message] = []
        for message in messages:
            error = message.error()
            if error is None:
                good.append(message)
                continue
            topic, partition = message.topic(), message.partition()
            if topic is None or partition is None or partition < 0 or error.code() in _PASSING:
                continue
            tp = TopicPartition(topic, partition)
            # Where it failed, which is not where the assignment began.
            position = message.offset()
            if position is None or position < 0:
                position = self._positions.get(tp, -1)
            with self._lock:
                if self._closed or tp not in self._rounds or self._rounds[tp] != rounds.get(tp):
                    continue
                if tp in self._silent and position != self._positions[tp]:
                    self._assign({tp: self._positions[tp]})
                    continue
                self._drop([tp])
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._out.append(OutOfRange(tp, position, settings.truncation(error)))
            else:
                self._broken.append((tp, error.str()))
        return good

    def out_of_range(self) -> list[OutOfRange]:
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def broken(self) -> list[tuple[TopicPartition, str]]:
        if not self._broken:
            return []
        broken, self._broken = self._broken, []
        return broken

    def end_offset(self, tp: TopicPartition) -> int:
        if self._closed:
            return -1
        try:
            _, end = self._consumer.get_watermark_offsets(KafkaPartition(*tp), cached=True)
        except (KafkaException, RuntimeError):  # the second: closed meanwhile by another thread
            return -1
        return end if end >= 0 else -1

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            with self._polling, self._lock:
                self._consumer.close()
