"""Fetching ahead for a slow handler: fair across partitions, bounded in messages and in bytes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer

from marshal_py import Consumer, Message
from marshal_py.client.connection import complete
from marshal_py.client.delivery import prefetch
from marshal_py.client.delivery.buffers import MERGED_MAX, Buffer, Reserved
from marshal_py.client.delivery.delivery_queue import AHEAD_MESSAGES_MAX
from marshal_py.client.delivery.prefetch import (
    BUFFERED_MESSAGES_MAX,
    FILLED_SHARE,
    LOOK_MS,
    SLOW_PER_S,
    HandlingRate,
    Prefetch,
    Room,
    held_bytes,
)
from marshal_py.client.messages import answers as handlers_answers
from marshal_py.client.values.options import PREFETCH_BYTES, PREFETCH_BYTES_MAX, PREFETCH_BYTES_MIN
from marshal_py.client.values.requests import KEYS_SAMPLED
from marshal_py.errors import PartitionError
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.memory import MemoryMessage, MemoryWriter
from tests.support.client_fixtures import calm, collect, joined, owns, places, until
from tests.support.one_queue import BLOCK, OneQueueSource, OneQueueTestCluster

PARTITIONS = 12
FILLED = 3 * BLOCK  # messages of each partition
KINDS = ("at_least_once", "at_most_once")


@pytest.fixture
def cluster() -> OneQueueTestCluster:
    return OneQueueTestCluster()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every handler counts as slow, and a look is due at every step: what time decides is decided."""
    monkeypatch.setattr(HandlingRate, "slower_than", lambda self, per_second: True)
    monkeypatch.setattr(prefetch, "LOOK_MS", 0)


def filled(cluster: OneQueueTestCluster, partitions: int = PARTITIONS, count: int = FILLED, size: int = 10) -> str:
    topic = cluster.topic(partitions)
    for partition in range(partitions):
        for _ in range(count):
            cluster.put(topic, partition, b"x" * size)
    return topic


def one_by_one(consumer: Consumer) -> Iterator[Message]:
    """As a slow handler gets them: each message from a delivery of its own."""
    while True:
        message = next(iter(consumer))
        message.ack()
        yield message


def in_batches(consumer: Consumer) -> Iterator[Message]:
    while True:
        batch = consumer.fetch(2 * PARTITIONS, min_messages=2 * PARTITIONS, expires_s=30)
        batch.ack()
        yield from batch


def consumed(consumer: Consumer) -> Iterator[Message]:
    for message in consumer.consume(max_messages=6):
        message.ack()
        yield message


def handled_until_all(messages: Iterator[Message], partitions: set[int]) -> int:
    """How many messages are delivered until each of these partitions had one."""
    left, count = set(partitions), 0
    while left:
        left.discard(next(messages).partition)
        count += 1
    return count


def source_of(consumer: Consumer) -> OneQueueSource:
    source = consumer._driver.source
    assert isinstance(source, OneQueueSource)
    return source


# --- fairness


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("way", [one_by_one, in_batches, consumed])
@pytest.mark.parametrize("delivery", KINDS)
def test_one_partition_does_not_wait_for_thousands_of_another(
    cluster: OneQueueTestCluster, delivery: str, way: Callable[[Consumer], Iterator[Message]]
) -> None:
    """All are full. Between the first messages of two partitions a few messages are delivered, not a block of one."""
    topic = filled(cluster)
    with cluster.connect() as marshal, calm(marshal, cluster.group(), [topic], delivery=delivery) as consumer:
        until(owns(consumer, *range(PARTITIONS)), "all partitions are its")
        assert handled_until_all(way(consumer), set(range(PARTITIONS))) <= 4 * PARTITIONS


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("way", [one_by_one, consumed])
@pytest.mark.parametrize("delivery", KINDS)
def test_a_partition_keeps_its_turn_when_the_thread_did_not_run_for_so_long_that_no_message_came_of_it(
    cluster: OneQueueTestCluster, delivery: str, way: Callable[[Consumer], Iterator[Message]]
) -> None:
    """Messages are reserved for some ms. Here every second reservation has run out before the first message."""
    topic = filled(cluster)
    with cluster.connect() as marshal, calm(marshal, cluster.group(), [topic], delivery=delivery) as consumer:
        until(owns(consumer, *range(PARTITIONS)), "all partitions are its")
        with pytest.MonkeyPatch.context() as patch:
            messages, late = Reserved.messages, cycle((False, True))
            over_ns = 1 << 62
            patch.setattr(
                Reserved, "messages", lambda one, boot_ns: messages(one, (lambda: over_ns) if next(late) else boot_ns)
            )
            assert handled_until_all(way(consumer), set(range(PARTITIONS))) <= 4 * PARTITIONS


