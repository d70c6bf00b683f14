"""`marshal state`: the sessions of each group, owners and positions of partitions, lag, settings. Joins no group.

With --lag --since it shows the lag over time: a line per partition, or a row per moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer
from msgspec import Struct, structs

from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import (
    GroupHealth,
    GroupInfo,
    GroupState,
    MemberInfo,
    PartitionHealth,
    PartitionState,
    PinInfo,
)
from marshal_py.cli import output
from marshal_py.cli.documents import Time, prints, time_of
from marshal_py.cli.options import ReadTableOptions, Since, command
from marshal_py.cli.timeline import period_in, unknown_group
from marshal_py.cli.watching import Every, show
from marshal_py.client.values.position_text import print_table
from marshal_py.history.lag import grows_since
from marshal_py.log.pictures import lag_over_time
from marshal_py.protocol.fold.policies import having, policy_named

WIDTH: Final = 48  # characters of a line
BLOCKS: Final = "▁▂▃▄▅▆▇█"
UNKNOWN: Final = "·"


class LagAt(Struct, frozen=True):
    """Position and lag of a partition at a time; null where it is unknown."""

    time: Time | None
    topic: str
    partition: int
    position: int | None
    lag: int | None


class LagHistory(Struct, frozen=True):
    """A group's lag at `times`. `total` leaves out what is unknown. `partitions`: all of them, time by time. `lag_of`:
    what the lag was computed from."""

    group: str
    times: list[Time | None]
    total: list[int | None]
    partitions: list[LagAt]
    lag_of: str


def print_history(options: ReadTableOptions, group: str, since: str) -> None:
    """Prints a group's lag since a time."""
    with options.observer() as observer:
        series = lag_over_time(observer, group, period_in(options, observer, since, None))
    if series is None:
        raise unknown_group(options, group, since)
    times, lags = [time_of(moment) for moment in series.moments], series.lags
    if not options.for_people:
        each = enumerate(times)
        rows = [LagAt(time, *tp, series.positions[tp][at], lags[tp][at]) for at, time in each for tp in lags]
        options.show(LagHistory(group, times, series.total, rows, series.lag_of), rows, LagAt.__struct_fields__)
        return
    lines = [(*tp, *_cells(of)) for tp, of in lags.items()]
    columns = ("topic", "partition", "lag", "first", "highest", "last")
    output.print_table(columns, [*lines, ("all", None, *_cells(series.total))])
    print(f"from {times[0]} to {times[-1]}; lag of {series.lag_of}")
    if (least := grows_since(series.total)) is not None:
        print(f"the lag of all has grown since {times[least]}")


def _cells(lags: Sequence[int | None]) -> tuple[object, ...]:
    return spark_line(lags), lags[0], max((lag for lag in lags if lag is not None), default=None), lags[-1]


def spark_line(values: Sequence[int | None], width: int = WIDTH) -> str:
    """Returns a row of blocks, at most `width`. Each stands for the highest value of its part; the tallest one for the
    highest of all; UNKNOWN where no value is known."""
    width = min(width, len(values))
    parts = [values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)]
    tops = [max((value for value in part if value is not None), default=None) for part in parts]
    most = max((top for top in tops if top is not None), default=0)
    return "".join(UNKNOWN if top is None else BLOCKS[-(-top * (len(BLOCKS) - 1) // max(1, most))] for top in tops)


EXAMPLE: Final = output.example("marshal state billing --json")
FIGURES: Final = ("group", "consumers", "owned", "free", "parked", "lag", "per second", "time", "oldest")
NESTED: Final = {"partitions", "findings", "notices", "causes", "advisories", "pause"}
GROUP_FIELDS: Final = (*(name for name in GroupHealth.__struct_fields__ if name not in NESTED), "found")
GROUP_COLUMNS: Final = (*FIGURES, "last progress", "found")


class Overview(Struct, frozen=True):
    """Groups. `incarnation`: of the coordination topic, in hex; null if no consumer has ever run."""

    coordination_topic: str
    incarnation: str | None
    groups: list[GroupState]


class GroupSettings(GroupInfo, frozen=True, kw_only=True):
    """A group, as GroupInfo says, and who is pinned; null if its policy pins nobody."""

    pin: PinInfo | None


@command
@prints(Overview, GroupHealth, list[GroupHealth], LagHistory, list[MemberInfo], GroupSettings)
def state(
    options: ReadTableOptions,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="One group; all if left out.")] = None,
    lag: Annotated[
        bool, typer.Option("--lag", help="How far the group is behind, and how long it takes to catch up.")
    ] = False,
    members: Annotated[
        bool, typer.Option("--members", help="The sessions, in the order in which they are candidates for partitions.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="The group's settings, and who has what by them: members, pin.")
    ] = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print topic,partition,offset for `marshal set-position --to` and kafka-consumer-groups."
        ),
    ] = False,
    watch: Every = None,
    since: Since = None,
) -> None:
    """Show groups: sessions, claims, positions, lag, pause, policy; or one of these in full.

    A session is fresh for one heartbeat interval after its last sign of life, then unknown, and stale after two: by the
    record's timestamp and this machine's clock, or as of the last sign of life in a dump. It owns its partitions until
    the log says that it has ended.

    With --lag, positions are those of the coordination log; kafka-consumer-groups shows copies that are some seconds
    older. The lag counts what Kafka still has. The time is how long it takes to read these messages, without new ones,
    at the speed of the last minute; it is - if the position does not move, or nobody owns the partition. With GROUP it
    says how the lag of all changes, too, by what was written in this minute. "oldest" is the age of the oldest message
    that waits, for a client that may read the topic. A lag of - is unknown: the topic is gone or was created again, the
    partition has no position yet, the position lies beyond the end, or records were lost. With --lag --since it shows
    the lag over time, also of a dump. --lag of all groups has a line for each; "last progress" is when a position last
    moved, - if not in the minute or more that was read.
    """
    chosen = [one for one, wanted in zip(_VIEWS, (lag, members, settings, as_csv), strict=True) if wanted]
    if len(chosen) > 1:
        raise typer.BadParameter(f"one of {', '.join(_VIEWS)}")
    if since is not None:
        if chosen != ["--lag"] or group is None:
            raise typer.BadParameter("--since goes with GROUP and --lag")
        show(options, watch, lambda: print_history(options, group, since))
    elif chosen:
        _check_view(chosen[0], group, options)
        show(options, watch, lambda: _VIEWS[chosen[0]](options, group or ""))
    else:
        show(options, watch, lambda: _groups(options, group))


