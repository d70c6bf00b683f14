"""The asyncio front: the same verbs, waited for without blocking the event loop, and safe to cancel anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

import marshal_py
from marshal_py import Marshal, Topic, aio
from marshal_py.admin.group import Group
from marshal_py.client import async_consumer, event_loop
from marshal_py.client.connection import Poll
from marshal_py.client.consumer import Consumer
from marshal_py.client.event_loop import READS_AT_ONCE_MAX, Feed, Request, Threads
from marshal_py.errors import ClusterError, ConcurrentUse, ConsumerClosed, EventLoopMisuse, InvalidOption
from marshal_py.log.observer import Observer
from marshal_py.testing import MemoryCluster
from marshal_py.topics.request import GetRequest
from marshal_py.transport.ports import Chunk
from marshal_py.transport.settings import PIECE_MESSAGES
from tests.client.test_no_call_under_lock import AT_ONCE, Watch
from tests.support.client_fixtures import (
    DEADLINE_S,
    INTERVAL_S,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    until,
)

T = TypeVar("T")
KINDS = ["at_least_once", "at_most_once"]
OPTIONS: dict[str, Any] = {"heartbeat_interval_s": INTERVAL_S, "start": "earliest"}


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, DEADLINE_S))


async def turn_until(condition: Callable[[], Any], what: str) -> None:
    """Lets the event loop run until `condition` is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


async def collect(consumer: aio.AsyncConsumer[Any, Any], count: int) -> list[tuple[int, int]]:
    """Fetches and acks `count` messages. Returns their places."""
    places: list[tuple[int, int]] = []
    while len(places) < count:
        for message in await consumer.fetch(count - len(places), expires_s=DEADLINE_S, min_messages=1):
            message.ack()
            places.append((message.partition, message.offset))
    return places


# --- the same verbs, in the same order

# What only the synchronous front has, and why.
MISSING = {
    Consumer: set(),
    Marshal: {"planner", "connect"},  # planners are for Spark; aio.connect connects
    Topic: set(),
    Group: {"connected", "runner"},
}
PAIRS = [(Consumer, aio.AsyncConsumer), (Marshal, aio.AsyncMarshal), (Topic, aio.AsyncTopic), (Group, aio.AsyncGroup)]


@pytest.mark.parametrize(("plain", "awaited"), PAIRS)
def test_both_fronts_have_the_same_verbs(plain: type, awaited: type) -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(plain) - names(awaited) == MISSING[plain]
    more = {"double_ack"}  # a method of messages otherwise
    attributes = {"name", "client_id", "coordination_topic"}  # of the instances otherwise
    assert names(awaited) - names(plain) <= more | attributes


@pytest.mark.parametrize(("plain", "awaited"), PAIRS)
def test_both_fronts_take_the_same_parameters(plain: type, awaited: type) -> None:
    """Names, order, kinds and defaults. But `process` has many tasks, or few threads or processes, and tasks alone are
    cancelled."""
    compared = 0
    for name, method in inspect.getmembers(awaited, inspect.isfunction):
        if name.startswith("_") or not inspect.isfunction(getattr(plain, name, None)):
            continue
        one, other = (inspect.signature(getattr(kind, name)).parameters.values() for kind in (plain, awaited))
        left_out = {"workers", "timeout_s", "executor"} if name == "process" else set()
        of_one = [(p.name, p.kind, p.default) for p in one if p.name not in left_out]
        assert of_one == [(p.name, p.kind, p.default) for p in other if p.name not in left_out], method
        compared += 1
    assert compared >= 5


def test_a_parameter_that_does_not_exist_is_refused_where_it_is_given() -> None:
    with pytest.raises(InvalidOption, match=r"cliend_id.*did you mean client_id"):
        aio.connect("localhost:9092", cliend_id="a")  # type: ignore[call-arg]


def test_connect_takes_the_same_parameters() -> None:
    one, other = (inspect.signature(call).parameters.values() for call in (marshal_py.connect, aio.connect))
    assert [(p.name, p.kind, p.default) for p in one] == [(p.name, p.kind, p.default) for p in other]


# --- a life


@pytest.mark.parametrize("delivery", KINDS)
def test_a_consumer_with_await(cluster: TestCluster, delivery: str) -> None:
    """Join, fetch, iterate, ack, flush, look, drain: all of it on one event loop."""
    topic, group = cluster.topic(2), cluster.group()
    for partition in (0, 1):
        cluster.fill(topic, partition, 30)

    async def main() -> None:
        async with aio.connect(cluster.target) as marshal:
            async with marshal.consumer(group, [topic], delivery=delivery, **OPTIONS) as consumer:
                seen = await collect(consumer, 20)
                async for message in consumer:
                    message.ack()
                    seen.append((message.partition, message.offset))
                    if len(seen) == 40:
                        break
                async for message in consumer:
                    message.ack()
                    seen.append((message.partition, message.offset))
                    if len(seen) == 60:
                        await consumer.drain()
                assert sorted(seen) == [(partition, offset) for partition in (0, 1) for offset in range(30)]
                assert consumer.cached_info().closed
            again = await marshal.consumer(group, [topic], delivery=delivery, **OPTIONS)
            await turn_until(lambda: len(again.cached_info().claims) == 2, "it owns both")
            assert await again.next(0.0) is None, "nothing comes twice"
            await turn_until(lambda: again.cached_info().lag == 0, "it knows where they end")
            info = await again.info()
            assert info.lag == 0
            assert {event.kind for event in again.events()} >= {"joined", "claimed"}
            again.pause([(topic, 0)])
            cluster.fill(topic, 0, 1, first=30)
            cluster.fill(topic, 1, 1, first=30)
            message = await again.next(DEADLINE_S)
            assert message is not None
            assert message.partition == 1
            message.ack()
            await again.flush()
            again.resume([(topic, 0)])
            assert await collect(again, 1) == [(0, 30)]
            if delivery == "at_least_once":
                await again.seek((topic, 0), 29)
                assert await collect(again, 2) == [(0, 29), (0, 30)]
            await again.stop()
            assert again.cached_info().closed
            with pytest.raises(ConsumerClosed):
                await again.fetch(1)
            assert marshal.metrics().client_id == marshal.client_id

    run(main())


