"""What was not closed says so by a ResourceWarning, and is closed all the same: a consumer when the program drops it, a
Marshal when the program ends.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import Message, aio
from marshal_py.client.marshal import Marshal
from marshal_py.embedded import Broker
from marshal_py.protocol.wire.records import Leave
from tests.support.client_fixtures import DEADLINE_S, INTERVAL_S, ROOT, MemoryTestCluster, joined, owns, until

LEFT_OPEN = """
import threading
import marshal_py
from marshal_py.embedded import Broker

broker = Broker(topics={"__marshal": 1, "orders": 1})
broker.start()
marshal = marshal_py.connect(broker.bootstrap_servers, client_id="host-1")
claimed = threading.Event()
consumer = marshal.consumer(
    "billing", ["orders"], on_claim=lambda info: claimed.set(), on_lost=lambda info, reason: print(reason)
)
assert claimed.wait(60)
"""


@pytest.mark.parametrize("flags", [["-W", "default"], ["-W", "error"]], ids=["shown", "as errors"])
def test_a_program_that_closes_nothing_is_told_and_releases_its_claims(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert done.stdout == "stopped\n"
    shown = "ResourceWarning: Marshal(" in done.stderr and "client_id='host-1'" in done.stderr
    assert shown is (flags[1] == "default")
    assert "was dropped" not in done.stderr, "the Marshal's own is enough"


def test_a_handler_of_a_consume_does_not_keep_the_program_running() -> None:
    program = LEFT_OPEN + "consumer.consume(print)\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "stopped\n")


def test_a_handler_of_a_process_that_runs_does_not_keep_the_program_running() -> None:
    program = LEFT_OPEN + (
        "begun, never = threading.Event(), threading.Event()\n"
        "consumer.process(lambda message: (begun.set(), never.wait()), workers=2)\n"
        "from confluent_kafka import Producer\n"
        "producer = Producer({'bootstrap.servers': broker.bootstrap_servers})\n"
        "producer.produce('orders', b'1')\nproducer.flush(60)\n"
        "assert begun.wait(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_a_program_that_does_not_ask_is_not_told() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "ResourceWarning" not in done.stderr


def test_an_embedded_broker_that_was_not_closed() -> None:
    brokers = [Broker(), Broker(), Broker()]
    brokers[0].start()
    brokers[0].close()
    brokers[1].start()
    del brokers[2], brokers[0]
    with pytest.warns(ResourceWarning, match="embedded Broker was not closed"):
        brokers.clear()


# --- consumers


def reasons(memory: MemoryTestCluster, group: str) -> list[str]:
    return [leave.reason for leave in memory.accepted(group, Leave)]


def drop(held: list[object]) -> None:
    held.clear()
    gc.collect()


def an_iteration(marshal: Marshal, group: str, topic: str) -> object:
    iterator = iter(joined(marshal, group, [topic]))
    next(iterator).ack()
    return iterator


def a_consume(marshal: Marshal, group: str, topic: str) -> object:
    handled = threading.Event()

    def handle(message: Message) -> None:
        message.ack()
        handled.set()

    context = joined(marshal, group, [topic]).consume(handle)
    assert handled.wait(DEADLINE_S)
    return context


USES: dict[str, tuple[Callable[[Marshal, str, str], object], str]] = {
    "a consumer": (lambda marshal, group, topic: joined(marshal, group, [topic]), "Consumer"),
    "an iteration": (an_iteration, "Consumer"),
    "a context of consume": (lambda marshal, group, topic: joined(marshal, group, [topic]).consume(), "Consumer"),
    "a planner": (lambda marshal, group, topic: marshal.planner(group, [topic]), "Planner"),
}


@pytest.mark.parametrize("use", USES)
def test_a_consumer_that_is_dropped_says_so_and_leaves(memory: MemoryTestCluster, use: str) -> None:
    """What uses it keeps it. What drops the last of these waits for no lock: it may be the garbage collector."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    make, kind = USES[use]
    with memory.connect() as marshal:
        held = [make(marshal, group, topic)]
        gc.collect()  # a warning here would be an error
        assert reasons(memory, group) == []
        locked, dropped = threading.Event(), threading.Event()

        def lock() -> None:
            with marshal._context.lock:
                locked.set()
                assert dropped.wait(DEADLINE_S)

        thread = threading.Thread(target=lock)
        thread.start()
        assert locked.wait(DEADLINE_S)
        with pytest.warns(ResourceWarning, match=rf"^{kind}\('{group}', .* was dropped and not stopped") as told:
            drop(held)
        dropped.set()
        thread.join(DEADLINE_S)
        assert len(told) == 1
        until(lambda: not marshal._joining.endings, "it is closed")
        assert reasons(memory, group) == ["dropped"]
        assert marshal.metrics().consumers == []


def test_a_handler_that_runs_keeps_its_consumer(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        a_consume(marshal, group, topic)
        gc.collect()
        memory.fill(topic, 0, 1, first=1)
        until(lambda: memory.world(group).groups[group].partitions, "it is claimed")
        (ending,) = marshal._joining.endings.values()
        until(lambda: ending._driver.queue.delivered == 2, "it goes on")
        assert reasons(memory, group) == []
    gc.collect()  # the Marshal has stopped it


def test_what_a_dropped_consumer_delivered_can_still_be_acked(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 4)
    with memory.connect() as marshal:
        with pytest.warns(ResourceWarning):
            batch = joined(marshal, group, [topic]).fetch(4, min_messages=4)
        (driver,) = marshal._joining.endings
        until(lambda: driver.member.leaving, "the background thread has noticed")
        assert reasons(memory, group) == []
        assert all(message.ack() for message in batch)
        until(lambda: not marshal._joining.endings, "it is closed")
        with joined(marshal, group, [topic]) as successor:
            until(owns(successor, 0), "the partition is free")
            assert successor.cached_info().claims[(topic, 0)].position == 4


def test_a_stop_that_was_interrupted_is_completed(memory: MemoryTestCluster) -> None:
    """By the program's second call, or when it drops the consumer. It has asked for the stop, so no warning comes."""
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal:
        for _ in range(2):
            consumer = joined(marshal, group, [topic])
            next(consumer._ending.stop(DEADLINE_S), None)
            if reasons(memory, group):  # the second one is dropped when it has left already
                until(lambda: not marshal._loop.drivers, "it has left")
            del consumer
            until(lambda: not marshal._joining.endings, "it is closed")
    assert reasons(memory, group) == ["stopped", "stopped"]


def test_a_consumer_of_asyncio_that_is_dropped(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    options: dict[str, Any] = {"heartbeat_interval_s": INTERVAL_S, "start": "earliest"}

    async def main() -> None:
        async with aio.connect(memory.target) as marshal:
            endings, done = marshal._plain._joining.endings, asyncio.Event()

            async def handle(message: Message) -> None:
                message.ack()
                gc.collect()
                if message.offset == 2:
                    done.set()

            context = (await marshal.consumer(group, [topic], **options)).consume(handle)
            held: list[object] = [context]
            gc.collect()
            await done.wait()
            await context.stop()
            del context
            with pytest.warns(ResourceWarning, match=rf"^AsyncConsumer\('{group}', .* was dropped and not stopped"):
                drop(held)
            while endings:
                await asyncio.sleep(0)
            while any(thread.name == "marshal-receiver" for thread in threading.enumerate()):
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert reasons(memory, group) == ["dropped"]
