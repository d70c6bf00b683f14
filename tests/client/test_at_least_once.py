"""At-least-once mode: acks in any order, redelivery, handlers that raise or hang."""

from __future__ import annotations

import contextlib
import threading

import pytest

from marshal_py import Consumer
from marshal_py.protocol.wire.records import Note, ReleasingPartition
from tests.support.client_fixtures import (
    INTERVAL_S,
    BackgroundConsumer,
    MemoryTestCluster,
    TestCluster,
    calm,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)

TIMEOUT_S = 30.0  # of handlers that say they are at work: no machine stands still for so long


def test_acks_in_any_order_move_the_position_to_the_lowest_unfinished(cluster: TestCluster) -> None:
    with cluster.reading(5) as consumer:
        messages = collect(consumer, 5, ack=False)
        for done, position in ((4, 0), (1, 0), (0, 2), (3, 2), (2, 5)):
            assert messages[done].ack() is True
            assert positions(consumer) == {0: position}


@pytest.mark.parametrize("known_end", [2, -1, 10])
def test_what_is_finished_above_the_position_is_skipped_however_old_the_known_end_is(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, known_end: int
) -> None:
    """D1: the known end of a partition that was fetched ahead and held back is older than the owner's progress."""
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 10)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            for message in collect(consumer, 10, ack=False)[1:]:
                message.ack()
        second = marshal.consumer(group, [topic], heartbeat_interval_s=INTERVAL_S)
        monkeypatch.setattr(second._driver.source, "end_offset", lambda tp: known_end)
        with second:
            assert [message.offset for message in collect(second, 1)] == [0]
            assert second.next(expires_s=0.5) is None, "the others were finished"


def test_an_ack_from_another_thread_counts(cluster: TestCluster) -> None:
    with cluster.reading(3) as consumer:
        messages = collect(consumer, 3, ack=False)
        answers: list[bool] = []
        threads = [threading.Thread(target=lambda m=m: answers.append(m.ack())) for m in messages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 3
        consumer.flush()
        assert positions(consumer) == {0: 3}


def test_an_ack_twice_is_an_ack_once(cluster: TestCluster) -> None:
    with cluster.reading(3) as consumer:
        messages = collect(consumer, 3, ack=False)
        assert [messages[0].ack(), messages[0].ack()] == [True, True]
        assert [messages[2].ack(), messages[2].ack()] == [True, True]
        assert positions(consumer) == {0: 1}
        assert consumer.cached_info().late_acks == 0


def test_an_ack_after_the_claim_is_lost_is_late(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 2)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        batch = consumer.fetch(2, min_messages=2, expires_s=30)
        first = next(iter(batch))
        consumer.stop()
        assert first.ack() is False
        assert batch.ack() is False
        assert consumer.cached_info().late_acks == 1 + len(batch.parts)
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 2)) == [(0, 0), (0, 1)]


def test_what_was_not_acked_comes_again_after_stop(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 6)
    group = cluster.group()
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            messages = collect(consumer, 5, ack=False)
            for number in (0, 1, 4):
                messages[number].ack()
        with joined(marshal, group, [topic]) as successor:
            again = collect(successor, 3)
            assert places(again) == [(0, 2), (0, 3), (0, 5)], "4 was finished, and the Release said so"
            assert again[0].token > messages[0].token
            assert [m.delivery_count for m in again] == [2, 2, 1]


def test_a_redelivery_that_the_log_knows_of_is_counted(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 1)
    group = cluster.group()
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            collect(consumer, 1, ack=False)
            consumer.flush()
            driver = consumer._driver
            until(lambda: _in_flight(driver) == [1], "a heartbeat that tells of the message in flight")
        with joined(marshal, group, [topic]) as successor:
            assert collect(successor, 1)[0].delivery_count == 2


def _in_flight(driver: object) -> list[int]:
    group = driver.member.group  # type: ignore[attr-defined]
    return [partition.in_flight for partition in group.partitions.values()]


def test_a_handler_that_raises_ends_the_block_and_its_message_comes_again(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 5)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        with pytest.raises(RuntimeError, match="offset 2"):
            _fail_at(consumer, 2)
        assert consumer.cached_info().closed
        assert [record.position for record in cluster.accepted(group, ReleasingPartition)] == [2]
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 3)) == [(0, 2), (0, 3), (0, 4)]


