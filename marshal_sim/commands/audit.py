"""`marshal simulate audit FILE`: judges a dump of a cluster, and runs simulated consumers from its final state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import Json, command
from marshal_py.transport.dump import check_whole
from marshal_sim.cluster.dump_state import read
from marshal_sim.cluster.scenario import Options
from marshal_sim.commands import one_run, seeds
from marshal_sim.tools import dump_audit, sweep
from marshal_sim.tools.dump_audit import Audit
from marshal_sim.tools.schedule import Schedule

EXAMPLE: Final = output.example("marshal simulate audit billing.dump --seeds 0:4 --json")


@command
@prints(Audit, sweep.Total, one_run.ScheduleResult, sweep.TraceEvent)
def audit(
    dump: Annotated[Path, typer.Argument(metavar="FILE", help="A dump (`marshal log dump`).")],
    wanted: seeds.Seeds = None,
    seed: seeds.Seed = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="Runs continue with this group alone.")
    ] = None,
    trace: one_run.Trace = False,
    shrink: one_run.Shrink = None,
    html: one_run.Html = None,
    processes: seeds.Processes = None,
    as_json: Json = False,
) -> None:
    """Audit a log dump: fold it by two folds, compare them after every record, and judge the log by the promises.

    With --seeds or --seed, continue from its final state: simulated consumers evict its dead sessions and take over
    under injected faults. Exit code 1: a promise is broken; then nothing is run from there.

    \b
    A dump is made by:
      marshal log dump billing --output billing.dump
    """
    if wanted is not None and seed is not None:
        raise typer.BadParameter("one of --seeds, --seed")
    if seed is None and (trace or shrink is not None or html is not None):
        raise typer.BadParameter("--trace, --shrink and --html need --seed")
    if group is not None and wanted is None and seed is None:
        raise typer.BadParameter("--group says with whom runs continue: give --seeds or --seed too")
    check_whole(dump)
    chosen = None if wanted is None else seeds.seed_range(wanted)
    _show(dump, as_json)
    options = Options(dump=str(dump.resolve()), group=group or "")
    command, words = f"audit {dump}", f"--group {group} " if group else ""
    if seed is not None:
        asked = one_run.Asked(trace, shrink, html)
        one_run.run_one(Schedule(seed, options), seeds.again(seed, words=words, command=command), asked, as_json)
    elif chosen is not None:
        read(options.dump, options.group)  # so that a dump that cannot be used is refused here, not in some process
        seeds.print_many(sweep.sweep(chosen, processes or sweep.cores(), options), len(chosen), as_json, words, command)


def _show(dump: Path, as_json: bool) -> None:
    """Judges the dump. Exit code 1 if a promise is broken: runs from such a state would prove nothing."""
    found = dump_audit.audit(dump)
    if as_json:
        output.print_json(found)
    else:
        _print(found)
    if found.first is not None:
        first = found.first
        raise output.CommandFailed(
            f"{first.invariant} is broken in log {first.log}, offset {first.offset} "
            f"({first.who}, PROTOCOL.md {first.rule}): {first.text}"
        )


def _print(found: Audit) -> None:
    print(
        f"{found.file}: {found.records:,} records of {found.topic} in {found.logs} logs, taken {found.taken} by "
        f"{found.by or 'an unknown library'}"
    )
    print(
        f"{found.groups} groups, {found.sessions} sessions ({found.live_sessions} live), {found.claims} claims, "
        f"{found.handovers} hand-overs, {found.takeovers} take-overs, {found.evictions} evictions, {found.grants} "
        f"grants, {found.pauses} pauses, {found.moves} moves of positions"
    )
    print(f"{found.digests} digests of two folds and {found.carried_digests} that the log carries compared")
    if found.diverged_notes:
        print(f"{found.diverged_notes} notes of consumers whose states differed: see docs/operations.md")
    if found.short_waits:
        print(f"{found.short_waits} evictions look too early by their timestamps, which the writers' clocks made")
    for line in found.story:
        print(line)
    if found.first is None:
        print("no promise is broken, as far as a log shows")
