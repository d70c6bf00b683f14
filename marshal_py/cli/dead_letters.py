"""`marshal dead-letters ls / show / redrive`: the letters of a dead-letter topic, and their messages put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from msgspec import Struct

from marshal_py.admin import dead_letters as letters_of
from marshal_py.admin.dead_letters import Letter
from marshal_py.cli import lines, output
from marshal_py.cli.changes import DryRun, Yes, ask
from marshal_py.cli.documents import prints, time_of, with_fields
from marshal_py.cli.get import show_message
from marshal_py.cli.options import CommonOptions, TableOptions, check_time, check_topic_name, command, since_of

LS_EXAMPLE: Final = output.example("marshal dead-letters ls dlq.orders --group billing --error Timeout")
SHOW_EXAMPLE: Final = output.example("marshal dead-letters show dlq.orders 0@17")
REDRIVE_EXAMPLE: Final = output.example("marshal dead-letters redrive dlq.orders --group billing --dry-run")
PrintedLetter: Final = with_fields("PrintedLetter", Letter, at=lines.PrintedMessage)
ROW_FIELDS: Final = ("letter", "written", "key", *Letter._fields[1:])  # `letter`: where it is, as `show` takes it

app: Final = typer.Typer(
    help="Dead letters: list, show, put their messages back.", no_args_is_help=True, rich_markup_mode=None
)
DeadLetterTopic = Annotated[
    str, typer.Argument(metavar="TOPIC", callback=check_topic_name, help="The dead-letter topic.")
]


@dataclass(frozen=True, kw_only=True)
class LetterOptions(TableOptions):
    """The options that choose letters."""

    of_group: Annotated[str | None, typer.Option("--group", help="Letters of this group.")] = None
    error: Annotated[str | None, typer.Option("--error", metavar="TEXT", help="Whose reason has this text.")] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", callback=check_time, help="Written at this time or later.")
    ] = None
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", callback=check_time, help="Written before this time.")
    ] = None
    of_key: Annotated[str | None, typer.Option("--key", help="Of messages with this key.")] = None

    def select(self) -> Callable[[Letter], bool]:
        """Returns whether a letter is chosen, as a function of it."""
        since_ms, until_ms = since_of(self.since), since_of(self.until)
        return lambda letter: (
            self.of_group in (None, letter.group)
            and (self.error is None or self.error in letter.error)
            and (since_ms is None or letter.at.timestamp >= since_ms)
            and (until_ms is None or letter.at.timestamp < until_ms)
            and (self.of_key is None or letter.at.key == self.of_key.encode())
        )


class Redriven(Struct, frozen=True):
    """What became of letters of `topic`. `before`: how many were put back earlier. `lost`: messages that are gone."""

    topic: str
    put_back: int
    before: int
    lost: list[str]


@app.command("ls", epilog=LS_EXAMPLE)
@command
@prints(list[PrintedLetter])  # type: ignore[valid-type]  # made by with_fields
def ls(options: LetterOptions, topic: DeadLetterTopic) -> None:
    """List the letters of a dead-letter topic: what was given up, by whom, when and why.

    Of several letters about one message and group the newest is listed.
    """
    chosen, letters = options.select(), False

    def select(letter: Letter) -> bool:
        nonlocal letters
        letters = True
        return chosen(letter)

    found, _, more = letters_of.read(options.transport(), topic, select)
    _show(options, found)
    if more:
        output.say(f"there are more than these {len(found)}: narrow it by --group, --error, --since, --until or --key")
    if not letters:
        output.say(f"topic {topic!r} has no dead letters: no message in it has the headers of one")
    elif not found:
        output.say(f"topic {topic!r} has no dead letter that was asked for")


@app.command("show", epilog=SHOW_EXAMPLE)
@command
@prints(PrintedLetter)
def show(
    options: CommonOptions,
    topic: DeadLetterTopic,
    letter: Annotated[str, typer.Argument(metavar="PARTITION@OFFSET", help="Where `ls` says that the letter is.")],
) -> None:
    """Print one letter whole: why it was written, its headers, key and value."""
    partition, at, offset = letter.partition("@")
    if not (at and partition.isdecimal() and offset.isdecimal()):
        raise typer.BadParameter(f"{letter!r}: expected PARTITION@OFFSET, as `marshal dead-letters ls` prints it")
    place = int(partition), int(offset)
    found = letters_of.read(options.transport(), topic, lambda one: (one.at.partition, one.at.offset) == place).letters
    if not found:
        raise output.CommandFailed(f"topic {topic!r} has no letter at {letter}")
    if options.as_json:
        output.print_json(_document(found[0]))
        return
    given_up = f"group {found[0].group} gave {found[0].topic}:{found[0].partition}@{found[0].offset} up"
    error = output.printable(found[0].error)
    print(f"{given_up} at delivery {found[0].deliveries}: {error}{' (put back)' * found[0].redriven}")
    show_message(found[0].at)


@app.command("redrive", epilog=REDRIVE_EXAMPLE)
@command
@prints(list[PrintedLetter], Redriven)  # type: ignore[valid-type]  # made by with_fields
def redrive(options: LetterOptions, topic: DeadLetterTopic, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Put the messages of letters back into the topics that they came from.

    A copy of each goes to the topic and partition that it came from, behind what is there, and reaches every group that
    consumes the topic. The dead-letter topic gets a marker in the same transaction, so a second run puts nothing back
    twice. A message that fails again has a new letter.
    """
    transport, select = options.transport(), options.select()
    going, before, more = letters_of.read(transport, topic, select, left=True)
    letters_of.check(going, topic)
    rest = "; there are more, which another run puts back" if more else ""
    if dry_run:
        _show(options, going)
        output.say(f"{len(going)} would be put back, {before} were before: nothing was written{rest}")
        return
    if going:
        ask(f"Put {len(going)} messages back into {', '.join(sorted({one.topic for one in going}))}?", yes)
    done = letters_of.redrive(transport, topic, select)
    lost = [one.message for one in done.lost]
    # As read behind the fence: what another run has just committed may not have been visible before.
    result = Redriven(topic, len(done.put_back), done.before, lost)
    options.print_result(result, f"{len(done.put_back)} put back, {done.before} were before")
    if done.more:
        output.say("there are more letters: run it again")
    if lost:
        gone = ", ".join(lost)
        raise output.CommandFailed(f"{len(lost)} letters have no content, and their messages are gone: {gone}")


def _show(options: TableOptions, found: Sequence[Letter]) -> None:
    documents = list(map(_document, found)) if options.as_json else []
    columns = ("letter", "written", "group", "message", "key", "deliveries", "reason", "")
    options.show(documents, map(_row, found), ROW_FIELDS, columns, _cells)


def _document(letter: Letter) -> dict[str, object]:
    return {**letter._asdict(), "at": lines.content(letter.at)}


def _row(letter: Letter) -> dict[str, Any]:
    at, key = letter.at, lines.as_bytes(letter.at.key).decode(errors="replace")
    place, written = f"{at.partition}@{at.offset}", time_of(at.timestamp, "seconds")
    return dict(zip(ROW_FIELDS, (place, written, key, *letter[1:]), strict=True))


def _cells(row: dict[str, Any]) -> list[object]:
    letter, written, key, group, topic, partition, offset, deliveries, error, left_out, redriven = row.values()
    end = "put back" if redriven else "without content" if left_out else ""
    return [letter, written, group, f"{topic}:{partition}@{offset}", key, deliveries, error, end]
