"""`marshal members ls / step-down` and `marshal evict`: the sessions of a live group."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from marshal_py.admin import impact, overview
from marshal_py.cli import changes, output
from marshal_py.cli.options import CommonOptions, command

LS_EXAMPLE: Final = output.example("marshal members ls billing")
STEP_DOWN_EXAMPLE: Final = output.example("marshal members step-down billing worker-1 --reason 'slow disk'")
EVICT_EXAMPLE: Final = output.example("marshal evict billing 4711 --yes")

app: Final = typer.Typer(help="Administer the consumers of a group.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", epilog=LS_EXAMPLE)
@command
def ls(
    options: CommonOptions,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="One group; all if left out.")] = None,
) -> None:
    """List live sessions, per group in the order in which they are candidates for partitions."""
    if group is not None:
        found = options.group(group).members()
    else:
        with options.observer() as observer:
            observer.fold()
            found = [member for _, one in observer.groups() for member in overview.members(one)]
    if options.as_json:
        output.print_json(found)
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
@command
def step_down(options: changes.DryRunOptions, group: changes.GroupName, session: changes.SessionName) -> None:
    """Demote a session: it stays, but receives only partitions that nobody else can take."""
    target = options.group(group)
    number = changes.find_session(target, session)
    if options.showed_dry_run(group, lambda: target.impact(lambda context: impact.of_step_down(context, number))):
        return
    mark = target.step_down(number, options.reason)
    options.print_result(
        {"group": group, "session": number, "mark": mark}, f"session {number} of group {group!r} has stepped down"
    )


@command
def evict(options: changes.ChangeOptions, group: changes.GroupName, session: changes.SessionName) -> None:
    """End a session that is silent for twice its heartbeat interval, counted from now. Refused if it is alive.

    There is no --force: a consumer that only this machine cannot see must not lose its partitions.
    """
    target = options.group(group)
    number = changes.find_session(target, session)
    if not options.confirmed(
        group,
        lambda: target.impact(lambda context: impact.of_eviction(context, number)),
        f"Evict session {number} of group {group!r}?",
    ):
        return
    by = target.evict(number, reason=options.reason, watcher=options.watcher())
    options.print_result(
        {"group": group, "session": number, "ended_by": by},
        f"session {number} of group {group!r} has ended; it was evicted by {by}"
        if by
        else f"session {number} of group {group!r} has ended by itself",
    )
