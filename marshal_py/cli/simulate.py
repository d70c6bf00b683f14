"""`marshal simulate`: the shipped protocol code in simulated clusters with faults. Needs no Kafka; prints what ran."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from marshal_py.cli import dump_audit, exhaustive, failing, frame
from marshal_py.simulator import sweep
from marshal_py.simulator.auditor_evidence import Violation
from marshal_py.simulator.dump_state import read
from marshal_py.simulator.mutants import MUTANTS, NOT_YET, SEEDS_BASE
from marshal_py.simulator.run import Result
from marshal_py.simulator.scenario import Options
from marshal_py.simulator.schedule import Schedule, telling
from marshal_py.simulator.story import line_of, story
from marshal_py.simulator.sweep import Counted
from marshal_py.spark import require_spark

EXAMPLE: Final = frame.example("marshal simulate --seeds 0:20 --json")
DUMP_EXAMPLE: Final = "marshal simulate --dump billing.dump --seeds 0:4 --json"  # stands in the help text too
SEEDS: Final = "0:200"
SCHEDULES: Final = 10_000


@frame.reports_errors
def simulate(
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="A:B", show_default=SEEDS, help="Runs these seeds, B not among them."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Runs this one.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Of one seed, also all that happened in it.")] = False,
    mutants: Annotated[bool, typer.Option("--mutants", help="Searches all planted bugs, one after the other.")] = False,
    mutant: Annotated[
        str | None, typer.Option("--mutant", metavar="NAME", help="Plants one bug; 1 when it is found.")
    ] = None,
    schedules: Annotated[
        int, typer.Option("--schedules", min=1, help="Most seeds that are run to find a planted bug.")
    ] = SCHEDULES,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, show_default="cores; 1 with --exhaustive")
    ] = None,
    spark: Annotated[bool, typer.Option("--spark", help="Runs --seeds on Spark instead of in processes here.")] = False,
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            metavar="URL",
            help="Of the Spark cluster; sc://HOST:PORT is Spark Connect.",
            show_default="local, every core",
        ),
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--exhaustive",
            metavar="NAME",
            help="Searches every interleaving of a small world; `all` of the quick ones, `list` names them.",
        ),
    ] = None,
    states: Annotated[
        int | None, typer.Option("--states", min=1, help="Most states of --exhaustive.", show_default="30 million")
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option("--scenario", exists=True, dir_okay=False, metavar="FILE", help="Runs the schedule in this file."),
    ] = None,
    shrink: Annotated[
        Path | None,
        typer.Option(
            "--shrink", dir_okay=False, metavar="FILE", help="Makes a failing run small and keeps it in this file."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", dir_okay=False, metavar="FILE", help="Of one seed, a page with its timeline."),
    ] = None,
    queries: Annotated[
        int,
        typer.Option(
            "--queries",
            min=0,
            metavar="N",
            help="Makes N of the consumers streaming queries of Spark; with --seeds or --seed.",
        ),
    ] = 0,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump",
            metavar="FILE",
            help="Judges what a cluster did, by its log "
            "(`marshal log dump`); with --seeds or --seed, runs go on from "
            "there.",
        ),
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="Of --dump: runs go on with this group alone.")
    ] = None,
    as_json: frame.Json = False,
) -> None:
    """Run the protocol in simulated clusters with faults, and judge each run by the promises.

    Exit code 1: a promise was violated (with --mutants: a planted bug was not found), or the search was void, because
    nobody took over from anybody or nothing was delivered. The same seed gives the same run everywhere.

    A dump of a real cluster is a bug report: --dump folds it by two folds, compares them behind every record, and holds
    the log against the promises. It is also a place to begin: with --seeds or --seed, simulated consumers find the dead
    of the dump, take over, and are struck by faults.

    \b
    With a dump:
      marshal log dump billing --output billing.dump
      marshal simulate --dump billing.dump --seeds 0:4 --json
    """
    if dump is not None:
        others = mutants or mutant is not None or scenario is not None or world is not None or states is not None
        if others or spark or queries or master is not None or (seeds is not None and seed is not None):
            raise typer.BadParameter(
                "--dump goes alone, with --seeds (and --processes), or with --seed (and --trace, --shrink, --html)"
            )
        _from_dump(
            dump,
            group,
            None if seeds is None else seed_range(seeds),
            seed,
            processes,
            as_json,
            failing.Asked(trace, shrink, html),
        )
        return
    if group is not None:
        raise typer.BadParameter("--group goes with --dump")
    chosen = (seeds is not None) + (seed is not None and mutant is None) + mutants + (mutant is not None)
    if chosen + (scenario is not None) > 1:
        raise typer.BadParameter("one of --seeds, --seed, --mutants, --mutant, --scenario; --seed goes with --mutant")
    if (shrink is not None or html is not None) and seed is None and scenario is None:
        raise typer.BadParameter("--shrink and --html need --seed or --scenario")
    if world is not None or states is not None:
        if world is None or seeds is not None or seed is not None or mutants or trace or spark or scenario:
            raise typer.BadParameter(
                "--exhaustive goes with --states, --processes, --mutant and --json, and --states with --exhaustive"
            )
        exhaustive.run(world, states, mutant, processes or 1, as_json)
        return
    if queries and (mutants or mutant is not None or scenario is not None or spark or world is not None):
        raise typer.BadParameter("--queries goes with --seeds or --seed")
    if trace and seed is None:
        raise typer.BadParameter("--trace needs --seed")
    if (spark or master is not None) and (not spark or seed is not None or mutants or mutant is not None or processes):
        raise typer.BadParameter("--spark goes with --seeds, and --master with --spark")
    processes = processes or sweep.cores()
    if scenario is not None or shrink is not None or html is not None or (queries and seed is not None):
        failing.show(scenario, seed, mutant, failing.Asked(trace and queries > 0, shrink, html), as_json, queries)
    elif mutants:
        _mutants(schedules, processes, as_json)
    elif mutant is not None:
        _mutant(mutant, seed, schedules, trace, as_json)
    elif seed is not None:
        _one(seed, trace, as_json)
    else:
        wanted = seed_range(seeds or SEEDS)
        options = Options(queries=queries) if queries else None
        results = _on_spark(wanted, master) if spark else sweep.sweep(wanted, processes, options)
        _many(results, len(wanted), as_json, f"--queries {queries} " if queries else "")


def seed_range(text: str) -> range:
    """`A:B`, B not among them. Wrong usage for anything else."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    seeds = range(0) if found is None else range(int(found[1]), int(found[2]))
    if not seeds:
        raise typer.BadParameter(f"--seeds {text!r}: expected A:B with A < B")
    return seeds


