"""`marshal state`: the sessions of each group, the owners and positions of partitions. Joins no group."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from rich.table import Table

from marshal_py.admin.views import overview
from marshal_py.admin.views.looking import Looking
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.cli import output
from marshal_py.cli.options import NOBODY, ReadOptions, command, require_group
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.world import Group

EXAMPLE: Final = output.example("marshal state billing --json")


@command
def state(
    options: ReadOptions, group: Annotated[str | None, typer.Argument(help="One group; all if left out.")] = None
) -> None:
    """Show groups: sessions, claims, positions, lag, pause, policy.

    A session is fresh for one heartbeat interval after its last sign of life, then unknown, and stale after two: by the
    record's timestamp and this machine's clock, or as of the last sign of life in a dump. It owns its partitions until
    the log says that it has ended.
    """
    with options.observer() as observer:
        looking = Looking(observer)
        for judged in observer.read(group):
            looking.read(judged)
        now_ms = observer.as_of_ms if options.dump is None else max(observer.extended_ms.values(), default=0)
        groups = [
            _state(observer, looking, log, found, now_ms, options.dump is None)
            for log, found in observer.groups()
            if group in (None, found.name)
        ]
        require_group(observer, group)
        incarnation = None if observer.root is None else observer.root.incarnation.hex()
    if incarnation is None:
        output.say(NOBODY)
    if options.as_json:
        output.print_json({"coordination_topic": observer.topic, "incarnation": incarnation, "groups": groups})
        return
    for one in groups:
        _print(one)


def _state(
    observer: Observer, looking: Looking, log: int, group: Group, now_ms: int, in_cluster: bool
) -> dict[str, Any]:
    ends = observer.ends(tp for tp in overview.partitions(group) if tp.partition >= 0)
    recreated = find_recreated(group, observer.topics)
    signs, pauses = observer.signs_of(log), looking.pause_history(log, group)
    plain = overview.state(group, log, signs, ends, now_ms, pauses, recreated)
    return {**plain, "notices": list(map(str, looking.causes(log, group, now_ms, ends, in_cluster)))}


# --- for people


def _print(found: dict[str, Any]) -> None:
    marks = [found["delivery"].replace("_", " ")]
    marks += [f"policy {found['policy']}"] if found["policy"] else []
    marks += [overview.paused(found["pause"])] if found["pause"] else []
    marks += ["deleted"] if found["deleted"] else []
    marks += [f"opaque from offset {found['opaque_at']} on"] if found["opaque_at"] is not None else []
    print(f"group {found['group']}  ({', '.join(marks)}; log {found['log']})")
    sessions = _table("session", "client", "state", "last sign of life", "interval", "claims", "witness")
    for row in found["sessions"]:
        sessions.add_row(
            str(row["session"]),
            row["client_id"],
            row["state"],
            _ago(row["last_extended_s"]),
            f"{row['interval_s']:g} s",
            str(row["claims"]),
            row["witness"] or "-",
        )
    if found["sessions"]:
        output.print_table(sessions)
    else:
        print("  no live session")
    partitions = _table("topic", "partition", "owner", "position", "end", "lag", "parked")
    for row in found["partitions"]:
        numbers = ("-" if row[name] is None else str(row[name]) for name in ("position", "end", "lag"))
        partitions.add_row(row["topic"], str(row["partition"]), row["owner"] or "-", *numbers, row["parked"] or "-")
    output.print_table(partitions)
    for notice in found["notices"]:
        print(f"  ! {notice}")


def _ago(seconds: float | None) -> str:
    return "before the log's beginning" if seconds is None else f"{seconds:g} s ago"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=True)
    for name in columns:
        table.add_column(name)
    return table
