"""What tells how a `process` is doing: stats, metrics, the advisory `held_up`, and what `marshal state` makes of it."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from marshal_py import Advisory, Batches, Marshal, Message, Retry
from marshal_py.admin.watch import Watch
from marshal_py.client.process import processing
from marshal_py.client.values.info import HANDLER_S, HandlerTimes
from marshal_py.log.observer import Observer
from marshal_py.metrics import Collector
from marshal_py.protocol.wire.records import Note
from tests.client.test_process import fill
from tests.support.client_fixtures import DEADLINE_S, MemoryTestCluster, calm, joined, until


def shown(marshal: Marshal, group: str) -> list[str]:
    """What a look at the log says of messages that hold up positions, as `marshal state` prints it."""
    with Watch(lambda: Observer(marshal.transport, marshal.coordination_topic), group, shows="states") as watch:
        watch.refresh()
        return [notice for notice in watch.states()[0].notices if "held up" in notice]


def test_it_says_what_messages_wait_for(memory: MemoryTestCluster) -> None:
    """Of 12 messages with three keys, key 0 is tried again, key 1 is in work, key 2 finds no worker."""
    topic, hold = fill(memory, 12, keys=3), threading.Event()

    def handle(message: Message) -> None:
        if message.key == b"k0":
            raise Retry(after_s=3_600)
        assert hold.wait(DEADLINE_S)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle, workers=1) as work,
    ):
        until(lambda: (work.stats().retrying, work.stats().working) == (1, 1), "two have begun")
        until(lambda: work.stats().waiting == 10, "all have come")
        assert work.stats().waiting_for == {"worker": 1, "batch": 0, "lane": 6, "retry": 3, "gate": 0}
        (figures,) = marshal.metrics().consumers
        assert figures.process is not None
        assert figures.process.waiting_for == work.stats().waiting_for
        consumer.pause(consumer.cached_info().claims)
        hold.set()
        until(lambda: work.stats().waiting_for["gate"] == 7, "two keys wait for their gate")


def test_the_age_of_the_oldest_message_counts_from_when_it_came(memory: MemoryTestCluster) -> None:
    topic, hold = fill(memory, 2, keys=2), threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 0:
            assert hold.wait(DEADLINE_S)

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle) as work,
    ):
        until(lambda: work.stats().oldest_s > 0.02, "the first one gets older")
        (partition,) = marshal.metrics().consumers[0].partitions
        assert partition.oldest_unfinished_ms >= 20
        hold.set()
        until(lambda: work.stats().finished == 2, "both are done")
        assert work.stats().oldest_s == 0
        assert marshal.metrics().consumers[0].partitions[0].oldest_unfinished_ms == 0


def test_handlers_are_counted_by_how_long_they_took(memory: MemoryTestCluster) -> None:
    times = HandlerTimes()
    for took_s in (0.001, 0.005, 0.006, 59.0, 61.0):
        times.add(took_s)
    assert (times.counts[:2], times.counts[-2:], sum(times.counts)) == ([2, 1], [1, 1], 5)
    topic = fill(memory, 6, keys=6)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with consumer.process(lambda message: None) as work:
            until(lambda: work.stats().finished == 6, "all are handled")
            assert (sum(work.stats().handler_s), len(work.stats().handler_s)) == (6, len(HANDLER_S) + 1)
        assert work.stats().handler_sum_s > 0


def test_a_list_counts_as_one_handler(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 6, keys=6)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda messages: None, batch=Batches(6, wait_s=3_600)) as work,
    ):
        until(lambda: work.stats().finished == 6, "all are handled")
        assert sum(work.stats().handler_s) == 1


def test_prometheus_gets_them(memory: MemoryTestCluster) -> None:
    topic, hold = fill(memory, 3, keys=1), threading.Event()
    registry = CollectorRegistry()
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(lambda message: hold.wait(DEADLINE_S) and None) as work,
    ):
        registry.register(Collector(marshal))
        until(lambda: (work.stats().working, work.stats().waiting) == (1, 2), "all have come")
        said = generate_latest(registry).decode()
        hold.set()
        until(lambda: work.stats().finished == 3, "all are done")
        later = generate_latest(registry).decode()
    labels = f'client_id="{consumer.info().client_id}",group="{consumer.info().group}"'
    assert f"marshal_process_working{{{labels}}} 1.0" in said
    assert f'marshal_process_waiting{{{labels},reason="lane"}} 2.0' in said
    assert f"marshal_process_finished_total{{{labels}}} 3.0" in later
    assert f"marshal_process_handler_s_count{{{labels}}} 3.0" in later


def test_a_message_that_waits_for_a_worker_does_not_hold_up_the_position(memory: MemoryTestCluster) -> None:
    """It was put back because its gate was shut, or was tried again, and all workers have others since: nothing is
    wrong with it, and to skip it would lose it."""
    topic, hold, other = fill(memory, 4, keys=4), threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 0 and message.delivery_count == 1:
            assert other.wait(DEADLINE_S)
            raise Retry(after_s=0)
        if message.offset == 2:
            other.set()  # 1 is done, and the other worker takes 3 before 0 has come again
        assert message.offset < 2 or hold.wait(DEADLINE_S)

    with (
        memory.connect() as marshal,
        calm(marshal, memory.group(), [topic]) as consumer,
        consumer.process(handle, workers=2) as work,
    ):
        states = {0: "ready", 2: "working", 3: "working"}
        until(lambda: {lane.offset: lane.state for lane in work.lanes()} == states, "0 waits for a worker")
        for _ in range(4):
            looked = work._processing._held_up_look_s
            memory.local.advance(processing.HELD_UP_S)
            until(lambda: work._processing._held_up_look_s > looked, "it looks")  # noqa: B023
        assert not [event for event in consumer.events() if event.kind == "held_up"]
        hold.set()
        until(lambda: work.stats().finished == 4, "all are done")


def test_a_message_that_holds_up_the_position_is_reported_and_shown(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing, "HELD_UP_S", 0.05)
    monkeypatch.setattr(processing, "HELD_UP_LOOK_S", 0.0)
    topic, group = fill(memory, 9, keys=3), memory.group()
    stays = threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 4 and not stays.is_set():
            raise Retry(after_s=0.2)

    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer, consumer.process(handle) as work:
        told: list[Advisory] = []

        def again() -> bool:
            told.extend(event for event in consumer.events() if event.kind == "held_up")
            return len(told) >= 2

        until(again, "it is reported, and again later")
        first = told[0]
        assert (first.topic, first.partition, first.offset) == (topic, 0, 4)
        assert "of key b'k1'" in first.text
        assert "above it are done" in first.text
        until(lambda: [one for one in memory.accepted(group, Note) if one.kind == "held_up"], "the log has it")
        (line,) = until(lambda: shown(marshal, group), "a look at the log shows it")
        assert line.startswith(f"{topic}:0 is held up at 4: the message of key b'k1'")
        assert f"marshal get {topic} --partition 0 --offset 4; to skip it: marshal set-position {group}" in line
        stays.set()
        until(lambda: work.stats().finished == 9, "all are done")
        until(lambda: not shown(marshal, group), "it is not so any more")
