"""What the rates are over: the same runs whatever the number of processes, whole after Ctrl-C; a sweep."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from marshal_sim.tools import races, sweep
from marshal_sim.tools.races import Task
from tests.support import soak

SEEDS = range(1, 3)
SWEPT = range(100, 125)


def quiet(runs: int, seconds: float) -> None:
    """Ignores progress."""


@pytest.fixture
def _one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs when the end comes is thrown away."""
    monkeypatch.setattr(races, "AHEAD", 1)


def test_the_hash_does_not_depend_on_the_number_of_processes() -> None:
    one, two = (races.measure(SEEDS, None, processes, quiet) for processes in (1, 2))
    assert one.trace_hash == two.trace_hash
    assert one.runs == two.runs == len(SEEDS) + 1
    assert (one.violations, one.complete, one.seeds) == (0, True, len(SEEDS))
    assert one.faulty.runs == len(SEEDS)
    assert one.calm.runs == 1
    assert one.calm.simulated_hours_per_cpu_hour > 0
    assert races.measure(range(2, 4), None, 1, quiet).trace_hash != one.trace_hash


@pytest.mark.usefixtures("_one_ahead")
def test_so_many_seconds_run_the_first_seeds() -> None:
    """At least one run; as many as were run give the same hash again."""
    timed = races.measure(None, 0.1, 2, quiet)
    assert timed.runs >= 1
    assert timed.seeds >= 1
    told: list[int] = []
    again = races.measure(range(timed.seeds), None, 1, lambda runs, seconds: told.append(runs))
    assert again.runs - timed.runs in (0, 1)  # the calm run of the last seed may have been cut off
    if again.runs == timed.runs:
        assert again.trace_hash == timed.trace_hash
    assert told == list(range(1, again.runs + 1))


@pytest.mark.usefixtures("_one_ahead")
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_an_interrupt_leaves_what_was_run(processes: int) -> None:
    def stop(runs: int, seconds: float) -> None:
        if runs == 3:
            raise KeyboardInterrupt

    found = races.measure(None, None, processes, stop)
    assert not found.complete
    assert found.runs == 3
    assert found.trace_hash == races.measure(range(2), None, 1, quiet).trace_hash  # 0, 0 calm, 1


def test_the_tasks_are_every_seed_and_now_and_then_a_calm_one() -> None:
    assert list(races.tasks(range(5, 7))) == [Task(5, False), Task(5, True), Task(6, False)]


@pytest.mark.proof  # test_simulate.py has seeds of its own, and tests/cli/test_simulate.py sweeps
@pytest.mark.timeout(600)
def test_a_sweep_of_seeds_violates_nothing() -> None:
    """Behind those of test_simulate.py, in two processes. More of them: `marshal simulate`, `make soak`."""
    found = sweep.total(sweep.sweep(SWEPT, 2))
    assert (found.violations, found.failing, found.void) == (0, [], False)
    assert found.seeds == len(SWEPT)
    assert found.takeovers > len(SWEPT)
    assert found.deliveries > 50 * len(SWEPT)


def test_a_long_proof_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals add up over runs of `make soak`; a seed that fails is named, and the exit code is 1."""
    monkeypatch.setattr(soak, "SEEDS", 2)
    arguments = ["--only", "seeds", "--seconds", "0", "--processes", "1", "--out", str(tmp_path / "proof.json")]
    monkeypatch.setattr(soak, "WORK", {"seeds": soak.seeds})
    ran = functools.cache(sweep.run_one)
    monkeypatch.setattr(sweep, "sweep", lambda seeds, processes: map(ran, seeds))
    for seconds in ("0.001", "0.001"):
        assert soak.main([*arguments, "--seconds", seconds]) == 0
    (found,) = json.loads((tmp_path / "proof.json").read_text(encoding="utf-8"))
    assert found["totals"]["seeds"] == 4
    assert found["totals"]["violations"] == 0
    assert found["totals"]["events"] == sweep.total(map(ran, range(4))).events
    planted = sweep.total(())._replace(seeds=6, failing=[13], violations=1, void=False)
    monkeypatch.setattr(sweep, "total", lambda results: planted if list(results) else None)
    assert soak.main([*arguments, "--seconds", "0.001"]) == 1
    (found,) = json.loads((tmp_path / "proof.json").read_text(encoding="utf-8"))
    assert found["failures"] == ["marshal simulate --seed 13"]
