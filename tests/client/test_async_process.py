"""`AsyncConsumer.process`: what differs from threads. The order and the answers are those of test_process.py."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from marshal_py import Batches, Message, Retry, aio
from marshal_py.client.process import process
from marshal_py.client.process.processing import Processing
from marshal_py.errors import EventLoopMisuse, InvalidOption, ReentrantCall
from tests.client.test_process import Unwritable, fill
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster


@asynccontextmanager
async def opened(memory: MemoryTestCluster, topic: str, **options: Any) -> AsyncIterator[aio.AsyncConsumer]:
    given: dict[str, Any] = {"start": "earliest", "heartbeat_interval_s": 1.0} | options
    async with aio.connect(memory.target) as marshal, marshal.consumer(memory.group(), [topic], **given) as consumer:
        yield consumer


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"{what}: it did not come true")


def test_a_hundred_tasks_at_once_and_each_key_in_order(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 600, keys=100, partitions=2)
    began: dict[Any, list[int]] = defaultdict(list)
    working: set[Any] = set()
    faults: list[Any] = []
    most = 0

    async def main() -> None:
        together = asyncio.Event()

        async def handle(message: Message) -> None:
            nonlocal most
            key = (message.partition, message.key)
            faults.extend([key] if key in working else [])
            working.add(key)
            began[key].append(message.offset)
            most = max(most, len(working))
            if most == 100:
                together.set()
            await together.wait()
            working.remove(key)
            if message.offset % 7 == 0 and began[key].count(message.offset) == 1:
                raise ValueError("once")

        async with opened(memory, topic) as consumer:
            async with consumer.process(handle, retry=Retry(first_s=0.001)) as work:
                await until(lambda: work.stats().finished == 600, "all are handled")
                assert work.stats().retried == sum(offset % 7 == 0 for offset in range(300)) * 2
                assert await work.drain()
                assert work.closed
            assert sorted(claim.position for claim in consumer.cached_info().claims.values()) == [300, 300]

    asyncio.run(main())
    assert most == 100
    assert not faults
    assert all(offsets == sorted(offsets) for offsets in began.values())


def test_a_handler_that_takes_too_long_is_cancelled_and_tried_again(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic = fill(memory, 2, keys=2)
    tries: list[int] = []

    async def main() -> None:
        async def handle(message: Message) -> None:
            tries.append(message.offset)
            if tries.count(message.offset) == 1:
                await asyncio.Event().wait()

        async with (
            opened(memory, topic) as consumer,
            consumer.process(handle, timeout_s=0.05, retry=Retry(first_s=0)) as work,
        ):
            await until(lambda: work.stats().finished == 2, "both are handled at their second delivery")

    asyncio.run(main())
    assert sorted(tries) == [0, 0, 1, 1]
    raised = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert set(raised) == {"the handler took longer than timeout_s=0.05"}


@pytest.mark.parametrize("raised", [SystemExit("enough"), asyncio.CancelledError("of something awaited")])
def test_other_errors_end_it_and_ack_nothing(memory: MemoryTestCluster, raised: BaseException) -> None:
    topic = fill(memory, 1, keys=1)

    async def main() -> None:
        async def handle(message: Message) -> None:
            raise raised

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle)
            with pytest.raises(type(raised)):
                await work.wait(DEADLINE_S)
            assert [message.offset for message in await consumer.fetch(1)] == [0]

    asyncio.run(main())


def test_an_error_that_cannot_be_written_ends_it_and_gives_the_message_back(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 2, keys=1)

    async def main() -> None:
        async def handle(message: Message) -> None:
            raise Unwritable

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle)
            with pytest.raises(RuntimeError, match="no text"):
                await work.wait(DEADLINE_S)
            assert work.stats().working == 0
            assert [message.offset for message in await consumer.fetch(2, min_messages=2)] == [0, 1]

    asyncio.run(main())


def test_a_plain_function_is_refused_and_loses_nothing(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            with pytest.raises(InvalidOption, match="coroutine function of one message"):
                consumer.process(5)  # type: ignore[arg-type]
            with pytest.raises(InvalidOption, match="coroutine function of one message"):
                consumer.process(main)  # type: ignore[arg-type]
            with pytest.raises(InvalidOption, match=r"timeout_s=0.*above 0"):
                consumer.process(asyncio.sleep, timeout_s=0)  # type: ignore[arg-type]
            work = consumer.process(lambda message: None)  # type: ignore[arg-type, return-value]
            with pytest.raises(InvalidOption, match="coroutine function"):
                await work.wait(DEADLINE_S)
            assert len(await consumer.fetch(1)) == 1

    asyncio.run(main())


def test_a_stop_waits_for_handlers_and_cancels_none(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 20, keys=2)

    async def main() -> None:
        hold = asyncio.Event()

        async def handle(message: Message) -> None:
            await hold.wait()

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle)
            await until(lambda: work.stats().working == 2 and work.stats().waiting == 18, "all have come")
            await work.stop(timeout_s=0)
            assert (work.closed, work.stats().working, work.stats().waiting) == (False, 2, 0)
            hold.set()
            assert await work.wait(DEADLINE_S)
            assert work.stats().finished == 2
            assert [message.offset for message in await consumer.fetch(18, min_messages=18)] == list(range(2, 20))

    asyncio.run(main())


def test_a_handler_that_hangs_does_not_keep_the_process_from_its_end(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LEAVE_TIMEOUT_S", 0.1)
    topic = fill(memory, 4, keys=2)

    async def main() -> None:
        hold = asyncio.Event()

        async def hang(message: Message) -> None:
            if message.key == b"k0":
                await hold.wait()

        async with opened(memory, topic) as consumer:
            work = consumer.process(hang)
            await until(lambda: work.stats().finished == 2 and work.stats().working == 1, "one handler hangs")
            consumer._ending.request_stop()
            assert await work.wait(DEADLINE_S)
            assert (work.closed, work.error) == (True, None)
            hold.set()

    asyncio.run(main())
    assert "process has ended, and 1 handlers have not returned" in caplog.text


def test_a_drain_of_the_consumer_handles_what_waits(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with threads: also while no handler runs."""
    topic, done = fill(memory, 30, keys=1), []
    begin, look, looks = Processing.begin, Processing.look, []
    shut = [False]
    monkeypatch.setattr(Processing, "begin", lambda self: (None, True) if shut[0] else begin(self))
    monkeypatch.setattr(Processing, "look", lambda self: (look(self), looks.append(None)))

    async def main() -> None:
        async def handle(message: Message) -> None:
            done.append(message.offset)
            shut[0] = len(done) == 1  # no further one begins for a while

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle)
            await until(lambda: work.stats().finished == 1 and work.stats().waiting == 29, "the others wait")
            ending = asyncio.create_task(consumer.drain())
            await until(lambda: work._receiving.draining, "it drains")
            seen = len(looks)
            await until(lambda: len(looks) > seen + 8 or work.closed, "it has had the time to end")
            shut[0] = False
            await ending
            assert await work.wait(DEADLINE_S)

    asyncio.run(main())
    assert done == list(range(30))


