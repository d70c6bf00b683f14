"""`marshal log reset`: a new history for logs whose beginning was deleted without a snapshot."""

from __future__ import annotations

from typing import Final

from marshal_py.admin.logs import Logs
from marshal_py.cli import changes, output
from marshal_py.cli.options import CommonOptions, command

EXAMPLE: Final = output.example("marshal log reset --dry-run")

RISKS: Final = """\
Everything in these logs is lost: positions, pauses, settings and sessions of their groups.
  - Consumers start at the committed offsets that Kafka has of their group (the library mirrors positions there every
    few seconds), else at the end, or where their `start` says. In at-least-once mode messages may come again, and
    at an end messages may be skipped.
  - The promise of at-most-once mode does not hold across this: messages that were delivered shortly before may be
    delivered again.
  - Consumers that still run with the old state stop with HistoryRestarted; start them again.
If a backup of the log exists (`marshal log dump`), keep it: a reset cannot be undone."""


@command
def reset(options: CommonOptions, dry_run: changes.DryRun = False, yes: changes.Yes = False) -> None:
    """Begin a new history for logs whose beginning was deleted without a snapshot (HistoryTruncated).

    The last way out: the command says what is lost and asks twice. Logs that can be read are not touched.
    """
    topic = options.coordination_topic
    with Logs(options.transport(), topic) as logs:
        broken = logs.broken()
        root = logs.surviving_root() if broken else None
        kept = root is not None
        if broken:
            output.say(f"Logs of {topic!r} that cannot be read: {', '.join(map(str, broken))}.")
            output.say(RISKS)
            if not kept:
                output.say(
                    "No copy of the root Genesis is left: the topic becomes another incarnation, whose fencing "
                    "tokens are greater than all before."
                )
        begun = []
        if broken and not dry_run:
            changes.ask(f"Begin a new history for {len(broken)} log(s) of {topic!r}?", yes)
            changes.ask("Everything in them is lost. Are all consumers of these groups stopped?", yes)
            root = root or logs.new_root()
            begun = [logs.restart(number, root) for number in broken]
    if options.as_json:
        output.print_json(
            {
                "outcome": "dry_run" if dry_run and broken else "begun_anew" if begun else "nothing_to_do",
                "same_incarnation": kept if broken else None,
                "logs": [{"log": number, "first": log.first, "end": log.end} for number, log in broken.items()],
                "begun": [each._asdict() for each in begun],
            }
        )
        return
    for each in begun:
        print(f"log {each.log} begins again at offset {each.at}")
    if broken and dry_run:
        print(f"{len(broken)} logs would begin again; {changes.DRY}")
    if not broken:
        print("every log can be read: nothing to do")
