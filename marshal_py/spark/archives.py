"""Keeping the coordination log as Parquet: incremental, resumable, partitioned by log and day. Folds nothing.

Strategy: what an archive holds is asked of its own files, nothing is kept beside them. Each run reads every log from
where its archive has no hole to the log's end as of the start, one task per log. A run that was cut off may leave part
of its files: the next one begins at the first missing offset again, and readers pass over what stands twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Window, functions

from marshal_py.client.options import COORDINATION_TOPIC
from marshal_py.errors import InvalidOption, LogGap, TopicRecreated
from marshal_py.protocol.records import Genesis
from marshal_py.spark.log_sources import TopicSource, root_of
from marshal_py.spark.options import as_options
from marshal_py.spark.replays import find_root
from marshal_py.transport.ports import Bounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAY: Final = "day"


class Archived(NamedTuple):
    """What a run did to one log: records [first, end) were added; it had [begin, first)."""

    log: int
    begin: int
    first: int
    end: int


def archive(
    spark: SparkSession, servers: str | Mapping[str, Any], path: str, *, coordination_topic: str = COORDINATION_TOPIC
) -> list[Archived]:
    """Adds what is new in the coordination topic to the archive at `path`; makes it if there is none.

    `servers`: "host:port,..." or librdkafka's settings. Returns one entry per log that has records. Raises
    TopicRecreated if the archive is another topic's, LogGap if the topic has lost records that the archive misses,
    InvalidOption, CoordinationError, ClusterUnreachable.
    """
    settings = {"bootstrap.servers": servers} if isinstance(servers, str) else dict(servers)
    origin = TopicSource({"log_level": 0, **settings}, coordination_topic)
    held = read_archive(spark, path)
    root = root_of(origin)
    if root is None:
        return []
    kept: dict[int, Bounds] = {}
    if held is not None:
        _check_same(root, find_root(held))
        kept = _kept(held)
    # Partitions beyond the root's count belong to nobody (L3).
    there = {log: bounds for log, bounds in sorted(origin.spans().items()) if log < root.partitions}
    runs = [_next(log, bounds, kept.get(log)) for log, bounds in there.items()]
    ranges = {str(run.log): [run.first, run.end] for run in runs if run.first < run.end}
    if ranges:
        options = {**as_options(settings), "coordination_topic": coordination_topic, "ranges": json.dumps(ranges)}
        news = spark.read.format("marshal-log").options(**options, raw="true").load()
        write_archive(news, path)
    return runs


def write_archive(records: DataFrame, path: str) -> None:
    """Appends raw records. Within a file they stand in the order of their offsets."""
    by_day = records.withColumn(DAY, functions.coalesce(functions.to_date("time"), functions.lit("1970-01-01")))
    # The order in which Spark's writer wants them, and the offsets behind it: so it does not sort again without them.
    by_day.sortWithinPartitions("log", DAY, "offset").write.mode("append").partitionBy("log", DAY).parquet(path)


def read_archive(spark: SparkSession, path: str) -> DataFrame | None:
    """The raw records of an archive as they stand in its files: not sorted, some perhaps twice. None: there is none.

    `replay` folds them.
    """
    try:
        found = spark.read.parquet(path)
        names = set(found.columns)  # over Spark Connect this is what looks
    except AnalysisException as error:
        if error.getCondition() in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
            return None
        raise
    if not names >= {"log", "offset", "time", "key", "value"}:
        raise InvalidOption("path", path, f"no archive of a coordination topic: it has {', '.join(found.columns)}")
    return found


def _check_same(root: Genesis, archived: Genesis | None) -> None:
    if archived is not None and archived.incarnation != root.incarnation:
        raise TopicRecreated(0, f"{archived.incarnation.hex()} in the archive", root.incarnation.hex())


def _kept(held: DataFrame) -> dict[int, Bounds]:
    """Of each log, the first offset and the one behind the last before any hole."""
    behind = functions.lead("offset").over(Window.partitionBy("log").orderBy("offset"))
    steps = held.select("log", "offset", behind.alias("next"))
    # A hole or the end follows where the next offset is neither the same (archived twice) nor the next.
    stops = functions.when(
        functions.col("next").isNull() | (functions.col("next") > functions.col("offset") + 1), functions.col("offset")
    )
    ends = steps.groupBy("log").agg(functions.min("offset").alias("first"), functions.min(stops).alias("last"))
    return {row["log"]: Bounds(row["first"], row["last"] + 1) for row in ends.collect()}


def _next(log: int, there: Bounds, kept: Bounds | None) -> Archived:
    if kept is None:
        return Archived(log, there.first, there.first, there.end)
    if there.end < kept.end:
        raise TopicRecreated(log, f"{kept.end} records in the archive", f"{there.end} in the topic")
    if there.first > kept.end:
        raise LogGap(log, kept.end, there.first)
    return Archived(log, kept.first, kept.end, there.end)
