"""`Consumer.process`: handlers in parallel, in the order of each key, through retries, moves and stops."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

import pytest

from marshal_py import ConsumeContext, Consumer, Message, Process, Reject, Retry
from marshal_py.client.delivery.prefetch import WAIT_S_MAX, WAIT_SUPPLIED_S_MAX
from marshal_py.client.messages.message import position_of
from marshal_py.client.process import process, processing
from marshal_py.client.process.processing import Processing
from marshal_py.errors import (
    ConcurrentUse,
    ConsumerClosed,
    GroupDeleted,
    InvalidOption,
    NeedsAtLeastOnce,
    ReentrantCall,
)
from marshal_py.testing import MemoryCluster
from tests.client.test_consume import delete
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, calm, joined, owns, positions, until

TIMEOUT_S = 30.0  # of handlers that are not to lose their partition: no machine stands still for so long


class Journal:
    """Notes which message was in work when. `then(message)`: what a handler does. Finds two of one key at once."""

    def __init__(self, then: Callable[[Message], object] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._then = then
        self._working: dict[Any, int] = {}
        self.began: dict[Any, list[int]] = defaultdict(list)  # offsets by key of a partition
        self.finished: list[tuple[int, int]] = []
        self.at_once = 0
        self.faults: list[str] = []

    def __call__(self, message: Message) -> None:
        key = (message.partition, message.key)
        with self._lock:
            if key in self._working:
                self.faults.append(f"{key}: {message.offset} beside {self._working[key]}")
            self._working[key] = message.offset
            self.began[key].append(message.offset)
            self.at_once = max(self.at_once, len(self._working))
        try:
            self._then(message)
        finally:
            with self._lock:
                del self._working[key]
        with self._lock:
            self.finished.append((message.partition, message.offset))

    def handled(self, count: int) -> None:
        until(lambda: len(set(self.finished)) >= count, f"{count} messages are handled")


def fill(memory: MemoryTestCluster, count: int, keys: int | None, partitions: int = 1) -> str:
    """A topic with `count` messages in turn over the partitions, with so many keys in each; None: without keys."""
    topic = memory.topic(partitions)
    for number in range(count):
        key = None if keys is None else b"k%d" % (number // partitions % keys)
        memory.put(topic, number % partitions, b"%d" % number, key)
    return topic


def in_order(journal: Journal) -> bool:
    """Whether each key's messages began in the order of their offsets, each again and again until it was finished."""
    return not journal.faults and all(offsets == sorted(offsets) for offsets in journal.began.values())


def revoking(consumer: Consumer) -> bool:
    """Whether a claim is about to end."""
    return any(claim.revoking for claim in consumer.cached_info().claims.values())


def test_workers_run_at_once_and_each_key_is_handled_in_order(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 400, keys=10, partitions=2)
    together = threading.Barrier(8)

    def meet(message: Message) -> None:
        if message.offset < 4:  # the first four keys of both partitions: eight handlers at once, or none goes on
            together.wait(DEADLINE_S)

    journal = Journal(meet)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(journal, workers=8) as work:
            journal.handled(400)
            until(lambda: work.stats().finished == 400, "all are acked")
            assert work.drain()
        assert positions(consumer) == {0: 200, 1: 200}
    assert in_order(journal)
    assert len(journal.finished) == 400
    assert journal.at_once == 8


def test_a_retry_holds_up_its_key_alone_and_no_worker(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 100, keys=5)
    release = threading.Event()

    def fail(message: Message) -> None:
        if message.key == b"k0" and not release.is_set():
            raise ValueError("not yet")

    journal = Journal(fail)
    retry = Retry(first_s=0.01, factor=1.0, jitter=0.0)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(journal, workers=1, retry=retry) as work,
    ):
        journal.handled(80)
        (lane,) = until(
            lambda: [one for one in work.lanes() if one.key == b"k0" and one.waiting == 19], "the key waits"
        )
        assert (lane.topic, lane.partition, lane.offset) == (topic, 0, 0)
        assert positions(consumer) == {0: 0}
        release.set()
        journal.handled(100)
        assert work.stats().retried >= 1
        assert work.drain()
    assert in_order(journal)


@pytest.mark.parametrize(
    ("order", "unkeyed", "keys", "lanes"),
    [
        ("key", "parallel", 1, 1),
        ("key", "parallel", None, 4),
        ("key", "ordered", None, 1),
        ("partition", "parallel", 4, 1),
        (None, "parallel", 1, 4),
    ],
)
def test_what_is_handled_one_after_the_other(
    memory: MemoryTestCluster, order: Any, unkeyed: Any, keys: int | None, lanes: int
) -> None:
    topic = fill(memory, 4, keys)
    hold, count = threading.Event(), threading.Semaphore(0)

    def handle(message: Message) -> None:
        count.release()
        assert hold.wait(DEADLINE_S)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle, workers=4, order=order, unkeyed=unkeyed) as work,
    ):
        until(lambda: work.stats().working == lanes and work.stats().waiting == 4 - lanes, "all have come")
        hold.set()
        until(lambda: work.stats().finished == 4, "all are handled")


def test_a_function_names_the_key(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 10, keys=10)
    hold = threading.Event()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:

        def handle(message: Message) -> None:
            assert hold.wait(DEADLINE_S)

        with consumer.process(handle, workers=4, key=lambda message: int(message.value) % 2) as work:
            until(lambda: work.stats().working == 2 and work.stats().waiting == 8, "all have come")
            assert [lane.key for lane in work.lanes()] == [0, 1]
            hold.set()
            until(lambda: work.stats().finished == 10, "all are handled")


