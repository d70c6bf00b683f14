"""The lag over time, for `marshal state GROUP --lag --since TIME`: a line per partition, or a row per moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from marshal_py.cli import output
from marshal_py.cli.documents import Time, time_of
from marshal_py.cli.options import ReadTableOptions
from marshal_py.cli.timeline import period_in, unknown_group
from marshal_py.history.lag import grows_since
from marshal_py.log.pictures import lag_over_time

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
        series = lag_over_time(observer, group, period_in(options, observer, group, since, None))
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
