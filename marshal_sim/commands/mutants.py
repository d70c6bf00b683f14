"""`python -m marshal_sim mutants`: bugs planted on purpose. A search that does not find them proves nothing."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.documents import plain, prints, with_fields
from marshal_py.cli.options import Json, command
from marshal_sim.cluster.run import Result
from marshal_sim.commands import one_run, seeds
from marshal_sim.mutants.mutants import MUTANTS, SEEDS_BASE
from marshal_sim.tools import sweep

EXAMPLE: Final = output.example("python -m marshal_sim mutants X9")
SCHEDULES: Final = 10_000

MutantRun: Final = with_fields("MutantRun", Result, mutant=str, found=bool, schedules=int, again=str)


@command
@prints(sweep.Found, MutantRun, one_run.ScheduleResult, sweep.TraceEvent)
def mutants(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One planted bug; all of them if left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Plant it in this run alone.")] = None,
    schedules: Annotated[
        int, typer.Option("--schedules", min=1, help="Run at most this many seeds to find a planted bug.")
    ] = SCHEDULES,
    trace: one_run.Trace = False,
    shrink: one_run.Shrink = None,
    html: one_run.Html = None,
    processes: seeds.Processes = None,
    as_json: Json = False,
) -> None:
    """Plant bugs in the protocol code and search for them.

    Exit code 1: a planted bug was not found. With NAME it is 1 when the bug is found, as for any run that violates a
    promise.
    """
    if (trace or shrink is not None or html is not None) and seed is None:
        raise typer.BadParameter("--trace, --shrink and --html need --seed")
    if name is None:
        if seed is not None:
            raise typer.BadParameter("--seed needs the name of one planted bug")
        _search_all(schedules, processes or sweep.cores(), as_json)
        return
    _check_name(name)
    if shrink is not None or html is not None:
        one_run.show(None, seed, name, one_run.Asked(False, shrink, html), as_json)
    else:
        _search(name, seed, schedules, trace, as_json)


def _check_name(name: str) -> None:
    if name in sweep.COUNTED:
        raise typer.BadParameter(f"{name} is not planted: runs count how often it occurs")
    if name not in MUTANTS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(n for n in sweep.all_mutants() if n in MUTANTS)}")


def _search_all(schedules: int, processes: int, as_json: bool) -> None:
    missed = False
    for found in sweep.hunt_all(schedules, processes):
        missed |= found.found is False
        if as_json:
            output.print_json(found)
        else:
            word = found.found if isinstance(found.found, str) else "found" if found.found else "not found"
            how = f"{found.invariant or 'no violation'} after {found.schedules} schedules"
            how += f", shortest {found.events:,} events" if found.events is not None else ""
            how += f", planted in {', '.join(found.places)}" if found.places else ""
            repeat = found.found is True and found.seed is not None
            again = f": {seeds.again(found.seed or 0, found.mutant)}" if repeat else ""
            print(f"{found.mutant:<4} {word:<10} {how}{again}", flush=True)
    if missed:
        raise typer.Exit(output.FAILED)


def _search(name: str, seed: int | None, schedules: int, trace: bool, as_json: bool) -> None:
    ran = 1
    if seed is None:
        hunt = sweep.hunt(name, schedules)
        ran, seed = hunt.schedules, hunt.seed
    if seed is None:
        if as_json:
            output.print_json(sweep.Found(name, False, None, ran, None, places=MUTANTS[name].places()))
        else:
            print(f"{name} ({MUTANTS[name].says}): not found in {ran} schedules from seed {SEEDS_BASE} on")
        return
    result = one_run.run_seed(seed, name, trace, as_json)
    anyway = sweep.violated_anyway(seed, name) if result.violations else ()
    found = bool(result.violations) and not anyway
    again = seeds.again(seed, name)
    if as_json:
        output.print_json({"mutant": name, "found": found, "schedules": ran, **plain(result), "again": again})
    else:
        print(f"{name} ({MUTANTS[name].says}): {'found' if found else 'not found'}")
        one_run.print_result(result, again)
    if anyway:
        output.say(f"marshal: at seed {seed} the shipped code violates {anyway[0].invariant} without {name}")
    if result.violations:
        raise typer.Exit(output.FAILED)
