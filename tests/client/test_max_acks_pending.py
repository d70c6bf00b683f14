"""`max_acks_pending`: how many messages of a partition are delivered and not finished at once; at 1 the order holds."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from marshal_py import ConsumerOptions, InvalidOption, Message, aio
from marshal_py.client import connection
from marshal_py.client.delivery.buffers import Reserved
from marshal_py.client.delivery.prefetch import WAIT_S_MAX, WAIT_S_MIN
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, TestCluster, joined, positions, until

NEVER_S = 3_600.0  # longer than any test


def offsets(batch: Any) -> list[tuple[int, int]]:
    return [(message.partition, message.offset) for message in batch]


@pytest.mark.parametrize("most", [1, 3])
def test_a_fetch_has_no_more_of_a_partition_than_may_be_pending(cluster: TestCluster, most: int) -> None:
    """Partitions do not wait for each other, and an ack makes room for one message."""
    topic = cluster.topic(2)
    for partition in range(2):
        cluster.fill(topic, partition, 6)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic], max_acks_pending=most) as consumer:
        held: list[Message] = []
        while len(held) < 2 * most:
            held += consumer.fetch(100, expires_s=DEADLINE_S, min_messages=1)
        assert sorted(offsets(held)) == [(partition, at) for partition in range(2) for at in range(most)]
        assert not consumer.fetch(100, expires_s=0)
        first = next(message for message in held if (message.partition, message.offset) == (1, 0))
        first.ack()
        assert offsets(consumer.fetch(100, min_messages=100, expires_s=DEADLINE_S)) == [(1, most)], (
            "it does not wait for 100"
        )


def test_at_one_a_message_that_is_given_back_holds_its_partition_back(cluster: TestCluster) -> None:
    """The order within the partition holds; the other partition is delivered meanwhile."""
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 3)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic], max_acks_pending=1) as consumer:
        seen: list[tuple[int, int]] = []
        for message in consumer:
            seen.append((message.partition, message.offset))
            if message.partition == 1:
                message.ack()
                break
            if message.offset == 1:
                assert message.delivery_count == 1, "nothing of the partition comes while it waits"
                assert message.nak(NEVER_S)
                cluster.fill(topic, 1, 1)
            else:
                message.ack()
        assert seen == [(0, 0), (0, 1), (1, 0)]
        assert not consumer.fetch(10, expires_s=0)
        assert positions(consumer) == {0: 1, 1: 1}


@pytest.mark.parametrize("front", ["iteration", "fetch", "next", "consume"])
def test_every_way_to_receive_keeps_the_order_after_naks(memory: MemoryTestCluster, front: str) -> None:
    """Each third message is given back twice: it comes again before the next one."""
    topic, count = memory.topic(), 9
    memory.fill(topic, 0, count)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], max_acks_pending=1) as consumer:
        seen: list[tuple[int, int]] = []
        done = threading.Event()

        def handle(message: Message) -> None:
            seen.append((message.offset, message.delivery_count))
            if message.offset % 3 == 0 and message.delivery_count < 3:
                message.nak(0)
                return
            message.ack()
            if message.offset == count - 1:
                done.set()

        if front == "consume":
            with consumer.consume(handle):
                assert done.wait(DEADLINE_S)
        while not done.is_set():
            match front:
                case "iteration":
                    messages: Any = consumer
                case "fetch":
                    messages = consumer.fetch(100, expires_s=DEADLINE_S, min_messages=1)
                case _:
                    messages = [consumer.next(expires_s=DEADLINE_S)]
            for message in messages:
                handle(message)
                if done.is_set():
                    break
        expected = [(at, times) for at in range(count) for times in range(1, 4 if at % 3 == 0 else 2)]
        assert seen == expected


def test_an_ack_of_another_thread_makes_room(memory: MemoryTestCluster) -> None:
    """A pool of handlers: the consumer waits for the one message of the partition, not for its thread."""
    topic, count = memory.topic(), 20
    memory.fill(topic, 0, count)
    busy: list[int] = []
    most = 0
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], max_acks_pending=2) as consumer:
        timers = []

        def answer(message: Message) -> None:
            busy.remove(message.offset)
            message.ack()

        for message in itertools.islice(consumer, count):
            busy.append(message.offset)
            most = max(most, len(busy))
            timers.append(threading.Timer(0.001, answer, [message]))
            timers[-1].start()
        for timer in timers:
            timer.join()
        until(lambda: positions(consumer) == {0: count}, "everything is done")
    assert most <= 2


def test_a_task_that_acks_makes_room(memory: MemoryTestCluster) -> None:
    """With asyncio the same: the event loop is free while the consumer waits for the ack."""
    topic, count = memory.topic(), 5
    memory.fill(topic, 0, count)

    async def run() -> list[int]:
        seen: list[int] = []
        async with (
            aio.connect(memory.target) as marshal,
            await marshal.consumer(memory.group(), [topic], start="earliest", max_acks_pending=1) as consumer,
        ):
            async for message in consumer:
                seen.append(message.offset)
                asyncio.get_running_loop().call_later(0.001, message.ack)
                if len(seen) == count:
                    break
        return seen

    assert asyncio.run(run()) == list(range(count))


def test_a_call_looks_for_acks_only_while_a_buffered_message_waits_for_one(memory: MemoryTestCluster) -> None:
    """Else it would wake a hundred times a second, as long as too few messages are there."""
    topic = memory.topic()
    memory.fill(topic, 0, 4)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], max_acks_pending=2) as consumer:
        queue = consumer._queue
        held = [consumer.next(expires_s=DEADLINE_S)]
        while queue.buffered() < 3:
            connection.complete(consumer._receiving.intake.look(), consumer._carry_out)
        assert queue.window.wait_s(queue.buffers.values(), queue.delivered) is None, "there is room for one"
        held.append(consumer.next(expires_s=DEADLINE_S))
        waits_s = [queue.window.wait_s(queue.buffers.values(), delivered) for delivered in (2, 2, 2, 3)]
        assert waits_s == [WAIT_S_MIN, 2 * WAIT_S_MIN, 4 * WAIT_S_MIN, WAIT_S_MIN], "longer and longer until one comes"
        consumer.pause([(topic, 0)])
        assert queue.window.wait_s(queue.buffers.values(), queue.delivered) is None, "an ack would change nothing"
        assert all(message is not None and message.ack() for message in held)


def test_a_drain_delivers_what_is_buffered_as_acks_come(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic], max_acks_pending=1)
        seen: list[int] = []
        consuming = consumer.consume(
            lambda message: (seen.append(message.offset), threading.Timer(0.001, message.ack).start())
        )
        until(lambda: seen, "the first message has come")
        assert consuming.drain(DEADLINE_S)
        assert seen == list(range(5))
        consumer.stop()


@pytest.mark.parametrize("inside", [False, True], ids=["between two calls", "inside a loop"])
def test_a_drain_does_not_wait_for_what_was_given_back(memory: MemoryTestCluster, inside: bool) -> None:
    """As without the option: the next owner gets the message, and what comes after it, in order."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic], max_acks_pending=1)
        received = iter(consumer) if inside else consumer.fetch(1, expires_s=DEADLINE_S)
        for message in received:
            assert message.nak(NEVER_S)
            consumer.drain(timeout_s=NEVER_S)
        assert consumer.cached_info().closed
        with joined(marshal, group, [topic], max_acks_pending=1) as successor:
            found = []
            for message in itertools.islice(successor, 3):
                found.append((message.offset, message.delivery_count))
                message.ack()
    assert found == [(0, 2), (1, 1), (2, 1)]