@pytest.mark.parametrize("key", [lambda message: 1 // 0, lambda message: []], ids=["raises", "cannot be compared"])
def test_a_key_function_that_fails_ends_it_and_loses_nothing(memory: MemoryTestCluster, key: Any) -> None:
    topic = fill(memory, 3, keys=3)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(lambda message: None, key=key)
        with pytest.raises((ZeroDivisionError, TypeError)):
            work.wait(DEADLINE_S)
        again = consumer.fetch(3, min_messages=3)
        assert [(one.offset, one.delivery_count) for one in again] == [(0, 1), (1, 1), (2, 1)]


def test_a_rejected_message_is_never_tried_again(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 4, keys=1)

    def handle(message: Message) -> None:
        if message.offset == 1:
            raise Reject("no amount")

    journal, group = Journal(handle), memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        with consumer.process(journal) as work:
            until(lambda: positions(consumer) == {0: 4}, "all are done")
            assert (work.stats().finished, work.stats().ended, work.stats().retried) == (3, 1, 0)
        told = until(
            lambda: [one for one in marshal.group(group).advisories() if one.kind == "terminated"], "the log says why"
        )
    assert [(one.offset, one.text) for one in told] == [(1, "no amount")]
    assert journal.began == {(0, b"k0"): [0, 1, 2, 3]}


@pytest.mark.parametrize(("then", "dead"), [("continue", [0]), ("key", [0, 2])])
def test_a_message_that_always_fails_becomes_a_dead_letter(
    memory: MemoryTestCluster, then: Any, dead: list[int]
) -> None:
    topic, letters = fill(memory, 4, keys=2), memory.topic()

    def handle(message: Message) -> None:
        if message.offset == 0:
            raise ValueError("poison")

    journal = Journal(handle)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], dead_letter_topic=letters) as consumer,
        consumer.process(journal, retry=Retry(first_s=0.0, deliveries=3), after_dead_letter=then) as work,
    ):
        until(lambda: positions(consumer) == {0: 4}, "all are done")
        assert work.stats().ended == len(dead)
        found = [dict(marshal.topic(letters).get(offset=at).headers) for at in range(len(dead))]
    assert [int(headers["__dlq.errors.offset"]) for headers in found] == dead
    assert journal.began[0, b"k0"][:3] == [0, 0, 0]


def test_the_consumer_s_own_limit_ends_a_message_before_the_limit_of_retries(memory: MemoryTestCluster) -> None:
    topic, letters = fill(memory, 6, keys=2), memory.topic()

    def handle(message: Message) -> None:
        if message.offset == 0:
            raise ValueError("poison")

    options: dict[str, Any] = {"dead_letter_topic": letters, "max_deliver": 2}
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], **options) as consumer,
        consumer.process(handle, retry=Retry(first_s=0.0, deliveries=5)) as work,
    ):
        until(lambda: positions(consumer) == {0: 6}, "all of its key are handled")
        assert (work.stats().ended, work.stats().finished, work.stats().retrying) == (1, 5, 0)


def test_a_message_that_is_acked_elsewhere_before_its_next_try_holds_up_nothing(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=1)
    handles: list[bytes] = []

    def handle(message: Message) -> None:
        if message.offset == 0:
            handles.append(message.handle())
            raise Retry(after_s=3_600)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle) as work,
    ):
        until(lambda: work.stats().retrying == 1 and work.stats().waiting == 2, "its key waits")
        assert consumer.complete(handles[0])
        until(lambda: positions(consumer) == {0: 3}, "all are done")
        assert (work.stats().finished, work.stats().retrying) == (2, 0)


class Unwritable(Exception):
    """Raises in turn when it is written as text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_written_ends_it_and_gives_the_message_back(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=1)

    def handle(message: Message) -> None:
        raise Unwritable

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handle)
        with pytest.raises(RuntimeError, match="no text"):
            work.wait(DEADLINE_S)
        assert (work.closed, work.stats().working, work.stats().waiting) == (True, 0, 0)
        assert [message.offset for message in consumer.fetch(3, min_messages=3)] == [0, 1, 2]


@pytest.mark.parametrize("letters", [True, False])
def test_a_reason_that_utf_8_cannot_write_is_escaped(memory: MemoryTestCluster, letters: bool) -> None:
    """JSON may hold half a surrogate pair, and a handler quotes what it got."""
    topic, group = fill(memory, 3, keys=1), memory.group()
    options: dict[str, Any] = {"dead_letter_topic": memory.topic()} if letters else {}

    def handle(message: Message) -> None:
        if message.offset == 1:
            raise Reject("unknown id \ud800bad")

    with memory.connect() as marshal:
        with joined(marshal, group, [topic], **options) as consumer, consumer.process(handle):
            until(lambda: positions(consumer) == {0: 3}, "all are done")
        if letters:
            found = dict(marshal.topic(options["dead_letter_topic"]).get(offset=0).headers)
            assert found["__dlq.errors.message"] == b"unknown id \\ud800bad"
        else:
            told = [one.text for one in marshal.group(group).advisories() if one.kind == "terminated"]
            assert told == ["unknown id \\ud800bad"]


def _later(message: Message) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("returns", "rule"),
    [
        (lambda message: Reject("bad"), "raise Retry, Reject"),
        (lambda message: Retry(after_s=5), "raise Retry, Reject"),
        (_later, "work done"),
        (lambda message: Future[None](), "wait for the future"),
    ],
)
def test_a_handler_that_returns_what_it_should_raise_or_await_has_acked_nothing(
    memory: MemoryTestCluster, returns: Any, rule: str
) -> None:
    topic = fill(memory, 3, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(returns)
        with pytest.raises(InvalidOption, match=rule):
            work.wait(DEADLINE_S)
        assert [message.offset for message in consumer.fetch(3, min_messages=3)] == [0, 1, 2]


def test_a_handler_that_hangs_does_not_keep_the_process_from_its_end(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program would not end after SIGTERM, for as long as one handler hangs."""
    monkeypatch.setattr(process, "LEAVE_TIMEOUT_S", 0.1)
    topic, hold = fill(memory, 4, keys=2), threading.Event()

    def hang(message: Message) -> None:
        if message.key == b"k0":
            assert hold.wait(DEADLINE_S)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(hang)
        until(lambda: work.stats().finished == 2 and work.stats().working == 1, "one handler hangs")
        consumer._ending.request_stop()
        assert work.wait(DEADLINE_S)
        assert (work.closed, work.error) == (True, None)
        hold.set()
    assert "process has ended, and 1 handlers have not returned" in caplog.text


def test_the_reason_of_a_reject_is_text() -> None:
    with pytest.raises(InvalidOption, match="reason"):
        Reject(ValueError("no amount"))  # type: ignore[arg-type]