@pytest.mark.usefixtures("slow")
def test_partitions_that_are_taken_over_do_not_wait_for_earlier_ones(cluster: OneQueueTestCluster) -> None:
    """As after a death: a backlog of its own, and then the partitions of another."""
    topic = filled(cluster)
    group = cluster.group()
    with cluster.connect() as one, cluster.connect() as two, joined(one, group, [topic]) as consumer:
        until(owns(consumer, *range(PARTITIONS)), "all partitions are its")
        messages = one_by_one(consumer)
        with joined(two, group, [topic]) as other:
            until(
                lambda: next(messages) and len(other.cached_info().claims) == PARTITIONS // 2,
                "half of them are the other's",
            )
            gone = {tp.partition for tp in other.cached_info().claims}
        until(lambda: next(messages) and len(consumer.cached_info().claims) == PARTITIONS, "they came back")
        assert handled_until_all(messages, gone) <= 4 * PARTITIONS


@pytest.mark.bounds(prefetch=50)
@pytest.mark.usefixtures("slow")
def test_a_partition_comes_whole_and_in_order_however_often_it_is_paused(
    cluster: OneQueueTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "BUFFERED_MESSAGES_MAX", 400)
    topic = filled(cluster, 4)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        found: dict[int, list[int]] = {partition: [] for partition in range(4)}
        count = 0
        for message in consumer:
            found[message.partition].append(message.offset)
            message.ack()
            count += 1
            if count == 4 * FILLED:
                break
        assert found == {partition: list(range(FILLED)) for partition in range(4)}
        assert source_of(consumer).handed_out < 3 * count, "what is fetched twice is not most of the work"


def test_a_fast_handler_reads_no_further_than_it_hands_over(cluster: OneQueueTestCluster) -> None:
    """Speed: librdkafka's queue is the buffer, and nothing is paused."""
    topic = filled(cluster, 4)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        got = 0
        while got < 4 * FILLED:
            batch = consumer.fetch(1_000, min_messages=1_000, expires_s=30)
            batch.ack()
            got += len(batch)
        assert source_of(consumer).handed_out == got == 4 * FILLED


def test_a_batch_holds_an_even_share_of_each_partition(cluster: OneQueueTestCluster) -> None:
    """The others fill what one lacks: a batch is full if there are enough messages."""
    topic = filled(cluster, 3, 0)
    for partition, count in enumerate((100, 2, 100)):
        cluster.fill(topic, partition, count)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        until(owns(consumer, 0, 1, 2), "all partitions are its")
        complete(consumer._receiving.intake.pull(1.0), consumer._carry_out)
        shares: dict[int, int] = {}
        for message in consumer.fetch(30, min_messages=30):
            shares[message.partition] = shares.get(message.partition, 0) + 1
        assert sum(shares.values()) == 30
        assert shares[1] == 2
        assert min(shares[0], shares[2]) >= 10


