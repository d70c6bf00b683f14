"""All tables that hold every message once: they leave out rows that are there, fence, and notice other writers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions

from marshal_py.client.values.finished import Ranges, Source, Span
from marshal_py.errors import InvalidOption, TableChanged, WriteFenced
from marshal_py.protocol.wire.identity import Token
from marshal_py.spark import IcebergOutput, write_batch
from marshal_py.spark.stream.range_reader import source_text
from marshal_py.testing import make_batch, make_message
from tests.spark.targets import KINDS, Rows, Target, quietly

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INCARNATION = bytes(range(16))
GROUP = "shop"
OLD, NEW = "idOfTheOldTopic1234567", "idOfTheNewTopic1234567"


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return KINDS[request.param](tmp_path)


def span(
    epoch: int, start: int, to: int, topic_id: str = OLD, partition: int = 0, group: str = GROUP
) -> dict[Source, Span]:
    token = str(Token(INCARNATION, epoch))
    return {Source("orders", partition, topic_id): Span(((start, to),), token, group)}


def write(target: Target, entry: Any) -> None:
    """Writes as a service does."""
    with entry:
        [(source, one)] = entry.spans.items()
        offsets = [offset for start, to in one.ranges for offset in range(start, to)]
        target.store(entry, [(source.partition, o) for o in offsets if entry.is_new(source, o)])
        entry.commit()


def finished(target: Target, partition: int = 0) -> dict[str, Ranges]:
    """What the table says that it has of a partition, by topic id."""
    table = target.table
    kind = type(table).__name__
    if kind == "Database":
        found = table.finished(GROUP, "orders")
    else:
        found = table.finished("orders", partition)
    return {source.topic_id: ranges for source, ranges in found.items() if source.partition == partition}


def rewind(target: Target, to: int, topic_id: str | None = None) -> None:
    """Takes partition 0 back: what the table knows of it, and its rows."""
    table = target.table
    kind = type(table).__name__
    if kind == "Database":
        undo = f'DELETE FROM rows WHERE partition = 0 AND "offset" >= {to}'
        table.rewind(GROUP, "orders", [0], to=to, topic_id=topic_id, undo=lambda cursor: cursor.execute(undo))
    else:
        table.rewind("orders", 0, to, where="true", topic_id=topic_id)  # it has no column topic


def test_rows_that_come_again_are_left_out(target: Target) -> None:
    """From the same owner and from the next one, in batches with other bounds."""
    for epoch, start, to in ((5, 0, 10), (5, 0, 10), (9, 5, 15), (9, 2, 4), (9, 15, 20)):
        write(target, target.table.begin(span(epoch, start, to)))
    assert target.rows() == [(0, offset) for offset in range(20)]


def test_an_older_owner_is_fenced_off(target: Target) -> None:
    write(target, target.table.begin(span(9, 0, 5)))
    with pytest.raises(WriteFenced, match=r"rows of orders:0 under token .*0009, and this writer's .*0005"):
        target.table.begin(span(5, 5, 10))
    write(target, target.table.begin(span(5, 0, 2, partition=1)))
    assert target.rows() == [*((0, offset) for offset in range(5)), (1, 0), (1, 1)]


def test_uncommitted_rows_do_not_count(target: Target) -> None:
    entry = target.table.begin(span(5, 0, 3))
    target.store(entry, [(0, 0), (0, 1), (0, 2)])
    entry.close()
    assert target.rows() == []
    write(target, target.table.begin(span(5, 0, 3)))
    assert len(target.rows()) == 3


def test_a_topic_that_was_created_again_starts_at_zero(target: Target) -> None:
    """Its offsets start at 0 again: the old topic's positions do not apply."""
    write(target, target.table.begin(span(5, 0, 10)))
    write(target, target.table.begin(span(9, 0, 3, NEW)))
    assert target.rows() == sorted([*((0, o) for o in range(10)), *((0, o) for o in range(3))])
    write(target, target.table.begin(span(9, 0, 3, NEW)))
    assert len(target.rows()) == 13
    write(target, target.table.begin(span(9, 5, 12, OLD)))
    assert len(target.rows()) == 15, "the old topic's last messages are messages, too"
    assert finished(target) == {OLD: ((0, 12),), NEW: ((0, 3),)}


def test_a_batch_that_comes_back_after_the_next_one_is_written(target: Target) -> None:
    """Finding 20."""
    for start, to in ((10, 20), (30, 40), (0, 10), (15, 32)):
        write(target, target.table.begin(span(5, start, to)))
    assert target.rows() == [(0, offset) for offset in range(40)]
    assert finished(target) == {OLD: ((0, 40),)}


