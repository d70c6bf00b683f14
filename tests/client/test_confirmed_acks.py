"""`double_ack` returns when the log has the ack, and raises if the claim was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import AckNotConfirmed, Batch, ClaimLost, Consumer, InvalidOption
from marshal_py.client import membership
from marshal_py.client.membership import NO_ROOM
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.records import Heartbeat
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, TestCluster, collect, joined, until


def finished_in_log(cluster: TestCluster, group: str) -> list[int]:
    """The offsets of the only partition, up to 20, that the newest accepted heartbeat with an entry names as done."""
    entries = [entry for record in cluster.accepted(group, Heartbeat) for entry in record.claims]
    position, known = (entries[-1].position, entries[-1].progress) if entries else (0, b"")
    spans = [(0, position)] + [(start, to) for start, to, times in progress.decode(position, known) if not times]
    return [offset for offset in range(20) if any(start <= offset < to for start, to in spans)]


def cut_off(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no record of this consumer reaches the log."""
    monkeypatch.setattr(consumer._driver.context.coordination, "append", lambda *_: True)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs `call` on a thread, and keeps its result or its error in the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_confirmed_ack_is_in_the_log(cluster: TestCluster) -> None:
    """ACKS: `double_ack()` returns when the position is accepted in the log."""
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 3)
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        for message in collect(consumer, 3, ack=False):
            assert message.double_ack() is True
            assert finished_in_log(cluster, group)[-1] == message.offset


def test_a_message_above_unfinished_ones_is_confirmed_by_its_range(cluster: TestCluster) -> None:
    """D1: the position stays, and the log has what is finished above it."""
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 6)
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        messages = collect(consumer, 6, ack=False)
        assert messages[4].double_ack()
        assert finished_in_log(cluster, group) == [4]
        assert messages[0].double_ack()
        assert finished_in_log(cluster, group) == [0, 4]


def test_a_part_and_a_batch_are_confirmed_as_a_whole(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 6)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        first = consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S)
        assert first.parts[0].double_ack()
        assert finished_in_log(memory, group) == [0, 1, 2]
        assert consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S).double_ack()
        assert finished_in_log(memory, group) == [0, 1, 2, 3, 4, 5]
        assert Batch([]).double_ack()


def test_an_empty_part_has_nothing_to_confirm(memory: MemoryTestCluster) -> None:
    with memory.reading(3) as consumer:
        part = consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S).parts[0]
        assert part[3:].double_ack()


def test_threads_wait_at_the_same_time(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 20)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        calls = [in_thread(message.double_ack) for message in collect(consumer, 20, ack=False)]
        for thread, found in calls:
            thread.join(DEADLINE_S)
            assert found == [True]
        assert finished_in_log(memory, group) == [*range(20)]


def test_an_ack_that_comes_too_late_raises(cluster: TestCluster) -> None:
    """It raises if the claim was lost, so that a transaction can be rolled back.

    ACKS: A confirmed ack raises if the claim was lost, so that a transaction can be rolled back.
    """
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 2)
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        batch = consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)
        consumer.stop()
        for call in (batch.double_ack, batch.parts[0].double_ack):
            with pytest.raises(ClaimLost, match=f"{topic}:0"):
                call()
        with pytest.raises(ClaimLost, match="roll back"):
            next(iter(batch)).double_ack()


def test_an_ack_that_came_too_late_stays_too_late(memory: MemoryTestCluster) -> None:
    """A handler's timer may call `in_progress` after the claim is over: that must not note late acks as in time.

    ACKS: A confirmed ack raises if the claim was lost, so that a transaction can be rolled back.
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        batch = consumer.fetch(2, expires_s=DEADLINE_S, min_messages=2)
        consumer.stop()
        for answered in (list(batch)[1], batch.parts[0][1:]):
            assert not answered.ack()
            answered.in_progress()
            assert not answered.ack()
            with pytest.raises(ClaimLost):
                answered.double_ack()
        with joined(marshal, group, [topic]) as successor:
            assert [message.offset for message in collect(successor, 2)] == [0, 1]


def test_a_claim_that_is_lost_while_the_call_waits_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACKS: A confirmed ack raises if the claim was lost, so that a transaction can be rolled back."""
    with MemoryCluster() as broker:
        broker.create_topic("orders")
        broker.produce("orders", b"1")
        consumer = joined(broker.connect(), "billing", ["orders"])
        message = collect(consumer, 1, ack=False)[0]
        cut_off(consumer, monkeypatch)
        thread, found = in_thread(lambda: message.double_ack(DEADLINE_S))
        until(lambda: _acked(consumer), "the ack is waiting for the log")
        broker.evict(consumer)
        thread.join(DEADLINE_S)
        assert [type(error) for error in found] == [ClaimLost]


