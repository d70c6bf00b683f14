"""The coordination log as Spark tables: the readers of format("marshal-log") and format("marshal-state").

One task per log reads it from its beginning in the order of its offsets, folds it with the library's own rationalizer
and yields the rows of history/timeline.py; there is no shuffle. `since` and `until` must limit only the rows, not the
fold.

A column has the name of its field; a time (`..._time_ms`, `time_ms`) becomes a timestamp and loses its `_ms`. Several
tables together are one wide table: its column `table` names a row's table, and columns that this table lacks are NULL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from marshal_py.client.values.options import CONNECT_TIMEOUT_S, COORDINATION_TOPIC
from marshal_py.client.values.position_text import OFFSET, TIME, Point, parse
from marshal_py.errors import HistoryTruncated, InvalidOption, TopicRecreated
from marshal_py.history.tables import TABLES, Row
from marshal_py.history.timeline import Timeline
from marshal_py.log.reader import LogReader
from marshal_py.log.replay import beginning, root_among
from marshal_py.protocol.wire.identity import check_id, route
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark.stream.aliases import named_as_written
from marshal_py.spark.stream.messages import TIME_MS_MAX
from marshal_py.spark.stream.options import check_known, kafka_options
from marshal_py.transport.dump import Reader
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import Bounds, LogRecord

BATCH_ROWS: Final = 20_000  # per batch that goes to the JVM: a few MB; larger ones are not faster

WHICH: Final = "table"

_TIME: Final = pa.timestamp("us", tz="UTC")
_INT32: Final = frozenset({"log", "partition"})  # numbers of partitions, as Spark's other Kafka sources have them
_SPARK: Final = {
    pa.int32(): types.IntegerType(),
    pa.int64(): types.LongType(),
    pa.string(): types.StringType(),
    pa.bool_(): types.BooleanType(),
    pa.binary(): types.BinaryType(),
    _TIME: types.TimestampType(),
}


def _arrow_fields(row: type[Row]) -> dict[str, pa.DataType]:
    """Returns the type of each column by its name, in the order of the row's fields."""
    found: dict[str, pa.DataType] = {}
    for name, hint in get_type_hints(row).items():
        if name.endswith("time_ms"):
            found[name.removesuffix("_ms")] = _TIME
        elif bool in (hint, *getattr(hint, "__args__", ())):
            found[name] = pa.bool_()
        elif str in (hint, *getattr(hint, "__args__", ())):
            found[name] = pa.string()
        else:
            found[name] = pa.int32() if name in _INT32 else pa.int64()
    return found


_FIELDS: Final = {name: _arrow_fields(row) for name, row in TABLES.items()}


def columns(tables: Sequence[str]) -> dict[str, pa.DataType]:
    """Returns the type of each column by its name, for one table or for the wide table of several."""
    if len(tables) == 1:
        return _FIELDS[tables[0]]
    wide = {WHICH: pa.string()}
    for name in tables:
        wide |= {column: kind for column, kind in _FIELDS[name].items() if column not in wide}
    return wide


