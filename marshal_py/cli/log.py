"""`marshal log tail` and `marshal log dump`: the records of the coordination topic with their verdicts."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from marshal_py.cli import frame
from marshal_py.cli.state import NOBODY
from marshal_py.client.observer import Judged, Observer
from marshal_py.history.describe import as_dict, describe

TAIL_EXAMPLE: Final = frame.example("marshal log tail billing -n 20")
DUMP_EXAMPLE: Final = frame.example("marshal log dump --json")

Group = Annotated[str | None, typer.Argument(help="One group; all if left out.")]

app = typer.Typer(help="Look into the coordination topic.", no_args_is_help=True, rich_markup_mode=None)


@app.command("tail", epilog=TAIL_EXAMPLE)
@frame.reports_errors
def tail(
    group: Group = None,
    count: Annotated[int, typer.Option("-n", min=0, help="So many of the last records.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until ctrl-C.")] = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Show the newest records and what the fold says about each. All logs are ordered by their timestamps."""
    with _observer(bootstrap_servers, command_config, coordination_topic) as observer:
        newest: dict[int, deque[Judged]] = defaultdict(lambda: deque(maxlen=count))
        for judged in observer.read(group):
            if _concerns(judged, group):
                newest[judged.record.log].append(judged)
        merged = sorted((judged for kept in newest.values() for judged in kept), key=_moment)
        for judged in merged[max(0, len(merged) - count) :]:
            _print(judged, as_json)
        if follow and observer.root is not None:
            with contextlib.suppress(KeyboardInterrupt):
                for news in observer.follow(group):
                    if news is not None and _concerns(news, group):
                        _print(news, as_json)


@app.command("dump", epilog=DUMP_EXAMPLE)
@frame.reports_errors
def dump(
    group: Group = None,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Show every record, in order within each log."""
    with _observer(bootstrap_servers, command_config, coordination_topic) as observer:
        for judged in observer.read(group):
            if _concerns(judged, group):
                _print(judged, as_json)


def _observer(servers: str | None, config: Any, topic: str) -> Observer:
    observer = Observer(frame.open_door(servers, config), topic)
    if observer.root is None:
        frame.say(NOBODY)
    return observer


def _concerns(judged: Judged, group: str | None) -> bool:
    return group is None or judged.verdict.group == group


def _moment(judged: Judged) -> tuple[int, int, int]:
    return judged.record.timestamp_ms, judged.record.log, judged.record.offset


def _print(judged: Judged, as_json: bool) -> None:
    record, verdict = judged
    time = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")
    fields = as_dict(verdict)
    if as_json:
        frame.print_json({"log": record.log, "time": time, **fields})
        return
    mark = {"accepted": " ", "rejected": "x", "ignored": "-"}[fields["verdict"]]
    print(f"{time}  {record.log}:{record.offset:<6} {mark} {fields['group'] or '-'}  {fields['type'] or '?'}  "
          f"{describe(verdict)}", flush=True)  # fmt: skip
