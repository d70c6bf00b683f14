"""`marshal pause` and `marshal resume`: pausing a whole live group, and ending the pause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, cast

import typer
from msgspec import UNSET, Struct, UnsetType

from marshal_py.admin.plans import impact
from marshal_py.admin.plans.operation import Progress, Terms
from marshal_py.cli import changes, output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import command, number_or_none
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
