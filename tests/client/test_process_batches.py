"""`process(batch=...)`, of both fronts: what comes in one list, what each outcome does, and the order of each lane."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from marshal_py import Batches, Consumer, Message, Reject, Retry
from marshal_py.client.process import processing
from marshal_py.client.process.process import AsyncProcess
from marshal_py.client.process.processing import BATCH_WAIT_S_MAX, Processing
from marshal_py.errors import InvalidOption
from tests.client.test_async_process import opened
from tests.client.test_async_process import until as until_async
from tests.client.test_process import fill
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, joined, positions, until

AT_ONCE = Retry(first_s=0.0)


class Lists:
    """Notes the lists of a handler. `then(messages)`: what it returns. Finds a lane that is in two lists at once."""

    def __init__(self, then: Callable[[list[Message]], Any] = lambda _: None, lane: Any = lambda one: one.key) -> None:
        self._lock, self._then, self._lane = threading.Lock(), then, lane
        self._working: Counter[Any] = Counter()
        self.lists: list[list[int]] = []
        self.began: dict[Any, list[int]] = defaultdict(list)
        self.at_once = 0
        self.faults: list[Any] = []

    def __call__(self, messages: list[Message]) -> Any:
        lanes = {(one.partition, self._lane(one)) for one in messages}
        places = [(one.partition, one.offset) for one in messages]
        with self._lock:
            self.faults += [places] if places != sorted(places) else []
            self.faults += [lane for lane in lanes if self._working[lane]]
            self._working.update(lanes)
            self.at_once = max(self.at_once, self._working.total())
            self.lists.append([one.offset for one in messages])
            for one in messages:
                self.began[one.partition, self._lane(one)].append(one.offset)
        try:
            return self._then(messages)
        finally:
            with self._lock:
                self._working.subtract(lanes)

    def sorted_lists(self) -> list[list[int]]:
        return sorted(self.lists)


def test_each_lane_is_in_one_list_at_a_time_and_in_order(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 600, keys=20, partitions=2)

    def some_fail(messages: list[Message]) -> list[BaseException | None]:
        return [ValueError() if one.offset % 9 == 0 and one.delivery_count == 1 else None for one in messages]

    lists = Lists(some_fail)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(lists, workers=8, batch=Batches(15, wait_s=0.02), retry=AT_ONCE) as work:
            until(lambda: work.stats().finished == 600, "all are handled")
            assert work.drain()
        assert positions(consumer) == {0: 300, 1: 300}
    assert not lists.faults
    for offsets in lists.began.values():
        last = {offset: at for at, offset in enumerate(offsets)}
        by_end = sorted(last, key=lambda offset: last[offset])
        assert by_end == sorted(last), "a message was finished before one that is before it in its lane"
    assert 1 < max(map(len, lists.lists)) <= 15


@pytest.mark.parametrize(
    ("order", "keys", "working"), [("key", 1, 4), ("key", 2, 6), ("partition", 6, 4), (None, 1, 6)]
)
def test_what_is_left_of_a_lane_waits_for_the_list_that_has_the_rest(
    memory: MemoryTestCluster, order: Any, keys: int, working: int
) -> None:
    """With two keys the first list takes all of one, and one of the other; so what is left of that waits."""
    topic, hold = fill(memory, 6, keys), threading.Event()
    lists = Lists(lambda messages: hold.wait(DEADLINE_S) and None)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lists, workers=2, order=order, batch=Batches(4 if keys != 2 else 3, wait_s=0.2)) as work,
    ):
        until(lambda: work.stats().working == working, "they are in work")
        assert work.stats().waiting == 6 - working
        hold.set()
        until(lambda: work.stats().finished == 6, "all are handled")
    assert not lists.faults or order is None


def test_a_list_waits_to_be_full_and_a_drain_does_not(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 7, keys=7)
    lists = Lists()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lists, workers=1, batch=Batches(5, wait_s=3_600)) as work,
    ):
        until(lambda: work.stats().finished == 5 and work.stats().waiting == 2, "one list is full")
        assert work.drain()
    assert lists.sorted_lists() == [[0, 1, 2, 3, 4], [5, 6]]


def test_it_says_what_waits_for_a_list_to_be_full_and_what_for_a_worker(memory: MemoryTestCluster) -> None:
    topic, hold = fill(memory, 7, keys=2), threading.Event()
    lists = Lists(lambda messages: hold.wait(DEADLINE_S) and None)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lists, workers=2, batch=Batches(5, wait_s=3_600)) as work,
    ):
        until(lambda: work.stats().working == 5 and work.stats().waiting == 2, "one list is full")
        memory.put(topic, 0, b"", b"k2")
        memory.put(topic, 0, b"", b"k2")
        until(lambda: work.stats().waiting == 4, "all have come")
        assert work.stats().waiting_for == {"worker": 0, "batch": 2, "lane": 2, "retry": 0, "gate": 0}
        for number in range(6):
            memory.put(topic, 0, b"", b"k%d" % (number + 2))
        until(lambda: work.stats().working == 10, "both workers have a list")
        until(lambda: work.stats().waiting == 5, "all have come")
        assert work.stats().waiting_for == {"worker": 3, "batch": 0, "lane": 2, "retry": 0, "gate": 0}
        hold.set()
        assert work.drain()


def test_a_list_is_due_for_the_worker_that_takes_it(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers have seen a full list, and one has taken it when the other goes on."""
    topic, hold, calls = fill(memory, 7, keys=2), threading.Event(), list[int]()
    begin, lock, late, looked = Processing.begin_batch, threading.Lock(), threading.Event(), threading.Event()

    def one_goes_on_late(self: Processing[Any, Any]) -> list[Message]:
        with lock:
            calls.append(1)
            number = len(calls)
        if number == 1:
            until(lambda: len(calls) == 2, "both have seen it")
            return begin(self)
        until(late.is_set, "more have come")
        found = begin(self)
        looked.set()
        return found

    monkeypatch.setattr(Processing, "begin_batch", one_goes_on_late)
    lists = Lists(lambda messages: hold.wait(DEADLINE_S) and None)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lists, workers=2, batch=Batches(5, wait_s=3_600)) as work,
    ):
        until(lambda: work.stats().working == 5 and work.stats().waiting == 2, "one list is full")
        memory.put(topic, 0, b"", b"k2")
        until(lambda: work.stats().waiting == 3, "it has come")
        late.set()
        until(looked.is_set, "the other goes on")
        assert (work.stats().working, work.stats().waiting) == (5, 3)
        hold.set()
        assert work.drain()


