"""`marshal dead-letters`: lists the letters of a dead-letter topic, or puts their messages back."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.admin import dead_letters as letters_of
from marshal_py.admin.dead_letters import Letter
from marshal_py.cli import lines, output
from marshal_py.cli.changes import DryRun, Yes, ask
from marshal_py.cli.documents import prints, time_of, with_fields
from marshal_py.cli.options import TableOptions, check_time, check_topic_name, command, since_of

EXAMPLE: Final = output.example("marshal dead-letters dlq.orders --group billing --error Timeout --redrive --dry-run")
PrintedLetter: Final = with_fields("PrintedLetter", Letter, at=lines.PrintedMessage)


class Redriven(Struct, frozen=True):
    """What became of letters of `topic`. `before`: how many were put back earlier. `lost`: messages that are gone."""

    topic: str
    put_back: int
    before: int
    lost: list[str]


@command
@prints(list[PrintedLetter], Redriven)  # type: ignore[valid-type]  # made by with_fields
def dead_letters(
    options: TableOptions,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", callback=check_topic_name, help="The dead-letter topic.")],
    group: Annotated[str | None, typer.Option("--group", help="Letters of this group.")] = None,
    error: Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Whose reason has this text.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", callback=check_time, help="Written at this time or later.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", callback=check_time, help="Written before this time.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Of messages with this key.")] = None,
    redrive: Annotated[
        bool, typer.Option("--redrive", help="Put their messages back into the topics that they came from.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """List the letters of a dead-letter topic: what was given up, by whom, when and why.

    With --redrive a copy of each message goes to the topic and partition that it came from, behind what is there, and
    reaches every group that consumes the topic. The dead-letter topic gets a marker in the same transaction, so a
    second run puts nothing back twice. `marshal get` prints a letter in full, and so does --json.
    """
    since_ms, until_ms = since_of(since), since_of(until)

    def select(letter: Letter) -> bool:
        return (
            group in (None, letter.group)
            and (error is None or error in letter.error)
            and (since_ms is None or letter.at.timestamp >= since_ms)
            and (until_ms is None or letter.at.timestamp < until_ms)
            and (key is None or letter.at.key == key.encode())
        )

    transport = options.transport()
    found = letters_of.read(transport, topic, select)
    if not redrive:
        if dry_run:
            raise typer.BadParameter("--dry-run is for --redrive")
        _show(options, found)
        return
    going = [letter for letter in found if not letter.redriven]
    letters_of.check(going, topic)
    if dry_run:
        _show(options, going)
        output.say(f"{len(going)} would be put back, {len(found) - len(going)} were before: nothing was written")
        return
    if going:
        ask(f"Put {len(going)} messages back into {', '.join(sorted({one.topic for one in going}))}?", yes)
    done = letters_of.redrive(transport, topic, select)
    before, lost = len(found) - len(going), [one.message for one in done.lost]
    result = Redriven(topic, len(done.put_back), before, lost)
    options.print_result(result, f"{len(done.put_back)} put back, {before} were before")
    if lost:
        gone = ", ".join(lost)
        raise output.CommandFailed(f"{len(lost)} letters have no content, and their messages are gone: {gone}")


def _show(options: TableOptions, found: list[Letter]) -> None:
    documents = [{**letter._asdict(), "at": lines.content(letter.at)} for letter in found] if options.as_json else []
    columns = ("letter", "written", "group", "message", "key", "deliveries", "reason", "")
    options.show(documents, found, Letter._fields, columns, _cells)


def _cells(letter: Letter) -> list[object]:
    at = letter.at
    return [
        f"{at.partition}@{at.offset}",
        time_of(at.timestamp, "seconds"),
        letter.group,
        f"{letter.topic}:{letter.partition}@{letter.offset}",
        lines.as_bytes(at.key).decode(errors="replace"),
        letter.deliveries,
        letter.error,
        "put back" if letter.redriven else "without content" if letter.left_out else "",
    ]
