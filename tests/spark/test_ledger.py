"""The ledger: repeated rows are left out, older owners are fenced off, half-written batches do not count."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marshal_py.client.values.finished import Source, Span
from marshal_py.errors import InvalidOption, LedgerMoved, WriteFenced
from marshal_py.protocol.wire.identity import Token
from marshal_py.spark import Ledger
from marshal_py.spark.sinks import ledger as module
from marshal_py.spark.sinks.ledger import Entry
from marshal_py.spark.stream.tasks import source_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INCARNATION = bytes(range(16))
ORDERS = Source("orders", 0, "id")


def span(epoch: int, start: int, to: int) -> dict[Source, Span]:
    return {ORDERS: Span(((start, to),), str(Token(INCARNATION, epoch)), "shop")}


def write(entry: Entry, *, commit: bool = True) -> None:
    """Writes the new offsets of the span, as a Python service does."""
    [(source, one)] = entry.spans.items()
    offsets = [n for start, to in one.ranges for n in range(start, to) if entry.is_new(source, n)]
    folder = Path(entry.folder("rows"))
    folder.mkdir(parents=True)
    if offsets:
        pq.write_table(pa.table({"offset": offsets}), folder / "0.parquet")
    if commit:
        entry.commit()


def offsets(path: Path) -> list[int]:
    folders = Ledger(path).folders("rows")
    return sorted(n for folder in folders for n in pq.read_table(folder)["offset"].to_pylist())


def test_rows_that_come_again_are_left_out(tmp_path: Path) -> None:
    """From the same owner and from the next one, in batches with other bounds."""
    for epoch, start, to in ((5, 0, 10), (5, 0, 10), (9, 5, 15), (9, 2, 4), (9, 15, 20)):
        write(Ledger(tmp_path).begin(span(epoch, start, to)))
    assert offsets(tmp_path) == list(range(20))
    assert Ledger(tmp_path).finished() == {ORDERS: ((0, 20),)}


def test_an_older_owner_is_fenced_off(tmp_path: Path) -> None:
    zombie = Ledger(tmp_path).begin(span(5, 0, 10))
    write(Ledger(tmp_path).begin(span(9, 0, 5)))
    with pytest.raises(WriteFenced, match=r"holds rows of orders:0 under token .*0009, and this writer's .*0005"):
        write(zombie)
    with pytest.raises(WriteFenced):
        Ledger(tmp_path).begin(span(5, 5, 10))
    assert offsets(tmp_path) == list(range(5))


def test_a_writer_that_was_overtaken_must_begin_again(tmp_path: Path) -> None:
    """An earlier owner's batch was committed first: the later owner must not write its rows again."""
    late = Ledger(tmp_path).begin(span(9, 0, 15))
    write(Ledger(tmp_path).begin(span(5, 0, 10)))
    with pytest.raises(LedgerMoved):
        write(late)
    write(Ledger(tmp_path).begin(span(9, 0, 15)))
    assert offsets(tmp_path) == list(range(15))


def test_writers_of_other_partitions_do_not_hinder_each_other(tmp_path: Path) -> None:
    mine = Ledger(tmp_path).begin(span(5, 0, 3))
    other = {Source("orders", 1, "id"): Span(((100, 102),), str(Token(INCARNATION, 6)), "shop")}
    write(Ledger(tmp_path).begin(other))
    write(mine)
    assert offsets(tmp_path) == [0, 1, 2, 100, 101]
    names = sorted(file.name for file in (tmp_path / "_marshal").iterdir())
    assert names == ["000000000000.json", "000000000001.json"]


def test_uncommitted_rows_do_not_count(tmp_path: Path) -> None:
    write(Ledger(tmp_path).begin(span(5, 0, 3)), commit=False)
    assert offsets(tmp_path) == []
    assert Ledger(tmp_path).finished() == {}


def test_a_batch_without_rows_moves_the_position(tmp_path: Path) -> None:
    entry = Ledger(tmp_path).begin(span(5, 0, 3))
    entry.folder("rows")
    entry.commit()
    assert Ledger(tmp_path).finished() == {ORDERS: ((0, 3),)}
    assert offsets(tmp_path) == []


