"""Claimed batches in a real Spark: everything is read once, the log has positions, uncommitted batches come again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import DataFrameReader

import marshal_py
from marshal_py.errors import BatchRefused, ClaimLost, InvalidOption, PartitionsParked, PositionOutOfRange
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.spark import claimed_batches
from marshal_py.testing import MemoryCluster
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from tests.spark.kafka_topic import MakeTopic, offsets_of
from tests.support.client_fixtures import until as wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_job_writes_everything_once_and_a_second_one_continues(
    spark: SparkSession, make_topic: MakeTopic, tmp_path: Path
) -> None:
    orders, out = make_topic(3), str(tmp_path / "out")
    orders.fill(400)
    tokens = set()
    with orders.connect() as marshal:
        for _ in range(2):
            with orders.planner(marshal) as planner:
                with claimed_batches(spark, planner, max_rows=500, wait_s=0) as batches:
                    for batch in batches:
                        assert sum(r.to - r.start for r in batch.ranges) <= 500
                        batch.check()
                        batch.df.write.mode("append").parquet(out)
                        batch.commit()
                        tokens.add(str(batch.token))
                assert {info.position for info in planner.cached_info().claims.values()} == {400}
    written = spark.read.parquet(out)
    assert offsets_of(written) == sorted(orders.written)
    assert {row.token for row in written.select("token").distinct().collect()} >= tokens
    assert written.where("value IS NULL OR timestamp IS NULL OR topic IS NULL").count() == 0


def test_a_batch_that_is_not_committed_comes_again(spark: SparkSession, make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(10)
    with orders.connect() as marshal, orders.planner(marshal) as planner:
        with claimed_batches(spark, planner, wait_s=0) as batches:
            for _ in batches:
                break
        with claimed_batches(spark, planner, wait_s=0) as batches:
            first = next(iter(batches))
            assert offsets_of(first.df) == [(0, offset) for offset in range(10)]
            with pytest.raises(BatchRefused):
                next(iter(batches))
            first.commit()
            assert list(batches) == []


def test_a_batch_that_spark_does_not_take_is_planned_again(
    spark: SparkSession, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = make_topic(1)
    orders.fill(10)

    def load(_: DataFrameReader) -> None:
        raise RuntimeError("the session is stopped")

    with (
        orders.connect() as marshal,
        orders.planner(marshal) as planner,
        claimed_batches(spark, planner, wait_s=0) as batches,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(DataFrameReader, "load", load)
            with pytest.raises(RuntimeError, match="the session is stopped"):
                next(iter(batches))
        batch = next(iter(batches))
        assert offsets_of(batch.df) == [(0, offset) for offset in range(10)]
        batch.commit()


def test_at_most_once_a_batch_is_never_read_again(spark: SparkSession, make_topic: MakeTopic) -> None:
    """A batch that was granted and not committed is lost; no later batch has its messages."""
    orders = make_topic(1)
    orders.fill(20)
    with orders.connect() as marshal, orders.planner(marshal, delivery="at_most_once") as planner:
        with claimed_batches(spark, planner, max_rows=5, wait_s=0, columns=("offset", "partition")) as batches:
            assert offsets_of(next(iter(batches)).df) == [(0, offset) for offset in range(5)]
        seen = []
        with claimed_batches(spark, planner, wait_s=0) as batches:
            for batch in batches:
                seen += offsets_of(batch.df)
                batch.commit()
    assert seen == [(0, offset) for offset in range(5, 20)]


def test_a_rewind_loses_the_claim_and_the_batch_is_planned_again(spark: SparkSession, make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(12)
    with (
        orders.connect() as marshal,
        orders.planner(marshal) as planner,
        claimed_batches(spark, planner, max_rows=6) as batches,
    ):
        turns = iter(batches)
        next(turns).commit()
        held = next(turns)
        assert offsets_of(held.df)[0] == (0, 6)
        marshal.group(orders.group).set_position(orders.topic, "earliest")
        with pytest.raises(ClaimLost, match=f"{orders.topic}:0"):
            held.commit()
        again = next(turns)
        assert offsets_of(again.df) == [(0, offset) for offset in range(6)]
        assert again.tokens[TopicPartition(orders.topic, 0)] > held.token
        again.commit()


def test_batches_end_at_until(spark: SparkSession, make_topic: MakeTopic) -> None:
    """Also if the group is past the end already. Messages after the end are left for other consumers of the group."""
    orders = make_topic(2)
    orders.fill(10)
    until = json.dumps({orders.topic: {"0": 4, "1": -1}})
    with orders.connect() as marshal, orders.planner(marshal) as planner:
        seen = []
        with claimed_batches(spark, planner, max_rows=5, until=until) as batches:
            for batch in batches:
                seen += [(one.partition, at) for one in batch.ranges for at in range(one.start, one.to)]
                batch.commit()
        assert sorted(seen) == [(0, at) for at in range(4)] + [(1, at) for at in range(10)]
        assert {tp.partition: info.position for tp, info in planner.cached_info().claims.items()} == {0: 4, 1: 10}
        assert list(claimed_batches(spark, planner, until=until)) == []
        with pytest.raises(PositionOutOfRange, match="no position 11"):
            claimed_batches(spark, planner, until=json.dumps({orders.topic: {"0": 11, "1": -1}}))


@pytest.mark.parametrize("numbers", [(0,), (0, 1)])
def test_batches_that_end_fail_if_partitions_are_parked(
    spark: SparkSession, make_topic: MakeTopic, numbers: tuple[int, ...]
) -> None:
    """F6.4: the others are read before. Without an end there is no such error."""
    orders = make_topic(2)
    orders.fill(10)
    with orders.connect() as marshal, orders.planner(marshal) as planner:
        wait_for(lambda: len(planner.cached_info().claims) == 2, "it has both")
        for number in numbers:
            planner._driver.park(TopicPartition(orders.topic, number), "PartitionTruncated", "a test")
        wait_for(lambda: len(planner._driver.parked()) == len(numbers), "they are parked")
        seen: list[tuple[int, int]] = []

        def read_all() -> None:
            with claimed_batches(spark, planner, until="latest") as batches:
                for batch in batches:
                    seen.extend(offsets_of(batch.df))
                    batch.commit()

        with pytest.raises(PartitionsParked) as raised:
            read_all()
        assert list(raised.value.parked) == [f"{orders.topic}:{number}" for number in numbers]
        assert seen == [(1, at) for at in range(10)] * (1 not in numbers)
        with claimed_batches(spark, planner, wait_s=0) as batches:
            assert list(batches) == []


def test_spark_cannot_read_a_log_in_memory(spark: SparkSession) -> None:
    broker = MemoryBroker()
    broker.create_topic("__marshal", 1)
    broker.create_topic("orders", 1)
    with (
        marshal_py.connect(MemoryTransport(broker)) as marshal,
        marshal.planner("g", ["orders"]) as planner,
        pytest.raises(InvalidOption, match=r"bootstrap\.servers"),
    ):
        claimed_batches(spark, planner)


@pytest.mark.parametrize("options", [{"read_timeout_s": s} for s in (0, 0.5, math.nan)] + [{"min_partitions": 1.5}])
def test_a_bad_argument_is_refused_before_a_batch_is_granted(options: dict[str, Any]) -> None:
    """In at-most-once mode the first batch was lost: its ranges were granted, and then Spark refused the option."""
    with MemoryCluster() as cluster, cluster.connect() as marshal:
        cluster.create_topic("orders", 1)
        with marshal.planner("g", ["orders"], delivery="at_most_once") as planner:
            planner.connection = {"bootstrap.servers": "127.0.0.1:1"}
            with pytest.raises(InvalidOption, match=next(iter(options))):
                claimed_batches(None, planner, **options)  # type: ignore[arg-type]  # a session is not needed yet


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"wait_s": -1.0}, {"columns": ["values"]}, {"min_partitions": 0}, {"until": "soon"}]
)
def test_a_bad_argument_is_named(spark: SparkSession, make_topic: MakeTopic, options: dict[str, Any]) -> None:
    orders = make_topic(1)
    with (
        orders.connect() as marshal,
        orders.planner(marshal) as planner,
        pytest.raises(InvalidOption, match=next(iter(options))),
    ):
        claimed_batches(spark, planner, **options)
