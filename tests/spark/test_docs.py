"""docs/spark.md, and the log of docs/spark-reference.md: programs run, the questions are those of the reports."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from marshal_py import errors
from marshal_py.spark.log.log_tables import STATE_TABLES
from marshal_py.spark.log.reports import QUESTIONS
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
LOG_TEXT = section("docs/spark-reference.md", "The coordination log as tables")
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAMS = FENCED.findall(TEXT)
LOG_PROGRAMS = FENCED.findall(LOG_TEXT)
MESSAGES = 10  # per partition and time


def adapted(program: str, orders: KafkaTopic, folder: Path) -> str:
    """Returns the program for this broker, folder and topic, and its own coordination topic: the broker is shared."""
    own = f'coordination_topic="{orders.log}"'
    for shown, meant in (
        ('connect("localhost:9092"', f'connect("localhost:9092", {own}'),
        ('"/data/archive")\nfolded', f'"/data/archive", {own})\nfolded'),
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
    assert (len(PROGRAMS), len(LOG_PROGRAMS)) == (4, 2)
    for _ in range(times):
        orders.fill(MESSAGES)
        run(spark, orders, tmp_path)
        once = Counter(orders.written)
        # The first job and the backfill: every message once, although the checkpoint was deleted.
        assert Counter(pairs(DeltaTable(str(tmp_path / "orders")).to_pyarrow_table())) == once
        # Claimed batches: they append whatever they are given, and have no checkpoint. The positions do it.
        assert counted(spark.read.parquet(f"{tmp_path}/audited")) == once
        # The archive: what is new in the log is added to it, nothing else.
        archived = Counter((row.log, row.offset) for row in spark.read.parquet(f"{tmp_path}/archive").collect())
        assert archived
        assert set(archived.values()) == {1}
        # The others (a listener, the log as tables) show something and leave nothing.
        assert {path.name for path in tmp_path.iterdir()} == {"orders", "audited", "archive", "orders-checkpoint"}
        shutil.rmtree(tmp_path / "orders-checkpoint")


def run(spark: SparkSession, orders: KafkaTopic, folder: Path) -> None:
    """Runs all programs in one namespace; removes what they leave in the session."""
    names: dict[str, Any] = {}
    try:
        for number, program in enumerate((*PROGRAMS, *LOG_PROGRAMS)):
            code = adapted(program, orders, folder).replace('"start", "2025-01-31"', '"start", "earliest"')
            code = code.replace('"until", "2025-02-01"', '"until", "latest"')  # the topic has no messages of that day
            exec(compile(code, f"the pages' program {number + 1}", "exec"), names)
    finally:
        if "listener" in names:  # else an earlier program has failed
            spark.streams.removeListener(names["listener"])
        if "folded" in names:
            names["folded"].unpersist()


def counted(table: DataFrame) -> Counter[tuple[int, int]]:
    """How often each message is in the table, by partition and offset. All are of one topic."""
    return Counter((row.partition, row.offset) for row in table.collect())


def test_the_questions_are_those_of_the_report() -> None:
    shown = re.findall(r"^\| `(\w+)` \| (.+) \|$", LOG_TEXT.partition("| name | question |")[2], re.MULTILINE)
    assert shown == [(name, question.title) for name, question in QUESTIONS.items()]


def test_the_names_exist() -> None:
    """The errors, tables and options that the text names."""
    table = TEXT.partition("## When something fails")[2]
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", table))
    assert len(named) > 8
    assert {name for name in named if not hasattr(errors, name)} == set()
    rows = LOG_TEXT.partition("| table | a row is |")[2].partition("\n\n")[0]
    assert {
        name for cell in re.findall(r"^\| (`.*?`) \|", rows, re.MULTILINE) for name in re.findall(r"\w+", cell)
    } == set(STATE_TABLES)
    assert first_cells("| option | default | |") == {*OPTIONS, "kafka.*"}
    assert first_cells('| option of `format("kafka")` | here |') == {*ALIASES, "kafka.*"}
    below = TEXT.partition('| option of `format("kafka")` | here |')[2].partition("## ")[0]
    assert {
        name for name in re.findall(r"`(kafka[.][a-z.]+|[a-z]+(?:[A-Z][a-z]+)+)`", below) if name not in ALIASES
    } <= {*REFUSED, "kafka.ssl.ca.location", "kafka.sasl.jaas.config", "timestampType"}


def first_cells(heading: str) -> set[str]:
    """The names in the first column of a table."""
    cells = re.findall(r"^\| (`.*?`) \|", TEXT.partition(heading)[2].partition("\n\n")[0], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