def test_a_service_that_gives_a_batch_back_and_goes_on_loses_nothing(target: Target) -> None:
    """Finding 20, by the recipe of docs/spark.md: an error, `nak`, the next batch, then the first one again."""
    messages = [make_message(topic="orders", topic_id=OLD, offset=offset) for offset in range(6)]
    batch = make_batch(messages)
    failing = [True]

    def store(found: list[Any], entry: Any) -> None:
        if failing.pop() if failing else False:
            raise ConnectionError
        target.store(entry, [(one.partition, one.offset) for one in found])

    with pytest.raises(ConnectionError):
        write_batch(target.table, batch[:3], store)
    assert write_batch(target.table, batch[3:], store).left_out == ()
    assert write_batch(target.table, batch[:3], store).left_out == ()
    again = write_batch(target.table, batch, store)
    assert again.written == {}
    assert [str(one) for one in again.left_out] == ["orders:0 from 0 to 5: are in the table already"]
    assert target.rows() == [(0, offset) for offset in range(6)]


def test_what_a_later_owner_has_is_left_out_and_reported(target: Target) -> None:
    """Finding 27, for tables: the partition that is still owned is written."""
    later = make_message(topic="orders", topic_id=OLD, offset=0, epoch=9)
    store = lambda found, entry: target.store(entry, [(one.partition, one.offset) for one in found])  # noqa: E731
    write_batch(target.table, make_batch([later]), store)
    mine = [make_message(topic="orders", partition=n, topic_id=OLD, offset=1, epoch=5) for n in (0, 1)]
    report = write_batch(target.table, make_batch(mine), store)
    assert [one.why for one in report.left_out] == ["fenced"]
    assert target.rows() == [(0, 0), (1, 1)]
    with pytest.raises(WriteFenced):
        write_batch(target.table, make_batch([make_message(topic="orders", topic_id=OLD, offset=2, epoch=5)]), store)


def test_two_topics_of_one_name_and_a_second_group_share_a_table(target: Target) -> None:
    """Finding 21: the clusters eu and us. Another group's token says nothing, and a message is there once."""
    for topic_id, start, to in ((OLD, 0, 5), (NEW, 0, 7), (OLD, 3, 9), (NEW, 7, 8)):
        write(target, target.table.begin(span(9, start, to, topic_id)))
    assert len(target.rows()) == 9 + 8
    if type(target.table).__name__ != "Database":  # whose guard table is by group: each has effects of its own
        write(target, target.table.begin(span(3, 0, 10, group="another")))
        assert len(target.rows()) == 10 + 8


def test_the_history_of_a_table_begun_at_the_end_is_written(target: Target) -> None:
    """Finding 22: the group's position is set back, and nothing else has to be done."""
    write(target, target.table.begin(span(5, 500, 510)))
    write(target, target.table.begin(span(9, 0, 300)))
    write(target, target.table.begin(span(9, 300, 510)))
    assert target.rows() == [(0, offset) for offset in range(510)]


def test_a_rewound_table_takes_the_messages_again(target: Target) -> None:
    """A hole, then a rewind into it: what is kept below stays, what is above comes again."""
    for start, to in ((0, 5), (8, 20)):
        write(target, target.table.begin(span(5, start, to)))
    rewind(target, 10)
    assert finished(target) == {OLD: ((0, 5), (8, 10))}
    assert target.rows() == [(0, offset) for offset in (*range(5), 8, 9)]
    write(target, target.table.begin(span(9, 0, 15)))
    assert target.rows() == [(0, offset) for offset in range(15)]
    write(target, target.table.begin(span(9, 0, 3, NEW)))
    if type(target.table).__name__ != "Database":
        with pytest.raises(InvalidOption, match=f"one of {NEW}, {OLD}"):
            rewind(target, 1)
    rewind(target, 100, NEW)
    rewind(target, 15, OLD)
    assert finished(target) == {OLD: ((0, 15),), NEW: ((0, 3),)}


LAKES = ("delta", "iceberg")
OTHERS = {Source("orders", 1, OLD), Source("bills", 0, "idOfTheTopicWithBills1"), Source("orders", 0, NEW)}


