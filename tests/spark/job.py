"""A Spark driver in a process of its own (tests/support/spark_job.py), which tests kill with all its children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.spark.kafka_topic import KafkaTopic
from tests.support.client_fixtures import until
from tests.support.descendants import descendants
from tests.support.journal import Tail

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0  # for the start of a JVM on a busy machine
Rows = list[tuple[int, int]]


class Job:
    """One run. A context manager; leaving it kills the processes that are left."""

    def __init__(
        self,
        orders: KafkaTopic,
        folder: Path,
        name: str,
        *,
        checkpoint: str = "checkpoint",
        options: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.path = folder / f"{name}.jsonl"
        self._tail, self.lines = Tail(self.path), list[dict[str, Any]]()
        given = {
            "options": {**orders.options, **(options or {})},
            "checkpoint": str(folder / checkpoint),
            "journal": str(self.path),
            **settings,
        }
        self.log = self.path.with_suffix(".log")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-B", "-m", "tests.support.spark_job", json.dumps(given)],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def said(self, kind: str) -> list[dict[str, Any]]:
        self.lines += self._tail.read()
        return [line for line in self.lines if line["e"] == kind]

    @property
    def rows(self) -> Rows:
        """All rows that the sink wrote, in order."""
        return [(p, o) for line in self.said("batch") for p, o in line["rows"]]

    def await_line(self, kind: str) -> dict[str, Any]:
        def look() -> list[dict[str, Any]]:
            found = self.said(kind)
            assert found or self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            return found

        return until(look, f"{self.path.stem}: {kind}", DEADLINE_S)[-1]

    def finish(self) -> None:
        """Waits until it ends by itself."""
        assert self.process.wait(DEADLINE_S) == 0, self.log.read_text(errors="replace")[-3000:]
        self.said("ended")

    def terminate(self) -> None:
        self.process.terminate()
        self.finish()

    def kill(self) -> None:
        """SIGKILL for the driver, its JVM, the query's process and the workers, so that none can release a claim."""
        if self.process.poll() is None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended together with its parent
            self.process.wait(DEADLINE_S)
        self.said("ended")
