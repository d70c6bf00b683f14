"""Data topics have an identity: one that is deleted and recreated, or is gone, as a consumer meets it (D10, F9.10).

In memory, where topics can be deleted; tests/kafka/test_recreated.py has the same on Apache Kafka.
"""

from __future__ import annotations

import pytest

import marshal_py
from marshal_py import Consumer, TopicPartition
from marshal_py.client.driver import loop
from marshal_py.client.values.position_text import Begin
from marshal_py.errors import ClusterUnreachable, InvalidOption
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import Wanted
from marshal_py.protocol.wire.records import GroupConfig, ReleasingPartition, Topology
from marshal_py.transport.memory import MemorySource
from marshal_py.transport.ports import OutOfRange
from tests.support.client_fixtures import BackgroundConsumer, MemoryTestCluster, collect, joined, until

REASON = "DataTopicRecreated"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "METADATA_S", 0.1)


def make_anew(memory: MemoryTestCluster, topic: str, partitions: int, messages: int, word: str = "new") -> None:
    """Another topic of the same name, with messages of its own in every partition."""
    with memory.broker.lock:  # at once: nobody sees it gone
        memory.broker.delete_topic(topic)
        memory.broker.create_topic(topic, partitions)
    for partition in range(partitions):
        for number in range(messages):
            memory.put(topic, partition, b"%s %d" % (word.encode(), number))


def reported(consumer: Consumer, kept: list[marshal_py.Advisory]) -> list[str]:
    kept += consumer.events()
    return [event.kind for event in kept]


@pytest.mark.parametrize("messages", [2, 50], ids=["fewer", "more"])
def test_a_running_consumer_parks_it_and_continues_with_the_rest(memory: MemoryTestCluster, messages: int) -> None:
    """D10, F6.4: also where the position lies beyond the new end: the check of that finds the new topic."""
    topic, other, group = memory.topic(2), memory.topic(), memory.group()
    for partition in (0, 1):
        memory.fill(topic, partition, 10)
    events: list[marshal_py.Advisory] = []
    with memory.connect("c") as marshal, joined(marshal, group, [topic, other]) as consumer:
        first = collect(consumer, 20)
        consumer.flush()
        with BackgroundConsumer(consumer) as background:
            make_anew(memory, topic, 2, messages)
            until(lambda: reported(consumer, events).count("parked") == 2, "both are parked")
            noticed = len(background.seen)
            memory.fill(topic, 0, 5)
            memory.fill(other, 0, 3)
            until(lambda: sum(m.topic == other for m in background.seen) == 3, "the other topic goes on")
            assert background.error is None
            assert all(m.topic == other for m in background.seen[noticed:])
            assert marshal.metrics().consumers[0].parked == 2
            assert consumer.cached_info().waiting_for == "", "it has other work"
            parked = [event for event in events if event.kind == "parked"]
            assert all(event.text.startswith(REASON) for event in parked)
            assert f"marshal set-position {group} {topic} --to earliest" in parked[0].text
            info = marshal.group(group).info()
            rows = {(row.topic, row.partition): row for row in info.positions}
            assert [rows[topic, number].parked for number in (0, 1)] == [REASON, REASON]
            assert rows[other, 0].parked is None

            moved = marshal.group(group).set_position(topic, "earliest")
            assert [one.topic for one in moved.recreated] == [topic]
            wanted = {(p, b"new %d" % n) for p in (0, 1) for n in range(messages)}
            until(
                lambda: wanted <= {(m.partition, m.value) for m in background.seen[noticed:] if m.topic == topic},
                "every message of the new topic",
            )
            [anew] = moved.recreated
            assert {m.topic_id for m in first} == {anew.known}
            assert {m.topic_id for m in background.seen[noticed:] if m.topic == topic} == {anew.found}
            assert "topology" in reported(consumer, events)
            assert marshal.metrics().consumers[0].parked == 0
    releases = [record for record in memory.accepted(group, ReleasingPartition) if record.parked]
    assert [record.parked for record in releases] == [REASON, REASON]
    assert any("recreated" in event.text for event in events if event.kind == "topology")


