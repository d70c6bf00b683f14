"""`marshal log tail / dump / load`: the records of the coordination topic, for people, as JSON, and as files."""

from __future__ import annotations

import base64
import contextlib
import sys
from collections import defaultdict, deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_py.admin import archive
from marshal_py.cli import frame
from marshal_py.cli.state import NOBODY
from marshal_py.client.observer import Judged, Observer
from marshal_py.history.describe import as_dict, describe

TAIL_EXAMPLE: Final = frame.example("marshal log tail billing -n 20")
DUMP_EXAMPLE: Final = frame.example("marshal log dump --output billing.dump")
LOAD_EXAMPLE: Final = frame.example("marshal log load billing.dump --coordination-topic __restored")

Group = Annotated[str | None, typer.Argument(help="One group; all if left out.")]

app = typer.Typer(help="Look into the coordination topic.", no_args_is_help=True, rich_markup_mode=None)


@app.command("tail", epilog=TAIL_EXAMPLE)
@frame.reports_errors
def tail(
    group: Group = None,
    count: Annotated[int, typer.Option("-n", min=0, help="So many of the last records.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until ctrl-C.")] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="The records as they stand there: log, offset, time in ms, key and value in base64."
        ),
    ] = False,
    dump: frame.DumpFile = None,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Show the newest records and what the fold says about each. All logs are ordered by their timestamps."""
    if raw and as_json:
        raise typer.BadParameter("give --raw or --json, not both")
    form = "raw" if raw else "json" if as_json else "human"
    with frame.look(bootstrap_servers, command_config, coordination_topic, dump) as observer:
        if observer.root is None:
            frame.say(NOBODY)
        newest: dict[int, deque[Judged]] = defaultdict(lambda: deque(maxlen=count))
        for judged in observer.read(group, back=True):
            if _concerns(judged, group):
                newest[judged.record.log].append(judged)
        frame.must_know(observer, group, follow and dump is None)
        merged = sorted((judged for kept in newest.values() for judged in kept), key=_moment)
        for judged in merged[max(0, len(merged) - count) :]:
            _print(judged, form)
        if follow and observer.root is not None and dump is None:
            with contextlib.suppress(KeyboardInterrupt):
                for news in observer.follow(group):
                    if news is not None and _concerns(news, group):
                        _print(news, form)


@app.command("dump", epilog=DUMP_EXAMPLE)
@frame.reports_errors
def dump(
    group: Group = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="Write there; stdout if left out."),
    ] = None,
    human: Annotated[bool, typer.Option("--human", help="Sentences for people, which cannot be loaded again.")] = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Write every record as a line of JSON with a checksum; with --json each also says what the fold thinks of it.

    Such a file can be loaded, verified, and looked into by every command that takes --dump. A dump of one group has its
    whole log, and log 0, where the root stands: only whole logs can be folded.
    """
    if human and (as_json or output is not None):
        raise typer.BadParameter("--human goes to stdout, and not together with --json")
    transport = frame.open_transport(bootstrap_servers, command_config)
    if group is not None:
        with Observer(transport, coordination_topic) as observer:
            observer.fold(group)
            frame.must_know(observer, group)
    with Observer(transport, coordination_topic) as observer:
        if observer.root is None:
            frame.say(NOBODY)
        if human:
            for judged in observer.read(group, back=True):
                if _concerns(judged, group):
                    _print(judged, "human")
        elif output is None:
            archive.dump(observer, sys.stdout.buffer, group, as_json)
        else:
            with output.open("wb") as file:
                count = archive.dump(observer, file, group, as_json)
            if as_json:
                frame.print_json({"file": str(output), "records": count})
            else:
                print(f"{count} records in {output}")


@app.command("load", epilog=LOAD_EXAMPLE)
@frame.reports_errors
def load(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="What `marshal log dump` wrote."
        ),
    ],
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Write a dump into a fresh coordination topic, every record at its offset. Refused if the topic holds anything.

    Consumers that use that topic go on where the dump ends. To look only, give --dump to the other commands instead.
    """
    transport = frame.open_transport(bootstrap_servers, command_config)
    count = archive.load(file, transport, coordination_topic)
    if as_json:
        frame.print_json({"topic": coordination_topic, "records": count})
    else:
        print(f"{count} records in {coordination_topic}")


def _concerns(judged: Judged, group: str | None) -> bool:
    return group is None or judged.verdict.group == group


def _moment(judged: Judged) -> tuple[int, int, int]:
    return judged.record.timestamp_ms, judged.record.log, judged.record.offset


def _print(judged: Judged, form: str) -> None:
    record, verdict = judged
    if form == "raw":
        print(record.log, record.offset, record.timestamp_ms, _base64(record.key), _base64(record.value), flush=True)
        return
    time = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")
    fields = as_dict(verdict)
    if form == "json":
        frame.print_json({"log": record.log, "time": time, **fields})
        return
    mark = {"accepted": " ", "rejected": "x", "ignored": "-"}[fields["verdict"]]
    print(
        f"{time}  {record.log}:{record.offset:<6} {mark} {fields['group'] or '-'}  {fields['type'] or '?'}  "
        f"{describe(verdict)}",
        flush=True,
    )


def _base64(content: bytes | None) -> str:
    """`-` is no base64: it stands for none at all."""
    return "-" if content is None else base64.b64encode(content).decode()
