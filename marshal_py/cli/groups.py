"""`marshal groups ls / info / rm`: the groups of a coordination topic."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from marshal_py.admin import overview
from marshal_py.admin.targets import print_table
from marshal_py.cli import frame, operate
from marshal_py.cli.state import NOBODY
from marshal_py.client.observer import Observer

LS_EXAMPLE: Final = frame.example("marshal groups ls")
INFO_EXAMPLE: Final = frame.example("marshal groups info billing")
RM_EXAMPLE: Final = frame.example("marshal groups rm billing --yes")

app = typer.Typer(help="Administer groups.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls", epilog=LS_EXAMPLE)
@frame.reports_errors
def ls(
    deleted: Annotated[bool, typer.Option("--deleted", help="Also those that were deleted.")] = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """List the groups of all coordination partitions."""
    with Observer(frame.open_door(bootstrap_servers, command_config), coordination_topic) as observer:
        if observer.root is None:
            frame.say(NOBODY)
        observer.fold()
        found = [overview.summary(group) for _, group in observer.groups() if deleted or not group.deleted]
    if as_json:
        frame.print_json(found)
        return
    table = Table(box=None)
    for column in ("group", "delivery", "consumers", "owned", "partitions", "topics", "state"):
        table.add_column(column)
    for group in found:
        state = "deleted" if group["deleted"] else "paused" if group["paused"] else "running"
        table.add_row(group["group"], group["delivery"], str(group["sessions"]), str(group["owned"]),
                      str(group["partitions"]), ", ".join(group["topics"]), state)  # fmt: skip
    Console().print(table)


@app.command("info", epilog=INFO_EXAMPLE)
@frame.reports_errors
def info(
    group: operate.Name,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print topic,partition,offset for `marshal set-position --to` "
                                         "and kafka-consumer-groups.")] = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:  # fmt: skip
    """Show a group: topics, consumers, positions, pause."""
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    if as_csv:
        print(print_table(target.positions()), end="")
        return
    found = target.info()
    if as_json:
        frame.print_json(found)
        return
    for key in ("group", "delivery", "policy", "pause", "topics"):
        print(f"{key}: {found[key] if found[key] not in (None, {}) else '-'}")
    for member in found["members"]:
        print(f"consumer: {member['client_id']}, session {member['session']}: {', '.join(member['claims']) or '-'}")
    for at in found["positions"]:
        print(f"position: {at['topic']}:{at['partition']} {at['position'] if at['position'] is not None else '-'}")


@app.command("rm", epilog=RM_EXAMPLE)
@frame.reports_errors
def rm(
    group: operate.Name,
    yes: operate.Yes = False,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Delete a group and its positions. Refused while consumers live; those that died silently are waited out."""
    target = operate.open_group(group, bootstrap_servers, command_config, coordination_topic)
    operate.ask(f"Delete group {group!r} and all its positions?", yes)
    deleted = target.delete(watcher=operate.watcher(as_json))
    if as_json:
        frame.print_json({"group": group, "deleted": deleted})
    else:
        print(f"group {group!r} is deleted" if deleted else f"group {group!r} was deleted before")
