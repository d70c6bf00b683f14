"""The background thread and the user's code: neither runs on the other's thread; its end is a named error."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import pytest

import marshal_py
from marshal_py import Marshal
from marshal_py.client import connection
from marshal_py.client.connection import Callbacks
from marshal_py.client.driver import loop
from marshal_py.errors import BackgroundThreadEnded, ConsumerClosed
from marshal_py.info import ClaimInfo
from marshal_py.protocol.wire.identity import TopicPartition, route
from marshal_py.protocol.wire.records import Evict
from marshal_py.transport.memory import MemoryLog
from marshal_py.transport.ports import Bounds
from tests.support.client_fixtures import (
    DEADLINE_S,
    LOGS,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    until,
)


def heartbeats(marshal: Marshal) -> int:
    return sum(one.heartbeats_sent for one in marshal.metrics().consumers)


# --- callbacks


def test_a_slow_callback_does_not_fence_the_consumer(cluster: TestCluster) -> None:
    """If a callback does not return, its own consumer and another one of the Marshal still heartbeat and deliver."""
    topic, slow, other = cluster.topic(), cluster.group(), cluster.group()
    cluster.fill(topic, 0, 3)
    over, threads = threading.Event(), list[str]()

    def wait(_: ClaimInfo) -> None:
        threads.append(threading.current_thread().name)
        over.wait(DEADLINE_S)

    with (
        cluster.connect() as marshal,
        joined(marshal, slow, [topic], on_claim=wait) as one,
        joined(marshal, other, [topic]) as two,
    ):
        try:
            until(lambda: threads, "the callback runs")
            until(lambda: marshal.metrics().consumers[0].round_trip_ms >= 0, "a heartbeat came back")
            before = heartbeats(marshal)
            until(lambda: heartbeats(marshal) >= before + 12, "both heartbeat on for two intervals")
            assert places(collect(one, 3)) == places(collect(two, 3)) == [(0, 0), (0, 1), (0, 2)]
            assert "fenced" not in [event.kind for consumer in (one, two) for event in consumer.events()]
        finally:
            over.set()
    assert threads == ["marshal-callbacks"]
    assert cluster.accepted(slow, Evict) == cluster.accepted(other, Evict) == []


class OfTheProgram(logging.Handler):
    """Waits at the first line of a claim, then raises at each line."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.over, self.threads = threading.Event(), threading.Event(), set[str]()

    def handle(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or "claimed" not in record.getMessage():
            return True
        self.threads.add(threading.current_thread().name)
        self.waits.set()
        self.over.wait(DEADLINE_S)
        raise OSError("no log server")


def test_a_handler_of_logging_that_waits_and_raises_ends_nothing(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the program's code: the consumers of the process heartbeat meanwhile, and go on."""
    topic, slow, other, handler = memory.topic(), memory.group(), memory.group(), OfTheProgram()
    memory.fill(topic, 0, 3)
    logger = logging.getLogger("marshal_py")
    caplog.set_level(logging.INFO, "marshal_py")
    logger.addHandler(handler)
    try:
        with memory.connect() as marshal, joined(marshal, slow, [topic]) as one, joined(marshal, other, [topic]) as two:
            until(handler.waits.is_set, "a line is written")
            before = heartbeats(marshal)
            until(lambda: heartbeats(marshal) >= before + 12, "both heartbeat on for two intervals")
            assert places(collect(one, 3)) == places(collect(two, 3)) == [(0, 0), (0, 1), (0, 2)]
            handler.over.set()
    finally:
        handler.over.set()
        logger.removeHandler(handler)
    assert handler.threads == {"marshal-log"}
    lines = {record.getMessage().partition(" (")[0] for record in caplog.records}
    assert {f"group {group}: released {topic}:0 at 3" for group in (slow, other)} <= lines, "what it did not refuse"
    assert {record.threadName for record in caplog.records} != {"marshal-log"}, "each line has the thread of its call"


def test_a_handler_of_logging_that_does_not_return_costs_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINES_WAITING_MAX", 3)
    logger, written, held, over = logging.Logger("test"), list[str](), threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.set()
            over.wait(DEADLINE_S)
            written.append(record.getMessage())

    logger.addHandler(Slow())
    lines = connection.LogLines(logger)
    lines.write(logging.INFO, "line %d", 0)
    until(held.is_set, "it is being written")
    for number in range(1, 9):
        lines.write(logging.INFO, "line %d", number)
    over.set()
    lines.close(DEADLINE_S)
    lines.write(logging.INFO, "late")
    dropped = "5 lines were left out, as a handler of logging did not return"
    assert written == ["line 0", "line 1", "line 2", "line 3", dropped, "late"]


def test_a_callback_that_exits_ends_nothing(memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture) -> None:
    """sys.exit() in a callback must not end the thread, which all consumers share."""
    topic = memory.topic(2)
    reported: list[int] = []

    def leave(claim: ClaimInfo) -> None:
        reported.append(claim.partition)
        sys.exit(3)

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], on_claim=leave) as consumer:
        until(lambda: len(reported) == 2, "the second callback runs, too")
        memory.fill(topic, 1, 2)
        assert places(collect(consumer, 2)) == [(1, 0), (1, 1)]
    assert [record.message for record in caplog.records if record.exc_info] == ["a callback failed"] * 2