def test_an_error_that_is_not_retried_ends_it_and_gives_the_message_back(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=1)

    def handle(message: Message) -> None:
        raise KeyError("a bug")

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handle, retry_on=(ValueError, OSError))
        with pytest.raises(KeyError, match="a bug"):
            work.wait(DEADLINE_S)
        assert (work.closed, work.stats().waiting) == (True, 0)
        assert [message.offset for message in consumer.fetch(3, min_messages=3)] == [0, 1, 2]


def test_a_failure_is_logged_once_a_minute_per_cause(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic = fill(memory, 20, keys=None)

    def fail(message: Message) -> None:
        if message.delivery_count > 2:
            return
        if message.offset % 2:
            raise ValueError(f"no amount in {message.offset}")
        raise ConnectionError("the database is down")

    with (
        caplog.at_level(logging.INFO, "marshal_py"),
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(fail, retry=Retry(first_s=0.01, jitter=0.0)) as work,
    ):
        until(lambda: work.stats().finished == 20, "all are handled at the third delivery")
        failed = [event for event in consumer.events() if event.kind == "handler_failed"]
    assert len(failed) == 40
    lines = [record for record in caplog.records if "fail" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.ERROR] * 2
    assert {record.exc_info[0] for record in lines if record.exc_info} == {ValueError, ConnectionError}


def test_a_process_that_begins_after_another_waits_for_what_was_given_back(memory: MemoryTestCluster) -> None:
    """The first one gives message 0 back for a while; message 1 of the same key may not come before it."""
    topic = fill(memory, 4, keys=2)

    def fail(message: Message) -> None:
        raise Retry(after_s=0.3)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(fail) as work:
            until(lambda: work.stats().retrying == 2, "the first of both keys are given back")
        journal = Journal()
        with consumer.process(journal):
            journal.handled(4)
    assert in_order(journal)


def test_a_second_end_waits_until_the_first_has_given_back_what_waits(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a `process` that begins then would not find it, and begin with what follows in its lane."""
    topic, hold, put_back = fill(memory, 4, keys=1), threading.Event(), processing.put_back
    waits: list[bool] = []
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(lambda message: hold.wait(DEADLINE_S) and None, workers=1)
        until(lambda: work.stats().waiting == 3, "one has begun")
        other = threading.Thread(target=work._processing.close)

        def while_another_ends(message: Message, delay_s: float = 0.0) -> None:
            if not waits:
                waits.append(False)
                hold.set()
                other.start()
                other.join(0.1)
                waits.append(other.is_alive())
            put_back(message, delay_s)

        monkeypatch.setattr(processing, "put_back", while_another_ends)
        work.stop()
        other.join(DEADLINE_S)
        assert waits == [False, True]


def test_what_waits_moves_at_once_and_the_handlers_end_first(memory: MemoryTestCluster) -> None:
    """A second consumer gets one of two partitions while a handler of it runs and messages wait behind it."""
    topic, group = fill(memory, 200, keys=3, partitions=2), memory.group()
    hold = threading.Event()

    def slow(message: Message) -> None:
        if message.offset < 3:
            assert hold.wait(DEADLINE_S)

    journal = Journal(slow)
    with memory.connect("one") as one, joined(one, group, [topic]) as first, first.process(journal) as work:
        until(lambda: work.stats().working == 6 and work.stats().waiting == 194, "six keys are in work")
        with memory.connect("two") as two, two.consumer(group, [topic]) as second:
            until(lambda: revoking(first), "a partition is to move")
            assert not any(owns(second, partition)() for partition in (0, 1)), "its handlers still run"
            hold.set()
            until(lambda: len(second.cached_info().claims) == 1, "the second has a partition")
            with second.process(journal):
                journal.handled(200)
    assert in_order(journal)
    assert len(journal.finished) == 200, "nothing is handled twice"


def test_a_hand_over_that_is_withdrawn_keeps_the_order_per_key(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D17: a second consumer comes while handlers run and messages are tried again later, and goes again."""
    look, looks = Processing.look, []
    monkeypatch.setattr(Processing, "look", lambda self: (look(self), looks.append(None)))
    topic, group = fill(memory, 200, keys=3, partitions=2), memory.group()
    hold, again = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.key == b"k0":
            assert hold.wait(DEADLINE_S)
        elif message.key == b"k1" and not again.is_set():
            raise Retry(after_s=0.5)

    journal = Journal(handle)
    with memory.connect("one") as one, joined(one, group, [topic]) as first, first.process(journal) as work:
        until(lambda: work.stats().working == 2 and work.stats().retrying == 2, "both partitions are in work")
        claimed = {tp: claim.token for tp, claim in first.cached_info().claims.items()}
        with memory.connect("two") as two, two.consumer(group, [topic]):
            until(lambda: revoking(first), "a partition is to move")
            seen = len(looks)
            until(lambda: len(looks) > seen + 1, "the process has seen it")
            again.set()
        until(lambda: not revoking(first), "it does not move after all")
        hold.set()
        journal.handled(200)
        assert claimed == {tp: claim.token for tp, claim in first.cached_info().claims.items()}
    assert in_order(journal)
    assert len(journal.finished) == 200, "nothing is handled twice"


def test_a_message_that_no_handler_had_counts_no_delivery(memory: MemoryTestCluster) -> None:
    """D17: what waits in lanes at each of ten stops becomes no dead letter, with a limit of two deliveries."""
    topic, letters, group = fill(memory, 60, keys=3), memory.topic(), memory.group()
    counts: dict[int, int] = {}
    began, hold = threading.Semaphore(0), threading.Semaphore(0)

    def handle(message: Message) -> None:
        counts[message.offset] = message.delivery_count
        began.release()
        assert hold.acquire(timeout=DEADLINE_S)

    def round_of(consumer: Consumer, left: int) -> None:
        """Handles one message of each key, while `left` others wait."""
        work = consumer.process(handle)
        assert all(began.acquire(timeout=DEADLINE_S) for _ in range(3))
        until(lambda: work.stats().waiting == left, "the others wait")
        assert consumer.cached_info().in_flight == 3
        work.stop(timeout_s=0)
        hold.release(3)
        assert work.wait(DEADLINE_S)

    with memory.connect() as marshal:
        for left in range(57, 27, -6):
            options: dict[str, Any] = {"max_deliver": 2, "dead_letter_topic": letters}
            with joined(marshal, group, [topic], **options) as consumer:
                round_of(consumer, left)  # first what came now, then what this one has given back
                round_of(consumer, left - 3)
                (metrics,) = marshal.metrics().consumers
                assert (metrics.dead_letters, metrics.naks, metrics.redelivered) == (0, 0, 0)
    assert (set(counts.values()), len(counts)) == ({1}, 30)


def test_handlers_that_wait_in_lanes_do_not_count_against_the_handler_timeout(memory: MemoryTestCluster) -> None:
    topic, began, go = fill(memory, 6, keys=1), threading.Semaphore(0), threading.Semaphore(0)

    def slow(message: Message) -> None:
        began.release()
        assert go.acquire(timeout=DEADLINE_S)

    with (
        memory.connect() as marshal,
        calm(marshal, memory.group(), [topic], handler_timeout_s=TIMEOUT_S) as consumer,
        consumer.process(slow) as work,
    ):
        for _ in range(6):  # one after the other, in more than twice the handler timeout
            assert began.acquire(timeout=DEADLINE_S)
            memory.local.advance(0.4 * TIMEOUT_S)
            go.release()
        until(lambda: work.stats().finished == 6, "all are handled")
        kinds = [event.kind for event in consumer.events()]
    assert "handler_stuck" not in kinds


def test_what_waits_in_lanes_is_not_counted_as_delivered(memory: MemoryTestCluster) -> None:
    """Each stop gives it back, more often than `max_deliver` says, and no handler has had it."""
    topic, letters, hold = fill(memory, 6, keys=1), memory.topic(), threading.Event()

    def slow(message: Message) -> None:
        assert hold.wait(DEADLINE_S)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], dead_letter_topic=letters, max_deliver=2) as consumer,
    ):
        for round_ in range(4):
            work = consumer.process(slow)
            until(lambda: work.stats().working == 1 and work.stats().waiting == 5 - round_, "the others wait")  # noqa: B023
            work.stop(timeout_s=0)
            hold.set()
            assert work.wait(DEADLINE_S)
            hold.clear()
        counts: list[tuple[int, int]] = []
        with consumer.process(lambda message: counts.append((message.offset, message.delivery_count))):
            until(lambda: positions(consumer) == {0: 6}, "all are done")
    assert counts == [(4, 1), (5, 1)]


