"""Topic.info and Topic.purge, over a cluster in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from marshal_py.errors import BadRequest, TopicMissing, TopicRefused
from marshal_py.topics.topic import Topic
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

T0 = 1_700_000_000_000
WHEN = datetime.fromtimestamp(T0 / 1000 + 3, UTC)


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic("orders", 2)
    for at in range(10):
        made.produce("orders", at % 2, b"%d" % at, None, None, T0 + 1000 * at)
    return made


@pytest.fixture
def topic(broker: MemoryBroker) -> Topic:
    return Topic(MemoryTransport(broker), "orders")


def test_info(topic: Topic) -> None:
    """ADR-37: `info()`"""
    found = topic.info()
    assert (found.name, found.partitions, found.offsets) == ("orders", {0: (0, 5), 1: (0, 5)}, 10)
    assert found.topic_id
    assert "cleanup.policy" in found.settings


@pytest.mark.parametrize(
    ("target", "begins"),
    [
        ({"before_offset": 3, "partition": 1}, {0: 0, 1: 3}),
        ({"before_offset": {0: 1, 1: 5}}, {0: 1, 1: 5}),
        ({"keep": 2}, {0: 3, 1: 3}),
        ({"keep": 0, "partition": 0}, {0: 5, 1: 0}),
        ({"keep": 99}, {0: 0, 1: 0}),
        ({"before_time": WHEN}, {0: 2, 1: 1}),
        ({"before_time": "2030-01-01T00:00:00Z"}, {0: 5, 1: 5}),
    ],
)
def test_the_beginning_goes(topic: Topic, target: dict[str, Any], begins: dict[int, int]) -> None:
    """ADR-37: `purge(purgeOpts)`. They provide a set of operations for managing the stream and its contents. The
    beginning goes by offset, by time, or up to the newest messages.
    """
    planned = topic.purge(**target, dry_run=True)
    assert topic.info().offsets == 10, "a dry run deletes nothing"
    assert topic.purge(**target) == planned
    assert {number: bounds.first for number, bounds in topic.info().partitions.items()} == begins
    assert topic.purge(**target).keys() == planned.keys(), "twice is once"


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"partition": 0},
        {"keep": 1, "before_time": WHEN},
        {"before_offset": 3},
        {"before_offset": {0: 1}, "partition": 0},
        {"before_offset": 6, "partition": 0},
        {"before_offset": -1, "partition": 0},
        {"before_offset": 0, "partition": 2},
        {"before_offset": 3.0},
        {"before_offset": True},
        {"before_offset": "3", "partition": 0},
        {"before_offset": {0: None}},
        {"before_offset": {0: 3.0}},
        {"partition": "0", "keep": 1},
        {"keep": -1},
        {"keep": 1.5},
        {"before_time": "soon"},
    ],
)
def test_wrong_targets_delete_nothing(topic: Topic, target: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        topic.purge(**target)
    assert topic.info().offsets == 10


def test_what_kafka_refuses(broker: MemoryBroker, topic: Topic) -> None:
    broker.may_delete = False
    with pytest.raises(TopicRefused, match=r"orders:0 .*cleanup.policy"):
        topic.purge(keep=1)


def test_a_topic_that_does_not_exist(broker: MemoryBroker) -> None:
    for call in (Topic.info, lambda missing: missing.purge(keep=1)):
        with pytest.raises(TopicMissing):
            call(Topic(MemoryTransport(broker), "nothing"))
