"""The methods that deliver messages, with the memory transport and the embedded broker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from marshal_py import Consumer
from marshal_py.client.membership import WAIT_SLICE_S
from marshal_py.client.receiving import IDLE_S, IDLE_WAIT_S
from marshal_py.client.values.requests import message_bytes
from marshal_py.errors import ConsumerClosed, InvalidOption
from tests.support.client_fixtures import (
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)


def test_iteration_hands_over_everything_in_order(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 20)
    cluster.fill(topic, 1, 20)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        seen = []
        for message in consumer:
            seen.append(message)
            message.ack()
            if len(seen) == 40:
                break
        for partition in (0, 1):
            assert [m.offset for m in seen if m.partition == partition] == list(range(20))
            assert [m.value for m in seen if m.partition == partition] == [b"%d" % i for i in range(20)]


def test_leaving_the_iteration_leaves_the_consumer_running(cluster: TestCluster) -> None:
    with cluster.reading(3) as consumer:
        for message in consumer:
            message.ack()
            break
        for message in consumer:
            assert message.offset == 1
            message.ack()
            break
        assert places(collect(consumer, 1)) == [(0, 2)]
        assert not consumer.cached_info().closed


def test_fetch_ends_by_count(cluster: TestCluster) -> None:
    """ADR-37: "Get one or more messages."
    ADR-37: "Fetch Configuration options - max_messages?: number - max number of messages to return"
    ADR-37: "This operation will end once the RPC expires or the number of messages/data batch requested is
    provided."
    """
    with cluster.reading(10) as consumer:
        batch = consumer.fetch(4, min_messages=4, expires_s=30)
        assert places(batch) == [(0, 0), (0, 1), (0, 2), (0, 3)]
        assert batch.ack() is True
        assert len(consumer.fetch(6, min_messages=6, expires_s=30)) == 6


def test_fetch_ends_by_bytes_but_brings_at_least_one(cluster: TestCluster) -> None:
    """ADR-37: "max_bytes?: number - max number of bytes to return" """
    topic = cluster.topic()
    for _ in range(10):
        cluster.put(topic, 0, b"x" * 100)
    each = 100 + len(topic)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        assert len(consumer.fetch(10, min_messages=10, max_bytes=3 * each, expires_s=30)) == 3
        assert len(consumer.fetch(10, min_messages=10, max_bytes=3 * each + 1, expires_s=30)) == 3
        assert len(consumer.fetch(10, min_messages=10, max_bytes=1, expires_s=30)) == 1
        assert len(consumer.fetch(3, min_messages=3, max_bytes=10**9, expires_s=30)) == 3


def test_fetch_with_bytes_waits_for_the_rest(memory: MemoryTestCluster) -> None:
    """A batch is not cut short because some messages are there: it ends by count, bytes or expiry."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        late = threading.Timer(0.2, lambda: memory.fill(topic, 0, 4, first=1))
        late.start()
        assert len(consumer.fetch(5, min_messages=5, max_bytes=10**6, expires_s=30)) == 5
        late.join()


def test_the_size_of_a_message_counts_all_its_parts(memory: MemoryTestCluster) -> None:
    """ADR-37: "The message size (in bytes) should be calculated as the server does it."
    ADR-37: "This can be calculated on client side."
    ADR-37: "sz = len(pmsg.subj) + len(ackReply) + len(pmsg.hdr) + len(pmsg.msg)"
    """
    topic = memory.topic()
    memory.put(topic, 0, b"12345", b"key", [("head", b"12"), ("none", b"")])
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        part = consumer.fetch(1).parts[0]
        assert message_bytes(part.raw[0]) == 5 + 3 + (4 + 2) + 4 + len(topic)


def test_fetch_with_no_expiry_takes_what_is_there(cluster: TestCluster) -> None:
    """ADR-37: "404 No Messages"
    ADR-37: "The user is in control of when they retrieve the messages from the server."
    """
    topic = cluster.topic()
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        assert len(consumer.fetch(10, expires_s=0)) == 0
        cluster.fill(topic, 0, 3)
        got = until(lambda: list(consumer.fetch(10, expires_s=0)), "what is there comes without waiting")
        until(lambda: got.extend(consumer.fetch(10, expires_s=0)) or len(got) == 3, "and the rest too")
        assert places(got) == [(0, 0), (0, 1), (0, 2)]