def test_no_handler_begins_with_what_the_user_has_paused(memory: MemoryTestCluster) -> None:
    topic, hold = fill(memory, 5, keys=1), threading.Event()

    def slow(message: Message) -> None:
        assert hold.wait(DEADLINE_S)

    journal = Journal(slow)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(journal) as work,
    ):
        until(lambda: work.stats().working == 1 and work.stats().waiting == 4, "the others wait")
        consumer.pause([(topic, 0)])
        hold.set()
        until(lambda: work.stats().finished == 1, "the handler may end")
        (lane,) = work.lanes()
        assert (lane.state, lane.waiting) == ("ready", 4)
        consumer.resume([(topic, 0)])
        journal.handled(5)
    assert in_order(journal)


def test_handlers_that_say_they_are_at_work_keep_what_waits(memory: MemoryTestCluster) -> None:
    """D17: what is queued is silent only while all handlers are. Else the message of one of them would come again here
    while it is handled."""
    topic, hold, said = fill(memory, 3, keys=3), threading.Event(), [0, 0]

    def handle(message: Message) -> None:
        while message.offset < 2 and not hold.wait(0.005):
            message.in_progress()
            said[message.offset] += 1

    journal = Journal(handle)
    with (
        memory.connect() as marshal,
        calm(marshal, memory.group(), [topic], handler_timeout_s=TIMEOUT_S) as consumer,
        consumer.process(journal, workers=2) as work,
    ):
        until(lambda: work.stats().working == 2 and work.stats().waiting == 1, "one waits")
        epochs = [claim.token for claim in consumer.cached_info().claims.values()]
        for _ in range(10):  # two and a half times the handler timeout
            memory.local.advance(TIMEOUT_S / 4)
            before = list(said)
            until(lambda: all(now > then for now, then in zip(said, before, strict=True)), "both say so again")  # noqa: B023
        assert not work.wait(0)
        assert [claim.token for claim in consumer.cached_info().claims.values()] == epochs
        assert consumer.healthy(TIMEOUT_S / 2)
        hold.set()
        until(lambda: positions(consumer) == {0: 3}, "all are handled")
    assert sorted(one for began in journal.began.values() for one in began) == [0, 1, 2]


def test_what_handlers_say_of_being_at_work_is_forgotten(memory: MemoryTestCluster) -> None:
    """Else a program that runs for long would keep an entry for each message."""
    topic = fill(memory, 60, keys=3)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], handler_timeout_s=1.0) as consumer:
        with consumer.process(lambda message: message.in_progress(), workers=2) as work:
            until(lambda: positions(consumer) == {0: 60}, "all are handled")
            until(lambda: not work._processing._at_work_s, "they are forgotten after the handler timeout")
        memory.fill(topic, 0, 1)
        message = until(lambda: consumer.next(1.0), "one comes to the program itself")
        message.in_progress()
        assert not work._processing._at_work_s
        message.ack()


