"""The coordination log as Spark tables: the readers of format("marshal-log") and format("marshal-state").

One task per log reads it from its beginning in the order of its offsets, folds it with the library's own rationalizer
and yields the rows of history/timeline.py; there is no shuffle. `since` and `until` must limit only the rows, not the
fold. With `raw` nothing is folded, and any range can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from marshal_py.client.values.position_text import OFFSET, TIME, Point, parse
from marshal_py.errors import InvalidOption
from marshal_py.history.tables import TABLES, Row
from marshal_py.history.timeline import Timeline
from marshal_py.log.replay import beginning
from marshal_py.protocol.wire.identity import check_id, route
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark.log import columns
from marshal_py.spark.log.log_sources import root_of, source_of
from marshal_py.transport.ports import Bounds

STATE_TABLES: Final = tuple(name for name in TABLES if name != "records")
ROWS_HELD_MAX: Final = columns.BATCH_ROWS  # rows that a task collects before they go to the JVM
CHECK_EVERY: Final = 1_024  # offsets between two checks of how many rows are collected

_SOURCE: Final = frozenset({"path", "bootstrap.servers", "coordination_topic"})
_LOG: Final = _SOURCE | {"group", "since", "until", "raw", "ranges"}
_STATE: Final = _SOURCE | {"group", "since", "until", "table"}


class RowFilter:
    """Selects rows by the options `group`, `since` and `until`. Making it raises InvalidOption."""

    since: Point | None
    until: Point | None

    def __init__(self, options: Mapping[str, str]) -> None:
        self.group: str | None = options.get("group")
        if self.group is not None:
            check_id("group", self.group)
        self.since, self.until = (_bound(name, options.get(name)) for name in ("since", "until"))

    def ends_before(self, offset: int, time_ms: int) -> bool:
        return self.until is not None and self.until.number < (offset if self.until.kind == OFFSET else time_ms)

    def begins_after(self, offset: int, time_ms: int) -> bool:
        return self.since is not None and self.since.number > (offset if self.since.kind == OFFSET else time_ms)


def _bound(name: str, text: str | None) -> Point | None:
    if text is None:
        return None
    try:
        found = parse(text).rest
    except InvalidOption as error:
        raise InvalidOption(name, text, "an offset or an ISO-8601 time") from error
    if found is None or found.kind not in (OFFSET, TIME):
        raise InvalidOption(name, text, "an offset or an ISO-8601 time")
    return found


@dataclass
class LogSpan(InputPartition):
    """Names the part of a log that one task reads: the offsets [first, end)."""

    log: int
    first: int
    end: int
    root: Genesis | None = None


def check_options(options: Mapping[str, str], known: frozenset[str], format_name: str) -> None:
    for name in options:
        if name not in known and not name.startswith("kafka."):
            rule = f"format({format_name!r}) takes {', '.join(sorted(known))} and kafka.* for librdkafka's settings"
            raise InvalidOption(name, options[name], rule)


# --- marshal-log


def is_raw(options: Mapping[str, str]) -> bool:
    text = options.get("raw", "false").lower()
    if text not in ("true", "false"):
        raise InvalidOption("raw", options["raw"], "true or false")
    return text == "true"


def log_schema(options: Mapping[str, str]) -> StructType:
    check_options(options, _LOG, "marshal-log")
    return columns.spark_schema(columns.raw_fields() if is_raw(options) else columns.columns(("records",)))


def log_reader(options: Mapping[str, str]) -> DataSourceReader:
    if is_raw(options):
        return RawReader(options)
    if "ranges" in options:
        raise InvalidOption(
            "ranges",
            options["ranges"],
            "only with raw=true: a fold starts at the beginning of a log; since and until limit its rows",
        )
    return FoldReader(options, ("records",))


class RawReader(DataSourceReader):
    """Reads records as they are in the log, without a fold."""

    def __init__(self, options: Mapping[str, str]) -> None:
        for name in ("group", "since", "until"):
            if name in options:
                raise InvalidOption(name, options[name], "not together with raw=true: filter the DataFrame")
        self._source = source_of(options)
        self._ranges = _ranges(options.get("ranges"))

    def partitions(self) -> Sequence[InputPartition]:
        spans = self._source.spans() if self._ranges is None else self._ranges
        return [LogSpan(log, first, end) for log, (first, end) in sorted(spans.items()) if first < end]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, LogSpan):  # where a source plans no partitions, Spark makes one up
            yield from columns.raw_batches(self._source.read(partition.log, partition.first, partition.end))


def _ranges(text: str | None) -> dict[int, Bounds] | None:
    """Parses the option `ranges`, which is JSON like {"0": [first, end]}. Raises InvalidOption."""
    if text is None:
        return None
    try:
        return {int(log): Bounds(int(first), int(end)) for log, (first, end) in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidOption("ranges", text, 'JSON like {"0": [first, end]}') from error


# --- marshal-state


def state_schema(options: Mapping[str, str]) -> StructType:
    check_options(options, _STATE, "marshal-state")
    return columns.spark_schema(columns.columns(_tables_of(options)))


def state_reader(options: Mapping[str, str]) -> DataSourceReader:
    return FoldReader(options, _tables_of(options))


def _tables_of(options: Mapping[str, str]) -> tuple[str, ...]:
    name = options.get("table")
    if name is None:
        return STATE_TABLES
    if name not in STATE_TABLES:
        raise InvalidOption("table", name, f"one of {', '.join(STATE_TABLES)}; records are format('marshal-log')")
    return (name,)


class FoldReader(DataSourceReader):
    """Folds each log in a task of its own."""

    def __init__(self, options: Mapping[str, str], tables: Sequence[str]) -> None:
        self._source = source_of(options)
        self._tables = tuple(tables)
        self._filter = RowFilter(options)

    def partitions(self) -> Sequence[InputPartition]:
        root = root_of(self._source)
        if root is None:
            return []
        group = self._filter.group
        wanted = range(root.partitions) if group is None else [route(group, root.partitions)]
        spans = self._source.spans()
        return [LogSpan(log, *spans[log], root) for log in wanted if log in spans]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, LogSpan):
            return
        for rows in self._folded(partition):
            yield from columns.batches(rows, self._tables)

    def _folded(self, span: LogSpan) -> Iterator[Mapping[str, Sequence[Row]]]:
        assert span.root is not None  # `partitions` planned it
        row_filter = self._filter
        values = ((offset, value) for _, offset, _, _, value in self._source.read(span.log, span.first, span.end))
        timeline = Timeline(beginning(span.log, span.first, span.root, values).world(), self._tables)
        read, has_since, has_until = timeline.read, row_filter.since is not None, row_filter.until is not None
        for _, offset, time_ms, _, value in self._source.read(span.log, timeline.world.next_offset, span.end):
            if has_until and row_filter.ends_before(offset, time_ms):
                break
            read(offset, time_ms, value)
            if has_since and row_filter.begins_after(offset, time_ms):
                timeline.take()
            elif offset % CHECK_EVERY == 0 and timeline.pending >= ROWS_HELD_MAX:
                yield self._of_group(timeline.take())
        yield self._of_group(timeline.finish())

    def _of_group(self, rows: Mapping[str, Sequence[Row]]) -> Mapping[str, Sequence[Row]]:
        group = self._filter.group
        return (
            rows
            if group is None
            else {name: [row for row in found if row.group == group] for name, found in rows.items()}
        )
