"""A consumer that plans ranges for others to read: same claims, same gate, same positions, nothing fetched here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from marshal_py.client.planner import Planner
from marshal_py.client.ranges import share
from marshal_py.errors import BatchOverdue, BatchRefused, ClaimLost, ConsumerClosed, InvalidOption
from marshal_py.protocol.claims import AtLeastOnce
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import ClaimingMessages, Note
from tests.support.client_fixtures import (
    INTERVAL_S,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    planning,
    positions,
    until,
)

AMO = "at_most_once"


def spans(batch: object) -> list[tuple[int, int, int]]:
    return [(one.partition, one.start, one.to) for one in batch.ranges]  # type: ignore[attr-defined]


def settled(planner: Planner) -> Planner:
    assert planner.ranges.settle(30.0)
    return planner


@contextlib.contextmanager
def reading(cluster: TestCluster, count: int) -> Iterator[Planner]:
    """The only planner of a new group, and of a new topic that has `count` messages in one partition."""
    topic = cluster.topic()
    cluster.fill(topic, 0, count)
    with cluster.connect() as marshal, planning(marshal, cluster.group(), [topic]) as planner:
        yield settled(planner)


def test_the_public_part_of_a_planner_is_one_call() -> None:
    """Beside what every membership has. The steps of `batch` are in `ranges`, for the sources of this library."""
    assert {name for name in vars(Planner) if not name.startswith("_")} == {"group", "batch"}


def test_batches_take_turns_and_positions_follow_commits(cluster: TestCluster) -> None:
    """D9: a range is finished as a whole."""
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 50)
    cluster.fill(topic, 1, 5)
    group = cluster.group()
    with cluster.connect() as marshal:
        with planning(marshal, group, [topic]) as consumer:
            planner = settled(consumer)
            first = planner.batch(20)
            assert spans(first) == [(1, 0, 5), (0, 0, 15)]
            assert positions(consumer) == {0: 0, 1: 0}
            first.commit()
            first.commit()
            assert positions(consumer) == {0: 15, 1: 5}
            with planner.batch(1_000) as second:
                assert spans(second) == [(0, 15, 50)]
                assert second.token == second.tokens[TopicPartition(topic, 0)]
            assert spans(planner.batch(1_000)) == [(0, 15, 50)], "it was not committed, so it is planned again"
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 35))[0] == (0, 15)


def test_no_data_makes_an_empty_batch(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal, planning(marshal, cluster.group(), [topic]) as consumer:
        planner = settled(consumer)
        assert not planner.batch(10, wait_s=0.0)
        cluster.fill(topic, 0, 3)
        batch = planner.batch(10)
        assert batch.offsets == 3
        batch.commit()
        assert until(lambda: consumer.cached_info().lag == 0, "the lag is known without fetching")


def test_the_next_batch_needs_the_last_one_done(memory: MemoryTestCluster) -> None:
    with reading(memory, 9) as consumer:
        planner = settled(consumer)
        planner.batch(4)
        with pytest.raises(BatchRefused, match=r"the last batch of 4 offsets .* batch\.commit\(\)"):
            planner.batch(4)
        for rows_max in (0, 1.5, "5", True):
            with pytest.raises(InvalidOption, match="rows_max"):
                planner.batch(rows_max)  # type: ignore[arg-type]
        for wait_s in (-1, "1", float("nan")):
            with pytest.raises(InvalidOption, match="wait_s"):
                planner.batch(4, wait_s)  # type: ignore[arg-type]


def test_a_claim_lost_before_the_commit_is_named(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    memory.fill(topic, 0, 5)
    memory.fill(topic, 1, 5)
    group = memory.group()
    with memory.connect() as marshal:
        consumer = planning(marshal, group, [topic])
        batch = settled(consumer).batch(100)
        batch.check()
        consumer.stop()
        with pytest.raises(ConsumerClosed):
            batch.check()
        with pytest.raises((ClaimLost, ConsumerClosed)):
            batch.commit()
        with joined(marshal, group, [topic]) as successor:
            assert len(collect(successor, 10)) == 10


def test_in_a_pause_the_batch_is_released_after_an_interval(cluster: TestCluster) -> None:
    """T12: a batch cannot hold a pause open; its commit says so, and the ranges come again."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 8)
    group = cluster.group()
    with cluster.connect() as marshal, planning(marshal, group, [topic], heartbeat_interval_s=INTERVAL_S) as consumer:
        planner = settled(consumer)
        batch = planner.batch(100)
        token = batch.token
        admin = marshal.group(group)
        hold = admin.pause(30, reason="test")
        with pytest.raises(ClaimLost, match=f"{topic}:0"):
            batch.check()
        with pytest.raises(ClaimLost, match=f"{topic}:0"):
            batch.commit()
        assert planner.ranges.settle(), "in a pause nothing is to come"
        assert not planner.batch(100, wait_s=0.0)
        admin.resume(token=hold.token)
        again = planner.batch(100)
        assert spans(again) == [(0, 0, 8)]
        assert again.token > token


