"""`marshal snapshot`: keeping logs short by hand."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer
from msgspec import Struct, structs

from marshal_py.admin.logs import CONFIRM_S, LogConnection, Logs, Written
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import NOBODY, CommonOptions, command, number_or_none

EXAMPLE: Final = output.example("marshal snapshot --log 0 --dry-run")

Outcome = Literal["dry_run", "too_short", "already_there", "self_audit", "confirmed"]


class Kept(Struct, frozen=True):
    """A log from its `first` offset to its `end`. `clients`: the ids of live ones. `snapshot`, `older`: the
    offsets of the newest two. `deleted_before`: with --truncate."""

    log: int
    first: int
    end: int
    clients: list[str]
    outcome: Outcome
    snapshot: int | None
    older: int | None
    state_bytes: int | None
    deleted_before: int | None


@command
@prints(list[Kept])
def snapshot(
    options: CommonOptions,
    log: Annotated[
        int | None, typer.Option("--log", metavar="N", help="One log (coordination partition); all if left out.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Then delete records before the second newest snapshot.")
    ] = False,
    keep: Annotated[
        str, typer.Option("--keep", metavar="DURATION", help="With --truncate: keep records younger than that.")
    ] = "24h",
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long to wait for a live consumer to confirm it.")
    ] = f"{CONFIRM_S:g}s",
    dry_run: changes.DryRun = False,
    yes: changes.Yes = False,
) -> None:
    """Write a snapshot of each log, so that earlier records need not be read again.

    Consumers do this by themselves every 16,000 records. A live consumer of the log confirms the snapshot; if there
    is none, this command folds the log a second time and confirms it itself. A snapshot deletes nothing; --truncate
    deletes only records before the second newest confirmed snapshot that all live consumers have read.
    """
    kept_s, wait_s = changes.seconds(keep), changes.seconds(wait)
    found: list[Kept] = []
    with Logs(options.transport(), options.coordination_topic) as logs:
        numbers = logs.numbers(log)
        if not numbers:
            output.say(NOBODY)
        if truncate and not dry_run:
            changes.ask(
                f"Delete the records of {len(numbers)} log(s) of {options.coordination_topic!r} that lie before their "
                f"second newest confirmed snapshot and are older than {keep}?",
                yes,
            )
        for number in numbers:
            row = _one(logs, logs.connect(number), truncate, kept_s, wait_s, dry_run)
            found.append(row)
            if not options.as_json:
                print(_sentence(row), flush=True)
    if options.as_json:
        output.print_json(found)


def _one(logs: Logs, connection: LogConnection, truncate: bool, kept_s: float, wait_s: float, dry_run: bool) -> Kept:
    """Writes the snapshot of one log, and truncates it; in a dry run only says what it would do."""
    written = None
    if not dry_run:
        written = connection.write(wait_s)
    kept = connection.look()
    deleted_before = None
    if truncate:
        before = logs.limit(kept, kept_s)
        if before > kept.first:
            if not dry_run:
                logs.delete(kept.log, before)
            deleted_before = before
    return Kept(
        log=kept.log,
        first=kept.first,
        end=kept.end,
        clients=list(kept.sessions),
        outcome="dry_run" if dry_run else _outcome(written),
        snapshot=number_or_none(connection.wanted if dry_run and connection.wanted else kept.newest),
        older=number_or_none(kept.older),
        state_bytes=written.state_bytes if written is not None else None,
        deleted_before=deleted_before,
    )


def _outcome(written: Written | None) -> Outcome:
    if written is None:
        return "too_short"
    if not written.state_bytes:
        return "already_there"
    return "self_audit" if written.self_audit else "confirmed"


def _sentence(row: Kept) -> str:
    words = {
        "dry_run": "would be written down at offset {snapshot}",
        "too_short": "has less than 16 records: nothing to write down",
        "already_there": "had been written down at offset {snapshot}",
        "self_audit": "is written down at offset {snapshot} ({state_bytes} bytes), confirmed by a second fold",
        "confirmed": "is written down at offset {snapshot} ({state_bytes} bytes), confirmed by a consumer",
    }
    text = f"log {row.log} ({row.first} to {row.end}) " + words[row.outcome].format(**structs.asdict(row))
    if row.deleted_before is not None:
        verb = "would go" if row.outcome == "dry_run" else "are deleted"
        text += f"; records below {row.deleted_before} {verb}"
    return text
