"""Everything that waits for the log's answer to an ack returns if, and only if, the message does not come again.

Between the ack and the wait the claim ends in some way. A program that commits its transaction after the wait must not
book a message that is delivered again, and one that rolls back must get it again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import AckNotConfirmed, ClaimLost, ClusterError, Consumer, GroupDeleted, MarshalError, Message
from marshal_py.client.membership import HISTORY_LOST
from marshal_py.client.messages.answers import LostAcks
from marshal_py.client.planner import Planner
from marshal_py.protocol.claims import AtLeastOnce, Claim, ClaimPhase, finished_spans, log_has, spans_of
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.spark.stream.micro_batches import QueryPlanner
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S, joined, planning, until

WAITS: dict[str, Callable[[Consumer, Message], object]] = {
    "flush": lambda consumer, message: consumer.flush(DEADLINE_S),
    "double_ack": lambda consumer, message: message.double_ack(),
}


def reported(consumer: Consumer) -> None:
    """Has the log accept all that was acked. It is no wait of this file's: `info` and a heartbeat do it."""
    driver = consumer._driver
    with driver.context.outbox, driver.context.lock:
        driver.member.urgent = True
        driver.kick()
    member, position = driver.member, 1
    until(lambda: all(p.position == position for p in member.group.partitions.values()), "the log has it")  # type: ignore[union-attr]


def evicted(cluster: MemoryCluster, consumer: Consumer) -> None:
    """Its own member claims the partition again, under another epoch."""
    cluster.evict(consumer)


def accepted_and_evicted(cluster: MemoryCluster, consumer: Consumer) -> None:
    reported(consumer)
    cluster.evict(consumer)


def paused(cluster: MemoryCluster, consumer: Consumer) -> None:
    """The Release of the pause reports the ack."""
    cluster.pause("billing")
    cluster.resume("billing")


def fenced(cluster: MemoryCluster, consumer: Consumer) -> None:
    """Frozen (SIGSTOP) until another member has taken over, which then leaves again."""
    with cluster.fence(consumer):
        successor = joined(cluster.connect(), "billing", ["orders"])
        cluster.run_until(lambda: bool(successor.cached_info().claims))
    successor.stop()


def moved_back(cluster: MemoryCluster, consumer: Consumer) -> None:
    """An admin moves the position after the Release has reported the ack: what comes again is the admin's wish."""
    cluster._run(lambda: cluster.group("billing").set_position("orders", 0))


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("end", "lost"),
    [(evicted, True), (accepted_and_evicted, False), (paused, False), (fenced, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wait_returns_exactly_if_the_message_does_not_come_again(
    end: Callable[[MemoryCluster, Consumer], None], lost: bool, wait: str
) -> None:
    """ACKS: A confirmed ack raises if the claim was lost, so that a transaction can be rolled back."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        assert message.ack(), "the claim is held"
        end(cluster, consumer)
        if lost:
            with pytest.raises(ClaimLost, match="orders:0"):
                WAITS[wait](consumer, message)
        else:
            WAITS[wait](consumer, message)
        cluster.run_until(lambda: bool(consumer.cached_info().claims))
        again = consumer.next(DEADLINE_S if lost else 0)
        assert (again is not None) == lost
        if again is not None:
            again.ack()
        if lost and wait != "flush":  # it may have been another ack of the partition
            with pytest.raises(ClaimLost):
                consumer.flush()
        consumer.flush()  # told once; the new claim's ack is accepted


@pytest.mark.parametrize("wait", ["flush", "double_ack"])
def test_the_same_with_asyncio(wait: str) -> None:
    from marshal_py import aio

    async def main(cluster: MemoryCluster) -> None:
        async with (
            aio.connect(cluster.bootstrap_servers) as marshal,
            marshal.consumer("billing", ["orders"], start="earliest") as consumer,
        ):
            message = await consumer.next(DEADLINE_S)
            assert message is not None
            assert message.ack()
            await asyncio.to_thread(cluster.evict, consumer)
            with pytest.raises(ClaimLost):
                await (consumer.flush() if wait == "flush" else consumer.double_ack(message))
            again = await consumer.next(DEADLINE_S)
            assert again is not None
            assert again.ack()
            if wait == "double_ack":
                with pytest.raises(ClaimLost):
                    await consumer.flush()
            await consumer.flush()

    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        asyncio.run(main(cluster))


def test_a_handle_that_is_completed_too_late_is_told_by_the_next_flush() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        handle = message.handle()
        cluster.evict(consumer)
        assert not consumer.complete(handle)
        with pytest.raises(ClaimLost):
            consumer.flush()


def test_a_late_ack_is_told_by_the_next_flush_and_a_late_nak_is_not() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        cluster.evict(consumer)
        assert not message.nak()
        consumer.flush()
        assert not message.ack()
        with pytest.raises(ClaimLost):
            consumer.flush()
        consumer.flush()


def test_flush_confirms_what_is_acked_above_an_unfinished_message() -> None:
    """The position stays. What is finished above it must be in the log, too, or a crash delivers it again."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce_many("orders", [b"0", b"1", b"2"])
        consumer = joined(cluster.connect(), "billing", ["orders"])
        messages = list(consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S))
        assert messages[1].ack()
        consumer.flush()
        cluster.evict(consumer)
        consumer.flush()
        again = cluster.run_until(lambda: list(consumer.fetch(3, expires_s=0)))
        assert [message.offset for message in again] == [0, 2]


def test_a_position_that_an_admin_has_moved_back_is_no_loss() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        assert message.ack()
        moved_back(cluster, consumer)
        consumer.flush()
        assert message.double_ack()


def test_a_seek_of_the_user_is_no_loss_for_flush() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce_many("orders", [b"0", b"1"])
        consumer = joined(cluster.connect(), "billing", ["orders"])
        messages = list(consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S))
        assert messages[0].ack()
        consumer.seek(("orders", 0), 0)
        consumer.flush()
        with pytest.raises(ClaimLost):
            messages[0].double_ack()
        consumer.seek(("orders", 0), 2)
        assert not messages[1].ack()
        with pytest.raises(ClaimLost):
            consumer.flush()