def test_a_worker_that_looks_while_another_one_takes_a_list_looks_again(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not sleep as if nothing were there: what is left of the messages is due soon."""
    topic, hold, looked = fill(memory, 7, keys=7), threading.Event(), threading.Event()
    take, due_s = Processing._take_batch, Processing.batch_due_s

    def look(self: Processing[Any, Any]) -> float:
        if self._taking:
            looked.set()
        return due_s(self)

    def slowly(self: Processing[Any, Any]) -> list[Message]:
        if not looked.is_set():
            until(looked.is_set, "the other worker has looked")
        return take(self)

    monkeypatch.setattr(processing, "IDLE_S", 3_600.0)
    monkeypatch.setattr(Processing, "batch_due_s", look)
    monkeypatch.setattr(Processing, "_take_batch", slowly)
    lists = Lists(lambda messages: hold.wait(DEADLINE_S) and None if len(messages) == 5 else None)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lists, workers=2, batch=Batches(5, wait_s=0.05)) as work,
    ):
        memory.put(topic, 0, b"", b"another")  # so that the second worker wakes up
        until(lambda: sum(map(len, lists.lists)) == 8, "the rest is handled while the first list is in work")
        hold.set()
        until(lambda: work.stats().finished == 8, "all are handled")


@pytest.mark.parametrize("count", [3, 5])
def test_a_paused_partition_changes_nothing_for_lists(memory: MemoryTestCluster, count: int) -> None:
    """After it one that is not full waits, and one that is full begins, whatever waits of others."""
    topic, hold = memory.topic(2), threading.Event()
    lists = Lists(lambda messages: hold.wait(DEADLINE_S) and None)

    def put(partition: int, messages: int) -> None:
        for number in range(messages):
            memory.put(topic, partition, b"", b"%d" % number)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lists, workers=1, batch=Batches(5, wait_s=3_600)) as work,
    ):
        put(0, 5)
        until(lambda: work.stats().working == 5, "one list is in work")
        put(0, count)
        put(1, 5 - count)
        until(lambda: work.stats().waiting == 5, "more have come")
        consumer.pause([(topic, 0)])
        hold.set()
        until(lambda: work.stats().waiting_for["gate"] == count, "the worker has found the gate shut")
        if count == 5:
            put(1, 1)
            until(lambda: work.stats().waiting == 6, "one of another partition waits for its list")
        consumer.resume([(topic, 0)])
        until(lambda: work.stats().waiting_for["gate"] == 0, "the gate is open")
        if count == 5:
            until(lambda: work.stats().finished == 10, "the full list is handled")
        else:
            assert work.stats().waiting_for["batch"] == 3
        assert [len(messages) for messages in lists.lists] == ([5, 5] if count == 5 else [5, 2])
        assert work.drain()


def test_a_list_that_is_not_full_is_handled_after_a_while(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=3)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda messages: None, batch=Batches(1_000, wait_s=0.01)) as work,
    ):
        until(lambda: work.stats().finished == 3, "they are handled")


def test_each_outcome_is_of_its_message(memory: MemoryTestCluster) -> None:
    topic, letters = fill(memory, 4, keys=4), memory.topic()
    outcomes: dict[int, Any] = {1: Reject("no amount"), 2: Retry(after_s=0), 3: ValueError("once")}

    def answer(messages: list[Message]) -> list[Any]:
        return [outcomes.get(one.offset) if one.delivery_count == 1 else None for one in messages]

    lists, group = Lists(answer), memory.group()
    with (
        memory.connect() as marshal,
        joined(marshal, group, [topic], dead_letter_topic=letters) as consumer,
        consumer.process(lists, workers=1, batch=Batches(4, wait_s=3_600), retry=AT_ONCE) as work,
    ):
        until(lambda: work.stats().finished == 3, "all but one are acked")
        assert work.drain()
        failed = [event.offset for event in consumer.events() if event.kind == "handler_failed"]
        letter = dict(marshal.topic(letters).get(offset=0).headers)
    assert failed == [3]
    assert int(letter["__dlq.errors.offset"]) == 1
    assert lists.lists[0] == [0, 1, 2, 3]
    assert sorted(lists.lists[1:]) == [[2], [3]], "what is tried again comes alone"


def test_what_is_behind_a_failure_in_its_lane_comes_again_after_it(memory: MemoryTestCluster) -> None:
    """Although the handler says that it is done: else the older message would be written over the newer one."""
    topic = fill(memory, 5, keys=1)

    def fail_once(messages: list[Message]) -> list[Any]:
        return [ValueError() if one.offset == 1 and one.delivery_count == 1 else None for one in messages]

    lists = Lists(fail_once)
    retry = Retry(first_s=0.05, jitter=0.0)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(lists, workers=4, batch=Batches(4, wait_s=0.02), retry=retry) as work:
            until(lambda: work.stats().finished == 5, "all are handled")
            assert work.stats().retried == 3
        assert positions(consumer) == {0: 5}
    assert lists.began[0, b"k0"][:4] == [0, 1, 2, 3]
    assert lists.began[0, b"k0"][4:] == [1, 2, 3, 4]


def test_a_handler_that_raises_has_failed_with_each_and_then_with_one_alone(memory: MemoryTestCluster) -> None:
    topic, letters = fill(memory, 6, keys=3), memory.topic()

    def poison(messages: list[Message]) -> None:
        if any(one.offset == 2 for one in messages):
            raise ValueError("all or nothing")

    lists = Lists(poison)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], dead_letter_topic=letters) as consumer,
        consumer.process(lists, workers=1, batch=Batches(6, wait_s=3_600), retry=Retry(0.0, deliveries=3)) as work,
    ):
        until(lambda: positions(consumer) == {0: 6}, "all are done")
        assert (work.stats().finished, work.stats().ended) == (5, 1)
    assert lists.lists[0] == [0, 1, 2, 3, 4, 5]
    assert sorted(lists.lists[1:]) == [[0], [1], [2], [2], [3], [4], [5]]


@pytest.mark.parametrize(("then", "finished", "ended"), [("continue", 3, 1), ("key", 1, 3)])
def test_what_is_behind_a_dead_letter_in_the_same_list(
    memory: MemoryTestCluster, then: Any, finished: int, ended: int
) -> None:
    topic, letters = fill(memory, 4, keys=1), memory.topic()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], dead_letter_topic=letters) as consumer,
        consumer.process(
            lambda messages: [Reject("bad") if one.offset == 1 else None for one in messages],
            batch=Batches(4),
            after_dead_letter=then,
        ) as work,
    ):
        until(lambda: positions(consumer) == {0: 4}, "all are done")
        assert (work.stats().finished, work.stats().ended) == (finished, ended)


def _pop(messages: list[Message]) -> None:
    while messages:
        messages.pop()


def _pop_one(messages: list[Message]) -> list[None]:
    outcomes = [None] * len(messages)
    messages.pop()
    return outcomes


def _twice(messages: list[Message]) -> None:
    messages.extend(list(messages))


@pytest.mark.parametrize("change", [_pop, _pop_one, _twice])
def test_a_handler_may_change_its_list(memory: MemoryTestCluster, change: Any) -> None:
    topic = fill(memory, 60, keys=None)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(change, batch=Batches(10, wait_s=0.01)) as work,
    ):
        until(lambda: positions(consumer) == {0: 60}, "all are acked")
        assert (work.stats().finished, work.stats().retried) == (60, 0)


@pytest.mark.parametrize(
    ("answer", "names"),
    [(7, "None, or a list of 2"), ("ok", "a list of 2"), ([None], "1 outcomes"), ([None, True], "an outcome=True")],
)
def test_an_answer_that_is_no_list_of_outcomes_ends_it_and_acks_nothing(
    memory: MemoryTestCluster, answer: Any, names: str
) -> None:
    topic = fill(memory, 2, keys=2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(lambda messages: answer, batch=Batches(2, wait_s=3_600))
        with pytest.raises(InvalidOption, match=names):
            work.wait(DEADLINE_S)
        assert [message.offset for message in consumer.fetch(2, min_messages=2)] == [0, 1]


def test_an_outcome_that_is_not_retried_ends_it_and_acks_the_others_of_other_lanes(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 4, keys=2)

    def answer(messages: list[Message]) -> list[Any]:
        return [KeyError("a bug") if one.offset == 0 else None for one in messages]

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(answer, batch=Batches(4, wait_s=3_600), retry_on=ValueError)
        with pytest.raises(KeyError, match="a bug"):
            work.wait(DEADLINE_S)
        assert [message.offset for message in consumer.fetch(2, min_messages=2)] == [0, 2]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ((0,), "size=0"),
        ((True,), "size=True"),
        ((5, -1), "wait_s=-1"),
        ((10_001,), "from 1 to 10000"),
        ((5, float("inf")), "wait_s"),
    ],
)
def test_bad_bounds_of_a_list_are_refused(given: tuple[Any, ...], names: str) -> None:
    with pytest.raises(InvalidOption, match=names):
        Batches(*given)


def test_a_consumer_is_healthy_while_a_worker_is_free_for_the_next_list(memory: MemoryTestCluster) -> None:
    topic, hold = fill(memory, 4, keys=4), threading.Event()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda messages: hold.wait(DEADLINE_S) and None, workers=2, batch=Batches(4)) as work,
    ):
        until(lambda: work.stats().working == 4, "one list is in work: four messages, one handler")
        assert work._processing.silent_s() == 0
        hold.set()


def test_tasks_take_lists(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 120, keys=6)
    faults: list[Any] = []

    async def main() -> None:
        working: set[Any] = set()

        async def handle(messages: list[Message]) -> list[BaseException | None]:
            keys = {one.key for one in messages}
            faults.extend(keys & working)
            working.update(keys)
            await asyncio.sleep(0)
            working.difference_update(keys)
            return [ValueError() if one.offset % 11 == 0 and one.delivery_count == 1 else None for one in messages]

        async with opened(memory, topic) as consumer:
            async with consumer.process(handle, batch=Batches(7, wait_s=0.01), retry=AT_ONCE) as work:
                await until_async(lambda: work.stats().finished == 120, "all are handled")
                assert await work.drain()
            assert [claim.position for claim in consumer.cached_info().claims.values()] == [120]

    asyncio.run(main())
    assert not faults


def test_what_comes_alone_waits_for_no_list_to_be_full(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it stood behind another one of its lane, so that a worker has looked and found nothing to take."""
    topic, hold, looks, due_s = fill(memory, 3, keys=1), threading.Event(), list[float](), Processing.batch_due_s

    def look(processing: Processing[Any, Any]) -> float:
        looks.append(due_s(processing))
        return looks[-1]

    def handle(messages: list[Message]) -> None:
        if len(messages) > 1:
            raise ValueError
        if messages[0].offset == 0:
            assert hold.wait(DEADLINE_S)

    monkeypatch.setattr(Processing, "batch_due_s", look)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle, workers=2, batch=Batches(3, wait_s=BATCH_WAIT_S_MAX), retry=AT_ONCE) as work,
    ):
        until(lambda: (work.stats().working, work.stats().waiting) == (1, 2), "two wait behind the first")
        looks.clear()
        until(lambda: looks, "the other worker has looked")
        hold.set()
        until(lambda: work.stats().finished == 3, "all are handled alone")