@pytest.mark.parametrize("partitions", [1, 2, 3], ids=["fewer", "equal", "more"])
def test_a_consumer_that_starts_parks_it_before_it_delivers_anything(
    memory: MemoryTestCluster, partitions: int
) -> None:
    topic, group = memory.topic(2), memory.group()
    for partition in (0, 1):
        memory.fill(topic, partition, 10)
    with memory.connect("a") as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 20)
    make_anew(memory, topic, partitions, 40)
    events: list[marshal_py.Advisory] = []
    told: list[tuple[str, int]] = []
    with (
        memory.connect("b") as marshal,
        joined(
            marshal,
            group,
            [topic],
            on_claim=lambda info: told.append(("claim", info.partition)),
            on_lost=lambda info, reason: told.append(("lost", info.partition)),
        ) as consumer,
        BackgroundConsumer(consumer) as background,
    ):
        until(lambda: reported(consumer, events).count("parked") == 2, "both are parked")
        waiting_for = until(lambda: consumer.cached_info().waiting_for, "it says why it has nothing to do")
        assert REASON in waiting_for
        assert f"marshal set-position {group} {topic} --to earliest" in waiting_for
        assert background.seen == []
        marshal.group(group).set_position(topic, "earliest")
        until(lambda: len(background.seen) >= 40 * partitions, "every message of the new topic")
        assert len(background.seen) == 40 * partitions
        assert until(lambda: told, "it is told")[0][0] == "claim", "no claim is lost of which the user did not know"
        assert {m.value for m in background.seen} == {b"new %d" % number for number in range(40)}
        assert consumer.cached_info().waiting_for == ""
    made = memory.accepted(group, Topology)[-1]
    assert (made.partitions, made.topic_id) == (partitions, str(memory.broker.ids[topic]))


@pytest.mark.parametrize(
    ("config", "option", "goes_on"), [(None, "earliest", True), ("earliest", "fail", True), ("fail", "earliest", False)]
)
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_group_may_want_it_done_by_itself(
    memory: MemoryTestCluster, config: str | None, option: str, goes_on: bool, partitions: int
) -> None:
    """D10: the consumer's option counts only where the group's config is silent."""
    topic, group = memory.topic(2), memory.group()
    for partition in (0, 1):
        memory.fill(topic, partition, 10)
    events: list[marshal_py.Advisory] = []
    with memory.connect("a") as marshal, joined(marshal, group, [topic], on_topic_recreated=option) as consumer:
        if config is not None:
            marshal.group(group).set_config(on_topic_recreated=config)
        collect(consumer, 20)
        consumer.flush()
        with BackgroundConsumer(consumer) as background:
            make_anew(memory, topic, partitions, 30)
            if goes_on:
                wanted = {(p, b"new %d" % n) for p in range(partitions) for n in range(30)}
                until(lambda: wanted <= {(m.partition, m.value) for m in background.seen}, "all of the new topic")
            else:
                until(lambda: reported(consumer, events).count("parked") == 2, "both are parked")
                until(lambda: REASON in consumer.cached_info().waiting_for, "it waits")
            assert background.error is None


def test_set_config_leaves_what_is_not_named(memory: MemoryTestCluster) -> None:
    """M13."""
    topic, group = memory.topic(), memory.group()
    with memory.connect("a") as marshal, joined(marshal, group, [topic]):
        admin = marshal.group(group)
        admin.set_config(on_topic_recreated="earliest")
        admin.set_config(policy="greedy")
        assert (admin.info().policy, admin.info().on_topic_recreated) == ("greedy", "earliest")
        with pytest.raises(InvalidOption, match="fail, earliest"):
            admin.set_config(on_topic_recreated="latest")
    assert memory.accepted(group, GroupConfig)[-1].on_topic_recreated == "earliest"


def test_the_option_is_checked(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, pytest.raises(InvalidOption, match="on_topic_recreated='latest'"):
        joined(marshal, memory.group(), [topic], on_topic_recreated="latest")


def test_a_topic_that_is_deleted_while_it_is_consumed(memory: MemoryTestCluster) -> None:
    """There is an event, `waiting_for`, and no known lag. When the topic is back with another id, it is parked."""
    topic, other, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 5)
    events: list[marshal_py.Advisory] = []
    with memory.connect() as marshal, joined(marshal, group, [topic, other]) as consumer:
        collect(consumer, 5)
        with BackgroundConsumer(consumer) as background:
            memory.broker.delete_topic(topic)
            until(lambda: "topic_missing" in reported(consumer, events), "it is reported")
            info = consumer.cached_info()
            assert topic in info.waiting_for
            assert (info.lag, info.claims[TopicPartition(topic, 0)].lag) == (-1, -1)
            figures = {one.topic: (one.end, one.lag) for one in marshal.metrics().consumers[0].partitions}
            assert figures[topic] == (-1, -1)
            memory.fill(other, 0, 3)
            until(lambda: sum(m.topic == other for m in background.seen) == 3, "the other topic goes on")
            assert reported(consumer, events).count("topic_missing") == 1
            memory.broker.create_topic(topic, 1)
            until(lambda: {"topic_found", "parked"} <= set(reported(consumer, events)), "it is parked when it is back")
            assert background.error is None
            assert consumer.cached_info().waiting_for == "", "the other topic is work enough"


