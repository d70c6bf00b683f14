"""A class-data archive (AppCDS) for the JVMs of Spark in tests, which start with half of the processor time.

    python -m tests.support.spark_archive        the job whose classes are in the archive; `use` runs it

It is in pytest's cache folder, because it is valid only for the jars of one environment. The first process that needs
it runs a short job that writes it, while the others wait. A JVM that cannot write or read one takes the full time.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.jars import ClassArchive, find_java, locked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT: Final = Path(__file__).resolve().parents[2]
OPTIONS: Final = "SPARK_SUBMIT_OPTS"  # of the JVM, read by spark-submit, which PySpark starts
JOB_TIMEOUT_S: Final = 240.0  # 15 s; many times longer beside other tests on a slow machine
JVM_END_TIMEOUT_S: Final = 120.0  # it writes 160 MB


def use(folder: Path) -> None:
    """Makes every Spark JVM that this process and its children start read the archive, which is written if missing."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    archive = ClassArchive(folder, "spark", find_java(), sorted(Path(spec.origin).parent.glob("jars/*.jar")))
    given = os.environ.get(OPTIONS, "").split()
    tried = archive.path.with_suffix(".tried")
    with locked(folder / "archive.lock"):
        if not tried.exists():
            _write(archive, given)
            tried.touch()  # also if the JVM wrote none, so that not every run tries again
    os.environ[OPTIONS] = " ".join(dict.fromkeys([*given, *archive.use()]))


def _write(archive: ClassArchive, given: list[str]) -> None:
    try:
        subprocess.run(
            [sys.executable, "-m", "tests.support.spark_archive"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), OPTIONS: " ".join([*given, *archive.train()])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=JOB_TIMEOUT_S,
            check=True,
        )
        archive.keep()
    except subprocess.SubprocessError as error:
        print(f"no class-data archive for Spark, so its JVMs start slowly: {error}", file=sys.stderr)
    finally:
        archive.discard()


# --- the job


def job(spark: SparkSession) -> None:
    """A stream whose source is in Python and whose sink is a function, a table, and a query over it."""
    from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader

    class Numbers(SimpleDataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:
            return {"at": 0}

        def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int]], dict[str, int]]:
            return iter([(start["at"],)]), {"at": 1}

        def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[int]]:
            return iter([(at,) for at in range(start["at"], end["at"])])

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "numbers"

        def schema(self) -> str:
            return "number long"

        def simpleStreamReader(self, schema: object) -> Numbers:
            return Numbers()

    def sink(df: DataFrame, batch: int) -> None:
        df.write.mode("append").parquet(f"{folder}/table")
        assert df.collect()

    folder = spark.conf.get("spark.local.dir")
    spark.dataSource.register(Source)
    stream = spark.readStream.format("numbers").load().writeStream.foreachBatch(sink)
    stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    table = spark.read.parquet(f"{folder}/table")
    counts = table.groupBy("number").count().orderBy("number")
    assert counts.mapInArrow(lambda batches: batches, "number long, n long").collect()


def main() -> None:
    from pyspark import SparkContext

    from marshal_py.spark import local_session

    with tempfile.TemporaryDirectory(prefix="marshal_spark_") as folder:
        spark = local_session("local[2]", settings={"spark.local.dir": folder})
        job(spark)
        spark.stop()
        gateway = SparkContext._gateway
        assert gateway is not None
        process: Any = gateway.proc
        process.stdin.close()  # the JVM ends by itself, and writes the archive
        process.wait(JVM_END_TIMEOUT_S)


if __name__ == "__main__":
    main()