def arrow_schema(fields: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema(list(fields.items()))


def spark_schema(fields: Mapping[str, pa.DataType]) -> types.StructType:
    return types.StructType([types.StructField(name, _SPARK[kind]) for name, kind in fields.items()])


def batches(rows: Mapping[str, Sequence[Row]], tables: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields record batches with the columns of `tables`, one table after the other. `rows`: by table name."""
    fields = columns(tables)
    schema = arrow_schema(fields)
    for name in tables:
        found = rows.get(name, ())
        for start in range(0, len(found), BATCH_ROWS):
            part = found[start : start + BATCH_ROWS]
            own = dict(zip(_FIELDS[name], zip(*part, strict=True), strict=True))
            own[WHICH] = (name,) * len(part)
            arrays = [
                _array(own[column], kind) if column in own else pa.nulls(len(part), kind)
                for column, kind in fields.items()
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(cells: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind != _TIME:
        return pa.array(cells, kind)
    known = [cell if cell is not None and 0 <= cell <= TIME_MS_MAX else None for cell in cells]
    return pa.array(known, pa.timestamp("ms", tz="UTC")).cast(_TIME)


# --- Sources of coordination log records: a live topic and a dump file
#
# A source is a small picklable value. The planner asks it for the spans of the logs that have records (first offset
# and end, as of now), and a task reads one log from it, without gaps and in order. Must not fold, nor import Spark.
# Every method raises CoordinationError, ClusterUnreachable, FileUnusable, InvalidOption.


@dataclass
class TopicSource:
    """Reads a live coordination topic. `settings` are librdkafka's."""

    settings: Mapping[str, Any]
    topic: str
    topic_id: str = ""  # as `spans` has seen it first

    def _reader(self) -> LogReader:
        quiet = {"log_level": 0}  # errors say what librdkafka would print
        with named_as_written(self.settings):
            return LogReader(KafkaTransport({**quiet, **self.settings}, CONNECT_TIMEOUT_S), self.topic, "spark")

    def spans(self) -> dict[int, Bounds]:
        """Returns the spans. Raises TopicRecreated if the topic is not the one of the first call."""
        with closing(self._reader()) as reader:
            info = reader.admin.describe_topic(self.topic)
            topic_id = "" if info is None else info.topic_id
            if self.topic_id not in ("", topic_id):
                raise TopicRecreated(0, f"topic id {self.topic_id}", topic_id)
            self.topic_id = topic_id
            found = reader.bounds(range(reader.count))
        return {log: bounds for log, bounds in found.items() if bounds.first < bounds.end}

    def read(self, log: int, first: int, end: int) -> Iterator[LogRecord]:
        """Yields the records [first, end) of one log. Raises LogGap if one is missing, ClusterUnreachable after
        READ_TIMEOUT_S."""
        with closing(self._reader()) as reader:
            for record in reader.records({log: end}, {log: first}):
                if record.offset < end:
                    yield record


@dataclass
class DumpSource:
    """Reads a dump file; every task reads all of it, because each checksum depends on those before."""

    path: str

    def spans(self) -> dict[int, Bounds]:
        with Reader(Path(self.path)) as reader:
            return {span.log: Bounds(span.first, span.end) for span in reader.header.logs if span.first < span.end}

    def read(self, log: int, first: int, end: int) -> Iterator[LogRecord]:
        with Reader(Path(self.path)) as reader:
            for record in reader:
                if record.log == log and first <= record.offset < end:
                    yield record


def root_of(origin: TopicSource | DumpSource) -> Genesis | None:
    """Returns the Genesis for all logs (L3), None if nobody has written one. Raises HistoryTruncated if it is gone and
    no snapshot names it."""
    first, end = origin.spans().get(0, Bounds(0, 0))
    records = origin.read(0, first, end) if first < end else ()
    found = root_among(first, ((record.offset, record.value) for record in records))
    if found is None and first > 0:
        raise HistoryTruncated(0, first)
    return found


def source_of(options: Mapping[str, str]) -> TopicSource | DumpSource:
    """Returns the source that a format's options name: `path`, or `bootstrap.servers`, `kafka.*`, `coordination_topic`.
    Raises InvalidOption."""
    path, servers = options.get("path"), options.get("bootstrap.servers") or options.get("kafka.bootstrap.servers")
    if (path is None) == (servers is None):
        rule = "give bootstrap.servers (a live topic) or path (a dump), not both"
        raise InvalidOption("path", path, rule, given=path is not None)
    if path is not None:
        local = path.removeprefix("file://")
        if not Path(local).is_file():
            raise InvalidOption("path", path, "a file that `marshal log dump` wrote")
        return DumpSource(local)
    topic = options.get("coordination_topic", COORDINATION_TOPIC)
    return TopicSource(kafka_options(options), topic)


STATE_TABLES: Final = tuple(name for name in TABLES if name != "records")
ROWS_HELD_MAX: Final = BATCH_ROWS  # rows that a task collects before they go to the JVM
CHECK_EVERY: Final = 1_024  # offsets between two checks of how many rows are collected

_SOURCE: Final = frozenset({"path", "bootstrap.servers", "coordination_topic"})
_LOG: Final = _SOURCE | {"group", "since", "until"}
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
    """Raises InvalidOption for an option that the format does not have."""
    takes = f"{', '.join(sorted(known))} and kafka.* for librdkafka's settings"
    check_known(options, known, f"format({format_name!r}) takes {takes}")


# --- marshal-log


def log_schema(options: Mapping[str, str]) -> StructType:
    check_options(options, _LOG, "marshal-log")
    return spark_schema(columns(("records",)))


def log_reader(options: Mapping[str, str]) -> DataSourceReader:
    return FoldReader(options, ("records",))


# --- marshal-state


def state_schema(options: Mapping[str, str]) -> StructType:
    check_options(options, _STATE, "marshal-state")
    return spark_schema(columns(_tables_of(options)))


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
            yield from batches(rows, self._tables)

    def _folded(self, span: LogSpan) -> Iterator[Mapping[str, Sequence[Row]]]:
        assert span.root is not None  # `partitions` planned it
        row_filter = self._filter
        records = self._source.read(span.log, span.first, span.end)
        values = ((record.offset, record.value) for record in records)
        timeline = Timeline(beginning(span.log, span.first, span.root, values).world(), self._tables)
        read, has_since, has_until = timeline.read, row_filter.since is not None, row_filter.until is not None
        for _, offset, value, time_ms, _ in self._source.read(span.log, timeline.world.next_offset, span.end):
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