def test_a_callback_may_stop_its_consumer(memory: MemoryTestCluster) -> None:
    """The stop waits for another thread than the one that runs callbacks."""
    topic = memory.topic()
    reported: list[str] = []
    holder: list[marshal_py.Consumer] = []
    there = threading.Event()

    def stop(_: ClaimInfo) -> None:
        assert there.wait(DEADLINE_S)
        holder[0].stop()
        reported.append("stopped")

    with memory.connect() as marshal:
        holder.append(joined(marshal, memory.group(), [topic], on_claim=stop))
        there.set()
        until(lambda: reported, "stop returned")
        assert holder[0].cached_info().closed


def test_callbacks_that_wait_run_before_close_returns(memory: MemoryTestCluster) -> None:
    topic = memory.topic(20)
    reported: list[int] = []
    marshal = memory.connect()
    lost = joined(marshal, memory.group(), [topic], on_lost=lambda claim, _: reported.append(claim.partition))
    until(owns(lost, *range(20)), "all of them")
    marshal.close()
    assert sorted(reported) == [*range(20)]


def test_close_does_not_wait_for_a_callback_that_hangs() -> None:
    over, callbacks = threading.Event(), Callbacks()
    callbacks.submit(over.wait)
    callbacks.close(0.01)
    over.set()


def test_beyond_the_bound_new_callbacks_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    over, begun, ran = threading.Event(), threading.Event(), list[int]()
    callbacks = Callbacks(waiting_max=3)

    def hang() -> None:
        begun.set()
        over.wait(DEADLINE_S)

    callbacks.submit(hang)
    assert begun.wait(DEADLINE_S)
    for number in range(5):
        callbacks.submit(lambda number=number: ran.append(number))
    assert callbacks.dropped == 2
    over.set()
    callbacks.close(DEADLINE_S)
    assert ran == [0, 1, 2]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


# --- questions that wait