def test_without_a_lease_nothing_is_delivered(embedded: EmbeddedTestCluster) -> None:
    """D8, D9: the gate of a range is the gate of a message."""
    with reading(embedded, 5) as consumer:
        planner = settled(consumer)
        wanted = planner.ranges.plan(10)
        assert len(wanted) == 1
        embedded.broker.broker_down()
        until(lambda: any(event.kind == "fenced" for event in consumer.events()), "the lease is over")
        assert planner.ranges.take(wanted) == []
        embedded.broker.broker_up()
        batch = planner.batch(10)
        assert spans(batch) == [(0, 0, 5)]
        embedded.broker.broker_down()
        until(lambda: any(event.kind == "fenced" for event in consumer.events()), "the lease is over again")
        with pytest.raises(ClaimLost):
            batch.check()
        embedded.broker.broker_up()


def test_a_lost_range_is_noted_and_passed(cluster: TestCluster) -> None:
    """D6: below the beginning."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 40)
    group = cluster.group()
    with cluster.connect() as marshal, planning(marshal, group, [topic]) as consumer:
        planner = settled(consumer)
        planner.batch(10).commit()
        cluster.truncate(topic, 0, 25)
        batch = planner.batch(100)
        assert spans(batch) == [(0, 25, 40)]
        batch.commit()
        assert positions(consumer) == {0: 40}
    notes = [n for n in cluster.accepted(group, Note) if n.kind == "offset_lost"]
    assert [(n.from_, n.to) for n in notes] == [(10, 25)]


def test_a_lost_range_is_passed_where_nothing_is_left(memory: MemoryTestCluster) -> None:
    """D6: all that there was is deleted."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 10)
    with memory.connect() as marshal, planning(marshal, group, [topic]) as consumer:
        planner = settled(consumer)
        memory.truncate(topic, 0, 10)
        assert not planner.batch(100, wait_s=0.0)
        until(lambda: positions(consumer) == {0: 10}, "it is passed")


def test_a_position_beyond_the_end_parks_that_partition(memory: MemoryTestCluster) -> None:
    """D6: the topic was recreated, or lost its tail. The others continue, also with a later consumer."""
    topic = memory.topic(2)
    group = memory.group()
    for partition in (0, 1):
        memory.fill(topic, partition, 5)
    with memory.connect() as marshal:
        with planning(marshal, group, [topic]) as consumer:
            planner = settled(consumer)
            planner.batch(10).commit()
            memory.broker.topics[topic][0].clear()
            memory.fill(topic, 1, 5, first=5)
            batch = planner.batch(10)
            assert spans(batch) == [(1, 5, 10)]
            batch.commit()
            (reported,) = until(lambda: [e for e in consumer.events() if e.kind == "parked"], "it is reported")
            assert reported.partition == 0
            assert "PositionBeyondEnd: " in reported.text
            assert "position 5, end 0" in reported.text
        memory.fill(topic, 1, 5, first=10)
        with planning(marshal, group, [topic]) as consumer:
            planner = settled(consumer)
            assert planner.ranges.settle(), "a parked partition is nobody's"
            assert spans(planner.batch(10)) == [(1, 10, 15)]


