"""confluent-kafka lets one thread at a time into a client. So no thread that holds the Marshal's lock may call one.

Otherwise whoever is inside a client, in a poll, a callback or a signal handler, and wants the lock waits for somebody
who waits for him.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import pytest

from marshal_py import Consumer, TopicPartition
from marshal_py.client import connection
from marshal_py.transport import kafka, kafka_admin, kafka_source
from tests.support.client_fixtures import DEADLINE_S, ROOT, BackgroundConsumer, EmbeddedTestCluster, joined, owns, until

CLIENTS = {"Consumer": (kafka, kafka_source, kafka_admin), "Producer": (kafka,), "AdminClient": (kafka_admin,)}


# What an event loop may call: neither waits for the cluster nor runs code of the user (`DataSource.poll_now`).
AT_ONCE: Final = frozenset({"produce", "consume", "get_watermark_offsets"})


class Watch:
    """Notes each call of a client of librdkafka by a thread that holds the lock of a Marshal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: list[connection.Context] = []
        self.calls: set[str] = set()
        self.under_lock: set[str] = set()
        self.threads: defaultdict[int, set[str]] = defaultdict(set)  # which thread has called what
        plain = connection.Context.__init__

        def made(this: connection.Context, *arguments: Any, **named: Any) -> None:
            plain(this, *arguments, **named)
            self.contexts.append(this)

        monkeypatch.setattr(connection.Context, "__init__", made)
        for name, modules in CLIENTS.items():
            for module in modules:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, self._watched(getattr(module, name)))

    def _watched(self, kind: type) -> type:
        def method(name: str) -> Callable[..., Any]:
            call = getattr(kind, name)

            @functools.wraps(call)
            def watched(*arguments: Any, **named: Any) -> Any:
                self.calls.add(name)
                waits = name in {"consume", "poll"} and arguments[-1] != 0
                waits = waits or (name == "get_watermark_offsets" and not named.get("cached"))
                self.threads[threading.get_ident()].add(f"{name} with a wait" if waits else name)
                if any(one.lock._is_owned() for one in self.contexts):  # type: ignore[attr-defined]
                    self.under_lock.add(name)
                return call(*arguments, **named)

            return watched

        names = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        return type(kind.__name__, (kind,), {name: method(name) for name in names})