def test_one_slow_coordinator_does_not_delay_other_starts(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, slow, quick = memory.topic(), memory.group(), memory.group()
    memory.fill(topic, 0, 2)
    answer = threading.Event()
    with memory.connect() as marshal:
        committed = marshal._context.admin.committed

        def ask(group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
            assert group != slow or answer.wait(3 * DEADLINE_S)
            return committed(group, tps)

        monkeypatch.setattr(marshal._context.admin, "committed", ask)
        first = {"start": "committed|earliest"}
        with joined(marshal, slow, [topic], **first) as one, joined(marshal, quick, [topic], **first) as two:
            until(owns(two, 0), "the other group has its partition")
            assert len(collect(two, 2)) == 2
            assert not one.cached_info().claims
            answer.set()
            assert len(collect(one, 2)) == 2


def test_a_log_that_is_slow_to_open_does_not_delay_others(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = memory.topic()
    groups = {number: next(f"g{i}" for i in range(100) if route(f"g{i}", LOGS) == number) for number in range(LOGS)}
    asked, answer = threading.Event(), threading.Event()
    with memory.connect() as marshal:
        bounds, found = marshal._context.coordination.bounds, list[marshal_py.Consumer]()

        def ask(number: int, timeout_s: float) -> Bounds:
            if number == 1:
                asked.set()
                assert answer.wait(3 * DEADLINE_S)
            return bounds(number, timeout_s)

        monkeypatch.setattr(marshal._context.coordination, "bounds", ask)
        opening = threading.Thread(target=lambda: found.append(joined(marshal, groups[1], [topic])))
        opening.start()
        assert asked.wait(DEADLINE_S)
        try:
            with joined(marshal, groups[0], [topic]) as consumer:
                until(owns(consumer, 0), "the other log serves")
        finally:
            answer.set()
            opening.join(DEADLINE_S)
        found[0].stop()


# --- the thread's end


def end_thread(marshal: Marshal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the thread as a bug in it would."""

    def leave(_: float) -> NoReturn:
        raise SystemExit(3)

    monkeypatch.setattr(marshal._context.coordination, "poll", leave)


@pytest.mark.parametrize("verb", ["fetch", "next", "iteration", "flush", "info"])
def test_what_ends_the_thread_is_a_named_error_in_every_verb(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    marshal = memory.connect()
    consumer = joined(marshal, memory.group(), [topic])
    message = collect(consumer, 1, ack=False)[0]
    end_thread(marshal, monkeypatch)
    verbs = {
        "fetch": lambda: [consumer.fetch(1, expires_s=1.0) for _ in range(60)],
        "next": lambda: [consumer.next(1.0) for _ in range(60)],
        "iteration": lambda: [*consumer],
        "flush": lambda: [until(lambda: marshal._context.ended, "the end"), consumer.flush()],
        "info": lambda: [until(lambda: marshal._context.ended, "the end"), consumer.info()],
    }
    with pytest.raises(BackgroundThreadEnded, match=r"SystemExit\(3\)"):
        verbs[verb]()
    assert message.ack() is False
    assert "SystemExit" in marshal.waiting_for
    until(lambda: not marshal.metrics().consumers, "the thread has ended its consumers")
    consumer.stop()
    with pytest.raises(ConsumerClosed):
        consumer.fetch()
    with pytest.raises(BackgroundThreadEnded):
        joined(marshal, memory.group(), [topic])
    marshal.close()


def test_a_thread_that_ends_while_connect_waits_ends_connect(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> NoReturn:
        raise SystemExit(3)

    monkeypatch.setattr("marshal_py.transport.memory.MemoryLog.poll", leave)
    began = time.monotonic()
    with pytest.raises(BackgroundThreadEnded):
        memory.connect(timeout_s=10 * DEADLINE_S)
    assert time.monotonic() < began + DEADLINE_S, "it did not wait for its timeout"


def test_the_log_is_gathered_while_many_sessions_write_heartbeats(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(MemoryLog, "gather", lambda log, on: asked.append(on))
    monkeypatch.setattr(loop, "PACE_S", 0.01)
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal:
        few = [joined(marshal, group, [topic], heartbeat_interval_s=1.0) for _ in range(9)]
        many = [joined(marshal, group, [topic], heartbeat_interval_s=1.0) for _ in range(10)]
        assert not any(asked), "57 heartbeats per second: each is read at once"
        many.append(joined(marshal, group, [topic], heartbeat_interval_s=1.0))
        until(lambda: asked[-1], "60 per second")
        many.pop().stop()
        asked.clear()
        until(lambda: len(asked) > 1, "the thread has looked again")
        assert all(asked), "a consumer that comes and goes changes nothing"
        for consumer in many:
            consumer.stop()
        until(lambda: not asked[-1], "27 per second")
        for consumer in few:
            consumer.stop()
