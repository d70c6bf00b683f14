"""How fast is `format("marshal")`, beside Spark's own Kafka source?

Both read the same topics in one Spark session, in turn: a million small messages of eight partitions in one batch, into
a sink that discards them and into Parquet; batches over 64 partitions with a hundred messages each; a query over few
messages, from its start to its end. The processor time is that of the JVM and of all Python processes
together: on a busy machine it says more than the clock. A third contestant is the cheapest source in Python that there
can be (spark_floor.py): the part of a figure that no reader in Python can avoid.

Spark's own source is a separate package that comes through Maven (`spark.jars.packages`; MARSHAL_BENCH_PACKAGES has the
coordinates), so it runs in a process of its own. If the package cannot be downloaded, this contestant is left out, and
a note says so. A tiny run leaves it out, too, and downloads nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.environment import BenchEnvironment, Result, ratio, spread
from bench.spark_floor import NAME, FloorSource
from bench.spark_session import SETTINGS, spark_session
from marshal_py.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The newest that Maven Central has; it works on Spark 4.3, too.
PACKAGES: Final = os.environ.get("MARSHAL_BENCH_PACKAGES", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0")
EXCLUDES: Final = "org.apache.hadoop:hadoop-client-api,org.apache.hadoop:hadoop-client-runtime"  # Spark brings them
ROWS, ROWS_TINY = 1_000_000, 8_000
WIDE, THIN = 8, 64  # partitions
THIN_BATCHES: Final = 10
THIN_ROWS: Final = 100  # of a partition in one batch
FEW: Final = 10
ROUNDS: Final = 5
WAIT_S: Final = 300
STARTS_MAX: Final = 3  # of one query
NOT_STARTED: Final = "Python worker failed to connect back"
OURS, THEIRS = "marshal", "Spark's own"
FLOOR: Final = "Python without Kafka"
FORMATS: Final = {OURS: "marshal", THEIRS: "kafka", FLOOR: NAME}
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


# --- in the process of its own


def spent_s() -> float:
    """Processor time so far of all descendants of this process, including those that have ended."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    todo, total = list(parents.get(os.getpid(), ())), 0
    while todo:
        pid = todo.pop()
        total += ticks[pid]
        todo += parents.get(pid, ())
    return total / TICKS_PER_S


def session() -> tuple[SparkSession, str]:
    """Returns a session, and why Spark's own source is missing; "" if it is there."""
    try:
        return local_session(
            "local[2]", settings={**SETTINGS, "spark.jars.packages": PACKAGES, "spark.jars.excludes": EXCLUDES}
        ), ""
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return local_session("local[2]", settings=SETTINGS), f"{PACKAGES} could not be downloaded: {reason}"


