"""`marshal simulate`: one result for any number of processes, a trace that changes nothing, exit codes, mutants."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from marshal_py.protocol.fold.world import FOLD_VERSION
from marshal_py.protocol.wire.records import Checkpoint, ClaimState, Heartbeat
from marshal_sim.cluster.run import Result as Ran
from marshal_sim.cluster.run import simulate as run_seed
from marshal_sim.commands import one_run, simulate
from marshal_sim.commands.seeds import FLAGS
from marshal_sim.judge.evidence import Violation
from marshal_sim.mutants.mutants import MUTANTS, SEEDS_BASE, Hunt, switched_on
from marshal_sim.tools import sweep
from marshal_sim.tools.schedule import Schedule, text_of
from tests.cli.shell import DEADLINE_S, REPOSITORY, Shell
from tests.support import dumps
from tests.support.command_line import simulate as run
from tests.support.differential_log import DifferentialLog
from tests.support.timeline_page import data_in

SEEDS = range(2, 4)  # not void: their take-overs are asserted below
FIRST = 5  # this seed and the next ones are quick
QUICK = "X11"  # in small worlds, so that it is found and made small within a second or two
RARE = "X9"  # a mutant that few schedules show
TOTALS = {
    "seeds",
    "violations",
    "void",
    "takeovers",
    "handovers",
    "deliveries",
    "faults",
    "events",
    "simulated_hours",
    "trace_hash",
    "failing",
}


@functools.cache
def ran_of(seed: int) -> Ran:
    """The result of a seed of the shipped code; several tests look at the first ones."""
    return run_seed(seed)


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- many seeds


def test_the_sum_is_the_same_with_one_process_and_with_two() -> None:
    """Also with other hash seeds: the spawned processes draw their own."""
    one, two = (run("--seeds", f"{SEEDS.start}:{SEEDS.stop}", "--processes", number, "--json") for number in ("1", "2"))
    assert one.exit_code == two.exit_code == 0, one.output + two.output
    assert objects(one) == objects(two)
    (found,) = objects(one)
    assert set(found) == TOTALS
    assert found["seeds"] == len(SEEDS)
    assert (found["violations"], found["void"], found["failing"]) == (0, False, [])
    ran = [ran_of(seed) for seed in SEEDS]
    for name in ("takeovers", "handovers", "deliveries", "faults", "events", "simulated_hours"):
        assert found[name] == sum(getattr(result, name) for result in ran) > 0


def test_every_seed_counts_in_the_hash() -> None:
    hashes = {run("--seeds", seeds, "--processes", "1", "--json").stdout for seeds in ("5:7", "5:8", "6:8")}
    assert len(hashes) == 3


def test_the_results_come_in_the_order_of_the_seeds() -> None:
    assert [result.seed for result in sweep.sweep(range(5, 8), 2)] == [5, 6, 7]


@contextmanager
def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Ran], Ran]) -> Iterator[None]:
    """Each run's result as `change` says: the shipped code gives no violation to report."""
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "simulate", lambda seed, *rest, **named: change(run_seed(seed, *rest, **named)))
        yield


def violated(result: Ran) -> Ran:
    return result._replace(violations=(Violation("S2", 17, 4, "planted"),)) if result.seed == FIRST else result


def test_a_violation_is_1_and_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    with changed(monkeypatch, violated):
        as_json = run("--seeds", "5:7", "--processes", "1", "--json")
        plain = run("--seeds", "5:7", "--processes", "1")
    assert as_json.exit_code == plain.exit_code == 1
    (found,) = objects(as_json)
    assert (found["violations"], found["failing"]) == (1, [FIRST])
    assert "seed 5: S2 violated at 17 ms, log offset 4: planted" in plain.stderr
    assert "again: marshal simulate --seed 5 --trace" in plain.stdout


@pytest.mark.parametrize("figure", ["takeovers", "deliveries"])
def test_a_void_search_is_1(monkeypatch: pytest.MonkeyPatch, figure: str) -> None:
    with changed(monkeypatch, lambda result: result._replace(**{figure: 0})):
        result = run("--seeds", "5:6", "--processes", "1", "--json")
    assert result.exit_code == 1
    assert objects(result)[0]["void"] is True
    assert "void" in result.stderr


