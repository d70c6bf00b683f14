"""Consumers with topic patterns: topics that appear, that go, that never match, and where reading of them begins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from marshal_py import Consumer, aio
from marshal_py.client.driver import consumer_driver, loop
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.records import ClaimingPartition, Join, ReleasingPartition
from tests.support.client_fixtures import MemoryTestCluster, TestCluster, collect, joined, until

PATTERN = "orders-*"
A, B, C = "orders-a", "orders-b", "orders-c"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "METADATA_S", 0.1)


def make(cluster: TestCluster, topic: str, messages: int = 3, partitions: int = 1) -> None:
    cluster.create(topic, partitions)
    for partition in range(partitions):
        cluster.fill(topic, partition, messages)


def topics(consumer: Consumer) -> set[str]:
    return {tp.topic for tp in consumer.cached_info().claims}


def values(messages: list[Any]) -> list[tuple[str, bytes]]:
    return sorted((message.topic, message.value) for message in messages)


def all_of(*names: str, first: int = 0, end: int = 3) -> list[tuple[str, bytes]]:
    return [(name, b"%d" % number) for name in names for number in range(first, end)]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_topics_are_consumed_as_they_appear(cluster: TestCluster, delivery: str) -> None:
    """A13, D5: nothing matches at first, which is no error; what was produced before discovery is not lost."""
    group = cluster.group()
    options = {"delivery": delivery, "start": "latest"}
    cluster.create("other", 1)
    with cluster.connect() as marshal, joined(marshal, group, [PATTERN], **options) as consumer:
        assert consumer.cached_info().waiting_for == f"a topic that matches {PATTERN}; there is none yet"
        make(cluster, A)
        assert values(collect(consumer, 3)) == all_of(A)
        assert consumer.cached_info().waiting_for == ""
        token = next(iter(consumer.cached_info().claims.values())).token
        make(cluster, B)
        assert values(collect(consumer, 3)) == all_of(B)
        assert topics(consumer) == {A, B}
        assert token in {claim.token for claim in consumer.cached_info().claims.values()}, "A4: the first claim stayed"
        assert "topic_found" in {event.kind for event in consumer.events()}
    assert len(cluster.accepted(group, Join)) == 1


def test_members_take_over_a_topic_that_appears(memory: MemoryTestCluster) -> None:
    """A13: with different patterns, and by name; each partition has one owner."""
    make(memory, A, partitions=2)
    group = memory.group()
    with (
        memory.connect("c1") as one,
        memory.connect("c2") as two,
        joined(one, group, [PATTERN, "*funds"]) as wide,
        joined(two, group, ["orders-a*", "orders-b*"]) as narrow,
    ):
        until(lambda: len(wide.cached_info().claims) == len(narrow.cached_info().claims) == 1, "they share the first")
        make(memory, B, partitions=2)
        until(lambda: len(wide.cached_info().claims) == len(narrow.cached_info().claims) == 2, "they share the second")
        make(memory, C)
        until(lambda: C in topics(wide), "only one matches the third")
        assert C not in topics(narrow)
        assert topics(wide) | topics(narrow) == {A, B, C}
    assert {record.reason for record in memory.accepted(group, ReleasingPartition)} <= {"stopped", "hand-over"}


def test_what_never_matches(memory: MemoryTestCluster) -> None:
    """A13: internal topics, the coordination topic, and the topic for the consumer's own dead letters."""
    memory.broker.create_topic("log", 4)
    for name in ("__consumer_offsets", "__other", A, "orders-dead"):
        memory.create(name, 1)
    options: dict[str, Any] = {"max_deliver": 1, "dead_letter_topic": "orders-dead"}
    group = memory.group()
    with memory.connect(coordination_topic="log") as marshal, joined(marshal, group, ["*"], **options) as consumer:
        until(lambda: topics(consumer) >= {A}, "it has the topic that matches")
        memory.create(B, 1)
        until(lambda: topics(consumer) >= {A, B}, "it has the next one")
        assert topics(consumer) == {A, B}
        consumer.pause([(A, 0)])
        with pytest.raises(InvalidOption, match="orders-dead"):
            consumer.pause([("orders-dead", 0)])


def test_the_coordination_topic_is_refused_as_a_name(memory: MemoryTestCluster) -> None:
    """Its records came as messages."""
    memory.broker.create_topic("log", 4)
    rule = r"^topics='log' is not allowed: it is the Marshal's own coordination topic"
    with memory.connect(coordination_topic="log") as marshal:
        for join in (marshal.consumer, marshal.planner):
            with pytest.raises(InvalidOption, match=rule):
                join(memory.group(), [A, "log"])

    async def main() -> None:
        async with aio.connect(memory.target, coordination_topic="log") as marshal:
            with pytest.raises(InvalidOption, match=rule):
                await marshal.consumer(memory.group(), ["log"])

    asyncio.run(main())


def test_a_deleted_topic_leaves(memory: MemoryTestCluster) -> None:
    """A13: its partitions are released, the others stay; one that is created again may be read from its beginning."""
    for name in (A, B):
        make(memory, name)
    group = memory.group()
    with memory.connect() as marshal, joined(marshal, group, [PATTERN], on_topic_recreated="earliest") as consumer:
        assert values(collect(consumer, 6)) == all_of(A, B)
        memory.broker.delete_topic(B)
        until(lambda: topics(consumer) == {A}, "it is released")
        assert consumer.cached_info().waiting_for == ""
        assert consumer.cached_info().lag == 0
        assert [e.text for e in consumer.events() if e.kind == "topic_missing"] == [
            "it was deleted; its partitions are released"
        ]
        make(memory, B)
        assert values(collect(consumer, 3)) == all_of(B)
    assert "topic deleted" in {record.reason for record in memory.accepted(group, ReleasingPartition)}


