"""Structured streaming over a Marshal stream, in a real Spark: triggers, sinks, progress, stops, errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka.cimpl import TopicPartition as KafkaPartition
from prometheus_client import CollectorRegistry

import marshal_py
from marshal_py.spark import QueryListener, prometheus_gauges
from marshal_py.spark.stream.listener import Progress
from tests.spark.kafka_topic import KafkaTopic, MakeTopic, offsets_of
from tests.spark.targets import KINDS, quietly
from tests.support.client_fixtures import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

PATIENCE_S = 60


def stream(spark: SparkSession, orders: KafkaTopic, **options: Any) -> DataFrame:
    return spark.readStream.format("marshal").options(**{**orders.options, **options}).load()


def with_kafka_options(spark: SparkSession, orders: KafkaTopic, **options: Any) -> DataFrame:
    """The options of `format("kafka")`, except for the group and what tests need."""
    theirs = {"bootstrap.servers": "kafka.bootstrap.servers", "topics": "subscribe", "start": "startingOffsets"}
    given = {theirs.get(name, name): value for name, value in orders.options.items()}
    return spark.readStream.format("marshal").options(**{**given, **options}).load()


@contextlib.contextmanager
def running(query: StreamingQuery) -> Iterator[StreamingQuery]:
    try:
        yield query
    finally:
        query.stop()


def committed(orders: KafkaTopic) -> dict[int, int]:
    """The group's offsets as Kafka's own tools see them."""
    with contextlib.closing(
        KafkaConsumer({"bootstrap.servers": orders.bootstrap, "group.id": orders.group})
    ) as kafka_consumer:
        tps = [KafkaPartition(orders.topic, number) for number in range(orders.partitions)]
        return {tp.partition: tp.offset for tp in kafka_consumer.committed(tps, timeout=30)}


def test_a_backfill_goes_into_the_delta_table_of_the_query(
    spark: SparkSession, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """Finding 53: the history of a query that began later, by a bounded read and the same sink; each message once."""
    orders = make_topic(2)
    orders.fill(15)
    begin, end = (json.dumps({orders.topic: {"0": at, "1": at}}) for at in (10, 12))
    target = KINDS["delta"](tmp_path)
    sink = target.sink(quietly)
    query = (
        stream(spark, orders, start=begin)
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    with running(query):
        assert query.awaitTermination(PATIENCE_S)
    assert target.rows() == [(number, at) for number in range(2) for at in range(10, 15)]
    given = {"bootstrap.servers": orders.bootstrap, "topics": orders.topic, "until": end}
    for _ in range(2):
        sink(spark.read.format("marshal").options(**given).load(), 0)
        assert target.rows() == sorted(orders.written)
    assert sink.left_out == {"there": 4 + 24}  # type: ignore[attr-defined]


def test_available_now_into_parquet_and_again(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    """The source needs no register call and takes the options of Spark's own. A second run reads what is new. The
    query's progress, the listener, Kafka and the log agree.
    """
    orders, out = make_topic(3), str(tmp_path / "out")
    orders.fill(300)
    seen: list[Progress] = []
    registry = CollectorRegistry()
    gauges = prometheus_gauges(registry)

    def export(progress: Progress) -> None:
        seen.append(progress)
        gauges(progress)

    listener = QueryListener(export)
    spark.streams.addListener(listener)
    try:
        for _ in range(2):
            df = with_kafka_options(spark, orders, maxOffsetsPerTrigger=400, columns="key,value,partition,offset")
            query = (
                df.writeStream.format("parquet")
                .option("path", out)
                .queryName("copy")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(PATIENCE_S)
            assert offsets_of(spark.read.parquet(out)) == sorted(orders.written)
            assert "headers" not in spark.read.parquet(out).columns
            assert orders.positions() == {p: max(o for q, o in orders.written if p == q) + 1 for p in range(3)}
            orders.fill(20, [1])
        until(lambda: sum(progress.rows for progress in seen) == 920, "the listener has heard of every row")
    finally:
        spark.streams.removeListener(listener)
    assert {progress.group for progress in seen} == {orders.group}
    assert seen[0].claims == 3
    assert seen[0].lag == 500
    assert registry.get_sample_value("marshal_spark_claims", {"query": "copy", "group": orders.group}) == 3
    until(lambda: committed(orders) == {0: 300, 1: 320, 2: 300}, "the usual lag tools see the group")


def test_a_stopped_query_releases_at_once(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    """Spark kills the query's process with SIGTERM; the claims do not wait for an eviction."""
    orders = make_topic(2)
    orders.fill(10)
    rows: list[tuple[int, int]] = []
    query = (
        stream(spark, orders)
        .writeStream.foreachBatch(lambda df, _: rows.extend(offsets_of(df)))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    with running(query):
        until(lambda: len(rows) == 20, "the first batch")
        orders.fill(5)
        until(lambda: len(rows) == 30, "the second batch")
        until(lambda: set(orders.positions().values()) == {15}, "an idle trigger acks the last batch")
    with orders.connect() as marshal, orders.consumer(marshal, heartbeat_interval_s=60.0) as successor:
        # An eviction would have to be waited for two minutes.
        until(lambda: len(successor.cached_info().claims) == 2, "the partitions are free")


def test_a_batch_is_acked_when_spark_commits_it(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    """Long before the second trigger, because `local_session` has added a listener."""
    orders = make_topic(2)
    orders.fill(10)
    writer = stream(spark, orders).writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with running(writer.trigger(processingTime="10 minutes").start()) as query:
        until(lambda: query.recentProgress, "batch 0 is done", 2 * PATIENCE_S)
        until(lambda: orders.positions() == {0: 10, 1: 10}, "the group's positions are after it")
        assert [progress.batchId for progress in query.recentProgress] == [0]


def test_a_sink_that_fails_gets_its_batch_again(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    orders = make_topic(1)
    orders.fill(10)
    seen: list[list[tuple[int, int]]] = []

    def sink(df: DataFrame, batch: int) -> None:
        seen.append(offsets_of(df))
        if len(seen) == 2:
            raise ZeroDivisionError("the sink is down")

    def run() -> StreamingQuery:
        writer = stream(spark, orders, max_rows_per_batch=4).writeStream.foreachBatch(sink)
        return writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()

    first = run()
    with pytest.raises(Exception, match="the sink is down"):
        first.awaitTermination(PATIENCE_S)
    assert run().awaitTermination(PATIENCE_S)
    assert [[o for _, o in rows] for rows in seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8, 9]]
    assert orders.positions() == {0: 10}


def test_at_most_once_with_two_queries_in_turn(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    orders, out = make_topic(2), str(tmp_path / "out")
    orders.fill(50)
    for number in range(2):
        query = (
            stream(spark, orders, delivery="at_most_once", max_rows_per_batch=60)
            .writeStream.format("parquet")
            .option("path", out)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(PATIENCE_S)
        assert offsets_of(spark.read.parquet(out)) == sorted(orders.written)
        orders.fill(10 * (1 - number))
    assert orders.positions() == {0: 60, 1: 60}


def test_a_continuous_trigger_is_refused(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    """Spark refuses it, for every source in Python."""
    from pyspark.errors import UnsupportedOperationException

    orders = make_topic(1)
    writer = stream(spark, orders).writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(UnsupportedOperationException, match="marshal does not support continuous processing"):
        writer.trigger(continuous="1 second").start()


def test_a_wrong_option_is_named_at_load(spark: SparkSession, make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    with pytest.raises(Exception, match=r"InvalidOption: delivery='exactly_once' is not allowed: one of at_least_once"):
        stream(spark, orders, delivery="exactly_once")


def test_a_group_of_the_other_mode_ends_the_query(spark: SparkSession, make_topic: MakeTopic, tmp_path: Path) -> None:
    orders = make_topic(1)
    with orders.connect() as marshal, orders.consumer(marshal, delivery="at_most_once"):
        query = (
            stream(spark, orders)
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        with pytest.raises(Exception, match="is at_most_once, this consumer asks for at_least_once"):
            query.awaitTermination(PATIENCE_S)


def test_the_listener_ignores_other_sources() -> None:
    from marshal_py.spark.stream.listener import progress_of

    source = type("Source", (), {"latestOffset": '{"topic": {"0": 5}}'})()
    other = type("Source", (), {"latestOffset": None})()
    assert progress_of(type("Event", (), {"sources": [source, other]})()) == []
    assert marshal_py.__version__
