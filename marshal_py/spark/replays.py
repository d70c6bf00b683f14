"""Folding any DataFrame of raw records with the library's own rationalizer, in parallel. Streams: streams.py.

Strategy: each log is one history, so a log never spans two tasks. The records of a log go to one task, sorted by
offset, and are folded as they pass by. The rows are those of a fold in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions

from marshal_py.errors import InvalidOption, LogGap
from marshal_py.history.tables import TABLES
from marshal_py.history.timeline import Timeline
from marshal_py.protocol.codec import GENESIS, SNAPSHOT
from marshal_py.protocol.records import Genesis
from marshal_py.spark import columns
from marshal_py.spark.log_tables import LOOK_EVERY, ROWS_HELD_MAX
from marshal_py.spark.replay_starts import Beginning, Placed, beginning, root_among

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NEEDED: Final = ("log", "offset", "time", "value")
TASKS_MAX: Final = 256  # a task costs Spark 50 ms before it does anything
CANDIDATES_MAX: Final = 1_000  # records that look like a Genesis or a Snapshot; a log has a few

Fold = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def replay(
    df: DataFrame, tables: Sequence[str] | None = None, *, root: Genesis | None = None, tasks: int | None = None
) -> DataFrame:
    """Folds whole logs: `df` has the columns log, offset, time and value, in any order and any number of partitions.

    `tables`: those of history/tables.py; without it all of them. One gives a DataFrame with its columns, several one
    wide DataFrame with a column `table`. `root`: found in log 0 of `df` if it is not given. `tasks`: at most one per
    log is of use. Records that stand twice are folded once. Where a log's beginning is deleted, its oldest confirmed
    snapshot stands in. Raises InvalidOption, HistoryTruncated; a log with a hole fails the job with LogGap.
    """
    wanted = checked_tables(tables)
    check_columns(df)
    found = root or find_root(df)
    if found is None:
        raise InvalidOption("root", None, "log 0 of the DataFrame holds no Genesis: give the root, or all logs")
    begun = _beginnings(df, found)
    if tasks is not None and tasks < 1:
        raise InvalidOption("tasks", tasks, "1 or more")
    count = min(tasks or found.partitions, found.partitions, TASKS_MAX)
    # Partitions beyond the root's count belong to nobody (L3).
    known = df.select(*NEEDED).where(functions.col("log") < found.partitions)
    spread = known.repartitionById(count, (functions.col("log") % count).cast("int"))
    schema = columns.spark_schema(columns.columns(wanted))
    return spread.sortWithinPartitions("log", "offset").mapInArrow(folding(begun, wanted), schema)


def checked_tables(tables: Sequence[str] | None) -> tuple[str, ...]:
    """Raises InvalidOption."""
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
    """The Genesis that counts for all logs (L3), from the records of log 0 in `df`."""
    check_columns(df)
    of_log_0 = df.where(functions.col("log") == 0)
    first = of_log_0.agg(functions.min("offset")).collect()[0][0]
    return None if first is None else root_among(first, _unowned(of_log_0, GENESIS if first == 0 else SNAPSHOT))


def _unowned(df: DataFrame, kind: int) -> list[Placed]:
    """The records that look like a Genesis or a Snapshot, in order: only these few go to the driver."""
    # PROTOCOL.md 4.1: an empty group id at byte 11, then the record version, then the type.
    byte_11, byte_13 = (functions.substring("value", place, 1) for place in (12, 14))
    looks_so = (byte_11 == functions.lit(b"\0")) & (byte_13 == functions.lit(bytes([kind])))
    rows = df.where(looks_so).orderBy("offset").select("offset", "value")
    return [(row.offset, bytes(row.value)) for row in rows.limit(CANDIDATES_MAX).collect()]


def _beginnings(df: DataFrame, root: Genesis) -> dict[int, Beginning]:
    firsts = df.groupBy("log").agg(functions.min("offset").alias("first")).collect()
    found = {}
    for log, first in ((row["log"], row["first"]) for row in firsts if row["log"] < root.partitions):
        snapshots = _unowned(df.where(functions.col("log").eqNullSafe(log)), SNAPSHOT) if first > 0 else []
        found[log] = beginning(log, first, root, snapshots)
    return found


def folding(begun: Mapping[int, Beginning], tables: Sequence[str]) -> Fold:
    """A function for mapInArrow over batches that are sorted by (log, offset)."""

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader: LogReader | None = None
        for log, part in _stretches(batches):
            if reader is None or log != reader.log:
                if reader is not None:
                    yield from columns.batches(reader.timeline.finish(), tables)
                reader = LogReader(begun[log], tables)
            reader.read(part)
            if reader.timeline.pending >= ROWS_HELD_MAX:
                yield from columns.batches(reader.timeline.take(), tables)
        if reader is not None:
            yield from columns.batches(reader.timeline.finish(), tables)

    return fold


def _stretches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches cut where another log begins, and where more rows than wanted may come of one cut."""
    for batch in batches:
        runs = pc.run_end_encode(batch.column("log"))
        start = 0
        for log, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            for at in range(start, end, LOOK_EVERY):
                yield log, batch.slice(at, min(LOOK_EVERY, end - at))
            start = end


class LogReader:
    """Folds the records of one log, which come sorted; a record may stand twice."""

    def __init__(self, begun: Beginning, tables: Sequence[str]) -> None:
        self.log = begun.log
        self.timeline = Timeline(begun.world(), tables)
        self._first = self.timeline.world.next_offset
        self._last: bytes | None = None

    def read(self, batch: pa.RecordBatch) -> None:
        """The columns offset, time and value of the next records."""
        offsets, values = (batch.column(name).to_pylist() for name in ("offset", "value"))
        world, read, last = self.timeline.world, self.timeline.read, self._last
        for offset, time_ms, value in zip(offsets, columns.times_ms(batch.column("time")), values, strict=True):
            if offset >= world.next_offset:
                read(offset, time_ms, value)
                last = value
            # The snapshot stands for what is below it; else two different records at one offset are not one log.
            elif offset >= self._first and (offset < world.next_offset - 1 or value != last):
                raise LogGap(self.log, world.next_offset, offset)
        self._last = last
