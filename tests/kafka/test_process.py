"""`Consumer.process` on Apache Kafka: the order per key while members join, leave, are killed and frozen."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support import key_order, transaction_kills
from tests.support.kafka import Cluster, start_cluster


def test_the_order_per_key_survives_a_join_and_a_kill(kafka: Cluster, tmp_path: Path) -> None:
    """Three processes of 16 workers, and one more."""
    assert key_order.run(kafka.bootstrap, tmp_path, 2_400, 2, workers=16, seed=2) == 0


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
