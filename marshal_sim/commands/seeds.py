"""Many seeds: which ones, their sum, and what a person who waits for them sees. No command is defined here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

import typer

from marshal_py.cli import output
from marshal_sim.cluster.scenario import Options
from marshal_sim.judge.evidence import Violation
from marshal_sim.tools import sweep
from marshal_sim.tools.sweep import Counted

SEEDS: Final = "0:200"
# Kinds of runs that a caller may ask for:
FLAGS: Final = ("witnesses", "answers", "behind", "calls", "lanes", "turns", "aio")

Seeds = Annotated[str | None, typer.Option("--seeds", metavar="A:B", help="Seed range, B exclusive.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Run this one.")]
Processes = Annotated[int | None, typer.Option("--processes", min=1, show_default="cores")]


def seed_range(text: str) -> range:
    """Returns the seeds A to B-1 of a text `A:B`. Any other text ends in exit code 2."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    seeds = range(0) if found is None else range(int(found[1]), int(found[2]))
    if not seeds:
        raise typer.BadParameter(f"--seeds {text!r}: expected A:B with A < B")
    return seeds


def print_many(results: Iterable[Counted], count: int, as_json: bool, words: str = "") -> None:
    """Prints the sum of the results. Ends in exit code 1 if a run violates a promise, or if nobody took over or nothing
    was delivered in any of them. `words`: the options besides the seed that repeat a run."""
    found = sweep.total(_watched(results, count))
    if as_json:
        output.print_json(found)
    else:
        print_figures(found._asdict())
        for seed in found.failing:
            print(f"again: {again(seed, words=words)}")
    if found.void:
        output.say("marshal: void: nobody took over, or nothing was delivered; this search proves nothing")
    if found.violations or found.void:
        raise typer.Exit(output.FAILED)


def _watched(results: Iterable[Counted], count: int) -> Iterator[Counted]:
    """Yields the results as they come. Prints violations on stderr at once and, on a terminal, the progress."""
    terminal = sys.stderr.isatty()
    for number, result in enumerate(results, 1):
        if terminal and result.violations:
            output.say("")  # off the line that counts
        for violation in result.violations:
            output.say(f"seed {result.seed}: {sentence(violation)}")
        if terminal:
            print(f"\r{number} of {count} seeds", end="\n" if number == count else "", file=sys.stderr, flush=True)
        yield result


def print_figures(figures: dict[str, Any]) -> None:
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


def sentence(violation: Violation) -> str:
    when = f" at {violation.ms} ms" if violation.ms >= 0 else ""  # a statement of an admin's tool has no time
    where = f", log offset {violation.offset}" if violation.offset >= 0 else ""
    return f"{violation.invariant} violated{when}{where}: {violation.text}"


def words_of(options: Options) -> str:
    """Returns the options, besides the seed, that repeat a run."""
    queries = f"--queries {options.queries} " if options.queries else ""
    policy = f"--policy {options.policy} " if options.policy else ""
    flags = [f"--{name} " for name in FLAGS if getattr(options, name)]
    return queries + policy + "".join(flags)


def again(seed: int, mutant: str | None = None, words: str = "") -> str:
    """Returns the command that repeats a run."""
    start = "marshal simulate" if mutant is None else f"python -m marshal_sim mutants {mutant}"
    return f"{start} {words}--seed {seed} --trace"
