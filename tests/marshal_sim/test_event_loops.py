"""The shipped AsyncConsumer in virtual time: no promise is broken, and the same seed runs the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marshal_sim.cluster.run import Result, simulate
from marshal_sim.cluster.scenario import Options

AIO = Options(aio=1, lanes=1)
SEEDS = (7, 28, 37)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [simulate(seed, AIO) for seed in SEEDS]


def test_no_seed_violates_an_invariant(results: list[Result]) -> None:
    assert {result.seed: result.violations for result in results if result.violations} == {}
    assert sum(result.deliveries for result in results) >= 500
    assert sum(result.counted["S26"] for result in results) >= 100, "of `process`"


def test_the_trace_does_not_depend_on_the_hash_seed(results: list[Result]) -> None:
    program = "from marshal_sim.cluster import run, scenario\n"
    program += f"print(run.simulate({SEEDS[0]}, scenario.Options(aio=1, lanes=1)).trace_hash)"
    root = Path(__file__).resolve().parent.parent.parent
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == results[0].trace_hash
