"""The position passes offsets that hold no message, as transactions leave them behind (D1, D2)."""

from __future__ import annotations

import pytest

from marshal_py import Consumer
from marshal_py.protocol.member import member_state
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import ReleasingPartition
from tests.support.client_fixtures import MemoryTestCluster, calm, collect, joined, until

MODES = pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
MESSAGES, SKIPPED = 3, 5


@pytest.fixture(autouse=True)
def _copies_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test waits for the copy of a position; five seconds apart they would wait for nothing else."""
    monkeypatch.setattr(member_state, "MIRROR_MS", 50)


@pytest.fixture
def memory() -> MemoryTestCluster:
    return MemoryTestCluster()


def caught_up(memory: MemoryTestCluster, consumer: Consumer, topic: str, end: int) -> bool:
    """Whether every view says that nothing is left, while the consumer asks for more."""
    assert not consumer.fetch(1, expires_s=0.05)
    claim = consumer.cached_info().claims[TopicPartition(topic, 0)]
    known = memory.broker.committed.get((consumer.cached_info().group, TopicPartition(topic, 0)))
    return (claim.position, claim.lag, consumer.cached_info().lag, known) == (end, 0, 0, end)


@MODES
def test_the_end_of_a_transaction_is_no_lag(memory: MemoryTestCluster, delivery: str) -> None:
    """D1, D2: with an aborted transaction at the end, too; what comes next is delivered once."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, MESSAGES)
    memory.broker.skip(topic, 0, SKIPPED)
    join = calm if delivery == "at_most_once" else joined  # a grant must not be dropped
    with memory.connect() as marshal, join(marshal, group, [topic], delivery=delivery) as consumer:
        for message in collect(consumer, MESSAGES):
            message.ack()
        end = MESSAGES + SKIPPED
        until(lambda: caught_up(memory, consumer, topic, end), "the position passes what holds no message")
        memory.broker.skip(topic, 0)
        until(lambda: caught_up(memory, consumer, topic, end + 1), "again")
        memory.fill(topic, 0, 2, first=end + 1)
        (first, second) = collect(consumer, 2)
        assert (first.offset, second.offset) == (end + 1, end + 2)
        first.ack()
        second.ack()
        until(lambda: caught_up(memory, consumer, topic, end + 3), "and behind messages")
        assert consumer.cached_info().grants_dropped == 0
        assert [event.kind for event in consumer.events() if event.kind in ("amo_dropped", "offset_lost")] == []
    (release,) = memory.accepted(group, ReleasingPartition)
    assert (release.position if delivery == "at_least_once" else release.give) == end + 3


@MODES
def test_nothing_is_lost_with_segments_that_hold_no_message(memory: MemoryTestCluster, delivery: str) -> None:
    """D6: retention deletes a topic whose messages are all handled: the next consumer reports no loss."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, MESSAGES)
    memory.broker.skip(topic, 0)
    with memory.connect() as marshal, joined(marshal, group, [topic], delivery=delivery) as consumer:
        for message in collect(consumer, MESSAGES):
            message.ack()
        until(lambda: caught_up(memory, consumer, topic, MESSAGES + 1), "it is read to its end")
    memory.truncate(topic, 0, MESSAGES + 1)
    with memory.connect() as marshal, joined(marshal, group, [topic], delivery=delivery) as consumer:
        until(lambda: caught_up(memory, consumer, topic, MESSAGES + 1), "the next one knows its end")
        assert [event for event in consumer.events() if event.kind == "offset_lost"] == []


def test_the_position_stays_below_a_message_that_is_not_acked(memory: MemoryTestCluster) -> None:
    """D1: what comes after it may hold no message, it does."""
    topic = memory.topic()
    memory.fill(topic, 0, MESSAGES)
    memory.broker.skip(topic, 0, SKIPPED)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        messages = collect(consumer, MESSAGES, ack=False)
        for message in messages[:1] + messages[2:]:
            message.ack()
        for _ in range(3):
            assert not consumer.fetch(1, expires_s=0.05)
        assert consumer.cached_info().claims[TopicPartition(topic, 0)].position == 1
        messages[1].ack()
        until(lambda: caught_up(memory, consumer, topic, MESSAGES + SKIPPED), "then it passes all")


def test_a_partition_without_any_message(memory: MemoryTestCluster) -> None:
    """D1: only aborted transactions; this consumer has never got a message of the partition."""
    topic = memory.topic()
    memory.broker.skip(topic, 0, SKIPPED)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(lambda: caught_up(memory, consumer, topic, SKIPPED), "it is passed")


@MODES
def test_ranges_pass_what_holds_no_message(memory: MemoryTestCluster, delivery: str) -> None:
    """D9: a planner's ranges reach the end of the partition, whatever is there."""
    topic = memory.topic()
    memory.fill(topic, 0, MESSAGES)
    memory.broker.skip(topic, 0, SKIPPED)
    tp = TopicPartition(topic, 0)
    with (
        memory.connect() as marshal,
        marshal.planner(memory.group(), [topic], start="earliest", delivery=delivery) as planner,
    ):
        planner.ranges.settle()
        with planner.batch(100, 5.0) as batch:
            assert [(one.start, one.to) for one in batch.ranges] == [(0, MESSAGES + SKIPPED)]
            batch.commit()
        until(lambda: planner.cached_info().claims[tp].lag == 0, "nothing is left")
        assert planner.cached_info().claims[tp].position == MESSAGES + SKIPPED