def test_a_client_that_could_not_be_replaced_is_replaced_at_the_next_look(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: the old client of librdkafka might never fetch the new topic."""
    topic, group, asked = memory.topic(), memory.group(), []
    memory.fill(topic, 0, 5)
    learn = MemorySource.learn_leaders

    def fail_once(source: MemorySource, topics: list[str], anew: bool = False) -> None:
        asked.append(anew)
        if asked.count(True) == 1:
            raise ClusterUnreachable("memory", "another client", "no token")
        learn(source, topics, anew)

    with memory.connect("c") as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 5)
        monkeypatch.setattr(MemorySource, "learn_leaders", fail_once)
        make_anew(memory, topic, 1, 2)
        until(lambda: asked.count(True) == 2, "it tries again")


def test_a_refusal_of_the_old_topics_position_that_comes_late(memory: MemoryTestCluster) -> None:
    """D6, D10: the partition is fetched from the new topic by then; a refusal for the old one is no error."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 3)
        tp = TopicPartition(topic, 0)
        with marshal._context.lock:
            consumer._driver.refused_positions[tp] = OutOfRange(tp, 100, consumer._driver.source.round(tp) - 1)
        consumer._driver.submit("a late refusal", consumer._driver._check_refused)
        memory.fill(topic, 0, 2)
        collect(consumer, 2)
        until(lambda: not consumer._driver.refused_positions, "the refusal is looked at")


@pytest.mark.parametrize("again", [True, False])
def test_a_start_that_comes_after_the_log_has_another_id_is_not_used(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """D5, D10: the cluster may have answered about the topic that was deleted. It once began there in the new one."""
    topic, group, found = memory.topic(), memory.group(), list[tuple[TopicPartition, int]]()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        memory.fill(topic, 0, 1)
        collect(consumer, 1)
        driver, tp = consumer._driver, TopicPartition(topic, 5)
        monkeypatch.setattr(Member, "start_resolved", lambda self, tp, offset, end, now: found.append((tp, offset)))
        driver._to_resolve = [Wanted(tp, True)]
        steps = driver._resolve()
        next(steps)
        with marshal._context.lock:
            known = driver.member.world.groups[group].topics[topic]
            known.id, kept = ("another" if again else known.id), known.id
        with pytest.raises(StopIteration):
            steps.send({tp: Begin(500, 600)})
        known.id = kept
    assert found == ([] if again else [(tp, 500)])


def test_a_refusal_of_a_partition_that_is_held_back_loses_nothing(memory: MemoryTestCluster) -> None:
    """D6: the refused position may lie above what was delivered, because what comes while it is held back is dropped.

    Found by the simulator, which runs this code: such a partition was fetched on, and continued at that position.
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 3)
        tp, driver = TopicPartition(topic, 0), consumer._driver
        consumer.pause([tp])
        memory.fill(topic, 0, 10, first=3)
        memory.truncate(topic, 0, 10)
        with marshal._context.lock:
            driver.refused_positions[tp] = OutOfRange(tp, 8, driver.source.round(tp))
        driver.submit("a refusal", driver._check_refused)
        until(lambda: not driver.refused_positions, "the refusal is looked at")
        assert not consumer.fetch(1, expires_s=0.0)
        consumer.resume([tp])
        assert [message.offset for message in collect(consumer, 3)] == [*range(10, 13)]
        assert [(event.offset, event.to) for event in consumer.events() if event.kind == "offset_lost"] == [(3, 10)]


def test_from_no_id_to_an_id_takes_no_pause(memory: MemoryTestCluster) -> None:
    """F9.1: an upgraded cluster begins to give ids; nothing is parked, and the id is written to the log."""
    topic, group = memory.topic(), memory.group()
    memory.broker.tells_ids = False
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 5)
        assert [record.topic_id for record in memory.accepted(group, Topology)] == [""]
        memory.broker.tells_ids = True
        known = str(memory.broker.ids[topic])
        until(lambda: [one.topic_id for one in memory.accepted(group, Topology)] == ["", known], "the id is known")
        memory.fill(topic, 0, 5)
        collect(consumer, 5)
        assert "parked" not in reported(consumer, [])


def test_a_partition_that_somebody_parked_for_another_reason(memory: MemoryTestCluster) -> None:
    """F6.5: a move of its position ends it, also where the topic is the one that it was."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 2)
        consumer.flush()
        with marshal._context.lock:
            (claim,) = consumer._member.claims.values()
            claim.parking = "SomethingNew"
            claim.stop("parked", 0)
            consumer._driver.kick()
        waiting_for = until(lambda: consumer.cached_info().waiting_for, "it says why it has nothing to do")
        assert "SomethingNew" in waiting_for
        assert f"marshal set-position {group} {topic}:0 --to POSITION" in waiting_for
        moved = marshal.group(group).set_position(f"{topic}:0", 3)
        assert moved.recreated == []
        assert [message.offset for message in collect(consumer, 2)] == [3, 4]