def lake_of(kind: str, folder: Path, columns: list[str]) -> tuple[Any, Callable[[], set[tuple[Any, ...]]]]:
    """A table with these columns and ten messages of orders:0 and of each of OTHERS, and a function that reads it."""
    types = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64(), "topic_id": pa.string()}
    table = KINDS[kind](folder).table
    if kind == "iceberg":
        table = IcebergOutput(table.catalog, "sales.others")
        table.catalog.create_table("sales.others", pa.schema([(name, types[name]) for name in columns]))
    for source in sorted({Source("orders", 0, OLD), *OTHERS}):
        with table.begin({source: Span(((0, 10),), str(Token(INCARNATION, 5)), GROUP)}) as entry:
            rows = [{**source._asdict(), "offset": offset} for offset in range(10)]
            entry.append(pa.Table.from_pylist(rows, pa.schema([(name, types[name]) for name in columns])))
            entry.commit()

    def rows_of() -> set[tuple[Any, ...]]:
        there = table.table()
        found = there.scan().to_arrow() if kind == "iceberg" else there.to_pyarrow_table()
        return {tuple(row[name] for name in columns) for row in found.to_pylist()}

    return table, rows_of


@pytest.mark.parametrize("kind", LAKES)
def test_a_lake_is_rewound_by_the_columns_of_its_rows(kind: str, tmp_path: Path) -> None:
    """A condition of the caller's that was too wide deleted messages that still counted as written."""
    columns = ["topic", "partition", "offset", "topic_id"]
    table, rows = lake_of(kind, tmp_path, columns)
    before = rows()
    assert len(before) == 40
    for where in ("partition = 0 AND offset >= 4", "offset >= 4", "true"):
        with pytest.raises(InvalidOption, match=r"topic, partition, offset, topic_id say which are .* Leave it out"):
            table.rewind("orders", 0, 4, where=where, topic_id=OLD)
    assert rows() == before
    source = table.rewind("orders", 0, 4, topic_id=OLD)
    assert rows() == {row for row in before if row[:2] + row[3:] != source or row[2] < 4}
    assert table.finished("orders", 0) == {source: ((0, 4),), Source("orders", 0, NEW): ((0, 10),)}


@pytest.mark.parametrize("kind", LAKES)
@pytest.mark.parametrize("to", [5, 10], ids=["deletes", "matches_no_row"])
def test_what_is_committed_during_a_rewind_fails_it(
    kind: str, to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewind overwrote what the table knows of it, and its rows were written a second time. Also where no row is
    deleted, for which the libraries commit nothing, or what conflicts with nothing."""
    table, rows = lake_of(kind, tmp_path, ["topic", "partition", "offset", "topic_id"])
    rows_from = table._rows_from

    def late(*given: Any) -> str:
        write_later = table.begin(span(6, 20, 25))
        with write_later:
            later = [{"topic": "orders", "partition": 0, "offset": n, "topic_id": OLD} for n in range(20, 25)]
            schema = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
            write_later.append(pa.Table.from_pylist(later, schema.append(pa.field("topic_id", pa.string()))))
            write_later.commit()
        return str(rows_from(*given))

    monkeypatch.setattr(table, "_rows_from", late)
    with pytest.raises(TableChanged):
        table.rewind("orders", 0, to, topic_id=OLD)
    monkeypatch.undo()
    assert table.finished("orders", 0)[Source("orders", 0, OLD)] == ((0, 10), (20, 25))
    assert len(rows()) == 45
    table.rewind("orders", 0, to, topic_id=OLD)
    assert table.finished("orders", 0)[Source("orders", 0, OLD)] == ((0, to),)
    assert len(rows()) == 30 + to


@pytest.mark.parametrize("kind", LAKES)
def test_a_lake_that_lacks_columns_asks_for_a_condition(kind: str, tmp_path: Path) -> None:
    """The columns that it has count all the same."""
    table, rows = lake_of(kind, tmp_path, ["partition", "offset", "topic_id"])
    before = rows()
    with pytest.raises(InvalidOption, match=r"no where given: .* has no column topic: give a condition .* \('true' if"):
        table.rewind("orders", 0, 4, topic_id=OLD)
    assert rows() == before
    table.rewind("orders", 0, 6, where="offset >= 0", topic_id=OLD)
    assert rows() == {row for row in before if row[::2] != (0, OLD) or row[1] < 6}
    table.rewind("orders", 0, 4, where="true", topic_id=OLD)
    assert rows() == {row for row in before if row[::2] != (0, OLD) or row[1] < 4}


@pytest.mark.parametrize("target", [kind for kind in KINDS if kind != "database"], indirect=True)
def test_a_writer_that_was_overtaken_must_begin_again(target: Target) -> None:
    """An earlier owner's batch was committed first: the later owner must not write its rows again."""
    late = target.table.begin(span(9, 0, 15))
    write(target, target.table.begin(span(5, 0, 10)))
    with pytest.raises(TableChanged):
        write(target, late)
    write(target, target.table.begin(span(9, 0, 15)))
    assert target.rows() == [(0, offset) for offset in range(15)]


@pytest.mark.parametrize("target", [kind for kind in KINDS if kind != "database"], indirect=True)
def test_writers_of_other_partitions_do_not_hinder_each_other(target: Target) -> None:
    """Not a database: there writers may wait for each other's rows, with SQLite for the whole file."""
    write(target, target.table.begin(span(3, 0, 1, partition=2)))
    mine = target.table.begin(span(5, 0, 3))
    write(target, target.table.begin(span(6, 100, 102, partition=1)))
    write(target, mine)
    assert target.rows() == [(0, 0), (0, 1), (0, 2), (1, 100), (1, 101), (2, 0)]


def test_compaction_while_others_write_keeps_what_a_delta_table_has(tmp_path: Path) -> None:
    """By Delta's own tools: what the table knows survives them, and a batch that began before can be committed."""
    target = KINDS["delta"](tmp_path)
    for start in range(0, 8, 2):
        write(target, target.table.begin(span(5, start, start + 2)))
    late = target.table.begin(span(5, 8, 10))
    target.store(late, [(0, 8), (0, 9)])
    merged = target.table.table()
    assert merged.optimize.compact()["numFilesRemoved"] == 4
    late.commit()
    merged = target.table.table()
    merged.create_checkpoint()
    assert len(merged.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)) == 4
    write(target, target.table.begin(span(9, 5, 12)))
    assert target.rows() == [(0, offset) for offset in range(12)]
    assert finished(target) == {OLD: ((0, 12),)}


