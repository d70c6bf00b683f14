"""At most once: no offset twice, whatever ends the consumer."""

from __future__ import annotations

import contextlib
import signal

import pytest

from marshal_py.errors import ModeMismatch
from marshal_py.protocol.records import Evict
from tests.support.client_fixtures import (
    ConsumerProcess,
    EmbeddedGround,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    until,
)

AMO = "at_most_once"


def test_everything_is_delivered_under_grants_and_once(ground: TestCluster) -> None:
    topic = ground.topic(2)
    ground.fill(topic, 0, 30)
    ground.fill(topic, 1, 30)
    group = ground.group()
    with ground.connect() as marshal, joined(marshal, group, [topic], delivery=AMO, grant_messages=7) as consumer:
        seen = []
        for message in consumer:
            seen.append((message.partition, message.offset))
            if len(seen) == 60:
                break
        assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(30)]
        assert consumer.cached_info().grants_dropped == 0
    grants = ground.granted(group)
    assert sum(grant.to - grant.start for grant in grants) == 60
    assert max(grant.to - grant.start for grant in grants) == 7


def test_fetch_and_next_bring_the_same(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 20)
    with ground.connect() as marshal, joined(marshal, ground.group(), [topic], delivery=AMO) as consumer:
        first = consumer.next(expires_s=30)
        assert first is not None
        assert first.ack() is True
        assert first.delivery_count == 1
        assert [first.offset, *(m.offset for m in collect(consumer, 19))] == list(range(20))


def test_a_fetch_that_is_larger_than_the_grants_does_not_wait_in_vain(ground: TestCluster) -> None:
    """Two ranges are granted ahead; a batch of more can never come together."""
    topic = ground.topic()
    ground.fill(topic, 0, 60)
    with (
        ground.connect() as marshal,
        joined(marshal, ground.group(), [topic], delivery=AMO, grant_messages=5) as consumer,
    ):
        seen: list[int] = []
        while len(seen) < 40:
            batch = consumer.fetch(1_000, expires_s=3_000)
            assert 0 < len(batch) <= 10
            seen += [m.offset for m in batch]
        assert seen == list(range(len(seen)))


def test_what_stop_dropped_is_counted_and_never_delivered(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 20)
    group = ground.group()
    with ground.connect() as marshal:
        consumer = joined(marshal, group, [topic], delivery=AMO)
        seen = [m.offset for m in collect(consumer, 3)]
        consumer.stop()
        dropped = consumer.cached_info().grants_dropped
        ranges = [(event.offset, event.to) for event in consumer.events() if event.kind == "amo_dropped"]
        assert sum(to - from_ for from_, to in ranges) == dropped
        ground.fill(topic, 0, 5, first=20)
        with joined(marshal, group, [topic], delivery=AMO) as successor:
            rest = [m.offset for m in collect(successor, 25 - 3 - dropped)]
        assert seen + [o for from_, to in ranges for o in range(from_, to)] + rest == list(range(25))


def test_drain_hands_over_what_is_buffered(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 30)
    group = ground.group()
    with ground.connect() as marshal:
        seen: list[int] = []
        consumer = joined(marshal, group, [topic], delivery=AMO, grant_messages=4)
        for message in consumer:
            seen.append(message.offset)
            if len(seen) == 2:
                consumer.drain(30)
        assert consumer.closed
        assert consumer.cached_info().grants_dropped == 0
        with joined(marshal, group, [topic], delivery=AMO) as successor:
            rest = [m.offset for m in collect(successor, 30 - len(seen))] if len(seen) < 30 else []
        assert seen + rest == list(range(30))


def test_a_group_has_one_mode(ground: TestCluster) -> None:
    topic = ground.topic()
    group = ground.group()
    with ground.connect() as marshal, joined(marshal, group, [topic]):
        with pytest.raises(ModeMismatch, match="at_least_once") as raised:
            joined(marshal, group, [topic], delivery=AMO)
        assert (raised.value.group, raised.value.wanted) == (group, AMO)
    with ground.connect() as marshal, pytest.raises(ModeMismatch):
        joined(marshal, group, [topic], delivery=AMO)


def test_no_offset_twice_when_the_process_is_killed(embedded: EmbeddedGround) -> None:
    """kill -9 in the middle of a grant; the heir delivers none of what the dead one printed, nor of its grants."""
    topic = embedded.topic(2)
    group = embedded.group()
    for partition in (0, 1):
        embedded.fill(topic, partition, 50)
    with ConsumerProcess(embedded.target, group, topic, "--delivery", AMO) as hand:
        hand.wait_for("message", 20)
        hand.signal(signal.SIGKILL)
        hand.wait()
        before = {(m["partition"], m["offset"]) for m in hand.said("message")}
    with embedded.connect() as marshal, joined(marshal, group, [topic], delivery=AMO) as successor:
        until(owns(successor, 0, 1), "the heir has both partitions")
        for partition in (0, 1):
            embedded.fill(topic, partition, 10, first=50)
        after: list[tuple[int, int]] = []
        until(
            lambda: after.extend(places(successor.fetch(100, expires_s=0.1))) or {(0, 59), (1, 59)} <= {*after},
            "the end",
        )
    assert len(set(after)) == len(after)
    assert before.isdisjoint(after)
    assert len(embedded.accepted(group, Evict)) == 1
    assert embedded.granted(group), "some of it was granted"


def test_no_offset_twice_over_restarts(embedded: EmbeddedGround) -> None:
    topic = embedded.topic()
    group = embedded.group()
    embedded.fill(topic, 0, 200)
    seen: list[int] = []
    with contextlib.ExitStack() as stack:
        marshal = stack.enter_context(embedded.connect())
        for _ in range(4):
            with joined(marshal, group, [topic], delivery=AMO, grant_messages=10, prefetch_messages=20) as consumer:
                for message in consumer:
                    seen.append(message.offset)
                    if len(seen) % 8 == 0:
                        break
    assert len(seen) == 32
    assert seen == sorted(set(seen))