def test_fetch_that_expires_brings_what_came(cluster: TestCluster) -> None:
    """ADR-37: "This operation will end once the RPC expires or the number of messages/data batch requested is
    provided."
    ADR-37: "Fetch Configuration options - expires: number - amount of time to wait for the request to expire (in
    nanoseconds)"
    ADR-37: "In addition to providing termination Nats-Pending-Messages and Nats-Pending-Bytes headers, status messages
    indicate the termination of the pull."
    ADR-37: "408 Request Timeout"
    ADR-37: "pull requests issued by clients should have client-side timeouts in addition to server-side timeout
    (expiry)." The only clock here is the client's.
    ADR-37: "Calls to next() and fetch() should be concluded when the pull is terminated."
    """
    with cluster.reading(2) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        assert len(consumer.fetch(10, min_messages=10, expires_s=0.5)) == 2
        assert len(consumer.fetch(10, min_messages=10, expires_s=0.05)) == 0


def test_fetch_of_at_least_one_returns_what_is_there(cluster: TestCluster) -> None:
    """With `min_messages=1` a batch that is not full does not wait for its expiry."""
    topic = cluster.topic()
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        for first in range(3):
            cluster.fill(topic, 0, 1, first)
            batch = consumer.fetch(1_000, min_messages=1, expires_s=600)
            assert places(batch) == [(0, first)]
            batch.ack()


