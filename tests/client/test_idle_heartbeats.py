"""Idle heartbeats: a waiting call says when the cluster gives no sign of life, and continues to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from marshal_py import Consumer, Message
from marshal_py.client.receiving import HeartbeatTimer, IdleHeartbeat
from marshal_py.client.values.requests import check_fetch
from marshal_py.errors import AccessDenied, ClusterUnreachable, InvalidOption
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, joined, until


def test_two_intervals_without_a_sign_of_life_are_missed_once() -> None:
    """ADR-37: "A warning is triggered if the timer reaches 2 * request's idle_heartbeat value." """
    timer = HeartbeatTimer(1_000, 0)
    assert not timer.missed(1_999)
    assert timer.missed(2_000)
    assert not timer.missed(3_999)
    assert timer.missed(4_000)


def test_a_message_starts_the_timer_again() -> None:
    """ADR-37: "The timer is reset on each received message (this can be either user message, status message or
    heartbeat message)." """
    timer = HeartbeatTimer(1_000, 0)
    timer.alive(1_500)
    assert not timer.missed(3_499)
    timer.alive(1_000)  # an answer that was noted late
    assert timer.missed(3_500)


def test_the_cluster_is_asked_once_per_interval_without_a_message() -> None:
    """ADR-37: "Fetch Configuration options - idle_heartbeat?: number - amount idle time the server should wait before
    sending a heartbeat."
    ADR-37: "Consume Configuration Options - idle_heartbeat?: number - amount idle time the server should wait before
    sending a heartbeat"
    """
    timer = HeartbeatTimer(1_000, 0)
    assert [now for now in range(0, 3_000, 100) if timer.ask(now)] == [1_000, 2_000]
    timer.alive(2_900)
    assert [now for now in range(3_000, 5_000, 100) if timer.ask(now)] == [3_900, 4_900]


def test_a_paused_timer_neither_asks_nor_misses() -> None:
    """ADR-37: "Heartbeat timer should be reset and paused in the event of client disconnect and resumed on
    reconnect."
    ADR-37: "When a disconnect event is received, client should: - Reset the heartbeat timer. - Pause the heartbeat
    timer."
    ADR-37: "When a reconnect event is received, client should: - Resume the heartbeat timer."
    """
    timer = HeartbeatTimer(1_000, 0)
    timer.pause()
    assert not timer.missed(10_000)
    assert not timer.ask(10_000)
    timer.resume(10_000)
    timer.resume(11_000)  # it runs already
    assert not timer.missed(11_999)
    assert timer.missed(12_000)


