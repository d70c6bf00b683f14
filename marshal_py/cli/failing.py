"""What `marshal simulate` does with one schedule: runs it from a file, shrinks it, tells its story, draws its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from marshal_py.cli import frame
from marshal_py.errors import InvalidOption
from marshal_py.simulator import sweep
from marshal_py.simulator.report import page, takeover_times
from marshal_py.simulator.scenario import Options
from marshal_py.simulator.schedule import Schedule, of_seed, parse, run, telling, text_of
from marshal_py.simulator.shrink import shrink
from marshal_py.simulator.story import line_of, story

NEIGHBOURS: Final = 20  # runs whose take-overs make the histogram: one run alone has a few


class Asked(NamedTuple):
    """What is wanted of one run."""

    trace: bool  # all that happened
    keep: Path | None  # made small, as a schedule in this file
    html: Path | None  # a page


def show(
    file: Path | None, seed: int | None, mutant: str | None, asked: Asked, as_json: bool, queries: int = 0
) -> None:
    """Runs the schedule of `file`, or of a seed, with so many streaming queries. 1 if it violates."""
    schedule, again = _wanted(file, seed, mutant)
    if queries:
        schedule = schedule._replace(options=schedule.options._replace(queries=queries))
        again = f"marshal simulate --queries {queries} --seed {seed} --trace"
    run_one(schedule, again, asked, as_json)


def run_one(schedule: Schedule, again: str, asked: Asked, as_json: bool) -> None:
    """`again`: the command that repeats it. 1 if it violates."""
    keep, html = asked.keep, asked.html
    if keep is not None:
        if not run(schedule).violations:
            raise frame.CommandFailed("--shrink: this run violates nothing, so there is nothing to shrink")
        small = shrink(schedule, lambda smaller: frame.say(f"smaller: {' '.join(text_of(smaller).split())}"))
        schedule, again = small.schedule, f"marshal simulate --scenario {keep}"
        head = f"# {telling(small.result.violations).text}\n# {again}\n"
        keep.write_text(head + text_of(schedule), encoding="utf-8")
    told = sweep.tell_schedule(schedule)
    if html is not None:
        html.write_text(_page(schedule, told, again), encoding="utf-8")
    for moment in told.moments if asked.trace else ():
        if as_json:
            frame.print_json(moment._asdict())
        else:
            print(line_of(moment))
    _print(schedule, told, again, as_json)
    if told.result.violations:
        raise typer.Exit(frame.FAILED)


def _wanted(file: Path | None, seed: int | None, mutant: str | None) -> tuple[Schedule, str]:
    if file is None:
        assert seed is not None  # the command has seen to it
        return of_seed(seed, mutant), f"marshal simulate {f'--mutant {mutant} ' if mutant else ''}--seed {seed} --trace"
    try:
        return parse(file.read_text(encoding="utf-8")), f"marshal simulate --scenario {file}"
    except InvalidOption as error:
        raise typer.BadParameter(f"{file}: {error}") from error


def _page(schedule: Schedule, told: sweep.Told, again: str) -> str:
    """The page; its histogram also counts the take-overs of the seeds that follow."""
    world = Options(dump=schedule.options.dump, group=schedule.options.group)
    times = takeover_times(told.logs, told.result.scenario.interval_ms)
    for number in range(1, NEIGHBOURS):
        other = sweep.tell_schedule(Schedule(schedule.seed + number, world))
        times += takeover_times(other.logs, other.result.scenario.interval_ms)
    seeds = f"this run and the seeds {schedule.seed + 1} to {schedule.seed + NEIGHBOURS - 1}"
    return page(told.result, told.moments, told.logs, again, times, seeds)


def _print(schedule: Schedule, told: sweep.Told, again: str, as_json: bool) -> None:
    result = told.result
    if as_json:
        plain: dict[str, Any] = {
            "seed": schedule.seed,
            "mutant": schedule.mutant,
            "verdict": result.verdict,
            "trace_hash": result.trace_hash,
            "events": result.events,
            "again": again,
            "violations": [found._asdict() for found in result.violations],
        }
        frame.print_json(plain)
        return
    if result.violations:
        for line in story(telling(result.violations), told.moments):
            print(line)
    print(f"seed {schedule.seed}: {result.verdict}, {result.events:,} events, trace {result.trace_hash}")
    print(f"again: {again}")
