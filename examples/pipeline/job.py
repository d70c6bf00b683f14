"""The Spark side: the same work as the service in the same group, and hourly counts in a group of their own.

    python -m examples.pipeline.job SERVERS TOPIC GROUP FOLDER

Runs until the file FOLDER/stop exists; then it finishes the messages that have come and writes FOLDER/report.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import functions as F

from examples.pipeline.orders import parse
from examples.pipeline.service import bury, orders_table
from marshal_py.spark import local_session
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_PER_BATCH = 1_500
PARSED = (
    "topic string, partition int, offset bigint, token string, source string, value binary, customer string, "
    "product string, cents bigint, event_time timestamp, problem string"
)


def main(servers: str, topic: str, group: str, folder: str) -> None:
    spark = local_session("local[2]", name="orders", settings={"spark.local.dir": f"{folder}/local"})
    spark.sparkContext.setLogLevel("ERROR")
    orders = orders_table(folder)
    store = (
        parsed(stream(spark, servers, topic, group))
        .writeStream.foreachBatch(orders.sink(storing(KafkaProducer(KafkaTransport(servers, 30.0)))))
        .option("checkpointLocation", f"{folder}/checkpoints/store")
        .queryName("store")
        .start()
    )
    count = (
        hourly(parsed(stream(spark, servers, topic, f"{group}-hourly")))
        .writeStream.format("parquet")
        .option("path", f"{folder}/hourly")
        .partitionBy("day")
        .outputMode("append")
        .option("checkpointLocation", f"{folder}/checkpoints/hourly")
        .queryName("hourly")
        .start()
    )
    while not Path(folder, "stop").exists():
        for query in (store, count):
            if query.exception() is not None:
                raise SystemExit(f"query {query.name} ended: {query.exception()}")
        time.sleep(0.2)
    count.processAllAvailable()  # also the hours that the newest watermark closes
    for query in (store, count):
        query.stop()
    report = Path(folder, "report.json")
    report.with_suffix(".new").write_text(json.dumps(figures(spark, folder)))
    report.with_suffix(".new").rename(report)
    spark.stop()


def stream(spark: SparkSession, servers: str, topic: str, group: str) -> DataFrame:
    options = {
        "bootstrap.servers": servers,
        "topics": topic,
        "group": group,
        "start": "earliest",
        "heartbeat_interval_s": "1",
        "max_rows_per_batch": str(ROWS_PER_BATCH),
    }
    return spark.readStream.format("marshal").options(**options).load()


def parsed(df: DataFrame) -> DataFrame:
    """The service's own `parse`, on the executors."""
    return df.select("topic", "partition", "offset", "token", "source", "value").mapInArrow(parse_batches, PARSED)


def parse_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        orders = [parse(value) for value in batch["value"].to_pylist()]
        times = pa.array([order.event_ms * 1000 for order in orders], pa.int64()).cast(pa.timestamp("us", "UTC"))
        columns = [
            *batch.columns,
            [o.customer for o in orders],
            [o.product for o in orders],
            pa.array([o.cents for o in orders], pa.int64()),
            times,
            [o.problem for o in orders],
        ]
        names = [*batch.schema.names, "customer", "product", "cents", "event_time", "problem"]
        yield pa.RecordBatch.from_arrays([pa.array(c) if isinstance(c, list) else c for c in columns], names)


def storing(sink: KafkaProducer) -> Callable[[DataFrame], DataFrame]:
    """Returns a function that sends malformed orders to the dead-letter topic, and returns the rows for the table."""

    def change(df: DataFrame) -> DataFrame:
        for row in df.where("problem <> ''").select("topic", "partition", "offset", "value", "problem").collect():
            bury(sink, row.topic, row.partition, row.offset, bytes(row.value), row.problem)
        sink.flush()
        good = df.where("problem = ''").drop("token", "source", "value", "problem")
        return good.withColumn("day", F.date_format("event_time", "yyyy-MM-dd"))

    return change


def hourly(df: DataFrame) -> DataFrame:
    """Orders and turnover per product and hour of event time. Orders that are over an hour late are not counted."""
    return (
        df.where("problem = ''")
        .withWatermark("event_time", "1 hour")
        .dropDuplicatesWithinWatermark(["partition", "offset"])
        .groupBy(F.window("event_time", "1 hour"), "product")
        .agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
        .select("window.start", "product", "orders", "cents", F.date_format("window.start", "yyyy-MM-dd").alias("day"))
    )


def figures(spark: SparkSession, folder: str) -> dict[str, Any]:
    """The contents of the tables, which __main__.py compares with the topic."""
    rows = DeltaTable(orders_table(folder).uri).to_pyarrow_table(columns=["partition", "offset"])
    stored = Counter(zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True))
    hours = spark.read.parquet(f"{folder}/hourly").select(F.unix_millis("start").alias("ms"), "product", "orders")
    days = spark.read.parquet(f"{folder}/hourly").select("day").distinct().count()
    return {
        "stored": [[*place, count] for place, count in stored.items()],
        "days": days,
        "hours": [[row.ms, row["product"], row.orders] for row in hours.collect()],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