def test_a_task_that_waits_for_messages_asks_for_them() -> None:
    async def main(broker: MemoryCluster) -> None:
        broker.create_topic("orders")
        async with (
            aio.connect(broker.bootstrap_servers) as marshal,
            marshal.consumer("billing", ["orders"]) as consumer,
        ):

            def asked_ms() -> int:
                return marshal.metrics().consumers[0].last_asked_ms

            await asyncio.to_thread(broker.advance, 60)
            assert asked_ms() >= 60_000
            waiting = asyncio.create_task(consumer.next())
            await turn_until(lambda: asked_ms() < 60_000, "the task asks")
            await asyncio.to_thread(broker.advance, 60)
            await turn_until(lambda: asked_ms() < 60_000, "it still asks")
            waiting.cancel()

    with MemoryCluster() as broker:
        run(main(broker))


def test_an_expired_fetch_returns_what_is_there(cluster: TestCluster) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)

    async def main() -> None:
        async with aio.connect(cluster.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            await turn_until(lambda: len(consumer.cached_info().claims) == 1, "claimed")
            got = 0
            while got < 3:
                got += len(await consumer.fetch(10, min_messages=10, expires_s=0.05))
            assert await consumer.next(0.05) is None
            assert not await consumer.fetch(10, expires_s=0)
            with pytest.raises(InvalidOption):
                await consumer.fetch(0, min_messages=0)

    run(main())


def test_a_confirmed_ack_is_awaited(cluster: TestCluster) -> None:
    """`await consumer.double_ack(...)`; the blocking form is refused on the event loop and works in a thread."""
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 4)

    async def main() -> None:
        async with aio.connect(cluster.target) as marshal, marshal.consumer(group, [topic], **OPTIONS) as consumer:
            one = await consumer.next(DEADLINE_S)
            assert one is not None
            assert await consumer.double_ack(one)
            assert consumer._consumer._member.group is not None
            batch = await consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)
            assert await consumer.double_ack(batch)
            assert [c.position for c in consumer.cached_info().claims.values()] == [3]
            last = await consumer.next(DEADLINE_S)
            assert last is not None
            with pytest.raises(EventLoopMisuse, match=r"^double_ack\(\) of.*await consumer\.double_ack"):
                last.double_ack()
            with pytest.raises(InvalidOption, match="timeout_s"):
                await consumer.double_ack(last, -1)
            assert await asyncio.to_thread(last.double_ack)
            assert await consumer.double_ack(await consumer.fetch(1, expires_s=0)), "an empty batch needs nothing"
            wrong: Any
            for wrong in (None, last.offset, [last]):
                with pytest.raises(InvalidOption, match=r"^message=.*a message, a part or a batch"):
                    await consumer.double_ack(wrong)

    run(main())


# --- the event loop is not blocked