@pytest.mark.parametrize("asked", [{}, {"max_messages": 1}, {"max_messages": 4}, {"max_bytes": 50}], ids=str)
@pytest.mark.parametrize("handled", [False, True], ids=["loop", "handler"])
def test_a_partition_that_waits_for_an_ack_does_not_starve_the_others(
    memory: MemoryTestCluster, asked: dict[str, int], handled: bool
) -> None:
    """`consume`: what is buffered of it does not keep messages of others from being asked for."""
    topic = memory.topic(3)
    memory.fill(topic, 0, 3_000)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], max_acks_pending=1) as consumer:
        held: list[Message] = []
        others: list[tuple[int, int]] = []
        done = threading.Event()

        def handle(message: Message) -> None:
            if message.partition == 0:
                held.append(message)
                for partition in (1, 2):
                    memory.fill(topic, partition, 5)
                return
            others.append((message.partition, message.offset))
            message.ack()
            if len(others) == 10:
                done.set()

        if handled:
            with consumer.consume(handle, **asked):
                assert done.wait(DEADLINE_S)
        else:
            timer = threading.Timer(DEADLINE_S, consumer._ending.request_stop, [0.0])
            timer.start()
            with consumer.consume(**asked) as messages:
                for message in messages:
                    handle(message)
                    if done.is_set():
                        break
            timer.cancel()
        assert sorted(others) == [(partition, at) for partition in (1, 2) for at in range(5)]
        assert offsets(held) == [(0, 0)]
        held[0].ack()  # else the stop waits for it


