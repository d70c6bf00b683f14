"""Which process of `pytest -n` takes which file: a plugin of pytest, for `--dist loadfile` alone.

What is dear is what a process starts once: a Spark session, a cluster of three brokers, a cluster of one. So each
process has a kind of files that it takes before all others, and who has no more of its kind takes of those that need
nothing, then of the others. Files whose tests last longest come first in their kind, or they would be what everybody
waits for at the end. A file is never parted: tests of one file run in one process, in their order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
SPARK, KAFKA, NEITHER = range(3)
SPARK_ELSEWHERE: Final = ("tests/kafka/test_bench.py",)  # `bench.stream` runs two queries
LONG: Final = (
    "tests/spark/test_kills.py",
    "tests/kafka/test_bench.py",
    "tests/spark/test_streams.py",
    "tests/spark/test_log.py",
    "tests/kafka/test_processes.py",
    "tests/kafka/test_admin.py",
    "tests/kafka/test_recreated.py",
    "tests/simulator/test_exhaustive.py",
    "tests/simulator/test_simulate.py",
)


def kind_of(file: str) -> int:
    """What a test of this file may start."""
    if file.startswith("tests/spark/") or file in SPARK_ELSEWHERE:
        return SPARK
    return KAFKA if file.startswith("tests/kafka/") else NEITHER


def order_of(process: int) -> tuple[int, int, int]:
    """The kinds in which a process takes its files. Processes count from 0; those beyond 2 do as 2 does."""
    return ((SPARK, NEITHER, KAFKA), (KAFKA, NEITHER, SPARK), (NEITHER, KAFKA, SPARK))[min(process, 2)]


def next_file(files: list[str], process: int) -> str:
    """Of the files that nobody has taken yet, in the order of collection, the one that this process takes."""
    order = order_of(process)
    return min(files, key=lambda file: (order.index(kind_of(file)), file not in LONG))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Shares(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            process = int(node.gateway.id.removeprefix("gw"))
            self.workqueue.move_to_end(next_file(list(self.workqueue), process), last=False)
            super()._assign_work_unit(node)

    return Shares(config, log)