def test_a_plain_ack_is_not_late_before_the_process_has_read_that_its_claim_is_lost() -> None:
    """A process that was frozen learns of the take-over from the log; a confirmed ack waits for that.

    ACKS: A confirmed ack raises if the claim was lost, so that a transaction can be rolled back.
    """
    with MemoryCluster() as broker:
        broker.create_topic("orders")
        broker.produce("orders", b"1")
        frozen = joined(broker.connect(), "billing", ["orders"])
        message = collect(frozen, 1, ack=False)[0]
        successor = joined(broker.connect(), "billing", ["orders"])
        with broker.fence(frozen):  # it reads and writes nothing, as while it is frozen
            assert broker.run_until(lambda: successor.next(0)).token > message.token
            assert message.ack()
        with pytest.raises(ClaimLost):
            message.double_ack()
        assert message.ack(), "it was acked before"


def _acked(consumer: Consumer) -> bool:
    return all(claim.position() == 1 for claim in consumer._member.claims.values())


def test_of_a_batch_the_held_claims_are_confirmed_and_the_lost_ones_named(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(2), memory.group()
    memory.fill(topic, 0, 1)
    memory.fill(topic, 1, 1)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        until(lambda: len(consumer.cached_info().claims) == 2, "both partitions are claimed")
        batch = consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)
        assert len(batch) == 2
        driver, lost = consumer._driver, batch.parts[1].topic_partition
        with driver.context.lock:
            claim = next(one for one in driver.member.claims.values() if one.tp == lost)
            driver.member.lose(claim, "a test", at=0)
            driver.advance()
        with pytest.raises(ClaimLost) as caught:
            batch.double_ack()
        assert caught.value.lost == (str(lost),)
        kept = batch.parts[0].topic_partition
        positions = {e.epoch: e.position for r in memory.accepted(group, Heartbeat) for e in r.claims}
        assert positions[batch.parts[0].token.epoch] == 1, f"{kept} is confirmed"


def test_an_accepted_release_confirms_an_ack(memory: MemoryTestCluster) -> None:
    """The Release carries the position and what is finished above it (F6.2)."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        messages = collect(consumer, 3, ack=False)
        acked = [one._delivered.acked(one._index, one._index + 1, one.ack()) for one in (messages[0], messages[2])]
        consumer.stop()
        messages[0]._delivered.context.confirm(lambda: acked, DEADLINE_S)


def test_an_ack_that_the_log_does_not_accept_in_time_says_why(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        message = collect(consumer, 2, ack=False)[0]
        with monkeypatch.context() as patch:
            cut_off(consumer, patch)
            with pytest.raises(AckNotConfirmed, match=f"{topic}:0@0 within 0.2 s") as caught:
                message.double_ack(0.2)
            assert caught.value.retriable
            assert "do not roll back on this: call again" in str(caught.value)
            assert "guard (marshal_py.sql)" in str(caught.value)
        assert message.double_ack(), "the second call waits again"
        consumer.stop()


def test_the_reason_is_the_time_until_a_heartbeat_has_come_back(memory: MemoryTestCluster) -> None:
    """With messages that are not done below it, the log may have no room, but nobody knows that yet."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 20)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        with pytest.raises(AckNotConfirmed) as caught:
            collect(consumer, 20, ack=False)[-1].double_ack(0)
        assert caught.value.reason == "no answer in time"


def test_an_ack_for_which_the_log_has_no_room_says_so(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        message = collect(consumer, 2, ack=False)[1]
        monkeypatch.setattr(membership, "log_has", lambda *_: False)
        sent = consumer._member.liveness.last_sent
        thread, found = in_thread(lambda: message.double_ack(1.0))
        until(lambda: consumer._member.liveness.last_sent is not sent, "a heartbeat is sent")
        thread.join(DEADLINE_S)
        assert [error.reason for error in found] == [NO_ROOM]


def test_what_was_confirmed_never_comes_again(memory: MemoryTestCluster) -> None:
    """Also if lower messages are confirmed later, until the log has no room (D1)."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 500)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        confirmed = set()
        for message in reversed(collect(consumer, 500, ack=False)[1::2]):
            try:
                confirmed.add(message.offset * message.double_ack(0.5))
            except AckNotConfirmed:
                break
        assert len(confirmed) > 100
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        again = {message.offset for message in collect(consumer, 250)}
    assert not again & confirmed


@pytest.mark.parametrize("wrong", [-1, -0.001, float("nan"), "x", None, True])
def test_a_wrong_timeout_is_refused_before_anything_is_acked(memory: MemoryTestCluster, wrong: Any) -> None:
    with memory.reading(1) as consumer:
        batch = consumer.fetch(1, expires_s=DEADLINE_S)
        one, handle = batch[0], batch[0].handle()
        for call in (
            one.double_ack,
            batch.parts[0].double_ack,
            batch.double_ack,
            lambda timeout_s: consumer.message(handle).double_ack(timeout_s),
        ):
            with pytest.raises(InvalidOption, match="timeout_s"):
                call(wrong)
        assert consumer.cached_info().in_flight == 1
        assert batch.double_ack(float("inf"))


def test_in_at_most_once_mode_a_confirmed_ack_waits_for_nothing(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic], delivery="at_most_once")
        batch = consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)
        assert batch.double_ack()
        consumer.stop()
        with pytest.raises(ClaimLost):
            batch.double_ack()
