"""Messages as rows: the columns, a selection of them, and messages as an Arrow batch. Must not read from Kafka.

A column that is not selected costs nothing: it is neither taken out of the message nor sent to the JVM. Loops over
messages run in C, by `map` over a method of their class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from marshal_py.errors import InvalidOption
from marshal_py.transport.ports import RawMessage


class Run(NamedTuple):
    """Messages of one partition in order, with what their piece (range_reader.py) says of all of them."""

    topic: str
    partition: int
    token: str
    messages: Sequence[RawMessage]
    source: str = ""


class Column(NamedTuple):
    """A column: Spark's simple type, Arrow's, and `take`, which makes it from several Runs, or `of_run` from one."""

    spark: str
    arrow: pa.DataType
    take: Callable[[Sequence[RawMessage]], pa.Array] | None = None
    of_run: Callable[[Run], pa.Array] | None = None


_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME_MS_MAX: Final = 253_402_300_799_999  # the year 9999, where Spark's calendar ends; a record's time may be anything

_TIME: Final = pa.timestamp("us", "UTC")
_second: Final = itemgetter(1)


def _each(method: str, messages: Sequence[RawMessage]) -> Iterator[Any]:
    """Yields the result of this method for each message. There must be at least one, and all must be of one class."""
    return map(getattr(type(messages[0]), method), messages)


def _headers(messages: Sequence[RawMessage]) -> pa.Array:
    if not any(_each("headers", messages)):
        return pa.nulls(len(messages), _HEADERS)
    return pa.array([_header_list(one) for one in _each("headers", messages)], _HEADERS)


def _header_list(headers: Any) -> list[dict[str, Any]] | None:
    return [{"key": name, "value": value} for name, value in headers] if headers else None


def _timestamps(messages: Sequence[RawMessage]) -> pa.Array:
    times_ms = np.fromiter(map(_second, _each("timestamp", messages)), np.int64, len(messages))
    if np.min(times_ms) > 0 and np.max(times_ms) <= TIME_MS_MAX:  # a message without a timestamp has 0, or -1
        return pa.array(times_ms * 1000, _TIME)
    pairs = np.fromiter(chain.from_iterable(_each("timestamp", messages)), np.int64, 2 * len(messages))
    kinds, times_ms = pairs[::2], pairs[1::2]
    return pa.array(times_ms * 1000, _TIME, mask=(kinds == 0) | (times_ms > TIME_MS_MAX))


def _offsets(run: Run) -> pa.Array:
    first, last = run.messages[0].offset() or 0, run.messages[-1].offset() or 0
    if last - first == len(run.messages) - 1:  # they are in order, so none is missing in between
        return pa.array(np.arange(first, last + 1))
    return pa.array(list(_each("offset", run.messages)), pa.int64())


def _constant(name: str, kind: pa.DataType) -> Callable[[Run], pa.Array]:
    """Returns a function that makes a column which has one value, a field of the Run, for the whole Run."""
    return lambda run: pa.repeat(pa.scalar(getattr(run, name), kind), len(run.messages))


_COLUMNS: Final[Mapping[str, Column]] = {
    "key": Column("binary", pa.binary(), lambda found: pa.array(list(_each("key", found)), pa.binary())),
    "value": Column("binary", pa.binary(), lambda found: pa.array(list(_each("value", found)), pa.binary())),
    "headers": Column("array<struct<key:string,value:binary>>", _HEADERS, _headers),
    "topic": Column("string", pa.string(), of_run=_constant("topic", pa.string())),
    "partition": Column("int", pa.int32(), of_run=_constant("partition", pa.int32())),
    "offset": Column("bigint", pa.int64(), of_run=_offsets),
    "timestamp": Column("timestamp", _TIME, _timestamps),
    "token": Column("string", pa.string(), of_run=_constant("token", pa.string())),
    "source": Column("string", pa.string(), of_run=_constant("source", pa.string())),
}
COLUMNS: Final = tuple(_COLUMNS)


def columns_of(text: str | None) -> tuple[str, ...]:
    """Returns the columns that the option names, in its order; all for None. Raises InvalidOption."""
    if text is None:
        return COLUMNS
    names = tuple(name.strip().lower() for name in text.split(","))
    if len(set(names)) < len(names) or not set(names) <= _COLUMNS.keys():
        raise InvalidOption("columns", text, f"some of {', '.join(COLUMNS)}, each once, a comma between them")
    return names


def spark_schema(columns: Sequence[str] = COLUMNS) -> str:
    """Returns the columns as a schema in Spark's DDL."""
    return ", ".join(f"{name} {_COLUMNS[name].spark}" for name in columns)


def check_schema(found: str, columns: Sequence[str]) -> None:
    """Raises InvalidOption unless the simple string `found` has exactly `columns`."""
    if found != f"struct<{','.join(f'{name}:{_COLUMNS[name].spark}' for name in columns)}>":
        raise InvalidOption(
            "schema",
            found,
            "leave .schema() out: rows are messages of Kafka, whose columns the option columns selects; parse `value` "
            "with from_json or from_avro",
        )


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    return pa.schema([(name, _COLUMNS[name].arrow) for name in columns])


def as_arrow(runs: Sequence[Run], columns: Sequence[str]) -> pa.RecordBatch:
    """Returns a batch with one row per message."""
    messages = runs[0].messages if len(runs) == 1 else [message for run in runs for message in run.messages]

    def array(column: Column) -> pa.Array:
        if column.take is not None:
            return column.take(messages)
        assert column.of_run is not None
        return pa.concat_arrays([column.of_run(run) for run in runs])

    return pa.RecordBatch.from_arrays([array(_COLUMNS[name]) for name in columns], schema=arrow_schema(columns))
