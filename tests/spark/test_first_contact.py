"""The first job of docs/spark.md on a broker with Kafka's default, which creates topics that clients ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource
from deltalake import DeltaTable

from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS, KEEP_FOREVER
from tests.spark.test_docs import PROGRAMS
from tests.support.guarded import start_guarded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 30


@pytest.mark.timeout(400)
def test_the_first_job_on_a_broker_that_creates_topics_automatically(spark: SparkSession, tmp_path: Path) -> None:
    """The first producer creates the data topic. The job creates `__marshal`, not with the broker's defaults."""
    with start_guarded({"nobody": "comes by the other listener"}) as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for number in range(MESSAGES):
            producer.produce("orders", str(number))
        assert producer.flush(60) == 0
        program = PROGRAMS[0].replace("localhost:9092", broker.bootstrap).replace('"/data/', f'"{tmp_path}/')
        assert "spark.stop()" in program
        exec(program.replace("spark.stop()", "pass"), {})  # the session is that of all tests
        rows = DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        topics = admin.list_topics(timeout=30).topics
        (asked,) = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, "__marshal")]).values()
        config = asked.result(30)
    assert sorted(map(int, rows["value"].to_pylist())) == list(range(MESSAGES))
    assert len(topics["__marshal"].partitions) == COORDINATION_PARTITIONS
    assert {name: config[name].value for name in KEEP_FOREVER} == KEEP_FOREVER
    assert {name for name in topics if not name.startswith("__")} == {"orders"}
