"""The tables that hold every message once, for tests: created in a folder, and read by an independent reader.

`KINDS` has one function for each kind, which returns a Target.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from marshal_py.spark import Database, DeltaOutput, IcebergOutput
from marshal_py.spark.sinks.guards import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Rows = list[tuple[int, int]]  # partition, offset
SCHEMA = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.string())])
COLUMNS = ("partition", "offset", "CAST(value AS STRING) AS value")


class Target(NamedTuple):
    """A table of one kind.

    `sink`: makes a function for foreachBatch; the one given to it is called once rows are written and do not count yet.
    `store`: writes rows into an entry, as a Python service does. `rows`: the rows of the table.
    """

    table: Any
    sink: Callable[[Callable[[], None]], Callable[[DataFrame, int], None]]
    store: Callable[[Any, Rows], None]
    rows: Callable[[], Rows]


def quietly() -> None:
    """For `sink`, where a test does not watch it."""


def arrow(rows: Rows) -> pa.Table:
    return pa.table(
        {"partition": [p for p, _ in rows], "offset": [o for _, o in rows], "value": ["x"] * len(rows)}, schema=SCHEMA
    )


def pairs(table: pa.Table) -> Rows:
    return sorted(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))


def database(folder: Path) -> Target:
    path = folder / "rows.db"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=60)

    table = Database(connect)
    table.create()
    db = connect()
    db.execute('CREATE TABLE IF NOT EXISTS rows (partition INTEGER, "offset" INTEGER)')
    db.close()

    def store(entry: Any, rows: Iterable[tuple[int, int]]) -> None:
        entry.cursor.executemany("INSERT INTO rows VALUES (?, ?)", rows)

    def sink(written: Callable[[], None]) -> Callable[[DataFrame, int], None]:
        def handle(df: DataFrame, entry: Any) -> None:
            store(entry, [(row.partition, row.offset) for row in df.collect()])
            written()

        return table.sink(handle)

    def found() -> Rows:
        db = connect()
        try:
            return sorted(db.execute("SELECT * FROM rows"))
        finally:
            db.close()

    return Target(table, sink, store, found)


def delta(folder: Path) -> Target:
    from deltalake import DeltaTable

    path = str(folder / "delta")
    table = DeltaOutput(path)

    def found() -> Rows:
        there = table.table()
        return [] if there is None else pairs(DeltaTable(path).to_pyarrow_table())

    return Target(table, appending(table), lambda entry, rows: entry.append(arrow(rows)), found)


def iceberg(folder: Path) -> Target:
    from pyiceberg.catalog.sql import SqlCatalog

    def catalog() -> SqlCatalog:
        return SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/lake")

    if not catalog().namespace_exists("sales"):
        catalog().create_namespace("sales")
        catalog().create_table("sales.rows", SCHEMA)
    table = IcebergOutput(catalog(), "sales.rows")
    return Target(
        table,
        appending(table),
        lambda entry, rows: entry.append(arrow(rows)),
        lambda: pairs(catalog().load_table("sales.rows").scan().to_arrow()),
    )


def appending(table: Any) -> Callable[[Callable[[], None]], Callable[[DataFrame, int], None]]:
    """Makes a sink whose commit follows once `written` has returned."""

    def sink(written: Callable[[], None]) -> Callable[[DataFrame, int], None]:
        if written is quietly:
            return table.sink(lambda df: df.selectExpr(*COLUMNS))  # type: ignore[no-any-return]
        begin = table.begin

        class Watched:
            name = "watched"
            known = table.known

            def begin(self, spans: Any) -> Any:
                entry = begin(spans)
                commit = entry.commit

                def late() -> None:
                    written()
                    commit()

                entry.commit = late
                return entry

        return Sink(Watched(), lambda df, entry: entry.append(df.selectExpr(*COLUMNS)))

    return sink


KINDS = {"delta": delta, "iceberg": iceberg, "database": database}
