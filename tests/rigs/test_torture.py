"""The rig for faults on real clusters: its plan, its table, and in `make proof` a minute of it and a planted bug."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marshal_py.client.values.options import ConsumerOptions
from tests.rigs import torture
from tests.rigs.torture import FAULTS, ROWS, Outcome, chosen, kept, options_of, table

VOID = 2  # the exit code
SEEDS_MAX = 3


def test_which_rows_and_faults_a_seed_stands_for() -> None:
    assert [row.name for row in chosen(options_of(["--seed", "1"]))] == [ROWS[0].name, ROWS[1].name]
    assert [row.name for row in chosen(options_of(["--seed", "4"]))] == [ROWS[6].name, ROWS[7].name]
    assert [row.name for row in chosen(options_of(["--seed", "9", "--rows", "99"]))] == [row.name for row in ROWS]
    assert options_of([]).faults == FAULTS
    assert options_of(["--faults", "kill,link"]).faults == ("kill", "link")
    planted = options_of(["--plant", "late-heartbeat-wins"])
    assert (planted.plant, planted.faults, len(chosen(planted))) == ("P4", ("late",), 1)


def test_every_row_has_options_that_a_consumer_takes() -> None:
    for row in ROWS:
        ConsumerOptions(delivery=row.delivery, **row.worker.get("options", {}))  # type: ignore[arg-type]


def test_a_fault_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--faults", "kill,earthquake"])
    assert "earthquake: some of kill," in capsys.readouterr().err


def test_a_matrix_goes_on_where_it_stopped_and_says_what_it_has(tmp_path: Path) -> None:
    counters = {"deliveries": 12, "redelivered": 3, "takeovers": 2, "handovers": 1}
    done = Outcome(ROWS[0].name, 1, {"kill": 2}, counters, [2_000, 4_000], ["S3: no"], "2 take-overs, 3 are needed")
    out = tmp_path / "torture.json"
    options = options_of(["--out", str(out)])
    assert kept(options) == []
    out.write_text(json.dumps([vars(done)]))
    assert kept(options) == [done]
    options.totals = tmp_path / "proof.json"
    torture.add_up(options, [done])
    torture.add_up(options, [done])
    (totals,) = json.loads(options.totals.read_text())
    assert totals["totals"] == {"torture_rows": 2, "torture_steps": 4, "torture_takeovers": 4, "torture_deliveries": 24}
    assert totals["failures"] == [f"python -m tests.rigs.torture --seed 1 --row '{done.row}' --seconds 300"] * 2
    _, line = table([done]).splitlines()
    assert line.removeprefix(ROWS[0].name).split() == [
        *("2", "12", "3", "2", "3.0", "5.9", "1", "1"),
        *("void:", "2", "take-overs,", "3", "are", "needed"),
    ]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_minute_of_every_fault(tmp_path: Path) -> None:
    """A run in which nobody took over from anybody says nothing: on a busy machine one may come to that."""
    options, codes = ["--seconds", "60", "--totals", str(tmp_path / "proof.json")], [VOID]
    while codes[-1] == VOID and len(codes) <= SEEDS_MAX:
        codes.append(torture.main([*options, "--seed", str(len(codes))]))
    assert codes[-1] == 0


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_planted_bug_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert torture.main(["--seconds", "30", "--seed", "2", "--plant", "late-heartbeat-wins"]) == 1
    assert "reports another state at checkpoint" in capsys.readouterr().out
