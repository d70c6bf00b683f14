"""A partition that cannot be consumed is parked, and only that one; the others continue (D6, F6.4)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

import marshal_py
from marshal_py import Consumer, TopicPartition
from marshal_py.admin.views import overview
from marshal_py.errors import PartitionError
from marshal_py.protocol.wire.records import ReleasingPartition
from marshal_py.transport.memory import MemorySource
from tests.support.client_fixtures import (
    BackgroundConsumer,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    places,
    until,
)

PARTITIONS, CONSUMERS, MESSAGES, POSITION = 6, 3, 5, 50
BEYOND, TRUNCATED = "PositionBeyondEnd", "PartitionTruncated"


def alarms(consumer: Consumer, kept: list[marshal_py.Advisory]) -> list[marshal_py.Advisory]:
    kept += [event for event in consumer.events() if event.kind == "parked"]
    return kept


def test_one_partition_beyond_its_end_does_not_stop_the_others(cluster: TestCluster) -> None:
    """D6, F6.4: each consumer in turn claimed it, raised an error, ended and left it to the next one."""
    topic, group = cluster.topic(PARTITIONS), cluster.group()
    for partition in range(PARTITIONS):
        cluster.fill(topic, partition, MESSAGES)
    stuck = TopicPartition(topic, 0)
    events: list[marshal_py.Advisory] = []
    with ExitStack() as stack:
        marshals = [stack.enter_context(cluster.connect(f"c{number}")) for number in range(CONSUMERS)]
        starts = {TopicPartition(topic, number): 0 for number in range(1, PARTITIONS)} | {stuck: POSITION}
        assert marshals[0]._context.admin.commit(group, starts) == ""
        consumers = [stack.enter_context(joined(marshal, group, [topic], start="committed")) for marshal in marshals]
        backgrounds = [stack.enter_context(BackgroundConsumer(consumer)) for consumer in consumers]

        def seen() -> set[tuple[int, int]]:
            return {place for background in backgrounds for place in places(background.seen)}

        def fetched(until_offset: int) -> bool:
            return seen() == {(p, offset) for p in range(1, PARTITIONS) for offset in range(until_offset)}

        until(lambda: any(alarms(consumer, events) for consumer in consumers), "it is reported")
        until(lambda: fetched(MESSAGES), "the others go on")
        (reported,) = events
        assert (reported.partition, reported.offset) == (0, POSITION)
        assert reported.text.startswith(f"{BEYOND}: ")
        assert f"position {POSITION}, end {MESSAGES}" in reported.text
        assert f"marshal set-position {group} {topic}:0 --to latest" in reported.text

        def counted() -> set[int]:
            return {one.parked for marshal in marshals for one in marshal.metrics().consumers}

        until(lambda: counted() == {1}, "all know it")
        until(
            lambda: sum(len(consumer.cached_info().claims) for consumer in consumers) == PARTITIONS - 1,
            "the rest has owners",
        )

        for partition in range(PARTITIONS):
            cluster.fill(topic, partition, 2 * POSITION, first=MESSAGES)
        until(lambda: fetched(MESSAGES + 2 * POSITION), "it does not come back by growing past its position")
        assert [background.error for background in backgrounds] == [None] * CONSUMERS

        marshals[0].group(group).set_position(f"{topic}:0", MESSAGES)
        wanted = {(0, offset) for offset in range(MESSAGES, MESSAGES + 2 * POSITION)}
        until(lambda: wanted <= seen(), "set-position goes on")
        assert (0, 0) not in seen()
        assert [background.error for background in backgrounds] == [None] * CONSUMERS
        until(lambda: counted() == {0}, "all know that, too")
    (release,) = [record for record in cluster.accepted(group, ReleasingPartition) if record.parked]
    assert (release.parked, release.reason) == (BEYOND, f"position {POSITION}, end {MESSAGES}")


def test_partitions_that_are_parked_together_are_one_warning(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has its own event; a log that people read needs one line, with the partitions as ranges."""
    topic, group = memory.topic(PARTITIONS), memory.group()
    with memory.connect("c") as marshal:
        starts = {TopicPartition(topic, number): POSITION for number in range(PARTITIONS)}
        marshal._context.admin.commit(group, starts)
        events: list[marshal_py.Advisory] = []
        with joined(marshal, group, [topic], start="committed") as consumer, BackgroundConsumer(consumer):
            until(lambda: len(alarms(consumer, events)) == PARTITIONS, "all are parked")
    lines = [record for record in caplog.records if getattr(record, "marshal_kind", "") == "parked"]
    assert sorted(one for line in lines for one in vars(line)["marshal_partitions"]) == list(range(PARTITIONS))
    (line,) = lines
    shown = f"group {group}: parked {PARTITIONS} partitions of {topic}: 0-{PARTITIONS - 1} (c), for example {topic}:"
    assert line.getMessage().startswith(shown)


