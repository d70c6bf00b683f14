"""`marshal release` and `marshal resume`: pausing a whole live group, and ending the pause."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from marshal_py.admin import impact
from marshal_py.admin.operation import Progress
from marshal_py.cli import frame, operate
from marshal_py.protocol.records import PAUSE_MS_MAX

EXAMPLE: Final = frame.example("marshal release billing --for 60s --reason 'schema change' --yes")
RESUME_EXAMPLE: Final = frame.example("marshal resume billing")


@frame.reports_errors
def release(
    group: operate.Name,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="DURATION", help="90s, 10m, 1h; at most 24h. Then its members go on by themselves."
        ),
    ] = None,
    reason: operate.Reason = "",
    hold: Annotated[bool, typer.Option("--hold", help="Stay and renew the pause; ctrl-C ends it.")] = False,
    token: operate.PauseToken = None,
    adopt: Annotated[bool, typer.Option("--adopt", help="Replace a running pause of your own.")] = False,
    take_over: operate.TakeOver = False,
    dry_run: operate.DryRun = False,
    yes: operate.Yes = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Pause a group: all its consumers finish what they have in hand and let go. They stay, and come back afterwards.

    Returns when every partition is free, and prints the token of the pause. Consumers that do not answer are waited
    out, twice their heartbeat interval, and evicted. A pause that is running is left alone, unless you name it by
    --token, replace your own by --adopt, or take anybody's over.
    """
    duration_s = None if for_ is None else operate.seconds(for_)
    if duration_s is not None and not 0 < duration_s <= PAUSE_MS_MAX / 1000:
        raise typer.BadParameter("--for takes more than 0, at most 24h")
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    if not operate.foresee(
        target,
        lambda context: impact.of_pause(context, operate.now(), token, adopt, take_over),
        dry_run=dry_run,
        as_json=as_json,
        question=f"Pause group {group!r}?",
        yes=yes,
    ):
        return
    operate.ask_twice(group, take_over, yes)
    tell = operate.watcher(as_json)

    def watch(event: Progress) -> None:
        tell(event)
        if hold and as_json and event.kind in ("drained", "renewed"):
            frame.print_json({"group": group, "event": event.kind, "token": event.offset})

    done = target.pause(duration_s, reason, token=token, adopt=adopt, take_over=take_over, keep=hold, watcher=watch)
    if as_json:
        frame.print_json(
            {
                "group": group,
                "token": operate.number_or_none(done.token),
                "duration_s": done.duration_s,
                "released": [str(tp) for tp in done.released],
                "evicted": done.evicted,
                "held": hold,
            }
        )
    elif hold:
        print(f"group {group!r} goes on")
    else:
        print(f"group {group!r} is paused for {done.duration_s:g} s, token {done.token}")


@frame.reports_errors
def resume(
    group: operate.Name,
    reason: operate.Reason = "",
    token: operate.PauseToken = None,
    take_over: operate.TakeOver = False,
    dry_run: operate.DryRun = False,
    yes: operate.Yes = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """End a pause: your own, that of a token, or by force another's. A group that is not paused is left as it is."""
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    if not operate.foresee(
        target,
        lambda context: impact.of_resume(context, operate.now(), token, take_over),
        dry_run=dry_run,
        as_json=as_json,
    ):
        return
    operate.ask_twice(group, take_over, yes)
    ended = target.resume(token=token, take_over=take_over, reason=reason)
    if as_json:
        frame.print_json({"group": group, "resumed": ended})
    else:
        print(f"group {group!r} goes on" if ended else f"group {group!r} was not paused")
