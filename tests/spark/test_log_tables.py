"""The coordination log as tables, from a live topic and a dump: the rows of a fold in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from marshal_py.errors import HistoryTruncated
from marshal_py.spark import log_tables
from marshal_py.spark.log_tables import STATE_TABLES
from marshal_py.transport.dump import Header, Span, Writer
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import LogRecord
from marshal_py.transport.producer import KafkaProducer
from tests.support.differential_log import genesis
from tests.support.kafka import Cluster, TopicFactory
from tests.support.logs import Raw, folded, groups_of, root, topic, with_snapshots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 4
RECORDS = 300
ROWS = topic(3, PARTITIONS, RECORDS)
DEADLINE_S = 60.0
ANOTHER = genesis(PARTITIONS, bytes(16))


def write_dump(path: Path, rows: Sequence[Raw]) -> str:
    spans = tuple(
        Span(log, min(offsets), max(offsets) + 1)
        for log in range(PARTITIONS)
        if (offsets := [row[1] for row in rows if row[0] == log])
    )
    incarnation = root(PARTITIONS).incarnation.hex()
    header = Header(topic="__marshal", incarnation=incarnation, partitions=PARTITIONS, logs=spans)
    with path.open("wb") as out:
        writer = Writer(out, header)
        for log, offset, time_ms, key, value in rows:
            writer.write(LogRecord(log, offset, value, time_ms, key))
        writer.finish()
    return str(path)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dump(tmp_path_factory.mktemp("dumps") / "all.dump", ROWS)


@pytest.fixture
def live(kafka: Cluster, topic: TopicFactory, dump: str) -> dict[str, str]:
    """Options of a topic that holds the same."""
    name = topic(PARTITIONS, config={"retention.ms": "-1"})  # L1; the records are old, and Kafka would delete them
    transport = KafkaTransport(kafka.bootstrap, DEADLINE_S)
    sink = KafkaProducer(transport)
    for log, _, time_ms, key, value in ROWS:
        sink.write(name, value, key, partition=log, timestamp_ms=time_ms)
    sink.flush(DEADLINE_S)
    sink.close()
    return {"bootstrap.servers": kafka.bootstrap, "coordination_topic": name}


def read(spark: SparkSession, form: str, options: dict[str, str], **more: str) -> pa.Table:
    return spark.read.format(form).options(**options, **more).load().toArrow()


def bag(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def expected(tables: Sequence[str], **keep: Any) -> Any:
    found = folded(ROWS, PARTITIONS, tuple(tables))
    rows = {
        name: [row for row in rows if all(getattr(row, k) == v for k, v in keep.items())]
        for name, rows in found.items()
    }
    return bag(
        pa.Table.from_batches(log_tables.batches(rows, tables), log_tables.arrow_schema(log_tables.columns(tables)))
    )


# --- where it comes from


def test_a_live_topic(spark: SparkSession, live: dict[str, str]) -> None:
    assert bag(read(spark, "marshal-log", live)) == expected(["records"])
    assert bag(read(spark, "marshal-state", live)) == expected(STATE_TABLES)


def test_a_dump(spark: SparkSession, dump: str) -> None:
    assert bag(read(spark, "marshal-log", {"path": dump})) == expected(["records"])
    table = spark.read.format("marshal-state").option("table", "intervals").load(dump)
    assert table.rdd.getNumPartitions() == PARTITIONS, "one task per log"
    assert bag(table.toArrow()) == expected(["intervals"])


# --- what is asked


def test_one_group(spark: SparkSession, dump: str) -> None:
    name = groups_of(2, PARTITIONS)[1]
    assert bag(read(spark, "marshal-log", {"path": dump}, group=name)) == expected(["records"], group=name)
    assert bag(read(spark, "marshal-state", {"path": dump}, group=name)) == expected(STATE_TABLES, group=name)


def test_a_range_by_offset_and_by_time(spark: SparkSession, dump: str) -> None:
    found = read(spark, "marshal-log", {"path": dump}, since="20", until="49")
    assert set(found.column("offset").to_pylist()) == set(range(20, 50))
    assert bag(found) <= expected(["records"])
    since, until = ("2025-11-21T06:40:00", "2025-11-21T08:00:00+00:00")
    found = read(spark, "marshal-log", {"path": dump}, since=since, until=until)
    times = found.column("time").to_pylist()
    assert times
    assert min(times) >= datetime(2025, 11, 21, 6, 40, tzinfo=UTC)
    assert max(times) <= datetime.fromisoformat(until)


def test_the_state_as_of_an_offset(spark: SparkSession, dump: str) -> None:
    found = read(spark, "marshal-state", {"path": dump}, table="standings", until="99")
    part = tuple(row for row in ROWS if row[1] < 100)
    rows = folded(part, PARTITIONS, ("standings",))
    assert bag(found) == bag(pa.Table.from_batches(log_tables.batches(rows, ["standings"])))


def test_a_coordination_topic_without_records_is_empty(
    spark: SparkSession, kafka: Cluster, topic: TopicFactory
) -> None:
    options = {"bootstrap.servers": kafka.bootstrap, "coordination_topic": topic(2)}
    assert read(spark, "marshal-log", options).num_rows == 0
    assert read(spark, "marshal-state", options, table="gaps").num_rows == 0


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("marshal-log", {}, "no path given"),
        ("marshal-log", {"path": "/nowhere/at/all"}, "path='/nowhere/at/all' is not allowed"),
        (
            "marshal-log",
            {"groups": "a"},
            "option='groups' is not allowed: format\\('marshal-log'\\) takes bootstrap.servers",
        ),
        ("marshal-log", {"since": "yesterday"}, "since='yesterday' is not allowed: an offset or an ISO-8601 time"),
        ("marshal-log", {"until": "latest"}, "until='latest' is not allowed"),
        ("marshal-state", {"table": "records"}, "table='records' is not allowed"),
        ("marshal-state", {"table": "gap"}, "table='gap' is not allowed: one of sessions"),
    ],
)
def test_bad_options_are_named(
    spark: SparkSession, dump: str, form: str, options: dict[str, str], message: str
) -> None:
    given = {"path": dump, **options} if options and "path" not in options else options
    with pytest.raises(PySparkException, match=message):
        read(spark, form, given)


def test_a_log_with_a_hole_fails(spark: SparkSession, tmp_path: Path) -> None:
    """L8: no row is invented for missing records."""
    path = write_dump(tmp_path / "hole.dump", [row for row in ROWS if row[0] > 0 or not 50 <= row[1] < 60])
    with pytest.raises(PySparkException, match="jumps from offset 50 to 60"):
        read(spark, "marshal-state", {"path": path})


def test_the_error_for_a_truncated_log_names_its_first_offset(spark: SparkSession, tmp_path: Path) -> None:
    """L8: a fold that starts in the middle would be wrong."""
    for log in (1, 0):  # log 0 has the root
        path = write_dump(tmp_path / "cut.dump", [row for row in ROWS if row[0] != log or row[1] >= 40])
        with pytest.raises(PySparkException, match=f"{HistoryTruncated.__name__}.*partition {log} begins at offset 40"):
            read(spark, "marshal-state", {"path": path})


def test_a_truncated_log_is_read_from_its_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """N9: what was open at the snapshot is there, but since when is unknown."""
    rows = with_snapshots(ROWS, PARTITIONS, at=160)
    path = write_dump(tmp_path / "cut.dump", [row for row in rows if row[1] >= 159])
    found = read(spark, "marshal-state", {"path": path}, table="standings")
    whole = {"standings": folded(rows, PARTITIONS, ("standings",))["standings"]}
    assert bag(found) == bag(pa.Table.from_batches(log_tables.batches(whole, ["standings"])))
