"""A topic with the messages of somebody else is refused as coordination topic, and stays as it is (PROTOCOL.md L1)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import marshal_py
from marshal_py.admin.logs import Logs
from marshal_py.admin.plans.operation import OperationRunner
from marshal_py.errors import ForeignTopic, HistoryTruncated, WrongTopicSetting
from marshal_py.log import replay
from marshal_py.log.observer import Observer
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import Bounds
from tests.support import wire
from tests.support.client_fixtures import LOG, MemoryTestCluster, TestCluster, joined

GARBAGE = b"Mr. Miller's order"


def no_way_in(cluster: TestCluster, topic: str) -> ForeignTopic:
    """The error with which everything refuses the topic as coordination topic."""
    with pytest.raises(ForeignTopic) as raised:
        cluster.connect(coordination_topic=topic)
    with cluster.connect() as marshal:
        transport = marshal.transport
        with pytest.raises(ForeignTopic):
            Observer(transport, topic)
        with pytest.raises(ForeignTopic):
            OperationRunner(transport, topic, "g", 5.0)
        with Logs(transport, topic) as logs, pytest.raises(ForeignTopic):
            logs.root()
    return raised.value


@pytest.mark.parametrize("partition", [0, 2])
def test_a_topic_with_messages_is_refused(cluster: TestCluster, partition: int) -> None:
    """L1: whatever its settings are."""
    topic = cluster.topic(3)
    cluster.fill(topic, partition, 5)
    assert str(no_way_in(cluster, topic)).startswith(
        f"topic '{topic}' is no coordination topic: {topic}:{partition} has messages"
    )
    with marshal_py.connect(cluster.target) as marshal, marshal.topic(topic) as data:
        assert data.info().offsets == 5


@pytest.mark.parametrize("deleted", [0, 3])
def test_a_long_topic_is_not_read_to_its_end(
    memory: MemoryTestCluster, deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: the first records decide, also if Kafka has deleted some."""
    monkeypatch.setattr(replay, "COLD_FOLD_RECORDS", 3)
    monkeypatch.setattr(replay, "SAMPLE_RECORDS", 2)
    topic = memory.topic()
    memory.fill(topic, 0, 8)
    memory.truncate(topic, 0, deleted)
    no_way_in(memory, topic)


def test_no_command_that_would_change_the_topic_is_named(memory: MemoryTestCluster) -> None:
    """L1: a topic without records may become a coordination topic, so its error does name it."""
    topic = memory.topic()
    memory.broker.settings[topic]["retention.ms"] = "604800000"
    with pytest.raises(WrongTopicSetting, match=r"retention\.ms=-1"):
        memory.connect(coordination_topic=topic)
    memory.fill(topic, 0, 1)
    with pytest.raises(ForeignTopic) as raised:
        memory.connect(coordination_topic=topic)
    assert "retention" not in str(raised.value)


@pytest.mark.parametrize("cold", [8_192, 1])
def test_garbage_in_front_of_a_log_is_no_reason(
    memory: MemoryTestCluster, cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1, E1: somebody wrote to the topic by mistake, before or after its first record."""
    monkeypatch.setattr(replay, "COLD_FOLD_RECORDS", cold)
    for value in (GARBAGE, b"", None, wire.genesis(partitions=len(memory.broker.topics[LOG])), GARBAGE):
        memory.put(LOG, 0, value)
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, "g", [topic]) as consumer:
        assert consumer.next(expires_s=30)
    with marshal_py.connect(memory.target) as marshal:
        assert marshal.groups() == ("g",)


@pytest.mark.parametrize("times", [1, replay.ATTEMPTS])
def test_records_that_are_deleted_while_they_are_read_are_no_reason(
    memory: MemoryTestCluster, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N12: clients delete what a snapshot replaces, also while another one connects. Each time the next ones decide."""
    with memory.connect() as marshal:
        for _ in range(times):
            memory.put(LOG, 0, GARBAGE)
        memory.put(LOG, 0, wire.genesis(partitions=len(memory.broker.topics[LOG])))
        admin, log = marshal.transport.admin(), marshal.transport.log(LOG, "c", writes=False)
        ask, asked = admin.bounds, list[int]()

        def bounds(tps: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
            found = ask(tps)
            asked.append(len(asked))
            if len(asked) <= times:
                memory.truncate(LOG, 0, len(asked))
            return found

        monkeypatch.setattr(admin, "bounds", bounds)
        if times < replay.ATTEMPTS:
            replay.refuse_foreign(admin, log, LOG)
        else:  # nobody deletes so often
            with pytest.raises(HistoryTruncated):
                replay.refuse_foreign(admin, log, LOG)
        assert len(asked) == min(times + 1, replay.ATTEMPTS)