@pytest.mark.parametrize("delivery", KINDS)
def test_nothing_on_the_event_loop_waits(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch, delivery: str
) -> None:
    """On the loop's thread librdkafka is called only for what it does at once, and no condition is waited for."""
    watch = Watch(monkeypatch)
    loop_thread = threading.get_ident()
    waited: list[str] = []
    plainly = threading.Condition.wait

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.get_ident() == loop_thread and asyncio._get_running_loop() is not None and timeout != 0:
            callers = [frame.name for frame in traceback.extract_stack()[:-1]]
            if "start" not in callers[-3:]:  # every new thread is waited for until it runs
                waited.append(" ".join(callers[-6:]))
        return plainly(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", wait)
    topic, group = embedded.topic(3), embedded.group()
    for partition in range(3):
        embedded.fill(topic, partition, 200)

    async def main() -> None:
        async with aio.connect(embedded.target) as marshal:
            options = {"delivery": delivery, **OPTIONS}
            async with marshal.consumer(group, [topic], **options) as consumer:
                await collect(consumer, 300)
                async with marshal.consumer(group, [topic], **options) as other:
                    await turn_until(lambda: other.cached_info().claims, "the late joiner has its share")
                    seen = 0
                    async for message in consumer:
                        message.ack()
                        seen += 1
                        if seen == 100:
                            break
                    await other.stop()
                await consumer.flush()
                await consumer.info()
                await consumer.drain()
            found = marshal.topic(topic)
            await found.get(offset=3, partition=1)
            await found.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert watch.threads[loop_thread] <= AT_ONCE
    assert {"consume", "incremental_assign", "produce"} <= watch.calls, "the test sees calls"
    assert waited == []


@pytest.mark.parametrize("verb", ["drain", "flush"])
def test_a_loop_that_was_left_is_over_for_the_next_verb(memory: MemoryTestCluster, verb: str) -> None:
    """asyncio closes the generator of a loop later: a `drain` must wait for what the loop's task has given away, and a
    `flush` of another task is not a second verb at once."""
    topic, acked = memory.topic(), list[bool]()
    memory.fill(topic, 0, 5)

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer(memory.group(), [topic], **OPTIONS) as one:

            async def first() -> Any:
                async for message in one:
                    return message

            message, begun = await asyncio.create_task(first()), asyncio.Event()

            async def work() -> None:
                begun.set()
                await turn_until(lambda: one._ending.draining or verb == "flush", "the drain has begun")
                acked.append(message.ack())

            task = asyncio.create_task(work())
            await begun.wait()
            await getattr(one, verb)()
            await task
            assert one.cached_info().closed == (verb == "drain")

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert acked == [True]


def test_other_tasks_have_their_turn_while_messages_are_there(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `async for` nor `fetch` waits while messages are buffered, so they let others run every TURN_S."""
    monkeypatch.setattr(async_consumer, "TURN_S", 0.0)
    topic = memory.topic()
    memory.fill(topic, 0, 2_000)

    async def main() -> None:
        turns = 0

        async def ticker() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            await collect(consumer, 100)
            ticking = asyncio.create_task(ticker())
            await asyncio.sleep(0)
            before = turns
            for _ in range(100):
                assert await consumer.fetch(1, expires_s=DEADLINE_S)
            assert turns - before >= 100 * async_consumer.TURN_STEPS, "to answer a request takes several steps"
            ticking.cancel()

    run(main())


def test_each_consumer_has_one_thread_that_polls(memory: MemoryTestCluster) -> None:
    """Beside it a consumer has the threads that it has without asyncio: its worker."""
    topics = [memory.topic() for _ in range(5)]

    before = set(threading.enumerate())  # another test's thread may still be ending

    def threads() -> list[str]:
        new = set(threading.enumerate()) - before
        return [thread.name for thread in new if thread.name.startswith("marshal-")]

    async def main() -> None:
        async with aio.connect(memory.target) as marshal:
            consumers = [await marshal.consumer(f"g{at}", [topic], **OPTIONS) for at, topic in enumerate(topics)]
            fetches = [
                asyncio.create_task(consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S)) for consumer in consumers
            ]
            await turn_until(lambda: all(one._feed._request is not None for one in consumers), "all of them wait")
            for at, topic in enumerate(topics):
                memory.fill(topic, 0, 3, first=10 * at)
            batches = await asyncio.gather(*fetches)
            assert [[m.value for m in batch] for batch in batches] == [
                [b"%d" % (10 * at + number) for number in range(3)] for at in range(5)
            ]
            names = threads()
            assert names.count("marshal-receiver") == len(consumers)
            assert len([name for name in names if name.startswith("marshal-verbs")]) <= 4
            others = ("marshal-receiver", "marshal-verbs", "marshal-reads")
            plain = [name for name in names if not name.startswith(others)]
            assert len([name for name in plain if "worker" in name]) == len(consumers) + 1

    run(main())
    until(lambda: not threads(), "all of them end")


@pytest.mark.parametrize("delivery", KINDS)
@pytest.mark.parametrize("how", ["async for", "fetch", "consume"])
def test_a_backlog_comes_without_the_other_thread(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, how: str, delivery: str
) -> None:
    """What is there is taken on the loop's thread. Only a call that has to wait asks the receiver's."""
    asked: list[Request] = []
    plainly = Feed._ask

    def ask(self: Feed, request: Request) -> None:
        asked.append(request)
        plainly(self, request)

    monkeypatch.setattr(Feed, "_ask", ask)
    topic, count = memory.topic(), 3 * PIECE_MESSAGES
    memory.fill(topic, 0, count)

    async def main() -> None:
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer(memory.group(), [topic], **OPTIONS, delivery=delivery) as consumer,
        ):
            offsets = [message.offset for message in await consumer.fetch(1)]
            waits = len(asked)
            while how == "fetch" and len(offsets) < count:
                offsets += [message.offset for message in await consumer.fetch(count - len(offsets), min_messages=1)]
            messages = aiter(consumer.consume(max_messages=900)) if how == "consume" else aiter(consumer)
            while len(offsets) < count:
                offsets.append((await anext(messages)).offset)
            assert len(asked) == waits, "nothing was waited for"
            memory.fill(topic, 0, 10, first=count)
            offsets += [(await anext(messages)).offset for _ in range(10)]
            assert offsets == list(range(count + 10))

    run(main())


def test_messages_that_come_one_by_one_are_asked_for_once(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's thread goes on by itself."""
    monkeypatch.setattr(event_loop, "AHEAD_S", DEADLINE_S)
    asked: list[Request] = []
    plainly = Feed._ask

    def ask(self: Feed, request: Request) -> None:
        asked.append(request)
        plainly(self, request)

    topic = memory.topic()

    async def main() -> None:
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer(memory.group(), [topic], **OPTIONS) as consumer,
        ):
            await turn_until(lambda: consumer.cached_info().claims, "claimed")
            messages, feed = aiter(consumer), consumer._feed
            for number in range(20):
                following = asyncio.ensure_future(anext(messages))
                await turn_until(lambda: feed.waits, "the iteration waits")
                if number == 1:
                    monkeypatch.setattr(Feed, "_ask", ask)
                memory.put(topic, 0, b"x")
                assert (await following).offset == number
            assert asked == []

    run(main())


def test_a_call_that_may_not_wait_takes_what_is_there_while_one_more_is_polled_for(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's thread has the first of these messages, or is about to. The others come behind it."""
    topic = memory.topic()

    async def main() -> None:
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer(memory.group(), [topic], **OPTIONS) as consumer,
        ):
            await turn_until(lambda: consumer.cached_info().claims, "claimed")
            feed = consumer._feed

            async def wait_for_one() -> list[int]:
                """Receives a message that is waited for, so that the thread polls for one more."""
                following = asyncio.ensure_future(consumer.next(DEADLINE_S))
                await turn_until(lambda: feed.waits, "the call waits")
                memory.put(topic, 0, b"x")
                message = await following
                assert message is not None
                return [message.offset]

            offsets = await wait_for_one()
            assert await consumer.next(0) is None
            monkeypatch.setattr(event_loop, "AHEAD_S", DEADLINE_S)
            for count in (1, 5, 1, 5):
                offsets += await wait_for_one()
                before = len(offsets)
                assert feed._request is not None
                assert feed._request.ahead
                memory.fill(topic, 0, count)
                if count == 1:
                    offsets += [message.offset for message in [await consumer.next(0)] if message is not None]
                else:
                    offsets += [message.offset for message in await consumer.fetch(count, expires_s=0)]
                assert offsets == list(range(len(offsets)))
                assert len(offsets) == before + count, "nothing is left there"

    run(main())


def test_messages_of_a_cancelled_call_come_before_those_that_are_there(memory: MemoryTestCluster) -> None:
    """While the receiver has a request, nothing is taken past it, or its messages would come too late."""
    topic = memory.topic()

    async def main() -> None:
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer(memory.group(), [topic], **OPTIONS) as consumer,
        ):
            await turn_until(lambda: consumer.cached_info().claims, "claimed")
            feed = consumer._feed
            fetching = asyncio.create_task(consumer.fetch(5, min_messages=5, expires_s=DEADLINE_S))
            await turn_until(lambda: feed._request is not None, "the receiver has a request")
            fetching.cancel()
            assert feed.take(5) is None
            memory.fill(topic, 0, 5)
            while feed._request is not None:
                assert feed.take(5) is None
                await asyncio.sleep(0)
            memory.fill(topic, 0, 5, first=5)
            seen = [message.offset for message in await consumer.fetch(10, min_messages=10, expires_s=DEADLINE_S)]
            assert seen == list(range(10))

    run(main())