def test_writers_that_create_a_delta_table_at_once_all_write(tmp_path: Path) -> None:
    """One creates it, with its columns. Others failed with delta-rs's own error, or created it a second time."""
    for n in range(5):
        target, begun = KINDS["delta"](tmp_path / str(n)), Barrier(4)

        def create_and_write(partition: int, target: Target = target, begun: Barrier = begun) -> None:
            entry = target.table.begin(span(5, 0, 3, partition=partition))
            begun.wait(60)
            write(target, entry)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(create_and_write, range(4)))
        assert target.rows() == [(partition, offset) for partition in range(4) for offset in range(3)]
        logs = sorted(Path(target.table.uri, "_delta_log").glob("*.json"))
        assert [path.name for path in logs if "metaData" in path.read_text()] == [f"{0:020}.json"]


@pytest.mark.parametrize("target", LAKES, indirect=True)
def test_a_batch_without_rows_moves_the_position(target: Target) -> None:
    """A service that sent all of its messages elsewhere: they must not come again."""
    for start in (0, 3):
        with target.table.begin(span(5, start, start + 3)) as entry:
            target.store(entry, [])
            entry.commit()
    assert (finished(target), target.rows()) == ({OLD: ((0, 6),)}, [])


class Killed(Exception):
    """The driver died here."""


def batch(spark: SparkSession, epoch: int, rows: Rows) -> DataFrame:
    """A batch as the stream passes it."""
    token = str(Token(INCARNATION, epoch))
    offsets = {p: [o for q, o in rows if q == p] for p, _ in rows}
    source = {p: source_text(OLD, min(of), max(of) + 1, GROUP) for p, of in offsets.items()}
    return spark.createDataFrame(
        [("orders", p, o, token, source[p], b"x") for p, o in rows],
        "topic string, partition int, offset bigint, token string, source string, value binary",
    )


def backfill(spark: SparkSession, start: int, to: int) -> DataFrame:
    """As a batch read returns it: no claim, so no token and no group."""
    return (
        batch(spark, 0, [(0, offset) for offset in range(start, to)])
        .drop("token")
        .withColumn("source", functions.lit(source_text(OLD, start, to)))
    )