STOPS = """
import signal, sys, threading, time
import marshal_py

servers, group, topic = sys.argv[1:]
marshal = marshal_py.connect(servers)
consumer = marshal.consumer(group, [topic], heartbeat_interval_s=1.0, start="earliest")

def handle(number, frame):
    try:
        consumer.stop()
    except marshal_py.MarshalError as error:
        print("raised", type(error).__name__, flush=True)
    print("handled", flush=True)

signal.signal(signal.SIGTERM, handle)
print("ready", flush=True)
try:
    for message in consumer:
        print("got", message.offset, flush=True)
        message.ack()
except marshal_py.MarshalError as error:
    print("ended by", type(error).__name__, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
marshal.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.012, 0.3])
def test_a_stop_inside_a_signal_handler_ends(embedded: EmbeddedTestCluster, delay_s: float) -> None:
    """While the main thread is inside a poll of the very client that is to be closed, at several points of it."""
    topic, group = embedded.topic(), embedded.group()
    embedded.fill(topic, 0, 3)
    command = [sys.executable, "-B", "-c", STOPS, embedded.target, group, topic]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "got 2\n":
                break
        threading.Event().wait(delay_s)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert "handled" in said
    assert said.endswith("closed\n")
    assert process.returncode == 0


def test_a_look_inside_a_callback_of_the_data_client_comes_back(embedded: EmbeddedTestCluster) -> None:
    """librdkafka calls `stats_cb` inside a poll, so the thread that polls holds the client and asks for the lock."""
    looked: list[int] = []
    consumers: list[Consumer] = []

    def stats(_: str) -> None:
        if consumers:
            looked.append(len(consumers[0].cached_info().claims))

    topic = embedded.topic(2)
    with embedded.connect() as marshal:
        settings = {"statistics.interval.ms": 20, "stats_cb": stats}
        consumer = joined(marshal, embedded.group(), [topic], settings=settings)
        consumers.append(consumer)
        with BackgroundConsumer(consumer) as background:
            until(lambda: looked.count(2) > 20, "it looked again and again")
            assert background.error is None


def test_a_source_that_is_closed_inside_its_own_callback(embedded: EmbeddedTestCluster) -> None:
    """The thread that polls cannot wait for itself: it closes the client when it leaves it."""
    sources: list[kafka_source.KafkaSource] = []
    called: list[bool] = []

    def stats(_: str) -> None:
        called.append(True)
        sources[0].close()

    topic = embedded.topic()
    source = kafka.KafkaTransport(embedded.target, DEADLINE_S).source(
        "g", "c", {"statistics.interval.ms": 20, "stats_cb": stats}
    )
    sources.append(source)
    source.assign({TopicPartition(topic, 0): 0})
    until(lambda: source.poll(0.1, 10) or called, "the callback")
    assert source.poll(DEADLINE_S, 10) == []
    with pytest.raises(RuntimeError, match="closed"):
        source._consumer.poll(0)


def test_assigning_does_not_wait_for_a_poll(embedded: EmbeddedTestCluster) -> None:
    """A client that the test keeps in a poll: other callers return at once; their calls are carried out after it."""
    topic = embedded.topic(2)
    embedded.fill(topic, 1, 3)
    one, two = TopicPartition(topic, 0), TopicPartition(topic, 1)
    source = kafka.KafkaTransport(embedded.target, DEADLINE_S).source("g", "c", {})
    source.learn_leaders([topic])
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with source._client_lock:
            source._run(lambda: (entered.set(), leave.wait(DEADLINE_S)))

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(DEADLINE_S)
    source.assign({one: 0, two: 0})
    source.pause([two])
    source.unassign([one])
    source.resume({two: 1})
    source.carry_out()
    assert source.end_offset(two) == -1
    assert not source._assignments.fetched, "nobody was let in"
    leave.set()
    thread.join()
    offsets = until(lambda: [m.offset() for chunk in source.poll(0.1, 10) for m in chunk.messages], "what was assigned")
    assert offsets[0] == 1
    until(lambda: source.carry_out() or source.end_offset(two) == 3, "the end is noted without a poll")
    source.close()


@pytest.mark.new_client
@pytest.mark.bounds(unacked=10)
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_no_client_is_called_under_the_lock(
    embedded: EmbeddedTestCluster, monkeypatch: pytest.MonkeyPatch, delivery: str
) -> None:
    """A whole life: join, claim, a late joiner, a local pause, a refused position, looks by other threads, stop."""
    watch = Watch(monkeypatch)
    topic, group = embedded.topic(3), embedded.group()
    for partition in range(3):
        embedded.fill(topic, partition, 20)
    embedded.truncate(topic, 2, 5)
    options = {"delivery": delivery}
    with embedded.connect("a", statistics_interval_ms=100) as first:
        one = joined(first, group, [topic], **options)
        with BackgroundConsumer(one) as background:
            until(lambda: len(background.seen) >= 55, "all that is there was read")
            one.pause([TopicPartition(topic, 0)])
            until(lambda: "pause" in watch.calls, "the client was reported")
            one.resume([TopicPartition(topic, 0)])
            with embedded.connect("b") as second:
                other = joined(second, group, [topic], **options)
                with BackgroundConsumer(other) as more:
                    until(lambda: len(other.cached_info().claims) == 1, "the late joiner has its share")
                    for partition in range(3):
                        embedded.fill(topic, partition, 20, first=20)
                    until(lambda: len(background.seen) + len(more.seen) >= 115, "both read on")
                    assert first.metrics().consumers
                    assert one.cached_info().claims
                    one.info()
                    assert background.error is None
                    assert more.error is None
                other.stop()
            until(owns(one, 0, 1, 2), "all of it is back")
        one.flush()
        one.stop()
    assert {
        "poll",
        "consume",
        "incremental_assign",
        "incremental_unassign",
        "get_watermark_offsets",
        "list_topics",
        "pause",
        "produce",
        "close",
    } <= watch.calls
    assert watch.under_lock == set()
