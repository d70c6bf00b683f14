"""How consumers end: stop, drain, signals, interpreter exit, SIGKILL, SIGSTOP; and how they share partitions."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from marshal_py import ClaimInfo, TopicPartition
from marshal_py.errors import ConsumerClosed, DuplicateClientId
from marshal_py.protocol.records import ClaimingPartition, Evict, Join, Leave, ReleasingPartition, StepDown
from tests.support.client_fixtures import (
    BackgroundConsumer,
    ConsumerProcess,
    EmbeddedGround,
    MemoryGround,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)


def test_stop_releases_at_the_positions_and_leaves(ground: TestCluster) -> None:
    topic = ground.topic(2)
    group = ground.group()
    ground.fill(topic, 0, 3)
    ground.fill(topic, 1, 3)
    with ground.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        messages = collect(consumer, 6, ack=False)
        next(m for m in messages if m.partition == 0).ack()
        consumer.stop()
        assert sorted(r.position for r in ground.accepted(group, ReleasingPartition)) == [0, 1]
        assert [leave.reason for leave in ground.accepted(group, Leave)] == ["stopped"]
        assert ground.accepted(group, Evict) == []


def test_close_of_the_marshal_stops_its_consumers(ground: TestCluster) -> None:
    topic = ground.topic()
    groups = [ground.group(), ground.group()]
    with ground.connect() as marshal:
        consumers = [joined(marshal, group, [topic]) for group in groups]
    assert [consumer.closed for consumer in consumers] == [True, True]
    assert [len(ground.accepted(group, Leave)) for group in groups] == [1, 1]


def test_stop_inside_the_iteration_ends_it(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 5)
    with ground.connect() as marshal:
        consumer = joined(marshal, ground.group(), [topic])
        seen = []
        for message in consumer:
            seen.append(message.offset)
            message.ack()
            if len(seen) == 2:
                consumer.stop()
        assert seen == [0, 1]
        assert consumer.closed


def test_drain_inside_the_iteration_hands_over_what_is_buffered(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 10)
    group = ground.group()
    with ground.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        first = collect(consumer, 1)
        buffered = consumer._driver.queue.deliverable()
        seen = []
        for message in consumer:
            if not seen:
                buffered = consumer._driver.queue.deliverable() + 1
                consumer.drain()
            seen.append(message.offset)
            message.ack()
        assert seen == list(range(1, 1 + buffered))
        assert consumer.closed
        assert [r.position for r in ground.accepted(group, ReleasingPartition)] == [len(first) + buffered]
        with pytest.raises(ConsumerClosed, match="drained"):
            consumer.fetch()


def test_drain_outside_waits_for_the_acks(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 3)
    group = ground.group()
    with ground.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        batch = consumer.fetch(3, expires_s=30)
        threading.Timer(0.2, batch.ack).start()
        consumer.drain()
        assert consumer.closed
        assert [r.position for r in ground.accepted(group, ReleasingPartition)] == [3]
        assert [leave.reason for leave in ground.accepted(group, Leave)] == ["drained"]


def test_drain_waits_no_longer_than_told(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 3)
    group = ground.group()
    with ground.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        messages = collect(consumer, 3, ack=False)
        messages[0].ack()
        consumer.drain(timeout_s=0.2)
        assert [r.position for r in ground.accepted(group, ReleasingPartition)] == [1]


# --- sharing


def test_two_consumers_of_one_marshal_share(ground: TestCluster) -> None:
    topic = ground.topic(4)
    group = ground.group()
    with ground.connect() as marshal, joined(marshal, group, [topic]) as one, joined(marshal, group, [topic]) as two:
        until(lambda: len(one.claims()) == len(two.claims()) == 2, "two partitions each")
        assert one.claims().keys().isdisjoint(two.claims())


def test_two_marshals_share_and_the_first_takes_back(ground: TestCluster) -> None:
    topic = ground.topic(4)
    group = ground.group()
    with ground.connect() as marshal, ground.connect() as other, joined(marshal, group, [topic]) as one:
        until(owns(one, 0, 1, 2, 3), "all partitions")
        two = joined(other, group, [topic])
        until(lambda: len(one.claims()) == len(two.claims()) == 2, "two partitions each")
        two.stop()
        until(owns(one, 0, 1, 2, 3), "all partitions again")
        assert ground.accepted(group, Evict) == []


def test_a_requested_stop_hands_over_before_it_ends(ground: TestCluster) -> None:
    topic = ground.topic(4)
    group = ground.group()
    with ground.connect("a") as first, ground.connect("b") as second:
        staying = joined(first, group, [topic])
        keeper = BackgroundConsumer(staying)
        with joined(second, group, [topic]) as leaving:
            until(lambda: len(leaving.claims()) == 2, "its share")
            for partition in range(4):
                ground.fill(topic, partition, 3)
            leaving.request_stop()
            for message in leaving:
                message.ack()
            assert leaving.claims() == {}, "all was taken over before it left"
        until(owns(staying, 0, 1, 2, 3), "the rest")
        assert [r.successor for r in ground.accepted(group, ReleasingPartition) if r.reason == "hand-over"]
        assert len(ground.accepted(group, StepDown)) == 1
        keeper.stop()
        staying.request_stop()
        assert staying.stopping, "it is alone now"
        staying.stop()
    assert len(ground.accepted(group, StepDown)) == 1


def test_a_second_request_to_stop_ends_at_once(ground: TestCluster) -> None:
    topic = ground.topic(2)
    group = ground.group()
    with ground.connect("a") as first, ground.connect("b") as second:
        stuck, leaving = joined(first, group, [topic]), joined(second, group, [topic])
        until(lambda: len(leaving.claims()) == 1, "its share")
        leaving.request_stop(hand_over_s=3600)
        leaving.request_stop()
        assert list(leaving) == []
        assert leaving.stopping
        leaving.stop()
        stuck.stop()
    assert ground.accepted(group, StepDown) == []


def test_max_claims_leaves_the_rest_to_others(ground: TestCluster) -> None:
    topic = ground.topic(3)
    group = ground.group()
    with ground.connect() as marshal, joined(marshal, group, [topic], max_claims=1) as one:
        until(lambda: len(one.claims()) == 1, "one partition")
        with joined(marshal, group, [topic]) as two:
            until(lambda: len(two.claims()) == 2, "the other two")
            assert len(one.claims()) == 1


def test_members_of_different_topics_do_not_mix(ground: TestCluster) -> None:
    one_topic, two_topic = ground.topic(), ground.topic()
    group = ground.group()
    with (
        ground.connect() as marshal,
        joined(marshal, group, [one_topic]) as one,
        joined(marshal, group, [two_topic]) as two,
    ):
        until(lambda: {tp.topic for tp in one.claims()} == {one_topic}, "its own topic")
        until(lambda: {tp.topic for tp in two.claims()} == {two_topic}, "its own topic")


# --- callbacks


def test_callbacks_tell_what_came_and_why_it_went(ground: TestCluster) -> None:
    topic = ground.topic(2)
    group = ground.group()
    told: list[tuple[str, int, str]] = []

    def on_claim(claim: ClaimInfo) -> None:
        told.append(("claim", claim.partition, ""))

    def on_lost(claim: ClaimInfo, reason: str) -> None:
        told.append(("lost", claim.partition, reason))

    with ground.connect() as marshal:
        one = joined(marshal, group, [topic], on_claim=on_claim, on_lost=on_lost)
        until(lambda: sorted(told) == [("claim", 0, ""), ("claim", 1, "")], "both claims are told")
        with joined(marshal, group, [topic]) as two:
            until(lambda: len(one.claims()) == len(two.claims()) == 1, "one partition each")
            until(lambda: [reason for kind, _, reason in told if kind == "lost"] == ["hand-over"], "the hand-over")
            one.stop()
            until(lambda: told[-1][2] == "stopped", "the stop")


def test_a_busy_batch_is_told_that_its_partition_is_to_go(ground: TestCluster) -> None:
    """The joiner does not wait for `handler_timeout_s`: the handler acks what it has done, and the partition goes."""
    topic, group = ground.topic(2), ground.group()
    for partition in (0, 1):
        ground.fill(topic, partition, 10)
    told: list[ClaimInfo] = []
    with (
        ground.connect("a") as marshal,
        ground.connect("b") as other,
        joined(marshal, group, [topic], on_revoking=told.append) as one,
    ):
        until(owns(one, 0, 1), "both are its own")
        batch = collect(one, 20, ack=False)
        assert not any(message.revoking for message in batch)
        assert {claim.revoking for claim in one.claims().values()} == {""}
        with joined(other, group, [topic]) as two:
            (going,) = until(lambda: list(told), "it is told")
            assert (going.revoking, going.drain_s > 0) == ("hand-over", True)
            assert one.claims()[TopicPartition(topic, going.partition)].revoking == "hand-over"
            events = [event for event in one.events() if event.kind == "revoking"]
            assert [(event.partition, event.text) for event in events] == [(going.partition, "hand-over")]
            assert not two.claims()
            for message in batch:
                assert message.revoking == (message.partition == going.partition)
                assert message.ack()
            until(owns(two, going.partition), "it goes as soon as its handlers are done")
            assert positions(two) == {going.partition: 10}
            assert len(told) == 1


def test_a_handler_that_hears_nothing_loses_its_partition_when_its_time_is_over(ground: TestCluster) -> None:
    """A3: what it holds comes again, what it has acked does not."""
    topic, group = ground.topic(2), ground.group()
    for partition in (0, 1):
        ground.fill(topic, partition, 4)
    with (
        ground.connect("a") as marshal,
        ground.connect("b") as other,
        joined(marshal, group, [topic], hand_over_timeout_s=0.5) as one,
    ):
        until(owns(one, 0, 1), "both are its own")
        batch = collect(one, 8, ack=False)
        assert all([message.ack() for message in batch if message.offset in (0, 2)])
        with joined(other, group, [topic]) as two:
            until(lambda: len(two.claims()) == 1, "it comes although the handler hangs")
            (moved,) = two.claims()
            assert places(collect(two, 2)) == [(moved.partition, 1), (moved.partition, 3)]
            late = [message for message in batch if (message.partition, message.offset) == (moved.partition, 1)]
            assert [message.ack() for message in late] == [False]


def test_a_callback_that_raises_harms_nobody(ground: TestCluster) -> None:
    topic = ground.topic()
    ground.fill(topic, 0, 2)

    def fail(*_: object) -> None:
        raise RuntimeError("a callback of the user")

    with ground.connect() as marshal:
        with joined(marshal, ground.group(), [topic], on_claim=fail, on_lost=fail) as consumer:
            assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
        with joined(marshal, ground.group(), [topic]) as consumer:
            assert len(collect(consumer, 2)) == 2


def test_a_callback_may_look_at_the_consumer(ground: TestCluster) -> None:
    topic = ground.topic()
    seen: list[dict[int, int]] = []
    with ground.connect() as marshal:
        holder: list[object] = []
        consumer = joined(marshal, ground.group(), [topic], on_claim=lambda claim: holder.append(claim))
        until(lambda: holder, "the callback")
        seen.append(positions(consumer))
        consumer.stop()
    assert seen == [{0: 0}]


# --- client ids


def test_fast_reclaim_takes_the_place_of_the_same_client(memory: MemoryGround) -> None:
    """The caller vouches that the former process is dead; where it is not, it is told and does not fight back."""
    topic = memory.topic()
    group = memory.group()
    with memory.connect("same") as marshal, memory.connect("same") as other:
        one = joined(marshal, group, [topic])
        until(owns(one, 0), "the partition is ours")
        with joined(other, group, [topic], fast_reclaim=True) as two:
            until(owns(two, 0), "the heir has it at once")
            with pytest.raises(DuplicateClientId):
                until(lambda: one.fetch(1, expires_s=0.05), "an error")
            with pytest.raises(ConsumerClosed):
                one.fetch()
        assert memory.accepted(group, Evict) == []


# --- processes


def test_sigterm_releases_at_once(embedded: EmbeddedGround) -> None:
    """The heir owns everything by Releases and a Leave: nobody waited anybody out."""
    topic = embedded.topic(2)
    group = embedded.group()
    embedded.fill(topic, 0, 3)
    with ConsumerProcess(embedded.target, group, topic) as hand, embedded.connect() as marshal:
        hand.wait_for("message", 3)
        hand.wait_for("claim", 2)
        hand.signal(signal.SIGTERM)
        assert hand.wait() == 0
        assert hand.said("stopped")
        assert {(e["partition"], e["reason"]) for e in hand.said("lost")} == {(0, "stopped"), (1, "stopped")}
        with joined(marshal, group, [topic]) as successor:
            until(owns(successor, 0, 1), "the heir has both")
            assert embedded.accepted(group, Evict) == []
            assert [leave.reason for leave in embedded.accepted(group, Leave)] == ["stopped"]
            embedded.fill(topic, 0, 1, first=3)
            assert places(collect(successor, 1)) == [(0, 3)]


def test_an_interpreter_that_ends_without_stop_releases(embedded: EmbeddedGround) -> None:
    topic = embedded.topic()
    group = embedded.group()
    embedded.fill(topic, 0, 5)
    with ConsumerProcess(embedded.target, group, topic, "--exit-after", "3") as hand:
        assert hand.wait() == 0
        assert len(hand.said("message")) == 3
    assert [r.position for r in embedded.accepted(group, ReleasingPartition)] == [3]
    assert len(embedded.accepted(group, Leave)) == 1


def test_a_killed_process_is_waited_out_and_its_unacked_come_again(embedded: EmbeddedGround) -> None:
    topic = embedded.topic()
    group = embedded.group()
    embedded.fill(topic, 0, 5)
    with ConsumerProcess(embedded.target, group, topic, "--hold") as hand, embedded.connect() as marshal:
        hand.wait_for("message", 5)
        hand.signal(signal.SIGKILL)
        hand.wait()
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 5)) == [(0, i) for i in range(5)]
    assert len(embedded.accepted(group, Evict)) == 1
    assert len(embedded.accepted(group, Leave)) == 1


def test_a_process_that_sleeps_past_its_lease_delivers_nothing_old_and_comes_back(embedded: EmbeddedGround) -> None:
    """SIGSTOP, eviction, SIGCONT: no delivery under the old token after the heir's first; then it joins again."""
    topic = embedded.topic()
    group = embedded.group()
    with ConsumerProcess(embedded.target, group, topic) as hand, embedded.connect() as marshal:
        embedded.fill(topic, 0, 1)
        old = hand.wait_for("message")[0]["epoch"]
        first_session = hand.wait_for("joined")[0]["session"]
        hand.signal(signal.SIGSTOP)
        successor = joined(marshal, group, [topic])
        embedded.fill(topic, 0, 20, first=1)
        mine = collect(successor, 20)
        assert mine[0].token.epoch > old
        hand.signal(signal.SIGCONT)
        until(lambda: len(embedded.accepted(group, Join)) == 3, "it joins again by itself")
        assert hand.wait_for("lost")[0]["reason"] == "session ended"
        with BackgroundConsumer(successor):
            embedded.fill(topic, 0, 5, first=21)
        successor.stop()
        embedded.fill(topic, 0, 3, first=26)
        until(lambda: [m for m in hand.said("message") if m["offset"] == 28], "it delivers again")
        late = [m for m in hand.said("message")[1:] if m["epoch"] == old]
        assert late == [], "nothing under the old token"
        claims = [v for v in embedded.verdicts(group) if isinstance(v.record, ClaimingPartition) and v.accepted]
        sessions = [v.record.session for v in claims if isinstance(v.record, ClaimingPartition)]
        assert sessions[0] == first_session
        assert len(set(sessions)) == 3


def test_many_starts_and_stops_leave_nobody_behind(memory: MemoryGround) -> None:
    topic = memory.topic(2)
    group = memory.group()
    with contextlib.ExitStack() as stack:
        marshal = stack.enter_context(memory.connect())
        for _ in range(10):
            with joined(marshal, group, [topic]) as consumer:
                until(owns(consumer, 0, 1), "both partitions")
        world = marshal._loop.worlds[consumer._driver.log]
        assert world.groups[group].sessions == {}
        assert marshal._loop.drivers == []
        assert memory.accepted(group, Evict) == []