def test_a_list_whose_task_takes_too_long_is_tried_again(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=1)
    lists: list[list[int]] = []

    async def main() -> None:
        async def handle(messages: list[Message]) -> None:
            lists.append([one.offset for one in messages])
            if len(lists) == 1:
                await asyncio.Event().wait()

        async with (
            opened(memory, topic) as consumer,
            consumer.process(handle, batch=Batches(3, wait_s=BATCH_WAIT_S_MAX), timeout_s=0.05, retry=AT_ONCE) as work,
        ):
            await until_async(lambda: work.stats().finished == 3, "all are handled alone")

    asyncio.run(main())
    assert lists == [[0, 1, 2], [0], [1], [2]]


def test_a_task_that_is_cancelled_before_it_begins_keeps_no_list(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, begin, cancelled = fill(memory, 6, keys=1), AsyncProcess._run, []

    def run(self: AsyncProcess, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = begin(self, work)
        if not cancelled:
            task.cancel()
            cancelled.append(task)
        return task

    async def main() -> None:
        async def handle(messages: list[Message]) -> None: ...

        async with (
            opened(memory, topic) as consumer,
            consumer.process(handle, batch=Batches(2, wait_s=0), workers=1) as work,
        ):
            await until_async(lambda: work.stats().finished == 6, "all are handled")
            assert work.stats().retried == 0

    monkeypatch.setattr(AsyncProcess, "_run", run)
    asyncio.run(main())
    assert cancelled


def typed(consumer: Consumer[bytes, int]) -> None:
    """mypy checks that a handler of lists gets the consumer's types."""

    def handle(messages: list[Message[bytes, int]]) -> list[BaseException | None]:
        return [None for _ in messages]

    consumer.process(handle, batch=Batches(10)).stop()
    consumer.process(handle).stop()  # type: ignore[call-overload]
