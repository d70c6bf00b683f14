"""Ack handles: a small value that goes to another thread or process and back, and is completed by its consumer."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from marshal_py import AckNotConfirmed, aio
from marshal_py.client.messages import message as handles
from marshal_py.errors import ClaimLost, HandleUnknown, MessageNotPickled, NeedsAtLeastOnce
from marshal_py.testing import make_message
from tests.support.client_fixtures import DEADLINE_S, INTERVAL_S, MemoryTestCluster, collect, joined, positions, until


def test_a_pool_of_processes_sends_handles_back(memory: MemoryTestCluster) -> None:
    """A handle is sent to a worker process and back, and `Consumer.complete` is called in the owning process.

    ACKS: The acknowledgement of a message can be given to another thread or process as a small opaque handle and
    completed by its consumer.
    """
    spawn = multiprocessing.get_context("spawn")
    with memory.reading(6) as consumer:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            messages = collect(consumer, 6, ack=False)
            done = list(pool.map(copy.copy, [message.handle() for message in messages], timeout=DEADLINE_S))
        assert [consumer.complete(handle) for handle in reversed(done)] == [True] * 6
        assert positions(consumer) == {0: 6}


def test_a_handle_is_small_and_completed_once_or_twice(memory: MemoryTestCluster) -> None:
    """ACKS: The acknowledgement of a message can be given to another thread or process as a small opaque handle and
    completed by its consumer.
    """
    topic = memory.topic(2)
    memory.fill(topic, 0, 3)
    memory.fill(topic, 1, 3)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        found = {message.handle(): message for message in collect(consumer, 6, ack=False)}
        assert len(found) == 6
        assert {len(handle) for handle in found} == {36 + len(topic)}
        for handle, message in found.items():
            assert consumer.message(handle) is message
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(consumer.complete, handle).result()
            assert consumer.complete(handle), "a second call changes nothing"
        assert positions(consumer) == {0: 3, 1: 3}
        assert consumer.cached_info().late_acks == 0


def test_a_handle_is_completed_again_after_its_claim(memory: MemoryTestCluster) -> None:
    """The log has the ack: it comes not too late, and `flush` has nothing to raise. One that was not completed does."""
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        first, second = [message.handle() for message in collect(consumer, 2, ack=False)]
        assert consumer.complete(first)
        consumer.flush()
        memory.local.evict(consumer)
        assert consumer.complete(first)
        consumer.flush()
        assert consumer.cached_info().late_acks == 0
        assert not consumer.complete(second)
        with pytest.raises(ClaimLost):
            consumer.flush()


def test_other_answers_go_through_the_message(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        first, second = [message.handle() for message in collect(consumer, 2, ack=False)]
        assert consumer.message(first).nak(0)
        assert consumer.message(second).term("no JSON")
        again = collect(consumer, 1, ack=False)[0]
        assert (again.offset, again.delivery_count) == (0, 2)
        assert consumer.complete(first), "the same message, delivered again"
        with pytest.raises(HandleUnknown, match=f"{topic}:0@0 is done"):
            consumer.message(first)
        assert positions(consumer) == {0: 2}


def test_a_handle_can_be_confirmed(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        first, second, third = [message.handle() for message in collect(consumer, 3, ack=False)]
        assert consumer.message(second).double_ack()
        with monkeypatch.context() as patch:
            patch.setattr(consumer._driver.context.coordination, "append", lambda *_: True)
            with pytest.raises(AckNotConfirmed):
                consumer.message(first).double_ack(0.1)
        consumer.flush()
        claims = consumer._member.claims.copy()
        assert [claim.position() for claim in claims.values()] == [2]
        consumer.stop()
        assert not consumer.complete(third), "its claim is over"
        assert consumer.cached_info().late_acks == 1


def test_a_handle_of_another_consumer_is_refused(memory: MemoryTestCluster) -> None:
    """ACKS: A damaged handle, or one of another consumer, is refused."""
    topic = memory.topic(2)
    memory.fill(topic, 0, 1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        joined(marshal, memory.group(), [topic]) as other,
    ):
        handle = collect(consumer, 1, ack=False)[0].handle()
        for wrong in (handle, b"", b"x" * 60, consumer._handles._consumer):
            with pytest.raises(HandleUnknown, match="this consumer has not made it"):
                other.complete(wrong) if wrong == handle else consumer.complete(wrong)
            with pytest.raises(HandleUnknown):
                other.message(wrong)
        assert consumer.complete(handle)


def test_a_damaged_handle_is_refused(memory: MemoryTestCluster) -> None:
    """Each changed byte, a missing one and an added one are noticed; nothing is acked. A wrong type is named.

    ACKS: A damaged handle, or one of another consumer, is refused.
    """
    topic = memory.topic(2)
    memory.fill(topic, 0, 2)
    memory.fill(topic, 1, 2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        handle = next(one for one in collect(consumer, 4, ack=False) if one.partition == 0 and one.offset == 0).handle()
        flipped = [handle[:at] + bytes([handle[at] ^ 1]) + handle[at + 1 :] for at in range(len(handle))]
        for wrong in (handle[:-1], handle + b"z", handle[1:], *flipped):
            with pytest.raises(HandleUnknown):
                consumer.complete(wrong)
            with pytest.raises(HandleUnknown):
                consumer.message(wrong)
        with pytest.raises(HandleUnknown, match="damaged on its way"):
            consumer.complete(handle + b"z")
        for value in ("text", None, 7, bytearray(handle), memoryview(handle)):
            with pytest.raises(HandleUnknown, match=f"a handle is bytes.* of type {type(value).__name__}"):
                consumer.complete(value)  # type: ignore[arg-type]
        assert positions(consumer) == {0: 0, 1: 0}
        assert consumer.complete(handle)
        assert positions(consumer) == {0: 1, 1: 0}


def test_what_is_kept_for_handles_is_bounded(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is acked without its handle is forgotten, too.

    ACKS: What is kept for handles is bounded.
    """
    monkeypatch.setattr(handles, "KEPT_MIN", 10)
    with memory.reading(200) as consumer:
        consumer._handles._look_at = 20
        messages = collect(consumer, 200, ack=False)
        for message in messages[5:]:
            message.handle()
            message.ack()
            assert len(consumer._handles._kept) <= 20
        kept = [message.handle() for message in messages[:5]]
        assert [consumer.message(handle).offset for handle in kept] == [0, 1, 2, 3, 4]


