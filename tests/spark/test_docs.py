"""docs/spark.md is true: its programs run, its SQL is what reports ask, its names exist. Taken from the file itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from marshal_py import errors
from marshal_py.spark import Ledger
from marshal_py.spark.aliases import ALIASES, JAVA, REFUSED
from marshal_py.spark.log import STATE_TABLES
from marshal_py.spark.options import OPTIONS
from marshal_py.spark.reports import QUESTIONS
from marshal_py.spark.streams import PROVIDER
from tests.spark.place import Place
from tests.support.kafka import Cluster, TopicFactory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
MESSAGES = 40


def here_and_now(program: str, here: Place, folder: Path) -> str:
    """The program against this broker and folder, with a coordination topic of its own: the broker is shared."""
    own = f'coordination_topic="{here.log}"'
    for shown, meant in (
        ('connect("localhost:9092"', f'connect("localhost:9092", {own}'),
        ('"/data/archive")\nfolded', f'"/data/archive", {own})\nfolded'),
        ('{"bootstrap.servers": "localhost:9092"}',
         f'{{"bootstrap.servers": "localhost:9092", "coordination_topic": "{here.log}"}}'),
        ('.option("group"', f'.option("coordination_topic", "{here.log}").option("group"'),
        ('"topics", "orders"', f'"topics", "{here.topic}"'),
        ('["orders"]', f'["{here.topic}"]'),
        ("localhost:9092", here.bootstrap),
        ("/data/", f"{folder}/"),
    ):  # fmt: skip
        program = program.replace(shown, meant)
    return program


def test_the_programs_run(spark: SparkSession, kafka: Cluster, topic: TopicFactory, tmp_path: Path) -> None:
    """One after the other, as a reader would try them: the later ones look at what the earlier ones did."""
    here = Place(kafka, topic, partitions=2)
    here.fill(MESSAGES // 2)
    assert len(PROGRAMS) == 9
    names: dict[str, Any] = {}
    before = spark.conf.get(PROVIDER)
    try:
        for number, program in enumerate(PROGRAMS):
            code = here_and_now(program, here, tmp_path)
            exec(compile(code, f"docs/spark.md, program {number + 1}", "exec"), names)
    finally:
        spark.conf.set(PROVIDER, before)
        spark.streams.removeListener(names["listener"])
    written = {(row.partition, row.offset) for row in spark.read.parquet(f"{tmp_path}/orders").collect()}
    assert written == here.written
    assert spark.read.parquet(f"{tmp_path}/audited").count() == MESSAGES
    assert Ledger(tmp_path / "ledger").read(spark, "orders").count() == MESSAGES
    assert spark.read.parquet(f"{tmp_path}/gaps").where("cause = 'new'").count() == 3 * here.partitions


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_questions_are_those_of_the_report(name: str) -> None:
    """test_reports.py runs them; here only that people read what is run."""
    shown = dict(re.findall(r"\*\*(\w+)\*\* — [^\n]+\n\n```sql\n(.*?)\n```", TEXT, re.DOTALL))
    assert shown.keys() == QUESTIONS.keys()
    assert shown[name] == QUESTIONS[name].sql.strip()
    assert f"**{name}** — {QUESTIONS[name].title}." in TEXT


def test_the_names_exist() -> None:
    """Errors, tables and options that the text speaks of."""
    table = TEXT.partition("## When something fails")[2]
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", table))
    assert len(named) > 8
    assert {name for name in named if not hasattr(errors, name)} == set()
    rows = TEXT.partition("| table | a row is |")[2].partition("\n\n")[0]
    assert {name for cell in re.findall(r"^\| (`.*?`) \|", rows, re.MULTILINE)
            for name in re.findall(r"\w+", cell)} == set(STATE_TABLES)  # fmt: skip
    assert first_cells("| option | default | |") == {*OPTIONS, "kafka.*"} - {"start_fallback"}
    assert first_cells('| option of `format("kafka")` | here |') == {
        *ALIASES, *REFUSED, *(f"kafka.{name}" for name in JAVA), "kafka.*"}  # fmt: skip


def first_cells(heading: str) -> set[str]:
    """The names in the first column of a table."""
    cells = re.findall(r"^\| (`.*?`) \|", TEXT.partition(heading)[2].partition("\n\n")[0], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