def test_a_range_has_the_handler_timeout_for_a_hand_over(memory: MemoryTestCluster) -> None:
    """A3, D9: a reader elsewhere cannot be asked to stop; a bound that was given counts."""
    topic, group, timeout_s = memory.topic(3), memory.group(), 90.0
    for options, wanted_ms in (({}, 90_000), ({"hand_over_timeout_s": 5.0}, 5_000)):
        with (
            memory.connect() as marshal,
            planning(marshal, group, [topic], handler_timeout_s=timeout_s, **options) as consumer,
        ):
            assert consumer._member.options.hand_over_timeout_ms == wanted_ms


def test_a_silent_user_loses_the_consumer(memory: MemoryTestCluster) -> None:
    """D4, D9: no range is in flight, and the user does not call: the claims go to others."""
    topic = memory.topic()
    group = memory.group()
    with memory.connect() as marshal:
        consumer = planning(marshal, group, [topic], handler_timeout_s=1.0)
        planner = settled(consumer)
        with joined(marshal, group, [topic]) as successor:
            until(owns(successor, 0), "the successor has the partition")
            with pytest.raises(BatchOverdue, match=r"not called for 1 s"):
                planner.batch(10)


def test_at_most_once_a_batch_is_granted_before_it_is_there(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 30)
    cluster.fill(topic, 1, 30)
    group = cluster.group()
    with cluster.connect() as marshal:
        with planning(marshal, group, [topic], delivery=AMO) as consumer:
            planner = settled(consumer)
            batch = planner.batch(20)
            assert sorted(spans(batch)) == [(0, 0, 10), (1, 0, 10)]
            granted = cluster.granted(group)
            assert sorted((g.start, g.to) for g in granted) == [(0, 10), (0, 10)]
            batch.commit()
            planner.batch(20).give_back()
        with joined(marshal, group, [topic], delivery=AMO) as successor:
            assert sorted(places(collect(successor, 20))) == [(p, o) for p in (0, 1) for o in range(20, 30)]


def test_planning_alone_grants_nothing(memory: MemoryTestCluster) -> None:
    """D9: a plan may still be given up; one range per claim is delivered at a time."""
    topic = memory.topic()
    memory.fill(topic, 0, 30)
    group = memory.group()
    with memory.connect() as marshal, planning(marshal, group, [topic], delivery=AMO) as consumer:
        planner = settled(consumer)
        (wanted,) = planner.ranges.plan(10)
        assert memory.accepted(group, ClaimingMessages) == []
        assert planner.ranges.plan(10) == [wanted]
        (taken,) = planner.ranges.take([wanted])
        assert taken.range == wanted
        assert planner.ranges.take([wanted]) == []


def test_at_most_once_a_grant_that_came_late_is_delivered_in_parts(memory: MemoryTestCluster) -> None:
    """It was asked for by a larger plan, which was given up: `rows_max` and `up_to` of the present call count."""
    topic = memory.topic()
    memory.fill(topic, 0, 30)
    group = memory.group()
    with memory.connect() as marshal, planning(marshal, group, [topic], delivery=AMO) as consumer:
        planner = settled(consumer)
        ranges = planner.ranges
        (wanted,) = ranges.plan(20)
        with ranges.context.outbox, ranges.context.lock:
            ranges.queue.request_grant(wanted)
            ranges.driver.ask_grants(ranges.context.clock.now())
            ranges.queue.clear_requests()
        until(lambda: memory.accepted(group, ClaimingMessages), "the grant")
        for rows_max, up_to, there in (
            (9, 1, (0, 0, 1)),
            (2, 30, (0, 1, 3)),
            (30, 30, (0, 3, 20)),
            (30, 30, (0, 20, 30)),
        ):
            batch = planner.batch(rows_max, 30.0, {TopicPartition(topic, 0): up_to})
            assert spans(batch) == [there]
            batch.commit()
        assert len(memory.accepted(group, ClaimingMessages)) == 2


