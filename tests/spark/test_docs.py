"""docs/spark.md, and the log of docs/spark-reference.md: programs run, and the tables hold every message once."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from marshal_py import errors
from marshal_py.spark.log_tables import STATE_TABLES
from marshal_py.spark.reports import QUESTIONS
from marshal_py.spark.stream.aliases import ALIASES, REFUSED
from marshal_py.spark.stream.options import OPTIONS
from tests.spark.kafka_topic import KafkaTopic
from tests.spark.targets import pairs
from tests.support.kafka import Cluster, TopicFactory
from tests.support.pages import section

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "spark.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "spark-reference.md").read_text(encoding="utf-8")
LOG_TEXT = section("docs/spark-reference.md", "The coordination log as tables")
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAMS = FENCED.findall(TEXT)
LOG_PROGRAMS = FENCED.findall(LOG_TEXT)
MESSAGES = 10  # per partition and program that writes a table


def adapted(program: str, orders: KafkaTopic, folder: Path) -> str:
    """Returns the program for this broker, folder and topic, and its own coordination topic: the broker is shared."""
    own = f'coordination_topic="{orders.log}"'
    for shown, meant in (
        ('connect("localhost:9092"', f'connect("localhost:9092", {own}'),
        (
            '{"bootstrap.servers": "localhost:9092"}',
            f'{{"bootstrap.servers": "localhost:9092", "coordination_topic": "{orders.log}"}}',
        ),
        ('.option("group"', f'.option("coordination_topic", "{orders.log}").option("group"'),
        ('"topics", "orders"', f'"topics", "{orders.topic}"'),
        ('["orders"]', f'["{orders.topic}"]'),
        ("localhost:9092", orders.bootstrap),
        ("/data/", f"{folder}/"),
        ("spark.stop()", "pass"),  # the other programs and tests use the session, too
    ):
        program = program.replace(shown, meant)
    return program


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_the_programs_run(spark: SparkSession, kafka: Cluster, topic: TopicFactory, tmp_path: Path, times: int) -> None:
    """One after the other, as a reader would try them: later programs use what earlier ones did.

    The second time, in `make proof`, there are more messages and no checkpoint folders; the tables stay. For a new
    program, add below what it leaves.
    """
    orders = KafkaTopic(kafka, topic, partitions=2)
    assert (len(PROGRAMS), len(LOG_PROGRAMS)) == (8, 1)
    for turn in range(1, times + 1):
        names = run(spark, orders, tmp_path)
        once = Counter(orders.written)
        # Claimed batches: they append whatever they are given, and have no checkpoint. The positions do it.
        assert counted(spark.read.parquet(f"{tmp_path}/audited")) == once
        # Iceberg and the database: what came after the queries and services before them.
        assert len(pairs(names["catalog"].load_table("shop.orders").scan().to_arrow())) == turn * 2 * MESSAGES
        with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
            assert db.execute("SELECT orders FROM total").fetchall() == [(turn * 2 * MESSAGES,)]
        # The others (a listener, the log as tables) show something and leave nothing.
        tables = {"orders", "audited", "catalog.db", "lake", "shop.db"}
        checkpoints = {path.name for path in tmp_path.glob("*-checkpoint")}
        assert checkpoints == {"orders-checkpoint", "iceberg-checkpoint", "counting-checkpoint"}
        assert {path.name for path in tmp_path.iterdir()} == tables | checkpoints
        for name in checkpoints:
            shutil.rmtree(tmp_path / name)


def run(spark: SparkSession, orders: KafkaTopic, folder: Path) -> dict[str, Any]:
    """Runs all programs in one namespace, and returns it; removes what they leave in the session."""

    def rows() -> list[tuple[int, int]]:
        return pairs(DeltaTable(str(folder / "orders")).to_pyarrow_table())

    rewind = 'table.rewind("orders", 0, 10)'
    names: dict[str, Any] = {"rows": rows}
    try:
        for number, program in enumerate((*PROGRAMS, *LOG_PROGRAMS)):
            code = adapted(program, orders, folder).replace('"start", "2025-01-31"', '"start", "earliest"')
            code = code.replace('"until", "2025-02-01"', '"until", "latest"')  # the topic has no messages of that day
            code = code.replace(rewind, f"{rewind.replace('orders', orders.topic)}; rewound = rows()")
            there, before = set(orders.written), rows() if rewind in program else []
            if any(table in program for table in ("DeltaOutput(", "IcebergOutput(", "Database(")):
                orders.fill(MESSAGES)  # the programs before it have had the others
            exec(compile(code, f"the pages' program {number + 1}", "exec"), names)
            if "DeltaOutput(" in program:
                assert len(rows()) == len(set(rows()))
                assert set(rows()) >= orders.written - there
            if rewind in program:
                assert names["rewound"] == [row for row in before if row[0] == 1 or row[1] < 10]
                assert rows() == sorted(orders.written), "the backfill has added what was taken out, and all others"
    finally:
        if "listener" in names:  # else an earlier program has failed
            spark.streams.removeListener(names["listener"])
        if "folded" in names:
            names["folded"].unpersist()
    return names


def counted(table: DataFrame) -> Counter[tuple[int, int]]:
    """How often each message is in the table, by partition and offset. All are of one topic."""
    return Counter((row.partition, row.offset) for row in table.collect())


def test_the_questions_are_those_of_the_report() -> None:
    shown = LOG_TEXT.partition("### What operators ask")[2].partition("It prints")[0]
    assert re.findall(r"`(\w+)`", shown) == list(QUESTIONS)


def test_the_names_exist() -> None:
    """The errors, tables and options that the text names."""
    table = REFERENCE.partition("## When something fails")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", table))
    assert len(named) > 5
    assert {name for name in named if not hasattr(errors, name)} == set()
    rows = LOG_TEXT.partition("| table | a row is |")[2].partition("\n\n")[0]
    assert {
        name for cell in re.findall(r"^\| (`.*?`) \|", rows, re.MULTILINE) for name in re.findall(r"\w+", cell)
    } == set(STATE_TABLES)
    assert first_cells(REFERENCE, "| option | default | |") == {*OPTIONS, "kafka.*"}
    assert first_cells(TEXT, '| option of `format("kafka")` | here |') == {*ALIASES, "kafka.*"}
    below = TEXT.partition('| option of `format("kafka")` | here |')[2].partition("## ")[0]
    assert {
        name for name in re.findall(r"`(kafka[.][a-z.]+|[a-z]+(?:[A-Z][a-z]+)+)`", below) if name not in ALIASES
    } <= {*REFUSED, "kafka.ssl.ca.location", "kafka.sasl.jaas.config", "timestampType"}


def first_cells(page: str, heading: str) -> set[str]:
    """The names in the first column of a table."""
    cells = re.findall(r"^\| (`.*?`) \|", page.partition(heading)[2].partition("\n\n")[0], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
