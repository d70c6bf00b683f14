"""`AsyncConsumer.consume`: by `async for`, with a handler in a task, how it ends, and cancelled anywhere.

The tests of the synchronous `consume` (test_consume.py) cover what both share.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from marshal_py import Message, aio
from marshal_py.client import async_consumer
from marshal_py.client.delivery import prefetch
from marshal_py.errors import (
    ConcurrentUse,
    ConsumerClosed,
    EventLoopMisuse,
    GroupDeleted,
    InvalidOption,
    NeedsAtLeastOnce,
    ReentrantCall,
)
from tests.client.test_aio import KINDS, OPTIONS, collect, cut, run, turn_until
from tests.client.test_consume import delete
from tests.client.test_no_call_under_lock import AT_ONCE, Watch
from tests.support.client_fixtures import DEADLINE_S, EmbeddedTestCluster, MemoryTestCluster, TestCluster

Consumer = aio.AsyncConsumer[Any, Any]


@asynccontextmanager
async def opened(cluster: TestCluster, topic: str, **options: Any) -> AsyncIterator[Consumer]:
    """A consumer whose lease survives a process that is frozen for seconds, so that no grant is lost."""
    options = {**OPTIONS, "heartbeat_interval_s": 60.0, **options}
    async with (
        aio.connect(cluster.target) as marshal,
        marshal.consumer(cluster.group(), [topic], **options) as consumer,
    ):
        yield consumer


@asynccontextmanager
async def handled(
    memory: MemoryTestCluster, messages: int, handler: Any, **given: Any
) -> AsyncIterator[tuple[Consumer, aio.AsyncConsumeContext[Any, Any]]]:
    """A consumer whose messages go to a handler. It owns its partition, which holds as many messages."""
    topic = memory.topic()
    memory.fill(topic, 0, messages)
    async with opened(memory, topic) as consumer:
        await turn_until(lambda: consumer.cached_info().claims, "claimed")
        yield consumer, consumer.consume(handler, **given)


def positions(consumer: Consumer) -> list[int]:
    return [claim.position for claim in consumer.cached_info().claims.values()]


class Handler:
    """Acks each message. While `open` is clear it waits; `then` is called before the ack."""

    def __init__(self, then: Any = None) -> None:
        self.seen: list[Message] = []
        self.open = asyncio.Event()
        self.open.set()
        self.then = then

    async def __call__(self, message: Message) -> None:
        self.seen.append(message)
        await self.open.wait()
        if self.then is not None:
            await self.then(message)
        message.ack()

    async def got(self, count: int) -> list[int]:
        await turn_until(lambda: len(self.seen) >= count, f"{count} messages are handled")
        return [message.offset for message in self.seen]


@pytest.mark.parametrize("delivery", KINDS)
@pytest.mark.parametrize("given", [{}, {"max_messages": 1}, {"max_messages": 7}, {"max_bytes": 100}], ids=str)
def test_a_loop_gets_everything_once_and_in_order(
    memory: MemoryTestCluster, delivery: str, given: dict[str, int]
) -> None:
    topic = memory.topic(2)
    for partition in (0, 1):
        memory.fill(topic, partition, 50)

    async def main() -> None:
        async with opened(memory, topic, delivery=delivery) as consumer:
            seen: list[tuple[int, int]] = []
            async with consumer.consume(**given) as context:
                async for message in context:
                    seen.append((message.partition, message.offset))
                    message.ack()
                    if len(seen) == 40:
                        break  # pauses it
                assert not context.closed
                async for message in context:
                    seen.append((message.partition, message.offset))
                    message.ack()
                    if len(seen) == 100:
                        break
            for partition in (0, 1):
                assert [offset for at, offset in seen if at == partition] == list(range(50))
            assert context.closed
            assert [message async for message in context] == []
            assert await consumer.next(0.0) is None
            assert not consumer.cached_info().closed

    run(main())


@pytest.mark.parametrize("awaits", [True, False])
def test_a_handler_gets_everything_in_a_task(memory: MemoryTestCluster, awaits: bool) -> None:
    """A plain function is called as well."""
    topic = memory.topic()
    memory.fill(topic, 0, 50)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            handler, plain = Handler(), []

            def handle(message: Message) -> None:
                plain.append(message.offset)
                message.ack()

            context = consumer.consume(handler if awaits else handle)
            await turn_until(lambda: len(handler.seen or plain) == 50, "all are handled")
            assert await context.wait(0.01) is False
            assert await context.drain() is True
            assert await context.wait() is True
            assert (context.closed, context.error) == (True, None)
            assert ([message.offset for message in handler.seen] or plain) == list(range(50))
            assert positions(consumer) == [50]

    run(main())


def test_the_buffer_is_filled_to_its_limit_and_never_above(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "SLOW_PER_S", 0)  # a machine that stops for a moment makes no slow handler here
    topic = memory.topic()
    memory.fill(topic, 0, 100)

    async def main() -> None:
        pending: list[int] = []
        async with opened(memory, topic) as consumer:
            async for message in consumer.consume(max_messages=10, threshold_messages=4):
                info = consumer.cached_info()
                pending.append(info.pending_messages)
                assert consumer._consumer._queue.buffered() <= info.pending_messages
                message.ack()
                if message.offset == 79:
                    break
        # Of the ten one is in the handler; all ten wait beside it if the first one came before the others.
        assert 9 <= max(pending) <= 10
        assert min(pending) == 4

    run(main())


@pytest.mark.parametrize("delivery", KINDS)
def test_stop_drops_the_buffer_and_loses_nothing(memory: MemoryTestCluster, delivery: str) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 50)

    async def main() -> None:
        async with opened(memory, topic, delivery=delivery) as consumer:
            context, offsets = consumer.consume(), []
            async for message in context:
                offsets.append(message.offset)
                message.ack()
                if len(offsets) == 5:
                    await context.stop()
                    assert consumer._consumer._queue.buffered() == 0
            assert offsets == [0, 1, 2, 3, 4]
            assert context.closed
            assert await collect(consumer, 45) == [(0, offset) for offset in range(5, 50)]

    run(main())


def test_a_loop_that_was_left_does_not_keep_stop_from_ending_it(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 3)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            context = consumer.consume()
            async for message in context:
                message.ack()
                break
            assert repr(context).endswith(", open)")
            await context.stop()
            assert repr(context) == f"AsyncConsumeContext({consumer.cached_info().group!r}, closed)"
            assert await context.wait(0)
            assert await collect(consumer, 2) == [(0, 1), (0, 2)]

    run(main())


def test_a_loop_that_an_error_has_left_is_over_and_another_consume_may_begin(memory: MemoryTestCluster) -> None:
    """Also where the program, or the traceback of the error, still holds its iterator."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)

    async def main() -> None:
        seen: list[int] = []
        async with opened(memory, topic) as consumer:
            try:
                async with consumer.consume() as left:
                    messages = aiter(left)
                    seen.append((await anext(messages)).offset)
                    raise KeyError
            except KeyError:
                assert left.closed
                async with consumer.consume() as another:
                    async for message in another:
                        seen.append(message.offset)
                        if message.offset == 2:
                            break
        assert seen == [0, 1, 2]

    run(main())