def test_inside_a_handler_it_can_be_drained_and_not_waited_for(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=1)

    async def main() -> None:
        async with opened(memory, topic) as consumer:

            async def handle(message: Message) -> None:
                with pytest.raises(ReentrantCall, match="stop"):
                    await work.wait()
                assert not await work.drain()

            work = consumer.process(handle)
            assert await work.wait(DEADLINE_S)
            assert work.stats().finished >= 1

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", ["marshal-process", "marshal-consume"])
def test_one_whose_tasks_are_cancelled_before_they_begin_ends(memory: MemoryTestCluster, cancelled: str) -> None:
    """And with it its consume, so that the consumer may begin another one."""
    topic, handled = fill(memory, 1, keys=1), list[int]()

    async def handle(message: Message) -> None:
        handled.append(message.offset)

    async def main() -> None:
        async with opened(memory, topic) as consumer:
            ended = consumer.process(handle)
            for task in asyncio.all_tasks():
                if task.get_name() == cancelled:
                    task.cancel()
            assert await ended.wait(DEADLINE_S)
            await ended.stop()
            async with consumer.process(handle):
                await until(lambda: handled == [0], "another one has it")

    asyncio.run(main())


def test_handlers_that_are_cancelled_give_their_messages_back(memory: MemoryTestCluster) -> None:
    """As at the end of a program, when `asyncio.run` cancels all tasks."""
    topic = fill(memory, 4, keys=2)

    async def main() -> None:
        async def handle(message: Message) -> None:
            await asyncio.Event().wait()

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle)
            await until(lambda: work.stats().working == 2, "two are in work")
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if (task.get_name() or "").startswith("marshal-process"):
                    task.cancel()
            await until(lambda: work.closed and "closed" in repr(work), "it ends, and so does its consume")
            assert work.stats().working == 0
            assert [message.offset for message in await consumer.fetch(4, min_messages=4)] == [0, 1, 2, 3]

    asyncio.run(main())