def test_a_deleted_group_ends_every_wait() -> None:
    """The log forgets the position with the group."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        assert message.ack()
        driver = consumer._driver
        with driver.context.outbox, driver.context.lock:
            driver.give_up(GroupDeleted("billing"))
        with pytest.raises(GroupDeleted):
            consumer.flush()
        with pytest.raises(AckNotConfirmed) as caught:
            message.double_ack()
        assert caught.value.over
        assert caught.value.reason == str(GroupDeleted("billing"))


def test_if_this_process_gives_the_claim_up_nobody_knows() -> None:
    """A heartbeat that it has sent may still be accepted: a program that rolled back would lose the message."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        driver = consumer._driver
        found: list[MarshalError] = []

        def wait() -> None:
            try:
                message.double_ack(DEADLINE_S)
            except MarshalError as error:
                found.append(error)

        with cluster.outage():
            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            until(lambda: all(claim.position() == 1 for claim in driver.member.claims.values()), "the ack waits")
            with driver.context.outbox, driver.context.lock:
                driver.give_up(ClusterError("a test ends this consumer"))
                driver.context.changed.notify_all()
            thread.join(DEADLINE_S)
        [error] = found
        assert isinstance(error, AckNotConfirmed)
        assert error.over
        assert "a test ends this consumer" in error.reason


