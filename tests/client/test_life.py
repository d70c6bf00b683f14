"""How consumers end: stop, drain, signals, interpreter exit, SIGKILL, SIGSTOP; and how they share partitions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import TopicPartition, aio
from marshal_py.errors import ConsumerClosed, DuplicateClientId, InvalidOption, TopicRecreated
from marshal_py.info import ClaimInfo
from marshal_py.protocol.wire.records import ClaimingPartition, Evict, Join, Leave, ReleasingPartition, StepDown
from marshal_py.transport.memory import MemorySource
from tests.support.client_fixtures import (
    DEADLINE_S,
    BackgroundConsumer,
    ConsumerProcess,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)


def test_stop_releases_at_the_positions_and_leaves(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    group = cluster.group()
    cluster.fill(topic, 0, 3)
    cluster.fill(topic, 1, 3)
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        messages = collect(consumer, 6, ack=False)
        next(m for m in messages if m.partition == 0).ack()
        consumer.stop()
        assert sorted(r.position for r in cluster.accepted(group, ReleasingPartition)) == [0, 1]
        assert [leave.reason for leave in cluster.accepted(group, Leave)] == ["stopped"]
        assert cluster.accepted(group, Evict) == []


def test_the_log_names_the_error_that_ended_a_program(memory: MemoryTestCluster) -> None:
    """Its class alone: the text may hold anything."""
    topic, group = memory.topic(1), memory.group()
    with memory.connect() as marshal:
        for error in (ValueError("a secret"), KeyboardInterrupt(), None):
            with contextlib.suppress(ValueError, KeyboardInterrupt), joined(marshal, group, [topic]):
                if error is not None:
                    raise error

    async def ends_with_an_error() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer(group, [topic]) as consumer:
            await consumer.info()
            raise KeyError("a secret")

    with contextlib.suppress(KeyError):
        asyncio.run(ends_with_an_error())
    reasons = [leave.reason for leave in memory.accepted(group, Leave)]
    assert reasons == ["stopped: ValueError", "stopped", "stopped", "stopped: KeyError"]


@pytest.mark.parametrize("answers", [True, False], ids=["the cluster answers", "it does not"])
def test_a_consumer_that_leaves_says_how_many_messages_were_not_acked(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)

    def said() -> list[object]:
        return [
            record.args[-1] for record in caplog.records if isinstance(record.args, tuple) and "has left" in record.msg
        ]

    with caplog.at_level("INFO", "marshal_py"), memory.connect() as marshal:
        first = joined(marshal, group, [topic])
        collect(first, 3, ack=False)[0].ack()
        memory.broker.queue_full = not answers
        first.stop(DEADLINE_S if answers else 0.0)
        memory.broker.queue_full = False
        assert said() == [2]
        first.stop()
        second = joined(marshal, memory.group(), [topic])
        collect(second, 3)
        second.stop()
        assert said() == [2], "everything was acked"


def test_close_of_the_marshal_stops_its_consumers(cluster: TestCluster) -> None:
    topic = cluster.topic()
    groups = [cluster.group(), cluster.group()]
    with cluster.connect() as marshal:
        consumers = [joined(marshal, group, [topic]) for group in groups]
    assert [consumer.cached_info().closed for consumer in consumers] == [True, True]
    assert [len(cluster.accepted(group, Leave)) for group in groups] == [1, 1]


def test_close_of_the_marshal_waits_for_the_polls_of_all_at_the_same_time(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll without partitions ends by itself. So no source is closed before all consumers have left."""
    topic, groups, left, close = memory.topic(1), [memory.group() for _ in range(3)], [], MemorySource.close

    def note(source: MemorySource) -> None:
        left.append([len(memory.accepted(group, Leave)) for group in groups])
        close(source)

    with memory.connect() as marshal:
        consumers = [joined(marshal, group, [topic]) for group in groups]
        monkeypatch.setattr(MemorySource, "close", note)
    assert left == [[1, 1, 1]] * len(consumers)