class Named:
    """A key whose `repr` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_key_that_cannot_be_written_ends_nothing(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing, "HELD_UP_S", 0.0)
    topic, hold, named = fill(memory, 4, keys=2), threading.Event(), Named()
    group = memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:

        def handle(message: Message) -> None:
            if message.key == b"k0":
                assert hold.wait(DEADLINE_S)

        with consumer.process(handle, key=lambda message: named if message.key == b"k0" else message.key) as work:
            told = until(
                lambda: [one for one in consumer._driver.events if one.kind == "held_up"], "it holds up the position"
            )
            assert "of key Named " in told[0].text
            hold.set()
            until(lambda: positions(consumer) == {0: 4}, "all are handled")
            assert work.error is None


def test_what_waits_moves_where_no_handler_returns(memory: MemoryTestCluster) -> None:
    """The one worker hangs with a message of one partition: those of the other one wait in vain, too."""
    topic, hold = fill(memory, 2, keys=1, partitions=2), threading.Event()

    def hang(message: Message) -> None:
        hold.wait(DEADLINE_S)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], handler_timeout_s=1.0) as consumer:
        stuck: set[int] = set()

        def look() -> bool:
            stuck.update(event.partition for event in consumer.events() if event.kind == "handler_stuck")
            return stuck == {0, 1}

        with consumer.process(hang, workers=1) as work:
            until(look, "both partitions are given up")
            until(lambda: not consumer.cached_info().claims, "both are released")
            hold.set()
            until(lambda: not work.stats().working, "the handler returns")
            assert work.stats().finished == 0, "its return came too late"


def test_a_claim_that_ends_before_its_messages_are_in_lanes_has_none_handled(memory: MemoryTestCluster) -> None:
    """They have left the buffer, and the key function has the first of them, when the position moves."""
    topic, seen, called = fill(memory, 20, keys=4), list[int](), threading.Event()
    moved = threading.Event()

    def key(message: Message) -> bytes | None:
        called.set()
        assert moved.wait(DEADLINE_S)
        return message.key

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda message: seen.append(message.offset), workers=1, key=key) as work,
    ):
        assert called.wait(DEADLINE_S)
        consumer.seek((topic, 0), 5)
        moved.set()
        until(lambda: positions(consumer) == {0: 20}, "what the new claim has is handled")
        assert work.drain()
    assert sorted(seen) == list(range(5, 20))


def test_the_window_bounds_what_is_behind_a_message_that_is_not_finished(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 100, keys=100)
    hold = threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 0:
            assert hold.wait(DEADLINE_S)

    journal = Journal(handle)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(journal, window=20) as work,
    ):
        journal.handled(19)
        until(lambda: work.stats().waiting == 0, "nothing waits")
        assert max(offset for _, offset in journal.finished) == 19
        hold.set()
        journal.handled(100)


def test_while_enough_waits_for_all_workers_more_comes_in_steps(memory: MemoryTestCluster) -> None:
    """A step is an eighth of the window. Where a worker would find nothing, each message comes at once."""
    topic, may = fill(memory, 100, keys=100), threading.Semaphore(0)
    journal = Journal(lambda _: may.acquire(timeout=DEADLINE_S))

    def comes_below(consumer: Consumer, finished: int) -> int:
        until(lambda: work.stats().finished == finished, f"{finished} are finished")
        with consumer._context.lock:
            (claim,) = consumer._driver.member.claims.values()
            claim.settle()
            bounds = consumer._queue.window.process
            assert bounds is not None
            return bounds.end_of(claim)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(journal, workers=1, window=32) as work,
    ):
        until(lambda: work.stats().waiting == 31, "the window is full")
        ends = []
        for finished in range(1, 6):
            may.release()
            ends.append(comes_below(consumer, finished))
        assert ends == [32, 32, 32, 36, 36]
        may.release(95)
        journal.handled(100)


def test_a_consumer_whose_handlers_are_all_busy_is_healthy(memory: MemoryTestCluster) -> None:
    """It goes on asking while they work and its lanes are full: no probe of a container may end it for that."""
    topic, hold = fill(memory, 100, keys=100), threading.Event()
    journal = Journal(lambda _: hold.wait(DEADLINE_S))
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(journal, workers=2, window=4) as work,
    ):
        until(lambda: work.stats().working == 2 and work.stats().waiting == 2, "all are busy, and the window is full")
        since_ms = consumer._queue.asked_ms
        until(lambda: consumer._queue.asked_ms > since_ms, "it asks again")
        assert consumer.healthy()
        hold.set()
        journal.handled(100)


def test_after_a_stop_nothing_finished_comes_again_within_the_window(memory: MemoryTestCluster) -> None:
    """E10: every second of 4,000 messages is finished, the first one is tried again in an hour, the others wait."""
    topic, group = fill(memory, 4_100, keys=None), memory.group()

    def handle(message: Message) -> None:
        if message.offset % 2 == 0:
            raise Retry(after_s=3_600)

    first, second = Journal(handle), Journal()
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            work = consumer.process(first, key=lambda message: message.offset % 2 and message.offset)
            first.handled(2_000)
            work.stop()
        with joined(marshal, group, [topic]) as consumer, consumer.process(second):
            second.handled(2_100)
    assert set(first.finished) == {(0, offset) for offset in range(1, 4_000, 2)}
    assert sorted(second.finished) == [(0, offset) for offset in range(4_100) if offset % 2 == 0 or offset > 4_000]


def test_the_window_counts_offsets_without_messages(memory: MemoryTestCluster) -> None:
    topic, hold = memory.topic(), threading.Event()
    for number in range(10):
        memory.put(topic, 0, b"%d" % number)
        memory.broker.skip(topic, 0)

    def handle(message: Message) -> None:
        if message.offset == 4:
            assert hold.wait(DEADLINE_S)

    journal = Journal(handle)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(journal, window=9) as work,
    ):
        journal.handled(6)
        until(lambda: work.stats().waiting == 0, "nothing waits")
        assert sorted(offset for _, offset in journal.finished) == [0, 2, 6, 8, 10, 12]
        hold.set()
        journal.handled(10)


def test_a_stop_waits_for_handlers_and_gives_the_rest_back_in_order(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 50, keys=2)
    hold = threading.Event()

    def slow(message: Message) -> None:
        if message.offset >= 10:
            assert hold.wait(DEADLINE_S)

    journal = Journal(slow)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(journal, workers=8)
        until(lambda: work.stats().working == 2 and work.stats().waiting == 38, "the handlers hang")
        work.stop(timeout_s=0)
        assert (work.closed, work.stats().waiting) == (False, 0)
        hold.set()
        assert work.wait(DEADLINE_S)
        assert len(journal.finished) == 12
        assert [message.offset for message in consumer.fetch(38, min_messages=38)] == list(range(12, 50))
        work.stop()


def test_inside_a_handler_it_can_be_stopped_and_not_waited_for(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 5, keys=1)
    errors: list[Exception] = []

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:

        def handle(message: Message) -> None:
            try:
                work.wait()
            except ReentrantCall as error:
                errors.append(error)
            work.stop()

        work: Process = consumer.process(handle)
        assert work.wait(DEADLINE_S)
        assert "stop()" in str(errors[0])
        assert work.stats().finished == 1


@pytest.mark.parametrize("end", ["stop", "drain"])
def test_the_end_of_the_consumer_is_its_end(memory: MemoryTestCluster, end: str) -> None:
    topic, group = fill(memory, 30, keys=2), memory.group()
    began = threading.Event()

    def handle(message: Message) -> None:
        began.set()
        if message.key == b"k0":
            raise Retry(after_s=60)

    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        work = consumer.process(handle)
        assert began.wait(DEADLINE_S)
        getattr(consumer, end)()
        assert work.wait(DEADLINE_S)
        with joined(marshal, group, [topic]) as again:
            left = [message.offset for message in again.fetch(30, min_messages=1)]
            assert set(range(0, 30, 2)) <= set(left), "what was given back comes again"
            assert left == sorted(left)


def test_what_has_ended_the_consumer_is_told_when_the_process_sees_the_end_first(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watcher tells the thread that receives to stop, which then had no error to raise: `wait` returned True."""
    topic, group, receives, told = fill(memory, 1, keys=1), memory.group(), threading.Event(), threading.Event()
    stop = ConsumeContext.stop
    monkeypatch.setattr(ConsumeContext, "stop", lambda self, *of: (stop(self, *of), told.set()))

    def key(message: Message) -> bytes | None:
        receives.set()
        assert told.wait(DEADLINE_S)
        return message.key

    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        work = consumer.process(print, key=key)
        assert receives.wait(DEADLINE_S)
        delete(memory, group)
        with pytest.raises(GroupDeleted):
            work.wait(DEADLINE_S)
        assert isinstance(work.error, GroupDeleted)