@pytest.mark.bounds(prefetch=40, grant=30)
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("delivery", KINDS)
def test_a_drain_hands_over_a_piece_and_not_all_that_was_fetched_ahead(
    cluster: OneQueueTestCluster, delivery: str
) -> None:
    """To drain all that a slow handler has buffered would take minutes. The next owner begins after one piece."""
    topic = filled(cluster, 3)
    group = cluster.group()
    with cluster.connect() as marshal:
        consumer = calm(marshal, group, [topic], delivery=delivery)
        until(owns(consumer, 0, 1, 2), "all partitions are its")
        messages = one_by_one(consumer)
        seen = [next(messages) for _ in range(20)]
        assert consumer._queue.buffered() > 3 * MERGED_MAX
        for message in consumer:
            if not consumer._ending.stopping:
                consumer.drain()
            seen.append(message)
            message.ack()
        assert consumer.cached_info().closed
        assert 20 + 40 <= len(seen) <= 20 + 40 + MERGED_MAX, "a piece, and what was reserved when it began"
        with calm(marshal, group, [topic], delivery=delivery) as successor:
            rest = collect(successor, 3 * FILLED - len(seen))
        expected = [(partition, offset) for partition in range(3) for offset in range(FILLED)]
        assert sorted(places([*seen, *rest])) == expected


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("bound", [{"max_messages": 40}, {"max_bytes": 1_000}], ids=["messages", "bytes"])
@pytest.mark.parametrize("delivery", KINDS)
def test_the_drain_of_a_consume_hands_over_what_was_pending(
    cluster: OneQueueTestCluster, delivery: str, bound: dict[str, int]
) -> None:
    """What a look has brought beyond it stays buffered, and a later call delivers it."""
    topic = filled(cluster, 3)
    size = 10 + len(topic)
    limit = bound.get("max_messages") or 1_000 // size
    with cluster.connect() as marshal:
        consumer = calm(marshal, cluster.group(), [topic], delivery=delivery)
        until(owns(consumer, 0, 1, 2), "all partitions are its")
        context = consumer.consume(**bound)
        seen: list[Message] = []
        left = pending = 0
        for message in context:
            seen.append(message)
            message.ack()
            if len(seen) == 100:
                left, pending = consumer._queue.buffered(), context.pending()[0]
                context.drain()
        assert context.drain() is True
        assert left > 10 * limit
        if "max_messages" in bound:
            assert pending <= limit
        assert 100 < len(seen) <= 100 + limit + 1
        assert consumer._queue.buffered() >= left - limit - 1
        rest = collect(consumer, 3 * FILLED - len(seen))
        expected = [(partition, offset) for partition in range(3) for offset in range(FILLED)]
        assert sorted(places([*seen, *rest])) == expected
        consumer.stop()


# --- bounds


def shut() -> Callable[[], None]:
    """Shuts the gate, as in a fenced consumer. The returned function opens it again."""
    gate = pytest.MonkeyPatch()
    gate.setattr(Member, "open_ms", lambda *_: 0)
    gate.setattr(Member, "may_deliver", lambda *_: False)
    return gate.undo


class Reader:
    """Iterates, or fetches, on a thread of its own."""

    def __init__(self, consumer: Consumer, way: str) -> None:
        self.got: list[tuple[int, int]] = []
        self._consumer, self._way, self._over = consumer, way, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._way == "fetch":
                for message in self._consumer.fetch(2_000, min_messages=2_000, expires_s=0.2):
                    self.got.append((message.partition, message.offset))
                    message.ack()
                continue
            for message in self._consumer:
                self.got.append((message.partition, message.offset))
                message.ack()
                if self._over.is_set():
                    break

    def stop(self) -> None:
        self._over.set()
        self._consumer._ending.request_stop(0.0)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("way", ["iteration", "fetch"])
@pytest.mark.parametrize("delivery", KINDS)
def test_nothing_is_fetched_while_the_gate_is_shut(cluster: OneQueueTestCluster, delivery: str, way: str) -> None:
    """A fenced consumer does not fill memory, still fetches ahead of a claim (A3), and loses nothing of it."""
    topic = filled(cluster, 3)
    other = filled(cluster, 1)
    with cluster.connect() as marshal, calm(marshal, cluster.group(), [topic], delivery=delivery) as consumer:
        until(owns(consumer, 0, 1, 2), "all partitions are its")
        open_again = shut()
        reader = Reader(consumer, way)
        try:
            queue, source = consumer._queue, source_of(consumer)
            until(lambda: queue.buffers and all(b.held_back for b in queue.buffers.values()), "nothing is fetched")
            before, polls = source.handed_out, source.polls
            until(lambda: source.polls > polls + 5, "it still looks")
            assert source.handed_out == before <= 3 * 2_000
            with marshal._context.lock:
                queue.start_prefetch(TopicPartition(other, 0), 5)
            until(
                lambda: queue.buffers[TopicPartition(other, 0)].held_back, "it is fetched ahead, as much as is useful"
            )
            assert source.handed_out - before >= AHEAD_MESSAGES_MAX
            assert reader.got == []
            open_again()
            until(lambda: len(reader.got) == 3 * FILLED, "all of it comes when the gate is open")
            assert sorted(reader.got) == [(partition, offset) for partition in range(3) for offset in range(FILLED)]
        finally:
            open_again()
            reader.stop()