def test_a_cancellation_that_a_handler_has_caught_does_not_end_the_next_one(memory: MemoryTestCluster) -> None:
    """Handlers follow each other in one task, and each may take it for its own."""
    topic, done = fill(memory, 3, keys=1), []

    async def main() -> None:
        async def handle(message: Message) -> None:
            if message.offset == 0:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            elif message.offset == 1 and not done.count(1):
                done.append(message.offset)
                other = asyncio.get_running_loop().create_future()
                other.cancel()
                await other  # this is not the end of the program
            done.append(message.offset)

        async with opened(memory, topic) as consumer, consumer.process(handle) as work:
            with pytest.raises(asyncio.CancelledError):
                await work.wait(DEADLINE_S)

    asyncio.run(main())
    assert done == [0, 1]


@pytest.mark.parametrize("shape", ["coroutine function", "plain function", "awaitable object"])
def test_what_a_handler_sets_in_its_context_is_gone_with_it(memory: MemoryTestCluster, shape: str) -> None:
    topic, found = fill(memory, 20, keys=2), []
    order: contextvars.ContextVar[int] = contextvars.ContextVar("order", default=-1)

    async def main() -> None:
        async def rest(message: Message, before: int) -> None:
            await asyncio.sleep(0)
            found.append((before, order.get() == message.offset))

        async def handle(message: Message) -> None:
            await plain(message)

        def plain(message: Message) -> Coroutine[Any, Any, None]:
            before = order.get()
            order.set(message.offset)
            return rest(message, before)

        class Handling:
            def __init__(self, message: Message) -> None:
                self._message = message

            def __await__(self) -> Generator[Any, Any, None]:
                return plain(self._message).__await__()

        handlers: dict[str, Any] = {"coroutine function": handle, "plain function": plain, "awaitable object": Handling}
        async with opened(memory, topic) as consumer, consumer.process(handlers[shape]):
            await until(lambda: len(found) == 20, "all are handled")

    asyncio.run(main())
    assert found == [(-1, True)] * 20


class Incomparable:
    """Like an array: nobody can say whether two of them are equal."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


@pytest.mark.parametrize("make", [list[int], Incomparable])
def test_values_of_a_context_are_told_apart_without_comparing_them(
    memory: MemoryTestCluster, make: Callable[[], Any]
) -> None:
    topic, found = fill(memory, 20, keys=2), []
    value: contextvars.ContextVar[Any] = contextvars.ContextVar("value")
    first = make()

    async def handle(_: Message) -> None:
        found.append(value.get() is first)
        value.set(make())

    async def main() -> None:
        value.set(first)
        async with opened(memory, topic) as consumer, consumer.process(handle) as work:
            await until(lambda: work.stats().finished == 20 or work.closed, "all are handled")

    asyncio.run(main())
    assert found == [True] * 20


def test_a_freed_worker_begins_with_the_next_message_in_the_same_turn(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TURN_S", 0.0)
    topic, seen = fill(memory, 20, keys=20), []

    async def main() -> None:
        gates = [asyncio.Event() for _ in range(20)]

        async def handle(message: Message) -> None:
            seen.append("begins")
            await gates[message.offset].wait()
            if message.offset < 18:
                asyncio.get_running_loop().call_soon(seen.append, "next turn")

        async with opened(memory, topic) as consumer, consumer.process(handle, workers=2) as work:
            await until(lambda: len(seen) == 2 and work.stats().waiting == 18, "the others wait")
            for offset, gate in enumerate(gates):
                gate.set()
                await until(lambda ended=offset + 1: work.stats().finished == ended, "it has ended")

    asyncio.run(main())
    assert seen == ["begins"] * 2 + ["begins", "next turn"] * 18


def test_handlers_that_do_not_wait_let_other_tasks_run(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every few milliseconds; here after each handler."""
    monkeypatch.setattr(process, "TURN_S", 0.0)
    topic, turns = fill(memory, 50, keys=1), [0]

    async def main() -> None:
        seen: list[int] = []

        async def handle(message: Message) -> None:
            seen.append(turns[0])

        async def other() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(other())
        async with opened(memory, topic) as consumer, consumer.process(handle, workers=1):
            await until(lambda: len(seen) == 50, "all are handled")
        running.cancel()
        assert len(set(seen)) == 50

    asyncio.run(main())


