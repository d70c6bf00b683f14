"""Delta Lake and Iceberg: the files that Spark writes are read as rows of the table."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, Schema

from marshal_py.client.values.finished import Source, Span
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.identity import Token
from marshal_py.spark import DeltaOutput, IcebergOutput
from marshal_py.spark.stream.range_reader import source_text

if TYPE_CHECKING:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyspark.sql import DataFrame, SparkSession

AT = datetime(2026, 3, 1, 12, 30, 1, 5000, tzinfo=UTC)
COLUMNS = (
    "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, partition INT, "
    "offset BIGINT, timestamp TIMESTAMP, token STRING, source STRING"
)


def catalog_in(folder: Path) -> SqlCatalog:
    from pyiceberg.catalog.sql import SqlCatalog  # takes a second, and every process of a run imports this file

    return SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/lake")


def batch(spark: SparkSession, offsets: range) -> DataFrame:
    """A batch as the stream passes it."""
    token = str(Token(bytes(16), 5))
    source = source_text("idOfTheTopic", offsets.start, offsets.stop, "shop")
    rows = [(None, b"v", [("name", b"x")] if n % 2 else None, "orders", 0, n, AT, token, source) for n in offsets]
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
    catalog = catalog_in(tmp_path)
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", batch(spark, range(1)).withColumnRenamed("source", "topic_id").toArrow().schema)
    output = IcebergOutput(catalog, "shop.orders")
    for part in (range(3), range(4)):
        output.sink()(batch(spark, part), 0)
    table = catalog.load_table("shop.orders")
    assert plain(table.scan().to_arrow()) == EXPECTED
    assert "commit.retry.num-retries" not in table.properties, "the others' commits are theirs"


def delta(spark: SparkSession, path: Path, sql: str, offset: int, **options: Any) -> None:
    """Writes one message, with the columns that `sql` makes of it."""
    output = DeltaOutput(str(path), **options)
    output.sink(lambda df: df.selectExpr("offset", *sql.split(";")))(batch(spark, range(offset, offset + 1)), 0)


def test_rows_that_do_not_fit_a_delta_table_are_refused_before_the_commit(spark: SparkSession, tmp_path: Path) -> None:
    """Finding 24: another type, CHECK, NOT NULL. The batch can be written once it is right."""
    path = tmp_path / "orders"
    delta(spark, path, "1L AS cents;'a' AS who", 0)
    table = DeltaTable(str(path))
    table.alter.add_constraint({"positive": "cents > 0"})
    version = DeltaTable(str(path)).version()
    for sql, why in (
        ("'12,50 EUR' AS cents;'a' AS who", "column cents"),
        ("1 AS cents;'a' AS who", "column cents"),
        (
            "-1L AS cents;'a' AS who",
            r"1 of them break CHECK positive .*the first at offset 1.* not allowed: .*mend or drop",
        ),
        ("CAST(NULL AS BIGINT) AS cents;'a' AS who", "1 of them break CHECK positive"),
        ("1L AS cents", r"who is not there\. merge_schema=True .* writes NULL where rows lack one"),
        ("1L AS cents;'a' AS who;2 AS more", "more is not in the table. merge_schema=True"),
    ):
        with pytest.raises(InvalidOption, match=why):
            delta(spark, path, sql, 1)
    assert DeltaTable(str(path)).version() == version
    delta(spark, path, "2L AS cents;'b' AS who", 1)
    assert DeltaTable(str(path)).to_pyarrow_table().num_rows == 2
    strict = tmp_path / "strict"
    fields = pa.schema([pa.field("offset", pa.int64()), pa.field("who", pa.string(), nullable=False)])
    DeltaTable.create(str(strict), Schema.from_arrow(fields))
    with pytest.raises(InvalidOption, match="1 of them break NOT NULL of who"):
        delta(spark, strict, "CAST(NULL AS STRING) AS who", 0)
    delta(spark, strict, "CAST('a' AS STRING) AS who", 0)


def test_a_delta_table_takes_new_columns_if_it_is_told_to(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "orders"
    delta(spark, path, "1L AS cents", 0)
    delta(spark, path, "named_struct('a', 1) AS more", 1, merge_schema=True)
    with pytest.raises(InvalidOption, match="column cents"):
        delta(spark, path, "'x' AS cents", 2, merge_schema=True)
    found = sorted(DeltaTable(str(path)).to_pyarrow_table().to_pylist(), key=lambda row: row["offset"])
    assert found == [{"offset": 0, "cents": 1, "more": None}, {"offset": 1, "cents": None, "more": {"a": 1}}]


def test_delta_files_have_statistics(spark: SparkSession, tmp_path: Path) -> None:
    """Finding 53: readers skip files by them."""
    path = tmp_path / "orders"
    output = DeltaOutput(str(path))
    long = "concat(repeat('z', 40), offset) AS name"
    output.sink(lambda df: df.coalesce(1).selectExpr("offset", "timestamp", long, "key", "CAST('nan' AS DOUBLE) AS d"))(
        batch(spark, range(4)), 0
    )
    [one] = pa.table(DeltaTable(str(path)).get_add_actions(flatten=True)).to_pylist()
    assert (one["num_records"], one["min.offset"], one["max.offset"], one["null_count.offset"]) == (4, 0, 3, 0)
    assert one["min.name"] == "z" * 32 < one["max.name"]
    assert one["min.timestamp"].astimezone(UTC) == one["max.timestamp"].astimezone(UTC) == AT
    assert one.get("max.d") is None
    assert DeltaTable(str(path)).to_pyarrow_dataset().to_table(filter=pc.field("offset") > 2).num_rows == 1


def test_a_date_after_the_year_9999_gets_no_statistics(spark: SparkSession, tmp_path: Path) -> None:
    """Python has no such date. The batch failed, and came again."""
    path = tmp_path / "orders"
    delta(spark, path, "DATE'2026-03-01' AS due", 0)
    delta(spark, path, "date_add(DATE'9999-12-31', 1) AS due", 1)
    found = pa.table(DeltaTable(str(path)).get_add_actions(flatten=True)).sort_by("min.offset").to_pylist()
    assert [one["max.due"] for one in found] == [date(2026, 3, 1), None]
    assert DeltaTable(str(path)).to_pyarrow_table().num_rows == 2


def test_a_delta_table_is_partitioned_by_times_of_utc(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever the session's zone is, in which Spark names folders unless it is told another one."""
    path, zone = tmp_path / "orders", "spark.sql.session.timeZone"
    DeltaTable.create(
        str(path),
        Schema.from_arrow(
            pa.schema([pa.field("offset", pa.int64()), pa.field("timestamp", pa.timestamp("us", "UTC"))])
        ),
        partition_by=["timestamp"],
        configuration={"delta.constraints.then": "timestamp = TIMESTAMP'2026-03-01T12:30:01.005Z'"},
        raise_if_key_not_exists=False,
    )
    before = spark.conf.get(zone)
    spark.conf.set(zone, "Asia/Kolkata")
    try:
        DeltaOutput(str(path)).sink(lambda df: df.select("offset", "timestamp"))(batch(spark, range(1)), 0)
    finally:
        spark.conf.set(zone, before or "UTC")
    found = DeltaTable(str(path)).to_pyarrow_table()
    assert [at.astimezone(UTC) for at in found["timestamp"].to_pylist()] == [AT]


