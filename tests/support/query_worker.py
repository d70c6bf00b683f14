"""A streaming query as a member of a group: a Spark driver that journals what its sink gets, as worker.py does.

    python -m tests.support.query_worker '{"name": "q1", "journal": "/tmp/x/q1.jsonl", "bootstrap": "...", ...}'

The settings are those of tests/support/worker.py. The checkpoint stands beside the journal, and belongs to the name:
the next process of this name goes on from it. SIGTERM stops the query. The exit codes are those of worker.py.

The member lives in a process of its own, which Spark starts. So the journal knows neither when the library allowed a
batch (its `gate` is the end of the batch before) nor when it was acked (no line says so), and its beats are the
driver's. Signals that kill or stop are for the driver and all its descendants.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from marshal_py import errors
from marshal_py.spark import QueryListener, local_session
from tests.support.journal import Journal
from tests.support.worker import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OURS: Final = re.compile(r"marshal_py\.errors\.(\w+)")
TRIGGER: Final = "500 milliseconds"
LOOK_S: Final = 0.1
STOPPED: Final = 0
FAILED: Final = 3


class Sink:
    """Handles each batch for a seeded time, in the driver's process."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self._settings, self._journal = settings, journal
        self._chance = random.Random(settings.seed)
        self._gate_ns = time.monotonic_ns()

    def __call__(self, df: DataFrame, _: int) -> None:
        found: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for row in df.select("token", "topic", "partition", "offset").collect():
            found[row.token, row.topic, row.partition].append(row.offset)
        lines = [{"tok": tok, "t": t, "p": p, "o": sorted(offsets)} for (tok, t, p), offsets in found.items()]
        for line in lines:
            self._journal.write("begin", gate=self._gate_ns, **line)
        time.sleep(self._chance.choice(self._settings.handler_ms) / 1000)  # the sink's work
        for line in lines:
            self._journal.write("end", **line)
        self._gate_ns = time.monotonic_ns()


def run(settings: Settings, journal: Journal, stopping: threading.Event) -> None:
    """Runs the query until it is to stop. Raises the error that ended it."""
    folder = Path(settings.journal).parent
    spark = local_session("local[1]", settings={"spark.local.dir": str(folder / f"{settings.name}-spark")})
    spark.sparkContext.setLogLevel("ERROR")
    spark.streams.addListener(QueryListener())
    options = {
        "bootstrap.servers": settings.bootstrap,
        "topics": ",".join(settings.topics),
        "group": settings.group,
        "client_id": f"{settings.name}-{os.getpid()}",
        "coordination_topic": settings.coordination_topic,
        "coordination_partitions": str(settings.coordination_partitions),
        "delivery": settings.delivery,
        "start": "earliest",
        "heartbeat_interval_s": "1",
    }
    query = (
        spark.readStream.format("marshal")
        .options(**options)
        .load()
        .writeStream.foreachBatch(Sink(settings, journal))
        .option("checkpointLocation", str(folder / f"{settings.name}-checkpoint"))
        .trigger(processingTime=TRIGGER)
        .start()
    )
    joined = False
    while query.isActive and not stopping.wait(LOOK_S):
        if not joined and query.lastProgress:
            journal.write("joined")
            joined = True
    if not stopping.is_set():
        query.awaitTermination()
    query.stop()
    spark.stop()


def main(settings: Settings) -> int:
    journal, stopping, over = Journal(Path(settings.journal)), threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    journal.write(
        "start",
        name=settings.name,
        pid=os.getpid(),
        client=f"{settings.name}-{os.getpid()}",
        group=settings.group,
        delivery=settings.delivery,
        seed=settings.seed,
        checkpoint=settings.name,
    )

    def beat() -> None:
        while not over.wait(settings.beat_ms / 1000):
            journal.write("beat")

    beats = threading.Thread(target=beat)
    beats.start()
    code = STOPPED
    try:
        run(settings, journal, stopping)
    except Exception as error:  # Spark wraps the library's, and has its own
        print(error, file=sys.stderr)
        names = [name for name in OURS.findall(str(error)) if hasattr(errors, name)]
        kind: Any = getattr(errors, names[-1]) if names else type(error)
        bases = [base.__name__ for base in kind.__mro__]
        journal.write("error", name=bases[0], names=bases, text=str(error)[-1_000:], closed=True)
        code = FAILED
    over.set()
    beats.join()
    journal.write("gone", code=code)
    return code


if __name__ == "__main__":
    sys.exit(main(Settings(**json.loads(sys.argv[1]))))