def next_of(consumer: Consumer) -> Iterator[Message]:
    while (message := consumer.next(expires_s=30)) is not None:
        message.ack()
        yield message


def fetched(consumer: Consumer) -> Iterator[Message]:
    """In batches that ask for more than there may be."""
    while True:
        batch = consumer.fetch(2_000, min_messages=2_000, expires_s=0.5)
        batch.ack()
        yield from batch


def consumed_whole(consumer: Consumer) -> Iterator[Message]:
    for message in consumer.consume():
        message.ack()
        yield message


LARGE, COUNT = 1_000, 300  # bytes of a message, messages of a partition
BOUND = 40 * LARGE


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("way", [one_by_one, next_of, fetched, consumed_whole])
@pytest.mark.parametrize("delivery", KINDS)
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.proof), 4])
def test_what_is_buffered_is_bounded_in_bytes(
    cluster: OneQueueTestCluster, partitions: int, delivery: str, way: Callable[[Consumer], Iterator[Message]]
) -> None:
    """However few messages they are, and whatever the user asks for: of all partitions together `prefetch_bytes`."""
    topic = filled(cluster, partitions, COUNT, LARGE)
    with (
        cluster.connect() as marshal,
        calm(marshal, cluster.group(), [topic], delivery=delivery, prefetch_bytes=BOUND) as consumer,
    ):
        until(owns(consumer, *range(partitions)), "all partitions are its")
        held = watch_bytes(consumer)
        found: dict[int, list[int]] = {partition: [] for partition in range(partitions)}
        for got, message in enumerate(way(consumer), 1):
            found[message.partition].append(message.offset)
            if got == partitions * COUNT:
                break
        assert found == {partition: list(range(COUNT)) for partition in range(partitions)}
        assert BOUND // FILLED_SHARE <= max(held) <= BOUND


def watch_bytes(consumer: Consumer) -> list[int]:
    """Returns a list to which the size of all buffers is added, whenever messages come."""
    queue, held = consumer._queue, [0]
    add = queue.add

    def watched(chunks: Any) -> None:
        add(chunks)
        held.append(held_bytes(queue.buffers.values()))

    queue.add = watched  # type: ignore[method-assign]
    return held


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("way", [one_by_one, consumed_whole])
def test_partitions_that_wait_for_acks_neither_fill_memory_nor_keep_the_others_waiting(
    cluster: OneQueueTestCluster, way: Callable[[Consumer], Iterator[Message]]
) -> None:
    """With `max_acks_pending` a forgotten message keeps its partition's messages in the buffers."""
    topic = filled(cluster, 3, COUNT, LARGE)
    with (
        cluster.connect() as marshal,
        joined(marshal, cluster.group(), [topic], prefetch_bytes=BOUND, max_acks_pending=1) as consumer,
    ):
        until(owns(consumer, 0, 1, 2), "all partitions are its")
        held = watch_bytes(consumer)
        acked = Message.ack
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Message, "ack", lambda message: message.partition == 2 and acked(message))
            count = 0
            for message in way(consumer):
                count += message.partition == 2
                if count == COUNT:
                    break
        assert max(held) <= BOUND


MEGABYTE = b"x" * 1_000_000
NEVER_S = 3_600.0  # longer than any test


def megabytes(cluster: OneQueueTestCluster, partitions: int) -> str:
    """A topic with more messages of 1 MB than `prefetch_bytes` may hold: it takes 34 to reach the default."""
    topic = cluster.topic(partitions)
    for number in range(60):
        cluster.put(topic, number % partitions, MEGABYTE)
    return topic


def by_fetch(consumer: Consumer) -> Iterator[Message]:
    while batch := consumer.fetch(5, min_messages=5, expires_s=0.2):
        yield from batch


