"""The conformance suite of transports: what marshal_py/transport/ports.py promises, as tests over any rig.

A Rig is a cluster with its transport and the operations that a test needs on the cluster's side. Test modules inherit
the classes below and provide a fixture `rig`. CAPABILITY of a class is what the rig must be able to do. A rig names
what it lacks, and a module runs a class over exactly the rigs that have its capability. Nothing here skips.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Protocol, TypeVar

import pytest
from confluent_kafka import Consumer, Producer

from marshal_py.errors import CoordinationTopicMissing, HistoryTruncated, TopicRecreated, WrongTopicSetting
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from marshal_py.transport.ports import (
    ALL_CAPABILITIES,
    Bounds,
    CoordinationLog,
    DataSource,
    LogRecord,
    OutOfRange,
    RawMessage,
    Transport,
)

DEADLINE_S = 30.0  # far above any answer on one machine; only a broken promise waits so long
QUEUE_MAX = 10_100  # a little more than the producer of the coordination log queues
T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str) -> T:
    """Checks `condition` until it returns a true value; returns that. Fails at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: it did not come true"
        time.sleep(0.005)
    return value


class Rig(Protocol):
    """A cluster for the suite. Topic names are fresh, so that rigs may share a cluster."""

    name: str
    lacks: frozenset[str]

    def transport(self) -> Transport: ...
    def topic(self, partitions: int = 1) -> str: ...
    def produce(self, topic: str, partition: int, values: Iterable[bytes]) -> None: ...
    def truncate(self, topic: str, partition: int, before: int) -> None: ...
    def recreate(self, topic: str, partitions: int) -> None: ...
    def grow(self, topic: str, partitions: int) -> None: ...
    def configure(self, topic: str, settings: Mapping[str, str]) -> None: ...
    def join_kafka_group(self, group: str, topic: str) -> Callable[[], None]: ...
    def fill_queue(self, log: CoordinationLog) -> bool: ...
    def close(self) -> None: ...


class MemoryRig:
    """A MemoryBroker, which lacks nothing."""

    name = "memory"
    lacks: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.broker = MemoryBroker()

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self.broker)

    def topic(self, partitions: int = 1) -> str:
        name = f"c-{uuid.uuid4().hex[:12]}"
        self.broker.create_topic(name, partitions)
        return name

    def produce(self, topic: str, partition: int, values: Iterable[bytes]) -> None:
        for value in values:
            self.broker.produce(topic, partition, value, b"key", [("h", b"1")], 1_000)

    def truncate(self, topic: str, partition: int, before: int) -> None:
        self.broker.delete_records(TopicPartition(topic, partition), before)

    def recreate(self, topic: str, partitions: int) -> None:
        self.broker.delete_topic(topic)
        self.broker.create_topic(topic, partitions)

    def grow(self, topic: str, partitions: int) -> None:
        self.broker.grow(topic, partitions)

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        self.broker.settings[topic].update(settings)

    def join_kafka_group(self, group: str, topic: str) -> Callable[[], None]:
        self.broker.live_kafka[group] = 1
        return lambda: self.broker.live_kafka.__setitem__(group, 0)

    def fill_queue(self, log: CoordinationLog) -> bool:
        self.broker.queue_full = True
        return log.append(0, b"k", b"v")

    def close(self) -> None:
        pass


