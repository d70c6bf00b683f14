"""`marshal members ls / step-down / add / drop / map` and `marshal evict`: the consumers of a live group."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from marshal_py.admin.plans import impact
from marshal_py.admin.plans.membership import Edit, with_mappings, with_members, without_mappings, without_members
from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import MemberInfo
from marshal_py.cli import changes, output
from marshal_py.cli.options import CommonOptions, command

LS_EXAMPLE: Final = output.example("marshal members ls billing")
STEP_DOWN_EXAMPLE: Final = output.example("marshal members step-down billing worker-1 --reason 'slow disk' --yes")
ADD_EXAMPLE: Final = output.example("marshal members add billing m3 m4 --yes")
DROP_EXAMPLE: Final = output.example("marshal members drop billing m2 --yes")
MAP_SET_EXAMPLE: Final = output.example("marshal members map set billing m1=0,1,2 m2=3 --yes")
MAP_DELETE_EXAMPLE: Final = output.example("marshal members map delete billing --yes")
EVICT_EXAMPLE: Final = output.example("marshal evict billing 4711 --yes")

Names = Annotated[list[str], typer.Argument(metavar="MEMBER...", help="The names that consumers give as `member`.")]

app: Final = typer.Typer(help="Administer the consumers of a group.", no_args_is_help=True, rich_markup_mode=None)
map_app: Final = typer.Typer(help="Say which member has which partitions.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(map_app, name="map")


@app.command("ls", epilog=LS_EXAMPLE)
@command
def ls(
    options: CommonOptions,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="One group; all if left out.")] = None,
) -> None:
    """List live sessions, per group in the order in which they are candidates for partitions.

    A consumer without a heartbeat for two of its intervals, by this machine's clock, is silent: dead, or cut off.
    """
    if group is not None:
        found = options.group(group).members()
    else:
        with options.observer() as observer:
            observer.fold()
            found = tuple(
                member
                for log, one in observer.groups()
                for member in overview.members(one, observer.signs_of(log), observer.as_of_ms)
            )
    if options.as_json:
        output.print_json(found)
        return
    table = Table(box=None)
    for column in (
        "group",
        "session",
        "client id",
        "member",
        "claims",
        "interval",
        "last heartbeat",
        "library",
        "stepped down",
    ):
        table.add_column(column)
    for one in found:
        table.add_row(
            one.group,
            str(one.session),
            one.client_id,
            one.member or "-",
            ", ".join(one.claims) or "-",
            f"{one.interval_s:g} s",
            _last_heartbeat(one),
            one.library,
            "yes" if one.stepped_down else "-",
        )
    output.print_table(table)


def _last_heartbeat(member: MemberInfo) -> str:
    if member.last_sign_s is None:
        return "unknown"
    return output.ago(member.last_sign_s) + (", silent" if member.state == "stale" else "")


@app.command("step-down", epilog=STEP_DOWN_EXAMPLE)
@command
def step_down(options: changes.ChangeOptions, group: changes.GroupName, session: changes.SessionName) -> None:
    """Demote a session: it stays, but receives only partitions that nobody else can take."""
    target = options.group(group)
    number = changes.find_session(target, session)
    if not options.confirmed(
        group,
        lambda: target.impact(lambda context: impact.of_step_down(context, number)),
        f"Demote session {number} of group {group!r}?",
    ):
        return
    mark = target.step_down(number, options.reason)
    options.print_result(
        {"group": group, "session": number, "mark": mark}, f"session {number} of group {group!r} has stepped down"
    )


@app.command("add", epilog=ADD_EXAMPLE)
@command
def add(options: changes.ChangeOptions, group: changes.GroupName, names: Names) -> None:
    """Add members to a group with the policy members or blocks.

    Start a consumer of each new member first: from then on its partitions belong to it alone.
    """
    _change(options, group, with_members(names), f"Add {', '.join(names)}?", {"added": names})


@app.command("drop", epilog=DROP_EXAMPLE)
@command
def drop(options: changes.ChangeOptions, group: changes.GroupName, names: Names) -> None:
    """Drop members from a group with the policy members or blocks. Their consumers stay, without partitions."""
    _change(options, group, without_members(names), f"Drop {', '.join(names)}?", {"dropped": names})


@map_app.command("set", epilog=MAP_SET_EXAMPLE)
@command
def map_set(
    options: changes.ChangeOptions,
    group: changes.GroupName,
    given: Annotated[
        list[str], typer.Argument(metavar="MEMBER=PARTITIONS...", help="All of them, each partition once: m1=0,1 m2=2.")
    ],
) -> None:
    """Set which member has which partitions, in place of the list of members or the mappings that the group has."""
    mappings = changes.mappings(given)
    _change(options, group, with_mappings(mappings), f"Set {len(mappings)} mappings?", {"mappings": mappings})


@map_app.command("delete", epilog=MAP_DELETE_EXAMPLE)
@command
def map_delete(options: changes.ChangeOptions, group: changes.GroupName) -> None:
    """Delete the mappings. Nobody consumes until the group has members or mappings again."""
    _change(options, group, without_mappings, "Delete the mappings?", {"mappings": None})


def _change(options: changes.ChangeOptions, name: str, edit: Edit, question: str, result: dict[str, Any]) -> None:
    """Changes the members of the group `name`, after asking `question`, and prints `result`."""
    target = options.group(name)
    look = partial(target.impact, lambda context: impact.of_settings(context, edit, False))
    if not options.confirmed(name, look, question):
        return
    seen: list[str] = []
    offset = target.change_members(edit, options.reason, lambda event: seen.append(event.kind))
    changed = "changed" in seen
    done = f"the members of group {name!r} are changed"
    done = done if changed else f"nothing to change: the members of group {name!r} are as wanted already"
    options.print_result({"group": name, **result, "changed": changed, "offset": offset}, done)


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
