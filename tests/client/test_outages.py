"""The broker goes away: at the start, in the middle, at the end. Nothing is lost; errors say what is waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

import marshal_py
from marshal_py.errors import AccessDenied, ClusterUnreachable, CoordinationTopicMissing, MessageTooLarge
from marshal_py.protocol.wire.identity import TopicPartition, route
from marshal_py.protocol.wire.records import Evict, Leave
from marshal_py.transport import connecting
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryAdmin, MemorySource
from marshal_py.transport.ports import Bounds
from tests.support.broker_faults import fail_requests, topics
from tests.support.client_fixtures import (
    LOG,
    LOGS,
    BackgroundConsumer,
    EmbeddedTestCluster,
    MemoryTestCluster,
    collect,
    joined,
    owns,
    places,
    planning,
    until,
)

T = TypeVar("T")
IMPATIENT = {"reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100}


def impatient(
    cluster: EmbeddedTestCluster, client_id: str | None = None, timeout_s: float = 20.0
) -> marshal_py.Marshal:
    """A connection that comes back quickly, so that the tests do."""
    return marshal_py.connect(
        {"bootstrap.servers": cluster.target, **IMPATIENT}, client_id=client_id, timeout_s=timeout_s
    )


def answer(ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None if the cluster did not answer in its short time."""
    try:
        return ask()
    except ClusterUnreachable:
        return None


def test_away_at_the_start(embedded: EmbeddedTestCluster) -> None:
    embedded.broker.broker_down()
    with pytest.raises(ClusterUnreachable) as raised:
        impatient(embedded, timeout_s=0.5)
    assert raised.value.servers == embedded.target
    assert raised.value.waiting_for == "the cluster's metadata"
    assert raised.value.retriable
    embedded.broker.broker_up()
    impatient(embedded).close()


