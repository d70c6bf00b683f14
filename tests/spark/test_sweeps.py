"""Sweeps on Spark: the same runs and hash as a local sweep, failing seeds as rows, `marshal simulate --spark`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from marshal_py.errors import InvalidOption
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.judge.evidence import Violation
from marshal_sim.tools import sweep as local
from marshal_sim.tools.spark_sweeps import Run, _row, runs, sweep
from tests.support.command_line import invoke

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEDS = range(6)
SMALL = Options(clients=2, partitions=2, interval_ms=1_000, intervals=4)


def test_totals_and_hash_equal_those_of_a_local_sweep(spark: SparkSession) -> None:
    orders = local.total(simulate(seed, SMALL) for seed in SEEDS)
    assert orders.deliveries > 0
    for tasks in (1, 3):
        found = sweep(spark, SEEDS, options=SMALL, tasks=tasks)
        assert found.rdd.getNumPartitions() == tasks
        assert local.total(runs(found)) == orders


def test_a_sweep_is_a_table(spark: SparkSession) -> None:
    """Rows of failing seeds say how to run them again. By default there are several tasks per core."""
    found = sweep(spark, range(4, 18, 2), options=SMALL)
    assert found.columns == list(Run._fields)
    assert found.rdd.getNumPartitions() == 2 * 3
    rows = found.select("seed", "verdict", "again").orderBy("seed").collect()
    assert [tuple(row) for row in rows] == [(seed, "ok", None) for seed in range(4, 18, 2)]


def test_a_violation_is_a_row() -> None:
    result = simulate(3, SMALL)._replace(verdict="violation", violations=(Violation("S2", 17, 4, "planted"),))
    row = _row(result, Options())
    assert row["violations"] == [{"invariant": "S2", "ms": 17, "offset": 4, "text": "planted"}]
    assert row["again"] == "marshal simulate --seed 3 --trace"
    again = _row(result, SMALL)["again"]
    assert again.startswith("simulate(3, Options(clients=2, partitions=2, interval_ms=1000, intervals=4))")


def test_bad_input_is_named(spark: SparkSession) -> None:
    with pytest.raises(InvalidOption, match="seeds=range\\(3, 3\\) is not allowed"):
        sweep(spark, range(3, 3))
    with pytest.raises(InvalidOption, match="tasks=0 is not allowed"):
        sweep(spark, SEEDS, tasks=0)


def test_simulate_on_spark_prints_the_same_as_locally(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda self: None)  # the command stops its session; this one is shared
    on_spark, locally = (
        invoke(["simulate", "--seeds", "5:8", "--json", *more]) for more in (["--spark"], ["--processes", "1"])
    )
    assert (on_spark.exit_code, locally.exit_code) == (0, 0), on_spark.output
    assert json.loads(on_spark.stdout) == json.loads(locally.stdout)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--spark", "--seed", "3"], "--spark goes with --seeds"),
        (["--spark", "--mutants"], "No such option: --mutants"),
        (["--master", "local[1]"], "--spark goes with --seeds"),
        (["--spark", "--processes", "2"], "--spark goes with --seeds"),
    ],
)
def test_options_that_exclude_each_other_are_wrong_usage(wrong: list[str], says: str) -> None:
    result = invoke(["simulate", *wrong])
    assert result.exit_code == 2
    assert says in result.output