def test_a_consumer_with_only_parked_partitions_says_so(memory: MemoryTestCluster) -> None:
    """The lag is not 0, and there is a reason. Nothing is raised, since the next consumer would find the same."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, MESSAGES)
    with memory.connect("c") as marshal:
        marshal._context.admin.commit(group, {TopicPartition(topic, 0): POSITION})
        with joined(marshal, group, [topic], start="committed") as consumer, BackgroundConsumer(consumer) as background:
            waiting_for = until(lambda: consumer.cached_info().waiting_for, "it says why it has nothing to do")
            assert waiting_for.startswith(f"an admin: all of its 1 partitions are parked: {BEYOND}")
            assert consumer.cached_info().lag == -1
            assert background.error is None
        state = marshal._loop.worlds[consumer._driver.log].groups[group]
        ends = {TopicPartition(topic, 0): MESSAGES}
        (row,) = overview.state(state, 0, {}, ends, 0.0).partitions
        assert (row.parked, row.position, row.end, row.lag) == (BEYOND, POSITION, MESSAGES, None)
        (one,) = overview.stopped(state, {}, ends)
        assert f"position {POSITION}, end {MESSAGES}" in one.advice


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_partition_that_lost_what_was_read_is_parked(memory: MemoryTestCluster, delivery: str) -> None:
    """D6: as the broker says it (KIP-320); tests/kafka/test_lost_tail.py has a broker that does."""
    topic, group = memory.topic(2), memory.group()
    for partition in (0, 1):
        memory.fill(topic, partition, MESSAGES)
    events: list[marshal_py.Advisory] = []
    with memory.connect("c") as marshal, joined(marshal, group, [topic], delivery=delivery) as consumer:
        collect(consumer, 2 * MESSAGES)
        with BackgroundConsumer(consumer) as background:
            driver = consumer._driver
            assert isinstance(driver.source, MemorySource)
            with memory.broker.lock:
                driver.source._assignments.refuse(TopicPartition(topic, 0), MESSAGES, "truncation detected", 0)
            until(lambda: alarms(consumer, events), "it is parked")
            assert events[0].text.startswith(f"{TRUNCATED}: ")
            assert "(truncation detected)" in events[0].text
            for partition in (0, 1):
                memory.fill(topic, partition, 2, first=MESSAGES)
            until(lambda: len(background.seen) == 2, "the other partition goes on")
            assert places(background.seen) == [(1, MESSAGES), (1, MESSAGES + 1)]
            marshal.group(group).set_position(f"{topic}:0", MESSAGES + 1)
            until(lambda: (0, MESSAGES + 1) in places(background.seen), "set-position goes on")
            assert background.error is None
    (release,) = [record for record in memory.accepted(group, ReleasingPartition) if record.parked]
    assert (release.parked, release.reason) == (TRUNCATED, "truncation detected")


def refuse(consumer: Consumer, tp: TopicPartition) -> None:
    """What a source reports about a topic that this client may not read."""
    source = consumer._driver.source
    assert isinstance(source, MemorySource)
    until(lambda: source.fetching(tp), "it is assigned")
    with consumer._context.lock, source.broker.changed:
        source._assignments.take(0)  # as a poll does
        source._assignments.refuse_permanently(tp, "Topic authorization failed")
        consumer._member.request_tick()


def test_a_refused_partition_stops_no_consumer_and_one_that_may_read_nothing_gets_an_error(
    memory: MemoryTestCluster,
) -> None:
    """D13: parked where nobody is left who could read it; raised by name where nothing else is left to deliver."""
    topic, other, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(other, 0, 1)
    events: list[marshal_py.Advisory] = []
    with memory.connect("c") as marshal, joined(marshal, group, [topic, other]) as consumer:
        collect(consumer, 1)
        until(lambda: len(consumer.cached_info().claims) == 2, "both are its own")
        with BackgroundConsumer(consumer) as background:
            for _ in range(2):
                until(lambda: TopicPartition(topic, 0) in consumer.cached_info().claims, "it is tried, and once more")
                refuse(consumer, TopicPartition(topic, 0))
                until(lambda: TopicPartition(topic, 0) not in consumer.cached_info().claims, "it is given back")
            until(lambda: alarms(consumer, events), "it is parked")
            assert events[0].text.startswith("PartitionUnreadable: ")
            assert "(Topic authorization failed)" in events[0].text
            memory.fill(other, 0, 3, first=1)
            until(lambda: len(background.seen) == 3, "the other one goes on")
            assert background.error is None
            state = marshal._loop.worlds[consumer._driver.log].groups[group]
            rows = overview.state(state, 0, {}, {TopicPartition(topic, 0): 7}, 0.0).partitions
            assert {row.lag for row in rows if row.topic == topic} == {7}, "the position is as good as ever"
            refuse(consumer, TopicPartition(other, 0))
            until(lambda: background.error, "nothing is left")
            assert isinstance(background.error, PartitionError)
            assert f"{other}:0 cannot be used: Topic authorization failed" in str(background.error)
        assert not consumer.cached_info().closed, "an admin may grant the right, and set the position"
        moved = marshal.group(group)
        moved.set_position(topic, "earliest")
        memory.fill(topic, 0, 2)
        assert len(collect(consumer, 2)) == 2