# --- one seed


def test_one_seed_prints_its_counters() -> None:
    (found,) = objects(run("--seed", "3", "--json"))
    ran = ran_of(3)
    for name in ("seed", "verdict", "takeovers", "deliveries", "events", "trace_hash", "strikes", "counted"):
        assert found[name] == getattr(ran, name)
    assert found["scenario"]["kinds"] == sorted(ran.scenario.kinds)
    plain = run("--seed", "3")
    assert plain.exit_code == 0
    assert ran.trace_hash in plain.stdout
    assert plain.stdout.splitlines()[-1] == "again: marshal simulate --seed 3 --trace"


def test_a_trace_tells_everything_and_changes_nothing() -> None:
    # Of one log that stays: offsets of several logs would not be one row.
    seed = next(seed for seed in range(3, 100) if not ran_of(seed).scenario.kinds & {"logs", "recreate", "gap"})
    *trace, found = objects(run("--seed", str(seed), "--trace", "--json"))
    ran = ran_of(seed)
    assert found["trace_hash"] == ran.trace_hash
    times = [event["ms"] for event in trace]
    assert times == sorted(times)
    records = [event for event in trace if event["what"] == "record"]
    assert [event["offset"] for event in records] == list(range(len(records)))
    assert {event["verdict"] for event in records} <= {"accepted", "rejected", "ignored"}
    assert sum(event["what"] == "delivery" for event in trace) == ran.deliveries
    assert sum(event["what"] == "fault" for event in trace) == sum(ran.strikes.values())
    plain = run("--seed", str(seed), "--trace").stdout.splitlines()
    first = next(line for line in plain if "@0" in line.split())
    assert first.split()[1] == "ms"
    assert "accepted  the log begins" in first


@pytest.mark.parametrize("kind", ["twin", "crash", "poison"])
def test_watching_a_run_leaves_it_as_it_is(kind: str) -> None:
    seed = next(seed for seed in range(FIRST, 100) if kind in ran_of(seed).strikes)
    result, trace, _ = sweep.trace_seed(seed)
    assert result == ran_of(seed)
    assert any(event.what == "fault" and event.text == kind for event in trace)


def test_a_seed_with_a_violation_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    with changed(monkeypatch, violated):
        result = run("--seed", str(FIRST))
    assert result.exit_code == 1
    assert "S2 violated at 17 ms, log offset 4: planted" in result.stdout


# --- planted bugs


def test_a_mutant_is_found_and_its_seed_shows_it_again() -> None:
    searched = run("mutants", QUICK, "--json")
    assert searched.exit_code == 1
    (found,) = objects(searched)
    assert found["found"] is True
    assert found["seed"] == SEEDS_BASE + found["schedules"] - 1
    again = run("mutants", QUICK, "--seed", str(found["seed"]))
    assert again.exit_code == 1
    assert f"{found['violations'][0]['invariant']} violated" in again.stdout
    assert again.stdout.splitlines()[-1] == f"again: {found['again']}"


def test_a_mutant_that_is_not_found_is_0() -> None:
    first = next(seed for seed in range(FIRST, 100) if not sweep.run_one(seed, RARE).violations)
    result = run("mutants", RARE, "--seed", str(first), "--json")
    assert result.exit_code == 0
    assert objects(result)[0]["found"] is False


def test_all_mutants_are_named_and_none_is_claimed_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["X3", QUICK]
    monkeypatch.setattr(sweep, "all_mutants", lambda: names)
    monkeypatch.setattr(sweep, "BASES", sweep.BASES[:2])
    monkeypatch.setattr(sweep, "hunt", functools.cache(sweep.hunt))  # the second command prints what the first found
    result = run("mutants", "--json", "--processes", "1", "--schedules", "40")
    assert result.exit_code == 0, result.output
    counted, found = objects(result)
    assert (counted["found"], counted["invariant"]) == ("counted", "S3")
    assert found["found"] is True
    assert found["invariant"]
    assert (counted["places"], found["places"]) == ([], [*MUTANTS[QUICK].places()])
    assert [
        line.split()[:2] for line in run("mutants", "--processes", "1", "--schedules", "40").stdout.splitlines()
    ] == [["X3", "counted"], [QUICK, "found"]]


