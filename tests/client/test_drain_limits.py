"""What a drain of a consume still delivers: no more than its limit in messages or bytes, whoever asks for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from marshal_py import Message, aio
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S, joined, until

LIMITS = [{"max_messages": 10}, {"max_bytes": 1000}]  # about nine messages: the tenth does not fit


def filled() -> MemoryCluster:
    cluster = MemoryCluster()
    cluster.create_topic("orders")
    cluster.produce_many("orders", [b"x" * 100] * 500)
    return cluster


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("who", ["context", "consumer"])
def test_a_drain_delivers_no_more_than_the_limit(who: str, limit: dict[str, Any]) -> None:
    """The rest of a limit in bytes is smaller than the next message, and the drain ends all the same."""
    with filled() as cluster:
        consumer = joined(cluster.connect(), "billing", ["orders"])
        handled, go_on = threading.Semaphore(0), threading.Semaphore(0)
        offsets: list[int] = []

        def handle(message: Message[Any, Any]) -> None:
            offsets.append(message.offset)
            handled.release()
            assert go_on.acquire(timeout=DEADLINE_S)
            message.ack()

        context = consumer.consume(handle, **limit)
        assert handled.acquire(timeout=DEADLINE_S)
        until(lambda: sum(context.pending()) > 0, "more is buffered")
        drained: list[object] = []
        drain = context.drain if who == "context" else consumer.drain
        thread = threading.Thread(target=lambda: drained.append(drain(DEADLINE_S)), daemon=True)
        thread.start()
        until(lambda: context._demand.drain_until is not None, "it drains")
        go_on.release(500)
        thread.join(DEADLINE_S / 2)
        assert drained == [True if who == "context" else None], "it has ended before its time is over"
        assert len(offsets) <= 11
        assert offsets == [*range(len(offsets))]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_loop_over_a_consume_that_drains_ends(limit: dict[str, Any]) -> None:
    with filled() as cluster:
        consumer = joined(cluster.connect(), "billing", ["orders"])
        context, count = consumer.consume(**limit), 0
        for message in context:
            count += 1
            message.ack()
            if count == 1:
                context.drain(DEADLINE_S)
        assert count <= 11
        assert context.drain()


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_drain_counts_what_loops_took_that_were_left(limit: dict[str, Any]) -> None:
    with filled() as cluster:
        consumer = joined(cluster.connect(), "billing", ["orders"])
        consumer.fetch(1, expires_s=DEADLINE_S)[0].ack()  # more is buffered than the limit
        context, count = consumer.consume(**limit), 0
        while not context.closed:
            for message in context:
                count += 1
                message.ack()
                context.drain(DEADLINE_S)
                break
        assert count <= 11


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_it_counts_them_with_asyncio(limit: dict[str, Any]) -> None:
    async def main(servers: str) -> int:
        async with (
            aio.connect(servers) as marshal,
            marshal.consumer("billing", ["orders"], start="earliest") as consumer,
        ):
            (await consumer.fetch(1, expires_s=DEADLINE_S))[0].ack()  # more is buffered than the limit
            context, count = consumer.consume(**limit), 0
            while not context.closed:
                async for message in context:
                    count += 1
                    message.ack()
                    await context.drain(DEADLINE_S)
                    break
            return count

    with filled() as cluster:
        assert asyncio.run(main(cluster.bootstrap_servers)) <= 11


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_the_same_with_asyncio(limit: dict[str, Any]) -> None:
    async def main(servers: str) -> None:
        async with (
            aio.connect(servers) as marshal,
            marshal.consumer("billing", ["orders"], start="earliest") as consumer,
        ):
            count, begun = 0, asyncio.Event()

            async def handle(message: Message[Any, Any]) -> None:
                nonlocal count
                count += 1
                begun.set()
                await asyncio.sleep(0)
                message.ack()

            context = consumer.consume(handle, **limit)
            await begun.wait()
            before = count
            assert await context.drain(DEADLINE_S)
            assert count - before <= 11

    with filled() as cluster:
        asyncio.run(main(cluster.bootstrap_servers))


def test_a_cancelled_task_that_held_its_iterator_in_a_variable_is_in_nobodys_way() -> None:
    async def main(servers: str) -> None:
        connected = aio.connect(servers)
        async with connected as marshal, marshal.consumer("billing", ["orders"], start="earliest") as consumer:
            begun = asyncio.Event()
            kept: list[Any] = []  # as a frame that the error names keeps it

            async def work() -> None:
                messages = aiter(consumer)
                kept.append(messages)
                async for message in messages:
                    message.ack()
                    begun.set()
                    await asyncio.sleep(DEADLINE_S)

            task = asyncio.create_task(work())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            message = await consumer.next(DEADLINE_S)
            assert message is not None
            assert [message.offset async for message in kept[0]] == [], "nobody can continue it"
            assert message.ack()

    with filled() as cluster:
        asyncio.run(main(cluster.bootstrap_servers))


def test_what_is_pending_is_told_in_one_measure() -> None:
    """A look may buffer more than was asked for: that counts neither in bytes nor in messages."""
    with filled() as cluster:
        consumer = joined(cluster.connect(), "billing", ["orders"])
        context = consumer.consume(max_bytes=1000)
        demand = context._demand
        demand._buffered = lambda: (400, 42_800)  # type: ignore[method-assign]  # as after a look
        info = consumer.cached_info()
        assert (info.pending_messages, info.pending_bytes) == (9, 1000)
        context.stop()
