"""Creating, changing and deleting topics, over a cluster in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import marshal_py
from marshal_py.errors import AccessDenied, AlreadyExists, BadRequest, InvalidOption, TopicMissing, TopicRefused
from marshal_py.transport.memory import MemoryAdmin, MemoryBroker, MemoryTransport


@pytest.fixture
def marshal() -> Iterator[marshal_py.Marshal]:
    with marshal_py.connect(MemoryTransport(MemoryBroker())) as made:
        yield made


def test_a_topic_from_its_creation_to_its_end(marshal: marshal_py.Marshal) -> None:
    """ADR-37: It serves as the entry point for creating, configuring, and controlling the streams.

    `addStream(streamConfig)`, `updateStream(streamConfig)`, `getStream(streamName)`, `deleteStream(streamName)`,
    `listStreams()`.
    """
    topic = marshal.create_topic("orders", partitions=2, settings={"retention.ms": "60000"})
    assert (marshal.topics(), len(topic.info().partitions)) == (("orders",), 2)
    assert topic.info().settings["retention.ms"] == "60000"
    marshal.update_topic("orders", partitions=3, settings={"retention.ms": None, "max.message.bytes": "9"})
    assert len(topic.info().partitions) == 3
    assert "retention.ms" not in topic.info().settings
    marshal.update_topic("orders", partitions=3)  # what it has already
    marshal.delete_topic("orders")
    assert marshal.topics() == ()


def test_a_dry_run_changes_nothing(marshal: marshal_py.Marshal) -> None:
    marshal.create_topic("orders", dry_run=True)
    assert marshal.topics() == ()
    marshal.create_topic("orders")
    marshal.update_topic("orders", partitions=5, settings={"retention.ms": "1"}, dry_run=True)
    found = marshal.topic("orders").info()
    assert (len(found.partitions), found.settings["retention.ms"]) == (1, "-1")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: m.create_topic("orders"), AlreadyExists),
        (lambda m: m.create_topic("new", replication=9), TopicRefused),
        (lambda m: m.create_topic("new", partitions=0), BadRequest),
        (lambda m: m.create_topic("new", replication=0), BadRequest),
        (lambda m: m.create_topic("new", settings={"retention.ms": 5}), BadRequest),
        (lambda m: m.create_topic("a b"), InvalidOption),
        (lambda m: m.create_topic("."), InvalidOption),
        (lambda m: m.create_topic(".."), InvalidOption),
        (lambda m: m.create_topic("__marshal"), InvalidOption),
        (lambda m: m.delete_topic("__consumer_offsets"), InvalidOption),
        (lambda m: m.update_topic("orders"), BadRequest),
        (lambda m: m.update_topic("orders", partitions=1), BadRequest),
        (lambda m: m.update_topic("new", partitions=2), TopicMissing),
        (lambda m: m.delete_topic("new"), TopicMissing),
    ],
)
def test_wrong_changes(marshal: marshal_py.Marshal, call: Callable[[Any], Any], error: type[Exception]) -> None:
    marshal.create_topic("orders", partitions=2)
    with pytest.raises(error):
        call(marshal)
    assert marshal.topics() == ("orders",)


def test_a_topic_that_may_not_grow_keeps_its_settings(
    marshal: marshal_py.Marshal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right to add partitions is another one than that to change settings."""
    marshal.create_topic("orders", settings={"retention.ms": "60000"})

    def refuse(self: MemoryAdmin, name: str, partitions: int, dry_run: bool) -> None:
        raise AccessDenied("User:alice", "Alter", "topic", name)

    monkeypatch.setattr(MemoryAdmin, "grow", refuse)
    with pytest.raises(AccessDenied):
        marshal.update_topic("orders", partitions=2, settings={"retention.ms": "1"})
    assert marshal.topic("orders").info().settings["retention.ms"] == "60000"


@pytest.mark.parametrize("name", ["__marshal", "__consumer_offsets", "__transaction_state"])
def test_topics_of_the_library_and_of_kafka_stay_as_they_are(marshal: marshal_py.Marshal, name: str) -> None:
    """One rule for every way to change a topic; reading them is allowed."""
    topic = marshal.topic(name)
    for change in (
        lambda: topic.purge(keep=0),
        lambda: topic.purge(keep=0, dry_run=True),
        lambda: marshal.create_topic(name),
        lambda: marshal.update_topic(name, partitions=99),
        lambda: marshal.delete_topic(name),
    ):
        with pytest.raises(InvalidOption, match="belongs to the library or to Kafka"):
            change()
    assert marshal.topic("__marshal").info().offsets > 0
