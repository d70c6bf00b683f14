"""`marshal snapshot` and `marshal bootstrap`: keeping logs short by hand, and beginning a deleted history anew."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from marshal_py.admin.logs import CONFIRM_S, LogConnection, Logs, Written
from marshal_py.cli import frame, operate
from marshal_py.cli.state import NOBODY

EXAMPLE: Final = frame.example("marshal snapshot --log 0 --dry-run")
BOOTSTRAP_EXAMPLE: Final = frame.example("marshal bootstrap --dry-run")

RISKS: Final = """\
What stood in these logs is lost: positions, pauses, settings and sessions of their groups.
  - Consumers start where Kafka's committed offsets of their group are (the library mirrors positions there every few
    seconds), else at their own `start_fallback`. In at-least-once mode messages may come again; where the fallback
    is `latest`, messages may be skipped.
  - What at-most-once mode promises does not hold across this: what was handed over shortly before may be handed over
    again.
  - Consumers that still run with the old state stop with HistoryRestarted; start them again.
If a backup of the log exists (`marshal log dump`), keep it: nothing here can be taken back."""


@frame.reports_errors
def snapshot(
    log: Annotated[
        int | None, typer.Option("--log", metavar="N", help="One log (coordination partition); all if left out.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Then delete what lies behind the second newest.")
    ] = False,
    keep: Annotated[
        str, typer.Option("--keep", metavar="DURATION", help="With --truncate: records younger than that stay.")
    ] = "24h",
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="For a live consumer to confirm it.")
    ] = f"{CONFIRM_S:g}s",
    dry_run: operate.DryRun = False,
    yes: operate.Yes = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Write the state of the logs down, so that what lies before need not be read again.

    Consumers do this by themselves every 50,000 records. A live consumer of the log confirms the snapshot; where none
    lives, this command folds the log a second time and confirms it itself. A snapshot deletes nothing; --truncate
    deletes only what lies before the second newest confirmed snapshot, that all live consumers have read.
    """
    kept_s, wait_s = operate.seconds(keep), operate.seconds(wait)
    found: list[dict[str, Any]] = []
    with Logs(frame.open_transport(bootstrap_servers, command_config), coordination_topic) as logs:
        numbers = logs.numbers(log)
        if not numbers:
            frame.say(NOBODY)
        if truncate and not dry_run:
            operate.ask(
                f"Delete the records of {len(numbers)} log(s) of {coordination_topic!r} that lie before their "
                f"second newest confirmed snapshot and are older than {keep}?",
                yes,
            )
        for number in numbers:
            row = _one(logs, logs.runner(number), truncate, kept_s, wait_s, dry_run)
            found.append(row)
            if not as_json:
                print(_sentence(row), flush=True)
    if as_json:
        frame.print_json(found)


def _one(
    logs: Logs, runner: LogConnection, truncate: bool, kept_s: float, wait_s: float, dry_run: bool
) -> dict[str, Any]:
    """What is done to one log, or would be."""
    written = None
    if not dry_run:
        written = runner.write(wait_s)
    kept = runner.look()
    row: dict[str, Any] = {
        "log": kept.log,
        "first": kept.first,
        "end": kept.end,
        "sessions": list(kept.sessions),
        "outcome": "dry_run" if dry_run else _outcome(written),
        "snapshot": operate.number_or_none(runner.wanted if dry_run and runner.wanted else kept.newest),
        "older": operate.number_or_none(kept.older),
        "state_bytes": written.state_bytes if written is not None else None,
        "deleted_before": None,
    }
    if truncate:
        before = logs.limit(kept, kept_s)
        if before > kept.first:
            if not dry_run:
                logs.delete(kept.log, before)
            row["deleted_before"] = before
    return row


def _outcome(written: Written | None) -> str:
    if written is None:
        return "too_short"
    if not written.state_bytes:
        return "already_there"
    return "self_audit" if written.self_audit else "confirmed"


def _sentence(row: dict[str, Any]) -> str:
    words = {
        "dry_run": "would be written down at offset {snapshot}",
        "too_short": "has less than 16 records: nothing to write down",
        "already_there": "had been written down at offset {snapshot}",
        "self_audit": "is written down at offset {snapshot} ({state_bytes} bytes), confirmed by a second fold",
        "confirmed": "is written down at offset {snapshot} ({state_bytes} bytes), confirmed by a consumer",
    }
    text = f"log {row['log']} ({row['first']} to {row['end']}) " + words[row["outcome"]].format(**row)
    if row["deleted_before"] is not None:
        verb = "would go" if row["outcome"] == "dry_run" else "are deleted"
        text += f"; records below {row['deleted_before']} {verb}"
    return text


@frame.reports_errors
def bootstrap(
    dry_run: operate.DryRun = False,
    yes: operate.Yes = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Begin the history of logs anew whose beginning was deleted without a snapshot (HistoryTruncated).

    The last way out: it says what is lost and asks twice. Logs that can be read are not touched.
    """
    with Logs(frame.open_transport(bootstrap_servers, command_config), coordination_topic) as logs:
        broken = logs.broken()
        root = logs.surviving_root() if broken else None
        kept = root is not None
        if broken:
            frame.say(f"Logs of {coordination_topic!r} that cannot be read: {', '.join(map(str, broken))}.")
            frame.say(RISKS)
            if not kept:
                frame.say(
                    "No copy of the root Genesis is left: the topic becomes another incarnation, whose fencing "
                    "tokens are greater than all before."
                )
        begun = []
        if broken and not dry_run:
            operate.ask(f"Begin {len(broken)} log(s) of {coordination_topic!r} anew?", yes)
            operate.ask("Everything that stood there is lost. Are all consumers of these groups stopped?", yes)
            root = root or logs.new_root()
            begun = [logs.begin_anew(number, root) for number in broken]
    outcome = "dry_run" if dry_run and broken else "begun_anew" if begun else "nothing_to_do"
    rows = [{"log": number, "first": bounds.first, "end": bounds.end} for number, bounds in broken.items()]
    if as_json:
        frame.print_json(
            {
                "outcome": outcome,
                "same_incarnation": kept if broken else None,
                "logs": rows,
                "begun": [each._asdict() for each in begun],
            }
        )
        return
    for each in begun:
        print(f"log {each.log} begins anew at offset {each.at}")
    if broken and dry_run:
        print(f"{len(broken)} logs would begin anew; {operate.DRY}")
    if not broken:
        print("every log can be read: nothing to do")