def test_two_threads_may_close_a_marshal(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for the first, at most as long as it was told."""
    marshal = memory.connect()
    consumer = joined(marshal, memory.group(), [memory.topic()])
    inside, entered, released = [], threading.Event(), threading.Event()
    plainly = marshal._loop.close

    def close(flush_s: float) -> None:
        inside.append(flush_s)
        entered.set()
        assert released.wait(DEADLINE_S)
        plainly(flush_s)

    monkeypatch.setattr(marshal._loop, "close", close)
    threads = [threading.Thread(target=marshal.close), threading.Thread(target=marshal.close)]
    threads[0].start()
    assert entered.wait(DEADLINE_S)
    threads[1].start()
    marshal.close(0.0)
    assert len(inside) == 1
    released.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert (len(inside), marshal._done, consumer.cached_info().closed) == (1, True, True)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "10", None, True])
def test_a_close_that_cannot_be_ends_nothing(memory: MemoryTestCluster, timeout_s: Any) -> None:
    """It raises before anything is stopped; without an end in sight, it closes."""

    async def close() -> None:
        async with await aio.connect(memory.target) as marshal:
            with pytest.raises(InvalidOption, match="timeout_s"):
                await marshal.close(timeout_s)
            assert await marshal.topics() == (topic,)

    topic = memory.topic()
    marshal = memory.connect()
    consumer = joined(marshal, memory.group(), [topic])
    with pytest.raises(InvalidOption, match="timeout_s"):
        marshal.close(timeout_s)
    assert not consumer.cached_info().closed
    marshal.close(float("inf"))
    assert (marshal._done, consumer.cached_info().closed) == (True, True)
    asyncio.run(close())


@pytest.mark.parametrize("where", ["before it reads the log", "before it joins", "after it has joined"])
def test_a_consumer_that_joins_while_its_marshal_is_closed(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It does not wait in vain, and leaves neither a thread nor a session."""
    topic, group = memory.topic(), memory.group()
    arrived, close = threading.Event(), threading.Event()

    def held(call: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def waits(*arguments: Any, **named: Any) -> Any:
            result = None if before else call(*arguments, **named)
            arrived.set()
            assert close.wait(DEADLINE_S)
            return call(*arguments, **named) if before else result

        return waits

    raised: list[BaseException] = []

    def join() -> None:
        try:
            marshal.consumer(group, [topic])
        except ConsumerClosed as error:
            raised.append(error)

    marshal = memory.connect()
    threads = threading.active_count()
    if where == "before it reads the log":
        monkeypatch.setattr(marshal._loop, "open_world", held(marshal._loop.open_world, before=True))
    elif where == "before it joins":
        monkeypatch.setattr(marshal._joining, "_drive", held(marshal._joining._drive, before=False))
    else:
        monkeypatch.setattr(marshal._joining, "_await_join", held(marshal._joining._await_join, before=True))
    joining = threading.Thread(target=join)
    joining.start()
    assert arrived.wait(DEADLINE_S)
    marshal.close()
    close.set()
    joining.join(DEADLINE_S)
    assert len(raised) == 1, "ConsumerClosed"
    until(lambda: threading.active_count() < threads, "its threads have ended")
    found = memory.world(group).groups.get(group)
    assert found is None or not found.sessions


def test_stop_inside_the_iteration_ends_it(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 5)
    with cluster.connect() as marshal:
        consumer = joined(marshal, cluster.group(), [topic])
        seen = []
        for message in consumer:
            seen.append(message.offset)
            message.ack()
            if len(seen) == 2:
                consumer.stop()
        assert seen == [0, 1]
        assert consumer.cached_info().closed


def test_drain_inside_the_iteration_delivers_what_is_buffered(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 10)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        first, queue = collect(consumer, 1), consumer._queue
        buffered = queue.deliverable(queue.clock_now())
        seen = []
        for message in consumer:
            if not seen:
                buffered = queue.deliverable(queue.clock_now()) + 1
                consumer.drain()
            seen.append(message.offset)
            message.ack()
        assert seen == list(range(1, 1 + buffered))
        assert consumer.cached_info().closed
        assert [r.position for r in cluster.accepted(group, ReleasingPartition)] == [len(first) + buffered]
        with pytest.raises(ConsumerClosed, match="drained"):
            consumer.fetch()


def test_an_error_that_ends_a_consumer_is_raised_by_the_loop_that_drains(memory: MemoryTestCluster) -> None:
    """A program that drains at SIGTERM would else end as if all were well."""
    topic, handled = memory.topic(), list[int]()
    memory.fill(topic, 0, 20)
    with memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic])

        def work() -> None:
            for message in consumer:
                handled.append(message.offset)
                if len(handled) == 3:
                    consumer.drain(DEADLINE_S)
                    log = consumer._driver.log
                    marshal._loop.break_log(log, TopicRecreated(log, "offset 5", "no topic"))
                message.ack()

        with pytest.raises(TopicRecreated):
            work()
    assert handled == [0, 1, 2]