def test_rows_that_do_not_fit_an_iceberg_table_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    catalog = catalog_in(tmp_path)
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", pa.schema([("offset", pa.int64()), ("cents", pa.int64())]))

    def write(sql: str, offset: int, merge_schema: bool = False) -> None:
        output = IcebergOutput(catalog, "shop.orders", merge_schema=merge_schema)
        output.sink(lambda df: df.selectExpr("offset", *sql.split(";")))(batch(spark, range(offset, offset + 1)), 0)

    write("1L AS cents", 0)
    for sql, why in (
        ("'12,50 EUR' AS cents", "column cents"),
        ("1L AS cents;'a' AS who", "who is not in the table. merge_schema=True"),
        ("'a' AS who", "cents is not there"),
    ):
        with pytest.raises(InvalidOption, match=why):
            write(sql, 1)
    write("'a' AS who", 1, merge_schema=True)
    found = sorted(catalog.load_table("shop.orders").scan().to_arrow().to_pylist(), key=lambda row: row["offset"])
    assert found == [{"offset": 0, "cents": 1, "who": None}, {"offset": 1, "cents": None, "who": "a"}]


def test_rows_of_spark_are_refused_by_a_partitioned_iceberg_table(tmp_path: Path) -> None:
    """Before anything is written: pyiceberg cannot add files with rows of several partitions. It can write them."""
    catalog = catalog_in(tmp_path)
    catalog.create_namespace("shop")
    fields = pa.schema([pa.field("offset", pa.int64()), pa.field("country", pa.string())])
    with catalog.create_table("shop.orders", fields).update_spec() as update:
        update.add_identity("country")
    output, source = IcebergOutput(catalog, "shop.orders"), Source("orders", 0, "idOfTheTopic")
    with output.begin({source: Span(((0, 2),), str(Token(bytes(16), 5)), "shop")}) as entry:
        with pytest.raises(InvalidOption, match=r"table='shop\.orders' is not allowed: one without partitions"):
            entry.append(SimpleNamespace(sparkSession=None))  # type: ignore[arg-type]  # what a DataFrame has
        entry.append(pa.table({"offset": [0, 1], "country": ["eu", "us"]}))
        entry.commit()
    assert catalog.load_table("shop.orders").scan().to_arrow().num_rows == 2