def by_next(consumer: Consumer) -> Iterator[Message]:
    while (message := consumer.next(expires_s=0.2)) is not None:
        yield message


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("way", [by_fetch, by_next])
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.proof), 12])
def test_messages_that_were_given_back_count_among_the_buffered_ones(
    cluster: OneQueueTestCluster, partitions: int, way: Callable[[Consumer], Iterator[Message]]
) -> None:
    """All are given back for an hour: at `prefetch_bytes` no new one comes. What is due comes all the same."""
    topic = megabytes(cluster, partitions)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        until(owns(consumer, *range(partitions)), "all partitions are its")
        waiting, queue = [], consumer._queue
        while queue.answers.waiting_bytes() < PREFETCH_BYTES:
            for message in way(consumer):
                message.nak(NEVER_S)
                waiting.append(message)
                held = queue.answers.waiting_bytes() + held_bytes(queue.buffers.values())
                assert held < PREFETCH_BYTES + 2 * len(MEGABYTE)
        assert len(waiting) == PREFETCH_BYTES // len(MEGABYTE) + 1
        assert queue.takes(1_000) == 0
        until(lambda: any(event.kind == "nak_storm" for event in consumer.events()), "it is reported")
        for message in waiting[:3]:
            message.ack()
        more = next(way(consumer))
        assert more.offset >= max(one.offset for one in waiting if one.partition == more.partition)
        more.nak(0)
        assert next(way(consumer)).nak(NEVER_S), "the one that is due comes again"
        for message in [*waiting, more]:
            message.ack()
        assert len(collect(consumer, 60 - len(waiting) - 1)) == 60 - len(waiting) - 1


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.proof), 12])
def test_a_consume_whose_handler_fails_for_every_message_is_bounded(
    cluster: OneQueueTestCluster, partitions: int
) -> None:
    topic = megabytes(cluster, partitions)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        until(owns(consumer, *range(partitions)), "all partitions are its")
        waiting: list[Message] = []

        def handle(message: Message) -> None:
            waiting.append(message)
            message.nak(NEVER_S)

        context, queue = consumer.consume(handle), consumer._queue
        until(lambda: queue.answers.waiting_bytes() >= PREFETCH_BYTES, "the bound is reached")
        assert queue.takes(1_000) == 0
        assert len(waiting) <= PREFETCH_BYTES // len(MEGABYTE) + 2
        done: set[int] = set()

        def all_came() -> bool:
            for at in range(len(waiting)):
                if at not in done:
                    done.add(at)
                    waiting[at].ack()
            return len(waiting) == 60

        until(all_came, "acks make room")
        context.stop()


