"""What `marshal simulate --dump` says about a dump: its counts, or the story of the first thing that is wrong in it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from marshal_py.cli import frame
from marshal_py.simulator.dump_audit import Audit, audit


def show(dump: Path, as_json: bool) -> None:
    """Judges the dump. Exit code 1 if a promise is broken: runs that went on from there would prove nothing."""
    found = audit(dump)
    if as_json:
        frame.print_json(msgspec.to_builtins(found))
    else:
        _print(found)
    if found.first is not None:
        first = found.first
        raise frame.CommandFailed(
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
        print(f"{found.diverged_notes} notes of consumers whose states differed: see docs/history.md")
    if found.short_waits:
        print(f"{found.short_waits} evictions look too early by their timestamps, which the writers' clocks made")
    for line in found.story:
        print(line)
    if found.first is None:
        print("no promise is broken, as far as a log shows")
