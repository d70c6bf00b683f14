"""Folding any DataFrame of raw records with the library's own rationalizer, in parallel: batch and streaming.

Strategy: each log is one history, so a log never spans two tasks. Batch: the rows of a log go to one task, sorted by
offset, and are folded as they stream by. Streaming: one keyed state per log holds the world and what is open; records
that come early wait in it for those before them. In all of them the rows are those of a fold in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions

from marshal_py.errors import HistoryTruncated, InvalidOption, LogGap
from marshal_py.history.tables import TABLES
from marshal_py.history.timeline import Timeline
from marshal_py.protocol.records import Genesis
from marshal_py.protocol.world import World
from marshal_py.spark import columns
from marshal_py.spark.log import ROWS_HELD_MAX
from marshal_py.spark.origins import root_among

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NEEDED: Final = ("log", "offset", "time", "value")
TASKS_MAX: Final = 256  # a task costs Spark 50 ms before it does anything
ROOT_CANDIDATES_MAX: Final = 1_000  # records of log 0 that look like a Genesis and stand before the first valid one

Fold = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def replay(df: DataFrame, tables: Sequence[str] | None = None, *, root: Genesis | None = None,
           tasks: int | None = None) -> DataFrame:  # fmt: skip
    """Folds whole logs: `df` has the columns log, offset, time and value, in any order and any number of partitions.

    `tables`: those of history/tables.py; without it all of them. One gives a DataFrame with its columns, several one
    wide DataFrame with a column `table`. `root`: found in log 0 of `df` if it is not given. `tasks`: at most one per
    log is of use. Records that stand twice are folded once. Raises InvalidOption; a log with a hole, or without its
    beginning, fails the job with LogGap or HistoryTruncated.
    """
    wanted = checked_tables(tables)
    _check_columns(df)
    found = root or find_root(df)
    if found is None:
        raise InvalidOption("root", None, "log 0 of the DataFrame holds no Genesis: give the root, or all logs")
    if tasks is not None and tasks < 1:
        raise InvalidOption("tasks", tasks, "1 or more")
    count = min(tasks or found.partitions, found.partitions, TASKS_MAX)
    spread = df.select(*NEEDED).repartitionById(count, (functions.col("log") % count).cast("int"))
    schema = columns.spark_schema(columns.columns(wanted))
    return spread.sortWithinPartitions("log", "offset").mapInArrow(folding(found, wanted), schema)


def checked_tables(tables: Sequence[str] | None) -> tuple[str, ...]:
    """Raises InvalidOption."""
    wanted = tuple(TABLES if tables is None else tables)
    for name in wanted:
        if name not in TABLES:
            raise InvalidOption("tables", name, f"of {', '.join(TABLES)}")
    if not wanted or len(set(wanted)) != len(wanted):
        raise InvalidOption("tables", list(wanted), "at least one, each once")
    return wanted


def _check_columns(df: DataFrame) -> None:
    for name in NEEDED:
        if name not in df.columns:
            raise InvalidOption("df", df.columns, f"the columns {', '.join(NEEDED)} must be there; {name} is not")


def find_root(df: DataFrame) -> Genesis | None:
    """The Genesis that counts for all logs (L3), from the records of log 0 in `df`."""
    _check_columns(df)
    # PROTOCOL.md 4.1: an empty group id at byte 11, then record version and type 0. Only these few go to the driver.
    looks_so = (functions.substring("value", 12, 1) == b"\0") & (functions.substring("value", 14, 1) == b"\0")
    rows = df.where((functions.col("log") == 0) & looks_so).orderBy("offset").select("value")
    return root_among(bytes(row.value) for row in rows.limit(ROOT_CANDIDATES_MAX).collect())


def folding(root: Genesis, tables: Sequence[str]) -> Fold:
    """A function for mapInArrow over batches that are sorted by (log, offset)."""

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader: LogReader | None = None
        for log, offset, time_ms, value in _records(batches):
            if reader is None or log != reader.log:
                if reader is not None:
                    yield from columns.batches(reader.timeline.finish(), tables)
                reader = LogReader(log, root, tables)
            reader.read(offset, time_ms, value)
            if reader.timeline.pending >= ROWS_HELD_MAX:
                yield from columns.batches(reader.timeline.take(), tables)
        if reader is not None:
            yield from columns.batches(reader.timeline.finish(), tables)

    return fold


def _records(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, int, bytes | None]]:
    for batch in batches:
        logs, offsets, values = (batch.column(name).to_pylist() for name in ("log", "offset", "value"))
        yield from zip(logs, offsets, columns.moments_ms(batch.column("time")), values, strict=True)


class LogReader:
    """Folds the records of one log, which come sorted; a record may stand twice."""

    def __init__(self, log: int, root: Genesis, tables: Sequence[str]) -> None:
        self.log = log
        self.timeline = Timeline(World(log, None if log == 0 else root), tables)
        self._last: bytes | None = None

    def read(self, offset: int, time_ms: int, value: bytes | None) -> None:
        expected = self.timeline.world.next_offset
        if offset == expected - 1:
            if value != self._last:
                raise LogGap(self.log, expected, offset)  # two records at one offset: not one log
            return
        if offset > expected == 0:
            raise HistoryTruncated(self.log, offset)
        self.timeline.read(offset, time_ms, value)
        self._last = value
