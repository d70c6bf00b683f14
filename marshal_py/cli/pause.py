"""`marshal pause`, `marshal resume`, `marshal set-position`: pausing a live group, and moving its positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, cast

import typer
from msgspec import UNSET, Struct, UnsetType

from marshal_py.admin.group import Group, Moved
from marshal_py.admin.plans import impact
from marshal_py.admin.plans.impact import Row
from marshal_py.admin.plans.operation import Progress, Terms
from marshal_py.admin.plans.position import Target, target_of
from marshal_py.admin.views.recreated_topics import RecreatedTopic
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import command, number_or_none
from marshal_py.client.values.position_text import RULE
from marshal_py.errors import AdminBusy, AdminFailed, InvalidOption
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import PAUSE_MS_MAX

EXAMPLE: Final = output.example("marshal pause billing --for 60s --reason 'schema change' --yes")
RESUME_EXAMPLE: Final = output.example("marshal resume billing")

PauseToken = Annotated[int | None, typer.Option("--token", min=0, help="Of the pause, as `marshal pause` printed.")]


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions(changes.PauseOptions):
    """Has the options of PauseOptions, but --token and --adopt name a running pause to replace, not to work in."""

    token: PauseToken = None
    adopt: Annotated[bool, typer.Option("--adopt", help="Replace a running pause of your own.")] = False


class PauseEvent(Struct, frozen=True):
    """What --hold has done. `over_at`: of `paused_again`, when the pause had been over."""

    group: str
    event: Literal["drained", "renewed", "paused_again"]
    token: int
    over_at: str | UnsetType = UNSET


class PauseResult(Struct, frozen=True):
    """A pause. `released`: partitions that were owned before. `evicted`: sessions. `held`: it is over now."""

    group: str
    token: int | None
    duration_s: float
    released: list[str]
    evicted: list[int]
    held: bool


class Resumed(Struct, frozen=True):
    """`resumed`: whether the group was paused."""

    group: str
    resumed: bool


@command
@prints(PauseResult, PauseEvent)
def pause(
    options: ReleaseOptions,
    group: changes.GroupName,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="90s, 10m, 1h; at most 24h. Then its members continue by themselves."
        ),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Stay and renew the pause; ctrl-C ends it.")] = False,
) -> None:
    """Pause a group: its consumers finish the messages they have and release all partitions. They stay in the group.

    Returns when every partition is free, and prints the token of the pause, by which other commands name it. A consumer
    that gives no sign of life for two of its heartbeat intervals is evicted.

    With --hold the exit code is 1 if the pause was over for a while, because this process did not renew it in time (it
    was stopped, or the cluster did not answer). The command says so when it has paused the group again.

    If the group is paused already, the command fails and says whose pause that is. To replace the running pause by this
    one, give --token with its token, --adopt if your user made it on this machine, or --take-over whoever made it. If
    the operation that made the old pause still runs, it fails.
    """
    duration_s = None if for_ is None else changes.seconds(for_)
    if duration_s is not None and not 0 < duration_s <= PAUSE_MS_MAX / 1000:
        raise typer.BadParameter("--for takes more than 0, at most 24h")
    target = options.group(group)
    if not options.confirmed(
        group,
        lambda: target.impact(lambda context: impact.of_pause(context, changes.now(), Terms(**options.pause()))),
        f"Pause group {group!r}?",
    ):
        return
    options.ask_about_take_over(group, options.take_over)
    report = options.watcher()

    def watch(event: Progress) -> None:
        report(event)
        if hold and options.as_json and event.kind in ("drained", "renewed", "paused_again"):
            over_at = event.text if event.kind == "paused_again" else UNSET
            output.print_json(PauseEvent(group, cast(Any, event.kind), event.offset, over_at))

    done = target.pause(duration_s, options.reason, keep=hold, watcher=watch, **options.pause())
    options.print_result(
        PauseResult(
            group=group,
            token=number_or_none(done.token),
            duration_s=done.duration_s,
            released=[str(tp) for tp in done.released],
            evicted=list(done.evicted),
            held=hold,
        ),
        f"group {group!r} continues"
        if hold
        else f"group {group!r} is paused for {done.duration_s:g} s, token {done.token}",
    )


@command
@prints(Resumed)
def resume(
    options: changes.ChangeOptions,
    group: changes.GroupName,
    token: PauseToken = None,
    take_over: changes.TakeOver = False,
) -> None:
    """End a pause: your own, the one that --token names, or with --take-over anybody's.

    A group that is not paused is left as it is.
    """
    target = options.group(group)
    if options.showed_dry_run(
        group,
        lambda: target.impact(
            lambda context: impact.of_resume(context, changes.now(), Terms(token=token, take_over=take_over))
        ),
    ):
        return
    options.ask_about_take_over(group, take_over)
    ended = target.resume(token=token, take_over=take_over, reason=options.reason)
    options.print_result(
        Resumed(group, ended), f"group {group!r} continues" if ended else f"group {group!r} was not paused"
    )


SET_POSITION_EXAMPLE: Final = output.example("marshal set-position billing orders --to earliest --dry-run")


class PartitionMove(Struct, frozen=True):
    """A partition that moves to `target`. `skipped`, `repeated`: how many messages will not be read, or again."""

    topic: str
    partition: int
    owner: str | None
    position: int | None
    target: int
    skipped: int
    repeated: int


class Move(Struct, frozen=True):
    """A move of positions. `offset`: of its record. `token`: of the pause that is left. `recreated`: topics that it
    accepts as they are now. `refused`: in a dry run, why a running pause would forbid it."""

    group: str
    outcome: Literal["dry_run", "moved"]
    offset: int | None
    token: int | None
    partitions: list[PartitionMove]
    recreated: list[RecreatedTopic]
    refused: str | UnsetType | None


class NotMoved(Struct, frozen=True):
    """Says what became of a move that failed, and why."""

    group: str
    outcome: str
    reason: str


@command
@prints(Move, NotMoved)
def set_position(
    options: changes.PauseOptions,
    group: changes.GroupName,
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC[:PARTITION]...", help="What to move; with a .csv file all that it names, if left out."
        ),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="WHERE", help=f"{RULE}.")] = None,
    shift_by: Annotated[
        int | None, typer.Option("--shift-by", metavar="N", help="This many messages forward, or back if negative.")
    ] = None,
    stay_paused: Annotated[bool, typer.Option("--stay-paused", help="Leave the group paused.")] = False,
) -> None:
    """Move a live group to other positions: pause it, wait until every partition is free, move, resume.

    Either everything that is named moves, or nothing does. `marshal state GROUP --csv` prints the positions as
    they are. Parked partitions are consumed again afterwards. A topic that was deleted and created again is accepted as
    it is now, before the move: then the positions of all its partitions are forgotten.
    """
    target = _target(to, shift_by, group)
    if not topics and not target.named:
        raise typer.BadParameter("name at least one topic")
    where = options.group(group)
    if options.dry_run or not options.yes:
        preview = where.set_position(topics or (), target, dry_run=True, **options.pause())
        if options.dry_run:
            _print(group, preview, "dry_run", options.as_json)
            return
        for line in [*_recreated(preview, "would be"), *_refused(preview)]:
            output.say(line)
        _print_rows(preview.rows, stderr=True)
        changes.ask(f"Move {len(preview.rows)} positions of group {group!r}?", options.yes)
    options.ask_about_take_over(group, options.take_over)
    _print(group, _move(where, topics or [], target, stay_paused, options), "moved", options.as_json)


def _target(to: str | None, shift_by: int | None, group: str) -> Target:
    if (to is None) == (shift_by is None):
        raise typer.BadParameter("give either --to or --shift-by")
    try:
        return target_of(to, shift_by, group)
    except InvalidOption as error:
        raise typer.BadParameter(str(error)) from error


def _move(where: Group, topics: list[str], target: Target, stay_paused: bool, options: changes.PauseOptions) -> Moved:
    """Moves the positions. If that fails, raises the error and, with --json, first prints the outcome as a document."""
    try:
        return where.set_position(
            topics, target, stay_paused=stay_paused, reason=options.reason, watcher=options.watcher(), **options.pause()
        )
    except (AdminBusy, AdminFailed) as error:
        if options.as_json:
            outcome = error.outcome if isinstance(error, AdminFailed) else AdminFailed.NOT_MOVED
            output.print_json(NotMoved(where.name, outcome, str(error)))
        raise


def _print(group: str, moved: Moved, outcome: Literal["dry_run", "moved"], as_json: bool) -> None:
    if as_json:
        output.print_json(
            Move(
                group=group,
                outcome=outcome,
                offset=number_or_none(moved.offset),
                token=number_or_none(moved.token),
                partitions=[
                    PartitionMove(
                        **{**row._asdict(), "owner": row.owner or None, "position": number_or_none(row.position)}
                    )
                    for row in moved.rows
                ],
                recreated=list(moved.recreated),
                refused=(moved.refused or None) if outcome == "dry_run" else UNSET,
            )
        )
        return
    for line in _recreated(moved, "would be" if outcome == "dry_run" else "are"):
        print(line)
    _print_rows(moved.rows)
    for line in _refused(moved):
        print(line)
    if outcome == "dry_run":
        elsewhere = sum(row.target != row.position for row in moved.rows)
        print(f"{elsewhere} of {len(moved.rows)} positions would move to another offset; {changes.DRY}")
    if outcome == "moved":
        stays = f"; the group stays paused, token {moved.token}" if moved.token != NONE else ""
        print(f"moved at offset {moved.offset}{stays}")


def _recreated(moved: Moved, are: str) -> Iterator[str]:
    for one in moved.recreated:
        yield (
            f"topic {one.topic!r} was created again (its id was {one.known}, now it is {one.found}, with "
            f"{one.partitions} partitions): the {one.forgotten} positions of all its partitions {are} forgotten, "
            f"and those that are not moved start at their beginnings"
        )


def _refused(moved: Moved) -> Iterator[str]:
    if moved.refused:
        yield f"this move would be refused now: {moved.refused}"


def _print_rows(rows: list[Row], *, stderr: bool = False) -> None:
    columns = ("partition", "owner", "position", "target", "skipped", "repeated")
    cells = (
        (f"{row.topic}:{row.partition}", row.owner or None, _position(row), row.target, row.skipped, row.repeated)
        for row in rows
    )
    output.print_table(columns, cells, stderr=stderr)


def _position(row: Row) -> object:
    return "none" if row.position == NONE else row.position
