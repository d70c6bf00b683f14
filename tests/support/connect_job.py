"""A client of Spark Connect as a process, without a JVM of its own. It does what docs/spark.md says that it can do.

    python -m tests.support.connect_job '{"url": "sc://...", "options": {...}, "folder": "..."}'

Prints one JSON object with the results of each step; the test checks them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable

import marshal_py
from marshal_py.spark import DeltaOutput, claimed_batches, local_session, views
from marshal_sim.cluster.scenario import Options
from marshal_sim.tools.spark_sweeps import runs, sweep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SMALL = Options(clients=2, partitions=2, interval_ms=1_000, intervals=4)


def take_batches(spark: SparkSession, options: dict[str, str], folder: Path) -> list[list[int]]:
    """Runs a job over claimed batches; returns the rows that it wrote."""
    out = str(folder / "batches")
    with (
        marshal_py.connect(
            options["bootstrap.servers"], coordination_topic=options["coordination_topic"], coordination_partitions=2
        ) as marshal,
        marshal.planner(options["group"], [options["topics"]], start="earliest", heartbeat_interval_s=1.0) as planner,
        claimed_batches(spark, planner, max_rows=50, wait_s=0) as batches,
    ):
        for batch in batches:
            batch.check()
            batch.df.write.mode("append").parquet(out)
            batch.commit()
    return places(spark.read.parquet(out))


def stream(spark: SparkSession, options: dict[str, str], folder: Path) -> list[list[int]]:
    """Runs a query whose sink is a function of this program; returns the rows that it wrote."""
    orders = DeltaOutput(str(folder / "orders"))
    query = (
        spark.readStream.format("marshal")
        .options(**options)
        .load()
        .writeStream.foreachBatch(orders.sink(lambda df: df.select("partition", "offset")))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    rows = DeltaTable(orders.uri).to_pyarrow_table()
    return sorted([row["partition"], row["offset"]] for row in rows.to_pylist())


def fold(spark: SparkSession, options: dict[str, str]) -> list[list[Any]]:
    """Folds the log and queries the tables in SQL."""
    live = {name: options[name] for name in ("bootstrap.servers", "coordination_topic")}
    views(spark.read.format("marshal-state").options(**live).load().persist())
    answer = spark.sql(
        "SELECT topic, partition, count(*) FROM marshal_intervals WHERE ended = 'release' "
        "GROUP BY topic, partition ORDER BY topic, partition"
    )
    return [list(row) for row in answer.collect()]


def places(df: DataFrame) -> list[list[int]]:
    return sorted([row.partition, row.offset] for row in df.select("partition", "offset").collect())


def main(url: str, options: dict[str, str], folder: Path) -> None:
    spark = local_session(url)
    found: dict[str, Any] = {"batches": take_batches(spark, options, folder)}
    found["stream"] = stream(spark, {**options, "group": f"{options['group']}-stream"}, folder)
    found["intervals"] = fold(spark, options)
    found["sweep"] = [run.trace_hash for run in runs(sweep(spark, range(4), options=SMALL))]
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(given["url"], given["options"], Path(given["folder"]))
