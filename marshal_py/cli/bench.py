"""`marshal bench races`: how fast the protocol code runs on this machine. Needs no Kafka; prints rates."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.options import Json, command
from marshal_py.cli.simulate.seeds import seed_range

app: Final = typer.Typer(no_args_is_help=True, help="Measure the protocol code on this machine.", rich_markup_mode=None)
EXAMPLE: Final = output.example("marshal bench races --seconds 2 --json")
SECONDS: Final = 20.0
BAR: Final = 30  # characters


# Without a callback, typer would make the single command `races` the whole of `bench`.
@app.callback()
def bench() -> None:
    """Measure the protocol code on this machine."""


@app.command("races", epilog=EXAMPLE)
@command
def bench_races(
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0.1, show_default=f"{SECONDS:g}", help="Start new runs for this long."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="A:B", help="Run exactly these seeds instead: the same work on every machine."),
    ] = None,
    processes: Annotated[int | None, typer.Option("--processes", min=1, show_default="cores")] = None,
    as_json: Json = False,
) -> None:
    """Let simulated consumers race for partitions, with and without faults, and report how fast that was.

    Rates are per CPU second of the runs. The hash is over all runs in their order: the same number of runs gives the
    same hash with any number of processes. Ctrl-C ends it early; the figures until then are printed.
    """
    from marshal_sim.tools import races, sweep

    if seconds is not None and seeds is not None:
        raise typer.BadParameter("one of --seconds, --seeds")
    wanted = None if seeds is None else seed_range(seeds)
    runs = None if wanted is None else sum(1 for _ in races.tasks(wanted))
    limit_s = None if wanted is not None else seconds or SECONDS
    found = races.measure(wanted, limit_s, processes or sweep.cores(), lambda n, s: _progress(n, s, runs, limit_s))
    if sys.stderr.isatty():
        output.say("")
    plain = {**found._asdict(), "faulty": found.faulty._asdict(), "calm": found.calm._asdict()}
    if as_json:
        output.print_json(plain)
    else:
        _print(plain)
    if not found.complete:
        output.say("marshal: stopped early; these are the figures until then")
    if found.violations:
        output.say("marshal: promises were violated: see `marshal simulate run --seeds`")
        raise typer.Exit(output.FAILED)


def _progress(done: int, passed_s: float, runs: int | None, limit_s: float | None) -> None:
    """Draws a bar with the time that is left, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return
    part = done / runs if runs else min(1.0, passed_s / (limit_s or SECONDS))
    left_s = passed_s * (1 - part) / part if part else 0.0
    bar = "#" * int(part * BAR)
    print(f"\r[{bar:<{BAR}}] {part:4.0%}  {done} runs, {left_s:.0f} s left ", end="", file=sys.stderr, flush=True)


def _print(plain: dict[str, Any]) -> None:
    for name, value in plain.items():
        if isinstance(value, dict):
            for key, figure in value.items():
                print(f"{name + ' ' + key.replace('_', ' '):<36} {figure:,}")
            continue
        if isinstance(value, bool):
            value = "yes" if value else "no"
        print(f"{name.replace('_', ' '):<36} {value if isinstance(value, str) else f'{value:,}'}")
