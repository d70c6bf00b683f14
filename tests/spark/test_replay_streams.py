"""The fold as a stream: the digests and the rows of a fold in one process, whatever the files, batches and restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from marshal_py.errors import GroupOpaque, InvalidOption, LogGap
from marshal_py.history.tables import TABLES
from marshal_py.spark import replay_stream
from marshal_py.spark.log import columns, replay_streams
from marshal_py.spark.log.replay_streams import PROVIDER, ROCKSDB, fold_more, read_state, write_state
from tests.spark.test_log_tables import dump, live
from tests.spark.test_replay import bag
from tests.support import wire
from tests.support.differential_log import genesis
from tests.support.logs import Raw, folded, groups_of, root, topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["dump", "live"]  # fixtures of another file

PARTITIONS = 4
ROWS = topic(3, PARTITIONS, 300)
WANTED = ("intervals", "gaps", "races", "records", "digests")


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[SparkSession]:
    before = spark.conf.get(PROVIDER)
    spark.conf.set(PROVIDER, ROCKSDB)
    yield spark
    spark.conf.set(PROVIDER, before)


def expected(tables: Sequence[str] = WANTED) -> Counter[tuple[Any, ...]]:
    """The final rows: none that is still open, and digests at checkpoints only."""
    rows = {
        name: [row for row in found if (name in ("records", "races") or getattr(row, "to_offset", 0) is not None)]
        for name, found in folded(ROWS, PARTITIONS, tuple(tables)).items()
    }
    rows["digests"] = [row for row in rows["digests"] if row.offset % 16 == 0]
    batches = columns.batches(rows, tables)
    return bag(pa.Table.from_batches(batches, columns.arrow_schema(columns.columns(tables))))


def write_files(rows: Sequence[Raw], folder: Path, numbers: Sequence[int], count: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        table = pa.Table.from_batches(columns.raw_batches(iter(rows[number::count])))
        pyarrow.parquet.write_table(table, folder / f"{number:03}.parquet")


def run(stream: DataFrame, out: Path) -> None:
    """Runs a query over everything that is there, to its end."""
    query = (
        stream.writeStream.format("parquet")
        .option("path", str(out))
        .option("checkpointLocation", str(out) + "-checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_stream_of_files_in_any_order_and_a_restart(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Records come early and late, over several batches. A second query continues where the first one ended."""
    rows = list(ROWS)
    Random(1).shuffle(rows)
    out = tmp_path / "out"
    schema = columns.spark_schema(columns.raw_fields())
    for numbers in ((2, 0), (3, 1)):
        write_files(rows, tmp_path / "in", numbers, 4)
        files = rocksdb.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        run(replay_stream(files, root(PARTITIONS), WANTED), out)
    found = rocksdb.read.parquet(str(out)).select(*columns.columns(WANTED))
    assert bag(found.toArrow()) == expected()


def test_a_live_topic_as_a_stream(rocksdb: SparkSession, live: dict[str, str], tmp_path: Path) -> None:
    raw = rocksdb.readStream.format("marshal-log").options(**live, raw="true").load()
    run(replay_stream(raw, root(PARTITIONS), ["digests"]), tmp_path / "out")
    found = rocksdb.read.parquet(str(tmp_path / "out"))
    assert bag(found.toArrow()) == expected(["digests"])


def test_a_wrong_stream_is_refused(spark: SparkSession, live: dict[str, str]) -> None:
    raw = spark.readStream.format("marshal-log").options(**live, raw="true").load()
    with pytest.raises(InvalidOption, match=f"{PROVIDER}=.* is not allowed: {ROCKSDB}"):
        replay_stream(raw, root(PARTITIONS))
    with pytest.raises(InvalidOption, match="value is not"):
        replay_stream(raw.drop("value"), root(PARTITIONS))


# --- the state


@pytest.mark.parametrize("seed", range(6))
def test_writing_and_reading_a_state_changes_nothing(seed: int) -> None:
    """Whatever the pieces, in nearly any order, the rows are those of one fold."""
    rng = Random(seed)
    left = [(offset, time_ms, value) for log, offset, time_ms, _, value in ROWS if log == 1]
    found: dict[str, list[Any]] = {name: [] for name in TABLES}
    blob: bytes | None = None
    while left:
        size = rng.choice((1, 5, 16, 90))
        near, left = left[: 2 * size], left[2 * size :]
        rng.shuffle(near)
        some, late = near[:size], near[size:]
        left = sorted([*late, *left])
        state = read_state(blob)
        for name, rows in fold_more(state, 1, root(PARTITIONS), tuple(TABLES), some * 2).take().items():
            found[name] += rows
        blob = write_state(state)
    state = read_state(blob)
    for name, rows in fold_more(state, 1, root(PARTITIONS), tuple(TABLES), ()).finish().items():
        found[name] += rows
    whole = {name: [row for row in rows if row.log == 1] for name, rows in folded(ROWS, PARTITIONS).items()}
    assert found == whole
    assert len(state.values) < 16


def test_a_state_of_another_release_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"state version 9.*use a new checkpoint folder"):
        read_state(b"\x09")


def test_a_missing_record_is_waited_for_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """L8: it fails once too many records wait for the missing one."""
    monkeypatch.setattr(replay_streams, "HELD_MAX", 10)
    state = read_state(None)
    fold_more(state, 0, root(1), ["digests"], [(offset, 0, b"") for offset in range(1, 11)])
    assert len(state.held) == 10
    with pytest.raises(LogGap, match="jumps from offset 0 to 1"):
        fold_more(state, 0, root(1), ["digests"], [(11, 0, b"")])


def test_an_opaque_group_stops_the_stream() -> None:
    """N7: the whole state of its log is unknown."""
    name = groups_of(0, 1)[0]
    newer = wire.envelope(name, 1, b"", record_version=2)
    records = [(0, 0, genesis(1)), (1, 0, newer), *((offset, 0, b"") for offset in range(2, 17))]
    with pytest.raises(GroupOpaque, match=f"{name}.*at offset 1"):
        fold_more(read_state(None), 0, root(1), ["digests"], records)
