"""`marshal timeline`: a page that draws who owned what, when, and how far the group was behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import Struct

from marshal_py.cli import changes, output
from marshal_py.cli.documents import Time, prints, time_of
from marshal_py.cli.options import (
    NO_PERIOD,
    NOBODY,
    CommonOptions,
    Force,
    ReadOptions,
    Since,
    Until,
    command,
    require_group,
)
from marshal_py.client.values.position_text import moment_of
from marshal_py.history.picture import Picture, page
from marshal_py.log.observer import Observer
from marshal_py.log.pictures import Period, picture_of

EXAMPLE: Final = output.example("marshal timeline billing --since -1h -o billing.html")
HOUR_MS: Final = 3_600_000


class Drawn(Struct, frozen=True):
    """A page in `file`: the span of time, and how many partitions and records of the log it has."""

    group: str
    file: str
    from_: Time | None
    to: Time | None
    partitions: int
    records: int


@command
@prints(Drawn)
def timeline(
    options: ReadOptions,
    group: changes.GroupName,
    path: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="Write there; stdout if left out."),
    ] = None,
    force: Force = False,
    since: Since = None,
    until: Until = None,
) -> None:
    """Draw a group's history as a page: who owned each partition, gaps, pauses, moves, members, lag.

    One file of HTML that loads nothing. Point at anything, or click it, for the record of the log and its sentence.
    Without --since it shows the last hour, or all of a dump; there, times like -1h count from the dump's newest
    record.
    """
    if path is None and options.as_json:
        raise typer.BadParameter("--json needs --output: the page goes to stdout")
    with options.observer() as observer:
        picture = picture_of(observer, group, period_in(options, observer, since, until))
    if picture is None:
        raise unknown_group(options, group, until)
    _write(options, path, force, picture)


def _write(options: CommonOptions, path: Path | None, force: bool, picture: Picture) -> None:
    text = page(f"marshal timeline {picture.group}", [picture])
    if path is None:
        sys.stdout.write(text)
        return
    with output.opened(path, force) as file:
        file.write(text.encode())
    begin, end = (time_of(picture.from_ms + ms) for ms in (0, picture.to_ms))
    options.print_result(
        Drawn(picture.group, str(path), begin, end, len(picture.lanes), len(picture.records)),
        f"{path}: {begin} to {end}, {len(picture.lanes)} partitions, {len(picture.records)} records",
    )


def unknown_group(options: ReadOptions, group: str, when: str | None) -> output.CommandFailed:
    """Returns the error about a group that its log did not know at a time. Raises it if it is not there at all."""
    with options.observer() as observer:
        observer.fold(group)
        require_group(observer, group)
    return output.CommandFailed(f"group {group!r} is younger than {when}")


def period_in(options: ReadOptions, observer: Observer, since: str | None, until: str | None) -> Period:
    """Returns the period that --since and --until name. Raises CommandFailed without a log."""
    if observer.root is None:
        raise output.CommandFailed(NOBODY)
    now_ms = observer.as_of_ms if options.dump is None else observer.newest_ms()
    to_ms = now_ms if until is None else moment_of(until, now_ms)
    usual_from_ms = to_ms - HOUR_MS if options.dump is None else 0
    from_ms = usual_from_ms if since is None else moment_of(since, now_ms)
    if from_ms >= to_ms:
        raise typer.BadParameter(NO_PERIOD)
    return Period(from_ms, to_ms, until is not None)
