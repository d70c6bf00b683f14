"""Plain consumers that record what is in Kafka: a coordination topic while it grows, a data topic at the end.

They use confluent_kafka alone, not the package under test. Each record gets the time at which this process received it.
That is later than its append, so "the recorder had it before X" implies that it was appended before X.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from marshal_sim.oracle.oracle import Oracle, OracleStop
from marshal_sim.oracle.state import Group
from tests.support.evidence import Record

Answer = TypeVar("Answer")

POLL_S = 0.1
DRAIN_MAX = 2_000
REQUEST_TIMEOUT_S = 10.0  # of one request; a broker that has just come back may not answer
RETRY_S = 60.0  # for how long a request is repeated
BEYOND_THE_END = 2**40  # added to a position so that no record is folded after an oracle has stopped


def plain_consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "judge",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_uncommitted",
            "reconnect.backoff.max.ms": 500,
            "fetch.error.backoff.ms": 50,
            "fetch.wait.max.ms": 100,
            "log_level": 2,
        }
    )


def retried(request: Callable[[], Answer]) -> Answer:
    """Repeats a request to Kafka until it is answered."""
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return request()
        except KafkaException:
            if time.monotonic() > deadline:
                raise


def bounds(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first offset of a partition, and the next one to be written."""
    place = TopicPartition(topic, partition)
    low, high = retried(lambda: consumer.get_watermark_offsets(place, REQUEST_TIMEOUT_S))
    return int(low), int(high)


class Recorder:
    """A thread that reads every partition of a coordination topic and folds the records with the oracle."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.logs: dict[int, list[Record]] = {}
        self.oracles: dict[int, Oracle] = {}
        self.stops: list[OracleStop] = []
        self.trouble: list[str] = []
        self._bootstrap = bootstrap
        self._folded: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"recorder of {topic}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def ends(self) -> dict[int, int]:
        """The next offset to be read of every log."""
        return {log: records[-1].offset + 1 if records else 0 for log, records in self.logs.items()}

    def read_to_the_end(self) -> Callable[[], bool]:
        """Asks Kafka for the current ends of the logs. Returns a condition: whether all are read up to there."""
        consumer = plain_consumer(self._bootstrap)
        try:
            wanted = {log: bounds(consumer, self.topic, log)[1] for log in list(self.logs)}
        finally:
            consumer.close()
        return lambda: all(self.ends()[log] >= end for log, end in wanted.items())

    def group(self, name: str) -> Group | None:
        """The group's state after the records read so far; None if it has none."""
        return next((oracle.groups[name] for oracle in list(self.oracles.values()) if name in oracle.groups), None)

    def log_of(self, name: str) -> int | None:
        return next((log for log, oracle in list(self.oracles.items()) if name in oracle.groups), None)

    def _run(self) -> None:
        consumer = plain_consumer(self._bootstrap)
        try:
            partitions = self._await_topic(consumer)
            self.logs = {log: [] for log in range(partitions)}
            consumer.assign([TopicPartition(self.topic, log, 0) for log in range(partitions)])
            while not self._over.is_set():
                first = consumer.poll(POLL_S)
                if first is None:
                    continue
                messages = [first, *consumer.consume(DRAIN_MAX, 0)]
                read_ns, wall_ns = time.monotonic_ns(), time.time_ns()
                for message in messages:
                    self._take(message, read_ns, wall_ns - read_ns)
                self._fold()
        finally:
            consumer.close()

    def _await_topic(self, consumer: Consumer) -> int:
        while not self._over.is_set():
            try:
                found = consumer.list_topics(self.topic, timeout=1.0).topics[self.topic].partitions
                if found and all(part.error is None for part in found.values()):
                    return len(found)
            except KafkaException:
                pass
            self._over.wait(0.05)
        return 0

    def _take(self, message: Message, read_ns: int, wall_minus_mono_ns: int) -> None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET or error.fatal():
                self.trouble.append(error.str())
            return
        log, offset = message.partition(), message.offset()
        assert log is not None
        assert offset is not None
        sent_ns = message.timestamp()[1] * 1_000_000 - wall_minus_mono_ns
        epoch = message.leader_epoch()
        value = message.value()
        assert value is None or isinstance(value, bytes)
        self.logs[log].append(Record(offset, value, read_ns, sent_ns, -1 if epoch is None else epoch))

    def _fold(self) -> None:
        """Folds log 0 first: the others cannot be read without its Genesis (L4)."""
        for log in sorted(self.logs):
            if log not in self.oracles:
                if log == 0:
                    self.oracles[0] = Oracle()
                elif (root := self._root()) is not None:
                    self.oracles[log] = Oracle(log, root)
                else:
                    continue
            records, oracle = self.logs[log], self.oracles[log]
            at = self._folded.get(log, 0)
            try:
                while at < len(records):
                    oracle.apply(records[at].offset, records[at].value)
                    at += 1
            except OracleStop as stop:
                self.stops.append(stop)
                at = len(records) + BEYOND_THE_END
            self._folded[log] = at

    def _root(self) -> bytes | None:
        return root_of(self.logs.get(0, ()), self.oracles.get(0))


def root_of(records: list[Record] | tuple[()], oracle: Oracle | None) -> bytes | None:
    """The value of the accepted Genesis of log 0 (L3); None before it was folded."""
    if oracle is None or oracle.incarnation is None:
        return None
    probe = Oracle()
    for record in records:
        if probe.apply(record.offset, record.value).outcome == "accepted" and probe.incarnation is not None:
            return record.value
    return None


def contents(bootstrap: str, topic: str) -> dict[tuple[str, int], list[int]]:
    """The offsets of the messages that are in a data topic now, by (topic, partition)."""
    consumer = plain_consumer(bootstrap)
    found: dict[tuple[str, int], list[int]] = {}
    try:
        ends: dict[int, int] = {}
        described = retried(lambda: consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S))
        for number in described.topics[topic].partitions:
            low, high = bounds(consumer, topic, number)
            found[topic, number] = []
            if low < high:
                ends[number] = high
                consumer.incremental_assign([TopicPartition(topic, number, low)])
        deadline = time.monotonic() + RETRY_S
        while ends:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} could not be read to its end: {ends}")
            for message in consumer.consume(DRAIN_MAX, POLL_S):
                number, offset = message.partition(), message.offset()
                if message.error() is None and number is not None and offset is not None:
                    found[topic, number].append(offset)
                    if offset + 1 >= ends.get(number, 2**63):
                        del ends[number]
    finally:
        consumer.close()
    return found


def delete_records(bootstrap: str, topic: str, partition: int, before: int) -> None:
    """Deletes the records before an offset (DeleteRecords)."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    place = TopicPartition(topic, partition, before)
    admin.delete_records([place])[place].result(REQUEST_TIMEOUT_S)