def test_fetch_of_at_least_some_waits_for_these(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        late = threading.Timer(0.2, lambda: memory.fill(topic, 0, 1, first=2))
        late.start()
        assert len(consumer.fetch(1_000, min_messages=3, expires_s=600)) == 3
        late.join()


def test_fetch_by_bytes_alone_is_not_limited_to_a_thousand(memory: MemoryTestCluster) -> None:
    """ADR-37: "Client should also expose the options to fetch certain amount of data (max_bytes) instead of messages."
    ADR-37: "Depending on the language, this can either be an option on Fetch or a different consumer method (e.g.
    FetchBytes)."
    """
    topic = memory.topic()
    for _ in range(1_500):
        memory.put(topic, 0, b"1234")
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        assert len(consumer.fetch(min_messages=1_500, max_bytes=1_500 * (4 + len(topic)), expires_s=60)) == 1_500


def test_a_fetch_without_a_limit_has_one(memory: MemoryTestCluster) -> None:
    """ADR-37: "Note that while max_messages and max_bytes are described as optional at least one of them is
    required." """
    with memory.reading(1_001) as consumer:
        assert len(consumer.fetch()) == 1_000


def test_next(cluster: TestCluster) -> None:
    """ADR-37: "Get a single message from the server."
    ADR-37: "The pull request to fetch the message should only be sent once Next is invoked."
    ADR-37: "Depending on the language, the implementation may do Fetch(max_messages: 1) or or return an iterator."
    ADR-37: "Next Configuration options - expires: number - amount of time to wait for the request to expire (in
    nanoseconds)"
    """
    with cluster.reading(2) as consumer:
        first, second = consumer.next(), consumer.next()
        assert first is not None
        assert second is not None
        assert (first.offset, second.offset) == (0, 1)
        assert consumer.next(expires_s=0.05) is None
        assert consumer.next(expires_s=0) is None


def test_what_ends_a_request_without_an_error_is_no_event(memory: MemoryTestCluster) -> None:
    """ADR-37: "Not Telegraphed: - 404 No Messages - 408 Request Timeout - 409 Message Size Exceeds MaxBytes" """
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        assert len(consumer.fetch(1, expires_s=0)) == 0
        assert len(consumer.fetch(1, expires_s=0.05)) == 0
        memory.fill(topic, 0, 1)
        assert len(consumer.fetch(max_bytes=1)) == 1
        assert [event.kind for event in consumer.events()] == ["joined", "topology", "claimed"]


def test_the_operations_of_a_consumer(memory: MemoryTestCluster) -> None:
    """ADR-37: "Consumers should expose methods for getting consumer info, as well as methods for consuming messages
    (consume(), fetch() and next())."
    ADR-37: "Example set of methods on Consumer: - operations on consumer instance: - info()"
    ADR-37: "operations used to consume messages: - consume() - fetch() - next()"
    ADR-37: "Consumers will have the following operations: - Fetch - Next - Consume - Info - An optional operation that
    returns the consumer info of the consumer - Delete - An optional operation to delete the referenced consumer"
    ADR-37: "Client libraries implementing the JetStream API should adhere to language-specific and library best
    practices while following the outlined designs."
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 4)
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            found = [*consumer.fetch(1), consumer.next()]
            with consumer.consume() as context:
                found.append(next(iter(context)))
            for message in consumer:
                found.append(message)
                break
            assert [message and message.offset for message in found] == [0, 1, 2, 3]
            assert consumer.info().group == group
            assert consumer.next(expires_s=0) is None
        marshal.delete_group(group)
        assert group not in marshal.groups()


def test_a_fetch_inside_the_iteration_takes_no_message_twice(cluster: TestCluster) -> None:
    with cluster.reading(9) as consumer:
        offsets: list[int] = []
        for message in consumer:
            offsets.append(message.offset)
            offsets += [m.offset for m in consumer.fetch(2, min_messages=2, expires_s=1)]
            if len(offsets) >= 9:
                break
        assert offsets == list(range(9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_messages": 0},
        {"max_messages": -1},
        {"max_messages": True},
        {"max_bytes": 0},
        {"expires_s": -0.1},
        {"expires_s": float("nan")},
        {"min_messages": 0},
        {"min_messages": 6, "max_messages": 5},
    ],
)
def test_fetch_refuses_what_cannot_be(memory: MemoryTestCluster, wrong: dict[str, int]) -> None:
    """ADR-37: "400 Bad Request" """
    topic = memory.topic()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        pytest.raises(InvalidOption, match=next(iter(wrong))),
    ):
        consumer.fetch(**wrong)  # type: ignore[arg-type]


def test_a_message_has_all_its_parts(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.put(topic, 0, b"value", b"key", [("a", b"1"), ("a", b"2")])
    cluster.put(topic, 0, None, b"key")
    group = cluster.group()
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        message, tombstone = collect(consumer, 2)
        assert (message.topic, message.partition, message.offset) == (topic, 0, 0)
        assert (message.key, message.value) == (b"key", b"value")
        assert message.headers == [("a", b"1"), ("a", b"2")]
        assert message.timestamp == 1_000
        assert message.delivery_count == 1
        claim = next(iter(consumer.cached_info().claims.values()))
        assert message.token == claim.token
        assert str(message.token) in repr(message)
        assert tombstone.value is None
        assert tombstone.headers == []


def test_deserializers_are_given_where_it_came_from(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.put(topic, 0, b"7", b"k")
    with (
        memory.connect() as marshal,
        joined(
            marshal,
            memory.group(),
            [topic],
            value_deserializer=lambda value, where: (int(value), where.topic, where.field),
            key_deserializer=lambda key, where: (key.decode(), where.field),
        ) as consumer,
    ):
        batch = consumer.fetch(1)
        assert [(m.key, m.value) for m in batch] == [(("k", "key"), (7, topic, "value"))]
        assert batch.parts[0].values == [(7, topic, "value")]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_what_a_deserializer_raises_is_raised_in_the_handler(memory: MemoryTestCluster, delivery: str) -> None:
    topic = memory.topic()
    for value in (b"1", b"two", b"3"):
        memory.put(topic, 0, value)
    seen: list[object] = []
    with (
        memory.connect() as marshal,
        joined(
            marshal, memory.group(), [topic], delivery=delivery, value_deserializer=lambda value, _: int(value)
        ) as consumer,
    ):
        for message in consumer:
            try:
                seen.append(message.value)
            except ValueError as error:
                seen.append(str(error))
            message.ack()
            if len(seen) == 3:
                break
    assert seen == [1, "invalid literal for int() with base 10: b'two'", 3]


def test_the_attributes_of_a_message_are_read_only(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.put(topic, 0, b"7")
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        message = consumer.next()
        assert message is not None
        with pytest.raises(AttributeError):
            message.value = b"8"  # type: ignore[misc]


def test_pause_and_resume_here_keep_the_claim(cluster: TestCluster) -> None:
    topic = cluster.topic(2)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        until(owns(consumer, 0, 1), "both partitions are ours")
        cluster.fill(topic, 0, 3)
        cluster.fill(topic, 1, 3)
        consumer.pause([(topic, 0)])
        assert {m.partition for m in collect(consumer, 3)} == {1}
        assert len(consumer.fetch(3, min_messages=3, expires_s=0.1)) == 0
        assert owns(consumer, 0, 1)()
        cluster.fill(topic, 0, 2, first=3)
        consumer.resume([(topic, 0)])
        assert places(collect(consumer, 5)) == [(0, i) for i in range(5)]


def test_a_paused_partition_delivers_nothing_that_is_buffered(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 5)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        collect(consumer, 1)
        consumer.pause([(topic, 0)])
        assert consumer.next(expires_s=0.05) is None
        consumer.resume([(topic, 0)])
        assert places(collect(consumer, 4)) == [(0, i) for i in range(1, 5)]


def test_a_partition_may_be_paused_before_it_is_ours(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 2)
    group = cluster.group()
    with cluster.connect() as marshal, joined(marshal, group, [topic], max_claims=1) as consumer:
        consumer.pause([(topic, 0)])
        until(owns(consumer, 0), "the partition is ours")
        assert consumer.next(expires_s=0.1) is None
        consumer.resume([(topic, 0)])
        assert places(collect(consumer, 2)) == [(0, 0), (0, 1)]


def test_only_partitions_that_may_be_ours_can_be_paused(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(owns(consumer, 0, 1), "both partitions are ours")
        wrong: list[Any] = [(topic, 0), topic, None, 3]
        for verb in (consumer.pause, consumer.resume):
            for one in wrong:
                with pytest.raises(InvalidOption, match=r"partitions=.* as \[\(\"orders\", 3\)\]"):
                    verb(one)
            with pytest.raises(InvalidOption, match="the topic has 2, from 0 to 1"):
                verb([(topic, -1)])
            with pytest.raises(InvalidOption, match="the topic has 2, from 0 to 1"):
                verb([(topic, 1), (topic, 2)])
            with pytest.raises(InvalidOption, match=f"partitions of the topics {topic}"):
                verb([("another", 0)])
        memory.fill(topic, 1, 1)
        assert places(collect(consumer, 1)) == [(1, 0)], "nothing was paused"
        consumer.pause(consumer.cached_info().claims)
        consumer.resume(iter([(topic, 0), (topic, 1)]))


@pytest.mark.bounds(unacked=1, prefetch=1)
def test_fetching_stops_at_the_bound_of_unacked_messages_and_continues(cluster: TestCluster) -> None:
    """D1: with the bound at one, every message waits for the ack of the one before."""
    topic = cluster.topic()
    cluster.fill(topic, 0, 6)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        for offset in range(6):
            batch = consumer.fetch(2, min_messages=2, expires_s=30 if offset < 5 else 0.5)
            assert places(batch) == [(0, offset)]
            assert consumer.next(expires_s=0) is None
            batch.ack()


@pytest.mark.bounds(unacked=2, prefetch=2)
def test_acks_of_another_thread_let_a_waiting_fetch_continue(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 4)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        first = consumer.fetch(2, min_messages=2)
        threading.Timer(0.2, first.ack).start()
        assert places(consumer.fetch(2, min_messages=2, expires_s=30)) == [(0, 2), (0, 3)]


def test_info_is_asked_and_cached_info_is_not(cluster: TestCluster) -> None:
    """ADR-37: "An optional operation that returns the consumer info."
    ADR-37: "Clients may optionally expose a way to retrieved cached info (from the Consumer instance itself),
    bypassing CONSUMER.INFO request to the server."
    """
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 5)
    group = cluster.group()
    with cluster.connect("client") as marshal, joined(marshal, group, [topic]) as consumer:
        until(owns(consumer, 0, 1), "both partitions are ours")
        collect(consumer, 3)
        consumer.flush()
        info = consumer.info(timeout_s=float("inf"))
        assert (info.group, info.client_id, info.delivery, info.paused) == (group, "client", "at_least_once", False)
        assert info.waiting_for == ""
        assert {tp.partition: claim.position for tp, claim in info.claims.items()} == {0: 3, 1: 0}
        assert info.session == consumer.cached_info().session >= 0
        collect(consumer, 2, ack=False)
        assert consumer.cached_info().in_flight == 2
        until(lambda: consumer.cached_info().lag == 2, "two messages behind the end")


def test_events_come_once(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        until(owns(consumer, 0), "the partition is ours")
        kinds = [event.kind for event in consumer.events()]
        assert kinds.index("joined") < kinds.index("claimed")
        assert [event.kind for event in consumer.events()] == []


def test_flush_returns_when_the_log_has_the_positions(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 7)
    group = cluster.group()
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        collect(consumer, 7)
        consumer.flush()
        assert positions(consumer) == {0: 7}
        partition = marshal._loop.worlds[consumer._driver.log].groups[group].partitions
        assert [p.position for p in partition.values()] == [7]


def test_a_closed_consumer_says_so(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal:
        consumer: Consumer = joined(marshal, cluster.group(), [topic])
        assert not consumer.cached_info().closed
        consumer.stop()
        consumer.stop()
        consumer.drain()
        assert consumer.cached_info().closed
        for verb in (
            consumer.fetch,
            consumer.next,
            consumer.flush,
            consumer.consume,
            lambda: next(iter(consumer)),
            lambda: consumer.seek((topic, 0), 0),
            lambda: consumer.pause([(topic, 0)]),
            lambda: consumer.resume([(topic, 0)]),
        ):
            with pytest.raises(ConsumerClosed, match="it was stopped"):
                verb()
        assert consumer.info().claims == {}
        assert consumer.cached_info().claims == {}
        assert consumer.cached_info().claims == {}
    with pytest.raises(ConsumerClosed, match="Marshal"):
        marshal.consumer("g", [topic])
    marshal.close()


def test_waits_are_long_only_while_nothing_is_unfinished(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only time shows that an ack has come, or that a message is due again. A wake takes processor time."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        [message] = consumer.fetch(1)
        intake = consumer._receiving.intake
        assert intake.wait_s() == WAIT_SLICE_S, "a message has just come"
        monkeypatch.setattr(intake, "_came_at", -IDLE_S)
        assert intake.wait_s() == WAIT_SLICE_S, "it is unfinished"
        message.ack()
        until(lambda: intake.wait_s() == IDLE_WAIT_S, "with the next heartbeat it is finished")
