"""Claimed batches that Spark's own Kafka source reads: the checks before a read, and the error without its package.

`python -m bench spark` reads with the package: it comes through Maven, which is not reachable from every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from marshal_py.errors import InvalidOption, MissingSpark
from marshal_py.spark import claimed_batches
from marshal_py.spark.stream.jvm import options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.kafka_topic import MakeTopic

PLAIN = {"bootstrap.servers": "a:1", "client.id": "x", "fetch.wait.max.ms": 5}


def test_options_of_a_connection_for_javas_client() -> None:
    """Two settings are translated; librdkafka's tuning is left out."""
    shared = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}
    assert options_of(PLAIN, {}) == {"kafka.bootstrap.servers": "a:1", **shared}
    assert options_of(PLAIN, {"kafka.bootstrap.servers": "b:1"}) == {"kafka.bootstrap.servers": "b:1", **shared}
    assert options_of({**PLAIN, "isolation.level": "read_uncommitted"}, {}) == {
        "kafka.bootstrap.servers": "a:1",
        **shared,
        "kafka.isolation.level": "read_uncommitted",
    }


def test_security_settings_must_be_given_for_javas_client() -> None:
    """A job that ignored the password it was given would fail with a puzzling error, or worse, succeed."""
    secure = {**PLAIN, "security.protocol": "SASL_SSL", "sasl.password": "hidden"}
    with pytest.raises(InvalidOption, match=r"kafka\.security\.protocol") as refused:
        options_of(secure, {})
    assert "hidden" not in str(refused.value)
    java = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.jaas.config": "..."}
    assert java.items() <= options_of(secure, java).items()


@pytest.mark.parametrize("name", ["startingOffsets", "subscribe", "includeHeaders", "failOnDataLoss"])
def test_options_that_the_claims_decide_are_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        options_of(PLAIN, {name: "x"})


def test_without_the_package_its_coordinates_are_named(spark: SparkSession, make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    with orders.connect() as marshal, orders.consumer(marshal) as consumer:
        with pytest.raises(MissingSpark, match=rf"spark-sql-kafka-0-10_2\.13:{spark.version}"):
            claimed_batches(spark, consumer, reader="jvm")
        assert not list(claimed_batches(spark, consumer, wait_s=0)), "the consumer is unchanged"