def _fail_at(consumer: Consumer, offset: int) -> None:
    with consumer:
        for message in consumer:
            if message.offset == offset:
                raise RuntimeError(f"offset {message.offset}")
            message.ack()


def test_a_handler_that_hangs_loses_its_partition_and_no_other(cluster: TestCluster) -> None:
    """D4: the heartbeats of a live process must not keep the partition of a handler that hangs.

    ACKS: A handler that neither answers nor says that it is at work loses its partition, and no other one.
    """
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)
    group = cluster.group()
    with contextlib.ExitStack() as stack:
        marshal, other = (stack.enter_context(cluster.connect()) for _ in range(2))
        hung = stack.enter_context(joined(marshal, group, [topic], handler_timeout_s=1.0))
        message = collect(hung, 1, ack=False)[0]
        successor = stack.enter_context(joined(other, group, [topic]))
        assert places(collect(successor, 3)) == [(0, 0), (0, 1), (0, 2)]
        assert message.ack() is False
        assert hung.cached_info().late_acks == 1
        stuck = [event for event in hung.events() if event.kind == "handler_stuck"]
        assert [(event.partition, event.offset) for event in stuck] == [(0, 0)]
        notes = [note for note in cluster.accepted(group, Note) if note.kind == "handler_stuck"]
        assert [(note.topic, note.partition, note.from_) for note in notes] == [(topic, 0, 0)]
        reasons = [record.reason for record in cluster.accepted(group, ReleasingPartition)]
        assert reasons == ["handler stuck"]


@pytest.mark.parametrize("hung", [0, 1])
def test_a_handler_at_work_does_not_keep_the_partition_of_a_hung_one(memory: MemoryTestCluster, hung: int) -> None:
    """D4: a message and its batch can each report progress; the first of the two counts.

    ACKS: `in_progress()` of a message, a part or a batch: its handler is at work, and no other one.
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal, calm(marshal, group, [topic], handler_timeout_s=TIMEOUT_S) as consumer:
        batch = consumer.fetch(2, min_messages=2, expires_s=30)
        messages, clock = list(batch), consumer._driver.context.clock
        assert len(messages) == 2
        began = clock.now().mono_ms

        def worked_for_longer() -> bool:
            batch.in_progress()
            return clock.now().mono_ms - began > 2_500 * TIMEOUT_S

        memory.local.run_until(worked_for_longer)
        assert owns(consumer, 0)()

        def stuck() -> list[int]:
            messages[1 - hung].in_progress()
            return [event.offset for event in consumer.events() if event.kind == "handler_stuck"]

        assert memory.local.run_until(stuck) == [hung]


def test_a_handler_that_says_it_is_at_work_keeps_its_partition(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    group = memory.group()
    with memory.connect() as marshal, calm(marshal, group, [topic], handler_timeout_s=TIMEOUT_S) as consumer:
        message = collect(consumer, 1, ack=False)[0]
        driver = consumer._driver
        began = driver.context.clock.now().mono_ms

        def worked_for_longer() -> bool:
            message.in_progress()
            return driver.context.clock.now().mono_ms - began > 2_500 * TIMEOUT_S

        memory.local.run_until(worked_for_longer)
        assert message.ack() is True
        assert owns(consumer, 0)()


def test_two_members_split_and_nothing_is_lost_or_skipped(cluster: TestCluster) -> None:
    """A hand-over between live members: every offset is delivered, acked ones are not delivered again."""
    topic = cluster.topic(4)
    for partition in range(4):
        cluster.fill(topic, partition, 10)
    group = cluster.group()
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(cluster.connect()) for _ in range(2))
        one = stack.enter_context(joined(first, group, [topic]))
        seen = places(collect(one, 40))
        with BackgroundConsumer(one) as background:
            two = stack.enter_context(joined(second, group, [topic]))
            with BackgroundConsumer(two) as other:
                until(
                    lambda: len(one.cached_info().claims) == len(two.cached_info().claims) == 2, "two partitions each"
                )
                for partition in range(4):
                    cluster.fill(topic, partition, 5, first=10)
                until(lambda: len(background.seen) + len(other.seen) >= 20, "the second half")
        assert background.error is None
        assert other.error is None
        seen += places(background.seen) + places(other.seen)
        assert sorted(seen) == sorted((p, o) for p in range(4) for o in range(15))
        assert {r.reason for r in cluster.accepted(group, ReleasingPartition)} == {"hand-over"}
