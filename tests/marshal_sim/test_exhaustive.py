"""The exhaustive search: every quick model clean within bounds, every kind of model alive, a search that can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py.errors import InvalidOption
from marshal_sim.exhaustive.bfs import Progress
from marshal_sim.exhaustive.canonical import canonical
from marshal_sim.exhaustive.configuration import Configuration
from marshal_sim.exhaustive.configurations import MODELS, QUICK, WIDE, Model
from marshal_sim.exhaustive.explore import STATES_MAX, explore, search
from marshal_sim.exhaustive.search import Search
from marshal_sim.exhaustive.setup_script import SetupScript
from marshal_sim.judge.step_checker import Delivery, Facts, judge_advances, judge_delivery, judge_fold
from tests.support import wire
from tests.support.command_line import simulate as run


def changed(name: str, change: Callable[[Configuration], Configuration]) -> Model:
    model = MODELS[name]
    return model._replace(configuration=change(model.configuration))


CLAIMS_LESS = frozenset({"revival"})  # models in whose bounds next to nothing is delivered
# The models that take longest are searched in smaller bounds here, whole by `python -m marshal_sim exhaustive NAME`.
SMALLER: dict[str, dict[str, int]] = {
    "at-most-once": {"records": 5},
    "join-leave": {"records": 5},
    "duplicates-at-most-once": {"records": 4, "in_flight": 2},
    "stranger": {"in_flight": 3},
    "greedy": {"records": 4},
    "blocks-mappings": {"records": 3},
    "give-back-move": {"in_flight": 2},
    "give-back-twin": {"in_flight": 2},
}


# Those that take most of the time: `make proof` searches them.
LARGE = {
    *("give-back-eviction", "mode-change", "eviction", "two-admins", "step-down"),
    *("eviction-at-most-once", "set-position", "give-back-join"),
    *("last-will", "at-least-once", "fast-reclaim-of-the-living", "join-leave", "revival", "restart"),
    *("give-back-move", "pinned-eviction", "give-back-twin", "snapshots", "duplicates-at-most-once", "fast-reclaim"),
}
SMALL = [
    pytest.param(model.name, SMALLER.get(model.name, {}), marks=[pytest.mark.proof] if model.name in LARGE else [])
    for model in QUICK
]


# In bounds that `make test` has no time for, if they are not LARGE.
WIDER: dict[str, dict[str, int]] = {
    "duplicates-at-most-once": {"in_flight": 2},
    "stranger": {},
    "greedy": {},
    "blocks-mappings": {},
}
WHOLE = [pytest.param(name, bounds, marks=[pytest.mark.proof]) for name, bounds in WIDER.items()]


@pytest.mark.parametrize(("name", "bounds"), [*SMALL, *WHOLE])
def test_a_small_model_is_clean_and_searched_whole(name: str, bounds: dict[str, int]) -> None:
    model = changed(name, lambda whole: whole._replace(bounds=whole.bounds._replace(**bounds)))
    report = search(model, STATES_MAX, lambda progress: None, 1)
    print(report)
    assert not report.violations, "\n".join((report.violations[0].text, *report.violations[0].path))
    assert report.complete
    assert report.states > 1_000
    assert report.deliveries > 100 or name in CLAIMS_LESS


def test_large_models_have_their_names() -> None:
    assert {model.name for model in QUICK} > LARGE


def test_the_models_differ() -> None:
    assert len(QUICK) >= 12
    assert len({model.name for model in (*QUICK, *WIDE)}) == len(MODELS)


def test_a_search_is_repeatable() -> None:
    one, two = explore("prioritized-standby"), explore("prioritized-standby")
    assert one._replace(seconds=0) == two._replace(seconds=0)


def test_a_search_that_is_cut_short_says_so() -> None:
    report = explore("eviction", states_max=100)
    assert not report.complete
    assert not report.violations


# Snapshots that are loaded, strays of crashed processes, journals, admins: whatever travels between processes.
@pytest.mark.parametrize(("name", "records"), [("snapshots", 1), ("two-admins", 2), ("duplicates-at-most-once", 2)])
def test_two_processes_search_what_one_does(name: str, records: int) -> None:
    model = changed(name, lambda whole: whole._replace(bounds=whole.bounds._replace(records=records)))
    one, two = (search(model, STATES_MAX, lambda progress: None, processes) for processes in (1, 2))
    assert two.complete
    assert two.states > 1_000
    assert one._replace(seconds=0) == two._replace(seconds=0)


def test_two_processes_report_a_violation_as_one_does() -> None:
    strict = changed("twin", lambda whole: whole._replace(endings=frozenset()))
    one, two = (search(strict, STATES_MAX, lambda progress: None, processes) for processes in (1, 2))
    assert [violation.invariant for violation in one.violations] == ["T18"]
    assert one.violations[0].path
    assert one._replace(seconds=0) == two._replace(seconds=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_searched_until_ctrl_c_is_reported(processes: int) -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> None:
        seen.append(progress)
        if progress.states > 500 and all(earlier.states <= 500 for earlier in seen[:-1]):
            raise KeyboardInterrupt

    report = search(MODELS["stop"], STATES_MAX, watch, processes)
    assert report.interrupted
    assert not report.complete
    assert not report.violations
    assert 500 < report.states < explore("stop").states


def test_in_the_model_of_snapshots_a_process_loads_one() -> None:
    model = MODELS["snapshots"]
    made = Search(model.configuration)
    script = SetupScript(made)
    model.setup(script)
    script.wait(1, 0, 1)
    script.must("crash", 0)
    script.must("start", 0)
    assert made.store.get(made.unpack(script.state)[5][0]).loaded
    assert not script.broken


# --- planted bugs

# With the number of states up to which each search must have found it. Where only S1 is broken the search goes on: that
# the folds differ is only the first thing that a bug of one fold breaks.
FOUND = [
    ("D8", "eviction", "S3", 1_000),
    ("X5", "stop", "S3", 1_000),
    ("X23", "stop", "S3", 1_000),
    ("X19", "eviction", "S2", 6_000),
    ("X21", "set-position", "S11", 2_000),
    ("X8", "duplicates-at-most-once", "S6", 1_000),
    ("X6", "set-position", "S1", 3_000),
    ("X7", "set-position", "S1", 8_000),
    ("X28", "two-admins", "S1", 3_000),
    ("X29", "set-position", "S1", 2_000),
    ("X30", "pinned", "S2", 1_000),
    ("T19A", "last-will", "T18", 1_000),
    ("T19B", "last-will", "T18", 1_000),
    ("T19C", "last-will", "S7", 1_000),
]


@pytest.mark.parametrize(("mutant", "model", "invariant", "states"), FOUND)
def test_a_planted_bug_is_found(mutant: str, model: str, invariant: str, states: int) -> None:
    report = explore(model, states_max=states, mutant=mutant)
    found = {violation.invariant: violation for violation in report.violations}
    assert invariant in found
    assert found[invariant].path, "the story of the shortest way there"
    if invariant != "S1":
        assert not report.complete, "the search ends where it found something"


# --- the judge of one step


def facts_of(*values: tuple[bytes, int]) -> Facts:
    facts = Facts().then("g", wire.genesis(), 0)
    for value, sent_ms in values:
        facts = facts.then("g", value, sent_ms)
    return facts


ONE, TWO = b"1" * 16, b"2" * 16
JOIN, HEARTBEAT, EVICT, CLAIM, RELEASE, GRANT, PAUSE, MOVE, TOPOLOGY = 1, 2, 4, 5, 6, 7, 8, 9, 10


def record(number: int, *fields: object, ms: int = 0) -> tuple[bytes, int]:
    return wire.record("g", number, *fields), ms


def owned(mode: int = 1) -> list[tuple[bytes, int]]:
    """Offsets 1 to 3: a session owns t:0 by epoch 3."""
    return [record(JOIN, "c", ONE, mode, 2_000, ["t"]), record(TOPOLOGY, "t", 1, -1), record(CLAIM, 1, "t", 0, -1, 0)]


def judged(read: Facts, log: Facts, delivery: Delivery, now_ms: int = 10, journal: frozenset[Any] = frozenset()) -> str:
    return judge_delivery(delivery, read, log, journal, now_ms).partition(":")[0]


def test_the_judge_of_a_delivery_can_fail() -> None:
    """S2, S3, S5, S6, S7, S11: each from a log in which it is broken; and none where nothing is."""
    clean = facts_of(*owned())
    first = Delivery(ONE, 3, 0, True)
    assert judged(clean, clean, first) == ""
    assert judged(clean, clean, first._replace(epoch=2)) == "S2"
    assert judged(clean, clean, first._replace(instance=TWO)) == "S2"
    assert judged(clean, clean, first, now_ms=2_001) == "S3"
    assert judged(clean, clean, first._replace(offset=1)) == "S7"
    released = facts_of(*owned(), record(RELEASE, 1, 3, 0))
    assert judged(released, released, first) == "S2"
    paused = facts_of(*owned(), record(PAUSE, -1, -1, 60_000))
    assert judged(paused, paused, first) == "S11"
    other = facts_of(
        *owned(), record(RELEASE, 1, 3, 0), record(JOIN, "d", TWO, 1, 2_000, ["t"]), record(CLAIM, 5, "t", 0, 4, 0)
    )
    assert judged(clean, other, first) == "S3"
    once = facts_of(*owned(2), record(GRANT, 1, [[3, 0, 0, 2]]))
    assert judged(once, once, first) == ""
    assert judged(once, once, first._replace(offset=2)) == "S6"
    assert judged(once, once, first, journal=frozenset({("begun", "t", 0, 0, 0)})) == "S5"


def test_the_judge_of_a_record_can_fail() -> None:
    """S1, S7, S15."""
    advanced = facts_of(*owned(), record(HEARTBEAT, 1, 1, [[3, 2]]))
    finished = frozenset(("finished", "t", 0, 0, offset) for offset in range(2))
    assert judge_advances(advanced, finished) == ""
    assert judge_advances(advanced, frozenset()).startswith("S7")
    assert judge_fold(advanced, "accepted", "", advanced.digest) == ""
    assert judge_fold(advanced, "rejected", "session", advanced.digest).startswith("S1")
    assert judge_fold(advanced, "accepted", "", 1).startswith("S1")
    assert facts_of(*owned(), record(EVICT, 1, 1, 4_000, ms=3_999)).broken.startswith("S15")
    assert facts_of(*owned(), record(EVICT, 1, 1, 4_000, ms=4_000)).broken == ""


def test_the_canonical_form() -> None:
    """Equal whatever the identities and the order in sets; not equal where the order of a dict differs."""
    name = "a" * 3
    assert canonical([name, name]) == canonical(["aaa", "".join("aaa")])
    assert canonical({1, 2}) == canonical({2, 1})
    assert canonical({1: 0, 2: 0}) != canonical({2: 0, 1: 0})


# --- the command


def test_the_command_prints_bounds_and_counts() -> None:
    plain = run("exhaustive", "prioritized-standby")
    assert plain.exit_code == 0, plain.output
    assert "quanta" in plain.stdout
    assert "violations   0" in plain.stdout
    found = json.loads(run("exhaustive", "prioritized-standby", "--json").stdout)
    assert (found["complete"], found["violations"]) == (True, [])
    assert found["states"] > 1_000
    with_two = json.loads(run("exhaustive", "prioritized-standby", "--processes", "2", "--json").stdout)
    assert with_two["states"] == found["states"]
    names = run("exhaustive", "list").stdout
    assert all(name in names for name in MODELS)


def test_the_command_prints_a_violation() -> None:
    broken = run("exhaustive", "stop", "--mutant", "X5")
    assert broken.exit_code == 1
    assert "S3: " in broken.stdout
    assert "hands the next message over under epoch" in broken.stdout
    cut = run("exhaustive", "eviction", "--states", "50")
    assert cut.exit_code == 1
    assert "not complete" in cut.stdout


def test_bad_names_and_options() -> None:
    with pytest.raises(InvalidOption, match="eviction"):
        explore("nothing")
    with pytest.raises(InvalidOption, match="X9"):
        explore("eviction", mutant="nothing")
    assert run("exhaustive", "nothing").exit_code != 0
    assert run("exhaustive", "eviction", "--seed", "1").exit_code == 2
    assert run("--states", "5").exit_code == 2