class Cluster:
    """What IdleHeartbeat uses of a context and of a driver, in virtual time."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.answers = True
        self.refuses = False
        self.lost = ""
        self.asked = 0
        self.events: list[tuple[str, str]] = []
        self.context = self.driver = self.clock = self.admin = self.member = self
        self.lock = self.outbox = threading.RLock()
        self.claims = {1: self}
        self.tp = "orders", 0
        self.watch = IdleHeartbeat(cast(Any, self), cast(Any, self), 1.0)

    def now(self) -> Any:
        return type("Now", (), {"mono_ms": self.now_ms})

    def waiting_for(self) -> str:
        return self.lost

    def submit(self, what: str, task: Callable[[], None]) -> None:
        task()

    def bounds(self, tps: object) -> object:
        self.asked += 1
        if not self.answers:
            raise ClusterUnreachable("servers", "bounds", "no answer")
        if self.refuses:
            raise AccessDenied("User:me", "Describe", "topic", "orders")
        return {}

    def advise(self, kind: str, *, text: str) -> None:
        self.events.append((kind, text))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now_ms += 100
            self.watch.check()


def test_an_answer_of_the_cluster_is_a_sign_of_life() -> None:
    """ADR-37: "5. Verify the type of message: - if message is a heartbeat message, go to #1" """
    cluster = Cluster()
    cluster.wait(10)
    assert cluster.asked == 10
    assert cluster.events == []
    cluster.answers = False
    cluster.wait(2.5)
    ((kind, text),) = cluster.events
    assert kind == "heartbeat_missed"
    assert "for 2 s" in text


def test_a_refusal_is_an_answer() -> None:
    cluster = Cluster()
    cluster.refuses = True
    cluster.wait(10)
    assert cluster.events == []


def test_a_lost_connection_is_no_missed_heartbeat() -> None:
    cluster = Cluster()
    cluster.answers, cluster.lost = False, "127.0.0.1:9: connection refused"
    cluster.wait(10)
    assert cluster.events == []
    assert cluster.asked == 0
    cluster.lost = ""
    cluster.wait(1.9)
    assert cluster.events == []
    cluster.wait(0.5)
    assert len(cluster.events) == 1


def test_a_waiting_fetch_reports_it_and_continues(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """ADR-37: "Heartbeat errors are not terminal - they should rather be telegraphed to the user in language idiomatic
    way." "Telegraphing warnings is optional."
    """
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(lambda: consumer.cached_info().claims, "the partition is ours")

        def unreachable(*_: object, **__: object) -> None:
            raise ClusterUnreachable("servers", "bounds", "no answer")

        monkeypatch.setattr(consumer._context.admin, "bounds", unreachable)
        found: list[object] = []
        reader = threading.Thread(target=lambda: found.extend(consumer.fetch(1, expires_s=60, idle_heartbeat_s=0.5)))
        reader.start()
        until(lambda: any(event.kind == "heartbeat_missed" for event in consumer.events()), "the event comes")
        assert reader.is_alive()
        memory.fill(topic, 0, 1)
        reader.join()
        assert len(found) == 1


def test_a_waiting_consume_reports_it_and_continues(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """ADR-37: "Consume() should always utilize idle heartbeats." """
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        until(lambda: consumer.cached_info().claims, "the partition is ours")
        seen: list[Message] = []
        context = consumer.consume(seen.append, expires_s=1)

        def unreachable(*_: object, **__: object) -> None:
            raise ClusterUnreachable("servers", "bounds", "no answer")

        monkeypatch.setattr(consumer._context.admin, "bounds", unreachable)
        until(lambda: any(event.kind == "heartbeat_missed" for event in consumer.events()), "the event comes")
        memory.fill(topic, 0, 1)
        until(lambda: seen, "the message comes")
        seen[0].ack()
        assert not context.closed


@pytest.mark.parametrize("handled", [0, 2], ids=["a loop that begins late", "slow handlers"])
def test_time_outside_the_call_is_no_silence_of_the_cluster(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, handled: int
) -> None:
    topic, cluster, looks = memory.topic(), Cluster(), threading.Semaphore(0)
    check = cluster.watch.check
    monkeypatch.setattr(cluster.watch, "check", lambda: (check(), looks.release()))
    monkeypatch.setattr("marshal_py.client.receiving.IdleHeartbeat", lambda *_: cluster.watch)
    if handled:
        memory.fill(topic, 0, handled)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        messages = iter(consumer.consume())
        cluster.now_ms += 60_000
        for _ in range(handled):
            next(messages).ack()
            cluster.now_ms += 60_000
        reader = threading.Thread(target=lambda: next(messages, None))
        reader.start()
        assert looks.acquire(timeout=DEADLINE_S)
        consumer._ending.request_stop(0)
        reader.join()
    assert cluster.events == []


@pytest.mark.parametrize(("expires_s", "expected"), [(30.0, None), (30.1, 15.05), (45.0, 22.5), (90.0, 30.0)])
def test_a_fetch_that_may_wait_long_has_a_heartbeat(expires_s: float, expected: float | None) -> None:
    """ADR-37: "For requests with expires > 30s, heartbeats should be enabled by default" """
    assert check_fetch(1, None, expires_s, 1, None).idle_heartbeat_s == expected


class Watch:
    """Stands for an IdleHeartbeat. Counts the messages that it is told of, and never finds the cluster silent."""

    def __init__(self, _context: object, _driver: object, interval_s: float) -> None:
        self.interval_s, self.messages = interval_s, 0

    def message(self) -> None:
        self.messages += 1

    def check(self) -> None:
        pass


RECEIVING: dict[str, Callable[[Consumer, float], object]] = {
    "fetch": lambda consumer, expires_s: consumer.fetch(1, expires_s=expires_s),
    "next": lambda consumer, expires_s: consumer.next(expires_s),
    "consume": lambda consumer, expires_s: next(iter(consumer.consume(expires_s=expires_s))),
}


@pytest.mark.parametrize("verb", RECEIVING)
@pytest.mark.parametrize(("expires_s", "expected"), [(30.0, None), (60.0, 30.0)])
def test_a_call_that_may_wait_long_resets_its_timer_with_a_message(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch, verb: str, expires_s: float, expected: float | None
) -> None:
    """ADR-37: "Next Configuration options - idle_heartbeat?: number - amount idle time the server should wait before
    sending a heartbeat. For requests with expires > 30s, heartbeats should be enabled by default"
    ADR-37: "4. Reset the heartbeat timer."
    """
    made: list[Watch] = []
    monkeypatch.setattr(
        "marshal_py.client.receiving.IdleHeartbeat", lambda *given: made.append(Watch(*given)) or made[-1]
    )
    if verb == "consume":
        expected = expected or 15.0  # always on
    with memory.reading(1) as consumer:
        RECEIVING[verb](consumer, expires_s)
        assert [watch.interval_s for watch in made] == ([expected] if expected else [])
        assert all(watch.messages for watch in made)


@pytest.mark.parametrize(
    ("expires_s", "heartbeat_s"), [(60.0, 0.4), (90.0, 30.5), (10.0, 5.1), (60.0, 0), (60.0, -1.0), (60.0, True)]
)
def test_a_heartbeat_out_of_bounds_is_refused(memory: MemoryTestCluster, expires_s: float, heartbeat_s: float) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        for verb in (consumer.fetch, consumer.next):
            with pytest.raises(InvalidOption, match="idle_heartbeat_s"):
                verb(expires_s=expires_s, idle_heartbeat_s=heartbeat_s)
