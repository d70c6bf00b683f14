"""A pytest plugin that decides which test files run where: `--quick` for `make check`, and a scheduler for `pytest -n`.

`--quick` leaves out the files that need Spark or Apache Kafka, and those that take more than QUICK_S.

With `--dist loadfile`, every process of pytest-xdist begins with files of its own kind, because starting a Spark
session, a cluster of three brokers or a cluster of one takes long and happens once per process. A process that has no
more files of its kind takes those that need neither Kafka nor Spark, then the rest. Within a kind the slowest come
first, so that no process waits for one of them at the end; of the two processes that begin with the rest one takes
first what computes most, and one what waits most, so that not all compute at first and wait at last. All tests of a
file run in one process, in their order.

How long a file takes is what tests/file_times.tsv says; a file without a line is a new one, and quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support import file_times

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
SPARK, KAFKA, NEITHER = range(3)
SPARK_ELSEWHERE: Final = ("tests/kafka/test_bench.py",)  # `bench.stream` runs two queries
QUICK_S: Final = 2.0  # CPU seconds of a file that `--quick` runs: all of them together take a minute on two cores
ALWAYS: Final = ("tests/test_architecture.py",)  # quick or not: most changes that it refuses are refused nowhere else


TIMES: Final = file_times.times(file_times.TABLE.read_text(encoding="utf-8"))


def cpu_s(file: str) -> float:
    return TIMES.get(file, (0.0, 0.0))[0]


def wall_s(file: str) -> float:
    return TIMES.get(file, (0.0, 0.0))[1]


def kind_of(file: str) -> int:
    """What the tests of this file may start."""
    if file.startswith("tests/spark/") or file in SPARK_ELSEWHERE:
        return SPARK
    return KAFKA if file.startswith("tests/kafka/") else NEITHER


def is_quick(file: str) -> bool:
    """Whether `--quick` runs this file."""
    return kind_of(file) == NEITHER and (cpu_s(file) <= QUICK_S or file in ALWAYS)


def order_of(process: int) -> tuple[int, int, int]:
    """The kinds in the order in which a process takes them. Processes count from 0; those after 2 do as 2 does."""
    return ((SPARK, NEITHER, KAFKA), (KAFKA, NEITHER, SPARK), (NEITHER, KAFKA, SPARK))[min(process, 2)]


def length_s(file: str, process: int) -> float:
    """What this process calls long: the wall time, in process 2 what a file computes, in 3 for how long it waits."""
    return {2: cpu_s(file), 3: wall_s(file) - cpu_s(file)}.get(process, wall_s(file))


def next_file(files: list[str], process: int) -> str:
    """The file that this process takes, of those left in the order of collection."""
    order = order_of(process)
    return min(files, key=lambda file: (order.index(kind_of(file)), -length_s(file, process)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what needs Spark or Kafka, and what takes long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores a file before its import, so that `--quick` does not import pyspark. None lets other plugins decide."""
    if not config.getoption("quick") or not collection_path.name.startswith("test_"):
        return None
    return None if is_quick(collection_path.relative_to(ROOT).as_posix()) else True


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            process = int(node.gateway.id.removeprefix("gw"))
            self.workqueue.move_to_end(next_file(list(self.workqueue), process), last=False)
            super()._assign_work_unit(node)

    return FileScheduling(config, log)
