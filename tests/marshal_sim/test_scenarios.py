"""Schedules that are kept: each fails with its planted bug and passes without it; and how they are made small."""

from __future__ import annotations

from pathlib import Path

import pytest

from marshal_py.errors import InvalidOption
from marshal_sim.cluster.scenario import Options
from marshal_sim.mutants.mutants import MUTANTS, SEEDS_BASE, find
from marshal_sim.tools import sweep
from marshal_sim.tools.schedule import Schedule, of_seed, parse, run, telling, text_of
from marshal_sim.tools.shrink import shrink
from marshal_sim.tools.story import PROMISES, story

FOLDER = Path(__file__).parents[1] / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))
# A change of the simulator draws other chances: then another course of the same small world must show the bug.
COURSES = 40


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_kept_schedule_fails_with_its_bug_and_passes_without(file: Path) -> None:
    kept = parse(file.read_text(encoding="utf-8"))
    assert kept.mutant is not None
    courses = [kept.options.salt, *range(1, COURSES)]
    for salt in courses:
        schedule = kept._replace(options=kept.options._replace(salt=salt))
        if kept.violates in {violation.invariant for violation in run(schedule).violations}:
            assert not run(schedule._replace(mutant=None)).violations, "the shipped code does it too"
            return
    pytest.fail(
        f"{file.name} shows nothing any more: python -m marshal_sim mutants {kept.mutant} --seed N --shrink {file}"
    )


def test_a_text_is_the_schedule_and_back() -> None:
    options = Options(
        clients=2,
        partitions=1,
        interval_ms=2_000,
        intervals=9,
        rate=3,
        mode=2,
        salt=4,
        until_ms=7_000,
        kinds=frozenset({"stop", "delay"}),
        skip=frozenset({3, 1}),
    )
    for schedule in (Schedule(5), Schedule(7, options, "X9", "S6")):
        assert parse(text_of(schedule)) == schedule
    assert parse("# a comment\n\nseed 5 # and one behind\n") == Schedule(5)


@pytest.mark.parametrize("line", ["clients two", "kinds rain", "mutant X99", "mode sometimes", "colour red", "skip a"])
def test_a_wrong_line_is_named(line: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse(f"seed 5\n{line}\n")
    assert caught.value.option == "line 2"
    assert caught.value.value == line


def test_a_schedule_without_a_seed_is_none() -> None:
    with pytest.raises(InvalidOption, match="seed N"):
        parse("clients 2\n")


@pytest.mark.parametrize("name", ["X11", pytest.param("X9", marks=pytest.mark.proof)])  # 30 runs, and hundreds
def test_a_schedule_shrinks_and_still_fails(name: str) -> None:
    """Smaller, the same invariant, and a run that can be repeated."""
    begin = of_seed(find(name, 40).seed, name)
    before = run(begin)
    small = shrink(begin)
    assert small.schedule.violates == telling(before.violations).invariant
    assert small.schedule.violates in {violation.invariant for violation in small.result.violations}
    assert small.result.events < before.events
    assert small.result.scenario.clients < before.scenario.clients
    assert run(small.schedule) == small.result


def test_what_does_not_fail_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="violates nothing"):
        shrink(Schedule(1, Options(clients=1, partitions=1, calm=True, intervals=3)))


def test_a_skipped_strike_does_not_happen() -> None:
    """All others may happen at other times, for chance takes another course."""
    options = MUTANTS["D8"].bias
    struck = sum(run(Schedule(SEEDS_BASE, options)).strikes.values())
    assert struck > 1
    skipped = run(Schedule(SEEDS_BASE, options._replace(skip=frozenset(range(100)))))
    assert skipped.strikes == {}


def test_a_run_can_end_early() -> None:
    result = run(Schedule(3, Options(interval_ms=2_000, until_ms=5_000)))
    assert result.simulated_hours == 5_000 / 3_600_000
    assert not result.violations


def test_the_story_marks_the_record_and_names_the_promise() -> None:
    kept = parse((FOLDER / "x9.txt").read_text(encoding="utf-8"))
    schedule = kept if run(kept).violations else of_seed(find("X9", 40).seed, "X9")
    traced = sweep.trace_schedule(schedule)
    violation = telling(traced.result.violations)
    lines = list(story(violation, traced.trace))
    marked = [line for line in lines if line.startswith(">")]
    assert [f"@{violation.offset}" in line for line in marked] == [True]
    assert PROMISES[violation.invariant] in lines[-2]
    assert violation.text in lines[-1]
