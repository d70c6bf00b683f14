"""Delta Lake and Iceberg: the files that Spark writes are read as rows of the table."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from marshal_py.errors import InvalidOption
from marshal_py.protocol.identity import Token
from marshal_py.spark import DeltaOutput, IcebergOutput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AT = datetime(2026, 3, 1, 12, 30, 1, 5000, tzinfo=UTC)
COLUMNS = (
    "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, partition INT, "
    "offset BIGINT, timestamp TIMESTAMP, token STRING"
)


def batch(spark: SparkSession, offsets: range) -> DataFrame:
    """A batch as the stream passes it."""
    token = str(Token(bytes(16), 5))
    rows = [(None, b"v", [("name", b"x")] if n % 2 else None, "orders", 0, n, AT, token) for n in offsets]
    return spark.createDataFrame(rows, COLUMNS)


def plain(table: Any) -> list[tuple[Any, ...]]:
    rows = sorted(table.to_pylist(), key=lambda row: row["offset"])  # pyiceberg reads no list as an empty one
    return [
        (row["key"], bytes(row["value"]), row["headers"] or None, row["timestamp"].astimezone(UTC), row["offset"])
        for row in rows
    ]


EXPECTED = [(None, b"v", [{"key": "name", "value": b"x"}] if n % 2 else None, AT, n) for n in range(4)]


def test_delta_has_the_columns_of_the_source(spark: SparkSession, tmp_path: Path) -> None:
    output = DeltaOutput(str(tmp_path / "orders"))
    for part in (range(3), range(4)):
        output.sink()(batch(spark, part), 0)
    assert plain(DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()) == EXPECTED
    with pytest.raises(InvalidOption, match=r"the columns of .*key, value"):
        output.sink(lambda df: df.select("key"))(batch(spark, range(9)), 0)


def test_a_partitioned_delta_table(spark: SparkSession, tmp_path: Path) -> None:
    """With values that must be escaped in a folder's name."""
    odd = {0: "2026-03-01", 1: "a b", 2: "x:y=%z", 3: None}

    def named(df: DataFrame) -> DataFrame:
        names = df.sparkSession.createDataFrame(list(odd.items()), "offset BIGINT, day STRING")
        return df.join(names, "offset").select("offset", "day")

    output = DeltaOutput(str(tmp_path / "orders"), partition_by=("day",))
    output.sink(named)(batch(spark, range(4)), 0)
    table = DeltaTable(str(tmp_path / "orders"))
    found = table.to_pyarrow_table().to_pylist()
    assert {row["offset"]: row["day"] for row in found} == odd
    assert table.metadata().partition_columns == ["day"]
    assert sorted(table.get_add_actions(flatten=True)["num_records"].to_pylist()) == [1, 1, 1, 1]


def test_iceberg_has_the_columns_of_the_source(spark: SparkSession, tmp_path: Path) -> None:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/lake")
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", batch(spark, range(1)).toArrow().schema)
    output = IcebergOutput(catalog, "shop.orders")
    for part in (range(3), range(4)):
        output.sink()(batch(spark, part), 0)
    table = catalog.load_table("shop.orders")
    assert plain(table.scan().to_arrow()) == EXPECTED
    assert "commit.retry.num-retries" not in table.properties, "the others' commits are theirs"
