"""`marshal lag`: how far a group is behind, and how long it takes to catch up."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from rich.table import Table

from marshal_py.admin.views import overview
from marshal_py.admin.views.looking import Looking
from marshal_py.admin.views.recreated_topics import find_recreated
from marshal_py.cli import output
from marshal_py.cli.options import CommonOptions, command, require_group
from marshal_py.history.consumption_rate import WINDOW_MS, ConsumptionRate
from marshal_py.protocol.wire.identity import NONE

RATE_RECORDS: Final = 16_384  # tell the speed well; a busy log may have many more in a minute
EXAMPLE: Final = output.example("marshal lag billing")


@command
def lag(options: CommonOptions, group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]) -> None:
    """Show the messages between each position and the end of its partition, and the total.

    Positions are those of the coordination log; kafka-consumer-groups shows copies that are some seconds older.
    The time is how long it takes to read these messages, without new ones, at the speed of the last minute, or of the
    newest 16,384 records if these are fewer; it is - if the position does not move, or nobody owns the partition. A lag
    of - is unknown: the topic is gone or was created again, the partition has no position yet, the position lies beyond
    the end, or records were lost.
    """
    with options.observer() as observer:
        rate, looking = ConsumptionRate(), Looking(observer)
        for judged in observer.read(group, since_ms=observer.as_of_ms - WINDOW_MS, records_max=RATE_RECORDS):
            record, verdict = judged
            looking.read(judged)
            if verdict.group == group:
                rate.read(observer.worlds[record.log].groups.get(group), verdict, record.timestamp_ms)
        log, state = next(((log, found) for log, found in observer.groups() if found.name == group), (NONE, None))
        require_group(observer, group)
        assert state is not None  # require_group has checked it
        ends = observer.ends(tp for tp in overview.partitions(state) if tp.partition >= 0)
        told = list(map(str, looking.causes(log, state, observer.as_of_ms, ends)))
    recreated = find_recreated(state, observer.topics)
    found = {**overview.lag(state, ends, rate, observer.as_of_ms, recreated), "notices": told}
    if options.as_json:
        output.print_json(found)
        return
    table = Table(box=None)
    for column in ("topic", "partition", "owner", "position", "end", "lag", "per second", "time", "parked"):
        table.add_column(column)
    for row in found["partitions"]:
        numbers = ["-" if row[name] is None else str(row[name]) for name in ("position", "end", "lag")]
        table.add_row(
            row["topic"],
            str(row["partition"]),
            row["owner"] or "-",
            *numbers,
            f"{row['per_second']:g}",
            _duration(row["time_s"]),
            row["parked"] or "-",
        )
    output.print_table(table)
    print(f"group {group}: {_total(found)}")
    for notice in found["notices"]:
        print(f"! {notice}")


def _total(found: dict[str, Any]) -> str:
    lag = "-" if found["lag"] is None else str(found["lag"])
    unknown = f" and what {found['unknown']} partitions have, which is not known" if found["unknown"] else ""
    parked = f", {found['parked']} partitions parked" if found["parked"] else ""
    speed, time_ = f"{found['per_second']:g} messages per second", _duration(found["time_s"])
    return f"lag {lag}{unknown}{parked}, {speed}, time {time_}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:g} s"
