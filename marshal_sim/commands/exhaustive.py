"""`python -m marshal_sim exhaustive NAME`: every interleaving of a small model, its counts and violations."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer
from msgspec import Struct

from marshal_py.cli import output
from marshal_py.cli.documents import plain, prints, with_fields
from marshal_py.cli.options import Json, command
from marshal_sim.exhaustive.bfs import Progress, SearchReport
from marshal_sim.exhaustive.configurations import MODELS, QUICK
from marshal_sim.exhaustive.explore import STATES_MAX, explore

EXAMPLE: Final = output.example("python -m marshal_sim exhaustive list")
LIST: Final = "list"
ALL: Final = "all"


class Model(Struct, frozen=True):
    """A small model. `bounds`: how often a thing may happen in it."""

    name: str
    says: str
    bounds: dict[str, int]
    partitions: int
    messages: int


Searched: Final = with_fields("Searched", SearchReport, bounds=dict[str, int], partitions=int, messages=int)


@command
@prints(Searched, Model)
def exhaustive(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of a small model; `all` of the quick ones, `list` names them.")
    ],
    states: Annotated[
        int | None, typer.Option("--states", min=1, help="Most states to search.", show_default="30 million")
    ] = None,
    mutant: Annotated[str | None, typer.Option("--mutant", metavar="NAME", help="Plant this bug.")] = None,
    processes: Annotated[int, typer.Option("--processes", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Search every interleaving of a small model within its bounds, and judge each state by the promises.

    Exit code 1: a promise is broken, or a search is not complete. What Ctrl-C interrupts is printed all the same.
    """
    if name == LIST:
        _print_list(as_json)
        return
    failed = False
    for each in [model.name for model in QUICK] if name == ALL else [name]:
        report = explore(each, states or STATES_MAX, mutant, _watch, processes)
        failed |= bool(report.violations) or not report.complete
        _print(report, as_json)
        if report.interrupted:
            break
    if failed:
        raise typer.Exit(output.FAILED)


def _print_list(as_json: bool) -> None:
    for configuration in (model.configuration for model in MODELS.values()):
        if as_json:
            output.print_json(Model(name=configuration.name, says=configuration.says, **_bounds(configuration.name)))
        else:
            print(f"{configuration.name:<28} {configuration.says}")


def _bounds(name: str) -> dict[str, Any]:
    configuration = MODELS[name].configuration
    return {
        "bounds": {key: value for key, value in configuration.bounds._asdict().items() if value},
        "partitions": configuration.partitions,
        "messages": configuration.messages,
    }


def _watch(progress: Progress) -> None:
    if sys.stderr.isatty():
        print(
            f"\rdepth {progress.depth}: {progress.states:,} states, {progress.frontier:,} to look at   ",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _print(report: SearchReport, as_json: bool) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        output.print_json({**plain(report), **_bounds(report.configuration)})
        return
    bounds = ", ".join(f"{key} {value}" for key, value in _bounds(report.configuration)["bounds"].items())
    print(f"{report.configuration}: {MODELS[report.configuration].configuration.says}")
    print(f"  bounds       {bounds}")
    partly = "; stopped, not complete" if report.interrupted else "" if report.complete else "; not complete"
    print(
        f"  searched     {report.states:,} states, {report.transitions:,} transitions, depth {report.depth}, "
        f"{report.seconds} s{partly}"
    )
    print(
        f"  of these     {report.deliveries:,} deliveries, {report.clipped:,} steps left out at the bounds; "
        f"{report.conditions:,} conditions of a process, {report.logs:,} logs"
    )
    print(f"  violations   {len(report.violations)}", flush=True)
    for violation in report.violations:
        print(f"\n{violation.text}")
        print("\n".join(violation.path), flush=True)