def test_drain_delivers_what_is_buffered_and_says_whether_all_is_acked(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 100)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            context, offsets = consumer.consume(max_messages=10), []
            async for message in context:
                offsets.append(message.offset)
                message.ack()
                if len(offsets) == 3:
                    assert await context.drain() is False, "the loop goes on"
            assert offsets == list(range(10))
            assert await context.drain() is True
            assert positions(consumer) == [10]
            held: list[Message] = []
            context = consumer.consume(held.append, max_messages=2)
            await turn_until(lambda: len(held) >= 2, "somebody has them")
            assert await context.drain(0.05) is False
            assert context.closed
            assert all(message.ack() for message in held), "they are still their handlers'"

    run(main())


@pytest.mark.parametrize("drained", ["context", "consumer"])
def test_a_drain_does_not_wait_for_a_handler_that_hangs(memory: MemoryTestCluster, drained: str) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            seen: list[int] = []
            answer = asyncio.Event()

            async def handle(message: Message) -> None:
                seen.append(message.offset)
                await answer.wait()

            context = consumer.consume(handle)
            await turn_until(lambda: bool(seen), "a handler runs")
            async with asyncio.timeout(DEADLINE_S):
                assert not await {"context": context, "consumer": consumer}[drained].drain(0.05)
            assert consumer.cached_info().closed is context.closed is (drained == "consumer")
            answer.set()
            assert await context.wait(DEADLINE_S)
            assert seen == [0]

    run(main())


