"""At-most-once mode: no offset twice, whatever ends the consumer."""

from __future__ import annotations

import contextlib
import signal

import pytest

from marshal_py import stop_on_signals
from marshal_py.errors import ModeMismatch
from marshal_py.protocol.claims import AtMostOnce
from marshal_py.protocol.wire.records import Evict
from tests.support.client_fixtures import (
    CALM_S,
    ConsumerProcess,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    calm,
    collect,
    joined,
    owns,
    places,
    until,
)

AMO = "at_most_once"


@pytest.mark.bounds(grant=7)
def test_everything_is_delivered_under_grants_and_once(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 30)
    cluster.fill(topic, 1, 30)
    group = cluster.group()
    with cluster.connect() as marshal, calm(marshal, group, [topic], delivery=AMO) as consumer:
        seen = []
        for message in consumer:
            seen.append((message.partition, message.offset))
            if len(seen) == 60:
                break
        assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(30)]
        assert consumer.cached_info().grants_dropped == 0
    grants = cluster.granted(group)
    assert sum(grant.to - grant.start for grant in grants) == 60
    assert max(grant.to - grant.start for grant in grants) == 7


def test_fetch_and_next_bring_the_same(cluster: TestCluster) -> None:
    with cluster.reading(20, delivery=AMO, heartbeat_interval_s=CALM_S) as consumer:
        first = consumer.next(expires_s=30)
        assert first is not None
        assert first.ack() is True
        assert first.delivery_count == 1
        assert [first.offset, *(m.offset for m in collect(consumer, 19))] == list(range(20))


@pytest.mark.bounds(grant=5)
def test_a_fetch_that_is_larger_than_the_grants_does_not_wait_in_vain(cluster: TestCluster) -> None:
    """Two ranges are granted ahead; a larger batch can never be filled."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 60)
    with cluster.connect() as marshal, calm(marshal, cluster.group(), [topic], delivery=AMO) as consumer:
        seen: list[int] = []
        while len(seen) < 40:
            batch = consumer.fetch(1_000, min_messages=1_000, expires_s=3_000)
            assert 0 < len(batch) <= 10
            seen += [m.offset for m in batch]
        assert seen == list(range(len(seen)))


def test_what_stop_dropped_is_counted_and_never_delivered(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 20)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = calm(marshal, group, [topic], delivery=AMO)
        seen = [m.offset for m in collect(consumer, 3)]
        consumer.stop()
        dropped = consumer.cached_info().grants_dropped
        ranges = [(event.offset, event.to) for event in consumer.events() if event.kind == "amo_dropped"]
        assert sum(to - from_ for from_, to in ranges) == dropped
        cluster.fill(topic, 0, 5, first=20)
        with calm(marshal, group, [topic], delivery=AMO) as successor:
            rest = [m.offset for m in collect(successor, 25 - 3 - dropped)]
        assert seen + [o for from_, to in ranges for o in range(from_, to)] + rest == list(range(25))


@pytest.mark.bounds(grant=4)
def test_drain_delivers_what_is_buffered(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 30)
    group = cluster.group()
    with cluster.connect() as marshal:
        seen: list[int] = []
        consumer = calm(marshal, group, [topic], delivery=AMO)
        for message in consumer:
            seen.append(message.offset)
            if len(seen) == 2:
                consumer.drain(30)
        assert consumer.cached_info().closed
        assert consumer.cached_info().grants_dropped == 0
        with calm(marshal, group, [topic], delivery=AMO) as successor:
            rest = [m.offset for m in collect(successor, 30 - len(seen))] if len(seen) < 30 else []
        assert seen + rest == list(range(30))


def test_an_iteration_that_ends_says_that_its_last_message_is_done(memory: MemoryTestCluster) -> None:
    """T11: the user has asked for more, so the log calls it lost no more if the Release is."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    claims = []
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], delivery=AMO) as consumer,
        stop_on_signals(consumer, signals=[signal.SIGTERM]),
    ):
        for _ in consumer:
            claims += consumer._member.claims.values()
            signal.raise_signal(signal.SIGTERM)
    (tracker,) = [claim.tracker for claim in claims]
    assert isinstance(tracker, AtMostOnce)
    assert tracker.handled_to == 1


def test_a_group_has_one_mode(cluster: TestCluster) -> None:
    topic = cluster.topic()
    group = cluster.group()
    with cluster.connect() as marshal, joined(marshal, group, [topic]):
        with pytest.raises(ModeMismatch, match="at_least_once") as raised:
            joined(marshal, group, [topic], delivery=AMO)
        assert (raised.value.group, raised.value.wanted) == (group, AMO)
    with cluster.connect() as marshal, pytest.raises(ModeMismatch):
        joined(marshal, group, [topic], delivery=AMO)


def test_no_offset_twice_when_the_process_is_killed(embedded: EmbeddedTestCluster) -> None:
    """kill -9 in the middle of a grant; the successor delivers nothing that the dead one printed or was granted."""
    topic = embedded.topic(2)
    group = embedded.group()
    for partition in (0, 1):
        embedded.fill(topic, partition, 50)
    with ConsumerProcess(embedded.target, group, topic, "--delivery", AMO) as process:
        process.wait_for("message", 20)
        process.signal(signal.SIGKILL)
        process.wait()
        before = {(m["partition"], m["offset"]) for m in process.said("message")}
    with embedded.connect() as marshal, joined(marshal, group, [topic], delivery=AMO) as successor:
        until(owns(successor, 0, 1), "the successor has both partitions")
        for partition in (0, 1):
            embedded.fill(topic, partition, 10, first=50)
        after: list[tuple[int, int]] = []
        until(
            lambda: (
                after.extend(places(successor.fetch(100, min_messages=100, expires_s=0.1)))
                or {(0, 59), (1, 59)} <= {*after}
            ),
            "the end",
        )
    assert len(set(after)) == len(after)
    assert before.isdisjoint(after)
    assert len(embedded.accepted(group, Evict)) == 1
    assert embedded.granted(group), "some of it was granted"


@pytest.mark.bounds(grant=10, prefetch=20)
def test_no_offset_twice_over_restarts(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    group = embedded.group()
    embedded.fill(topic, 0, 200)
    seen: list[int] = []
    with contextlib.ExitStack() as stack:
        marshal = stack.enter_context(embedded.connect())
        for _ in range(4):
            with joined(marshal, group, [topic], delivery=AMO) as consumer:
                for message in consumer:
                    seen.append(message.offset)
                    if len(seen) % 8 == 0:
                        break
    assert len(seen) == 32
    assert seen == sorted(set(seen))