class Runner:
    """Runs queries of both sources over one topic."""

    def __init__(self, spark: SparkSession, job: Mapping[str, Any]) -> None:
        self.spark, self.job, self.number = spark, job, 0
        spark.dataSource.register(FloorSource)

    def options(self, name: str, topic: str, batch: int) -> dict[str, str]:
        if name == THEIRS:
            return {
                "kafka.bootstrap.servers": self.job["bootstrap"],
                "subscribe": topic,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": str(batch),
            }
        if name == FLOOR:
            return {"rows": str(batch), "tasks": str(WIDE)}
        return {
            "bootstrap.servers": self.job["bootstrap"],
            "topics": topic,
            "start": "earliest",
            "group": f"{self.job['group']}-{self.number}",
            "coordination_topic": self.job["log"],
            "max_rows_per_batch": str(batch),
        }

    def query(self, name: str, topic: str, batch: int, sink: str = "noop") -> dict[str, Any]:
        """Runs one query to its end; returns rows, seconds of each batch and of all, processor seconds.

        On a busy machine a Python process may not start within the 10 s that Spark gives it. A query that ends with
        that has measured nothing, and another one is run in its place.
        """
        from pyspark.errors import StreamingQueryException

        for _ in range(STARTS_MAX - 1):
            try:
                return self._query(name, topic, batch, sink)
            except StreamingQueryException as error:
                if NOT_STARTED not in str(error):
                    raise
        return self._query(name, topic, batch, sink)

    def _query(self, name: str, topic: str, batch: int, sink: str) -> dict[str, Any]:
        self.number += 1
        folder = Path(self.job["folder"]) / f"spark-{self.number}"
        began_s, began_spent_s = time.perf_counter(), spent_s()
        source = self.spark.readStream.format(FORMATS[name])
        writer = source.options(**self.options(name, topic, batch)).load().writeStream.format(sink)
        if sink != "noop":
            writer = writer.option("path", str(folder / "rows"))
        query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
        if not query.awaitTermination(WAIT_S):
            query.stop()
            raise RuntimeError(f"{name} did not finish within {WAIT_S} s")
        took_s, used_s = time.perf_counter() - began_s, spent_s() - began_spent_s
        shutil.rmtree(folder)
        batches = [p for p in query.recentProgress if p.numInputRows]
        return {
            "rows": sum(p.numInputRows for p in batches),
            "took_s": took_s,
            "spent_s": used_s,
            "batches_s": [p.batchDuration / 1000 for p in batches],
        }

    def turns(self, names: list[str], rounds: int, *args: Any) -> dict[str, list[dict[str, Any]]]:
        """Runs each of `names` in turn. The first round, in which code is loaded and compiled, is left out."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name in names:
                found[name].append(self.query(name, *args))
        return {name: each[min(rounds, 1) :] for name, each in found.items()}


def contest(job: Mapping[str, Any], spark: SparkSession, missing: str) -> dict[str, Any]:
    runner = Runner(spark, job)
    names, rounds = [OURS] if missing else [THEIRS, OURS], job["rounds"]
    wide = [*names, FLOOR]
    found = {sink: runner.turns(wide, rounds, job["wide"], job["rows"], sink) for sink in ("noop", "parquet")}
    found["thin"] = runner.turns(names, min(rounds, 1), job["thin"], THIN * THIN_ROWS)
    found["few"] = runner.turns(names, rounds, job["few"], FEW * WIDE)
    return {"missing": missing, "found": found}


# --- in the benchmark's process


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows, rounds = (ROWS_TINY, 0) if tiny else (ROWS, ROUNDS)
    topics = {
        "wide": (WIDE, rows),
        "thin": (THIN, THIN * THIN_ROWS * (2 if tiny else THIN_BATCHES)),
        "few": (WIDE, WIDE * FEW),
    }
    job: dict[str, Any] = {
        "bootstrap": environment.bootstrap,
        "group": environment.group("spark"),
        "log": environment.coordination(),
        "folder": str(environment.folder),
        "rows": rows,
        "rounds": rounds,
    }
    for name, (partitions, count) in topics.items():
        job[name] = environment.topic(partitions)
        environment.fill(job[name], partitions, count)
    if tiny:
        with spark_session() as spark:
            answer = contest(job, spark, "a tiny run downloads nothing")
    else:
        command = [sys.executable, "-m", "bench.spark"]
        done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
    environment.drop(*(job[name] for name in topics))
    return Result(
        "spark",
        ["what", "contestant", "figure", "ratio to Spark's own", "rows"],
        table(answer["found"]),
        notes(answer["missing"], rounds),
        raw=answer,
    )


def table(found: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> list[list[Any]]:
    def cells(what: str, part: str, figure: Any) -> list[list[Any]]:
        values = {name: [v for one in runs for v in figure(one)] for name, runs in found[part].items()}
        counted = {name: sum(one["rows"] for one in runs) for name, runs in found[part].items()}
        return [
            [what, name, spread(each), ratio(each, values.get(THEIRS, [])), counted[name]]
            for name, each in values.items()
        ]

    lines: list[list[Any]] = []
    for sink in ("noop", "parquet"):
        lines += cells(f"{sink}: rows/s of a batch", sink, lambda one: [one["rows"] / sum(one["batches_s"])])
        lines += cells(f"{sink}: processor s per million rows", sink, lambda one: [one["spent_s"] * 1e6 / one["rows"]])
    lines += cells(f"{THIN} thin partitions: s per batch", "thin", lambda one: one["batches_s"][1:])
    lines += cells("availableNow, few messages: s from start to end", "few", lambda one: [one["took_s"]])
    return lines


def notes(missing: str, rounds: int) -> list[str]:
    return [
        f"{rounds} rounds in turn; processor time of the JVM and all of Spark's Python processes",
        f"without Spark's own source: {missing}" if missing else f"Spark's own source: {PACKAGES}",
    ]


if __name__ == "__main__":
    print(json.dumps(contest(json.loads(sys.stdin.read()), *session())))
