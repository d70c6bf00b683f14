"""docs/sinks.md is true: its programs run, twice, and the tables hold every message once. Taken from the file."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from tests.spark.kafka_topic import KafkaTopic
from tests.spark.targets import pairs
from tests.spark.test_docs import adapted
from tests.support.kafka import Cluster, TopicFactory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
MESSAGES = 20  # per partition


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_programs_run_twice(spark: SparkSession, kafka: Cluster, topic: TopicFactory, tmp_path: Path) -> None:
    """The second time there are more messages and no checkpoints."""
    orders = KafkaTopic(kafka, topic, partitions=2)
    names: dict[str, Any] = {"spark": spark}
    left: set[tuple[int, int]] = set()
    for _ in range(2):
        orders.fill(MESSAGES)
        for number, program in enumerate(PROGRAMS):
            code = adapted(program, orders, tmp_path).replace('"orders", 0, 10', f'"{orders.topic}", 0, 10')
            code = code.replace('"start", "earliest")', '"start", "earliest").option("heartbeat_interval_s", "1")')
            before = set(orders.written)
            if "write_batch(" in program:
                orders.fill(MESSAGES)  # for the service: the query has had the others
            exec(compile(code, f"docs/sinks.md, program {number + 1}", "exec"), names)
            if ".rewind(" in program:
                left = {row for row in orders.written if row[0] == 1 or row[1] < 10}
                assert stored(tmp_path) == sorted(left)
            if "write_batch(" in program:
                assert stored(tmp_path) == sorted(left | (orders.written - before))
        for checkpoint in tmp_path.glob("*-checkpoint"):
            shutil.rmtree(checkpoint)
    with sqlite3.connect(tmp_path / "shop.db") as db:
        assert db.execute("SELECT orders FROM total").fetchall() == [(len(orders.written),)]
    db.close()
    assert pairs(names["catalog"].load_table("shop.orders").scan().to_arrow()) == sorted(orders.written)


def stored(folder: Path) -> list[tuple[int, int]]:
    return pairs(DeltaTable(str(folder / "lake" / "orders")).to_pyarrow_table())
