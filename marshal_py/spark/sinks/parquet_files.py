"""Parquet files that Spark writes below a table, for a later commit that names them. Must not write a table's log.

Executors write the files, through Spark's own file systems; the driver lists them, also through Spark, in one job that
reads them back: for their statistics, and for the rules that their rows must keep. Files that no commit names are never
read, and the table's own vacuum deletes them.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote

from marshal_py.errors import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_TIMES: Final = "spark.sql.parquet.outputTimestampType"
_TIMES_DEFAULT: Final = "INT96"
_INDEXED_MAX: Final = 32  # columns with statistics, as in Delta; more make the table's log large
_PREFIX: Final = 32  # characters of a text in statistics, as in Delta
_HIGHEST: Final = "\U0010ffff"  # a text with it is above all that begin like it


Broken = tuple[int, int | None]  # how many rows break a rule, and the lowest offset among them, if it is known


class DataFile(NamedTuple):
    """One Parquet file: `path` in the table's folder, `size` in bytes, `values` of the partition columns, Delta's
    `stats`, and by rule the rows that are `broken`."""

    path: str
    size: int
    rows: int
    values: dict[str, str | None]
    stats: dict[str, Any]
    broken: dict[str, Broken]


def spark_uri_of(uri: str) -> str:
    """Returns an S3 address as Hadoop's file system writes it. Other addresses are returned unchanged."""
    return "s3a" + uri[2:] if uri.startswith("s3://") else uri


def not_null(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Returns the rows with these columns as required ones. Spark believes such a schema and looks at no row, so the
    tasks look, and fail."""
    from pyspark.sql import types

    def checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in names:
                if batch.column(name).null_count:
                    raise ValueError(f"NULL in column {name}, which must not have it")
            yield batch

    fields = [
        types.StructField(one.name, one.dataType, one.nullable and one.name not in names) for one in df.schema.fields
    ]
    return df.mapInArrow(checked, types.StructType(fields))


def nulls_in(df: DataFrame, names: Sequence[str]) -> dict[str, Broken]:
    """Returns for each of these columns how many rows have NULL in it, and the lowest offset; none if no row has."""
    from pyspark.sql import functions as F

    wanted = [one for name in names for one in _breaks(df, F.col(f"`{name}`").isNotNull())]
    (found,) = df.agg(*(one.alias(f"_{at}") for at, one in enumerate(wanted))).collect()
    counted = zip(names, found[0::2], found[1::2], strict=True)
    return {name: (count, first) for name, count, first in counted if count}


def _breaks(df: DataFrame, keeps: Column) -> list[Column]:
    """Returns what Spark computes of rows for which `keeps` is not true: how many there are, and the lowest offset."""
    from pyspark.sql import functions as F

    breaks = ~F.coalesce(keeps, F.lit(False))
    offset = F.col("offset") if "offset" in df.columns else F.lit(None).cast("long")
    return [F.count_if(breaks), F.min(F.when(breaks, offset))]


def refuse(name: str, rule: str, broken: Sequence[Broken]) -> NoReturn:
    """Raises InvalidOption for rows that break a rule of the table `name`. `broken`: one or more counts of them."""
    first = min((offset for _, offset in broken if offset is not None), default=None)
    where = "" if first is None else f", the first at offset {first}"
    way = f"rows that keep the rules of the table {name}: mend or drop the others in the function that the sink has, "
    way += "or send them to a topic of their own; or take the rule from the table"
    raise InvalidOption("rows", f"{sum(count for count, _ in broken)} of them break {rule}{where}", way)


def write_files(
    df: DataFrame, root: str, partition_by: Sequence[str], rules: Mapping[str, str] | None = None
) -> list[DataFile]:
    """Writes the rows into a new folder below `root`; returns the files that have rows. `rules`: SQL conditions by name
    that must hold."""
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
    for rule in given.values():
        wanted += _breaks(df, F.expr(rule))
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
    """Returns Delta's statistics of a file from the count, least and greatest of each column; none for what JSON cannot
    hold (NaN, infinity, far years)."""
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
