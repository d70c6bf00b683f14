"""Folds any DataFrame of raw records with the library's own rationalizer, in parallel.

Each log is one history, so a log must never span two tasks: its records go to one task, sorted by offset, which folds
them as they arrive. The rows are the same as those of a fold in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, functions

from marshal_py.errors import InvalidOption, LogGap
from marshal_py.history.tables import TABLES
from marshal_py.history.timeline import Timeline
from marshal_py.log.replay import Beginning, Placed, beginning, root_among
from marshal_py.protocol.wire.codec import GENESIS, SNAPSHOT
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark.log import columns
from marshal_py.spark.log.log_tables import CHECK_EVERY, ROWS_HELD_MAX

NEEDED: Final = ("log", "offset", "time", "value")
TASKS_MAX: Final = 256  # a task costs Spark 50 ms before it does anything
CANDIDATES_MAX: Final = 1_000  # records that look like a Genesis or a Snapshot; a log has a few

Fold = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def replay(
    df: DataFrame, tables: Sequence[str] | None = None, *, root: Genesis | None = None, tasks: int | None = None
) -> DataFrame:
    """Folds whole logs. `df` has the columns log, offset, time and value, in any order and any number of partitions.

    `tables` are names of history/tables.py, by default all. One table gives a DataFrame with its columns, several give
    one wide DataFrame with a column `table`. `root` is the Genesis that holds for all logs, by default the one found in
    log 0 of `df`. `tasks` is the number of tasks; more than one per log are of no use. A record that is there twice is
    folded once. If a log's beginning is deleted, the fold begins at its oldest confirmed snapshot. Raises
    InvalidOption, HistoryTruncated; a log with a hole fails the job with LogGap.
    """
    wanted = checked_tables(tables)
    check_columns(df)
    found = root or root_of(df)
    beginnings = beginnings_of(df, found)
    if tasks is not None and tasks < 1:
        raise InvalidOption("tasks", tasks, "1 or more")
    count = min(tasks or found.partitions, found.partitions, TASKS_MAX)
    # Partitions that were added to the topic later are not logs (L3).
    known = df.select(*NEEDED).where(functions.col("log") < found.partitions)
    spread = known.repartitionById(count, (functions.col("log") % count).cast("int"))
    schema = columns.spark_schema(columns.columns(wanted))
    return spread.sortWithinPartitions("log", "offset").mapInArrow(folding(beginnings, wanted), schema)


def checked_tables(tables: Sequence[str] | None) -> tuple[str, ...]:
    """Returns `tables`, or the names of all tables for None. Raises InvalidOption for unknown, repeated or no names."""
    wanted = tuple(TABLES if tables is None else tables)
    for name in wanted:
        if name not in TABLES:
            raise InvalidOption("tables", name, f"of {', '.join(TABLES)}")
    if not wanted or len(set(wanted)) != len(wanted):
        raise InvalidOption("tables", list(wanted), "at least one, each once")
    return wanted


def check_columns(df: DataFrame) -> None:
    for name in NEEDED:
        if name not in df.columns:
            raise InvalidOption("df", df.columns, f"the columns {', '.join(NEEDED)} must be there; {name} is not")


def find_root(df: DataFrame) -> Genesis | None:
    """Returns the Genesis that holds for all logs (L3), found in log 0 of `df`, or None if there is none."""
    check_columns(df)
    of_log_0 = df.where(functions.col("log") == 0)
    first = of_log_0.agg(functions.min("offset")).collect()[0][0]
    return None if first is None else root_among(first, _candidates(of_log_0, GENESIS if first == 0 else SNAPSHOT))


def root_of(df: DataFrame) -> Genesis:
    """Returns what `find_root` finds. Raises InvalidOption if that is nothing."""
    found = find_root(df)
    if found is None:
        rule = "log 0 of the DataFrame holds no Genesis: give the root, or all logs"
        raise InvalidOption("root", None, rule, given=False)
    return found


def _candidates(df: DataFrame, kind: int) -> list[Placed]:
    """Returns the records of log 0 that look like the record type `kind`, in order, at most CANDIDATES_MAX."""
    # PROTOCOL.md 4.1: an empty group id at byte 11, then the record version, then the type.
    byte_11, byte_13 = (functions.substring("value", place, 1) for place in (12, 14))
    looks_like = (byte_11 == functions.lit(b"\0")) & (byte_13 == functions.lit(bytes([kind])))
    rows = df.where(looks_like).orderBy("offset").select("offset", "value")
    return [(row.offset, bytes(row.value)) for row in rows.limit(CANDIDATES_MAX).collect()]


def beginnings_of(df: DataFrame, root: Genesis) -> dict[int, Beginning]:
    """Returns where the fold of each log begins."""
    firsts = df.groupBy("log").agg(functions.min("offset").alias("first")).collect()
    found = {}
    for log, first in ((row["log"], row["first"]) for row in firsts if row["log"] < root.partitions):
        snapshots = _candidates(df.where(functions.col("log").eqNullSafe(log)), SNAPSHOT) if first > 0 else []
        found[log] = beginning(log, first, root, snapshots)
    return found


def folding(beginnings: Mapping[int, Beginning], tables: Sequence[str]) -> Fold:
    """Returns a function for mapInArrow, which folds batches that are sorted by (log, offset) into rows of `tables`."""

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader: LogReader | None = None
        for log, part in _stretches(batches):
            if reader is None or log != reader.log:
                if reader is not None:
                    yield from columns.batches(reader.timeline.finish(), tables)
                reader = LogReader(beginnings[log], tables)
            reader.read(part)
            if reader.timeline.pending >= ROWS_HELD_MAX:
                yield from columns.batches(reader.timeline.take(), tables)
        if reader is not None:
            yield from columns.batches(reader.timeline.finish(), tables)

    return fold


def _stretches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields (log, part) for parts of the batches. It cuts where another log begins, and every CHECK_EVERY records."""
    for batch in batches:
        runs = pc.run_end_encode(batch.column("log"))
        start = 0
        for log, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            for at in range(start, end, CHECK_EVERY):
                yield log, batch.slice(at, min(CHECK_EVERY, end - at))
            start = end


class LogReader:
    """Folds the records of one log, which must come sorted. A record may come twice."""

    def __init__(self, beginning: Beginning, tables: Sequence[str]) -> None:
        self.log: int = beginning.log
        self.timeline: Timeline = Timeline(beginning.world(), tables)
        self._first = self.timeline.world.next_offset
        self._last: bytes | None = None

    def read(self, batch: pa.RecordBatch) -> None:
        """Folds the next records. The batch has the columns offset, time and value. Raises LogGap."""
        offsets, values = (batch.column(name).to_pylist() for name in ("offset", "value"))
        world, read, last = self.timeline.world, self.timeline.read, self._last
        for offset, time_ms, value in zip(offsets, columns.times_ms(batch.column("time")), values, strict=True):
            if offset >= world.next_offset:
                read(offset, time_ms, value)
                last = value
            # Below the snapshot nothing is folded. Elsewhere, different records at one offset are of different logs.
            elif offset >= self._first and (offset < world.next_offset - 1 or value != last):
                raise LogGap(self.log, world.next_offset, offset)
        self._last = last
