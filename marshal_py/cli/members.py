"""`marshal members ls / step-down` and `marshal evict`: the sessions of a live group."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from marshal_py.admin import impact, overview
from marshal_py.cli import frame, operate
from marshal_py.client.observer import Observer

LS_EXAMPLE: Final = frame.example("marshal members ls billing")
STEP_DOWN_EXAMPLE: Final = frame.example("marshal members step-down billing worker-1 --reason 'slow disk'")
EVICT_EXAMPLE: Final = frame.example("marshal evict billing 4711 --yes")

app = typer.Typer(help="Administer the consumers of a group.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", epilog=LS_EXAMPLE)
@frame.reports_errors
def ls(
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="One group; all if left out.")] = None,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """List live sessions, per group in the order in which they are candidates for partitions."""
    if group is not None:
        found = operate.open_group(group, bootstrap_servers, command_config, coordination_topic).members()
    else:
        with Observer(frame.open_transport(bootstrap_servers, command_config), coordination_topic) as observer:
            observer.fold()
            found = [member for _, one in observer.groups() for member in overview.members(one)]
    if as_json:
        frame.print_json(found)
        return
    table = Table(box=None)
    for column in ("group", "session", "client id", "member", "claims", "interval", "library", "stepped down"):
        table.add_column(column)
    for one in found:
        table.add_row(
            one["group"],
            str(one["session"]),
            one["client_id"],
            one["member"] or "-",
            ", ".join(one["claims"]) or "-",
            f"{one['interval_s']:g} s",
            one["library"],
            "yes" if one["stepped_down"] else "-",
        )
    Console().print(table)


@app.command("step-down", epilog=STEP_DOWN_EXAMPLE)
@frame.reports_errors
def step_down(
    group: operate.Name,
    session: operate.Session,
    reason: operate.Reason = "",
    dry_run: operate.DryRun = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Make a session the last candidate for everything. It stays, and is never absent."""
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    number = operate.find_session(target, session)
    if not operate.foresee(
        target, lambda context: impact.of_step_down(context, number), dry_run=dry_run, as_json=as_json
    ):
        return
    mark = target.step_down(number, reason)
    if as_json:
        frame.print_json({"group": group, "session": number, "mark": mark})
    else:
        print(f"session {number} of group {group!r} has stepped down")


@frame.reports_errors
def evict(
    group: operate.Name,
    session: operate.Session,
    reason: operate.Reason = "",
    dry_run: operate.DryRun = False,
    yes: operate.Yes = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """End a session that is silent. Watches it for twice its heartbeat interval first; a live one is refused.

    There is no force: a consumer that is only cut off from here must not lose its partitions to our impatience.
    """
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    number = operate.find_session(target, session)
    if not operate.foresee(
        target,
        lambda context: impact.of_eviction(context, number),
        dry_run=dry_run,
        as_json=as_json,
        question=f"Evict session {number} of group {group!r}?",
        yes=yes,
    ):
        return
    by = target.evict(number, reason=reason, watcher=operate.watcher(as_json))
    if as_json:
        frame.print_json({"group": group, "session": number, "ended_by": by})
    else:
        print(
            f"session {number} of group {group!r} has ended; it was evicted by {by}"
            if by
            else f"session {number} of group {group!r} has ended by itself"
        )
