"""`marshal simulate --exhaustive NAME`: every interleaving of a small world, its counts and violations."""

from __future__ import annotations

import sys
from typing import Any

import typer

from marshal_py.cli import frame
from marshal_py.simulator.exhaustive.bfs import Progress, Report
from marshal_py.simulator.exhaustive.configurations import CONFIGURATIONS, QUICK
from marshal_py.simulator.exhaustive.explore import STATES_MAX, explore

LIST = "list"
ALL = "all"


def run(name: str, states_max: int | None, mutant: str | None, processes: int, as_json: bool) -> None:
    """`name`: of a configuration, `all` for all the quick ones, or `list`.

    Exits 1 if a promise is broken or a search is not complete; what Ctrl-C left is printed all the same.
    """
    if name == LIST:
        for configuration in CONFIGURATIONS.values():
            if as_json:
                names = {"name": configuration.name, "says": configuration.says}
                frame.print_json({**names, **_bounds(configuration.name)})
            else:
                print(f"{configuration.name:<28} {configuration.says}")
        return
    failed = False
    for each in [configuration.name for configuration in QUICK] if name == ALL else [name]:
        report = explore(each, states_max or STATES_MAX, mutant, _watch, processes)
        failed |= bool(report.violations) or not report.complete
        _print(report, as_json)
        if report.interrupted:
            break
    if failed:
        raise typer.Exit(frame.FAILED)


def _bounds(name: str) -> dict[str, Any]:
    configuration = CONFIGURATIONS[name]
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


def _print(report: Report, as_json: bool) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        broken = [violation._asdict() for violation in report.violations]
        frame.print_json({**report._asdict(), **_bounds(report.configuration), "violations": broken})
        return
    bounds = ", ".join(f"{key} {value}" for key, value in _bounds(report.configuration)["bounds"].items())
    print(f"{report.configuration}: {CONFIGURATIONS[report.configuration].says}")
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
