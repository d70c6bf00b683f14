"""The rig for faults on real clusters: its plan, its table, and in `make proof` a minute of it and a planted bug."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import marshal_py
from marshal_py.client.values.options import ConsumerOptions
from tests.rigs import torture
from tests.rigs.torture import FAULTS, ROWS, Outcome, chosen, keep, kept, options_of, table
from tests.support.judge import BESIDE, TAKE_OVER

VOID = 2  # the exit code
SEEDS_MAX = 3


def test_which_rows_and_faults_a_seed_stands_for() -> None:
    assert [row.name for row in chosen(options_of(["--seed", "1"]))] == [ROWS[0].name, ROWS[1].name]
    assert [row.name for row in chosen(options_of(["--seed", "4"]))] == [ROWS[6].name, ROWS[7].name]
    assert [row.name for row in chosen(options_of(["--seed", "9", "--rows", "99"]))] == [row.name for row in ROWS]
    assert options_of([]).faults == FAULTS
    assert options_of(["--faults", "kill,link"]).faults == ("kill", "link")
    assert options_of(["--faults", "none"]).faults == ()
    planted = options_of(["--plant", "late-heartbeat-wins"])
    assert (planted.plant, planted.faults, len(chosen(planted))) == ("P4", ("late",), 1)


def test_every_row_has_options_that_a_consumer_takes() -> None:
    for row in ROWS:
        ConsumerOptions(delivery=row.delivery, **row.worker.get("options", {}))  # type: ignore[arg-type]


def test_a_fault_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--faults", "kill,earthquake"])
    assert "earthquake: none, or some of kill," in capsys.readouterr().err


def test_faults_at_once_strike_different_processes(tmp_path: Path) -> None:
    """A frozen process would never end after SIGTERM, and a killed one is not the one that was started in its place."""
    torturing = torture.Torture(ROWS[0], 1, FAULTS, cast("Any", None), tmp_path)
    torturing._names = ["w1", "w2"]
    run = cast("Any", SimpleNamespace(processes=dict.fromkeys(torturing._names, SimpleNamespace(running=True))))
    assert {torturing._victim(run), torturing._victim(run)} == {"w1", "w2"}
    assert torturing._victim(run) is None


def test_a_matrix_goes_on_where_it_stopped_and_adds_its_runs_up(tmp_path: Path) -> None:
    out = tmp_path / "torture.jsonl"
    assert kept(out) == []
    row, now = ROWS[0].name, marshal_py.__version__
    counters = {"deliveries": 12, "redelivered": 3, "takeovers": 3, "handovers": 1}
    times = {TAKE_OVER: [2_000, 4_000], BESIDE: [700], "hand-over": [300]}
    steps = {"start": 2, "kill": 2, "freeze": 1, "broker_link": 3, "broker_disk": 4, "late": 5}
    first = Outcome(now, row, 1, 1_800, steps, counters, times, ["S3: no"], "")
    second = Outcome(now, row, 2, 1_800, {"kill": 1}, counters, {**times, TAKE_OVER: []}, [], "too little")
    for outcome in (first, second, dataclasses.replace(first, version="0.0.1")):
        keep(out, outcome)
    assert kept(out) == [first, second]
    options = ["--row", row, "--resume", "--out", str(out)]
    assert torture.torture(options_of([*options, "--seed", "1"]), tmp_path) == [first]
    assert torture.main([*options, "--seed", "1"]) == 1, "one of its violations"
    _, line = table([first, second]).splitlines()
    assert line.removeprefix(row).split() == [
        *("1.00", "3", "1", "4", "3", "5", "24", "6"),
        *("2", "3.0", "4.0", "2", "0.7", "0.7", "2", "1"),
        *("void:", "too", "little"),
    ]
    assert table([first, dataclasses.replace(second, row=ROWS[1].name)]).splitlines()[-1].startswith("all   ")


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_minute_of_every_fault(tmp_path: Path) -> None:
    """A run in which nobody took over from anybody says nothing: on a busy machine one may come to that."""
    options, codes = ["--seconds", "60", "--out", str(tmp_path / "torture.jsonl")], [VOID]
    while codes[-1] == VOID and len(codes) <= SEEDS_MAX:
        codes.append(torture.main([*options, "--seed", str(len(codes))]))
    assert codes[-1] == 0


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_planted_bug_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert torture.main(["--seconds", "30", "--seed", "2", "--plant", "late-heartbeat-wins"]) == 1
    assert "reports another state at checkpoint" in capsys.readouterr().out
