"""Topic.delete_key: tombstones, where they go, and topics that cannot have any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marshal_py.embedded import Broker
from marshal_py.errors import BadRequest, InvalidOption, MessageNotFound, TopicMissing
from marshal_py.topics.keys import PARTITIONERS
from marshal_py.topics.topic import Topic
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

NAME = "users"
T0 = 1_700_000_000_000


@pytest.fixture
def broker() -> MemoryBroker:
    """A compacted topic of four partitions. The topic has grown: key k is in two of them."""
    made = MemoryBroker()
    made.create_topic(NAME, 4)
    made.settings[NAME]["cleanup.policy"] = "compact,delete"
    for at, (partition, key) in enumerate([(0, b"k"), (3, b"k"), (1, b"other"), (2, b"deleted")]):
        made.produce(NAME, partition, b"v", key, None, T0 + at)
    made.produce(NAME, 2, None, b"deleted", None, T0 + 9)
    return made


def topic_of(broker: MemoryBroker, **options: Any) -> Topic:
    return Topic(MemoryTransport(broker), NAME, **options)


@pytest.mark.parametrize("with_index", [False, True])
def test_the_tombstone_goes_to_every_partition_that_has_the_key(
    broker: MemoryBroker, tmp_path: Path, with_index: bool
) -> None:
    """ADR-37: `deleteMsg(deleteMsgOpts)`. With streams, you can perform operations such as purging the entire stream
    and fetching/deleting individual messages.

    Otherwise an older value would come back, in the partition that has no tombstone.
    """
    topic = topic_of(broker)
    if with_index:
        topic.key_index(tmp_path / "keys.db")
    assert topic.delete_key("k") == {0: 1, 3: 1}
    with pytest.raises(MessageNotFound) as caught:
        topic["k"]
    assert caught.value.tombstone
    assert topic.get(last_by_key="k", tombstones=True).value is None
    assert topic["other"].value == b"v"
    for gone in ("k", "deleted", "never"):
        with pytest.raises(MessageNotFound):
            topic.delete_key(gone)
    topic.close()


def test_a_key_that_is_unknown_is_not_deleted() -> None:
    """However many partitions the topic has; whoever names the partition has chosen where the tombstone goes."""
    made = MemoryBroker()
    made.create_topic(NAME, 1)
    made.settings[NAME]["cleanup.policy"] = "compact"
    with pytest.raises(MessageNotFound):
        topic_of(made).delete_key("typo")
    assert made.topics[NAME] == [[]]
    assert topic_of(made).delete_key("typo", partition=0) == {0: 0}


@pytest.mark.parametrize("partitioner", ["murmur2_random", "consistent_random"])
def test_the_producers_partitioner_chooses_the_partition(broker: MemoryBroker, partitioner: str) -> None:
    """The topic is not read."""
    choose = PARTITIONERS[partitioner]
    assert choose is not None
    assert list(topic_of(broker, partitioner=partitioner).delete_key(b"a.*")) == [choose(b"a.*", 4)]


def test_a_partition_may_be_named(broker: MemoryBroker) -> None:
    topic = topic_of(broker)
    assert topic.delete_key("k", partition=0) == {0: 1}
    assert topic.get(offset=0, partition=3).value == b"v"
    for wrong in (4, -1, "0"):
        with pytest.raises(BadRequest):
            topic.delete_key("k", partition=wrong)  # type: ignore[arg-type]


def test_a_topic_that_is_not_compacted(broker: MemoryBroker) -> None:
    """The error says so, and nothing is written: a tombstone would be one more message."""
    broker.settings[NAME]["cleanup.policy"] = "delete"
    with pytest.raises(BadRequest, match=r"cleanup\.policy=delete"):
        topic_of(broker).delete_key("k")
    assert topic_of(broker)["k"].value == b"v"


@pytest.mark.parametrize("key", ["", "a.*", "a.>", 5, None])
def test_keys_that_are_none(broker: MemoryBroker, key: Any) -> None:
    with pytest.raises(BadRequest):
        topic_of(broker).delete_key(key)


def test_topics_that_cannot_be_changed(broker: MemoryBroker) -> None:
    with pytest.raises(InvalidOption):
        topic_of(broker, coordination_topic=NAME).delete_key("k")
    with pytest.raises(TopicMissing):
        Topic(MemoryTransport(broker), "nothing").delete_key("k")


def test_on_the_embedded_broker() -> None:
    """It compacts nothing and does not describe its topics; readers see the tombstone all the same."""
    with Broker(topics={NAME: 2}) as broker:
        transport = KafkaTransport(broker.bootstrap_servers, 30)
        writer = transport.writer()
        writer.write(NAME, b"v", b"k", partition=1)
        writer.flush(30)
        writer.close()
        topic = Topic(transport, NAME)
        assert topic.delete_key("k") == {1: 1}
        with pytest.raises(MessageNotFound, match="a tombstone deletes it"):
            topic["k"]
        topic.close()
