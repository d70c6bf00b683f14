"""The clusters for tests: what their time and their switches do to real consumers."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import marshal_py
from marshal_py import Consumer, Message, aio
from marshal_py.errors import ClusterUnreachable, ConsumerClosed, InvalidOption, TopicMissing, UnsupportedPlatform
from marshal_py.testing import EmbeddedCluster, LocalCluster, MemoryCluster, local_cluster
from marshal_py.testing import cluster as clusters

INTERVAL_S = 2.0  # the default heartbeat interval


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with MemoryCluster() as cluster:
        cluster.create_topic("orders", 2)
        yield cluster


@pytest.fixture(params=["memory", "embedded"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with local_cluster(request.param) as made:
        made.create_topic("orders")
        yield made


def member(cluster: LocalCluster, **options: Any) -> Consumer:
    return cluster.connect().consumer("billing", ["orders"], **{"start": "earliest", **options})


def kinds(consumer: Consumer) -> list[str]:
    return [event.kind for event in consumer.events()]


def now_ms(cluster: MemoryCluster) -> int:
    return cluster.broker.clock.now().mono_ms


# --- both kinds


def test_messages_are_read_and_acked(cluster: LocalCluster) -> None:
    for number in range(3):
        cluster.produce("orders", b"%d" % number, key=b"k", headers=[("a", b"b")])
    consumer = member(cluster)
    seen: list[Message] = []
    while len(seen) < 3:
        batch = consumer.fetch(3, expires_s=10, min_messages=1)
        seen += batch
        batch.ack()
    assert [(m.value, m.key, m.headers) for m in seen] == [(b"%d" % n, b"k", [("a", b"b")]) for n in range(3)]
    consumer.flush()
    assert list(cluster.group("billing").positions().values()) == [3]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"value": "text"}, "value"),
    ({"value": 7}, "value"),
    ({"value": b"1", "key": "k"}, "key"),
    ({"value": b"1", "headers": [("a", b"b"), ("c", "d")]}, "header c"),
]


@pytest.mark.parametrize(("wrong", "name"), WRONG)
def test_what_kafka_cannot_hold_is_refused(cluster: LocalCluster, wrong: dict[str, Any], name: str) -> None:
    """A handler saw a text in the test, and bytes in production."""
    with pytest.raises(InvalidOption, match=rf"^{name}=.*bytes"):
        cluster.produce("orders", **wrong)
    values: list[Any] = [b"1", wrong["value"], "2"]
    with pytest.raises(InvalidOption, match=r"^value=.*bytes"):
        cluster.produce_many("orders", values)
    assert member(cluster).next(10).value == b"1"  # type: ignore[union-attr]


def test_a_topic_that_does_not_exist(cluster: LocalCluster) -> None:
    with pytest.raises(TopicMissing):
        cluster.produce("nothing", b"")
    for partition in (-1, 99):
        with pytest.raises(InvalidOption, match="partition"):
            cluster.produce("orders", b"", partition=partition)


@pytest.mark.parametrize("name", [".", "..", "a b", ""])
def test_a_name_that_kafka_does_not_take(cluster: LocalCluster, name: str) -> None:
    with pytest.raises(InvalidOption, match="topic"):
        cluster.create_topic(name)


def test_an_evicted_consumer_loses_its_claims_and_joins_again(cluster: LocalCluster) -> None:
    lost: list[str] = []
    consumer = member(cluster, on_lost=lambda info, reason: lost.append(reason))
    cluster.run_until(lambda: consumer.cached_info().claims)
    session = consumer.cached_info().session
    cluster.evict(consumer)
    assert consumer.cached_info().session != session
    cluster.run_until(lambda: lost and consumer.cached_info().claims)
    seen = kinds(consumer)
    assert {"evicted", "lost"} <= set(seen)
    assert seen.count("joined") == seen.count("claimed") == 2


def test_only_what_was_not_acked_is_delivered_again(cluster: LocalCluster) -> None:
    for number in range(4):
        cluster.produce("orders", b"%d" % number)
    consumer = member(cluster)
    first = consumer.fetch(4, min_messages=4, expires_s=10)
    first[0].ack()
    first[2].ack()
    cluster.redeliver(consumer)
    again = consumer.fetch(2, min_messages=2, expires_s=10)
    assert [message.value for message in again] == [b"1", b"3"]
    assert again[0].token > first[0].token
    assert [message.delivery_count for message in again] == [2, 2]
    assert not first[1].ack(), "its claim is lost"


def test_at_most_once_delivers_nothing_again(cluster: LocalCluster) -> None:
    consumer = member(cluster, delivery="at_most_once")
    with pytest.raises(InvalidOption, match="at-least-once mode"):
        cluster.redeliver(consumer)


def test_a_pause_and_its_end(cluster: LocalCluster) -> None:
    consumer = member(cluster)
    cluster.run_until(lambda: consumer.cached_info().claims)
    cluster.pause("billing")
    cluster.run_until(lambda: not consumer.cached_info().claims)
    cluster.produce("orders", b"1")
    assert consumer.next(0.05) is None
    assert cluster.resume("billing")
    message = consumer.next(10)
    assert message is not None
    assert message.value == b"1"
    assert not cluster.resume("billing")


def test_an_outage_and_its_end(cluster: LocalCluster) -> None:
    consumer = member(cluster)
    cluster.run_until(lambda: consumer.cached_info().claims)
    with cluster.outage():
        assert consumer.next(0.05) is None
    cluster.produce("orders", b"1")
    message = consumer.next(20)
    assert message is not None
    assert message.ack()


def test_what_the_service_left_open_is_closed() -> None:
    for kind in ("memory", "embedded"):
        with local_cluster(kind) as cluster:
            cluster.create_topic("orders")
            marshal = marshal_py.connect({"bootstrap.servers": cluster.bootstrap_servers})
            consumer = marshal.consumer("billing", ["orders"])
        assert consumer.cached_info().closed
        with pytest.raises(ConsumerClosed):
            marshal.consumer("billing", ["orders"])


def test_two_clusters_know_nothing_of_each_other() -> None:
    with MemoryCluster() as one, MemoryCluster() as two:
        one.create_topic("orders")
        assert one.connect().topics() == ("orders",)
        assert two.connect().topics() == ()


def test_a_cluster_that_is_gone_cannot_be_connected_to() -> None:
    with MemoryCluster() as cluster:
        name = cluster.bootstrap_servers
    with pytest.raises(ClusterUnreachable, match="down"):
        marshal_py.connect(name)
    with pytest.raises(InvalidOption, match="a cluster in memory that exists in this process"):
        marshal_py.connect("memory://0")


# --- time


def test_so_many_seconds_pass(memory: MemoryCluster) -> None:
    member(memory)
    before = now_ms(memory)
    memory.advance(60)
    assert now_ms(memory) - before >= 60_000


def test_nobody_is_fenced_because_time_passed(memory: MemoryCluster) -> None:
    consumers = [member(memory), member(memory)]
    memory.run_until(lambda: all(len(consumer.cached_info().claims) == 1 for consumer in consumers))
    memory.advance(30)
    for consumer in consumers:
        assert not {"fenced", "evicted"} & set(kinds(consumer))
        assert len(consumer.cached_info().claims) == 1


def test_a_dead_consumer_is_replaced(memory: MemoryCluster) -> None:
    first = memory.connect()
    one = first.consumer("billing", ["orders"], start="earliest")
    memory.run_until(lambda: len(one.cached_info().claims) == 2)
    memory.kill(first)
    two = member(memory)
    memory.advance(INTERVAL_S)
    assert two.cached_info().claims == {}, "it has waited for one interval only"
    memory.advance(2 * INTERVAL_S)
    assert len(two.cached_info().claims) == 2


def test_a_message_that_comes_after_its_owners_have_died_is_delivered(memory: MemoryCluster) -> None:
    """D11, D15: nobody can have delivered it, so it is no dead letter."""
    memory.create_topic("letters")
    for _ in range(4):
        marshal = memory.connect()
        consumer = marshal.consumer("billing", ["orders"], start="earliest")
        memory.run_until(lambda consumer=consumer: len(consumer.cached_info().claims) == 2)
        memory.advance(INTERVAL_S)
        memory.kill(marshal)
        memory.advance(3 * INTERVAL_S)
    heir = member(memory, max_deliver=3, dead_letter_topic="letters")
    memory.run_until(lambda: len(heir.cached_info().claims) == 2)
    memory.produce("orders", b"1", partition=0)
    message = heir.next(10)
    assert message is not None
    assert message.delivery_count <= 2
    assert "poison_message" not in kinds(heir)


def test_a_handler_that_hangs(memory: MemoryCluster) -> None:
    memory.produce("orders", b"1", partition=0)
    consumer = member(memory, handler_timeout_s=60)
    assert consumer.next(5) is not None
    memory.advance(59)
    assert "handler_stuck" not in kinds(consumer)
    memory.advance(2)
    assert "handler_stuck" in kinds(consumer)


def test_a_program_that_hangs_keeps_no_partition_from_others(memory: MemoryCluster) -> None:
    """D4: it has read one message of one partition. The other consumer gets all that is unread, and hands nothing back
    until the program asks again."""
    hung, other = (member(memory, handler_timeout_s=60) for _ in range(2))
    memory.run_until(lambda: len(hung.cached_info().claims) == len(other.cached_info().claims) == 1)
    assert {hung.next(0), other.next(0)} == {None}
    for number in range(4):
        memory.produce("orders", b"%d" % number, partition=number % 2)
    served: set[tuple[int, int]] = set()
    assert hung.next(5) is not None

    def serve() -> bool:
        for message in other.fetch(10, expires_s=0):
            served.add((message.partition, message.offset))
            message.ack()
        return len(served) == 4

    memory.run_until(serve)
    assert "handler_stuck" in kinds(hung)
    for _ in range(60):
        memory.advance(2)
        serve()
    assert not hung.cached_info().claims
    assert "a handler is stuck" in hung.cached_info().waiting_for
    assert hung.next(0) is None
    memory.run_until(lambda: len(hung.cached_info().claims) == 1)
    assert len(other.cached_info().claims) == 1


def test_a_pause_ends_by_itself(memory: MemoryCluster) -> None:
    consumer = member(memory)
    memory.run_until(lambda: len(consumer.cached_info().claims) == 2)
    memory.pause("billing", duration_s=60)
    memory.advance(55)
    assert not consumer.cached_info().claims
    memory.run_until(lambda: len(consumer.cached_info().claims) == 2)


def test_a_pause_does_not_wait_long_for_handlers(memory: MemoryCluster) -> None:
    """One heartbeat interval of the consumers' time, which passes a hundred times as fast."""
    memory.produce("orders", b"1", partition=0)
    consumer = member(memory)
    message = consumer.next(5)
    assert message is not None
    memory.pause("billing")
    assert message.revoking
    assert not message.ack()