def test_a_drain_of_the_consumer_handles_what_waits(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no handler runs, as its claim is not released before: here no worker takes the next one for long."""
    topic, began, go = fill(memory, 30, keys=1), threading.Event(), threading.Event()
    begin, look, looks = Processing.begin, Processing.look, []
    shut: tuple[None, bool] = (None, True)
    monkeypatch.setattr(Processing, "begin", lambda self: shut if began.is_set() and not go.is_set() else begin(self))
    monkeypatch.setattr(Processing, "look", lambda self: (look(self), looks.append(None)))
    journal, group = Journal(lambda _: began.set()), memory.group()
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        work = consumer.process(journal)
        until(lambda: work.stats().finished == 1 and work.stats().waiting == 29, "the others wait")
        ending = threading.Thread(target=consumer.drain)
        ending.start()
        until(lambda: work._receiving.draining, "it drains")
        seen = len(looks)
        until(lambda: len(looks) > seen + 8 or work.closed, "it has had the time to end")
        go.set()
        ending.join(DEADLINE_S)
        assert work.wait(DEADLINE_S)
        assert work.stats().finished == 30
    assert in_order(journal)


def test_a_drain_does_not_wait_behind_what_is_tried_again_later(memory: MemoryTestCluster) -> None:
    """Offsets 12 and 13 come when the drain has begun, behind 9 of their key."""
    topic, hold = memory.topic(), threading.Event()
    for number in range(16):
        memory.put(topic, 0, b"", b"late" if number in (9, 12, 13) else b"%d" % number)

    def handle(message: Message) -> None:
        if message.key == b"late":
            raise Retry(after_s=3_600)
        assert hold.wait(DEADLINE_S)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handle, workers=20, window=10)
        until(lambda: work.stats().retrying == 1 and work.stats().working == 9, "nine are in work")
        results: list[bool] = []
        ending = threading.Thread(target=lambda: results.append(work.drain()))
        ending.start()
        until(lambda: work._receiving.draining, "it drains")
        hold.set()
        assert work.wait(DEADLINE_S)
        ending.join(DEADLINE_S)
        assert results == [False]
        assert work.stats().finished == 13
        assert len(consumer.fetch(3, expires_s=0)) == 0, "those of the key come when their first one does"


@pytest.mark.parametrize("after", ["continue", "key"])
def test_a_message_that_its_handler_has_ended_by_term_gets_its_letter(
    memory: MemoryTestCluster, after: Literal["continue", "key"]
) -> None:
    """The ack with which a handler's return is answered would take the letter back."""
    topic, letters, handled = memory.topic(), memory.topic(), list[int]()
    for number in range(6):
        memory.put(topic, 0, b"", b"key" if number % 2 else b"other")

    def handle(message: Message) -> None:
        handled.append(message.offset)
        if message.offset == 1:
            assert message.term("cannot be parsed")

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], dead_letter_topic=letters) as consumer,
        consumer.process(handle, after_dead_letter=after, workers=1) as work,
    ):
        until(lambda: work.stats().finished + work.stats().ended == 6, "all are handled")
        dead = [1] if after == "continue" else [1, 3, 5]
        assert work.stats().ended == len(dead)
        assert handled == [number for number in range(6) if number == 1 or number not in dead]
        with marshal.topic(letters) as written:
            until(lambda: written.info().offsets == len(dead), "the letters are there")


@pytest.mark.parametrize("letters", [True, False])
def test_what_is_behind_a_term_follows_it_although_the_handler_goes_on(
    memory: MemoryTestCluster, letters: bool
) -> None:
    """Its letter may be written, and the message done, before the handler returns; without a topic for letters it is
    done at once."""
    topic, handled = memory.topic(), list[int]()
    for _ in range(3):
        memory.put(topic, 0, b"", b"key")
    options = {"dead_letter_topic": memory.topic()} if letters else {}
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], **options) as consumer:

        def handle(message: Message) -> None:
            handled.append(message.offset)
            assert message.term("cannot be parsed")
            until(lambda: position_of(message) == 1, "it is done")

        with consumer.process(handle, after_dead_letter="key", workers=1) as work:
            until(lambda: work.stats().finished + work.stats().ended == 3, "all are done")
            assert (handled, work.stats().ended) == ([0], 3)