def _groups(options: ReadTableOptions, group: str | None) -> None:
    with options.watch(group, "states") as watch:
        groups, observer = list(watch.states()), watch.observer
        assert observer is not None
        incarnation = None if observer.root is None else observer.root.incarnation.hex()
    if options.for_people:
        for one in groups:
            _print(one)
        return
    rows = [{"group": one.group, **structs.asdict(row)} for one in groups for row in one.partitions]
    options.show(Overview(observer.topic, incarnation, groups), rows, ("group", *PartitionState.__struct_fields__))


# --- for people


def _print(found: GroupState) -> None:
    marks = [found.delivery.replace("_", " ")]
    marks += [f"policy {found.policy}"] if found.policy else []
    marks += [overview.paused(found.pause)] if found.pause else []
    marks += ["deleted"] if found.deleted else []
    marks += [f"opaque from offset {found.opaque_at} on"] if found.opaque_at is not None else []
    print(f"group {found.group}  ({', '.join(marks)}; log {found.log})")
    if found.sessions:
        columns = ("session", "client", "state", "last sign of life", "interval", "claims", "witness")
        output.print_table(columns, map(_session_cells, found.sessions))
    else:
        print("  no live session")
    output.print_table(
        ("topic", "partition", "owner", "position", "end", "lag", "parked"),
        ((one.topic, one.partition, one.owner, one.position, one.end, one.lag, one.parked) for one in found.partitions),
    )
    for notice in found.notices:
        print(f"  ! {notice}")


def _session_cells(row: MemberInfo) -> list[object]:
    last = row.last_sign_s
    ago = "before the log's beginning" if last is None else f"{output.figure(last)} s ago"
    state = f"{row.state}, stepped down" if row.stepped_down else row.state
    return [row.session, row.client_id, state, ago, f"{row.interval_s:g} s", len(row.claims), row.witness]


# --- the views of one matter


def _check_view(name: str, group: str | None, options: ReadTableOptions) -> None:
    if options.dump is not None:
        raise typer.BadParameter(f"{name} asks the cluster: a dump has the state alone")
    if group is None and name not in ("--members", "--lag"):
        raise typer.BadParameter(f"{name} is of one group: name it")
    if name == "--csv" and options.as_json:
        raise typer.BadParameter("--csv or --json, not both")
    if name in ("--csv", "--settings") and options.format in ("csv", "wide"):
        raise typer.BadParameter(f"{name} has no rows for -o {options.format}")


def _lag(options: ReadTableOptions, group: str) -> None:
    with options.watch(group or None) as watch:
        if not group:
            options.show(
                list(watch.groups()), map(_group_row, watch.groups()), GROUP_FIELDS, GROUP_COLUMNS, _group_cells
            )
            return
        (found,) = watch.groups()
    columns = ("topic", "partition", "owner", "position", "end", "lag", "per second", "time", "oldest", "parked")
    if options.show(found, found.partitions, PartitionHealth.__struct_fields__, columns, _lag_cells):
        print(f"group {group}: {_total(found)}")
        for notice in found.notices:
            print(f"! {notice}")


def _group_row(one: GroupHealth) -> dict[str, Any]:
    """Returns a row of all groups: the figures, and what is wrong in one text."""
    said = ", ".join(dict.fromkeys(check.name for check in one.findings if check.level != "ok"))
    return {name: said or None if name == "found" else getattr(one, name) for name in GROUP_FIELDS}


def _group_cells(row: dict[str, Any]) -> list[object]:
    figures = [row[name] for name in ("group", "sessions", "owned", "free", "parked", "lag", "per_second")]
    times = (_duration(row[name]) for name in ("time_s", "oldest_s", "last_progress_s"))
    return [*figures, *times, row["found"]]