def test_another_event_loop_is_refused(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)

    async def main() -> None:
        async def handle(message: Message) -> None: ...

        async with opened(memory, topic) as consumer, consumer.process(handle) as work:

            def elsewhere() -> None:
                with pytest.raises(EventLoopMisuse):
                    asyncio.run(work.wait(0))

            await asyncio.to_thread(elsewhere)

    asyncio.run(main())


@pytest.mark.parametrize("batch", [None, Batches(2)])
def test_a_cancellation_of_a_handlers_task_alone_ends_it(memory: MemoryTestCluster, batch: Batches | None) -> None:
    """As what is no Exception does: else such a handler would be called again at once, and without an end."""
    topic, began = fill(memory, 4, keys=1), list[int]()

    async def main() -> None:
        async def handle(given: Any) -> None:
            began.append((given[0] if batch else given).offset)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle, batch=batch)
            with pytest.raises(asyncio.CancelledError):
                await work.wait(DEADLINE_S)
            assert work.stats().working == 0
            assert [message.offset for message in await consumer.fetch(4, min_messages=4)] == [0, 1, 2, 3]

    asyncio.run(main())
    assert began == [0]


@pytest.mark.parametrize("batch", [{}, {"batch": Batches(1)}])
def test_a_paused_partition_goes_on_after_a_time_in_which_all_workers_were_busy(
    memory: MemoryTestCluster, batch: dict[str, Any]
) -> None:
    """The handlers set a context variable, so each task ends with its message, and takes no other one."""
    topic, bound = memory.topic(2), contextvars.ContextVar[object]("bound")
    for number in range(4):
        memory.put(topic, 0, b"", b"k%d" % number)

    async def main() -> None:
        gates = [asyncio.Event(), asyncio.Event()]

        async def handle(given: Any) -> None:
            bound.set(object())
            await gates[(given[0] if batch else given).partition].wait()

        async with opened(memory, topic) as consumer, consumer.process(handle, workers=2, **batch) as work:
            await until(lambda: work.stats().working == 2, "two are in work")
            consumer.pause([(topic, 0)])
            gates[0].set()
            await until(lambda: work.stats().waiting_for["gate"] == 2, "two wait for the partition")
            for number in range(2):
                memory.put(topic, 1, b"", b"k%d" % number)
            await until(lambda: work.stats().working == 2, "both workers have messages of the other partition")
            await until(lambda: work._later is None, "nobody looks for the partition now")
            gates[1].set()
            await until(lambda: work.stats().finished == 4, "they are done")
            consumer.resume([(topic, 0)])
            await until(lambda: work.stats().finished == 6, "the others are handled, too")

    asyncio.run(main())


@pytest.mark.parametrize("batch", [{}, {"batch": Batches(2)}])
def test_a_process_that_has_ended_looks_at_no_paused_partition(
    memory: MemoryTestCluster, batch: dict[str, Any]
) -> None:
    topic = fill(memory, 4, keys=4)

    async def main() -> None:
        gate = asyncio.Event()

        async def handle(messages: Any) -> None:
            await gate.wait()

        async with opened(memory, topic) as consumer:
            work = consumer.process(handle, workers=1, **batch)
            await until(lambda: work.stats().working and work.stats().waiting >= 2, "one is in work")
            consumer.pause([(topic, 0)])
            gate.set()
            await until(lambda: work.stats().waiting_for["gate"], "the others wait for the partition")
            await work.stop()
            work._again()  # as its timer does
            assert not work._tasks, "it looks no more"

    asyncio.run(main())


def test_an_error_of_the_watching_task_ends_it_and_gives_its_messages_back(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = fill(memory, 2, keys=1)

    async def main() -> None:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def handle(message: Message) -> None:
            begun.set()
            await gate.wait()

        def look(_: Processing[bytes, bytes]) -> None:
            if begun.is_set():
                gate.set()
                raise RuntimeError("a bug")

        monkeypatch.setattr(Processing, "look", look)
        async with opened(memory, topic) as consumer:
            work = consumer.process(handle)
            with pytest.raises(RuntimeError, match="a bug"):
                await work.wait(DEADLINE_S)
            assert [message.offset for message in await consumer.fetch(1)] == [1]

    asyncio.run(main())