def test_away_between_connect_and_consumer(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    marshal = until(lambda: answer(lambda: impatient(embedded, timeout_s=1.0)), "a connection within its short time")
    embedded.broker.broker_down()
    with pytest.raises(ClusterUnreachable) as raised:
        joined(marshal, "g", [topic])
    assert raised.value.waiting_for
    embedded.broker.broker_up()

    until(
        lambda: answer(lambda: joined(marshal, "g", [topic])), "the same Marshal joins when the broker is back"
    ).stop()
    marshal.close()


def test_away_in_the_middle_costs_no_claim_and_loses_nothing(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic(2)
    group = embedded.group()
    with impatient(embedded) as marshal, joined(marshal, group, [topic]) as consumer:
        until(owns(consumer, 0, 1), "both partitions")
        embedded.fill(topic, 0, 10)
        before = {claim.token for claim in consumer.cached_info().claims.values()}
        seen = places(collect(consumer, 10))
        embedded.broker.broker_down()
        until(lambda: [e for e in consumer.events() if e.kind == "fenced"], "the fence falls")
        until(lambda: marshal.waiting_for, "it says what it waits for")
        until(lambda: consumer.cached_info().waiting_for == marshal.waiting_for, "the consumer says it, too")
        with pytest.raises(ClusterUnreachable):
            consumer.info(timeout_s=0.5)
        assert len(consumer.fetch(10, expires_s=0)) == 0
        embedded.broker.broker_up()
        embedded.fill(topic, 1, 10)
        seen += places(collect(consumer, 10))
        consumer.flush()
        assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(10)]
        assert {claim.token for claim in consumer.cached_info().claims.values()} == before
        until(lambda: not marshal.waiting_for, "all is well again")
    assert embedded.accepted(group, Evict) == []


def test_questions_to_a_group_survive_an_outage(embedded: EmbeddedTestCluster) -> None:
    """Questions without an answer do not end the process when the broker is back, and the next ones are answered."""
    place = TopicPartition(embedded.topic(), 0)
    admin = KafkaTransport({"bootstrap.servers": embedded.target, **IMPATIENT}, 1.0).admin()
    until(lambda: admin.commit("g", {place: 3}) == "", "the group's coordinator answers")
    embedded.broker.broker_down()
    until(lambda: admin.commit("g", {place: 4}) == "no answer in time", "one has waited for the broker in vain")
    with pytest.raises(ClusterUnreachable, match="committed offsets of g"):
        admin.committed("g", [place])
    embedded.broker.broker_up()
    until(lambda: admin.commit("g", {place: 5}) == "", "the group's coordinator answers again")
    assert until(lambda: answer(lambda: admin.committed("g", [place])), "an answer") == {place: 5}


def _fenced(consumer: marshal_py.Consumer) -> bool:
    return "fenced" in [event.kind for event in consumer.events()]


def test_two_members_survive_an_outage_without_evicting_each_other(embedded: EmbeddedTestCluster) -> None:
    """T3: a member that cannot write evicts nobody, however long it waits."""
    topic = embedded.topic(4)
    group = embedded.group()
    with (
        impatient(embedded) as marshal,
        impatient(embedded) as other,
        joined(marshal, group, [topic]) as one,
        joined(other, group, [topic]) as two,
    ):
        until(lambda: len(one.cached_info().claims) == len(two.cached_info().claims) == 2, "two partitions each")
        with BackgroundConsumer(one) as first, BackgroundConsumer(two) as second:
            for partition in range(4):
                embedded.fill(topic, partition, 5)
            embedded.broker.broker_down()
            until(lambda: _fenced(one), "the fence falls")
            until(lambda: _fenced(two), "for the other too")
            embedded.broker.broker_up()
            for partition in range(4):
                embedded.fill(topic, partition, 5, first=5)
            until(lambda: len({*places(first.seen), *places(second.seen)}) == 40, "everything came")
        assert first.error is None
        assert second.error is None
    assert embedded.accepted(group, Evict) == []


def test_away_at_the_end(embedded: EmbeddedTestCluster) -> None:
    """A stop gives up, and tells the user that its claims are gone: he may have begun something for each."""
    topic, told = embedded.topic(), list[str]()
    embedded.fill(topic, 0, 3)
    marshal = impatient(embedded)
    callbacks = {"on_lost": lambda _, reason: told.append(reason), "on_deactivated": lambda: told.append("deactivated")}
    consumer = joined(marshal, embedded.group(), [topic], **callbacks)
    collect(consumer, 3)
    embedded.broker.broker_down()
    consumer.stop(timeout_s=0.5)
    assert consumer.cached_info().closed
    until(lambda: len(told) == 2, "both callbacks")
    assert told == ["stopped", "deactivated"]
    marshal.close(timeout_s=0.5)
    embedded.broker.broker_up()


def test_away_at_the_end_of_a_marshal_with_many_consumers(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    marshal = impatient(embedded)
    consumers = [joined(marshal, embedded.group(), [topic]) for _ in range(5)]
    embedded.broker.broker_down()
    marshal.close(timeout_s=0.5)
    assert all(consumer.cached_info().closed for consumer in consumers)
    assert not [t for t in threading.enumerate() if t.name == "marshal-loop" and t is marshal._loop._thread]
    embedded.broker.broker_up()


def test_a_coordination_topic_that_is_missing_is_named(embedded: EmbeddedTestCluster) -> None:
    with pytest.raises(CoordinationTopicMissing) as raised:
        marshal_py.connect(embedded.target, coordination_topic="other")
    assert raised.value.topic == "other"
    assert "create_topic('other'" in raised.value.command


def test_a_full_producer_queue_passes(memory: MemoryTestCluster) -> None:
    """Records that could not be queued are sent by a later tick; the claim may lapse meanwhile, nothing is lost."""
    topic = memory.topic()
    group = memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        memory.fill(topic, 0, 3)
        memory.broker.queue_full = True
        until(lambda: [e for e in consumer.events() if e.kind == "fenced"], "the fence falls")
        memory.broker.queue_full = False
        assert places(collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]
    assert memory.accepted(group, Evict) == []


def test_records_that_are_lost_on_the_way_are_sent_again(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    group = memory.group()
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        memory.fill(topic, 0, 3)
        collect(consumer, 3)
        memory.broker.writable = False
        stopping = threading.Thread(target=consumer.stop)
        stopping.start()
        until(lambda: consumer._member.leaving, "it wants to leave")
        memory.broker.writable = True
        stopping.join()
        assert len(memory.accepted(group, Leave)) == 1


def test_a_record_that_is_too_large_for_the_client_is_named(embedded: EmbeddedTestCluster) -> None:
    """A Join with many topics against a small message.max.bytes."""
    topics = [f"{'x' * 200}-{number}" for number in range(40)]
    for topic in topics:
        embedded.create(topic, 1)
    with marshal_py.connect({"bootstrap.servers": embedded.target, "message.max.bytes": 2_000}) as marshal:
        with pytest.raises(MessageTooLarge, match=r"message\.max\.bytes") as raised:
            joined(marshal, "g", topics)
        assert raised.value.size_bytes > 2_000
        joined(marshal, "g", topics[:1]).stop()


def test_a_record_that_the_broker_finds_too_large_is_named(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    with embedded.connect() as marshal:
        fail_requests(embedded.broker, "Produce", *[10] * 100)
        with pytest.raises(MessageTooLarge):
            joined(marshal, "g", [topic])


def test_a_client_that_may_not_write_gets_an_error(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "REFUSED_S", 2.0)
    topic = embedded.topic()
    with embedded.connect() as marshal:
        fail_requests(embedded.broker, "Produce", *[29] * 100)
        with pytest.raises(AccessDenied, match="may not Write topic '__marshal'"):
            joined(marshal, "g", [topic])


def test_a_look_at_the_cluster_that_fails_does_no_harm(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker thread outlives whatever a question raises."""
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal:
        calls: list[str] = []
        bounds = marshal._context.admin.bounds

        def fails(tps: object) -> object:
            calls.append("asked")
            if len(calls) == 1:
                raise RuntimeError("not ours")
            if len(calls) == 2:
                raise ClusterUnreachable("memory", "bounds", "test")
            return bounds(tps)  # type: ignore[arg-type]

        monkeypatch.setattr(marshal._context.admin, "bounds", fails)
        with caplog.at_level(logging.CRITICAL), joined(marshal, memory.group(), [topic]) as consumer:
            assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
        assert len(calls) == 3


@pytest.fixture
def leaderless(monkeypatch: pytest.MonkeyPatch) -> set[TopicPartition]:
    """Partitions whose offsets no broker tells."""
    lost: set[TopicPartition] = set()
    bounds, told = MemoryAdmin.bounds, MemoryAdmin.told_offsets

    def all_or_none(admin: MemoryAdmin, tps: Sequence[TopicPartition], **keywords: Any) -> dict[TopicPartition, Bounds]:
        if not lost.isdisjoint(tps):
            raise ClusterUnreachable("memory", "the ends of partitions", "no leader")
        return bounds(admin, tps, **keywords)

    def answered(admin: MemoryAdmin, tps: Sequence[TopicPartition], *rest: Any, **keywords: Any) -> Any:
        return told(admin, [tp for tp in tps if tp not in lost], *rest, **keywords)

    monkeypatch.setattr(MemoryAdmin, "bounds", all_or_none)
    monkeypatch.setattr(MemoryAdmin, "told_offsets", answered)
    return lost


def test_a_partition_without_a_leader_keeps_no_other_from_beginning(
    memory: MemoryTestCluster, leaderless: set[TopicPartition]
) -> None:
    """D5: where the others begin is asked without it."""
    topic = memory.topic(2)
    memory.fill(topic, 0, 1)
    memory.fill(topic, 1, 1)
    leaderless.add(TopicPartition(topic, 0))
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        assert places(collect(consumer, 1)) == [(1, 0)]
        assert owns(consumer, 1)()
        leaderless.clear()
        assert places(collect(consumer, 1)) == [(0, 0)]


def test_a_partition_without_a_leader_keeps_no_other_from_going_on(
    memory: MemoryTestCluster, leaderless: set[TopicPartition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, V15: an earlier owner has finished messages above both positions, so the new one asks where they end."""
    topic, group = memory.topic(2), memory.group()
    memory.fill(topic, 0, 2)
    memory.fill(topic, 1, 2)
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            for message in collect(consumer, 4, ack=False):
                assert message.offset == 0 or message.ack()
        monkeypatch.setattr(MemorySource, "end_offset", lambda *_: -1)
        leaderless.add(TopicPartition(topic, 0))
        with joined(marshal, group, [topic]) as consumer:
            assert places(collect(consumer, 1)) == [(1, 0)]
            leaderless.clear()
            assert places(collect(consumer, 1)) == [(0, 0)]


def test_a_partition_without_a_leader_hides_the_end_of_no_other(
    memory: MemoryTestCluster, leaderless: set[TopicPartition]
) -> None:
    """A3, D9: a planner tells the lag of the others, and that it is ready to take them over."""
    topic = memory.topic(2)
    tps = [TopicPartition(topic, partition) for partition in range(2)]
    memory.fill(topic, 1, 3)
    with memory.connect() as marshal, planning(marshal, memory.group(), [topic]) as planner:
        until(lambda: [planner._claims()[tp].lag for tp in tps if tp in planner._claims()] == [0, 3], "both are known")
        leaderless.add(tps[0])
        memory.fill(topic, 1, 3, first=3)
        until(lambda: planner._claims()[tps[1]].lag == 6, "the new end is known")


def test_a_refused_position_is_asked_for_until_the_cluster_answers(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = memory.topic()
    group = memory.group()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 1)
        memory.truncate(topic, 0, 3)
        calls: list[str] = []
        bounds = marshal._context.admin.bounds

        def fails_once(tps: object) -> object:
            calls.append("asked")
            if len(calls) == 1:
                raise ClusterUnreachable("memory", "bounds", "test")
            return bounds(tps)  # type: ignore[arg-type]

        monkeypatch.setattr(marshal._context.admin, "bounds", fails_once)
        with caplog.at_level(logging.CRITICAL), joined(marshal, group, [topic]) as consumer:
            assert places(collect(consumer, 2)) == [(0, 3), (0, 4)]


def test_groups_in_different_logs_of_one_marshal(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    embedded.fill(topic, 0, 2)
    groups = {number: next(f"g{i}" for i in range(100) if route(f"g{i}", LOGS) == number) for number in range(LOGS)}
    with embedded.connect() as marshal:
        consumers = [joined(marshal, group, [topic]) for group in groups.values()]
        for consumer in consumers:
            assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
    assert LOG in topics(embedded.broker)
