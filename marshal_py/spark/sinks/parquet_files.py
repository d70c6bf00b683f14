"""Parquet files that Spark writes below a table, for a later commit that names them. Must not write a table's log.

Executors write the files, through Spark's own file systems; the driver lists them, also through Spark, in one job that
reads them back: for their statistics, and for the rules that their rows must keep. Files that no commit names are never
read, and the table's own vacuum deletes them.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_TIMES: Final = "spark.sql.parquet.outputTimestampType"
_TIMES_DEFAULT: Final = "INT96"
_INDEXED_MAX: Final = 32  # columns with statistics, as in Delta; more make the table's log large
_PREFIX: Final = 32  # characters of a text in statistics, as in Delta
_HIGHEST: Final = "\U0010ffff"  # a text with it is above all that begin like it


class DataFile(NamedTuple):
    """Describes one Parquet file. `path` is relative to the table's folder, `size` is in bytes.

    `values`: the value of each partition column. `stats`: statistics of Delta's form. `broken`: how many rows break
    each rule, and the lowest offset among them, None without a column offset; rules that all keep are not in it.
    """

    path: str
    size: int
    rows: int
    values: dict[str, str | None]
    stats: dict[str, Any]
    broken: dict[str, tuple[int, int | None]]


def spark_uri_of(uri: str) -> str:
    """Returns an S3 address as Hadoop's file system writes it. Other addresses are returned unchanged."""
    return "s3a" + uri[2:] if uri.startswith("s3://") else uri


def write_files(
    df: DataFrame, root: str, partition_by: Sequence[str], rules: Mapping[str, str] | None = None
) -> list[DataFile]:
    """Writes the rows into a new folder below `root`; returns the files that have rows.

    `rules`: by their names, conditions in Spark's SQL that must be true for every row.
    """
    from pyspark.sql import functions as F

    name = f"marshal-{uuid.uuid4().hex}"
    folder = f"{root.rstrip('/')}/{name}"
    conf = df.sparkSession.conf
    before = conf.get(_TIMES)
    try:
        conf.set(_TIMES, "TIMESTAMP_MICROS")  # neither table format has Spark's default
        writer = df.write
        (writer.partitionBy(*partition_by) if partition_by else writer).parquet(folder)
    finally:
        conf.set(_TIMES, before or _TIMES_DEFAULT)
    given, columns = dict(rules or {}), _indexed(df, partition_by)
    wanted = [F.count("*")]
    offset = F.col("offset") if "offset" in df.columns else F.lit(None).cast("long")
    for rule in given.values():
        breaks = ~F.coalesce(F.expr(rule), F.lit(False))
        wanted += [F.count_if(breaks), F.min(F.when(breaks, offset))]
    for column, (shown, _) in columns.items():
        value = shown(F.col(f"`{column}`"))
        wanted += [F.count(value), F.min(value), F.max(value)]
    found = (
        df.sparkSession.read.schema(df.schema)
        .parquet(folder)
        .groupBy("_metadata.file_path", "_metadata.file_size")
        .agg(*(one.alias(f"_{at}") for at, one in enumerate(wanted)))
        .collect()
    )
    files = []
    for path, size, rows, *rest in found:
        below = unquote(path[path.index(name) :])  # `path` is a URL; this is the file's name
        parts = [part.partition("=") for part in below.split("/")[1:-1]]
        values = {unquote(key): None if value == _NULL else unquote(value) for key, _, value in parts}
        counts = zip(given, rest[0::2], rest[1::2], strict=False)
        broken = {rule: (count, first) for rule, count, first in counts if count}
        stats = _stats(rows, columns, rest[2 * len(given) :])
        files.append(DataFile(below, size, rows, values, stats, broken))
    return files


Indexed = tuple["Callable[[Column], Column]", Callable[[Any], Any]]


def _indexed(df: DataFrame, partition_by: Sequence[str]) -> dict[str, Indexed]:
    """Returns which columns get statistics, and how: what Spark computes of a value, and how JSON has the result."""
    from pyspark.sql import functions as F
    from pyspark.sql import types

    def same(value: Any) -> Any:
        return value

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    kinds: list[tuple[tuple[type[types.DataType], ...], Indexed]] = [
        ((types.ByteType, types.ShortType, types.IntegerType, types.LongType), (same, same)),
        ((types.FloatType, types.DoubleType), (same, finite)),
        ((types.StringType,), (same, same)),
        ((types.DateType,), (same, lambda value: value.isoformat())),
        ((types.TimestampType,), (F.unix_micros, _time)),
    ]
    found: dict[str, Indexed] = {}
    for field in df.schema.fields:
        how = next((how for classes, how in kinds if type(field.dataType) in classes), None)
        if how is not None and field.name not in partition_by and len(found) < _INDEXED_MAX:
            found[field.name] = how
    return found


def _time(micros: int) -> str:
    return datetime.fromtimestamp(micros // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{micros % 1_000_000:06}Z"


def _stats(rows: int, columns: Mapping[str, Indexed], found: Sequence[Any]) -> dict[str, Any]:
    """Returns Delta's statistics of one file. `found`: for each column the count, the least and the greatest value.

    A column whose bounds JSON cannot hold has none: NaN, infinity, years beyond Python's.
    """
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at, (name, (_, shown)) in enumerate(columns.items()):
        count, low, high = found[3 * at : 3 * at + 3]
        nulls[name] = rows - count
        if low is None:
            continue
        try:
            bounds = shown(low), shown(high)
        except (ValueError, OverflowError, OSError):
            continue
        if None in bounds:
            continue
        if isinstance(low, str):
            bounds = low[:_PREFIX], high if len(high) <= _PREFIX else high[:_PREFIX] + _HIGHEST
        least[name], greatest[name] = bounds
    return {"numRecords": rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