@pytest.mark.usefixtures("slow")
def test_dead_letters_that_are_not_written_count_among_the_buffered_messages(
    cluster: OneQueueTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead-letter topic does not answer, and every message must go there. Then it answers."""
    monkeypatch.setattr(handlers_answers, "RETRY_S", 0.01)
    monkeypatch.setattr(handlers_answers, "RETRY_S_MAX", 0.01)
    answers, write = threading.Event(), MemoryWriter.write

    def refuse(writer: MemoryWriter, topic: str, *rest: Any) -> None:
        if topic == letters and not answers.is_set():
            raise PartitionError(topic, 0, "the test says so")
        write(writer, topic, *rest)

    topic, letters = megabytes(cluster, 12), cluster.topic()
    monkeypatch.setattr(MemoryWriter, "write", refuse)
    with (
        cluster.connect() as marshal,
        joined(marshal, cluster.group(), [topic], max_deliver=2, dead_letter_topic=letters) as consumer,
    ):
        until(owns(consumer, *range(12)), "all partitions are its")
        ended, queue = 0, consumer._queue
        while queue.answers.waiting_bytes() < PREFETCH_BYTES:
            for message in consumer.fetch(5, min_messages=5, expires_s=1.0):
                message.term("bad")
                ended += 1
        assert ended <= PREFETCH_BYTES // len(MEGABYTE) + 1
        assert queue.takes(1_000) == 0
        answers.set()
        while ended < 60:
            for message in consumer.fetch(5, min_messages=5, expires_s=1.0):
                message.term("bad")
                ended += 1
        until(lambda: queue.answers.letters is not None and queue.answers.letters.written == 60, "all are written")
        assert queue.answers.waiting_bytes() == 0


@pytest.mark.bounds(prefetch=50)
def test_in_at_most_once_mode_what_waits_for_grants_that_do_not_come_is_bounded(cluster: OneQueueTestCluster) -> None:
    """D2: while the log does not answer there are no grants."""
    topic = filled(cluster, 2, 3_000, 1_000)
    with (
        cluster.connect() as marshal,
        calm(marshal, cluster.group(), [topic], delivery="at_most_once", prefetch_bytes=100_000) as consumer,
    ):
        until(owns(consumer, 0, 1), "all partitions are its")
        cluster.broker.writable = False
        tries = itertools.count()
        until(lambda: not consumer.fetch(10, expires_s=0) and next(tries) > 200, "it has asked long enough")
        assert 0 < held_bytes(consumer._queue.buffers.values()) <= 100_000
        cluster.broker.writable = True


# --- the bounds themselves


def message(offset: int, size: int, key: bytes | None = None) -> MemoryMessage:
    return MemoryMessage("orders", 0, offset, key, b"x" * size if size else None, None, 0)


def buffer_of(partition: int, sizes: list[int]) -> Buffer:
    buffer = Buffer(TopicPartition("orders", partition), 0)
    if sizes:
        buffer.add([message(at, size) for at, size in enumerate(sizes)])
    return buffer


def room_of(buffers: list[Buffer], prefetch_: Prefetch | None = None) -> Room:
    """The room where more messages are buffered than are taken at once."""
    room = (prefetch_ or Prefetch(2_000, 0)).room(buffers)
    assert room is not None
    return room


def test_a_partition_alone_may_have_everything() -> None:
    room = room_of([buffer_of(0, [10]), *(buffer_of(p, []) for p in range(1, 10))])
    assert (room.messages, room.size_bytes) == (BUFFERED_MESSAGES_MAX, 1_000)


def test_partitions_that_have_something_share_evenly() -> None:
    """Each may have twice its share of the bytes, because the whole is bounded, too."""
    room = room_of([*(buffer_of(p, [10]) for p in range(4)), buffer_of(4, [])])
    assert (room.messages, room.size_bytes) == (BUFFERED_MESSAGES_MAX // 4, 500)


def test_position_text_everything_is_used_up_each_has_its_share_of_all() -> None:
    """So that the ones that come later have room."""
    room = room_of([buffer_of(0, [1_000]), buffer_of(1, []), *(buffer_of(p, []) for p in (2, 3))])
    assert room.size_bytes == 500


def test_the_batch_that_the_user_asks_for_has_room() -> None:
    prefetch_ = Prefetch(2_000, 0)
    prefetch_.wanted = BUFFERED_MESSAGES_MAX
    assert room_of([buffer_of(0, [10])], prefetch_).messages == 2 * BUFFERED_MESSAGES_MAX


def test_nothing_is_paused_while_the_buffers_hold_little_of_both() -> None:
    assert Prefetch(2_000, 3).room([buffer_of(0, [300] * 3)]) is None
    assert Prefetch(2_000, 2).room([buffer_of(0, [300] * 3)]) is not None, "more messages than are taken at once"
    assert Prefetch(1_800, 3).room([buffer_of(0, [300] * 3)]) is not None, "as many bytes as there may be"


def test_a_full_partition_is_not_low_and_an_empty_one_is() -> None:
    room = room_of([buffer_of(0, [100] * 10)])
    full, low, empty = buffer_of(0, [100] * 10), buffer_of(0, [100] * 2), buffer_of(0, [])
    assert [room.full(b) for b in (full, low, empty)] == [True, False, False]
    assert [room.low(b) for b in (full, low, empty)] == [False, True, True]
    assert not room.low(buffer_of(0, [100] * 5)), "what is paused stays paused until it is low"


def test_a_piece_is_what_one_partition_may_have() -> None:
    prefetch_ = Prefetch(20_000, 100)
    empty = [buffer_of(p, []) for p in range(4)]
    assert prefetch_.piece(empty) == 100
    assert prefetch_.piece([buffer_of(0, [500] * 10), *empty[1:]]) == 10_000 // 4 // 500
    assert prefetch_.piece([buffer_of(0, [500] * 19), *empty[1:]]) == 1
    assert prefetch_.piece([buffer_of(0, [500] * 20), *empty[1:]]) == 0, "the buffers are full"


def test_so_many_messages_are_taken_at_once_as_should_fit() -> None:
    prefetch_ = Prefetch(20_000, 100)
    assert prefetch_.takes([buffer_of(0, [])], 650) == 650, "librdkafka's queue has a bound of its own"
    assert prefetch_.takes([buffer_of(0, [500] * 10)], 650) == 10
    assert prefetch_.takes([buffer_of(0, [500] * 10)], 5) == 5
    assert prefetch_.takes([buffer_of(0, [500] * 10)], 0) == 0, "nothing is taken when nothing is asked for"
    assert prefetch_.takes([buffer_of(0, [9_999])], 650) == 1
    assert prefetch_.takes([buffer_of(0, [9_999]), buffer_of(1, [1])], 650) == 0


def test_every_value_of_a_chunk_is_measured() -> None:
    """Whatever rhythm they come in, and however rare the large ones are."""
    buffer = Buffer(TopicPartition("orders", 0), 0)
    sizes = [1_000_000 if at == 1_777 else 10 for at in range(10_000)]
    for first in range(0, len(sizes), 1_000):
        buffer.add([message(at, sizes[at]) for at in range(first, first + 1_000)])
    assert buffer.held_bytes() == sum(sizes)


def test_delivered_messages_count_until_their_chunk_is_freed() -> None:
    buffer = buffer_of(0, [100] * 10)
    buffer.fetched[0].at = 9
    assert buffer.held_bytes() == 1_000


def test_large_chunks_are_not_merged() -> None:
    """A chunk is held in memory until all of it is delivered."""
    buffer, small = buffer_of(0, [10]), buffer_of(1, [10])
    for at in range(1, 6):
        buffer.add([message(at, 2_000_000)])
        small.add([message(at, 2_000)])
    assert [len(buffer.fetched), len(small.fetched)] == [6, 2]


def test_keys_count_and_a_tombstone_has_no_value() -> None:
    buffer = Buffer(TopicPartition("orders", 0), 0)
    buffer.add([message(at, 5 if at else 0, b"key") for at in range(10 * KEYS_SAMPLED)])
    assert buffer.held_bytes() == 5 * (10 * KEYS_SAMPLED - 1) + 3 * 10 * KEYS_SAMPLED


def test_fast_and_unmeasured_users_do_not_count_as_slow() -> None:
    rate, prefetch_ = HandlingRate(), Prefetch(1_000, 100)
    assert not prefetch_.due(rate, 10_000)
    rate.delivered(0, 10_000)
    rate.returned(100_000, 11_000)  # 100,000 in a second
    assert not prefetch_.due(rate, 11_000)
    for _ in range(100):
        rate.delivered(100_000, 20_000)
        rate.returned(100_100, 21_000)  # 100 in a second
    assert rate.slower_than(SLOW_PER_S)
    assert prefetch_.due(rate, 30_000)
    assert not prefetch_.due(rate, 30_000 + LOOK_MS - 1), "a look now and then is enough"
    assert prefetch_.due(rate, 30_000 + LOOK_MS)


def test_librdkafka_is_bounded_as_well_and_the_users_settings_win() -> None:
    given = {"bootstrap.servers": "localhost:9092"}
    queue_bytes = PREFETCH_BYTES // FILLED_SHARE
    ours = settings.data_reader(given, "c", "g", None, queue_bytes)
    assert ours["queued.max.messages.kbytes"] == queue_bytes // 1024
    assert ours["fetch.max.bytes"] == queue_bytes // 2
    assert ours["queued.min.messages"] < 100_000
    theirs = {"queued.max.messages.kbytes": 7, "queued.min.messages": 8, "fetch.max.bytes": 9}
    assert settings.data_reader({**given, **theirs}, "c", "g", None, queue_bytes).items() >= theirs.items()


@pytest.mark.parametrize(
    "prefetch_bytes", [PREFETCH_BYTES_MIN, PREFETCH_BYTES, 10 * PREFETCH_BYTES, PREFETCH_BYTES_MAX]
)
@pytest.mark.parametrize("largest", [{}, {"message.max.bytes": 4_000_000}, {"message.max.bytes": "90000000"}])
def test_librdkafka_takes_the_bounds_that_follow_from_any_option(prefetch_bytes: int, largest: dict[str, Any]) -> None:
    """It refuses an answer of a broker that may be smaller than a message, or larger than it receives."""
    given = {"bootstrap.servers": "localhost:1", **largest}
    made = settings.data_reader(given, "c", "g", None, prefetch_bytes // FILLED_SHARE)
    settings.create_client(KafkaConsumer, made).close()
