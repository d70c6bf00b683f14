"""`marshal get`: any message of a topic, by offset, time or key. Joins no group and writes nothing into the cluster."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from marshal_py.cli import lines, output
from marshal_py.cli.documents import prints, time_of
from marshal_py.cli.lines import DecodingOptions
from marshal_py.cli.options import TopicName, command, iso_time
from marshal_py.topics.keys import ALL, PARTITIONERS
from marshal_py.topics.request import EndOfBatch, GetRequest, StoredMessage
from marshal_py.topics.topic import Topic

SILENT_S: Final = 1.0  # a shorter question shows no bar


class ScanBar:
    """Draws the progress that a Topic reports. `hide` removes the bar, before something else is printed."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._bar: Progress | None = None

    def show(self, read: int, wanted: int) -> None:
        """Draws that `read` of `wanted` offsets are read."""
        if self._bar is None:
            if time.monotonic() - self._began_s < SILENT_S or not sys.stderr.isatty():
                return
            columns = TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=read, total=wanted)

    def hide(self) -> None:
        """Removes the bar. The next one appears a second later."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._began_s = time.monotonic()


EXAMPLE: Final = output.example("marshal get users --multi-last '1234.>' --up-to-time 2026-01-31T12:00:00Z")
PAGE: Final = 1_000  # messages of a page, where --all asks for every one
HEX_BYTES: Final = 16  # of a line
_COMMANDS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # to a terminal: all but newlines and tabs
ASKED: Final = (  # options that go to a GetRequest as they are
    *("offset", "start_time", "last_by_key", "next_by_key", "batch", "max_bytes", "multi_last", "up_to_time"),
)


@dataclass(frozen=True, kw_only=True)
class GetOptions(DecodingOptions):
    """The options of `get`: which messages, and how they are found."""

    offset: Annotated[int | None, typer.Option(min=0, help="This message, or those from here on.")] = None
    partition: Annotated[int | None, typer.Option(min=0, help="Of this partition.")] = None
    start_time: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", callback=iso_time, help="From this time on: 2026-01-31T12:00:00Z, or -5m."
        ),
    ] = None
    last_by_key: Annotated[str | None, typer.Option("--last", metavar="KEY", help="The last message of a key.")] = None
    next_by_key: Annotated[str | None, typer.Option("--next", metavar="KEY", help="The first message of a key.")] = None
    batch: Annotated[int | None, typer.Option(min=1, help="At most so many messages.")] = None
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="At most so many bytes of a batch; one message always fits.")
    ] = None
    multi_last: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="The last message of each key; * is one token, > the rest; repeatable."),
    ] = None
    up_to_offset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PARTITION:]OFFSET",
            help="Of --multi-last, as of this offset; PARTITION is for topics of several partitions; repeatable.",
        ),
    ] = None
    up_to_time: Annotated[
        str | None, typer.Option(metavar="TIME", callback=iso_time, help="Of --multi-last, as of this time.")
    ] = None
    every: Annotated[bool, typer.Option("--all", help="Every page, and not the first alone.")] = False
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is written later and matches, until Ctrl-C.")
    ] = False
    tombstones: Annotated[bool, typer.Option("--tombstones", help="Also messages that delete their key.")] = False
    partitioner: Annotated[
        str, typer.Option(help=f"How the producers choose the partition of a key: {', '.join(PARTITIONERS)}.")
    ] = ALL
    index: Annotated[
        Path | None,
        typer.Option("--index", metavar="FILE", help="Answer by this key index, made or brought up to date first."),
    ] = None
    read_uncommitted: Annotated[
        bool, typer.Option("--read-uncommitted", help="Also messages of open and aborted transactions.")
    ] = False

    def request(self, key: str | None) -> GetRequest:
        """Returns what is asked for. `key`: the one that was named without an option. Options that do not go together
        end the command with exit code 2."""
        asked: dict[str, Any] = {name: value for name in ASKED if (value := getattr(self, name)) not in (None, [])}
        if key is not None:
            if asked or self.up_to_offset or self.every:
                raise typer.BadParameter("KEY alone means its last message: use --last or --next together with options")
            asked["last_by_key"] = key
        if self.follow and key is None and not asked:
            raise typer.BadParameter("--follow: name where to begin, for example --batch 1000, --time or --last")
        if self.every and "batch" not in asked:
            asked["batch"] = PAGE
        up_to = _offsets(self.up_to_offset)
        request = GetRequest(**asked, partition=self.partition, up_to_offset=up_to, tombstones=self.tombstones)
        if self.follow and (request.up_to_offset is not None or request.up_to_time is not None):
            raise typer.BadParameter(
                "--up-to-offset and --up-to-time end the answer, so --follow has nothing to wait for"
            )
        return request

    def source(self, topic: str, bar: ScanBar) -> Topic:
        """Connects to the cluster and returns the topic. `bar` shows how far a search is."""
        readers = self.deserializers()
        isolation = "read_uncommitted" if self.read_uncommitted else "read_committed"
        return Topic(
            self.transport(), topic, partitioner=self.partitioner, isolation=isolation, on_progress=bar.show, **readers
        )


@command
@prints(lines.PrintedMessage, EndOfBatch)
def get(
    options: GetOptions,
    topic: TopicName,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="Print the last message of this key.")] = None,
) -> None:
    """Print messages of a topic by offset, time or key.

    A value is printed as text, as indented JSON or as hexadecimal bytes, whatever it is. With --json each message is
    one line, and a batch ends with a line that says what is left. Exit code 1 if nothing is found.

    With --follow every page is printed, and then what comes later. Of a key or of --multi-last, the last message of
    each key comes first, and then each change, of which some may be passed over if they come faster than twice a
    second.
    """
    request = options.request(key)
    bar = ScanBar()
    source = options.source(topic, bar)
    with output.until_interrupted(options.follow):
        try:
            if options.index is not None:
                if not options.index.exists():
                    output.say(f"{options.index} is new: the keys of topic {topic!r} are indexed first")
                source.key_index(options.index)
            if not options.follow:
                _print(source, request, options.every, options.as_json, bar)
                return
            for message in source.follow(request):
                bar.hide()
                _print_one(message, options.as_json)
        finally:
            bar.hide()
            source.close()


def _print(source: Topic, request: GetRequest, every: bool, as_json: bool, bar: ScanBar) -> None:
    if not request.is_batch:
        found = source.find(request)
        bar.hide()
        _print_one(found, as_json)
        return
    count = 0
    for page in source.pages(request):
        bar.hide()
        for message in page:
            _print_one(message, as_json)
        count += len(page)
        end = page.end
        if count and (not every or end.num_pending == 0):
            if as_json:
                output.print_json(end)
            elif end.num_pending:
                output.say(f"{end.num_pending} more match: --all prints them")
            return
    raise output.CommandFailed(f"topic {source.name!r} has no message that matches")


def _print_one(message: StoredMessage, as_json: bool) -> None:
    if as_json:
        output.print_json(lines.content(message))
    else:
        show_message(message)


def show_message(message: StoredMessage) -> None:
    """Prints a message for people."""
    console = Console(soft_wrap=True, highlight=False)  # a message may be longer than any width
    when = time_of(message.timestamp)
    console.print(Text(f"{message.topic}:{message.partition}@{message.offset}  {when or '-'}", style="bold"))
    if message.key is not None:
        console.print(Text("key    "), Text(_readable(lines.as_bytes(message.key)), style="cyan"), sep="")
    for name, value in message.headers:
        console.print(Text(f"header {output.printable(name)}: {'-' if value is None else _readable(value)}"))
    if message.value is None:
        console.print(Text("tombstone: the key is deleted", style="red"))
    else:
        _show_value(console, lines.as_bytes(message.value))


def _show_value(console: Console, value: bytes) -> None:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        for at in range(0, len(value), HEX_BYTES):
            piece = value[at : at + HEX_BYTES]
            plain = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
            console.print(Text(f"{at:08x}  {piece.hex(' '):<{HEX_BYTES * 3}} {plain}"))
        return
    if text.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):  # then it is shown as it is
            text = msgspec.json.format(text, indent=2)  # numbers, and keys that come twice, stay as they are
    print(_COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text))  # rich would make spaces of tabs


def _readable(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content.hex(" ")
    return text if text.isprintable() else repr(text)


def _offsets(given: list[str] | None) -> int | Mapping[int, int] | None:
    """Returns the offset of each partition, from texts like `3:120`, or the number from a text like `120` alone. Any
    other text ends in exit code 2."""
    if given is not None and len(given) == 1 and given[0].isdecimal():
        return int(given[0])
    found: dict[int, int] = {}
    for text in given or ():
        number, colon, at = text.partition(":")
        if not colon or not number.isdecimal() or not at.isdecimal():
            raise typer.BadParameter(f"--up-to-offset {text!r}: expected PARTITION:OFFSET, or one OFFSET alone")
        if int(number) in found:
            raise typer.BadParameter(f"--up-to-offset {text!r}: partition {int(number)} is named twice")
        found[int(number)] = int(at)
    return found or None
