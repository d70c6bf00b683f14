"""The tables that hold every message once, as tests see them: made in a folder, and read by somebody else.

`KINDS` has one function for each; what it makes has the table, and the rows that stand in it by an independent reader.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from marshal_py.spark import Database, Ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Rows = list[tuple[int, int]]  # partition, offset
SCHEMA = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.string())])
COLUMNS = ("partition", "offset", "CAST(value AS STRING) AS value")


class Target(NamedTuple):
    """One kind. `sink`: for foreachBatch, with a function that is called when the rows are written and do not count
    yet. `store`: what a Python service writes into an entry."""

    table: Any
    sink: Callable[[Callable[[], None]], Callable[[DataFrame, int], None]]
    store: Callable[[Any, Rows], None]
    rows: Callable[[], Rows]


def quietly() -> None:
    """Nobody looks on."""


def arrow(rows: Rows) -> pa.Table:
    return pa.table({"partition": [p for p, _ in rows], "offset": [o for _, o in rows], "value": ["x"] * len(rows)},
                    schema=SCHEMA)  # fmt: skip


def pairs(table: pa.Table) -> Rows:
    return sorted(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))


def ledger(folder: Path) -> Target:
    table = Ledger(folder / "ledger")

    def sink(written: Callable[[], None]) -> Callable[[DataFrame, int], None]:
        def handle(df: DataFrame, entry: Any) -> None:
            df.selectExpr(*COLUMNS).write.parquet(entry.folder("rows"))
            written()

        return table.sink(handle)

    def store(entry: Any, rows: Rows) -> None:
        into = Path(entry.folder("rows"))
        into.mkdir(parents=True)
        pq.write_table(arrow(rows), into / "0.parquet")

    def found() -> Rows:
        return sorted(row for into in Ledger(folder / "ledger").folders("rows")
                      for row in pairs(pq.ParquetDataset(into, partitioning=None).read()))  # fmt: skip

    return Target(table, sink, store, found)


def database(folder: Path) -> Target:
    path = folder / "rows.db"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=60)

    table = Database(connect)
    table.create()
    db = connect()
    db.execute("CREATE TABLE IF NOT EXISTS rows (partition INTEGER, \"offset\" INTEGER)")
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


KINDS = {"ledger": ledger, "database": database}
