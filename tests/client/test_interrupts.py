"""Ctrl-C, and other signals whose handlers raise, between any two instructions: the interrupted work can be ended."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from marshal_py import Consumer, Message
from marshal_py.errors import GroupDeleted
from marshal_py.protocol.claims import OffsetRun
from marshal_py.protocol.wire.records import Leave
from tests.support.client_fixtures import (
    DEADLINE_S,
    BackgroundConsumer,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    until,
)

AGAIN_S = 2.0  # of the process's time
WEAK = ("_weakrefset.py", "/weakref.py")  # the files of the callbacks of weak references
INTERRUPTS = 100  # one in four hit the instruction between a lock and its `try`


def interrupt(after_s: float, work: Callable[[], object]) -> None:
    """Runs `work`, and again and again, until the signal comes after so much of the process's time.

    Python swallows what is raised in a destructor, for example. Then the signal comes once more, AGAIN_S later.
    """
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, after_s, AGAIN_S)
        while True:
            work()
    except Interrupted:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class Interrupted(BaseException):
    """Raised by the signal's handler; like KeyboardInterrupt, but only these tests raise it."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGVTALRM raises Interrupted in the main thread."""

    def handle(number: int, frame: FrameType | None) -> None:
        code = None if frame is None else frame.f_code
        # What is raised in the callback of a weak reference, or in Hypothesis's of the garbage collector, is swallowed.
        if code is not None and (code.co_filename.endswith(WEAK) or code.co_name == "gc_callback"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0001, AGAIN_S)
            return
        raise Interrupted

    before = signal.signal(signal.SIGVTALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_an_interrupted_ack_leaves_the_lock_free(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer, interruptible():
        messages = collect(consumer, 3, ack=False)
        for number in range(INTERRUPTS):
            interrupt(1e-6 * (1 + number), lambda: [message.ack() for message in messages])
        assert can_lock(marshal._context.lock)


def test_an_interrupted_fetch_leaves_the_consumer_to_the_next(memory: MemoryTestCluster) -> None:
    """A call that was interrupted does not count as still running."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer, interruptible():
        until(owns(consumer, 0), "the partition")
        for number in range(INTERRUPTS):
            interrupt(1e-6 * (1 + number), lambda: consumer.fetch(1, expires_s=0))
        assert (consumer._user, consumer._inside) == (None, None)
        with BackgroundConsumer(consumer):
            until(lambda: consumer._user is not None, "another thread fetches")


def fetches(consumer: Consumer) -> Iterator[Message]:
    while True:
        yield from consumer.fetch(100, min_messages=100, expires_s=0.05)


def consumes(consumer: Consumer) -> Iterator[Message]:
    return iter(consumer._consuming or consumer.consume(max_messages=100))


@pytest.mark.parametrize("taking", [fetches, iter, consumes])
def test_messages_of_an_interrupted_fetch_are_not_lost(cluster: TestCluster, taking: Callable[[Consumer], Any]) -> None:
    """A notebook's user presses ctrl-C and continues. Messages from librdkafka were skipped, and acks were lost."""
    topic, group, count = cluster.topic(), cluster.group(), 20_000
    cluster.fill(topic, 0, count)
    handled: set[int] = set()

    def handle(consumer: Consumer) -> None:
        for message in taking(consumer):
            assert int(message.value) == message.offset
            handled.add(message.offset)
            message.ack()
            while message.offset > count // 2:
                pass  # enough; and the signal comes by processor time, so nothing may wait here

    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer, interruptible():
        until(owns(consumer, 0), "the partition")
        for _ in range(INTERRUPTS // 2):
            if len(handled) < count // 2:
                interrupt(0.004, lambda: handle(consumer))
        assert can_lock(marshal._context.lock)
    with cluster.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        deadline = time.monotonic() + DEADLINE_S
        while len(handled) < count:
            assert time.monotonic() < deadline, f"{count - len(handled)} of {count} are lost"
            batch = consumer.fetch(expires_s=0.1)
            handled.update(message.offset for message in batch)
            batch.ack()


def test_a_fetch_that_is_interrupted_before_it_begins_takes_nothing_back(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took back what the fetch before it had given, and the consumer ended, because that was acked."""
    topic = memory.topic()
    memory.fill(topic, 0, 6)

    def interrupted() -> None:
        raise Interrupted

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        first = consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S)
        first.ack()
        with monkeypatch.context() as patched:
            patched.setattr(consumer._queue, "begin", interrupted)
            with pytest.raises(Interrupted):
                consumer.fetch(3)
        rest = consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S)
        assert [message.offset for message in (*first, *rest)] == list(range(6))
        rest.ack()
        consumer.flush()


def test_an_interrupted_ack_forgets_no_other() -> None:
    """If the lowest message is acked last, its ack moves over all that were acked before."""
    count = 2_000
    with interruptible():
        for number in range(INTERRUPTS // 2):
            run = OffsetRun(range(count))
            run.deliver(count, 0)
            for index in range(1, count):
                run.finish(index)
            interrupt(1e-6 * (1 + number), lambda run=run: run.finish(0))  # type: ignore[misc]
            if run.low == 0:
                run.finish(0)
            assert (run.low, run.unfinished, run.finished) == (count, 0, set())


def can_lock(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """Tries on another thread: the thread that leaked the lock could take it again."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=DEADLINE_S / 10))  # type: ignore[attr-defined]
        if got[0]:
            lock.release()  # type: ignore[attr-defined]

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


# --- stop and close


class Once:
    """Raises `error` at the first call of what it stands before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: BaseException) -> None:
        self._error: BaseException | None = error
        self._call = getattr(place, name)
        monkeypatch.setattr(place, name, self)

    def __call__(self, *arguments: Any) -> Any:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._call(*arguments)


INSIDE_STOP = {
    "as it begins to leave": lambda consumer: (consumer._member, "leave"),
    "while it leaves": lambda consumer: (consumer._driver, "kick"),
    "while it waits to have left": lambda consumer: (consumer._context.changed, "wait"),
    "before the source is closed": lambda consumer: (consumer._driver.source, "close"),
}


@pytest.mark.parametrize("verb", ["stop", "drain", "close"])
@pytest.mark.parametrize("where", INSIDE_STOP)
def test_an_interrupted_stop_is_ended_by_the_next(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, where: str, verb: str
) -> None:
    """The flags were set before the work, so a consumer that counted as closed still heartbeated."""
    topic, group = memory.topic(), memory.group()
    marshal = memory.connect()
    consumer = joined(marshal, group, [topic])
    until(owns(consumer, 0), "the partition")
    with monkeypatch.context() as patched:
        Once(patched, *INSIDE_STOP[where](consumer), KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            {"stop": consumer.stop, "drain": consumer.drain, "close": marshal.close}[verb]()
        {"stop": consumer.stop, "drain": consumer.stop, "close": marshal.close}[verb]()
    assert [record.session for record in memory.accepted(group, Leave)] != []
    assert marshal._loop.drivers == []
    assert consumer._driver.source._closed  # type: ignore[union-attr]
    marshal.close()
    assert not marshal._loop._thread.is_alive()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a source that cannot be closed")], ids=repr)
def test_close_stops_the_other_consumers_too(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A consumer that cannot be stopped is reported at the end; an interrupt at once, and the next call continues."""
    topic, groups = memory.topic(), [memory.group(), memory.group()]
    marshal = memory.connect()
    first, second = (joined(marshal, group, [topic]) for group in groups)
    Once(monkeypatch, first._driver.source, "close", error)
    with pytest.raises(type(error)):
        marshal.close()
    if isinstance(error, RuntimeError):
        assert not marshal._loop._thread.is_alive()
    marshal.close()
    assert not marshal._loop._thread.is_alive()
    assert [len(memory.accepted(group, Leave)) for group in groups] == [1, 1]
    assert second.cached_info().closed
    assert all(consumer._driver.source._closed for consumer in (first, second))  # type: ignore[union-attr]


def test_a_marshal_forgets_the_consumers_that_have_ended(memory: MemoryTestCluster) -> None:
    """A program that makes a consumer per job kept every one of them, with its buffers."""
    topic = memory.topic()
    with memory.connect() as marshal:
        gone = []
        for delivery in ("at_least_once", "at_most_once"):
            with joined(marshal, memory.group(), [topic], delivery=delivery) as consumer:
                gone.append(weakref.ref(consumer))
        failed = joined(marshal, memory.group(), [topic])
        with marshal._context.outbox, marshal._context.lock:
            failed._member.fail(GroupDeleted(failed._member.name))
            failed._driver.kick()
        with pytest.raises(GroupDeleted):
            failed.fetch(1)
        gone.append(weakref.ref(failed))
        assert marshal._joining.endings == {}
        del consumer, failed
        until(lambda: gc.collect() >= 0 and [ref() for ref in gone] == [None] * 3, "nobody holds them")