def _from_dump(
    dump: Path,
    group: str | None,
    seeds: range | None,
    seed: int | None,
    processes: int | None,
    as_json: bool,
    asked: failing.Asked,
) -> None:
    """What the log of a cluster shows; then, if seeds are given, the runs that go on from there."""
    if seed is None and any(asked):
        raise typer.BadParameter("--trace, --shrink and --html need --seed")
    if group is not None and seeds is None and seed is None:
        raise typer.BadParameter("--group says with whom runs go on: give --seeds or --seed too")
    dump_audit.show(dump, as_json)
    options = Options(dump=str(dump.resolve()), group=group or "")
    words = f"--dump {dump} {f'--group {group} ' if group else ''}"
    if seed is not None:
        failing.run_one(Schedule(seed, options), _again(seed, words=words), asked, as_json)
    elif seeds is not None:
        read(options.dump, options.group)  # what is wrong with it is said here, not in some process
        _many(sweep.sweep(seeds, processes or sweep.cores(), options), len(seeds), as_json, words)


def _on_spark(seeds: range, master: str | None) -> Iterable[Counted]:
    """The rows of the same runs, made by a session of our own."""
    require_spark()
    from marshal_py.spark import sweeps
    from marshal_py.spark.session import local_session

    session = local_session(master or "local[*]", name="marshal simulate")
    try:
        return sweeps.runs(sweeps.sweep(session, seeds))
    finally:
        session.stop()


def _many(results: Iterable[Counted], count: int, as_json: bool, words: str = "") -> None:
    found = sweep.total(_watched(results, count))
    if as_json:
        frame.print_json(found._asdict())
    else:
        _figures(found._asdict())
        for seed in found.failing:
            print(f"again: {_again(seed, words=words)}")
    if found.void:
        frame.say("marshal: void: nobody took over, or nothing was delivered; this search proves nothing")
    if found.violations or found.void:
        raise typer.Exit(frame.FAILED)


def _watched(results: Iterable[Counted], count: int) -> Iterator[Counted]:
    """Says on stderr what a person who waits wants to know: violations at once, and on a terminal how far it is."""
    terminal = sys.stderr.isatty()
    for number, result in enumerate(results, 1):
        if terminal and result.violations:
            frame.say("")  # off the line that counts
        for violation in result.violations:
            frame.say(f"seed {result.seed}: {_violation(violation)}")
        if terminal:
            print(f"\r{number} of {count} seeds", end="\n" if number == count else "", file=sys.stderr, flush=True)
        yield result