def test_a_log_that_was_truncated_leaves_it_open_once() -> None:
    """N11: the member gives its claims up, and reads the state anew."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce_many("orders", [b"0", b"1"])
        consumer = joined(cluster.connect(), "billing", ["orders"])
        message = consumer.next(DEADLINE_S)
        assert message is not None
        assert message.double_ack()
        driver = consumer._driver
        world = driver.member.world

        def lose_history() -> None:
            with driver.context.outbox, driver.context.lock:
                driver.lose_history()
                driver.regain_history(world)

        lose_history()
        consumer.flush()  # the log had all of it before
        second = cluster.run_until(lambda: consumer.next(0))
        assert second.ack()
        lose_history()
        with pytest.raises(AckNotConfirmed) as caught:
            consumer.flush()
        assert caught.value.over
        assert caught.value.reason == HISTORY_LOST
        consumer.flush()


def test_a_drain_of_a_consume_is_false_if_an_ack_is_lost_meanwhile() -> None:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce("orders", b"0")
        consumer = joined(cluster.connect(), "billing", ["orders"])
        handled, go_on = threading.Event(), threading.Event()

        def handle(message: Message[Any, Any]) -> None:
            handled.set()
            go_on.wait(DEADLINE_S)
            message.ack()

        context = consumer.consume(handle)
        assert handled.wait(DEADLINE_S)
        result: list[bool] = []
        thread = threading.Thread(target=lambda: result.append(context.drain(DEADLINE_S)), daemon=True)
        thread.start()
        until(lambda: context._demand.drain_until is not None, "it drains")
        cluster.evict(consumer)
        go_on.set()
        thread.join(DEADLINE_S)
        assert result == [False]
        assert context.error is None


def test_the_spans_of_a_claim_name_what_it_has_finished() -> None:
    tracker = AtLeastOnce(10)
    run = tracker.add([10, 11, 12, 14, 15, 19])
    run.deliver(6, 0)
    for index in (0, 2, 3, 5):
        run.finish(index)
    assert finished_spans(tracker) == [(-1, 11), (12, 13), (14, 15), (19, 20)]
    assert spans_of(range(3, 7)) == [(3, 7)]
    assert spans_of([3, 4, 6]) == [(3, 5), (6, 7)]
    assert spans_of([]) == []


def test_an_ack_below_a_finished_message_that_the_log_has_may_be_lost() -> None:
    """The log has 2 as finished above the position 0. Then 0 and 1 are acked, and the claim ends before it knows."""
    tracker = AtLeastOnce(0)
    run = tracker.add(range(3))
    run.deliver(3, 0)
    run.finish(2)
    claim, lost = Claim(TopicPartition("orders", 0), 7, 0, tracker), LostAcks()
    claim.final = tracker.position(), tracker.progress()
    assert log_has(finished_spans(tracker), claim, None)
    run.finish(0)
    run.finish(1)
    claim.seal(ClaimPhase.GONE)
    lost.ended([claim], None)
    assert lost.after(0) == {claim.tp: True}


def _planning(cluster: MemoryCluster) -> Planner:
    cluster.create_topic("orders", partitions=2)
    for partition in (0, 1):
        cluster.produce_many("orders", [b"x"] * 5, partition=partition)
    planner = planning(cluster.connect(), "billing", ["orders"])
    assert planner.ranges.settle(DEADLINE_S)
    return planner


def test_a_commit_of_planned_ranges_whose_claims_are_lost_before_the_log_has_them_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryCluster() as cluster:
        planner = _planning(cluster)
        batch = planner.batch(100)
        found: list[MarshalError] = []

        def commit() -> None:
            try:
                batch.commit()
            except MarshalError as error:
                found.append(error)

        with monkeypatch.context() as patch:
            patch.setattr(planner._driver.context.coordination, "append", lambda *_: True)
            thread = threading.Thread(target=commit, daemon=True)
            thread.start()
            claims = planner._member.claims
            until(lambda: all(claim.position() == 5 for claim in claims.values()), "the ranges are finished")
            cluster.evict(planner)
            thread.join(DEADLINE_S)
        assert [type(error) for error in found] == [ClaimLost]
        again = cluster.run_until(lambda: planner.batch(100, wait_s=0))
        assert again.offsets == batch.offsets
        again.commit()


def test_a_querys_batch_is_not_planned_again_if_its_claims_are_lost_before_the_log_has_its_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The query has committed it. This process claims the partitions again, and moves their positions then."""
    with MemoryCluster() as cluster:
        planner = _planning(cluster)
        batches, now = QueryPlanner(planner).batches, planner._driver.context.clock.now
        start = {"b": 0, "i": planner.ranges.incarnation.hex(), "s": planner._member.session, "r": {}}
        end = batches.plan(start, planner.ranges.plan(100), now())
        assert len(end["r"]) == 2
        with monkeypatch.context() as patch:
            patch.setattr(planner._driver.context.coordination, "append", lambda *_: True)
            assert batches.commit(end, now())
            cluster.evict(planner)
        cluster.run_until(lambda: len(planner.cached_info().claims) == 2)
        assert planner.ranges.plan(100), "the log has none of it"
        assert batches.commit(end, now()), "a position moves"
        planner.flush()
        assert planner.ranges.plan(100) == []
        group = planner._member.group
        assert group is not None
        assert [part.position for part in group.partitions.values()] == [5, 5]
