"""One run: its trace, its story, a shrunk schedule, a page. No command is defined here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from msgspec import Struct

from marshal_py.cli import output
from marshal_py.cli.documents import plain, with_fields
from marshal_py.errors import InvalidOption
from marshal_sim.cluster.run import Result
from marshal_sim.cluster.scenario import Options
from marshal_sim.commands import seeds
from marshal_sim.judge.evidence import Violation
from marshal_sim.tools import sweep
from marshal_sim.tools.report import page, takeover_times
from marshal_sim.tools.schedule import Schedule, of_seed, parse, run, telling, text_of
from marshal_sim.tools.shrink import shrink
from marshal_sim.tools.story import line_of, story

NEIGHBOURS: Final = 20  # runs whose take-overs make the histogram: one run alone has a few

Trace = Annotated[bool, typer.Option("--trace", help="Of one seed, also print everything that happened in it.")]
Shrink = Annotated[
    Path | None,
    typer.Option("--shrink", dir_okay=False, metavar="FILE", help="Make a failing run small and keep it in this file."),
]
Html = Annotated[
    Path | None, typer.Option("--html", dir_okay=False, metavar="FILE", help="Of one seed, a page with its timeline.")
]

RunResult: Final = with_fields("RunResult", Result, again=str)


class ScheduleResult(Struct, frozen=True):
    """The result of one schedule. `again`: the command that repeats it."""

    seed: int
    mutant: str | None
    verdict: str
    trace_hash: str
    events: int
    again: str
    violations: tuple[Violation, ...]


class Asked(NamedTuple):
    """What the user wants to see or keep of one run."""

    trace: bool  # everything that happened
    keep: Path | None  # the shrunk schedule, in this file
    html: Path | None  # a page


def show_seed(seed: int, trace: bool, as_json: bool) -> None:
    """Runs one seed and prints its counters. Exit code 1 if it violates a promise."""
    result = run_seed(seed, None, trace, as_json)
    if as_json:
        output.print_json({**plain(result), "again": seeds.again(seed)})
    else:
        print_result(result, seeds.again(seed))
    if result.violations:
        raise typer.Exit(output.FAILED)


def run_seed(seed: int, mutant: str | None, trace: bool, as_json: bool) -> Result:
    """Runs one seed and returns its result. With `trace`, prints everything that happened in the run. Without `trace`
    it prints, if the run violates a promise, only the story that led to the violation."""
    if not trace:
        result = sweep.run_one(seed, mutant)
        if result.violations and not as_json:
            for line in story(telling(result.violations), sweep.trace_seed(seed, mutant).trace):
                print(line)
        return result
    result, events, _ = sweep.trace_seed(seed, mutant)
    _print_events(events, as_json)
    return result


def show(
    file: Path | None, seed: int | None, mutant: str | None, asked: Asked, as_json: bool, options: Options | None = None
) -> None:
    """Runs the schedule in `file`, or the one of `seed`, and shows what `asked` wants of it. `options`: what the caller
    fixed, of --queries, --policy and seeds.FLAGS. Exit code 1 if the run violates a promise."""
    schedule, again = _wanted(file, seed, mutant)
    if options is not None and options != Options():
        schedule = schedule._replace(
            options=schedule.options._replace(
                queries=options.queries, policy=options.policy, **{name: getattr(options, name) for name in seeds.FLAGS}
            )
        )
        again = f"marshal simulate {seeds.words_of(options)}--seed {seed} --trace"
    run_one(schedule, again, asked, as_json)


def run_one(schedule: Schedule, again: str, asked: Asked, as_json: bool) -> None:
    """Runs one schedule. `again`: the command that repeats it. Exit code 1 if it violates a promise."""
    keep, html = asked.keep, asked.html
    if keep is not None:
        if not run(schedule).violations:
            raise output.CommandFailed("--shrink: this run violates nothing, so there is nothing to shrink")
        small = shrink(schedule, lambda smaller: output.say(f"smaller: {' '.join(text_of(smaller).split())}"))
        schedule, again = small.schedule, f"marshal simulate --scenario {keep}"
        head = f"# {telling(small.result.violations).text}\n# {again}\n"
        keep.write_text(head + text_of(schedule), encoding="utf-8")
    watched = sweep.trace_schedule(schedule)
    if html is not None:
        html.write_text(_page(schedule, watched, again), encoding="utf-8")
    if asked.trace:
        _print_events(watched.trace, as_json)
    _print(schedule, watched, again, as_json)
    if watched.result.violations:
        raise typer.Exit(output.FAILED)


def _wanted(file: Path | None, seed: int | None, mutant: str | None) -> tuple[Schedule, str]:
    if file is None:
        assert seed is not None  # the command has checked it
        return of_seed(seed, mutant), seeds.again(seed, mutant)
    try:
        return parse(file.read_text(encoding="utf-8")), f"marshal simulate --scenario {file}"
    except InvalidOption as error:
        raise typer.BadParameter(f"{file}: {error}") from error


def _page(schedule: Schedule, watched: sweep.TracedRun, again: str) -> str:
    """Returns a run as an HTML page. Its histogram also counts the take-overs in the runs of the seeds that follow."""
    world = Options(dump=schedule.options.dump, group=schedule.options.group)
    times = takeover_times(watched.logs, watched.result.scenario.interval_ms)
    for number in range(1, NEIGHBOURS):
        other = sweep.trace_schedule(Schedule(schedule.seed + number, world))
        times += takeover_times(other.logs, other.result.scenario.interval_ms)
    seeds = f"this run and the seeds {schedule.seed + 1} to {schedule.seed + NEIGHBOURS - 1}"
    return page(watched.result, watched.trace, watched.logs, again, times, seeds)


def _print(schedule: Schedule, watched: sweep.TracedRun, again: str, as_json: bool) -> None:
    result = watched.result
    if as_json:
        output.print_json(
            ScheduleResult(
                seed=schedule.seed,
                mutant=schedule.mutant,
                verdict=result.verdict,
                trace_hash=result.trace_hash,
                events=result.events,
                again=again,
                violations=result.violations,
            )
        )
        return
    if result.violations:
        for line in story(telling(result.violations), watched.trace):
            print(line)
    print(f"seed {schedule.seed}: {result.verdict}, {result.events:,} events, trace {result.trace_hash}")
    print(f"again: {again}")


def _print_events(events: Iterable[sweep.TraceEvent], as_json: bool) -> None:
    for event in events:
        if as_json:
            output.print_json(event)
        else:
            print(line_of(event))


def print_result(result: Result, again: str) -> None:
    figures = result._asdict()
    for name in ("violations", "scenario"):
        del figures[name]
    figures["kinds"] = dict.fromkeys(sorted(result.scenario.kinds), "")
    seeds.print_figures(figures)
    for violation in result.violations:
        print(seeds.sentence(violation))
    print(f"again: {again}")
