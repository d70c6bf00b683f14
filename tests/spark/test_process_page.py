"""docs/process.md: its Spark program rewrites a topic by another key, and keeps the order within each new key."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py import subject_key
from tests.spark.kafka_topic import KafkaTopic
from tests.spark.test_docs import adapted
from tests.support.kafka import Cluster, TopicFactory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (Path(__file__).parents[2] / "docs" / "process.md").read_text(encoding="utf-8")
COUNT = 120
REGIONS, CUSTOMERS = ("eu", "us"), 4


@pytest.mark.timeout(600)
def test_the_program_rewrites_a_topic_by_another_key(
    spark: SparkSession, kafka: Cluster, topic: TopicFactory, tmp_path: Path
) -> None:
    """Each region is in one partition, so the finer key keeps the order; every message comes once, with its source."""
    orders, target = KafkaTopic(kafka, topic, partitions=2), topic(3)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 20})
    subjects = [f"orders.{REGIONS[at % 2]}.{at * 7 % 11 % CUSTOMERS}" for at in range(COUNT)]
    for at, subject in enumerate(subjects):
        producer.produce(orders.topic, str(at), subject, REGIONS.index(subject.split(".")[1]))
    assert producer.flush(30) == 0

    [program] = [one for one in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "local_session" in one]
    program = program.replace('"orders-by-customer",\n', f'"{target}",\n')
    exec(compile(adapted(program, orders, tmp_path), "docs/process.md", "exec"), {})

    with marshal_py.connect(kafka.bootstrap, coordination_topic=orders.log) as marshal:
        found = marshal.topic(target).get(batch=2 * COUNT)
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    places: dict[bytes | None, set[int]] = defaultdict(set)
    key = subject_key("orders.*.*", tokens=(2, 1))
    for message in found:
        at, headers = int(message.value or b""), dict(message.headers)
        assert message.key == key(subjects[at])
        assert headers["subject"] == subjects[at].encode()
        assert headers["source"].startswith(f"{orders.topic}:{REGIONS.index(subjects[at].split('.')[1])}@".encode())
        by_key[message.key].append(at)
        places[message.key].add(message.partition)
    assert sorted(at for of_one in by_key.values() for at in of_one) == list(range(COUNT))
    assert len(by_key) == len(REGIONS) * CUSTOMERS
    assert all(of_one == sorted(of_one) for of_one in by_key.values())
    assert all(len(partitions) == 1 for partitions in places.values())
