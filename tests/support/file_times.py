"""A pytest plugin that says how long each test file takes, and fails the run if a file takes far more than its budget.

`--file-times=PATH` writes the table: CPU seconds and wall seconds per file, the greatest first. tests/file_times.tsv is
such a table (docs/guarantees.md names the command), and is the budget: CPU, because wall time measures what else the
machine does. CPU seconds are those of the process that runs the tests, and of the processes for which the test itself
has waited. What fixtures wait for does not count: a broker that many files share would count where it begins and ends.
A test may also be the one during which a process of an earlier test is waited for, a JVM for example. What it cannot
have used itself, in its time and on all cores, does not count either.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

TABLE: Final = Path(__file__).parents[1] / "file_times.tsv"
TIMES: Final = 4  # a file exceeds its budget by far if it takes so many times the CPU seconds of its line
EXTRA_S: Final = 30.0  # and so many more: a file of a few seconds varies most
CORES: Final = os.cpu_count() or 1
NEW_S: Final = 10.0  # what a file without a line may take, before the factor


def used_s() -> tuple[float, float]:
    """CPU seconds of this process so far, and of the child processes that it has waited for."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system


def times(table: str) -> dict[str, tuple[float, float]]:
    """(CPU seconds, wall seconds) by file, as a table says."""
    rows = [line.split("\t") for line in table.splitlines()[1:]]
    return {file: (float(cpu), float(wall)) for file, cpu, wall in rows}


def read(table: str) -> dict[str, float]:
    """CPU seconds by file, as a table says."""
    return {file: cpu for file, (cpu, _) in times(table).items()}


def written(times: Mapping[str, tuple[float, float]]) -> str:
    """The table of these (CPU seconds, wall seconds) by file."""
    rows = sorted(times.items(), key=lambda row: (-row[1][0], row[0]))
    return "file\tcpu_s\twall_s\n" + "".join(f"{file}\t{cpu:.1f}\t{wall:.1f}\n" for file, (cpu, wall) in rows)


def exceeded(times: Mapping[str, tuple[float, float]], budget: Mapping[str, float]) -> list[str]:
    """A sentence for each file that has taken far more CPU seconds than its budget."""
    return [
        f"{file} took {cpu:.0f} CPU seconds; its line in tests/file_times.tsv says {budget.get(file, NEW_S):.0f}"
        for file, (cpu, _) in sorted(times.items())
        if cpu > TIMES * budget.get(file, NEW_S) + EXTRA_S
    ]


class FileTimes:
    """Adds up the times of the tests of each file, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._used_s = used_s()
        self.times: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def _exceeded(self) -> list[str]:
        """The table is of `make test`: it says nothing of what runs in `make proof` alone."""
        if self._config.option.markexpr == "proof":
            return []
        return exceeded(self.times, read(TABLE.read_text(encoding="utf-8")))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """In the process that runs the test: notes what this phase of it has used."""
        report = yield
        (before_s, before_children_s), self._used_s = self._used_s, used_s()
        own_s, children_s = self._used_s
        waited_for_s = min(children_s - before_children_s, CORES * report.duration) if report.when == "call" else 0.0
        report.cpu_s = own_s - before_s + waited_for_s
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = report.nodeid.partition("::")[0]
        cpu_s, wall_s = self.times[file]
        self.times[file] = (cpu_s + getattr(report, "cpu_s", 0.0), wall_s + report.duration)  # none if its process died

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if path := self._config.getoption("--file-times"):
            Path(path).write_text(written(self.times), encoding="utf-8")
        for sentence in self._exceeded():
            terminalreporter.write_line(f"BUDGET {sentence}", red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._exceeded() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-times", metavar="PATH", help="write CPU and wall seconds per test file to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes(config), "file-times")
