"""`marshal lag`: how far a group is behind, and how long it needs."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from marshal_py.admin import overview
from marshal_py.cli import frame
from marshal_py.client.observer import Observer
from marshal_py.history.velocity import Velocity

EXAMPLE: Final = frame.example("marshal lag billing")


@frame.reports_errors
def lag(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")],
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Show the messages between each position and the end of its partition, and in all.

    Positions are those of the coordination log; kafka-consumer-groups shows their copies, some seconds later. The time
    is what the lag takes at the speed of the last minute, without what is written meanwhile; - if nothing moves.
    """
    with Observer(frame.open_door(bootstrap_servers, command_config), coordination_topic) as observer:
        velocity = Velocity()
        for record, verdict in observer.read(group):
            if verdict.group == group:
                velocity.read(observer.worlds[record.log].groups.get(group), verdict, record.timestamp_ms)
        state = next((found for _, found in observer.groups() if found.name == group), None)
        if state is None:
            raise frame.CommandFailed(f"group {group!r} is not in {coordination_topic}")
        ends = observer.ends(tp for tp in overview.partitions(state) if tp.partition >= 0)
    found = overview.lag(state, ends, velocity, time.time_ns() // 1_000_000)
    if as_json:
        frame.print_json(found)
        return
    table = Table(box=None)
    for column in ("topic", "partition", "owner", "position", "end", "lag", "per second", "time"):
        table.add_column(column, overflow="fold")
    for row in found["partitions"]:
        numbers = ["-" if row[name] is None else str(row[name]) for name in ("position", "end", "lag")]
        table.add_row(row["topic"], str(row["partition"]), row["owner"] or "-", *numbers, f"{row['per_second']:g}",
                      _duration(row["time_s"]))  # fmt: skip
    Console().print(table)
    print(f"group {group}: {_total(found)}")


def _total(found: dict[str, Any]) -> str:
    return f"lag {found['lag']}, {found['per_second']:g} messages per second, time {_duration(found['time_s'])}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:g} s"
