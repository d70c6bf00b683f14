"""Runs the simulator on a cluster: seeds in, one row per seed out. The simulator gives the verdicts, not this file.

Each task takes a range of seeds. A seed's run is pure, so its row does not depend on where it ran. A run that violates
an invariant must give a row, not a failed task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, functions

from marshal_py.errors import InvalidOption
from marshal_sim.cluster.run import Result, simulate
from marshal_sim.cluster.scenario import Options
from marshal_sim.judge.evidence import Violation

TASKS_PER_CORE: Final = 3  # a task costs 50 ms; with several per core, cores finish at about the same time
_PROBE_ROWS: Final = 65_536  # more than a cluster has cores, so that every core gets a partition
ROWS_PER_BATCH: Final = 64  # a run takes tens of milliseconds: rows reach the JVM about once a second

SCHEMA: Final = (
    "seed bigint, verdict string, takeovers bigint, handovers bigint, deliveries bigint, faults bigint, events bigint, "
    "simulated_hours double, trace_hash string, "
    "violations array<struct<invariant string, ms bigint, offset bigint, text string>>, again string"
)
_ARROW: Final = pa.schema(
    [
        ("seed", pa.int64()),
        ("verdict", pa.string()),
        ("takeovers", pa.int64()),
        ("handovers", pa.int64()),
        ("deliveries", pa.int64()),
        ("faults", pa.int64()),
        ("events", pa.int64()),
        ("simulated_hours", pa.float64()),
        ("trace_hash", pa.string()),
        (
            "violations",
            pa.list_(
                pa.struct(
                    [("invariant", pa.string()), ("ms", pa.int64()), ("offset", pa.int64()), ("text", pa.string())]
                )
            ),
        ),
        ("again", pa.string()),
    ]
)


class Run(NamedTuple):
    """A row of `sweep`: the result of one seed.

    `again` says how to run the seed again; it is None if the seed violated nothing.
    """

    seed: int
    verdict: str
    takeovers: int
    handovers: int
    deliveries: int
    faults: int
    events: int
    simulated_hours: float
    trace_hash: str
    violations: tuple[Violation, ...]
    again: str | None


def sweep(spark: SparkSession, seeds: range, *, options: Options | None = None, tasks: int | None = None) -> DataFrame:
    """Returns a DataFrame with one row per seed and the columns of `Run`. Like every DataFrame it is computed lazily.

    `tasks` is the number of tasks, by default three per core. The workers need marshal_py. Raises InvalidOption.
    """
    if not seeds:
        raise InvalidOption("seeds", seeds, "a range with at least one seed")
    if tasks is not None and tasks < 1:
        raise InvalidOption("tasks", tasks, "1 or more")
    count = min(len(seeds), tasks or TASKS_PER_CORE * _cores(spark))
    return spark.range(seeds.start, seeds.stop, seeds.step, count).mapInArrow(_running(options or Options()), SCHEMA)


def runs(swept: DataFrame) -> list[Run]:
    """Runs a sweep and returns its rows in the order of their seeds, as the total of marshal_sim/tools/sweep.py needs
    them."""
    rows = swept.toArrow().sort_by("seed").to_pylist()
    return [Run(**{**row, "violations": tuple(Violation(**found) for found in row["violations"])}) for row in rows]


def _cores(spark: SparkSession) -> int:
    """Returns how many tasks can run at a time. It finds that by a query, which works with Spark Connect, too."""
    return spark.range(_PROBE_ROWS).select(functions.spark_partition_id()).distinct().count()


def _running(options: Options) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        part: list[dict[str, Any]] = []
        for batch in batches:
            for seed in batch.column(0).to_pylist():
                part.append(_row(simulate(seed, options), options))
                if len(part) == ROWS_PER_BATCH:
                    yield pa.RecordBatch.from_pylist(part, schema=_ARROW)
                    part = []
        if part:
            yield pa.RecordBatch.from_pylist(part, schema=_ARROW)

    return run


def _row(result: Result, options: Options) -> dict[str, Any]:
    row = {name: getattr(result, name) for name in Run._fields if name != "again"}
    row["violations"] = [violation._asdict() for violation in result.violations]
    return {**row, "again": _again(result.seed, options) if result.violations else None}


def _again(seed: int, options: Options) -> str:
    if options == Options():
        return f"marshal simulate --seed {seed} --trace"
    given = {name: value for name, value in options._asdict().items() if value != Options._field_defaults[name]}
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"simulate({seed}, Options({words}))  # of marshal_sim.cluster.run and .scenario"