def test_what_is_behind_a_message_that_the_log_counts_out_follows_it() -> None:
    """It kills its owners, and becomes a dead letter before the last one delivers it."""
    options: dict[str, Any] = {"dead_letter_topic": "letters", "max_deliver": 2, "start": "earliest"}
    with MemoryCluster() as cluster:
        for topic in ("orders", "letters"):
            cluster.create_topic(topic)
        for number in range(4):
            cluster.produce("orders", b"%d" % number, key=b"other" if number == 2 else b"key", partition=0)
        for _ in range(2):
            hangs, returns = threading.Event(), threading.Event()

            def handle(_: Message, hangs: threading.Event = hangs, returns: threading.Event = returns) -> None:
                hangs.set()
                returns.wait(DEADLINE_S)

            owner = cluster.connect()
            owner.consumer("billing", ["orders"], **options).process(
                handle, workers=1, window=1, after_dead_letter="key"
            )
            cluster.run_until(hangs.is_set)
            cluster.advance(1.0)  # the log has that it was delivered
            cluster.kill(owner)
            returns.set()
        handled: list[int] = []
        consumer = cluster.connect().consumer("billing", ["orders"], **options)
        with consumer.process(lambda message: handled.append(message.offset), after_dead_letter="key") as work:
            cluster.run_until(lambda: work.stats().finished + work.stats().ended == 3)
            assert (handled, work.stats().ended) == ([2], 2)


def test_a_drain_keeps_the_order_of_a_key_that_is_tried_again(memory: MemoryTestCluster) -> None:
    """What waited behind the message comes again at other times than it does, and in another order."""
    topic, go, journal = memory.topic(), threading.Event(), list[int]()
    for number in range(300):
        memory.put(topic, 0, b"%d" % number, b"key")

    def handle(message: Message) -> None:
        if message.offset == 0 and message.delivery_count == 1:
            assert go.wait(DEADLINE_S)
        if message.offset == 0 and message.delivery_count <= 3:
            raise Retry(after_s=0.005)
        journal.append(message.offset)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handle, workers=2)
        until(lambda: work.stats().waiting == 299, "all wait behind the first")
        ending = threading.Thread(target=work.drain)
        ending.start()
        until(lambda: work._processing.draining, "it drains")
        go.set()
        ending.join(DEADLINE_S)
    assert journal == sorted(journal)


def test_the_text_of_an_error_is_made_without_the_lock(memory: MemoryTestCluster) -> None:
    """It is code of the program, and may be slow, or ask the consumer."""
    topic, asked = fill(memory, 1, keys=None), list[int]()

    class Slow(Exception):
        def __repr__(self) -> str:
            asked.append(len(consumer.cached_info().claims))
            return "Slow()"

    def handle(message: Message) -> None:
        if message.delivery_count == 1:
            raise Slow

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(handle, retry_on=(Slow,), retry=Retry(after_s=0))
        until(lambda: work.stats().finished == 1, "it is handled again")
        assert work.drain()
    assert 1 in asked


def test_a_full_window_is_filled_as_soon_as_a_handler_returns(memory: MemoryTestCluster) -> None:
    """The call waits for acks then, and not for the source."""
    topic, hold = fill(memory, 20, keys=None), threading.Event()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        window = consumer._queue.window
        with consumer.process(lambda _: hold.wait(DEADLINE_S), workers=1, window=2) as work:
            until(lambda: work.stats().working == 1 and work.stats().waiting == 1, "the window is full")
            pulls = _pulls(consumer)
            assert set(pulls) == {0.0}
            hold.set()
            until(lambda: work.stats().finished == 20, "all are handled")
        assert not window.bounds


@pytest.mark.parametrize(("workers", "longest_s"), [(2, WAIT_SUPPLIED_S_MAX), (9, WAIT_S_MAX)])
def test_a_full_window_is_looked_at_less_often_while_each_worker_has_more(
    memory: MemoryTestCluster, workers: int, longest_s: float
) -> None:
    topic, hold = fill(memory, 40, keys=None), threading.Event()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda _: hold.wait(DEADLINE_S), workers=workers, window=10) as work,
    ):
        until(lambda: work.stats().working == workers and consumer._queue.buffered() == 30, "the window is full")
        with consumer._context.lock:
            queue = consumer._queue
            waits_s = [queue.window.wait_s(queue.buffers.values(), -1) for _ in range(10)]
        assert waits_s[-1] == longest_s
        hold.set()


def _pulls(consumer: Consumer) -> list[float]:
    """Returns for how long the next calls wait for the source."""
    pull, waited = consumer._queue.pull, []

    def noted(timeout_s: float, most: int) -> Any:
        waited.append(timeout_s)
        return pull(timeout_s, most)

    consumer._queue.pull = noted  # type: ignore[method-assign]
    until(lambda: len(waited) > 3, "it asks again")
    consumer._queue.pull = pull  # type: ignore[method-assign]
    return waited[1:]


def test_a_drain_that_is_refused_changes_nothing(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3, keys=1)

    def handle(message: Message) -> None:
        raise Retry(after_s=3_600)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle) as work,
    ):
        until(lambda: work.stats().retrying == 1 and work.stats().waiting == 2, "its key waits")
        with pytest.raises(InvalidOption, match="timeout_s"):
            work.drain(-1)
        assert (work.stats().waiting, work.stats().retrying) == (2, 1)
        assert not work._processing.draining


def test_a_process_without_its_threads_leaves_the_consumer_free(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, start = fill(memory, 3, keys=1), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "marshal-process-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with pytest.raises(RuntimeError, match="new thread"):
            consumer.process(lambda message: None, workers=8)
        assert consumer._queue.window.process is None
        assert consumer._consuming is not None
        assert consumer._consuming.closed


def test_in_its_key_function_it_can_be_stopped_and_not_waited_for(memory: MemoryTestCluster) -> None:
    topic, started = fill(memory, 3, keys=1), threading.Event()
    errors: list[Exception] = []
    ended: list[bool] = []

    def key(message: Message) -> bytes:
        assert started.wait(DEADLINE_S)
        try:
            work.wait()
        except ReentrantCall as error:
            errors.append(error)
        work.stop()
        ended.append(work.closed)
        return b""

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work: Process = consumer.process(lambda message: None, key=key)
        started.set()
        assert work.wait(DEADLINE_S)
    assert "key function" in str(errors[0])
    assert ended[0] is False, "the call has not waited for the end"


def test_a_consumer_is_not_healthy_whose_workers_are_all_stuck(memory: MemoryTestCluster) -> None:
    topic, hold = fill(memory, 3, keys=3), threading.Event()

    def stuck(message: Message) -> None:
        assert hold.wait(DEADLINE_S)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(stuck, workers=2) as work,
    ):
        until(lambda: work.stats().working == 2, "all workers have a message")
        until(lambda: consumer.healthy() and not consumer.healthy(0.3), "they are silent")
        hold.set()
        until(lambda: work.stats().finished == 3, "all are handled")
        assert work._processing.silent_s() == 0