def test_a_fenced_consumer_delivers_nothing(memory: MemoryCluster) -> None:
    consumer, other = member(memory), member(memory)
    memory.run_until(lambda: all(len(one.cached_info().claims) == 1 for one in (consumer, other)))
    claims = consumer.cached_info().claims.keys()
    with memory.fence(consumer):
        for partition in range(2):
            memory.produce("orders", b"1", partition=partition)
        assert consumer.next(0) is None
        assert consumer.cached_info().claims.keys() == claims
        assert len(other.cached_info().claims) == 1
        assert "fenced" in kinds(consumer)
    assert consumer.next(5) is not None
    assert "unfenced" in kinds(consumer)


def test_a_consumer_that_is_fenced_for_long_is_replaced(memory: MemoryCluster) -> None:
    consumer, other = member(memory), member(memory)
    memory.run_until(lambda: all(len(one.cached_info().claims) == 1 for one in (consumer, other)))
    with memory.fence(consumer):
        memory.advance(2 * INTERVAL_S)
        assert len(other.cached_info().claims) == 2
    assert "evicted" in kinds(consumer)


def test_an_outage_evicts_nobody(memory: MemoryCluster) -> None:
    consumers = [member(memory), member(memory)]
    memory.run_until(lambda: all(len(consumer.cached_info().claims) == 1 for consumer in consumers))
    with memory.outage():
        memory.advance(60)
        with pytest.raises(ClusterUnreachable, match="down"):
            memory.connect()
        waiting_for = consumers[0].cached_info().waiting_for
        assert re.fullmatch(
            r"an answer of \S+: no record has come from it for 6\d s \(the cluster is down\)", waiting_for
        )
    memory.advance(INTERVAL_S)
    for consumer in consumers:
        seen = kinds(consumer)
        assert "evicted" not in seen
        assert (seen.count("fenced"), seen.count("unfenced")) == (1, 1)