class KafkaRig:
    """Any cluster with an address; embedded and Apache Kafka differ in how topics are handled."""

    name = "kafka"
    lacks: frozenset[str] = frozenset()

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "log_level": 0})

    def transport(self) -> KafkaTransport:
        return KafkaTransport(self.bootstrap, DEADLINE_S)

    def topic(self, partitions: int = 1) -> str:
        raise NotImplementedError

    def produce(self, topic: str, partition: int, values: Iterable[bytes]) -> None:
        failed: list[object] = []
        for value in values:
            self._producer.produce(
                topic,
                value,
                b"key",
                partition,
                headers=[("h", b"1")],
                timestamp=1_000,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
        assert self._producer.flush(DEADLINE_S) == 0
        assert failed == []

    def truncate(self, topic: str, partition: int, before: int) -> None:
        raise NotImplementedError

    def recreate(self, topic: str, partitions: int) -> None:
        raise NotImplementedError

    def grow(self, topic: str, partitions: int) -> None:
        raise NotImplementedError

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        raise NotImplementedError

    def join_kafka_group(self, group: str, topic: str) -> Callable[[], None]:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": group, "enable.auto.commit": False})
        consumer.subscribe([topic])
        until(lambda: consumer.poll(0.1) is not None or bool(consumer.assignment()), "the Kafka group is joined")
        return consumer.close

    def fill_queue(self, log: CoordinationLog) -> bool:
        # Nobody polls this log meanwhile, so no acknowledgement makes room.
        return all(log.append(0, b"k", b"v") for _ in range(QUEUE_MAX))

    def close(self) -> None:
        self._producer.flush(1.0)


class EmbeddedRig(KafkaRig):
    """The embedded broker. Its owner can truncate; its clients have none of the capabilities."""

    name = "embedded"
    lacks = ALL_CAPABILITIES - {"truncate"}

    def __init__(self) -> None:
        self.broker = Broker().start()
        super().__init__(self.broker.bootstrap_servers)

    def topic(self, partitions: int = 1) -> str:
        name = f"c-{uuid.uuid4().hex[:12]}"
        self.broker.create_topic(name, partitions)
        return name

    def truncate(self, topic: str, partition: int, before: int) -> None:
        self.broker.truncate(topic, partition, before)

    def close(self) -> None:
        super().close()
        self.broker.close()


# --- reading


def read_log(log: CoordinationLog, count: int) -> list[LogRecord]:
    """The next `count` records, and no more than those."""
    found: list[LogRecord] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
        found += log.poll(0.1)
    assert len(found) == count
    return found


def read_source(source: DataSource, count: int) -> dict[TopicPartition, list[RawMessage]]:
    """Messages by partition, `count` in all; every chunk is of one partition and in order."""
    found: dict[TopicPartition, list[RawMessage]] = {}
    total = 0
    deadline = time.monotonic() + DEADLINE_S
    while total < count:
        assert time.monotonic() < deadline, f"{total} of {count} messages"
        for tp, round_, messages, _ in source.poll(0.1, 100):
            assert 0 < len(messages) <= 100
            assert {(m.topic(), m.partition()) for m in messages} == {tp}
            offsets = [m.offset() or 0 for m in messages]
            assert offsets == sorted(offsets)
            assert round_ == source.round(tp) != 0
            found.setdefault(tp, []).extend(messages)
            total += len(messages)
    assert total == count
    return found


def values(messages: Iterable[RawMessage]) -> list[bytes]:
    return [m.value() for m in messages]


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, last)]


class Suite:
    CAPABILITY: ClassVar[str] = ""  # what a rig must have; "" for all rigs

    @pytest.fixture
    def topic(self, rig: Rig) -> str:
        return rig.topic(3)

    @pytest.fixture
    def log(self, rig: Rig, topic: str) -> Iterable[CoordinationLog]:
        log = rig.transport().log(topic, "writer")
        yield log
        log.close(0.0)

    @pytest.fixture
    def source(self, rig: Rig, topic: str) -> Iterable[DataSource]:
        source = rig.transport().source("group", "reader", {})
        source.learn_leaders([topic])
        yield source
        source.close()