def test_an_object_store_is_refused() -> None:
    with pytest.raises(InvalidOption, match="hard link"):
        Ledger("s3://bucket/orders")


def batch(spark: SparkSession, epoch: int, rows: list[tuple[int, int]]) -> DataFrame:
    token = str(Token(INCARNATION, epoch))
    found = [
        ("orders", p, o, token, source_text("id", min(of), max(of) + 1, "shop"))
        for p, o in rows
        for of in [[offset for number, offset in rows if number == p]]
    ]
    return spark.createDataFrame(found, "topic string, partition int, offset bigint, token string, source string")


def test_a_sink_of_foreach_batch_writes_once(spark: SparkSession, tmp_path: Path) -> None:
    ledger, calls = Ledger(tmp_path), list[int]()

    def handle(df: DataFrame, entry: Entry) -> None:
        calls.append(df.count())
        df.write.partitionBy("partition").parquet(entry.folder("rows"))
        df.where("offset > 1").write.parquet(entry.folder("late"))

    sink = ledger.sink(handle)
    rows = [(0, 0), (0, 1), (1, 7)]
    sink(batch(spark, 5, rows), 0)
    sink(batch(spark, 8, [*rows, (0, 2)]), 0)
    sink(batch(spark, 8, []), 1)
    assert calls == [3, 1]
    found = ledger.read(spark, "rows").select("partition", "offset").collect()
    assert sorted((row.partition, row.offset) for row in found) == sorted([*rows, (0, 2)])
    assert [row.offset for row in ledger.read(spark, "late").orderBy("offset").collect()] == [2, 7]
    with pytest.raises(InvalidOption, match="table='other'"):
        ledger.read(spark, "other")


def test_a_fenced_batch_is_dropped_and_the_query_continues(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later owner has written the partition while this batch ran, and handles its rows."""
    ledger = Ledger(tmp_path)
    write(ledger.begin(span(8, 0, 3)))
    sink = ledger.sink(lambda df, entry: df.select("offset").write.parquet(entry.folder("rows")))
    sink(batch(spark, 5, [(0, 2), (0, 9)]), 0)
    assert offsets(tmp_path) == [0, 1, 2]
    sink(batch(spark, 5, [(0, 9), (1, 40)]), 1)
    assert offsets(tmp_path) == [0, 1, 2, 40], "rows that no other owner has written are written"
    assert "orders:0 from 2 to 9: belong to a later owner" in caplog.text


def test_a_sink_that_was_overtaken_begins_again(spark: SparkSession, tmp_path: Path) -> None:
    calls: list[int] = []

    def handle(df: DataFrame, entry: Entry) -> None:
        calls.append(df.count())
        if len(calls) == 1:
            write(Ledger(tmp_path).begin(span(5, 0, 2)))
        df.select("offset").write.parquet(entry.folder("rows"))

    Ledger(tmp_path).sink(handle)(batch(spark, 8, [(0, 0), (0, 1), (0, 2)]), 0)
    assert calls == [3, 1]
    assert offsets(tmp_path) == [0, 1, 2]


def test_an_entry_is_small_and_plain(tmp_path: Path) -> None:
    """Other programs may read it."""
    write(Ledger(tmp_path).begin(span(5, 0, 3)))
    entry: dict[str, Any] = json.loads((tmp_path / "_marshal" / "000000000000.json").read_text())
    assert entry["kept"] == {"orders:0:id": ["0-3", str(Token(INCARNATION, 5)), "shop"]}
    assert list(entry["folders"]) == ["rows"]


def test_a_reader_begins_at_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read 3,000 entries one by one took seconds. A checkpoint has the same contents as its entries."""
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 4)
    ledger = Ledger(tmp_path)
    for number in range(10):
        if number == 6:
            ledger.rewind("orders", 0, 9)
        write(ledger.begin(span(5 + number, 2 * number, 2 * number + 2)))
    state = Ledger(tmp_path)
    for number in range(8):
        (tmp_path / "_marshal" / f"{number:012d}.json").write_text("not read any more")
    state.refresh()
    assert state.known() == ledger.known()
    assert [state.folders("rows"), state._state.rewinds] == [ledger.folders("rows"), ledger._state.rewinds]
    assert [rewind.to for rewind in state._state.rewinds] == [9]


