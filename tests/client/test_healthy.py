"""`healthy`, which a probe of a container asks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from marshal_py import InvalidOption, aio
from marshal_py.transport.memory import MemoryTransport
from tests.support.client_fixtures import MemoryTestCluster, joined, owns, until


def test_a_consumer_is_healthy_while_it_works(memory: MemoryTestCluster) -> None:
    """A standby is, too; one that nobody asks for messages is not, nor one that has ended."""
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        assert consumer.healthy()
        until(owns(consumer, 0), "the partition is ours")
        with memory.connect() as other, joined(other, group, [topic]) as standby:
            assert standby.healthy()
        consumer._queue.asked_ms -= 61_000
        assert not consumer.healthy()
        assert "its program, which has asked for no message for 61 s" in consumer.cached_info().waiting_for
        assert consumer.healthy(max_silence_s=3_600)
        assert consumer.next(expires_s=0) is None
        assert consumer.healthy(), "the program asks again"
        assert consumer.cached_info().waiting_for == ""
        consumer.stop()
        assert not consumer.healthy()


def test_a_consumer_that_hears_nothing_is_not_healthy(memory: MemoryTestCluster) -> None:
    with memory.connect() as marshal, joined(marshal, memory.group(), [memory.topic()]) as consumer:
        assert isinstance(marshal.transport, MemoryTransport)
        marshal.transport.connection.cut = True
        memory.broker.wake()
        until(lambda: not consumer.healthy(3_600), "it notices")
        marshal.transport.connection.cut = False
        memory.broker.wake()
        until(lambda: consumer.healthy(3_600), "it is heard again")


@pytest.mark.parametrize("wrong", [None, "60", -1, float("nan"), True])
def test_a_wrong_silence_is_refused(memory: MemoryTestCluster, wrong: Any) -> None:
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [memory.topic()]) as consumer,
        pytest.raises(InvalidOption, match="max_silence_s"),
    ):
        consumer.healthy(wrong)


def test_the_same_with_asyncio(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        async with (
            aio.connect(MemoryTransport(memory.broker)) as marshal,
            marshal.consumer(memory.group(), [topic]) as consumer,
        ):
            assert consumer.healthy()
            assert not await consumer.fetch(1, expires_s=0)
            assert consumer.healthy()
            await consumer.stop()
            assert not consumer.healthy()

    asyncio.run(main())