# --- cancellation


class Cut:
    """Awaits a coroutine and cancels it at its suspension number `at`, before or after what it waits for has come."""

    def __init__(self, waiting: Coroutine[Any, Any, Any], at: int, late: bool) -> None:
        self._waiting, self._at, self._late = waiting, at, late
        self.cut = False

    def __await__(self) -> Generator[Any, Any, Any]:
        suspensions = 0
        try:
            future = self._waiting.send(None)
            while True:
                self.cut = suspensions == self._at
                if not self.cut or self._late:
                    yield future
                if self.cut:
                    future = self._waiting.throw(asyncio.CancelledError())
                    continue
                suspensions += 1
                future = self._waiting.send(None)
        except StopIteration as end:
            return end.value


async def cut(waiting: Coroutine[Any, Any, Any], at: int, late: bool) -> tuple[bool, Any]:
    """Returns whether the coroutine was cancelled, and otherwise its result."""
    one = Cut(waiting, at, late)
    try:
        return False, await one
    except asyncio.CancelledError:
        assert one.cut
        return True, None


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("delivery", KINDS)
def test_a_fetch_that_is_cancelled_anywhere_loses_nothing(
    memory: MemoryTestCluster, delivery: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every suspension point: the messages come again, each of them once, in order."""
    monkeypatch.setattr(async_consumer, "TURN_S", 0.0)  # so that each call is suspended at least once
    topic, cuts = memory.topic(), 0

    async def main() -> None:
        nonlocal cuts
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer("g", [topic], delivery=delivery, **OPTIONS) as consumer,
        ):
            await turn_until(lambda: consumer.cached_info().claims, "claimed")
            sent, seen = 0, []
            for at in range(24):
                if at % 3 == 0:  # otherwise what a cancelled call has left is there
                    memory.fill(topic, 0, 20, first=sent)
                    sent += 20
                cancelled, batch = await cut(consumer.fetch(7, expires_s=1.0, min_messages=1), at % 3, late)
                cuts += cancelled
                seen += [] if cancelled else list(batch)
            while len(seen) < sent:
                seen += await consumer.fetch(sent - len(seen), expires_s=DEADLINE_S, min_messages=1)
            assert [message.offset for message in seen] == list(range(sent))
            assert await consumer.next(0.0) is None

    run(main())
    assert cuts >= 4


def test_an_iterator_whose_anext_times_out_has_ended_and_a_new_one_continues(memory: MemoryTestCluster) -> None:
    """As with every async generator. `next` waits for a limited time and ends nothing."""
    topic = memory.topic()

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            assert await consumer.next(expires_s=0.01) is None
            messages = aiter(consumer)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(messages), 0.01)
            memory.fill(topic, 0, 2)
            assert [message async for message in messages] == []
            assert (await anext(aiter(consumer))).offset == 0
            assert (await consumer.next(DEADLINE_S)).offset == 1

    run(main())


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("delivery", KINDS)
def test_an_iteration_that_is_cancelled_anywhere_loses_nothing(
    memory: MemoryTestCluster, delivery: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that waits for the next message is cancelled; a new `async for` delivers it."""
    monkeypatch.setattr(async_consumer, "TURN_S", 0.0)  # so that it is suspended between messages, too
    topic, cuts = memory.topic(2), 0

    async def main() -> None:
        nonlocal cuts
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer("g", [topic], delivery=delivery, **OPTIONS) as consumer,
        ):
            await turn_until(lambda: len(consumer.cached_info().claims) == 2, "claimed")
            seen: list[tuple[int, int]] = []
            for at in range(24):
                memory.fill(topic, at % 2, 5, first=5 * (at // 2))
                iterator = aiter(consumer)
                for _ in range(6):
                    cancelled, message = await cut(anext(iterator), at % 2, late)  # type: ignore[arg-type]
                    cuts += cancelled
                    if cancelled:
                        break
                    seen.append((message.partition, message.offset))
                del iterator
            async for message in consumer:
                seen.append((message.partition, message.offset))
                if len(seen) == 120:
                    break
            assert sorted(seen) == [(partition, offset) for partition in (0, 1) for offset in range(60)]

    run(main())
    assert cuts >= 4


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("verb", ["stop", "drain", "flush", "info"])
def test_other_verbs_may_be_cancelled_and_called_again(memory: MemoryTestCluster, verb: str, late: bool) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 5)

    async def main() -> None:
        async with aio.connect(memory.target) as marshal:
            for at in range(3):
                consumer = await marshal.consumer(group, [topic], **OPTIONS)
                await collect(consumer, 1)
                await cut(getattr(consumer, verb)(), at, late)
                await getattr(consumer, verb)()
                await consumer.stop()
                assert consumer._ending.done
            async with marshal.consumer(group, [topic], **OPTIONS) as last:
                assert await collect(last, 2) == [(0, 3), (0, 4)], "each released its claim at its position"

    run(main())


def test_a_verb_that_is_cancelled_undoes_what_it_opened() -> None:
    """A function that runs already cannot be stopped: its result is given to `undo`, on its thread."""
    entered, leave, undone = threading.Event(), threading.Event(), threading.Event()

    def opens() -> str:
        entered.set()
        assert leave.wait(DEADLINE_S)
        return "open"

    async def main() -> None:
        threads = Threads(ThreadPoolExecutor(1, "test"))
        task = asyncio.create_task(threads.run(opens, lambda opened: undone.set() if opened == "open" else None))
        await turn_until(entered.is_set, "it runs")
        never = asyncio.create_task(threads.run(lambda: pytest.fail("it was cancelled before it began")))
        await asyncio.sleep(0)
        for one in (task, never):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        assert not undone.is_set()
        leave.set()
        await turn_until(undone.is_set, "undone")
        threads.close()

    run(main())


def test_what_came_with_a_cancellation_is_undone_on_a_thread() -> None:
    """The verb has returned, and its caller is cancelled before the event loop gets to know of that."""
    undone: list[int] = []

    async def main() -> None:
        threads = Threads(ThreadPoolExecutor(1, "test"))
        task = asyncio.create_task(threads.run(lambda: "open", lambda _: undone.append(threading.get_ident())))
        await asyncio.sleep(0)
        returned = threading.Event()
        threads.submit(returned.set)  # after the verb, on the only thread
        assert returned.wait(DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        threads.close()
        await turn_until(lambda: undone, "undone")
        assert undone != [threading.get_ident()]

    run(main())


def test_a_cancelled_handler_keeps_its_message_until_the_consumer_stops(memory: MemoryTestCluster) -> None:
    """The message is the handler's; without an ack the next owner gets it."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)

    async def main() -> None:
        async with aio.connect(memory.target) as marshal:
            async with marshal.consumer(group, [topic], **OPTIONS) as consumer:

                async def handle() -> None:
                    async for message in consumer:
                        if message.offset == 1:
                            await asyncio.sleep(DEADLINE_S)
                        message.ack()

                task = asyncio.create_task(handle())
                await turn_until(lambda: consumer.cached_info().in_flight and _position(consumer) == 1, "it works")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async with marshal.consumer(group, [topic], **OPTIONS) as consumer:
                assert await collect(consumer, 1) == [(0, 1)]

    run(main())


@pytest.mark.parametrize("consumes", [False, True], ids=["iteration", "consume"])
def test_a_task_that_is_cancelled_in_a_loop_may_begin_another_one(memory: MemoryTestCluster, consumes: bool) -> None:
    """It catches that outside of the function that has the iterator, which asyncio holds until the task waits."""
    topic, offsets = memory.topic(), list[int]()
    memory.fill(topic, 0, 2)

    async def receive(received: AsyncIterable[Any]) -> None:
        messages = aiter(received)
        while len(offsets) < 2:
            offsets.append((await anext(messages)).offset)
            await asyncio.sleep(DEADLINE_S if len(offsets) == 1 else 0)

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            received = consumer.consume() if consumes else consumer

            async def program() -> None:
                with contextlib.suppress(asyncio.CancelledError):
                    await receive(received)
                await receive(received)

            task = asyncio.create_task(program())
            await turn_until(lambda: offsets == [0], "it works")
            task.cancel()
            await task
        assert offsets == [0, 1]

    run(main())


def _position(consumer: aio.AsyncConsumer[Any, Any]) -> int:
    return next((claim.position for claim in consumer.cached_info().claims.values()), -1)


# --- wrong use


def test_one_task_at_a_time(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            waiting = asyncio.create_task(consumer.fetch(1, expires_s=DEADLINE_S))
            await turn_until(lambda: consumer._consumer._user is not None, "inside")
            uses = {"fetch": consumer.fetch(1), "next": consumer.next(), "iteration": anext(aiter(consumer))}
            for verb, use in uses.items():
                with pytest.raises(
                    ConcurrentUse, match=rf"{verb}\(\) was called while another task.*one Consumer per task"
                ):
                    await use
            memory.fill(topic, 0, 1)
            assert len(await waiting) == 1
            assert not await consumer.fetch(1, expires_s=0)
            memory.fill(topic, 0, 2, first=1)
            held = aiter(consumer)
            (await anext(held)).ack()
            with pytest.raises(ConcurrentUse, match="this task began has not ended"):
                await anext(aiter(consumer))
            del held
            assert (await anext(aiter(consumer))).offset == 2

    run(main())


WAITING_ACKS: dict[str, Callable[[aio.AsyncConsumer[Any, Any], Any], object]] = {
    "message.double_ack": lambda consumer, batch: batch[0].double_ack(),
    "part.double_ack": lambda consumer, batch: batch.parts[0].double_ack(),
    "batch.double_ack": lambda consumer, batch: batch.double_ack(),
}


@pytest.mark.parametrize("way", [*WAITING_ACKS, "another loop"])
def test_a_waiting_ack_that_is_refused_acks_nothing(memory: MemoryTestCluster, way: str) -> None:
    """The program rolls its effect back when the call raises, so the message must come again."""
    topic = memory.topic()
    memory.fill(topic, 0, 2)

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            batch = await consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)

            async def attempt() -> None:
                if way == "another loop":
                    await asyncio.to_thread(asyncio.run, consumer.double_ack(batch))
                else:
                    WAITING_ACKS[way](consumer, batch)

            with pytest.raises(EventLoopMisuse):
                await attempt()
            assert [message.nak(0) for message in batch] == [True, True], "nothing was acked"

    run(main())


@pytest.mark.parametrize("kind", ["message", "part", "batch"])
def test_double_ack_refuses_what_another_consumer_has_delivered(memory: MemoryTestCluster, kind: str) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 1)

    async def main() -> None:
        async with (
            aio.connect(memory.target) as marshal,
            marshal.consumer("mine", [topic], **OPTIONS) as mine,
            marshal.consumer("other", [topic], **OPTIONS) as other,
        ):
            batch = await mine.fetch(1, expires_s=DEADLINE_S)
            given = {"message": batch[0], "part": batch.parts[0], "batch": batch}[kind]
            with pytest.raises(InvalidOption, match="of this consumer"):
                await other.double_ack(given)
            assert batch.nak(0), "nothing was acked"

    run(main())


def test_another_event_loop_is_refused(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:

            def elsewhere() -> None:
                asyncio.run(consumer.fetch(1))

            with pytest.raises(EventLoopMisuse, match="another event loop"):
                await asyncio.to_thread(elsewhere)

    run(main())


def test_another_event_loop_can_only_close_the_marshal(memory: MemoryTestCluster) -> None:
    """A verb is refused before it has done anything, although its own event loop has been closed."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)

    async def main() -> tuple[Any, ...]:
        marshal = await aio.connect(memory.target)
        consumer = await marshal.consumer("g", [topic], **OPTIONS)
        [message] = await consumer.fetch(1)
        return marshal, consumer, message, consumer.consume()

    async def elsewhere() -> None:
        verbs: dict[str, tuple[Any, ...]] = {"flush": (), "info": (), "drain": (), "stop": ()}
        for verb, given in {**verbs, "double_ack": (message,), "seek": ((topic, 0), 0)}.items():
            with pytest.raises(EventLoopMisuse, match=rf"^{verb}\(\) was called in another event loop.*close\(\)"):
                await getattr(consumer, verb)(*given)
        for verb in ("wait", "drain", "stop"):
            with pytest.raises(EventLoopMisuse, match=rf"^{verb}\(\) was called in another event loop"):
                await getattr(context, verb)()
        assert not consumer._ending.stopping
        assert not context.closed
        assert consumer.cached_info().in_flight == 1
        await marshal.close()

    marshal, consumer, message, context = run(main())
    run(elsewhere())
    assert consumer.cached_info().closed


def test_a_stop_ends_a_waiting_fetch_and_an_iteration(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        async with aio.connect(memory.target) as marshal:
            one, other = [await marshal.consumer(group, [topic], **OPTIONS) for group in ("a", "b")]
            waiting = asyncio.create_task(one.fetch(1, expires_s=DEADLINE_S))

            async def iterate() -> int:
                return len([message async for message in other])

            iterating = asyncio.create_task(iterate())
            await turn_until(lambda: all(c._consumer._user is not None for c in (one, other)), "both wait")
            await one.stop()
            other._ending.request_stop()
            with pytest.raises(ConsumerClosed):
                await waiting
            assert await iterating == 0
            assert other._ending.stopping
            await other.drain()
            for closed, why in ((one, "it was stopped"), (other, "it was drained")):
                with pytest.raises(ConsumerClosed, match=why):
                    await closed.seek((topic, 0), 0)
                for verb in (closed.pause, closed.resume):
                    with pytest.raises(ConsumerClosed, match=why):
                        verb([(topic, 0)])

    run(main())


def test_a_marshal_may_be_closed_before_its_blocks_end(memory: MemoryTestCluster) -> None:
    """It stops its consumers; a second close, and the ends of the blocks, have nothing left to do."""
    topic = memory.topic()

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            waiting = asyncio.create_task(consumer.fetch(1, expires_s=DEADLINE_S))
            await turn_until(lambda: consumer._consumer._user is not None, "it waits")
            await marshal.close()
            with pytest.raises(ConsumerClosed):
                await waiting
            await marshal.close()
            assert consumer.cached_info().closed

    run(main())


def test_the_callbacks_are_those_of_the_synchronous_front(memory: MemoryTestCluster) -> None:
    """Claimed, moving, lost, active and not: on the thread of callbacks, from which they reach the event loop."""
    topic, group = memory.topic(2), memory.group()
    memory.fill(topic, 0, 1)
    memory.fill(topic, 1, 1)
    told: list[tuple[str, int]] = []

    async def main() -> None:
        loop, threads = asyncio.get_running_loop(), set()

        def tell(what: str, partition: int = -1) -> None:
            threads.add(threading.current_thread().name)
            loop.call_soon_threadsafe(told.append, (what, partition))

        callbacks: dict[str, Any] = {
            "on_claim": lambda claim: tell("claimed", claim.partition),
            "on_revoking": lambda claim: tell("revoking", claim.partition),
            "on_lost": lambda claim, reason: tell(f"lost: {reason}", claim.partition),
            "on_activated": lambda: tell("activated"),
            "on_deactivated": lambda: tell("deactivated"),
        }
        async with aio.connect(memory.target) as marshal:
            async with marshal.consumer(group, [topic], **callbacks, **OPTIONS) as consumer:
                await turn_until(lambda: {("claimed", 0), ("claimed", 1)} <= set(told), "both are claimed")
                batch = await consumer.fetch(2, min_messages=2, expires_s=DEADLINE_S)
                async with marshal.consumer(group, [topic], **OPTIONS):
                    await turn_until(lambda: "revoking" in [what for what, _ in told], "one must move")
                    batch.ack()
                    await turn_until(lambda: "lost: hand-over" in [what for what, _ in told], "one has moved")
            await turn_until(lambda: ("deactivated", -1) in told, "it owns nothing")
        assert told[0] == ("activated", -1)
        assert [what for what, _ in told if what == "lost: stopped"]
        assert threads == {"marshal-callbacks"}

    run(main())


def test_a_closed_marshal_refuses_consumers_as_the_synchronous_one_does(memory: MemoryTestCluster) -> None:
    topic = memory.topic()

    async def main() -> None:
        marshal = await aio.connect(memory.target)
        await marshal.close()
        with pytest.raises(ConsumerClosed, match="Marshal"):
            await marshal.consumer("g", [topic], **OPTIONS)

    run(main())


@pytest.mark.parametrize("at", range(3))
def test_a_close_that_is_cancelled_is_completed_by_a_second_one(embedded: EmbeddedTestCluster, at: int) -> None:
    """The first one goes on in its thread."""
    topic = embedded.topic()

    async def main() -> None:
        marshal = await aio.connect(embedded.target)
        consumer = await marshal.consumer("g", [topic], **OPTIONS)
        await cut(marshal.close(), at, False)
        await marshal.close()
        assert consumer.cached_info().closed
        assert marshal._plain._done

    run(main())


def test_a_signal_ends_the_iteration(memory: MemoryTestCluster) -> None:
    """`stop_on_signals` takes consumers of both fronts."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("g", [topic], **OPTIONS) as consumer:
            with marshal_py.stop_on_signals(consumer, signals=[signal.SIGTERM]):
                async for message in consumer:
                    message.ack()
                    signal.raise_signal(signal.SIGTERM)
            assert consumer._ending.stopping

    run(main())
    assert signal.getsignal(signal.SIGTERM) == before


# --- the receiver


class Client:
    """What a data client gives: lists of chunks, or errors; then nothing."""

    def __init__(self, *answers: list[Chunk] | Exception) -> None:
        self._answers = list(answers)
        self.wanted: list[int] = []

    def pull(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        self.wanted.append(max_messages)
        if not self._answers:
            threading.Event().wait(min(timeout_s, 0.001))
            return []
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_error_of_a_data_client_reaches_its_consumer_which_goes_on() -> None:
    failed, chunk = ClusterError("refused"), Chunk(marshal_py.TopicPartition("t", 0), 1, [])

    async def main() -> None:
        feed = Feed(asyncio.get_running_loop(), Client(failed, [chunk]).pull, lambda most: None, time.monotonic)
        with pytest.raises(ClusterError, match="refused"):
            await feed.poll(Poll(DEADLINE_S, 10))
        assert await feed.poll(Poll(DEADLINE_S, 10)) == [chunk]
        assert await feed.poll(Poll(0.0, 10)) == [], "an expired request is answered, too"
        waiting = asyncio.ensure_future(feed.poll(Poll(DEADLINE_S, 10)))
        await turn_until(lambda: feed._wanted is not None and not feed._wanted.ahead, "it waits")
        feed.close()
        assert await waiting == [], "what is asked at the end is answered"
        assert feed._receiver is not None
        feed._receiver.join(DEADLINE_S)
        assert not feed._receiver.is_alive()
        assert await feed.poll(Poll(DEADLINE_S, 10)) == [], "nothing is polled for any more"

    run(main())


def test_a_receiver_that_cannot_be_started_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(marshal_py.TopicPartition("t", 0), 1, [])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        feed = Feed(asyncio.get_running_loop(), Client([chunk]).pull, lambda most: None, time.monotonic)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                await feed.poll(Poll(DEADLINE_S, 10))
        assert feed.take(10) is None
        async with asyncio.timeout(DEADLINE_S):
            assert await feed.poll(Poll(DEADLINE_S, 10)) == [chunk]
        feed.close()

    run(main())


@pytest.mark.parametrize(("wait_s", "wanted"), [(DEADLINE_S, [10, 1]), (0.0, [10])])
def test_for_a_call_that_waits_one_message_more_is_polled_for_and_for_no_other(
    wait_s: float, wanted: list[int]
) -> None:
    chunk = Chunk(marshal_py.TopicPartition("t", 0), 1, [])

    async def main() -> None:
        client = Client([chunk], [chunk], [chunk])
        feed = Feed(asyncio.get_running_loop(), client.pull, lambda most: None, time.monotonic)
        assert (await feed.poll(Poll(wait_s, 10)))[0] == chunk
        await turn_until(lambda: client.wanted == wanted, "what was polled for has come")
        feed.close()
        assert feed._receiver is not None
        feed._receiver.join(DEADLINE_S)
        assert client.wanted == wanted

    run(main())


# --- topics and groups


async def _first(items: AsyncIterator[T], count: int) -> AsyncIterator[T]:
    async for item in items:
        yield item
        count -= 1
        if not count:
            return


def test_followers_of_advisories_leave_the_threads_to_others(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them wait than there are threads. Each connection is closed at the end, and not on the event loop."""
    topic = memory.topic(1)
    closed: list[int] = []
    close = Observer.close

    def noted(observer: Observer) -> None:
        close(observer)
        closed.append(threading.get_ident())

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer("followed", [topic], **OPTIONS):
            group = marshal.group("followed")
            joined = [advisory.kind async for advisory in group.advisories() if advisory.kind == "joined"]
            assert joined == ["joined"]
            await turn_until(lambda: closed, "closed")
            closed.clear()
            seen: list[str] = []

            async def follow() -> None:
                async for advisory in group.advisories(follow=True):
                    seen.append(advisory.kind)

            followers = [asyncio.create_task(follow()) for _ in range(READS_AT_ONCE_MAX + 1)]
            await turn_until(lambda: seen.count("claimed") == len(followers), "all have read the log")
            assert len((await group.info()).members) == 1
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            assert len((await group.info()).members) == 1
            await turn_until(lambda: len(closed) == len(followers), "closed")
            assert threading.get_ident() not in closed

    monkeypatch.setattr(Observer, "close", noted)
    run(main())


def test_topics_and_groups_with_await(memory: MemoryTestCluster) -> None:
    topic = memory.topic(1)
    for number in range(4):
        memory.put(topic, 0, b"%d" % number, b"k%d" % (number % 2))

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.topic(topic) as found:
            assert (await found.get(offset=2)).value == b"2"
            assert (await found["k1"]).value == b"3"
            first = await found.get(batch=3)
            assert [message.value for message in first] == [b"0", b"1", b"2"]
            following = first.next_request()
            assert [[m.value for m in page] async for page in found.pages(following)] == [[b"3"]]
            followed = [m.value async for m in _first(found.follow(GetRequest(offset=1, batch=1), every_s=0.01), 3)]
            assert followed == [b"1", b"2", b"3"]
            assert topic in await marshal.topics()
            assert (await found.info()).name == topic
            group = await marshal.create_group("made")
            assert group.name == "made"
            assert await marshal.groups() == ("made",)
            assert (await marshal.group("made").info()).group == "made"
            assert await marshal.delete_group("made")
            reads: list[Awaitable[Any]] = [found.get(offset=number) for number in range(4)]
            assert [m.value for m in await asyncio.gather(*reads)] == [b"0", b"1", b"2", b"3"]

    run(main())