def test_a_drain_does_not_wait_for_what_was_given_back(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            seen: list[int] = []

            async def handle(message: Message) -> None:
                seen.append(message.offset)
                message.ack() if message.offset else message.nak(3_600.0)

            context = consumer.consume(handle)
            await turn_until(lambda: len(seen) == 2, "both are answered")
            async with asyncio.timeout(DEADLINE_S):
                assert await context.drain(3_600.0) is False
            assert context.closed
            assert positions(consumer) == [0]

    run(main())


def test_a_drain_and_a_wait_refuse_a_wrong_time_before_they_begin(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 1)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            context = consumer.consume(lambda message: message.ack())
            wrong: Any
            for wrong in ("a", -0.5, float("nan"), True):
                for call in (context.drain, context.wait, consumer.drain):
                    with pytest.raises(InvalidOption, match=r"^timeout_s=.*a number of seconds, at least 0, or None"):
                        await call(wrong)
            assert context._demand.drain_until is None
            assert not consumer._ending.draining
            await turn_until(lambda: positions(consumer) == [1], "the message is acked")
            assert await context.drain(float("inf")) is True
            await consumer.drain(float("inf"))

    run(main())


def test_stop_waits_for_the_running_handler_and_cancels_nothing(memory: MemoryTestCluster) -> None:
    async def main() -> None:
        handler = Handler()
        handler.open.clear()
        async with handled(memory, 10, handler) as (consumer, context):
            await handler.got(1)
            await context.stop(timeout_s=0.01)
            assert not context.closed
            handler.open.set()
            await context.stop()
            assert context.closed
            assert [message.offset for message in handler.seen] == [0]
            assert positions(consumer) == [1]

    run(main())


@pytest.mark.parametrize(("ending", "offsets"), [("stop", [0, 1]), ("drain", [0, 1, 2, 3, 4])])
def test_stop_and_drain_may_be_called_in_the_handler(
    memory: MemoryTestCluster, ending: str, offsets: list[int]
) -> None:
    async def main() -> None:
        async def then(message: Message) -> None:
            if message.offset == 1:
                assert not await getattr(context, ending)()

        handler = Handler(then)
        async with handled(memory, 5, handler) as (_, context):
            assert await context.wait(DEADLINE_S)
            assert [message.offset for message in handler.seen] == offsets

    run(main())


def test_a_wait_in_the_handler_or_the_loop_is_refused_by_name(memory: MemoryTestCluster) -> None:
    async def main() -> None:
        async def then(message: Message) -> None:
            with pytest.raises(ReentrantCall, match=r"inside the handler of this consume .* in another task"):
                await context.wait()
            await context.stop()

        handler = Handler(then)
        async with handled(memory, 2, handler) as (consumer, context):
            assert await context.wait(DEADLINE_S)
            assert await handler.got(1) == [0]
            again = consumer.consume()
            async for message in again:
                with pytest.raises(ReentrantCall, match="inside a loop over this consume"):
                    await again.wait()
                message.ack()
                break
            assert not await again.wait(0)

    run(main())


@pytest.mark.parametrize("ending", ["stop", "drain", "request_stop"])
def test_the_end_of_the_consumer_ends_its_consume(memory: MemoryTestCluster, ending: str) -> None:
    async def main() -> None:
        handler = Handler()
        async with handled(memory, 5, handler) as (consumer, context):
            await handler.got(5)
            ends = getattr(consumer._ending if ending == "request_stop" else consumer, ending)()
            if ends is not None:
                await ends
            assert await context.wait(DEADLINE_S)
            assert (context.closed, context.error) == (True, None)
            if ending != "request_stop":
                with pytest.raises(ConsumerClosed):
                    consumer.consume()

    run(main())


def test_a_deleted_group_ends_the_consume(memory: MemoryTestCluster) -> None:
    async def main() -> None:
        async with handled(memory, 0, Handler()) as (consumer, context):
            delete(memory, consumer.cached_info().group)
            with pytest.raises(GroupDeleted):
                await context.wait(DEADLINE_S)
            assert isinstance(context.error, GroupDeleted)

    run(main())


# --- handlers that raise


def fails_on(offset: int, error: BaseException) -> Any:
    """A body of a handler that raises once."""
    left = [error]

    async def then(message: Message) -> None:
        if message.offset == offset and left:
            raise left.pop()

    return then


async def await_what_was_cancelled(message: Message) -> None:
    if message.delivery_count == 1 and message.offset == 1:
        other = asyncio.get_running_loop().create_future()
        other.cancel()
        await other


@pytest.mark.parametrize("then", [fails_on(1, ValueError("no account")), await_what_was_cancelled])
def test_a_message_whose_handler_raises_comes_again_later(memory: MemoryTestCluster, then: Any) -> None:
    """A CancelledError of something that the handler awaits is one of its errors: nobody has cancelled the consume."""

    async def main() -> None:
        handler = Handler(then)
        async with handled(memory, 3, handler) as (consumer, context):
            await handler.got(4)
            assert await context.drain()
            assert [message.offset for message in handler.seen] == [0, 1, 2, 1]
            assert context.error is None
            failed = [event for event in consumer.events() if event.kind == "handler_failed"]
            assert [(event.partition, event.offset) for event in failed] == [(0, 1)]

    run(main())


@pytest.mark.parametrize("delivery", KINDS)
def test_a_handler_that_raises_may_end_the_consume(
    memory: MemoryTestCluster, delivery: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 4)

    async def main() -> None:
        async with opened(memory, topic, delivery=delivery) as consumer:
            handler = Handler(fails_on(1, ValueError("no account")))
            context = consumer.consume(handler, on_error="stop")
            with pytest.raises(ValueError, match="no account"):
                await context.wait(DEADLINE_S)
            assert [message.offset for message in handler.seen] == [0, 1]
            first = 1 if delivery == "at_least_once" else 2
            assert sorted(await collect(consumer, 4 - first)) == [(0, offset) for offset in range(first, 4)]
            with pytest.raises(InvalidOption, match="on_error"):
                consumer.consume(handler, on_error="ignore")  # type: ignore[arg-type]
            if delivery == "at_most_once":
                with pytest.raises(NeedsAtLeastOnce):
                    consumer.consume(handler, on_error="nak")

    with caplog.at_level(logging.ERROR, "marshal_py"):
        run(main())
    assert f"a handler failed on {topic}:0 at offset 1" in caplog.text


# --- cancellation


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("delivery", KINDS)
@pytest.mark.parametrize("given", [{"max_messages": 4}, {"max_bytes": 60}], ids=str)
def test_a_loop_that_is_cancelled_anywhere_loses_nothing(
    memory: MemoryTestCluster, delivery: str, late: bool, given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another loop over the same context delivers what the cancelled one waited for, each message once, in order."""
    monkeypatch.setattr(async_consumer, "TURN_S", 0.0)  # so that it is suspended between messages, too
    topic, cuts = memory.topic(), 0

    async def main() -> None:
        nonlocal cuts
        async with opened(memory, topic, delivery=delivery) as consumer:
            await turn_until(lambda: consumer.cached_info().claims, "claimed")
            context, seen = consumer.consume(**given), []
            for at in range(20):
                memory.fill(topic, 0, 5, first=5 * at)
                iterator = aiter(context)
                for _ in range(6):
                    cancelled, message = await cut(anext(iterator), at % 3, late)  # type: ignore[arg-type]
                    cuts += cancelled
                    if cancelled:
                        break
                    seen.append(message.offset)
                    message.ack()
                del iterator
            assert not context.closed
            async for message in context:
                seen.append(message.offset)
                message.ack()
                if len(seen) == 100:
                    break
            assert seen == list(range(100))
            await context.stop()
            assert await consumer.next(0.0) is None

    run(main())
    assert cuts >= 4


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("at", range(2))
@pytest.mark.parametrize("verb", ["stop", "drain", "wait"])
def test_a_verb_that_is_cancelled_is_completed_by_a_second_call(
    memory: MemoryTestCluster, verb: str, at: int, late: bool
) -> None:
    async def main() -> None:
        handler = Handler()
        async with handled(memory, 3, handler) as (consumer, context):
            await handler.got(3)
            arguments = (0.01,) if verb == "wait" else ()
            await cut(getattr(context, verb)(*arguments), at, late)
            await getattr(context, verb)(*arguments)
            assert context.closed == (verb != "wait")
            await context.stop()
            assert context.closed
            assert positions(consumer) == [3]

    run(main())


@pytest.mark.parametrize("at", range(3))
def test_a_drain_whose_loop_is_cancelled_is_completed_by_another_loop(memory: MemoryTestCluster, at: int) -> None:
    """While it waits for the acks, for example."""
    topic = memory.topic()
    memory.fill(topic, 0, 2)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            context, held = consumer.consume(max_messages=2), []
            iterator = aiter(context)
            for _ in range(2):
                held.append(await anext(iterator))
            assert await context.drain() is False
            cancelled, _ = await cut(anext(iterator), at, True)  # type: ignore[arg-type]
            assert cancelled
            assert not context.closed
            for message in held:
                message.ack()
            assert [message async for message in context] == []
            assert context.closed
            assert await context.drain() is True

    run(main())


def test_the_end_of_the_program_gives_the_message_of_a_handler_back(memory: MemoryTestCluster) -> None:
    """asyncio.run cancels the tasks that are left, so the handler's, too."""

    async def main() -> None:
        handler = Handler()
        handler.open.clear()
        async with handled(memory, 3, handler) as (consumer, context):
            await handler.got(1)
            assert context._task is not None
            context._task.cancel()
            assert await context.wait(DEADLINE_S)
            assert (context.closed, context.error) == (True, None)
            assert sorted(await collect(consumer, 3)) == [(0, 0), (0, 1), (0, 2)]

    run(main())


# --- wrong use


def test_one_consume_and_one_loop_at_a_time(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            await turn_until(lambda: consumer.cached_info().claims, "claimed")
            context = consumer.consume()
            for verb in (consumer.fetch, consumer.next, consumer.__aiter__().__anext__):  # type: ignore[attr-defined]
                with pytest.raises(ConcurrentUse):
                    await verb()
            with pytest.raises(ConcurrentUse):
                consumer.consume()

            async def first() -> int:
                async for message in context:
                    return message.offset
                return -1

            waiting = asyncio.create_task(first())
            await turn_until(lambda: consumer._consumer._user is not None, "it waits")
            with pytest.raises(ConcurrentUse, match="another task"):
                await anext(aiter(context))
            assert not context.closed, "the first loop goes on"
            memory.fill(topic, 0, 1)
            assert await waiting == 0
            await context.stop()
            context = consumer.consume(Handler())
            with pytest.raises(InvalidOption, match="handler"):
                aiter(context)
            with pytest.raises(InvalidOption, match="handler"):
                consumer.consume("no function")  # type: ignore[arg-type]
            with pytest.raises(InvalidOption, match="threshold"):
                consumer.consume(max_messages=5, threshold_messages=6)

    run(main())


def test_a_consume_outside_the_event_loop_is_refused(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            with pytest.raises(EventLoopMisuse, match="thread without one"):
                await asyncio.to_thread(consumer.consume)
            assert await consumer.next(0.0) is None

    run(main())


def test_nothing_on_the_event_loop_waits_for_librdkafka(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even `stop`, which has everything fetched again. `produce` only queues; what is there is taken at once."""
    watch = Watch(monkeypatch)
    topic = embedded.topic()
    embedded.fill(topic, 0, 100)

    async def main() -> None:
        async with opened(embedded, topic) as consumer:
            context = consumer.consume(max_messages=20)
            async for message in context:
                message.ack()
                if message.offset == 30:
                    await context.stop()
            handler = Handler()
            context = consumer.consume(handler)
            await handler.got(69)
            assert await context.drain()
            assert [message.offset for message in handler.seen] == list(range(31, 100))

    run(main())
    assert watch.threads[threading.get_ident()] <= AT_ONCE
    assert {"consume", "incremental_assign"} <= watch.calls, "the test sees calls"
