"""`marshal members ls / step-down` and `marshal evict`: the sessions of a live group."""

from __future__ import annotations

from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from marshal_py.cli import frame, operate

LS_EXAMPLE: Final = frame.example("marshal members ls billing")
STEP_DOWN_EXAMPLE: Final = frame.example("marshal members step-down billing worker-1 --reason 'slow disk'")
EVICT_EXAMPLE: Final = frame.example("marshal evict billing 4711 --yes")

app = typer.Typer(help="Administer the consumers of a group.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", epilog=LS_EXAMPLE)
@frame.reports_errors
def ls(
    group: operate.Name,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """List live sessions, in the order in which they are candidates for partitions."""
    found = operate.open_group(group, bootstrap_servers, command_config, coordination_topic).members()
    if as_json:
        frame.print_json(found)
        return
    table = Table(box=None)
    for column in ("session", "client id", "member", "claims", "interval", "library", "stepped down"):
        table.add_column(column)
    for one in found:
        table.add_row(str(one["session"]), one["client_id"], one["member"] or "-", ", ".join(one["claims"]) or "-",
                      f"{one['interval_s']:g} s", one["library"], "yes" if one["stepped_down"] else "-")  # fmt: skip
    Console().print(table)


@app.command("step-down", epilog=STEP_DOWN_EXAMPLE)
@frame.reports_errors
def step_down(
    group: operate.Name,
    session: operate.Session,
    reason: operate.Reason = "",
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Make a session the last candidate for everything. It stays, and is never absent."""
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    number = operate.find_session(target, session)
    mark = target.step_down(number, reason)
    if as_json:
        frame.print_json({"group": group, "session": number, "mark": mark})
    else:
        print(f"session {number} of group {group!r} has stepped down")


@frame.reports_errors
def evict(
    group: operate.Name,
    session: operate.Session,
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
    operate.ask(f"Evict session {number} of group {group!r} if it stays silent?", yes)
    by = target.evict(number, watcher=operate.watcher(as_json))
    if as_json:
        frame.print_json({"group": group, "session": number, "ended_by": by})
    else:
        print(f"session {number} of group {group!r} has ended: {by}")
