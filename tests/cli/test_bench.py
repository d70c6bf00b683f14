"""`marshal bench races`: rates as JSON and for people, the same hash for any number of processes, exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import Result

from marshal_py.cli import bench
from marshal_sim.tools import races
from marshal_sim.tools.races import Task, TimedRun
from tests.support.command_line import invoke

RATES = {"runs", "cpu_s", "events_per_cpu_s", "simulated_hours_per_cpu_hour", "races_per_cpu_s"}


def run(*arguments: str) -> Result:
    return invoke(["bench", "races", *arguments])


def test_rates_as_json_and_for_people() -> None:
    done = run("--seeds", "0:3", "--processes", "1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["faulty"]) == set(found["calm"]) == RATES
    assert (found["seeds"], found["runs"], found["violations"], found["complete"]) == (3, 4, 0, True)
    assert found["faulty"]["events_per_cpu_s"] > 0
    plain = run("--seeds", "0:3", "--processes", "2").stdout
    assert found["trace_hash"] in plain
    assert "seeds per minute" in plain


def test_a_violation_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def violated(task: Task) -> TimedRun:
        return TimedRun(task, 1.0, 1, 1.0, 1, 1, "")

    monkeypatch.setattr(races, "run", violated)
    done = run("--seeds", "0:1", "--processes", "1")
    assert done.exit_code == 1
    assert "violated" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--seeds", "5"], ["--seeds", "0:5", "--seconds", "1"], ["--seconds", "0"], ["--processes", "0"]]
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_the_example_of_the_help_text_runs() -> None:
    line = bench.EXAMPLE.splitlines()[-1].strip()
    assert line in run("--help").stdout
    done = invoke(line.split()[1:])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["runs"] >= 1