@pytest.mark.proof
def test_a_backfill_goes_into_the_table_of_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Finding 53: without a token, and each message once all the same."""
    target = KINDS["delta"](tmp_path)
    sink = target.sink(quietly)
    sink(batch(spark, 5, [(0, offset) for offset in range(10, 15)]), 0)
    sink(backfill(spark, 0, 12), 0)
    assert target.rows() == [(0, offset) for offset in range(15)]
    assert sink.left_out == {"there": 2}  # type: ignore[attr-defined]
    assert [str(one) for one in sink.last.left_out] == [  # type: ignore[attr-defined]
        "orders:0 from 10 to 11: are in the table already"
    ]
    sink(batch(spark, 3, [(0, 15)]), 1)
    assert sink.left_out == {"there": 2, "fenced": 1}, "a backfill does not take the fence away"  # type: ignore[attr-defined]
    effects = KINDS["database"](tmp_path)
    with pytest.raises(InvalidOption, match="whose effects these are"):
        effects.sink(quietly)(backfill(spark, 0, 1), 0)


def test_a_fenced_batch_is_dropped_and_the_query_continues(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later owner has written the partition while this batch ran, and handles its rows."""
    target = KINDS["delta"](tmp_path)
    write(target, target.table.begin(span(8, 0, 3)))
    sink = target.sink(quietly)
    sink(batch(spark, 5, [(0, 2), (0, 9)]), 0)
    sink(batch(spark, 5, [(0, 9), (1, 40)]), 1)
    assert target.rows() == [(0, 0), (0, 1), (0, 2), (1, 40)], "rows that no other owner has written are written"
    assert "orders:0 from 2 to 9: belong to a later owner" in caplog.text
    sink(batch(spark, 8, [(0, 1), (0, 2)]), 2)
    assert "batch 2: left out of" in caplog.text
    assert "orders:0 from 1 to 2: are in the table already" in caplog.text


def test_a_sink_that_was_overtaken_begins_again(spark: SparkSession, tmp_path: Path) -> None:
    """An earlier owner commits two of its three rows before it."""
    target, written = KINDS["delta"](tmp_path), list[int]()

    def overtake() -> None:
        written.append(len(target.rows()))
        if len(written) == 1:
            write(target, target.table.begin(span(5, 0, 2)))

    target.sink(overtake)(batch(spark, 8, [(0, 0), (0, 1), (0, 2)]), 0)
    assert written == [0, 2]
    assert target.rows() == [(0, 0), (0, 1), (0, 2)]


def test_rows_that_are_no_messages_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Finding 53: windows, and rows of a claim without its token."""
    sink = KINDS["delta"](tmp_path).sink(quietly)
    with pytest.raises(InvalidOption, match="What groupBy and windows make are no messages"):
        sink(batch(spark, 5, [(0, 0)]).groupBy("partition").count(), 0)
    with pytest.raises(InvalidOption, match="the column token too"):
        sink(batch(spark, 5, [(0, 0)]).drop("token"), 0)


def test_a_sink_leaves_a_cache_that_its_caller_made(spark: SparkSession, tmp_path: Path) -> None:
    target, rows = KINDS["delta"](tmp_path), batch(spark, 5, [(0, 0)])
    for cached in (True, False):
        rows = rows.persist() if cached else rows.unpersist()
        target.sink(quietly)(rows, 0)
        assert rows.storageLevel.useMemory is cached
    assert target.rows() == [(0, 0)]


def test_a_filter_before_the_sink_leaves_no_holes(spark: SparkSession, tmp_path: Path) -> None:
    """The rows that it dropped were read; the table knows the range."""
    target = KINDS["delta"](tmp_path)
    rows = batch(spark, 5, [(0, offset) for offset in range(10)])
    target.sink(quietly)(rows.where("offset % 4 = 1"), 0)
    assert finished(target) == {OLD: ((0, 10),)}


def test_a_sink_that_dies_at_any_point_writes_once(spark: SparkSession, target: Target) -> None:
    """Before its rows count, and after. The batch comes again: the same with its checkpoint, another one without it."""

    def die() -> None:
        raise Killed

    first = [(0, 0), (0, 1), (0, 2), (1, 0)]
    with pytest.raises(Killed):
        target.sink(die)(batch(spark, 5, first), 0)
    assert target.rows() == []
    target.sink(lambda: None)(batch(spark, 5, first), 0)
    assert target.rows() == first, "and then Spark's own commit did not come"
    with pytest.raises(Killed):
        target.sink(die)(batch(spark, 7, [*first, (0, 3), (1, 1)]), 0)
    target.sink(lambda: None)(batch(spark, 7, [*first, (0, 3), (1, 1)]), 0)
    target.sink(lambda: None)(batch(spark, 5, [(0, 3), (0, 4), (2, 0)]), 1)
    assert target.rows() == sorted([*first, (0, 3), (1, 1), (2, 0)]), "an older owner has its own partition alone"
