"""A coordination log that cannot be trusted: every kind is a named error; garbage records are no error."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

import marshal_py
from marshal_py import Consumer
from marshal_py.client.driver import loop
from marshal_py.errors import (
    CoordinationTopicMissing,
    GroupDeleted,
    GroupOpaque,
    HistoryTruncated,
    LogGap,
    MarshalError,
    ProtocolUnknown,
    TopicRecreated,
    WrongTopicSetting,
)
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import route
from marshal_py.protocol.wire.records import Genesis, GroupConfig
from marshal_py.transport.memory import MemoryLog
from tests.support import wire
from tests.support.client_fixtures import (
    DEADLINE_S,
    LOG,
    LOGS,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    until,
)

IN = {number: next(f"g{i}" for i in range(100) if route(f"g{i}", LOGS) == number) for number in range(LOGS)}


def ends_with(consumer: Consumer, kind: type[MarshalError]) -> MarshalError:
    """The error that fetch raises. It is raised once; then the consumer is closed and gives it as the reason."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            consumer.fetch(10, min_messages=10, expires_s=0.05)
        except kind as error:
            with pytest.raises(marshal_py.CallerError, match="closed"):
                consumer.fetch()
            assert consumer.cached_info().closed
            consumer.stop()
            return error
        assert time.monotonic() < deadline, f"no {kind.__name__}"