def test_redelivery_again_and_again(memory: MemoryCluster) -> None:
    """Owners that die one after the other look like a poison message: still everything comes at once."""
    for number in range(5):
        memory.produce("orders", b"%d" % number, partition=0)
    consumer = member(memory)
    for delivery in range(1, 5):
        assert [m.delivery_count for m in consumer.fetch(5, min_messages=5, expires_s=5)] == [delivery] * 5
        memory.redeliver(consumer)


def test_a_message_that_was_given_back_comes_again_after_its_delay(memory: MemoryCluster) -> None:
    memory.produce("orders", b"1", partition=0)
    consumer = member(memory)
    message = consumer.next(5)
    assert message is not None
    assert message.nak(60.0)
    memory.advance(50)
    assert consumer.next(0) is None
    memory.advance(11)
    again = consumer.next(5)
    assert again is not None
    assert again.delivery_count == 2


def test_a_condition_that_does_not_come_true(memory: MemoryCluster) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        memory.run_until(lambda: False, timeout_s=0.05)


def test_what_never_ends_is_named(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    marshal = memory.connect("billing-1")
    monkeypatch.setattr(clusters, "SETTLE_S", 0.05)
    monkeypatch.setattr(marshal._loop, "busy", lambda: True)
    with pytest.raises(TimeoutError, match="billing-1"):
        memory.settle()


def test_time_does_not_run_backwards(memory: MemoryCluster) -> None:
    with pytest.raises(InvalidOption, match="seconds"):
        memory.advance(-1)


def test_a_thread_of_the_service_gets_its_time(memory: MemoryCluster) -> None:
    """A handler takes real time; the clock must not race ahead of it until its timeout."""
    for number in range(20):
        memory.produce("orders", b"%d" % number, partition=number % 2)
    consumer, seen, pause = member(memory), [], threading.Event()

    def run() -> None:
        for message in consumer:
            pause.wait(0.005)
            seen.append(message.value)
            message.ack()

    thread = threading.Thread(target=run)
    thread.start()
    memory.run_until(lambda: len(seen) == 20)
    consumer._ending.request_stop()
    thread.join()
    assert len(set(seen)) == 20


def test_the_switches_take_consumers_of_asyncio(memory: MemoryCluster) -> None:
    async def main() -> None:
        first = await aio.connect(memory.bootstrap_servers)
        one: Any = await first.consumer("billing", ["orders"], start="earliest")
        await asyncio.to_thread(memory.run_until, lambda: one.cached_info().claims)
        await asyncio.to_thread(memory.evict, one)
        await asyncio.to_thread(memory.run_until, lambda: len(one.cached_info().claims) == 2)
        with memory.fence(one):
            memory.produce("orders", b"1")
            assert await one.next(0) is None
        assert await one.next(5) is not None
        memory.kill(first)
        one = None  # as dead as its process would be: no warning says that it was dropped
        gc.collect()
        async with await aio.connect(memory.bootstrap_servers) as second:
            two = await second.consumer("billing", ["orders"], start="earliest")
            await asyncio.to_thread(memory.advance, 3 * INTERVAL_S)
            assert len(two.cached_info().claims) == 2
        await first.close(0)

    asyncio.run(main())


# --- what the embedded broker lacks


def test_time_is_real_on_the_embedded_broker() -> None:
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders")
        consumer = member(cluster)
        for call in (
            lambda: cluster.advance(1),
            cluster.settle,
            lambda: cluster.fence(consumer),
            lambda: cluster.kill(cluster.connect()),
        ):
            with pytest.raises(UnsupportedPlatform, match="use the cluster in memory"):
                call()


def test_an_unknown_kind() -> None:
    with pytest.raises(InvalidOption, match='"memory" or "embedded"'):
        local_cluster("kafka")
