"""How fast is the history of a whole coordination topic folded: in one process, and by tasks on Spark?

An archive has sixteen logs, each as 20 consumers of one group with 100 partitions write it. All contestants read the
same files and fold each log in the order of its offsets, with the digest of the group at every checkpoint. If the
digests differ, the benchmark fails. It measures wall clock time, because the question is whether more cores help.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet

from bench.environment import BenchEnvironment, Result, ratio, spread
from bench.fold import INCARNATION, history
from marshal_py.log.replay import Beginning
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS
from marshal_py.protocol.wire.identity import HASH_NAME, route
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark import local_session, replay
from marshal_py.spark.log import columns
from marshal_py.spark.log.replays import folding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOGS: Final = 16
RECORDS: Final = 200_000  # per log; a job of Spark costs a second before it folds anything
LOGS_TINY, RECORDS_TINY = 4, 500
ROUNDS: Final = 3  # of some 50 s each; all benchmarks together stay under 20 minutes
TABLES: Final = ["digests"]
# The JVM's own compilers, as a cluster has them; those of local_session are for short runs.
SETTINGS: Final = {"spark.log.level": "OFF", "spark.driver.extraJavaOptions": "-XX:+UseSerialGC"}
DAY: Final = "day=1970-01-01"


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """A session on two cores of this machine. An active one is used, and not stopped."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    session = active or local_session("local[2]", settings=SETTINGS)
    try:
        yield session
    finally:
        if active is None:
            session.stop()


def write(folder: Path, logs: int, records: int) -> int:
    """Writes a Parquet file per log; returns how many records."""
    written = 0
    for log in range(logs):
        group = next(name for number in count() if route(name := f"group-{number}", logs) == log)
        rows = [
            (log, offset, 1_000 * offset, None, value) for offset, value in enumerate(history(records, 1, group, logs))
        ]
        table = pa.Table.from_batches(columns.raw_batches(iter(rows))).drop_columns("log")
        (folder / f"log={log}" / DAY).mkdir(parents=True)
        pyarrow.parquet.write_table(table, folder / f"log={log}" / DAY / "records.parquet")
        written += len(rows)
    return written


def _mark(digests: pa.Table) -> str:
    """A short hash of the digests at the checkpoints."""
    cells = (digests.column(name).to_pylist() for name in ("log", "offset", "group", "state", "chain"))
    rows = sorted(row for row in zip(*cells, strict=True) if row[1] % CHECKPOINT_OFFSETS == 0)
    return blake2b(repr(rows).encode(), digest_size=4).hexdigest()


def one_process(folder: Path, root: Genesis) -> pa.Table:
    found: list[pa.RecordBatch] = []
    beginnings = {log: Beginning(log, root) for log in range(root.partitions)}
    for log in range(root.partitions):
        file = folder / f"log={log}" / DAY / "records.parquet"
        table = pyarrow.parquet.ParquetFile(file).read(columns=["offset", "time", "value"]).sort_by("offset")
        table = table.append_column("log", pa.repeat(pa.scalar(log, pa.int32()), len(table)))
        found += folding(beginnings, TABLES)(iter(table.to_batches()))
    return pa.Table.from_batches(found)


def in_tasks(spark: SparkSession, folder: Path, root: Genesis) -> pa.Table:
    return replay(spark.read.parquet(str(folder)), TABLES, root=root).toArrow()


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    logs, records, rounds = (LOGS_TINY, RECORDS_TINY, 1) if tiny else (LOGS, RECORDS, ROUNDS)
    folder = environment.folder / "replay"
    folder.mkdir()
    written = write(folder, logs, records)
    root = Genesis(INCARNATION, logs, HASH_NAME, 2)
    with spark_session() as spark:
        contestants: dict[str, Callable[[], pa.Table]] = {
            "one process": lambda: one_process(folder, root),
            "replay() on Spark, local[2]": lambda: in_tasks(spark, folder, root),
        }
        contestants["replay() on Spark, local[2]"]()  # starts the workers
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        marks: dict[str, str] = {}
        for _ in range(rounds):
            for name, fold in contestants.items():
                began = time.perf_counter()
                table = fold()
                rates[name].append(written / (time.perf_counter() - began) / 1000)
                marks[name] = _mark(table)
    shutil.rmtree(folder)
    if len(set(marks.values())) != 1:
        raise RuntimeError(f"the digests differ: {marks}")
    rows: list[list[Any]] = [
        [name, spread(found), ratio(found, rates["one process"]), f"{written:,} #{marks[name]}"]
        for name, found in rates.items()
    ]
    notes = [f"{logs} logs in Parquet, {rounds} rounds in turn; the digests of all are equal"]
    return Result("replay", ["contestant", "thousand records/s", "ratio to one process", "work"], rows, notes)