def test_compaction_while_others_read_and_write(spark: SparkSession, tmp_path: Path) -> None:
    """Readers that listed the old folders can read them, earlier writers can commit, vacuum deletes the old folders."""
    ledger = Ledger(tmp_path)
    for start in range(0, 8, 2):
        write(ledger.begin(span(5, start, start + 2)))
    listed = ledger.folders("rows")
    late = Ledger(tmp_path).begin(span(5, 8, 10))
    for folder in listed:
        for path in (Path(folder), *Path(folder).rglob("*")):
            os.utime(path, (0, 0))  # written long ago, and read until now
    assert Ledger(tmp_path).compact(spark, "rows") == 4
    write(late)
    assert offsets(tmp_path) == list(range(10))
    assert len(Ledger(tmp_path).folders("rows")) == 2
    assert sorted(n for folder in listed for n in pq.read_table(folder)["offset"].to_pylist()) == list(range(8))
    assert ledger.vacuum(3600) == 0
    assert ledger.vacuum(0) == 4, "folders that do not count; the others stay"
    assert offsets(tmp_path) == list(range(10))
    assert sorted(row.offset for row in ledger.read(spark, "rows").collect()) == list(range(10))


def test_one_of_two_compactions_succeeds(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    for start in range(0, 6, 2):
        write(ledger.begin(span(5, start, start + 2)))
    load = Ledger._load

    def overtaken(self: Ledger, *args: Any) -> DataFrame:
        monkeypatch.setattr(Ledger, "_load", load)
        assert Ledger(tmp_path).compact(spark, "rows") == 3
        return load(self, *args)

    monkeypatch.setattr(Ledger, "_load", overtaken)
    with pytest.raises(LedgerMoved):
        ledger.compact(spark, "rows")
    assert offsets(tmp_path) == list(range(6))


def test_a_rewind_writes_a_range_again(spark: SparkSession, tmp_path: Path) -> None:
    """The range is there once, with the new contents. A writer that began earlier must begin again."""
    ledger = Ledger(tmp_path)

    def write_as(text: str, epoch: int, rows: list[tuple[int, int]]) -> None:
        def handle(df: DataFrame, entry: Entry) -> None:
            df.selectExpr("topic", "partition", "offset", f"'{text}' AS text").write.parquet(entry.folder("rows"))

        Ledger(tmp_path).sink(handle)(batch(spark, epoch, rows), 0)

    def found() -> list[tuple[int, int, str]]:
        rows = Ledger(tmp_path).read(spark, "rows").collect()
        return sorted((row.partition, row.offset, row.text) for row in rows)

    write_as("old", 5, [(0, 0), (0, 1), (0, 2), (1, 1)])
    late = ledger.begin(span(5, 3, 4))
    ledger.rewind("orders", 0, 1)
    assert found() == [(0, 0, "old"), (1, 1, "old")]
    with pytest.raises(LedgerMoved):
        write(late)
    write_as("new", 9, [(0, 1), (0, 2), (0, 3)])
    expected = [(0, 0, "old"), (0, 1, "new"), (0, 2, "new"), (0, 3, "new"), (1, 1, "old")]
    assert found() == expected
    assert ledger.compact(spark, "rows") == 2
    assert found() == expected
    assert ledger._state.rewinds == (), "the merged folder lacks its rows"
    with pytest.raises(InvalidOption, match=r"to=9 is not allowed: .*written up to 4"):
        ledger.rewind("orders", 0, 9)


def test_a_batch_that_is_left_out_completely_is_logged(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If only the group's positions are moved back, nothing is written, and the log says so."""
    ledger = Ledger(tmp_path)
    write(ledger.begin(span(5, 0, 3)))
    ledger.sink(lambda df, entry: None)(batch(spark, 8, [(0, 1), (0, 2)]), 0)
    assert "batch 0: left out of" in caplog.text
    assert "orders:0 from 1 to 2: are in the table already" in caplog.text