def test_in_at_most_once_mode_a_handle_says_that_the_handler_is_done(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic], delivery="at_most_once")
        handle = collect(consumer, 1, ack=False)[0].handle()
        until(lambda: marshal.metrics().consumers[0].partitions[0].oldest_unacked_ms >= 0, "figures")
        assert consumer.complete(handle)
        assert [claim.tracker.in_flight for claim in consumer._member.claims.values()] == [0]
        with pytest.raises(NeedsAtLeastOnce):
            consumer.message(handle)
        consumer.stop()
        assert not consumer.complete(handle)


def test_a_message_itself_does_not_go_to_another_process(memory: MemoryTestCluster) -> None:
    """In a foreign process without a handle it raises, and the error names the way.

    ACKS: In a foreign process without a handle it raises.
    """
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        batch = consumer.fetch(1, expires_s=DEADLINE_S)
        for one in (batch, batch.parts[0], next(iter(batch))):
            with pytest.raises(MessageNotPickled, match=rf"{topic}:0@0 cannot .*message\.handle\(\)"):
                pickle.dumps(one)
        batch.ack()
    assert len(make_message(b"1").handle()) == 36 + len("test")


def test_the_asyncio_front_completes_handles_too(memory: MemoryTestCluster) -> None:
    """ACKS: A task of asyncio completes handles, too."""
    topic = memory.topic()
    memory.fill(topic, 0, 2)

    async def run() -> None:
        async with await aio.connect(memory.target) as marshal:
            options = {"heartbeat_interval_s": INTERVAL_S, "start": "earliest"}
            async with await marshal.consumer(memory.group(), [topic], **options) as consumer:
                batch = await consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)
                first, second = [message.handle() for message in batch]
                assert consumer.complete(first)
                assert await consumer.double_ack(consumer.message(second))

    asyncio.run(run())
