"""Archives of the coordination log in Parquet: incremental, resumable, partitioned by log and day. Must not fold.

An archive's own files say what it holds; nothing else is kept. Each run reads every log, one task per log, from the
first offset that its archive misses up to the log's end at the start of the run. A run that was interrupted may leave
some of its files. The next run starts again at the first missing offset, and readers skip records that are there twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window, functions

from marshal_py.client.values.options import COORDINATION_TOPIC
from marshal_py.errors import InvalidOption, LogGap, TopicRecreated
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark.log.log_tables import TopicSource, root_of
from marshal_py.spark.log.replays import find_root
from marshal_py.spark.stream.options import as_options
from marshal_py.transport.ports import Bounds

DAY: Final = "day"


class Archived(NamedTuple):
    """One log in a run: the archive had the records [begin, first), and has [first, end) now."""

    log: int
    begin: int
    first: int
    end: int


def archive(
    spark: SparkSession, servers: str | Mapping[str, Any], path: str, *, coordination_topic: str = COORDINATION_TOPIC
) -> list[Archived]:
    """Adds new records of the coordination topic to the archive at `path`, which it creates if there is none.

    `servers` is "host:port,..." or librdkafka's settings. Returns one entry per log that has records. Raises
    TopicRecreated if the archive is of another topic, LogGap if the topic has deleted records that the archive lacks,
    InvalidOption, CoordinationError, ClusterUnreachable.
    """
    settings = {"bootstrap.servers": servers} if isinstance(servers, str) else dict(servers)
    source = TopicSource(settings, coordination_topic)
    archived = read_archive(spark, path)
    root = root_of(source)
    if root is None:
        return []
    archived_bounds: dict[int, Bounds] = {}
    if archived is not None:
        _check_same(root, find_root(archived))
        archived_bounds = _bounds_of(archived)
    # Partitions that were added to the topic later are not logs (L3).
    bounds_by_log = {log: bounds for log, bounds in sorted(source.spans().items()) if log < root.partitions}
    runs = [_next_run(log, bounds, archived_bounds.get(log)) for log, bounds in bounds_by_log.items()]
    ranges = {str(run.log): [run.first, run.end] for run in runs if run.first < run.end}
    if ranges:
        options = {**as_options(settings), "coordination_topic": coordination_topic, "ranges": json.dumps(ranges)}
        new_records = spark.read.format("marshal-log").options(**options, raw="true").load()
        write_archive(new_records, path)
    return runs


def write_archive(records: DataFrame, path: str) -> None:
    """Appends raw records to an archive. Within a file they are in the order of their offsets."""
    by_day = records.withColumn(DAY, functions.coalesce(functions.to_date("time"), functions.lit("1970-01-01")))
    # First the order that Spark's writer wants, then offsets; otherwise it would sort again and lose their order.
    by_day.sortWithinPartitions("log", DAY, "offset").write.mode("append").partitionBy("log", DAY).parquet(path)


def read_archive(spark: SparkSession, path: str) -> DataFrame | None:
    """Returns the raw records of an archive, which `replay` can fold; None if there is no archive at `path`.

    They are not sorted, and a record may be there twice. Raises InvalidOption if the folder holds something else.
    """
    try:
        found = spark.read.parquet(path)
        names = set(found.columns)  # over Spark Connect, only this reads the files
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


def _bounds_of(archived: DataFrame) -> dict[int, Bounds]:
    """Returns, for each log, its first archived offset and the end of the offsets that follow without a hole."""
    following = functions.lead("offset").over(Window.partitionBy("log").orderBy("offset"))
    steps = archived.select("log", "offset", following.alias("next"))
    # A hole or the end follows unless the next row has the same offset (archived twice) or the next one.
    stops = functions.when(
        functions.col("next").isNull() | (functions.col("next") > functions.col("offset") + 1), functions.col("offset")
    )
    ends = steps.groupBy("log").agg(functions.min("offset").alias("first"), functions.min(stops).alias("last"))
    return {row["log"]: Bounds(row["first"], row["last"] + 1) for row in ends.collect()}


def _next_run(log: int, in_topic: Bounds, archived: Bounds | None) -> Archived:
    if archived is None:
        return Archived(log, in_topic.first, in_topic.first, in_topic.end)
    if in_topic.end < archived.end:
        raise TopicRecreated(log, f"{archived.end} records in the archive", f"{in_topic.end} in the topic")
    if in_topic.first > archived.end:
        raise LogGap(log, archived.end, in_topic.first)
    return Archived(log, archived.first, archived.end, in_topic.end)
