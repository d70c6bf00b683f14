"""A Spark driver as a process: one query over a Marshal stream, which writes a journal and stops where a test wants.

    python -m tests.support.spark_job '{"options": {...}, "checkpoint": "...", "journal": "...", ...}'

The sink writes one JSON line per batch, in the driver's own process. `hold_at`: the sink blocks in the n-th batch of
this run, once it is written, or with `hold_before` once its tasks have read it and nothing is written; it writes the
line `held`, and the test kills the process. With `available_now` the query ends by itself; otherwise SIGTERM stops it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marshal_py.spark import local_session
from tests.support.journal import Journal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class Settings:
    options: dict[str, str]
    checkpoint: str
    journal: str
    hold_at: int = 0
    hold_before: bool = False
    available_now: bool = False


class Sink:
    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.settings, self.journal = settings, journal
        self.batches = 0

    def __call__(self, df: DataFrame, batch: int) -> None:
        rows = [[row.partition, row.offset] for row in df.select("partition", "offset").collect()]
        self.batches += 1
        held = self.batches == self.settings.hold_at
        if not (held and self.settings.hold_before):
            self.journal.write("batch", batch=batch, rows=rows)
        if held:
            self.journal.write("held", batch=batch, rows=rows)
            threading.Event().wait()


def main(settings: Settings) -> None:
    journal = Journal(Path(settings.journal))
    spark = local_session("local[2]", settings={"spark.local.dir": str(Path(settings.checkpoint).parent / "local")})
    spark.sparkContext.setLogLevel("ERROR")
    writer = (
        spark.readStream.format("marshal")
        .options(**settings.options)
        .load()
        .writeStream.foreachBatch(Sink(settings, journal))
        .option("checkpointLocation", settings.checkpoint)
    )
    query = writer.trigger(availableNow=True).start() if settings.available_now else writer.start()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    journal.write("started", pid=os.getpid())
    while not stopping.is_set() and query.isActive:
        stopping.wait(0.1)
    if stopping.is_set():
        query.stop()
    else:
        query.awaitTermination()  # raises the error that ended it
    spark.stop()
    journal.write("ended", pid=os.getpid())


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    main(Settings(**given))