def _lag_cells(row: PartitionHealth) -> list[object]:
    place = [row.topic, row.partition, row.owner, row.position, row.end, row.lag]
    return [*place, output.figure(row.per_second), _duration(row.time_s), _duration(row.oldest_s), row.parked]


def _total(found: GroupHealth) -> str:
    lag = "unknown" if found.lag is None else str(found.lag)
    unknown = f" (without {found.unknown} partitions, whose lag is unknown)" if found.unknown else ""
    parked = f", {found.parked} partitions parked" if found.parked else ""
    speed, time_ = f"{output.figure(found.per_second)} messages per second", _duration(found.time_s)
    growth = "" if found.lag_per_second is None else f", changing by {found.lag_per_second:+.1f} per second"
    zero = f": 0 in {_duration(found.zero_s)}" if found.lag and found.zero_s is not None else ""
    return f"lag {lag}{unknown}{parked}{growth}{zero}, {speed}, time {time_}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else f"{output.figure(round(seconds, 1))} s"


def _members(options: ReadTableOptions, group: str) -> None:
    if group:
        found = options.group(group).members()
    else:
        with options.observer() as observer:
            observer.fold()
            observer.read_signs(observer.groups())
            found = tuple(
                member
                for log, one in observer.groups()
                for member in overview.members(one, observer.signs_of(log, one), observer.as_of_ms)
            )
    columns = ("group", "session", "client id", "member", "claims", "interval")
    more = ("last heartbeat", "library", "stepped down")
    options.show(found, found, MemberInfo.__struct_fields__, (*columns, *more), _member_cells)


def _member_cells(one: MemberInfo) -> list[object]:
    return [
        one.group,
        one.session,
        one.client_id,
        one.member,
        output.ranges(one.claims) or None,
        f"{one.interval_s:g} s",
        _last_heartbeat(one),
        one.library,
        "yes" if one.stepped_down else None,
    ]


def _last_heartbeat(member: MemberInfo) -> str:
    if member.last_sign_s is None:
        return "unknown"
    return output.ago(member.last_sign_s) + (", silent" if member.state == "stale" else "")


def _settings(options: ReadTableOptions, group: str) -> None:
    target = options.group(group)
    found = target.info()
    pin = target.pin_info() if policy_named(found.policy or "").pins else None
    if options.as_json:
        output.print_json(GroupSettings(**structs.asdict(found), pin=pin))
        return
    failover = f"{found.failover_s:g} s" if found.failover_s else "never"
    origin = found.settings_from
    rows = {
        "group": found.group,
        "delivery": found.delivery,
        "policy": found.policy,
        "max members": found.max_members,
        "priority timeout": None if found.priority_timeout_s is None else f"{found.priority_timeout_s:g} s",
        "failover": failover if found.policy in having("failover_s") else None,
        "lag weights": "yes" if found.lag_weighted else None,
        "priority group": ", ".join(one.name for one in found.priority_groups) or None,
        "on topic recreated": found.on_topic_recreated,
        "admin keys": ", ".join(found.admin_keys) or None,
        "settings from": f"offset {origin.offset}, by {origin.by or 'somebody'}" if origin else None,
        "pause": overview.paused(found.pause) if found.pause else None,
        "topics": ", ".join(f"{name} ({count} partitions)" for name, count in found.topics.items()),
    }
    for key, value in rows.items():
        print(f"{key}: {value or '-'}")
    if pin is not None:
        who = f"{pin.client_id}, session {pin.session}, id {pin.pinned_id}" if pin.pinned_id else "nobody"
        print(f"pinned: {who}; standbys: {', '.join(pin.standbys) or '-'}")
    for state in found.member_states:
        who = f"{state.client_id}, session {state.session}" if state.session is not None else "nobody is there"
        standbys = f"; standbys: {', '.join(state.standbys)}" if state.standbys else ""
        print(f"member {state.member}: {output.ranges(state.partitions) or '-'}; {who}{standbys}")
    if found.unassigned:
        print(f"no member has: {output.ranges(found.unassigned)}")
    for member in found.members:
        ranked = f", priority {member.priority}" if "priority" in policy_named(found.policy or "").options else ""
        ranked += f", min pending {member.min_pending}" if member.min_pending else ""
        ranked += f", min ack pending {member.min_ack_pending}" if member.min_ack_pending else ""
        print(f"consumer: {member.client_id}, session {member.session}{ranked}: {output.ranges(member.claims) or '-'}")
    for at in found.positions:
        parked = f" (parked: {at.parked})" if at.parked else ""
        position = at.position if at.position is not None else "-"
        print(f"position: {at.topic}:{at.partition} {position}{parked}")


def _csv(options: ReadTableOptions, group: str) -> None:
    print(print_table(options.group(group).positions()), end="")


_VIEWS: Final[dict[str, Callable[[ReadTableOptions, str], None]]] = {
    "--lag": _lag,
    "--members": _members,
    "--settings": _settings,
    "--csv": _csv,
}
