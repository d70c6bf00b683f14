"""`marshal state`: who is in which group, who owns what, where everybody stands. Reads the log; joins nothing."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from marshal_py.cli import frame
from marshal_py.client.observer import Observer
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.records import MODE_NAMES
from marshal_py.protocol.world import Group

EXAMPLE: Final = frame.example("marshal state billing --json")
NOBODY: Final = "no consumer has ever run here"


@frame.reports_errors
def state(
    group: Annotated[str | None, typer.Argument(help="One group; all if left out.")] = None,
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Show groups: sessions, claims, positions, lag, pause, policy.

    A session is live until the log says that it has ended; this command comes and goes, and cannot wait anybody out.
    The age of its last sign of life is by the record's timestamp and this machine's clock.
    """
    with Observer(frame.open_door(bootstrap_servers, command_config), coordination_topic) as observer:
        observer.fold(group)
        groups = [_group(observer, log, found) for log, found in observer.groups() if group in (None, found.name)]
        if group is not None and not groups:
            raise frame.CommandFailed(f"group {group!r} is not in {coordination_topic}")
        incarnation = None if observer.root is None else observer.root.incarnation.hex()
    if as_json:
        frame.print_json({"coordination_topic": coordination_topic, "incarnation": incarnation, "groups": groups})
        return
    if incarnation is None:
        frame.say(NOBODY)
    console = Console()
    for found in groups:
        _print(console, found)


# --- as JSON's types


def _group(observer: Observer, log: int, group: Group) -> dict[str, Any]:
    counted = (TopicPartition(name, number) for name, topic in group.topics.items() for number in range(topic.count))
    tps = sorted({*group.partitions, *counted})
    ends = observer.ends(tp for tp in tps if tp.partition >= 0)
    return {
        "group": group.name,
        "log": log,
        "delivery": MODE_NAMES[group.mode],
        "policy": (group.config.policy if group.config is not None else "") or None,
        "deleted": group.deleted,
        "opaque_at": None if group.opaque_at == NONE else group.opaque_at,
        "pause": {"token": group.pause_change, "duration_s": group.pause_duration_ms / 1000} if group.paused else None,
        "sessions": _sessions(observer, log, group),
        "partitions": [_partition(group, tp, ends.get(tp)) for tp in tps],
    }


def _sessions(observer: Observer, log: int, group: Group) -> list[dict[str, Any]]:
    now_ms = time.time() * 1000
    return [
        {
            "session": session.id,
            "client_id": session.join.client_id,
            "member": session.join.member or None,
            "state": "live",
            "last_extended_s": _seconds_since(observer.extended_ms.get((log, session.id)), now_ms),
            "interval_s": session.join.interval_ms / 1000,
            "delivery": MODE_NAMES[session.join.mode],
            "topics": list(session.join.topics),
            "claims": session.held,
            "library": session.join.library,
        }
        for session in sorted(group.sessions.values(), key=lambda session: session.id)
    ]


def _seconds_since(then_ms: int | None, now_ms: float) -> float | None:
    """None for a sign of life that was deleted with the log's beginning: it is older than all that is left."""
    return None if then_ms is None else round(max(0.0, now_ms - then_ms) / 1000, 1)


def _partition(group: Group, tp: TopicPartition, end: int | None) -> dict[str, Any]:
    known = group.partitions.get(tp)
    owned = known is not None and known.owner != NONE
    position = known.position if known is not None and known.position != NONE else None
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "owner": group.sessions[known.owner].join.client_id if known is not None and owned else None,
        "session": known.owner if known is not None and owned else None,
        "epoch": known.epoch if known is not None and owned else None,
        "position": position,
        "generation": known.generation if known is not None else 0,
        "end": end,
        "lag": None if end is None or position is None else max(0, end - position),
    }


# --- for people


def _print(console: Console, found: dict[str, Any]) -> None:
    marks = [found["delivery"].replace("_", " ")]
    marks += [f"policy {found['policy']}"] if found["policy"] else []
    marks += [f"paused for {found['pause']['duration_s']:g} s"] if found["pause"] else []
    marks += ["deleted"] if found["deleted"] else []
    marks += [f"opaque from offset {found['opaque_at']} on"] if found["opaque_at"] is not None else []
    console.print(f"group {found['group']}  ({', '.join(marks)}; log {found['log']})", highlight=False, markup=False)
    sessions = _table("session", "client", "state", "last sign of life", "interval", "claims")
    for row in found["sessions"]:
        last_s = row["last_extended_s"]
        told = "before the log begins" if last_s is None else f"{last_s:g} s ago"
        sessions.add_row(str(row["session"]), row["client_id"], row["state"], told, f"{row['interval_s']:g} s",
                         str(row["claims"]))  # fmt: skip
    console.print(sessions if found["sessions"] else "  no live session", markup=False)
    partitions = _table("topic", "partition", "owner", "position", "end", "lag")
    for row in found["partitions"]:
        numbers = ("-" if row[name] is None else str(row[name]) for name in ("position", "end", "lag"))
        partitions.add_row(row["topic"], str(row["partition"]), row["owner"] or "-", *numbers)
    console.print(partitions)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=True)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