def test_with_asyncio_a_partition_that_waits_for_an_ack_does_not_starve_the_others(memory: MemoryTestCluster) -> None:
    topic = memory.topic(2)
    memory.fill(topic, 0, 3_000)

    async def run() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        async with (
            aio.connect(memory.target) as marshal,
            await marshal.consumer(memory.group(), [topic], start="earliest", max_acks_pending=1) as consumer,
            consumer.consume(max_messages=4) as messages,
            asyncio.timeout(DEADLINE_S),
        ):
            async for message in messages:
                seen.append((message.partition, message.offset))
                if message.partition == 0:
                    held = message
                    memory.fill(topic, 1, 3)
                else:
                    message.ack()
                if len(seen) == 4:
                    held.ack()  # else the stop waits for it
                    break
        return seen

    assert asyncio.run(run()) == [(0, 0), (1, 0), (1, 1), (1, 2)]


@pytest.mark.bounds(unacked=40, prefetch=10)
@pytest.mark.parametrize("asked", [{}, {"max_messages": 1}, {"max_bytes": 50}], ids=str)
def test_a_consume_of_which_all_partitions_wait_for_acks_is_bounded_and_waits(
    memory: MemoryTestCluster, asked: dict[str, int]
) -> None:
    """Its buffers have the bounds of every iteration, and between two looks at the source it waits."""
    topic, most = memory.topic(), 40
    memory.fill(topic, 0, 500)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], max_acks_pending=1) as consumer:
        context = consumer.consume(**asked)
        assert next(iter(context)).offset == 0
        queue, demand = consumer._queue, context._demand
        assert not sum(demand.pending()) - demand._refill.to_come, "what waits for the ack is not pending"
        steps = consumer._receiving.iterate(demand)
        polls: list[int] = []  # between two waits
        pauses_s: list[float] = []
        wait: Any = next(steps)
        while len(pauses_s) < 50:
            assert not isinstance(wait, Reserved), "the partition is held"
            if isinstance(wait, connection.Change):
                pauses_s.append(wait.timeout_s)
                polls.append(0)
            elif polls:
                polls[-1] += 1
            wait = steps.send(None if isinstance(wait, connection.Change) else consumer._carry_out(wait))
        steps.close()
        assert queue.buffered() <= most + 10
        assert max(polls[25:]) <= 2, "it does not ask again and again"
        assert min(pauses_s[25:]) >= WAIT_S_MAX
        context.stop()


def test_a_dead_letter_counts_until_it_is_written(memory: MemoryTestCluster) -> None:
    """`max_deliver` at 1 pending: the next message comes when the letter is in its topic."""
    topic, letters = memory.topic(), memory.topic()
    memory.fill(topic, 0, 3)
    with (
        memory.connect() as marshal,
        joined(
            marshal, memory.group(), [topic], max_acks_pending=1, max_deliver=2, dead_letter_topic=letters
        ) as consumer,
    ):
        seen = []
        for message in consumer:
            seen.append((message.offset, message.delivery_count))
            if message.offset == 1:
                message.nak(0)
            else:
                message.ack()
            if message.offset == 2:
                break
    assert seen == [(0, 1), (1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "1", 1_000_001])
def test_a_wrong_bound_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match=r"max_acks_pending=.*a whole number from 1 to"):
        ConsumerOptions(max_acks_pending=wrong)


def test_in_at_most_once_mode_and_for_ranges_it_is_refused(memory: MemoryTestCluster) -> None:
    with pytest.raises(InvalidOption, match=r"max_acks_pending=1 .* before they are delivered"):
        ConsumerOptions(max_acks_pending=1, delivery="at_most_once")
    with memory.connect() as marshal, pytest.raises(InvalidOption, match=r"max_acks_pending=1 .* plans ranges"):
        marshal.planner(memory.group(), [memory.topic()], max_acks_pending=1)