def test_drain_outside_waits_for_the_acks(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        batch = consumer.fetch(3, min_messages=3, expires_s=30)
        threading.Timer(0.2, batch.ack).start()
        consumer.drain()
        assert consumer.cached_info().closed
        assert [r.position for r in cluster.accepted(group, ReleasingPartition)] == [3]
        assert [leave.reason for leave in cluster.accepted(group, Leave)] == ["drained"]


def test_drain_waits_no_longer_than_its_timeout(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        messages = collect(consumer, 3, ack=False)
        messages[0].ack()
        consumer.drain(timeout_s=0.2)
        assert [r.position for r in cluster.accepted(group, ReleasingPartition)] == [1]


# --- sharing


def test_two_consumers_of_one_marshal_share(cluster: TestCluster) -> None:
    topic = cluster.topic(4)
    group = cluster.group()
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as one, joined(marshal, group, [topic]) as two:
        until(lambda: len(one.cached_info().claims) == len(two.cached_info().claims) == 2, "two partitions each")
        assert one.cached_info().claims.keys().isdisjoint(two.cached_info().claims)


def test_two_marshals_share_and_the_first_takes_back(cluster: TestCluster) -> None:
    topic = cluster.topic(4)
    group = cluster.group()
    with cluster.connect() as marshal, cluster.connect() as other, joined(marshal, group, [topic]) as one:
        until(owns(one, 0, 1, 2, 3), "all partitions")
        two = joined(other, group, [topic])
        until(lambda: len(one.cached_info().claims) == len(two.cached_info().claims) == 2, "two partitions each")
        two.stop()
        until(owns(one, 0, 1, 2, 3), "all partitions again")
        assert cluster.accepted(group, Evict) == []


def test_a_requested_stop_hands_over_before_it_ends(cluster: TestCluster) -> None:
    topic = cluster.topic(4)
    group = cluster.group()
    with cluster.connect("a") as first, cluster.connect("b") as second:
        staying = joined(first, group, [topic])
        background = BackgroundConsumer(staying)
        with joined(second, group, [topic]) as leaving:
            until(lambda: len(leaving.cached_info().claims) == 2, "its share")
            for partition in range(4):
                cluster.fill(topic, partition, 3)
            leaving._ending.request_stop()
            for message in leaving:
                message.ack()
            assert leaving.cached_info().claims == {}, "all was taken over before it left"
        until(owns(staying, 0, 1, 2, 3), "the rest")
        assert [r.successor for r in cluster.accepted(group, ReleasingPartition) if r.reason == "hand-over"]
        assert len(cluster.accepted(group, StepDown)) == 1
        background.stop()
        staying._ending.request_stop()
        assert staying._ending.stopping, "it is alone now"
        staying.stop()
    assert len(cluster.accepted(group, StepDown)) == 1


def test_a_second_request_to_stop_ends_at_once(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    group = cluster.group()
    with cluster.connect("a") as first, cluster.connect("b") as second:
        stuck, leaving = joined(first, group, [topic]), joined(second, group, [topic])
        until(lambda: len(leaving.cached_info().claims) == 1, "its share")
        leaving._ending.request_stop(hand_over_s=3600)
        leaving._ending.request_stop()
        assert list(leaving) == []
        assert leaving._ending.stopping
        leaving.stop()
        stuck.stop()
    assert cluster.accepted(group, StepDown) == []


def test_max_claims_leaves_the_rest_to_others(cluster: TestCluster) -> None:
    topic = cluster.topic(3)
    group = cluster.group()
    with cluster.connect() as marshal, joined(marshal, group, [topic], max_claims=1) as one:
        until(lambda: len(one.cached_info().claims) == 1, "one partition")
        with joined(marshal, group, [topic]) as two:
            until(lambda: len(two.cached_info().claims) == 2, "the other two")
            assert len(one.cached_info().claims) == 1


def test_members_of_different_topics_do_not_mix(cluster: TestCluster) -> None:
    one_topic, two_topic = cluster.topic(), cluster.topic()
    group = cluster.group()
    with (
        cluster.connect() as marshal,
        joined(marshal, group, [one_topic]) as one,
        joined(marshal, group, [two_topic]) as two,
    ):
        until(lambda: {tp.topic for tp in one.cached_info().claims} == {one_topic}, "its own topic")
        until(lambda: {tp.topic for tp in two.cached_info().claims} == {two_topic}, "its own topic")


# --- callbacks


def test_callbacks_report_claims_and_why_they_end(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    group = cluster.group()
    reported: list[tuple[str, int, str]] = []

    def on_claim(claim: ClaimInfo) -> None:
        reported.append(("claim", claim.partition, ""))

    def on_lost(claim: ClaimInfo, reason: str) -> None:
        reported.append(("lost", claim.partition, reason))

    with cluster.connect() as marshal:
        one = joined(marshal, group, [topic], on_claim=on_claim, on_lost=on_lost)
        until(lambda: sorted(reported) == [("claim", 0, ""), ("claim", 1, "")], "both claims are reported")
        with joined(marshal, group, [topic]) as two:
            until(lambda: len(one.cached_info().claims) == len(two.cached_info().claims) == 1, "one partition each")
            until(lambda: [reason for kind, _, reason in reported if kind == "lost"] == ["hand-over"], "the hand-over")
            one.stop()
            until(lambda: reported[-1][2] == "stopped", "the stop")


def test_a_busy_batch_learns_that_its_partition_is_moving(cluster: TestCluster) -> None:
    """The joiner does not wait for `handler_timeout_s`: the handler acks what it has done, and the partition goes."""
    topic, group = cluster.topic(2), cluster.group()
    for partition in (0, 1):
        cluster.fill(topic, partition, 10)
    reported: list[ClaimInfo] = []
    with (
        cluster.connect("a") as marshal,
        cluster.connect("b") as other,
        joined(marshal, group, [topic], on_revoking=reported.append) as one,
    ):
        until(owns(one, 0, 1), "both are its own")
        batch = collect(one, 20, ack=False)
        assert not any(message.revoking for message in batch)
        assert {claim.revoking for claim in one.cached_info().claims.values()} == {""}
        with joined(other, group, [topic]) as two:
            (going,) = until(lambda: list(reported), "it is reported")
            assert (going.revoking, going.drain_s > 0) == ("hand-over", True)
            assert one.cached_info().claims[TopicPartition(topic, going.partition)].revoking == "hand-over"
            events = [event for event in one.events() if event.kind == "revoking"]
            assert [(event.partition, event.text) for event in events] == [(going.partition, "hand-over")]
            assert not two.cached_info().claims
            for message in batch:
                assert message.revoking == (message.partition == going.partition)
                assert message.ack()
            until(owns(two, going.partition), "it goes as soon as its handlers are done")
            assert positions(two) == {going.partition: 10}
            assert len(reported) == 1


def test_a_handler_that_hears_nothing_loses_its_partition_when_its_time_is_over(cluster: TestCluster) -> None:
    """A3: what it holds comes again, what it has acked does not."""
    topic, group = cluster.topic(2), cluster.group()
    for partition in (0, 1):
        cluster.fill(topic, partition, 4)
    with (
        cluster.connect("a") as marshal,
        cluster.connect("b") as other,
        joined(marshal, group, [topic], hand_over_timeout_s=0.5) as one,
    ):
        until(owns(one, 0, 1), "both are its own")
        batch = collect(one, 8, ack=False)
        assert all([message.ack() for message in batch if message.offset in (0, 2)])
        with joined(other, group, [topic]) as two:
            until(lambda: len(two.cached_info().claims) == 1, "it comes although the handler hangs")
            (moved,) = two.cached_info().claims
            assert places(collect(two, 2)) == [(moved.partition, 1), (moved.partition, 3)]
            late = [message for message in batch if (message.partition, message.offset) == (moved.partition, 1)]
            assert [message.ack() for message in late] == [False]


def test_a_callback_that_raises_has_no_other_effect(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 2)

    def fail(*_: object) -> None:
        raise RuntimeError("a callback of the user")

    with cluster.connect() as marshal:
        with joined(marshal, cluster.group(), [topic], on_claim=fail, on_lost=fail) as consumer:
            assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]
        with joined(marshal, cluster.group(), [topic]) as consumer:
            assert len(collect(consumer, 2)) == 2


def test_a_callback_may_look_at_the_consumer(cluster: TestCluster) -> None:
    topic = cluster.topic()
    seen: list[dict[int, int]] = []
    with cluster.connect() as marshal:
        holder: list[object] = []
        consumer = joined(marshal, cluster.group(), [topic], on_claim=lambda claim: holder.append(claim))
        until(lambda: holder, "the callback")
        seen.append(positions(consumer))
        consumer.stop()
    assert seen == [{0: 0}]


# --- client ids


def test_fast_reclaim_takes_the_place_of_the_same_client(memory: MemoryTestCluster) -> None:
    """The caller says that the former process is dead; if it is not, it learns of it and does not resist."""
    topic = memory.topic()
    group = memory.group()
    with memory.connect("same") as marshal, memory.connect("same") as other:
        one = joined(marshal, group, [topic])
        until(owns(one, 0), "the partition is ours")
        with joined(other, group, [topic], fast_reclaim=True) as two:
            until(owns(two, 0), "the successor has it at once")
            until(lambda: one.cached_info().closed, "the former one has learned of it")
            with pytest.raises(ConsumerClosed, match="client id"):
                one.pause([(topic, 0)])  # the call that receives raises what has ended it
            with pytest.raises(DuplicateClientId):
                one.fetch(1)
            with pytest.raises(ConsumerClosed):
                one.fetch()
        assert memory.accepted(group, Evict) == []


# --- processes


def test_sigterm_releases_at_once(embedded: EmbeddedTestCluster) -> None:
    """The successor owns everything by Releases and a Leave: it did not wait for a lease to end."""
    topic = embedded.topic(2)
    group = embedded.group()
    embedded.fill(topic, 0, 3)
    with ConsumerProcess(embedded.target, group, topic) as process, embedded.connect() as marshal:
        process.wait_for("message", 3)
        process.wait_for("claim", 2)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.said("stopped")
        assert {(e["partition"], e["reason"]) for e in process.said("lost")} == {(0, "stopped"), (1, "stopped")}
        with joined(marshal, group, [topic]) as successor:
            until(owns(successor, 0, 1), "the successor has both")
            assert embedded.accepted(group, Evict) == []
            assert [leave.reason for leave in embedded.accepted(group, Leave)] == ["stopped"]
            embedded.fill(topic, 0, 1, first=3)
            assert places(collect(successor, 1)) == [(0, 3)]


def test_an_interpreter_that_ends_without_stop_releases(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    group = embedded.group()
    embedded.fill(topic, 0, 5)
    with ConsumerProcess(embedded.target, group, topic, "--exit-after", "3") as process:
        assert process.wait() == 0
        assert len(process.said("message")) == 3
    assert [r.position for r in embedded.accepted(group, ReleasingPartition)] == [3]
    assert len(embedded.accepted(group, Leave)) == 1


def test_a_killed_process_is_waited_out_and_its_unacked_come_again(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    group = embedded.group()
    embedded.fill(topic, 0, 5)
    with ConsumerProcess(embedded.target, group, topic, "--hold") as process, embedded.connect() as marshal:
        process.wait_for("message", 5)
        process.signal(signal.SIGKILL)
        process.wait()
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 5)) == [(0, i) for i in range(5)]
    assert len(embedded.accepted(group, Evict)) == 1
    assert len(embedded.accepted(group, Leave)) == 1


def test_a_process_that_sleeps_past_its_lease_delivers_nothing_old_and_comes_back(
    embedded: EmbeddedTestCluster,
) -> None:
    """SIGSTOP, eviction, SIGCONT: no delivery under the old token after the successor's first; then it joins again."""
    topic = embedded.topic()
    group = embedded.group()
    with ConsumerProcess(embedded.target, group, topic) as process, embedded.connect() as marshal:
        embedded.fill(topic, 0, 1)
        old = process.wait_for("message")[0]["epoch"]
        first_session = process.wait_for("joined")[0]["session"]
        process.signal(signal.SIGSTOP)
        successor = joined(marshal, group, [topic])
        embedded.fill(topic, 0, 20, first=1)
        mine = collect(successor, 20)
        assert mine[0].token.epoch > old
        process.signal(signal.SIGCONT)
        until(lambda: len(embedded.accepted(group, Join)) == 3, "it joins again by itself")
        assert process.wait_for("lost")[0]["reason"] == "session ended"
        with BackgroundConsumer(successor):
            embedded.fill(topic, 0, 5, first=21)
        successor.stop()
        embedded.fill(topic, 0, 3, first=26)
        until(lambda: [m for m in process.said("message") if m["offset"] == 28], "it delivers again")
        late = [m for m in process.said("message")[1:] if m["epoch"] == old]
        assert late == [], "nothing under the old token"
        claims = [v for v in embedded.verdicts(group) if isinstance(v.record, ClaimingPartition) and v.accepted]
        sessions = [v.record.session for v in claims if isinstance(v.record, ClaimingPartition)]
        assert sessions[0] == first_session
        assert len(set(sessions)) == 3


def test_many_starts_and_stops_leave_no_session(memory: MemoryTestCluster) -> None:
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