def test_nothing_is_lost_that_comes_while_nobody_lives(memory: MemoryTestCluster) -> None:
    """D5: also with `start` "latest", a topic that appeared after the group began is read from its beginning."""
    make(memory, A)
    group = memory.group()
    with memory.connect("c1") as marshal, joined(marshal, group, [PATTERN], start="latest") as consumer:
        until(lambda: topics(consumer) == {A}, "it reads the first")
        assert [claim.position for claim in consumer.cached_info().claims.values()] == [3]
    make(memory, B, partitions=2)
    with memory.connect("c2") as marshal, joined(marshal, group, [PATTERN], start="latest") as consumer:
        assert values(collect(consumer, 6)) == sorted(all_of(B) * 2)


def test_a_group_that_waited_for_its_first_topic_begins_there(memory: MemoryTestCluster) -> None:
    """D5: its first member died before anything matched, and the next one begins at the beginning."""
    group = memory.group()
    with memory.connect("c1") as marshal, joined(marshal, group, [PATTERN], start="latest"):
        pass
    make(memory, A)
    with memory.connect("c2") as marshal, joined(marshal, group, [PATTERN], start="latest") as consumer:
        assert values(collect(consumer, 3)) == all_of(A)


def test_a_new_group_begins_where_its_start_says(memory: MemoryTestCluster) -> None:
    """D5: for the topics that matched when its first members joined."""
    for name in (A, B):
        make(memory, name)
    group = memory.group()
    with (
        memory.connect("c1") as one,
        memory.connect("c2") as two,
        joined(one, group, [PATTERN], start="latest") as first,
        joined(two, group, [PATTERN], start="latest") as second,
    ):
        until(lambda: len(first.cached_info().claims) == len(second.cached_info().claims) == 1, "they share the topics")
    assert {record.start for record in memory.accepted(group, ClaimingPartition)} <= {-1, 3}


def test_starts_as_offsets_name_topics_that_match(memory: MemoryTestCluster) -> None:
    make(memory, A)
    start = '{"orders-a": {"0": 1}}'
    with memory.connect() as marshal:
        with joined(marshal, memory.group(), [PATTERN], start=start) as consumer:
            assert values(collect(consumer, 2)) == all_of(A, first=1)
            make(memory, B)
            assert values(collect(consumer, 3)) == all_of(B)
        with pytest.raises(InvalidOption, match="refunds is none of the consumer's topics"):
            joined(marshal, memory.group(), [PATTERN], start='{"refunds": {"0": 1}}')


@pytest.mark.parametrize(
    ("pattern", "error", "says"),
    [
        ("^orders-.*", InvalidOption, r"topics='\^orders-\.\*' .* a pattern is a glob, such as orders-\*"),
        ("orders-[ab]*", InvalidOption, r"a pattern is a glob"),
        ("a" * 255 + "*", InvalidOption, "255"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_named(
    memory: MemoryTestCluster, pattern: str, error: type[Exception], says: str
) -> None:
    with memory.connect() as marshal, pytest.raises(error, match=says):
        marshal.consumer(memory.group(), [pattern])


def test_a_pattern_is_a_text(memory: MemoryTestCluster) -> None:
    with memory.connect() as marshal, pytest.raises(InvalidOption, match="pattern=5"):
        marshal.topics(5)  # type: ignore[arg-type]


def test_planners_take_names_alone(memory: MemoryTestCluster) -> None:
    with memory.connect() as marshal, pytest.raises(InvalidOption):
        marshal.planner(memory.group(), [PATTERN])


def test_more_topics_than_a_consumer_reads(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused when it joins; later it keeps what it has, and the log of the process says why."""
    monkeypatch.setattr(consumer_driver, "TOPICS_MAX", 2)
    for name in (B, C):
        make(memory, name)
    with memory.connect() as marshal, caplog.at_level("WARNING", "marshal_py"):
        with joined(marshal, memory.group(), [PATTERN]) as consumer:
            until(lambda: topics(consumer) == {B, C}, "both match")
            make(memory, A)
            until(lambda: any("match 3 topics" in record.message for record in caplog.records), "the log says why")
            assert values(collect(consumer, 6)) == all_of(B, C)
            assert topics(consumer) == {B, C}
        with pytest.raises(InvalidOption, match="match 3 topics, and a consumer reads at most 2"):
            joined(marshal, memory.group(), [PATTERN])


def test_with_asyncio(memory: MemoryTestCluster) -> None:
    """A13: the same on the other front."""
    make(memory, A)

    async def main() -> list[tuple[str, bytes]]:
        found = []
        async with (
            await aio.connect(memory.target) as marshal,
            await marshal.consumer(memory.group(), [PATTERN], start="latest", heartbeat_interval_s=1.0) as consumer,
        ):
            make(memory, B)
            async for message in consumer:
                found.append((message.topic, message.value))
                message.ack()
                if len(found) == 3:
                    return found
        raise AssertionError

    assert asyncio.run(asyncio.wait_for(main(), 30)) == all_of(B)