def test_a_plan_ends_at_its_bound(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    memory.fill(topic, 0, 10)
    memory.fill(topic, 1, 10)
    with memory.connect() as marshal, planning(marshal, memory.group(), [topic]) as consumer:
        planner = settled(consumer)
        assert planner.ranges.ends() == {TopicPartition(topic, 0): 10, TopicPartition(topic, 1): 10}
        found = planner.ranges.plan(None, {TopicPartition(topic, 1): 7})
        assert [(one.partition, one.start, one.to) for one in found] == [(1, 0, 7)]


def test_a_member_that_joins_waits_for_its_share(cluster: TestCluster) -> None:
    """Settled means that no live member is about to hand a partition over."""
    topic = cluster.topic(4)
    group = cluster.group()
    with cluster.connect() as marshal, cluster.connect() as other, planning(marshal, group, [topic]) as first:
        settled(first)
        with planning(other, group, [topic]) as second:
            settled(second)
            assert len(second.cached_info().claims) == 2
            until(lambda: len(first.cached_info().claims) == 2, "the first has read that it gave two back")


def test_local_pauses_hold_for_planning(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    memory.fill(topic, 0, 3)
    memory.fill(topic, 1, 3)
    with memory.connect() as marshal, planning(marshal, memory.group(), [topic]) as consumer:
        planner = settled(consumer)
        consumer.pause([(topic, 0)])
        planner.batch(10).commit()
        assert positions(consumer) == {0: 0, 1: 3}
        consumer.resume([(topic, 0)])
        planner.batch(10).commit()
        assert positions(consumer) == {0: 3, 1: 3}


@pytest.mark.parametrize(
    ("counts", "rows_max", "expected"),
    [
        ({}, 5, {}),
        ({"a": 3}, 5, {"a": 3}),
        ({"a": 30, "b": 2, "c": 30}, 22, {"a": 10, "b": 2, "c": 10}),
        ({"a": 9, "b": 9}, 5, {"a": 2, "b": 3}),
        ({"a": 9, "b": 8, "c": 7}, 1, {"a": 1}),
    ],
)
def test_shares_are_even_and_what_one_lacks_others_fill(
    counts: dict[str, int], rows_max: int, expected: dict[str, int]
) -> None:
    available = {TopicPartition(name, 0): count for name, count in counts.items()}
    assert {tp.topic: count for tp, count in share(available, rows_max).items()} == expected


def test_a_tracker_takes_back_what_was_not_done() -> None:
    """D1: the position stays the lowest unfinished offset through withdrawals and merged runs."""
    tracker = AtLeastOnce(5)
    run = tracker.add(range(5, 8))
    assert tracker.withdraw(run, run.deliver(3, 0)) == 5
    assert (tracker.position(), tracker.in_flight, len(tracker.runs)) == (5, 0, 0)
    run = tracker.add(range(5, 8))
    run.finish_range(run.deliver(3, 0), 3)
    run = tracker.add(range(8, 10))  # short runs are merged
    assert tracker.withdraw(run, run.deliver(2, 0)) == 8
    assert (tracker.position(), tracker.in_flight) == (8, 0)
    fetched = tracker.add(range(8, 20))
    fetched.deliver(4, 0)
    tracker.add(range(30, 40))
    assert tracker.forget_undelivered() == 12
    assert (tracker.position(), tracker.in_flight) == (8, 4)
    fetched.finish_range(0, 4)
    assert tracker.forget_undelivered() == tracker.position() == 12


def test_what_an_earlier_owner_finished_is_planned_around(cluster: TestCluster) -> None:
    """D1: a range of offsets never holds messages that were finished before, wherever the plans begin and end."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 40)
    group = cluster.group()
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            messages = collect(consumer, 30, ack=False)
            for number in (*range(3, 10), *range(12, 20)):
                messages[number].ack()
        with planning(marshal, group, [topic]) as consumer:
            planner = settled(consumer)
            found = []
            for _ in range(12):
                with planner.batch(3, wait_s=10.0) as batch:
                    found += [offset for one in batch.ranges for offset in range(one.start, one.to)]
                    batch.commit()
                if found[-1] == 39:
                    break
            assert found == [0, 1, 2, 10, 11, *range(20, 40)]
            until(lambda: positions(consumer) == {0: 40}, "all is finished")


@pytest.mark.bounds(prefetch=5)
def test_what_an_earlier_owner_finished_is_not_fetched_again(cluster: TestCluster) -> None:
    """D1: also where the messages come in several pieces."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 60)
    group = cluster.group()
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            messages = collect(consumer, 50, ack=False)
            for number in range(1, 50):
                messages[number].ack()
        with joined(marshal, group, [topic]) as consumer:
            assert [message.offset for message in collect(consumer, 11)] == [0, *range(50, 60)]
            until(lambda: positions(consumer) == {0: 60}, "all is finished")