def test_iceberg_looks_for_nulls_in_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    """Not at what Spark says of a column: nearly all that is decoded may be NULL in its schema, and is not."""
    catalog = catalog_in(tmp_path)
    catalog.create_namespace("shop")
    fields = [pa.field("offset", pa.int64(), nullable=False), pa.field("who", pa.string(), nullable=False)]
    catalog.create_table("shop.orders", pa.schema([*fields, pa.field("list", pa.list_(pa.int32()))]))
    output = IcebergOutput(catalog, "shop.orders", merge_schema=True)

    def write(who: str, offset: int, count: int = 1) -> None:
        some = "IF(offset % 2 = 0, array(1), NULL) AS list"
        output.sink(lambda df: df.selectExpr("offset", f"{who} AS who", some))(
            batch(spark, range(offset, offset + count)), 0
        )

    write("IF(offset < 0, NULL, 'a')", 0)
    with pytest.raises(InvalidOption, match=r"2 of them break NOT NULL of who, the first at offset 2.* shop\.orders"):
        write("IF(offset IN (2, 3), NULL, 'a')", 1, 4)
    with pytest.raises(InvalidOption, match="no column who given"):
        output.sink(lambda df: df.select("offset"))(batch(spark, range(1, 2)), 0)
    write("'b'", 1)
    source = Source("orders", 0, "idOfTheTopic")
    rows = pa.table({"offset": [2, 3], "who": ["c", None], "list": pa.nulls(2, pa.list_(pa.int32()))})
    for count in (2, 1):
        with output.begin({source: Span(((2, 2 + count),), str(Token(bytes(16), 5)), "shop")}) as entry:
            if count == 2:
                with pytest.raises(InvalidOption, match="1 of them break NOT NULL of who"):
                    entry.append(rows)
            else:
                entry.append(rows.slice(0, 1))
                entry.commit()
    found = catalog.load_table("shop.orders").scan().to_arrow().sort_by("offset")
    assert found["who"].to_pylist() == ["a", "b", "c"]
    assert output.finished("orders", 0) == {source: ((0, 3),)}, "what was refused is not in the table"
