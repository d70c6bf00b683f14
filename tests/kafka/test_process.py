"""`Consumer.process` on Apache Kafka: the order per key while members join, leave, are killed and frozen."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from tests.support import key_order, transaction_kills
from tests.support.client_fixtures import joined, positions, until
from tests.support.kafka import Cluster, TopicFactory, start_cluster, wait_until

ENDS_AMID = """
import sys, threading, time
import marshal_py

servers, topic, group, done = sys.argv[1:]
begun = threading.Barrier(5)

def handle(message):
    if message.offset < 4:
        begun.wait()
    time.sleep(0.3)
    with open(done, "a") as file:
        file.write(f"{message.offset} ")

marshal = marshal_py.connect(servers)
consumer = marshal.consumer(group, [topic], start="earliest", heartbeat_interval_s=1.0)
work = consumer.process(handle, workers=4)
begun.wait()
sys.exit(3)
"""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_the_order_per_key_survives_a_join_and_a_kill(kafka: Cluster, tmp_path: Path) -> None:
    """Three processes of 16 workers, and one more."""
    assert key_order.run(kafka.bootstrap, tmp_path, 2_400, 2, workers=16, seed=2) == 0


def test_a_program_that_ends_amid_its_handlers_loses_nothing(
    kafka: Cluster, topic: TopicFactory, tmp_path: Path
) -> None:
    """Nobody stops the process: the main thread ends while four handlers run and eight messages wait."""
    orders, group, done = topic(1), uuid.uuid4().hex, tmp_path / "done"
    done.touch()
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(12):
        producer.produce(orders, b"", b"%d" % (number % 4))
    assert producer.flush(60) == 0
    arguments = [kafka.bootstrap, orders, group, str(done)]
    assert subprocess.run([sys.executable, "-c", ENDS_AMID, *arguments], check=False, timeout=60).returncode == 3
    seen: list[int] = []
    with (
        marshal_py.connect(kafka.bootstrap) as marshal,
        joined(marshal, group, [orders]) as consumer,
        consumer.process(lambda message: seen.append(message.offset)),
    ):
        until(lambda: positions(consumer) == {0: 12}, "the next process has handled the rest")
    assert {*map(int, done.read_text().split()), *seen} == set(range(12))


@pytest.mark.proof
def test_poison_takes_no_memory(kafka: Cluster, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message in twenty fails three times and becomes a letter, for 120,000 messages of 10,000 keys."""
    orders, letters, count = topic(4), topic(1), 120_000
    monkeypatch.setattr(logging.getLogger("marshal_py"), "level", logging.ERROR)  # each letter is a warning
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 5})
    for number in range(count):
        producer.produce(orders, b"x" * 1_000, b"%d" % (number % 9_973), number % 4)
        if number % 10_000 == 0:
            producer.flush(60)
    assert producer.flush(60) == 0

    def handle(message: marshal_py.Message) -> None:
        if message.offset % 20 == 0:
            raise ValueError("poison")

    with (
        marshal_py.connect(kafka.bootstrap) as marshal,
        joined(marshal, uuid.uuid4().hex, [orders], dead_letter_topic=letters, prefetch_bytes=8_000_000) as consumer,
        consumer.process(handle, retry=marshal_py.Retry(first_s=0.01, deliveries=3)) as work,
    ):
        wait_until(lambda: work.stats().finished > count // 3, 300, "a third is handled")
        third = resident_bytes()
        wait_until(lambda: sum(positions(consumer).values()) == count, 300, "all are handled")
        assert resident_bytes() - third < 32 << 20
        assert (work.stats().finished, work.stats().ended, work.lanes()) == (count * 19 // 20, count // 20, [])


@pytest.mark.proof
def test_the_order_per_key_survives_every_change(tmp_path: Path) -> None:
    """Two joins, crashes, step-downs, drops, stops and freezes in turn. The broker is its own: the topic has the same
    name.
    """
    with start_cluster() as kafka:
        assert key_order.run(kafka.bootstrap, tmp_path, 24_000, 12, workers=16, seed=2) == 0


@pytest.mark.proof
def test_the_order_per_key_survives_every_change_in_lists(tmp_path: Path) -> None:
    """As above with lists, in which a key has several messages."""
    with start_cluster() as kafka:
        assert key_order.run(kafka.bootstrap, tmp_path, 12_000, 7, workers=4, batch=20, seed=3) == 0


@pytest.mark.proof
def test_the_order_per_key_survives_the_death_of_worker_processes(tmp_path: Path) -> None:
    """As above, with handlers in processes of their own, of which every other one of a member is killed."""
    with start_cluster() as kafka:
        assert key_order.run(kafka.bootstrap, tmp_path, 6_000, 8, workers=4, executor="processes", seed=4) == 0


@pytest.mark.proof
def test_each_payment_takes_effect_once(tmp_path: Path) -> None:
    """30,000 payments, three processes of 16 workers with an inbox; 20 kills and 4 stops in the midst of their work.

    The broker is its own: the program of the page reads the topic `orders`, which another test has too.
    """
    topic = NewTopic(transaction_kills.TOPIC, transaction_kills.PARTITIONS, 1)
    ends = [int(signal.SIGKILL)] * 20 + [int(signal.SIGTERM)] * 4
    random.Random(1).shuffle(ends)
    with start_cluster() as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})  # it must live until the topic is there
        admin.create_topics([topic])[topic.topic].result(60)
        count = transaction_kills.run(kafka.bootstrap, tmp_path, 30_000, ends, 3, seed=1, name="inbox")
    assert count == (30_000, 0, 0)