def _one(seed: int, trace: bool, as_json: bool) -> None:
    result = _run(seed, None, trace, as_json)
    if as_json:
        frame.print_json(_result(result))
    else:
        _print(result, _again(seed))
    if result.violations:
        raise typer.Exit(frame.FAILED)


def _mutants(schedules: int, processes: int, as_json: bool) -> None:
    missed = False
    for found in sweep.hunt_all(schedules, processes):
        missed |= found.found is False
        if as_json:
            frame.print_json({key: value for key, value in found._asdict().items() if value is not None})
        else:
            word = found.found if isinstance(found.found, str) else "found" if found.found else "not found"
            how = found.reason or f"{found.invariant or 'no violation'} after {found.schedules} schedules"
            how += f", shortest {found.events:,} events" if found.events is not None else ""
            again = f": {_again(found.seed, found.mutant)}" if found.found is True and found.seed is not None else ""
            print(f"{found.mutant:<4} {word:<10} {how}{again}", flush=True)
    if missed:
        raise typer.Exit(frame.FAILED)


def _mutant(name: str, seed: int | None, schedules: int, trace: bool, as_json: bool) -> None:
    if name in NOT_YET:
        raise typer.BadParameter(f"{name} is not planted: {sweep.why_not(name)}")
    if name not in MUTANTS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(n for n in sweep.all_mutants() if n in MUTANTS)}")
    ran = 1
    if seed is None:
        hunt = sweep.hunt(name, schedules)
        ran, seed = hunt.schedules, hunt.seed
    if seed is None:
        if as_json:
            frame.print_json({"mutant": name, "found": False, "schedules": ran})
        else:
            print(f"{name} ({MUTANTS[name].says}): not found in {ran} schedules from seed {SEEDS_BASE} on")
        return
    result = _run(seed, name, trace, as_json)
    anyway = sweep.violated_anyway(seed, name) if result.violations else ()
    found = bool(result.violations) and not anyway
    if as_json:
        frame.print_json(
            {"mutant": name, "found": found, "schedules": ran, **_result(result), "again": _again(seed, name)}
        )
    else:
        print(f"{name} ({MUTANTS[name].says}): {'found' if found else 'not found'}")
        _print(result, _again(seed, name))
    if anyway:
        frame.say(f"marshal: at seed {seed} the shipped code violates {anyway[0].invariant} without {name}")
    if result.violations:
        raise typer.Exit(frame.FAILED)


def _run(seed: int, mutant: str | None, trace: bool, as_json: bool) -> Result:
    """One seed; its trace is printed at once, and the story of a violation even without one."""
    if not trace:
        result = sweep.run_one(seed, mutant)
        if result.violations and not as_json:
            for line in story(telling(result.violations), sweep.tell(seed, mutant).moments):
                print(line)
        return result
    result, moments, _ = sweep.tell(seed, mutant)
    for moment in moments:
        if as_json:
            frame.print_json(moment._asdict())
        else:
            print(line_of(moment))
    return result


# --- as JSON's types, and for people


def _result(result: Result) -> dict[str, Any]:
    plain = result._asdict()
    scenario = result.scenario._asdict()
    scenario["groups"] = [group._asdict() for group in result.scenario.groups]
    scenario["kinds"], scenario["skip"] = sorted(result.scenario.kinds), sorted(result.scenario.skip)
    return {
        **plain,
        "violations": [v._asdict() for v in result.violations],
        "scenario": scenario,
        "again": _again(result.seed),
    }


def _print(result: Result, again: str) -> None:
    figures = result._asdict()
    for name in ("violations", "scenario"):
        del figures[name]
    figures["kinds"] = dict.fromkeys(sorted(result.scenario.kinds), "")
    _figures(figures)
    for violation in result.violations:
        print(_violation(violation))
    print(f"again: {again}")


def _figures(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        match value:
            case dict():
                text = ", ".join(f"{key} {count}".strip() for key, count in value.items()) or "none"
            case list():
                text = ", ".join(map(str, value)) or "none"
            case bool():
                text = "yes" if value else "no"
            case float():
                text = f"{value:,.2f}"
            case int() if name != "seed":
                text = f"{value:,}"
            case _:
                text = str(value)
        print(f"{name.replace('_', ' '):<16} {text}")


def _violation(violation: Violation) -> str:
    when = f" at {violation.ms} ms" if violation.ms >= 0 else ""  # what an admin's tool said has no time
    where = f", log offset {violation.offset}" if violation.offset >= 0 else ""
    return f"{violation.invariant} violated{when}{where}: {violation.text}"


def _again(seed: int, mutant: str | None = None, words: str = "") -> str:
    return f"marshal simulate {words}{'' if mutant is None else f'--mutant {mutant} '}--seed {seed} --trace"
