"""Claimed batches that Spark's own Kafka source reads: what is checked before it is asked, and what it says without it.

How it reads with its package is measured by `python -m bench spark`: the package comes through Maven, which a fresh
machine need not reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from marshal_py.errors import InvalidOption, MissingSpark
from marshal_py.spark import claimed_batches
from marshal_py.spark.jvm import options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.kafka_topic import MakeTopic

PLAIN = {"bootstrap.servers": "a:1", "client.id": "x", "fetch.wait.max.ms": 5}


def test_what_java_is_told_of_a_connection() -> None:
    """Its names of our two; librdkafka's tuning stays behind."""
    shared = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}
    assert options_of(PLAIN, {}) == {"kafka.bootstrap.servers": "a:1", **shared}
    assert options_of(PLAIN, {"kafka.bootstrap.servers": "b:1"}) == {"kafka.bootstrap.servers": "b:1", **shared}
    assert options_of({**PLAIN, "isolation.level": "read_uncommitted"}, {}) == {
        "kafka.bootstrap.servers": "a:1",
        **shared,
        "kafka.isolation.level": "read_uncommitted",
    }


def test_security_is_said_in_javas_words_or_refused() -> None:
    """A job that connects without the password that it was given would fail far away, or worse, succeed."""
    secure = {**PLAIN, "security.protocol": "SASL_SSL", "sasl.password": "hidden"}
    with pytest.raises(InvalidOption, match=r"kafka\.security\.protocol") as refused:
        options_of(secure, {})
    assert "hidden" not in str(refused.value)
    java = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.jaas.config": "..."}
    assert java.items() <= options_of(secure, java).items()


@pytest.mark.parametrize("name", ["startingOffsets", "subscribe", "includeHeaders", "failOnDataLoss"])
def test_ranges_are_not_the_callers_to_choose(name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        options_of(PLAIN, {name: "x"})


def test_without_the_package_its_coordinates_are_named(spark: SparkSession, make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        with pytest.raises(MissingSpark, match=rf"spark-sql-kafka-0-10_2\.13:{spark.version}"):
            claimed_batches(spark, consumer, reader="jvm")
        assert not list(claimed_batches(spark, consumer, wait_s=0)), "the consumer is as it was"