def test_garbage_changes_nothing(cluster: TestCluster) -> None:
    topic = cluster.topic()
    group = IN[1]
    with cluster.connect() as marshal:
        incarnation = marshal.root.incarnation
        mine = wire.record(group, 3, 5, "x", incarnation=incarnation)
        garbage: list[bytes | None] = [
            b"",
            None,
            b"text",
            b"Mr",
            bytes(100),
            mine[:-1],
            mine + b"x",
            mine[:20] + b"\xff" + mine[21:],
            wire.record(group, 3, 0, "x"),
            wire.record(IN[0], 3, 0, "x", incarnation=incarnation),
            wire.envelope(group, 3, b"\xc1", incarnation=incarnation),
            wire.genesis(partitions=7),
        ]
        for value in garbage:
            cluster.put(LOG, 1, value)
        with joined(marshal, group, [topic]) as consumer:
            until(owns(consumer, 0), "the partition is ours")
            for value in garbage:
                cluster.put(LOG, 1, value)
            cluster.fill(topic, 0, 3)
            assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]
            consumer.flush()
            assert consumer.info().waiting_for == ""
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        cluster.fill(topic, 0, 1, first=3)
        assert places(collect(consumer, 1)) == [(0, 3)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_newer_record_makes_the_group_opaque_and_no_other(cluster: TestCluster, number: int) -> None:
    topic = cluster.topic()
    group, neighbour = IN[number], f"{IN[number]}-"
    while route(neighbour, LOGS) != number:
        neighbour += "-"
    with cluster.connect() as marshal:
        one, other = joined(marshal, group, [topic]), joined(marshal, neighbour, [topic])
        until(owns(one, 0), "the partition is ours")
        cluster.put(LOG, number, wire.record(group, 3, 0, incarnation=marshal.root.incarnation, record_version=3))
        error = ends_with(one, GroupOpaque)
        assert isinstance(error, GroupOpaque)
        assert error.group == group
        cluster.fill(topic, 0, 1)
        assert places(collect(other, 1)) == [(0, 0)]
        with pytest.raises(GroupOpaque):
            joined(marshal, group, [topic])


def test_a_newer_envelope_stops_the_log(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal:
        one, other = joined(marshal, IN[1], [topic]), joined(marshal, IN[0], [topic])
        body = wire.pack([3, 0])
        cluster.put(LOG, 1, wire.envelope("any", 3, body, incarnation=marshal.root.incarnation, version=2))
        error = ends_with(one, ProtocolUnknown)
        assert isinstance(error, ProtocolUnknown)
        assert (error.log, error.what, error.value) == (1, "envelope version", 2)
        cluster.fill(topic, 0, 1)
        assert places(collect(other, 1)) == [(0, 0)], "the other log goes on"
        with pytest.raises(ProtocolUnknown):
            joined(marshal, IN[1], [topic])


def test_a_newer_protocol_is_refused_at_connect(memory: MemoryTestCluster) -> None:
    memory.put(LOG, 0, wire.genesis(partitions=LOGS, protocol=9))
    with pytest.raises(ProtocolUnknown, match="protocol"):
        memory.connect()


def test_a_gap(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal:
        one, other = joined(marshal, IN[1], [topic]), joined(marshal, IN[0], [topic])
        memory.jump(1)
        error = ends_with(one, LogGap)
        assert isinstance(error, LogGap)
        assert error.found_offset == error.expected_offset + 1
        memory.fill(topic, 0, 1)
        assert places(collect(other, 1)) == [(0, 0)], "the other log goes on"


def test_a_coordination_topic_that_was_recreated(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal:
        consumers = [joined(marshal, group, [topic]) for group in IN.values()]
        with memory.broker.lock:
            memory.broker.delete_topic(LOG)
            memory.broker.create_topic(LOG, LOGS)
            memory.broker.changed.notify_all()
        for consumer in consumers:
            ends_with(consumer, TopicRecreated)
        with pytest.raises(TopicRecreated):
            joined(marshal, IN[0], [topic])


def test_a_loop_around_fetch_gets_the_error_that_came_between_two_fetches(memory: MemoryTestCluster) -> None:
    """A loop that asks whether the consumer stops would end without an error, and the process with 0."""
    topic = memory.topic()
    with memory.connect() as marshal:
        consumer = joined(marshal, "fetching", [topic])
        with memory.broker.lock:
            memory.broker.delete_topic(LOG)
            memory.broker.create_topic(LOG, LOGS)
            memory.broker.changed.notify_all()
        until(lambda: consumer.cached_info().closed, "the consumer has ended")
        assert not consumer._ending.stopping
        with pytest.raises(TopicRecreated):
            consumer.fetch(1, expires_s=0)
        assert consumer._ending.stopping


def test_a_coordination_topic_that_is_longer_than_the_one_before(memory: MemoryTestCluster) -> None:
    """The offsets still fit: only the topic's id shows it."""
    topic = memory.topic()
    with memory.connect() as marshal:
        consumer = joined(marshal, IN[1], [topic])
        with memory.broker.lock:
            records = memory.broker.topics[LOG]
            memory.broker.delete_topic(LOG)
            memory.broker.create_topic(LOG, LOGS)
            memory.broker.topics[LOG] = records
        marshal._loop._metadata_due = 0.0
        error = ends_with(consumer, TopicRecreated)
        assert "topic id" in str(error)


def test_a_coordination_topic_that_was_deleted(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal:
        consumer = joined(marshal, IN[1], [topic])
        memory.broker.delete_topic(LOG)
        ends_with(consumer, TopicRecreated)


def test_a_broker_that_does_not_know_the_coordination_topic_once(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L8: one that has just started may say so. Only a second look in a row ends the consumers."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        consumer = joined(marshal, IN[1], [topic])
        monkeypatch.setattr(marshal._loop, "_metadata_due", math.inf)
        until(lambda: not marshal._context.worker.busy, "the first look is over")
        describe_topic, answers = marshal._context.admin.describe_topic, iter([False, True, False, False])

        def described(name: str) -> Any:
            return None if name == LOG and not next(answers) else describe_topic(name)

        monkeypatch.setattr(marshal._context.admin, "describe_topic", described)
        assert [marshal._loop.check_topic() for _ in range(3)] == [False, True, False]
        assert len(collect(consumer, 1)) == 1
        assert not marshal._loop.check_topic()
        assert "found no topic" in str(ends_with(consumer, TopicRecreated))


def test_another_incarnation_in_front_of_a_reader_that_knows_one(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, IN[0], [topic]):
        with memory.broker.lock:
            memory.broker.delete_topic(LOG)
            memory.broker.create_topic(LOG, LOGS)
        with memory.connect() as later:
            assert later.root.incarnation != marshal.root.incarnation


def test_a_root_that_is_written_again_is_another_one(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: so a copy of one that an older topic of this name had does not begin another topic."""
    lost: list[bytes] = []
    append = MemoryLog.append

    def loses_the_first(self: MemoryLog, log: int, key: bytes, value: bytes) -> bool:
        if lost:
            return append(self, log, key, value)
        lost.append(value)
        return True

    monkeypatch.setattr(MemoryLog, "append", loses_the_first)
    monkeypatch.setattr(loop, "GENESIS_S", 0.05)
    with memory.connect() as marshal:
        opened = codec.open_envelope(lost[0], -1)
        assert opened is not None
        assert isinstance(opened[5], Genesis)
        assert opened[5].incarnation != marshal.root.incarnation


@pytest.mark.new_client
def test_truncated_history_at_the_start(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal, joined(marshal, IN[0], [topic]):
        pass
    cluster.truncate(LOG, 0, 2)
    with pytest.raises(HistoryTruncated) as raised:
        cluster.connect()
    assert (raised.value.log, raised.value.first_offset) == (0, 2)


@pytest.mark.new_client
def test_truncated_history_in_a_log_that_is_opened_later(cluster: TestCluster) -> None:
    """N10: without a snapshot; the other logs are not touched."""
    topic = cluster.topic()
    with cluster.connect() as marshal:
        joined(marshal, IN[1], [topic]).stop()
    cluster.truncate(LOG, 1, 2)
    with cluster.connect() as marshal:
        with pytest.raises(HistoryTruncated) as raised:
            joined(marshal, IN[1], [topic])
        assert raised.value.log == 1
        joined(marshal, IN[0], [topic]).stop()


def test_truncated_history_while_running(memory: MemoryTestCluster) -> None:
    """Records are deleted before they were read: the reader lags, and says so."""
    topic = memory.topic()
    with memory.connect() as marshal:
        consumer, other = joined(marshal, IN[1], [topic]), joined(marshal, IN[0], [topic])
        with memory.broker.lock:
            for _ in range(5):
                memory.put(LOG, 1, b"x")
            end = len(memory.broker.topics[LOG][1])
            memory.truncate(LOG, 1, end)
        error = ends_with(consumer, HistoryTruncated)
        assert isinstance(error, HistoryTruncated)
        assert error.first_offset == end
        memory.fill(topic, 0, 1)
        assert places(collect(other, 1)) == [(0, 0)], "the other log goes on"


def test_fewer_partitions_than_the_root_says(memory: MemoryTestCluster) -> None:
    memory.put(LOG, 0, wire.genesis(partitions=LOGS + 1))
    with pytest.raises(TopicRecreated, match="3 partitions"):
        memory.connect()


def test_surplus_partitions_are_ignored(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal:
        assert marshal.root.partitions == LOGS
    memory.broker.grow(LOG, LOGS + 3)
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, IN[1], [topic]) as consumer:
        assert marshal.root.partitions == LOGS
        assert len(collect(consumer, 1)) == 1


def test_a_group_that_is_deleted_while_it_runs_needs_its_sessions_gone_first(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    group = IN[1]
    with memory.connect() as marshal:
        delete = codec.encode(GroupConfig(-1, deleted=True), group, marshal.root.incarnation)
        with joined(marshal, group, [topic]) as consumer:
            memory.put(LOG, 1, delete)
            until(owns(consumer, 0), "nothing happened")
        memory.put(LOG, 1, delete)
        with pytest.raises(GroupDeleted) as raised:
            joined(marshal, group, [topic])
        assert raised.value.group == group


@pytest.mark.parametrize(("setting", "value"), [("cleanup.policy", "compact"), ("retention.ms", "604800000")])
def test_settings_that_would_lose_history_are_refused_at_connect(
    memory: MemoryTestCluster, setting: str, value: str
) -> None:
    memory.broker.settings[LOG][setting] = value
    with pytest.raises(WrongTopicSetting) as raised:
        memory.connect()
    assert (raised.value.setting, raised.value.value) == (setting, value)


def test_a_topic_that_may_not_be_created(memory: MemoryTestCluster) -> None:
    memory.broker.may_create = False
    with pytest.raises(CoordinationTopicMissing, match="not allowed"):
        memory.connect(coordination_topic="other")


@pytest.mark.new_client
def test_a_cut_log_on_a_broker_ends_a_consumer_that_lags(embedded: EmbeddedTestCluster) -> None:
    """The same as in memory, through librdkafka: a log that is followed from below its beginning."""
    topic = embedded.topic()
    with embedded.connect() as marshal:
        consumer = joined(marshal, IN[1], [topic])
        embedded.put(LOG, 1, b"x")
        consumer.info()
        end = marshal._context.coordination.bounds(1, DEADLINE_S).end
        embedded.truncate(LOG, 1, end)
        marshal._context.coordination.follow(1, 1)
        ends_with(consumer, HistoryTruncated)
