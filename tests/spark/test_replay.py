"""Replays on Spark against the fold in one process: the same rows and digests, whatever the order and the tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.errors import PySparkException

from marshal_py.errors import HistoryTruncated, InvalidOption
from marshal_py.history.tables import TABLES
from marshal_py.spark import replay
from marshal_py.spark.log import columns
from marshal_py.spark.log.replays import find_root
from tests.support.logs import Raw, folded, root, topic, with_snapshots

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
ROWS = topic(7, PARTITIONS, 700)


def frame(spark: SparkSession, rows: Sequence[Raw], folder: Path, files: int = 1) -> DataFrame:
    """The rows as raw records, through Parquet files."""
    folder.mkdir()
    for number in range(files):
        part = list(rows[number::files])
        table = pa.Table.from_batches(columns.raw_batches(iter(part)))
        pyarrow.parquet.write_table(table, folder / f"{number:03}.parquet")
    return spark.read.parquet(str(folder))


def bag(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def expected(tables: Sequence[str], rows: Sequence[Raw] = ROWS) -> Counter[tuple[Any, ...]]:
    batches = columns.batches(folded(tuple(rows), PARTITIONS, tuple(tables)), tables)
    return bag(pa.Table.from_batches(batches, columns.arrow_schema(columns.columns(tables))))


@pytest.mark.parametrize("tasks", [1, 4, 16])
def test_the_same_digests_from_shuffled_files(spark: SparkSession, tmp_path: Path, tasks: int) -> None:
    rows = list(ROWS)
    Random(tasks).shuffle(rows)
    found = replay(frame(spark, rows, tmp_path / "in", files=8), ["digests"], tasks=tasks)
    assert bag(found.toArrow()) == expected(["digests"])


def test_every_row_of_every_table(spark: SparkSession, tmp_path: Path) -> None:
    """Also if records are there twice, as in an archive whose last run was interrupted."""
    found = replay(frame(spark, [*ROWS, *ROWS[100:900]], tmp_path / "in", files=3)).toArrow()
    assert bag(found) == expected(tuple(TABLES))
    assert set(found.column("table").to_pylist()) == set(TABLES)


def test_one_table_has_its_own_columns(spark: SparkSession, tmp_path: Path) -> None:
    found = replay(frame(spark, ROWS, tmp_path / "in"), ["intervals"])
    assert found.columns == list(columns.columns(["intervals"]))
    assert dict(found.dtypes)["from_time"] == "timestamp"
    assert bag(found.toArrow()) == expected(["intervals"])


def test_some_logs_need_the_root(spark: SparkSession, tmp_path: Path) -> None:
    some = [row for row in ROWS if row[0] == 2]
    df = frame(spark, some, tmp_path / "in")
    with pytest.raises(InvalidOption, match="no root given: log 0 of the DataFrame holds no Genesis"):
        replay(df, ["digests"])
    assert bag(replay(df, ["digests"], root=root(PARTITIONS)).toArrow()) == expected(["digests"], some)


def test_bad_input_is_named(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark, ROWS[:20], tmp_path / "in")
    with pytest.raises(InvalidOption, match="value is not"):
        replay(df.drop("value"))
    with pytest.raises(InvalidOption, match="tables='claims'"):
        replay(df, ["claims"])
    with pytest.raises(InvalidOption, match="each once"):
        replay(df, ["gaps", "gaps"])
    with pytest.raises(InvalidOption, match="tasks=0"):
        replay(df, tasks=0)


def test_a_log_with_a_hole_fails(spark: SparkSession, tmp_path: Path) -> None:
    """L8: no row is invented for missing records."""
    df = frame(spark, [*ROWS[:5], *ROWS[6:40]], tmp_path / "in")
    with pytest.raises(PySparkException, match=r"LogGap.*coordination partition 0 jumps from offset 5 to 6"):
        replay(df, ["digests"], root=root(PARTITIONS)).collect()


def test_a_log_without_its_beginning_needs_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """N10: a fold that starts in the middle would be wrong."""
    df = frame(spark, ROWS[1:40], tmp_path / "in")
    with pytest.raises(HistoryTruncated, match="coordination partition 0 begins at offset 1"):
        replay(df, ["digests"], root=root(PARTITIONS))


def test_a_confirmed_snapshot_replaces_deleted_records(spark: SparkSession, tmp_path: Path) -> None:
    """N9: in all logs, also in the one with the root."""
    rows = with_snapshots(ROWS, PARTITIONS, at=160)
    left = [row for row in rows if row[1] >= 150 + row[0]]
    df = frame(spark, left, tmp_path / "in", files=2)
    assert find_root(df) == root(PARTITIONS)
    found = bag(replay(df, ["digests", "standings"]).toArrow())
    whole = folded(rows, PARTITIONS, ("digests", "standings"))
    whole["digests"] = [row for row in whole["digests"] if row.offset > 160]
    assert found == bag(pa.Table.from_batches(columns.batches(whole, ["digests", "standings"])))
