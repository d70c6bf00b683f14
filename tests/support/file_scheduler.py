"""A pytest plugin that decides which test files run where: `--quick` for `make check`, and a scheduler for `pytest -n`.

`--quick` leaves out the files that need Spark or Apache Kafka, and those whose tests last longest (SLOW).

With `--dist loadfile`, every process of pytest-xdist begins with files of its own kind, because starting a Spark
session, a cluster of three brokers or a cluster of one takes long and happens once per process. A process that has no
more files of its kind takes those that need neither Kafka nor Spark, then the rest. Within a kind the slow files come
first, so that no process waits for one of them at the end. All tests of a file run in one process, in their order.
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
SLOW: Final = (
    "tests/spark/test_kills.py",
    "tests/kafka/test_bench.py",
    "tests/spark/test_log_tables.py",
    "tests/kafka/test_processes.py",
    "tests/kafka/test_admin.py",
    "tests/kafka/test_recreated.py",
    "tests/marshal_sim/test_exhaustive.py",
    "tests/marshal_sim/test_simulate.py",
    "tests/marshal_sim/test_races.py",
    "tests/marshal_sim/test_orphans.py",
    "tests/marshal_sim/test_dump_state.py",
    "tests/marshal_sim/test_queries.py",
    "tests/marshal_sim/test_policies.py",
    "tests/marshal_sim/test_both_folds.py",
    "tests/cli/test_simulate.py",
    "tests/cli/test_examples.py",
    "tests/cli/test_demo.py",
    "tests/properties/test_folds_agree.py",
    "tests/transport/test_client_versions.py",
    "tests/test_api_reference.py",
    "tests/test_types.py",
)


def kind_of(file: str) -> int:
    """What the tests of this file may start."""
    if file.startswith("tests/spark/") or file in SPARK_ELSEWHERE:
        return SPARK
    return KAFKA if file.startswith("tests/kafka/") else NEITHER


def is_quick(file: str) -> bool:
    """Whether `--quick` runs this file."""
    return kind_of(file) == NEITHER and file not in SLOW


def order_of(process: int) -> tuple[int, int, int]:
    """The kinds in the order in which a process takes them. Processes count from 0; those after 2 do as 2 does."""
    return ((SPARK, NEITHER, KAFKA), (KAFKA, NEITHER, SPARK), (NEITHER, KAFKA, SPARK))[min(process, 2)]


def next_file(files: list[str], process: int) -> str:
    """The file that this process takes, of those left in the order of collection."""
    order = order_of(process)
    return min(files, key=lambda file: (order.index(kind_of(file)), file not in SLOW))


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