def test_a_mutant_that_escapes_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "all_mutants", lambda: [QUICK])
    monkeypatch.setattr(sweep, "find", lambda name, schedules, base: Hunt(name, False, "", schedules, -1))
    result = run("mutants", "--json", "--schedules", "7")
    assert result.exit_code == 1
    (found,) = objects(result)
    assert (found["mutant"], found["found"], found["schedules"], found["seed"]) == (QUICK, False, 7, None)


def test_the_list_of_mutants_is_complete() -> None:
    names = sweep.all_mutants()
    assert set(names) == set(MUTANTS) | set(sweep.COUNTED)
    assert names[:2] == ["X1", "X2"]
    assert names.index("X9") < names.index("X10")


def test_bugs_are_planted_in_the_client_itself_and_not_in_the_fold_alone() -> None:
    rooms = ("marshal_py.client", "marshal_py.spark", "marshal_py.transport")
    assert sum(any(place.startswith(rooms) for place in mutant.places()) for mutant in MUTANTS.values()) >= 25


# --- one schedule: small, kept, drawn


def test_a_failing_seed_is_told_shrunk_kept_and_replayed(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    seed = str(sweep.hunt(QUICK, 40).seed)
    shown = run("mutants", QUICK, "--seed", seed)
    assert shown.exit_code == 1
    assert any(line.startswith(">") for line in shown.stdout.splitlines()), "the guilty record"
    shrunk = run("mutants", QUICK, "--seed", seed, "--shrink", str(kept), "--json")
    assert shrunk.exit_code == 1
    assert f"mutant {QUICK}\n" in kept.read_text(encoding="utf-8")
    (first,) = objects(shrunk)
    (second,) = objects(run("--scenario", str(kept), "--json"))
    assert first == second
    assert first["again"] == f"marshal simulate --scenario {kept}"


def test_what_cannot_be_shrunk_or_read_says_so(tmp_path: Path) -> None:
    refused = run("--seed", "3", "--shrink", str(tmp_path / "kept.txt"))
    assert refused.exit_code == 1
    assert "nothing to shrink" in refused.stderr
    bad = tmp_path / "bad.txt"
    bad.write_text("seed 1\nkinds rain\n", encoding="utf-8")
    named = run("--scenario", str(bad))
    assert named.exit_code == 2
    assert "line 2" in named.stderr


def test_a_page_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its histogram is that of this run and of the next ones; two of them say how."""
    monkeypatch.setattr(one_run, "NEIGHBOURS", 3)
    html = tmp_path / "report.html"
    done = run("--seed", str(FIRST), "--html", str(html))
    assert done.exit_code == 0, done.output
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "this run and the seeds 6 to 7" in data_in(text)["notes"][-1]


# --- a dump of a cluster


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "run.dump"
    dumps.of_run(path, 3)
    return path


def test_a_dump_is_judged_and_runs_go_on_from_it(dump: Path) -> None:
    (found,) = objects(run("--dump", str(dump), "--json"))
    assert (found["verdict"], found["violations"], found["first"]) == ("ok", 0, None)
    assert min(found[name] for name in ("records", "sessions", "claims", "handovers", "digests")) > 0
    plain = run("--dump", str(dump))
    assert plain.exit_code == 0
    assert f"{found['claims']} claims, {found['handovers']} hand-overs" in plain.stdout
    assert plain.stdout.splitlines()[-1] == "no promise is broken, as far as a log shows"
    again, races = objects(run("--dump", str(dump), "--seeds", "0:2", "--processes", "1", "--json"))
    assert again == found
    assert set(races) == TOTALS
    assert (races["seeds"], races["violations"], races["void"]) == (2, 0, False)


def test_one_run_from_a_dump_is_told(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_run, "NEIGHBOURS", 3)
    html = tmp_path / "report.html"
    done = run("--dump", str(dump), "--seed", "1", "--trace", "--html", str(html), "--group", "billing")
    assert done.exit_code == 0, done.output
    assert "c1#0" in done.stdout
    assert done.stdout.splitlines()[-1] == f"again: marshal simulate --dump {dump} --group billing --seed 1 --trace"
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    refused = run("--dump", str(dump), "--seed", "1", "--group", "nobody")
    assert refused.exit_code == 1
    assert "it holds no group 'nobody'; it has audit, billing" in refused.stderr


def test_a_violation_from_a_dump_is_shrunk_and_kept_with_it(tmp_path: Path) -> None:
    kept, dump = tmp_path / "kept.txt", tmp_path / "small.dump"
    dumps.of_run(dump, 1)
    bias = MUTANTS[QUICK].bias._replace(dump=str(dump))
    with switched_on(MUTANTS[QUICK]):
        seed = next(seed for seed in range(40) if run_seed(seed, bias).violations)
    kept.write_text(text_of(Schedule(seed, bias, QUICK)), encoding="utf-8")
    shrunk = run("--scenario", str(kept), "--shrink", str(kept), "--json")
    assert shrunk.exit_code == 1
    assert f"dump {dump}\n" in kept.read_text(encoding="utf-8")
    assert objects(run("--scenario", str(kept), "--json")) == objects(shrunk)


def test_a_broken_promise_in_a_dump_is_1_and_nothing_goes_on(tmp_path: Path) -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    for number in range(30):
        lie = Checkpoint(16, 1, 2, FOLD_VERSION) if number == 20 else None
        book.must(Heartbeat(session, number, (ClaimState(epoch, 101 + number),), digest=lie))
    path = dumps.of_values(tmp_path / "lie.dump", book.values)
    done = run("--dump", str(path), "--seeds", "0:2", "--json")
    assert done.exit_code == 1
    (found,) = objects(done)
    assert (found["first"]["offset"], found["first"]["who"], found["first"]["rule"]) == (24, "c", "G4")
    assert len(done.stderr.splitlines()) == 1
    assert "S1 is broken in log 0, offset 24" in done.stderr
    plain = run("--dump", str(path)).stdout.splitlines()
    assert any(line.startswith("> ") and "@24 " in line for line in plain), "the story, with the record"


def test_a_dump_that_is_none_says_so(tmp_path: Path) -> None:
    for content in (b"", b"something else\n"):
        path = tmp_path / "broken.dump"
        path.write_bytes(content)
        done = run("--dump", str(path), "--json")
        assert done.exit_code == 1
        assert done.stdout == ""
        assert "marshal log dump" in done.stderr
    assert run("--dump", str(tmp_path / "missing.dump")).exit_code == 1


# --- usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "5"],
        ["--seeds", "5:5"],
        ["--seeds", "-1:5"],
        ["--seeds", "0:5", "--seed", "1"],
        ["--trace"],
        ["--html", "report.html"],
        ["--shrink", "kept.txt", "--seeds", "0:5"],
        ["--processes", "0"],
        ["--group", "billing", "--seed", "1"],
        ["mutants", "--seeds", "0:5"],
        ["mutants", "--seed", "1"],
        ["mutants", "X99"],
        ["mutants", "X3"],
        ["--dump", "x.dump", "--seeds", "0:2", "--seed", "1"],
        ["--dump", "x.dump", "--trace"],
        ["--dump", "x.dump", "--group", "billing"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_the_example_of_the_help_text_runs() -> None:
    line = simulate.EXAMPLE.splitlines()[-1].strip()
    assert line in run("--help").stdout
    done = subprocess.run(
        [sys.executable, "-m", "marshal_py.cli", *line.split()[1:]],
        cwd=REPOSITORY,
        text=True,
        env=Shell("").environment(),
        timeout=DEADLINE_S,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["violations"] == 0


@pytest.mark.parametrize("flag", FLAGS)
def test_a_kind_of_run_happens_where_it_is_asked_for(flag: str) -> None:
    """Seed 17 draws none of them."""
    done = run("--seed", "17", f"--{flag}", "--json")
    assert done.exit_code == 0, done.output
    (found,) = objects(done)
    assert found["again"].startswith(f"marshal simulate --{flag} --seed 17")
    assert found["trace_hash"] != ran_of(17).trace_hash
