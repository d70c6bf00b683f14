"""The tables of history/tables.py as Spark and Arrow columns: schemas, and rows as record batches. Must not fold.

A column has the name of its field; a time (`..._time_ms`, `time_ms`) becomes a timestamp and loses its `_ms`. Several
tables together are one wide table: its column `table` names a row's table, and columns that this table lacks are NULL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_type_hints

import pyarrow as pa
from pyspark.sql import types

from marshal_py.history.tables import TABLES, Row

BATCH_ROWS: Final = 20_000  # per batch that goes to the JVM: a few MB; larger ones are not faster
TIME_MS_MAX: Final = 253_402_300_799_999  # the year 9999, where Spark's calendar ends; a record's time may be anything

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
