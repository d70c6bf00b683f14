"""Parquet files that Spark writes below a table, for a later commit that names them. Must not write a table's log.

Executors write the files, through Spark's own file systems; the driver lists them, also through Spark. Files that no
commit names are never read, and the table's own vacuum deletes them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_TIMES: Final = "spark.sql.parquet.outputTimestampType"
_TIMES_DEFAULT: Final = "INT96"


class DataFile(NamedTuple):
    """Describes one Parquet file. `path` is relative to the table's folder, `size` is in bytes.

    `values`: the value of each partition column.
    """

    path: str
    size: int
    rows: int
    values: dict[str, str | None]


def spark_uri_of(uri: str) -> str:
    """Returns an S3 address as Hadoop's file system writes it. Other addresses are returned unchanged."""
    return "s3a" + uri[2:] if uri.startswith("s3://") else uri


def write_files(df: DataFrame, root: str, partition_by: Sequence[str]) -> list[DataFile]:
    """Writes the rows into a new folder below `root`; returns the files that have rows."""
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
    found = (
        df.sparkSession.read.schema(df.schema)
        .option("recursiveFileLookup", "true")
        .parquet(folder)
        .groupBy("_metadata.file_path", "_metadata.file_size")
        .count()
        .collect()
    )
    files = []
    for path, size, rows in found:
        below = unquote(path[path.index(name) :])  # `path` is a URL; this is the file's name
        parts = [part.partition("=") for part in below.split("/")[1:-1]]
        values = {unquote(key): None if value == _NULL else unquote(value) for key, _, value in parts}
        files.append(DataFile(below, size, rows, values))
    return files