class LogPromises(Suite):
    """CoordinationLog."""

    def test_what_is_appended_is_read_in_order_without_gaps(self, log: CoordinationLog) -> None:
        log.follow(0, 0)
        for value in numbered(0, 50):
            assert log.append(0, b"group", value) is True
        records = read_log(log, 50)
        assert [r.offset for r in records] == list(range(50))
        assert [r.value for r in records] == numbered(0, 50)
        assert {r.log for r in records} == {0}

    def test_poll_waits_no_longer_than_asked_and_returns_nothing(self, log: CoordinationLog) -> None:
        log.follow(0, 0)
        assert log.poll(0.0) == []
        assert log.poll(0.05) == []

    def test_every_log_has_its_own_order(self, log: CoordinationLog) -> None:
        for number in (0, 1, 2):
            log.follow(number, 0)
        for value in numbered(0, 30):
            log.append(int(value) % 3, b"g", value)
        records = read_log(log, 30)
        for number in (0, 1, 2):
            mine = [r for r in records if r.log == number]
            assert [r.offset for r in mine] == list(range(10))
            assert [r.value for r in mine] == [b"%d" % i for i in range(number, 30, 3)]

    def test_a_log_can_be_followed_later(self, log: CoordinationLog) -> None:
        log.follow(0, 0)
        log.append(0, b"g", b"a")
        read_log(log, 1)
        log.append(1, b"g", b"b")
        log.follow(1, 0)
        assert [(r.log, r.offset, r.value) for r in read_log(log, 1)] == [(1, 0, b"b")]
        log.append(0, b"g", b"c")
        assert [(r.log, r.offset, r.value) for r in read_log(log, 1)] == [(0, 1, b"c")]

    def test_gathered_or_not_each_record_is_read_once(self, log: CoordinationLog) -> None:
        log.follow(0, 0)
        records: list[LogRecord] = []
        for turn in range(20):
            log.gather(turn // 5 % 2 == 1)
            for value in numbered(10 * turn, 10 * turn + 10):
                log.append(0, b"g", value)
            records += read_log(log, 10)
        assert [r.offset for r in records] == list(range(200))
        assert [r.value for r in records] == numbered(0, 200)

    def test_a_later_reader_reads_from_genesis(self, rig: Rig, topic: str, log: CoordinationLog) -> None:
        log.follow(0, 0)
        for value in numbered(0, 20):
            log.append(0, b"g", value)
        read_log(log, 20)
        late = rig.transport().log(topic, "late")
        late.follow(0, 0)
        assert [r.value for r in read_log(late, 20)] == numbered(0, 20)
        late.close(0.0)

    def test_following_from_the_middle(self, log: CoordinationLog) -> None:
        for value in numbered(0, 10):
            log.append(0, b"g", value)
        until(lambda: log.bounds(0, DEADLINE_S).end == 10, "ten records")
        log.follow(0, 7)
        assert [(r.offset, r.value) for r in read_log(log, 3)] == [(7, b"7"), (8, b"8"), (9, b"9")]

    def test_two_writers_are_read_by_both_in_one_order(self, rig: Rig, topic: str, log: CoordinationLog) -> None:
        other = rig.transport().log(topic, "other")
        for reader in (log, other):
            reader.follow(0, 0)
        for i in range(20):
            log.append(0, b"g", b"a%d" % i)
            other.append(0, b"g", b"b%d" % i)
        seen, seen_by_other = read_log(log, 40), read_log(other, 40)
        assert [(r.offset, r.value) for r in seen] == [(r.offset, r.value) for r in seen_by_other]
        assert [r.offset for r in seen] == list(range(40))
        for writer in (b"a", b"b"):
            mine = [r.value for r in seen if r.value is not None and r.value.startswith(writer)]
            assert mine == [writer + b"%d" % i for i in range(20)]
        other.close(0.0)

    def test_bounds(self, log: CoordinationLog) -> None:
        assert log.bounds(0, DEADLINE_S) == Bounds(0, 0)
        log.follow(0, 0)
        log.append(0, b"g", b"x")
        read_log(log, 1)
        assert log.bounds(0, DEADLINE_S) == Bounds(0, 1)
        assert log.bounds(1, DEADLINE_S) == Bounds(0, 0)

    def test_a_null_value_is_a_record_too(self, rig: Rig, topic: str, log: CoordinationLog) -> None:
        log.follow(0, 0)
        rig.produce(topic, 0, [b""])
        assert read_log(log, 1)[0].value == b""

    def test_a_healthy_log_waits_for_nothing_and_refuses_nothing(self, log: CoordinationLog) -> None:
        log.follow(0, 0)
        log.append(0, b"g", b"x")
        read_log(log, 1)
        assert log.waiting_for() == ""
        assert log.refused() is None

    def test_a_full_queue_is_an_answer(self, rig: Rig, log: CoordinationLog) -> None:
        assert rig.fill_queue(log) is False

    def test_a_position_past_the_end_is_a_topic_that_was_recreated(self, log: CoordinationLog) -> None:
        log.append(0, b"g", b"x")
        until(lambda: log.bounds(0, DEADLINE_S).end == 1, "one record")
        log.follow(0, 5)
        with pytest.raises(TopicRecreated, match="offset 5"):
            read_log(log, 1)

    def test_one_bad_log_leaves_the_others_alone(self, log: CoordinationLog) -> None:
        log.append(0, b"g", b"x")
        until(lambda: log.bounds(0, DEADLINE_S).end == 1, "one record")
        log.follow(0, 5)
        with pytest.raises(TopicRecreated):
            read_log(log, 1)
        log.follow(1, 0)
        for value in numbered(0, 5):
            log.append(1, b"g", value)
        assert [r.value for r in read_log(log, 5)] == numbered(0, 5)

    def test_close_twice_and_poll_after_it(self, log: CoordinationLog) -> None:
        log.follow(0, 0)
        log.close(0.0)
        log.close(0.0)
        assert log.poll(0.0) == []


class SourcePromises(Suite):
    """DataSource."""

    def test_messages_come_as_chunks_of_one_partition(self, rig: Rig, topic: str, source: DataSource) -> None:
        for partition in range(3):
            rig.produce(topic, partition, numbered(0, 40))
        source.assign({TopicPartition(topic, partition): 0 for partition in range(3)})
        found = read_source(source, 120)
        for partition in range(3):
            messages = found[TopicPartition(topic, partition)]
            assert [m.offset() for m in messages] == list(range(40))
            assert values(messages) == numbered(0, 40)

    def test_two_topics_are_kept_apart(self, rig: Rig, topic: str, source: DataSource) -> None:
        second = rig.topic(1)
        rig.produce(topic, 0, [b"a"])
        rig.produce(second, 0, [b"b"])
        source.learn_leaders([second])
        source.assign({TopicPartition(topic, 0): 0, TopicPartition(second, 0): 0})
        found = read_source(source, 2)
        assert {tp.topic: values(messages) for tp, messages in found.items()} == {topic: [b"a"], second: [b"b"]}

    def test_a_message_has_key_value_headers_and_timestamp(self, rig: Rig, topic: str, source: DataSource) -> None:
        rig.produce(topic, 0, [b"v"])
        source.assign({TopicPartition(topic, 0): 0})
        message = read_source(source, 1)[TopicPartition(topic, 0)][0]
        assert (message.key(), message.value(), message.headers()) == (b"key", b"v", [("h", b"1")])
        assert message.timestamp()[1] == 1_000

    def test_fetching_begins_at_the_assigned_position(self, rig: Rig, topic: str, source: DataSource) -> None:
        rig.produce(topic, 0, numbered(0, 10))
        source.assign({TopicPartition(topic, 0): 6})
        assert values(read_source(source, 4)[TopicPartition(topic, 0)]) == numbered(6, 10)

    def test_poll_returns_at_most_the_requested_number(self, rig: Rig, topic: str, source: DataSource) -> None:
        rig.produce(topic, 0, numbered(0, 20))
        source.assign({TopicPartition(topic, 0): 0})
        got: list[bytes] = []
        while len(got) < 20:
            chunks = source.poll(DEADLINE_S, 3)
            assert 0 < sum(len(chunk.messages) for chunk in chunks) <= 3
            got += [value for chunk in chunks for value in values(chunk.messages)]
        assert got == numbered(0, 20)

    def test_what_is_here_can_be_taken_without_a_wait(self, rig: Rig, topic: str, source: DataSource) -> None:
        rig.produce(topic, 0, numbered(0, 20))
        source.assign({TopicPartition(topic, 0): 0})
        got = values([message for chunk in source.poll(DEADLINE_S, 3) for message in chunk.messages])
        assert 0 < len(got) <= 3
        deadline = time.monotonic() + DEADLINE_S
        while len(got) < 20:
            assert time.monotonic() < deadline, got
            chunks = source.poll_now(3)
            assert chunks is not None, "no other thread uses the client"
            assert sum(len(chunk.messages) for chunk in chunks) <= 3
            got += [value for chunk in chunks for value in values(chunk.messages)]
        assert got == numbered(0, 20)
        assert source.poll_now(3) == []

    def test_an_unassigned_partition_delivers_nothing(self, rig: Rig, topic: str, source: DataSource) -> None:
        zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
        source.assign({zero: 0, one: 0})
        source.unassign([zero])
        rig.produce(topic, 0, [b"no"])
        rig.produce(topic, 1, [b"yes"])
        assert list(read_source(source, 1)) == [one]
        assert source.round(zero) == 0

    def test_a_second_assignment_is_a_new_round(self, rig: Rig, topic: str, source: DataSource) -> None:
        tp = TopicPartition(topic, 0)
        assert source.round(tp) == 0
        rig.produce(topic, 0, numbered(0, 5))
        source.assign({tp: 0})
        first = source.round(tp)
        read_source(source, 5)
        source.assign({tp: 3})
        assert source.round(tp) > first > 0
        assert values(read_source(source, 2)[tp]) == numbered(3, 5)

    def test_pause_and_resume(self, rig: Rig, topic: str, source: DataSource) -> None:
        zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
        source.assign({zero: 0, one: 0})
        rig.produce(topic, 0, [b"a"])
        read_source(source, 1)
        source.pause([zero])
        rig.produce(topic, 0, [b"b"])
        rig.produce(topic, 1, [b"c"])
        assert list(read_source(source, 1)) == [one]
        assert source.poll(0.05, 10) == []
        source.resume({zero: 1})
        assert values(read_source(source, 1)[zero]) == [b"b"]

    def test_what_is_assigned_outlives_the_client(self, rig: Rig, topic: str, source: DataSource) -> None:
        """A topic was created again: the others go on where they were, and what is paused stays so (D10)."""
        paused, moved = TopicPartition(topic, 0), TopicPartition(topic, 1)
        rig.produce(topic, 0, numbered(0, 5))
        rig.produce(topic, 1, numbered(0, 9))
        source.assign({paused: 0, moved: 0})
        read_source(source, 14)
        source.pause([paused])
        source.assign({moved: 6})
        source.learn_leaders([topic], anew=True)
        assert values(read_source(source, 3)[moved]) == numbered(6, 9)
        rig.produce(topic, 0, [b"later"])
        rig.produce(topic, 1, [b"last"])
        assert list(read_source(source, 1)) == [moved]
        assert source.poll(0.05, 10) == []
        source.resume({paused: 3})
        assert values(read_source(source, 3)[paused]) == [*numbered(3, 5), b"later"]

    def test_the_end_is_known_once_there_was_an_answer(self, rig: Rig, topic: str, source: DataSource) -> None:
        full, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
        rig.produce(topic, 0, numbered(0, 7))
        source.assign({full: 0, empty: 0})
        read_source(source, 7)

        def ends_known() -> bool:
            source.poll(0.01, 10)
            return source.end_offset(full) == 7 and source.end_offset(empty) == 0

        until(ends_known, "both ends are known")

    def test_beyond_the_end_is_out_of_range(self, rig: Rig, topic: str, source: DataSource) -> None:
        bad, good = TopicPartition(topic, 0), TopicPartition(topic, 1)
        rig.produce(topic, 0, numbered(0, 3))
        rig.produce(topic, 1, numbered(0, 3))
        source.assign({bad: 10, good: 0})
        round_ = source.round(bad)
        read_source(source, 3)
        assert self._out_of_range(source) == [OutOfRange(bad, 10, round_)]
        assert not source.fetching(bad)
        assert source.round(bad) == round_, "until it is assigned again"
        assert source.out_of_range() == []

    def test_after_close_nothing_comes_and_nothing_breaks(self, rig: Rig, topic: str, source: DataSource) -> None:
        tp = TopicPartition(topic, 0)
        source.assign({tp: 0})
        source.close()
        source.close()
        assert source.poll(0.0, 10) == []
        source.assign({tp: 0})
        source.unassign([tp])
        assert source.out_of_range() == []
        assert source.broken() == []

    @staticmethod
    def _out_of_range(source: DataSource) -> list[OutOfRange]:
        def look() -> list[OutOfRange]:
            source.poll(0.01, 10)
            return source.out_of_range()

        return until(look, "a position is refused")

    def test_of_a_topic_that_was_created_again_nothing_known_is_kept(
        self, rig: Rig, topic: str, source: DataSource
    ) -> None:
        """What was fetched goes on where it was, in its round."""
        tp = TopicPartition(topic, 0)
        rig.produce(topic, 0, numbered(0, 20))
        source.assign({tp: 0})
        round_, found = source.round(tp), list[bytes | None]()

        def read(count: int) -> bool:
            for chunk in source.poll(0.1, count - len(found)):
                assert chunk.round == round_
                found.extend(message.value() for message in chunk.messages)
            return len(found) >= count

        until(lambda: read(5), "some came")
        source.learn_leaders([topic], anew=True)
        until(lambda: read(20), "all came")
        assert found == numbered(0, 20)

    def test_a_polling_thread_does_not_delay_learn_leaders(self, rig: Rig, topic: str, source: DataSource) -> None:
        """A consumer's thread polls nearly all the time; the worker must get its turn."""
        source.assign({TopicPartition(topic, 0): 0})
        over, learned = threading.Event(), threading.Event()

        def poll() -> None:
            while not over.is_set():
                source.poll(0.1, 10)

        def learn() -> None:
            for _ in range(5):
                source.learn_leaders([topic])
            learned.set()

        threads = [threading.Thread(target=poll), threading.Thread(target=learn, daemon=True)]
        for thread in threads:
            thread.start()
        try:
            assert learned.wait(DEADLINE_S), "it never came back"
        finally:
            over.set()
            threads[0].join()


class AdminPromises(Suite):
    """ClusterAdmin."""

    def test_capabilities_are_named(self, rig: Rig) -> None:
        owners = {"truncate"} if rig.name == "embedded" else set()  # the owner can, a client cannot
        assert rig.transport().admin().capabilities == ALL_CAPABILITIES - rig.lacks - owners
        assert rig.transport().name == rig.name

    def test_topics_are_listed(self, rig: Rig, topic: str) -> None:
        assert topic in rig.transport().admin().topics()

    def test_partition_count(self, rig: Rig, topic: str) -> None:
        admin = rig.transport().admin()
        assert admin.partition_count(topic) == 3
        assert admin.partition_count(f"missing-{uuid.uuid4().hex}") is None

    def test_asking_for_a_topic_does_not_create_it(self, rig: Rig) -> None:
        name = f"missing-{uuid.uuid4().hex}"
        admin = rig.transport().admin()
        assert [admin.partition_count(name) for _ in range(3)] == [None, None, None]

    def test_bounds(self, rig: Rig, topic: str) -> None:
        rig.produce(topic, 1, numbered(0, 4))
        tps = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        admin = rig.transport().admin()
        assert admin.bounds(tps) == {tps[0]: Bounds(0, 0), tps[1]: Bounds(0, 4)}
        gone = TopicPartition(f"{topic}-gone", 0)
        assert admin.told_offsets([gone, *tps], DEADLINE_S) == {tps[0]: 0, tps[1]: 4}, "one that is gone hides no other"
        assert admin.told_offsets(tps, DEADLINE_S, first=True) == {tps[0]: 0, tps[1]: 0}

    def test_what_is_committed_is_found_and_the_rest_left_out(self, rig: Rig, topic: str) -> None:
        group = f"g-{uuid.uuid4().hex}"
        tps = [TopicPartition(topic, partition) for partition in range(3)]
        admin = rig.transport().admin()
        assert admin.committed(group, tps) == {}
        assert admin.commit(group, {tps[0]: 5, tps[2]: 0}) == ""
        assert admin.committed(group, tps) == {tps[0]: 5, tps[2]: 0}
        assert rig.transport().admin().committed(group, tps) == {tps[0]: 5, tps[2]: 0}
        assert admin.committed(f"other-{group}", tps) == {}
        admin.close()

    def test_a_group_that_nobody_uses_has_no_live_members(self, rig: Rig) -> None:
        assert rig.transport().admin().live_kafka_members(f"g-{uuid.uuid4().hex}") == 0

    def test_a_safe_coordination_topic_is_accepted(self, rig: Rig) -> None:
        assert rig.transport().admin().prepare_coordination(rig.topic(4), 16) == 4

    def test_one_request_gives_count_and_id(self, rig: Rig, topic: str) -> None:
        """F9.1, D10: both come from one answer; the id is "" if the broker has none."""
        admin = rig.transport().admin()
        found = admin.describe_topic(topic)
        assert found is not None
        assert found.partitions == 3
        assert (found.topic_id == "") == (rig.name == "embedded")
        assert admin.describe_topic(topic) == found
        assert admin.describe_topic(f"missing-{uuid.uuid4().hex}") is None


class TruncatePromises(Suite):
    """How a log and a source report that records were deleted."""

    CAPABILITY = "truncate"

    def test_a_log_that_does_not_begin_at_its_beginning(self, rig: Rig, topic: str, log: CoordinationLog) -> None:
        rig.produce(topic, 0, numbered(0, 10))
        rig.truncate(topic, 0, 4)
        until(lambda: log.bounds(0, DEADLINE_S) == Bounds(4, 10), "the log is cut")
        log.follow(0, 0)
        with pytest.raises(HistoryTruncated) as raised:
            read_log(log, 1)
        assert (raised.value.log, raised.value.first_offset) == (0, 4)

    def test_a_source_below_the_beginning(self, rig: Rig, topic: str, source: DataSource) -> None:
        tp = TopicPartition(topic, 0)
        rig.produce(topic, 0, numbered(0, 10))
        rig.truncate(topic, 0, 4)
        source.assign({tp: 1})
        assert SourcePromises._out_of_range(source) == [OutOfRange(tp, 1, source.round(tp))]
        source.assign({tp: 4})
        assert values(read_source(source, 6)[tp]) == numbered(4, 10)

    def test_out_of_range_names_where_it_was_and_not_where_it_began(
        self, rig: Rig, source: DataSource, topic: str
    ) -> None:
        """A partition that is cut while it is read: the lost range begins after what was read."""
        tp = TopicPartition(topic, 0)
        rig.produce(topic, 0, numbered(0, 5))
        source.assign({tp: 0})
        read_source(source, 5)
        source.pause([tp])
        rig.produce(topic, 0, numbered(5, 10))
        rig.truncate(topic, 0, 8)
        source.resume({tp: 5})
        assert SourcePromises._out_of_range(source) == [OutOfRange(tp, 5, source.round(tp))]


class GrowPromises(Suite):
    """Partitions that are added."""

    CAPABILITY = "grow"

    def test_growth_is_seen_and_the_new_partition_read(self, rig: Rig, topic: str, source: DataSource) -> None:
        admin = rig.transport().admin()
        assert admin.partition_count(topic) == 3
        rig.grow(topic, 5)
        until(lambda: admin.partition_count(topic) == 5, "growth is seen")
        rig.produce(topic, 4, [b"new"])
        source.learn_leaders([topic])
        tp = TopicPartition(topic, 4)
        source.assign({tp: 0})
        assert values(read_source(source, 1)[tp]) == [b"new"]


class DescribePromises(Suite):
    """The settings of the coordination topic."""

    CAPABILITY = "describe_config"

    @pytest.mark.parametrize(
        ("setting", "value", "wanted"),
        [
            ("cleanup.policy", "compact", "delete"),
            ("cleanup.policy", "compact,delete", "delete"),
            ("retention.ms", "86400000", "-1"),
            ("retention.bytes", "1000000", "-1"),
        ],
    )
    def test_a_wrong_setting_is_named(self, rig: Rig, topic: str, setting: str, value: str, wanted: str) -> None:
        rig.configure(topic, {"retention.ms": "-1", "retention.bytes": "-1", setting: value})
        with pytest.raises(WrongTopicSetting) as raised:
            rig.transport().admin().prepare_coordination(topic, 3)
        error = raised.value
        assert (error.topic, error.setting, error.value, error.wanted) == (topic, setting, value, wanted)
        assert f"{setting}={wanted}" in error.command

    def test_settings_are_described(self, rig: Rig, topic: str) -> None:
        rig.configure(topic, {"retention.ms": "-1"})
        assert rig.transport().admin().settings(topic)["retention.ms"] == "-1"

    def test_live_kafka_members_are_counted(self, rig: Rig, topic: str) -> None:
        """Groups are described by the same kind of request, which the embedded broker refuses."""
        group = f"g-{uuid.uuid4().hex}"
        admin = rig.transport().admin()
        leave = rig.join_kafka_group(group, topic)
        assert admin.live_kafka_members(group) == 1
        assert admin.commit(group, {TopicPartition(topic, 0): 1}) != ""
        leave()
        until(lambda: admin.live_kafka_members(group) == 0, "the group is empty")


class CreatePromises(Suite):
    """Creating the coordination topic, and a topic that was created again."""

    CAPABILITY = "create_topic"

    def test_it_is_created_with_settings_that_keep_history(self, rig: Rig) -> None:
        admin = rig.transport().admin()
        name = f"made-{uuid.uuid4().hex[:12]}"
        assert admin.prepare_coordination(name, 5) == 5
        settings = admin.settings(name)
        wanted = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
        assert {key: settings[key] for key in wanted} == wanted
        assert admin.prepare_coordination(name, 16) == 5, "an existing topic keeps its partitions"

    def test_a_recreated_topic_has_another_id(self, rig: Rig, topic: str) -> None:
        admin = rig.transport().admin()
        before = admin.describe_topic(topic)
        rig.recreate(topic, 5)
        after = until(lambda: admin.describe_topic(topic), "the topic is there again")
        assert before is not None
        assert after.topic_id not in (before.topic_id, "")
        assert after.partitions == 5


class LongLogPromises(Suite):
    """More than the embedded broker keeps."""

    CAPABILITY = "long_log"

    def test_six_megabytes_are_read_from_genesis(self, rig: Rig, topic: str, log: CoordinationLog) -> None:
        rig.produce(topic, 0, [bytes(1_000)] * 6_000)
        log.follow(0, 0)
        assert [r.offset for r in read_log(log, 6_000)] == list(range(6_000))


class LookupPromises(Suite):
    """Look-ups by time need the timestamps of records."""

    CAPABILITY = "time_lookup"

    def test_a_record_brings_its_timestamp(self, rig: Rig, topic: str, log: CoordinationLog) -> None:
        rig.produce(topic, 0, [b"x"])
        log.follow(0, 0)
        assert read_log(log, 1)[0].timestamp_ms == 1_000


class CannotCreatePromises(Suite):
    """The error for a client that may not create the coordination topic."""

    def refuses_with_the_command_that_fixes_it(self, transport: Transport, name: str) -> None:
        with pytest.raises(CoordinationTopicMissing) as raised:
            transport.admin().prepare_coordination(name, 16)
        assert raised.value.topic == name
        assert name in raised.value.command


BY_CAPABILITY = (TruncatePromises, GrowPromises, DescribePromises, CreatePromises, LongLogPromises, LookupPromises)