def test_a_stop_says_for_how_many_handlers_it_waits(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic, hold = fill(memory, 3, keys=3), threading.Event()

    def slow(message: Message) -> None:
        assert hold.wait(DEADLINE_S)

    with caplog.at_level(logging.INFO, "marshal_py"), memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic])
        work = consumer.process(slow, workers=2)
        until(lambda: work.stats().working == 2, "two handlers run")
        work.stop(timeout_s=0)
        consumer.stop(timeout_s=0)
        with pytest.raises(ConsumerClosed):
            consumer.fetch()
        hold.set()
        assert work.wait(DEADLINE_S)
    lines = [record.getMessage() for record in caplog.records if "handlers" in record.getMessage()]
    assert [line.partition(": ")[2] for line in lines] == ["process ends, and waits for 2 handlers"]


def test_it_stands_alone(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda message: None),
    ):
        with pytest.raises(
            ConcurrentUse, match=r"^process\(\) was called while a consume\(\) or process\(\) of the same"
        ):
            consumer.process(lambda message: None)
        with pytest.raises(ConcurrentUse, match=r"^fetch\(\) was called while"):
            consumer.fetch(1)


@pytest.mark.parametrize("refused", ["it runs already", "the key function raises"])
def test_a_process_that_is_refused_leaves_the_bounds_as_they_were(memory: MemoryTestCluster, refused: str) -> None:
    topic, hold = fill(memory, 100, keys=None), threading.Event()

    def slow(message: Message) -> None:
        assert hold.wait(DEADLINE_S)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        if refused == "it runs already":
            with consumer.process(slow, workers=1, window=10) as work:
                bounds = consumer._queue.window.process
                with pytest.raises(ConcurrentUse):
                    consumer.process(print)
                assert consumer._queue.window.process is bounds is not None
                hold.set()
                until(lambda: work.stats().finished == 100, "all are handled")
        else:
            consumer.fetch(1)[0].nak(3_600)
            with pytest.raises(ZeroDivisionError):
                consumer.process(print, key=lambda message: 1 // 0, window=1)
        assert consumer._queue.window.process is None


def test_the_late_end_of_a_process_does_not_lift_the_bounds_of_the_next(memory: MemoryTestCluster) -> None:
    topic, hold, began = fill(memory, 100, keys=None), threading.Event(), threading.Event()

    def slow(message: Message) -> None:
        began.set()
        assert hold.wait(DEADLINE_S)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        first = consumer.process(slow, workers=1, window=10)
        assert began.wait(DEADLINE_S)
        first.stop(timeout_s=0)  # its handler hangs
        until(lambda: consumer._consuming is not None and consumer._consuming.closed, "it receives no more")
        with consumer.process(slow, workers=1, window=10) as second:
            first._processing.close()  # as its thread does once more when it comes to it
            until(lambda: second.stats().waiting == 8, "nine are in work, and one at the first")
            assert consumer._queue.window.process is not None
            hold.set()


async def _coroutine(message: Message) -> None: ...


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": True}, "workers"),
        ({"window": 0}, "window"),
        ({"order": "topic"}, "order"),
        ({"unkeyed": "any"}, "unkeyed"),
        ({"after_dead_letter": "stop"}, "after_dead_letter"),
        ({"key": "id"}, "key"),
        ({"key": len, "order": "partition"}, "key"),
        ({"retry": 5}, "retry"),
        ({"retry_on": KeyboardInterrupt}, "retry_on"),
        ({"retry_on": None}, "retry_on"),
        ({"retry_on": "ValueError"}, "retry_on='ValueError'"),
        ({"batch": 100}, r"batch=100.*Batches\(100, wait_s=0.1\)"),
        ({"handler": _coroutine}, "handler"),
        ({"handler": None}, "handler"),
        ({"handler": lambda: None}, "handler.*a function of one message"),
        ({"handler": Journal.handled}, "handler.*a function of one message"),
        ({"timeout_s": 3}, "timeout_s"),
        ({"timeout_s": 0, "executor": "processes"}, "timeout_s=0.*above 0"),
        ({"unkeyed": "ordered", "order": "partition"}, "unkeyed"),
        ({"after_dead_letter": "key", "order": None}, "after_dead_letter"),
    ],
)
def test_bad_input_is_refused(memory: MemoryTestCluster, given: dict[str, Any], names: str) -> None:
    topic = fill(memory, 1, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with pytest.raises(InvalidOption, match=names):
            consumer.process(**({"handler": print} | given))
        assert len(consumer.fetch(1)) == 1, "the consumer is as it was"


def test_at_most_once_mode_has_no_retries(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], delivery="at_most_once") as consumer,
        pytest.raises(NeedsAtLeastOnce),
    ):
        consumer.process(print)


def test_a_function_that_returns_a_coroutine_ends_it(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1, keys=1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        work = consumer.process(lambda message: _coroutine(message))
        with pytest.raises(InvalidOption, match="coroutine"):
            work.wait(DEADLINE_S)
        assert len(consumer.fetch(1)) == 1


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"first_s": -1}, "first_s"),
        ({"factor": 0.5}, "factor"),
        ({"max_s": float("nan")}, "max_s"),
        ({"jitter": 2}, "jitter"),
        ({"deliveries": 0}, "deliveries"),
        ({"after_s": "1"}, "after_s"),
    ],
)
def test_bad_retries_are_refused(given: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidOption, match=names):
        Retry(**given)


def test_delays_grow_up_to_a_bound_and_differ_by_the_jitter() -> None:
    retry = Retry(first_s=1, factor=3, max_s=20, jitter=0.5)
    assert [retry.delay_s(count, lambda: 0.5) for count in (1, 2, 3, 4, 1000)] == [1, 3, 9, 20, 20]
    assert (retry.delay_s(1, lambda: 0.0), retry.delay_s(1, lambda: 0.75)) == (0.5, 1.25)
    assert Retry(after_s=7).delay_s(3, lambda: 0.0) == 7


def typed(consumer: Consumer[bytes, int]) -> None:
    """mypy checks that the handler gets the consumer's types."""

    def handle(message: Message[bytes, int]) -> None: ...

    work: Process[bytes, int] = consumer.process(handle)
    work.stop()
