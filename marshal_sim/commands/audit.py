"""`marshal simulate --dump FILE`: judges a dump of a cluster, and runs simulated consumers from its final state.

No command is defined here.
"""

from __future__ import annotations

from pathlib import Path

from marshal_py.cli import output
from marshal_py.transport.dump import check_whole
from marshal_sim.cluster.dump_state import read
from marshal_sim.cluster.scenario import Options
from marshal_sim.commands import one_run, seeds
from marshal_sim.tools import dump_audit, sweep
from marshal_sim.tools.dump_audit import Audit
from marshal_sim.tools.schedule import Schedule


def go_on(
    dump: Path,
    group: str,
    wanted: str | None,
    seed: int | None,
    asked: one_run.Asked,
    processes: int | None,
    as_json: bool,
) -> None:
    """Runs seeds from the final state of a dump. `group`: with this one alone; "" for all."""
    options = Options(dump=str(dump.resolve()), group=group)
    words = f"--dump {dump} " + (f"--group {group} " if group else "")
    if seed is not None:
        one_run.run_one(Schedule(seed, options), seeds.again(seed, words=words), asked, as_json)
    elif wanted is not None:
        chosen = seeds.seed_range(wanted)
        read(options.dump, options.group)  # so that a dump that cannot be used is refused here, not in some process
        seeds.print_many(sweep.sweep(chosen, processes or sweep.cores(), options), len(chosen), as_json, words)


def judge(dump: Path, as_json: bool) -> None:
    """Judges the dump. Exit code 1 if a promise is broken: runs from such a state would prove nothing."""
    check_whole(dump)
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
