"""Writes rows into a database, each message once: the guard table changes in the same transaction as the effect.

    database = Database(lambda: psycopg.connect("dbname=shop"))

    def handle(rows, entry):
        entry.cursor.executemany("INSERT INTO orders VALUES (%s, %s)", [(row.id, row.cents) for row in rows.collect()])

    stream.writeStream.foreachBatch(database.sink(handle)).option("checkpointLocation", ...).start()

There is one transaction per batch, over one DB-API connection of the driver. It locks the guard table's row of each
partition, reads it, runs the effect, updates the row and commits. Two writers of one partition wait for each other.
Spark's own JDBC writer cannot do this: it commits once per task, over its own connections.

The guard table is that of the README ("Writing once"), so a Python service can write beside a query, with `begin` or
its own SQL. Nothing here depends on a database's dialect: UPDATE, INSERT, SELECT, and the module's `paramstyle`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame

from marshal_py.client.sql_guard import CREATE, DEFAULT_TABLE
from marshal_py.errors import InvalidOption, LedgerMoved
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark import guards
from marshal_py.spark.guards import Position, Span, TopicIds

_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s"}
_WHERE: Final = "WHERE topic = ? AND partition = ?"


class DatabaseEntry(guards.Entry):
    """Writes a batch in an open transaction. A statement belongs to it only if it runs on `cursor`."""

    def __init__(self, database: Database, spans: Mapping[TopicPartition, Span]) -> None:
        self._session = _Session(database)
        try:
            super().__init__(database.guard, spans, self._session.lock(spans))
        except BaseException:
            self._session.close()
            raise
        self.cursor: Any = self._session.cursor

    def commit(self) -> None:
        """Updates the guard table and commits. If the database raises an error, nothing is written."""
        self._session.update(self.positions())
        self._session.connection.commit()

    def close(self) -> None:
        self._session.close()


class Database:
    """Writes the effects of messages to a database, whose guard table says how far each partition is written."""

    connect: Callable[[], Any]
    guard: str

    def __init__(self, connect: Callable[[], Any], guard: str = DEFAULT_TABLE) -> None:
        """Takes `connect`, which makes a DB-API connection that begins transactions by itself, as sqlite3's and
        psycopg's do.

        `guard` is the name of the guard table, which `create` creates.
        """
        self.connect, self.guard = connect, guard

    def create(self) -> None:
        """Creates the guard table if it does not exist."""
        session = _Session(self)
        try:
            session.cursor.execute(CREATE.format(table=self.guard))
            session.connection.commit()
        finally:
            session.close()

    def known(self, spans: Mapping[TopicPartition, Span]) -> Mapping[TopicPartition, Position]:
        """Returns how far these partitions are written, and under which fencing tokens."""
        session = _Session(self)
        try:
            return session.read(spans)
        finally:
            session.close()

    def begin(self, spans: Mapping[TopicPartition, Span]) -> DatabaseEntry:
        """Begins a transaction for a batch that holds these spans. Other writers of its partitions wait until it ends.

        Raises WriteFenced, LedgerMoved.
        """
        return DatabaseEntry(self, spans)

    def sink(
        self, handle: Callable[[DataFrame, DatabaseEntry], object], topics: TopicIds | None = None
    ) -> Callable[[DataFrame, int], None]:
        """Returns a function to be given to Spark's foreachBatch.

        `handle(rows, entry)` gets the rows that are not written yet and writes them with `entry.cursor`; it must not
        commit. Rows of partitions that a later owner has written meanwhile are left out and logged. With `topics`, a
        topic that was deleted and created again starts at offset 0. If `topics` is None, the first messages of the new
        topic are left out, as if they were written already.
        """
        return guards.sink_of(self.guard, self, handle, topics)


class _Session:
    """Holds one database connection, and runs the statements for the guard table."""

    def __init__(self, database: Database) -> None:
        self.guard = database.guard
        self.connection = database.connect()
        module = sys.modules[type(self.connection).__module__.partition(".")[0]]
        style = getattr(module, "paramstyle", "")
        # sqlite3 has isolation_level, too; its autocommit may be -1, which leaves it to that.
        autocommit = getattr(self.connection, "autocommit", False) is True
        if autocommit or (module.__name__ == "sqlite3" and self.connection.isolation_level is None):
            self.close()
            raise InvalidOption(
                "connect",
                self.connection,
                "a connection that does not commit by itself: the effect and the guard's rows must be one transaction",
            )
        if style not in _MARKS:
            self.close()
            raise InvalidOption(
                "connect",
                self.connection,
                f"a DB-API module with one of the paramstyles "
                f"{', '.join(_MARKS)}; that of {module.__name__} is {style!r}",
            )
        self._mark = _MARKS[style]
        self._duplicate: type[Exception] = module.IntegrityError
        self.cursor = self.connection.cursor()

    def _run(self, sql: str, *values: object) -> int:
        self.cursor.execute(sql.replace("?", self._mark), values)
        return int(self.cursor.rowcount)

    def lock(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, Position]:
        """Locks the row of each partition and returns the positions in them.

        All writers lock in the same order, so that no two wait for each other.
        """
        for tp in sorted(tps):
            if not self._run(f"UPDATE {self.guard} SET token = token {_WHERE}", *tp):
                columns = "topic, partition, topic_id, token, next_offset"
                try:
                    self._run(f"INSERT INTO {self.guard} ({columns}) VALUES (?, ?, '', '', 0)", *tp)
                except self._duplicate as error:
                    raise LedgerMoved(self.guard) from error  # another writer has just inserted it
        return self.read(tps)

    def read(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, Position]:
        found = {}
        for tp in tps:
            self._run(f"SELECT token, next_offset, topic_id FROM {self.guard} {_WHERE}", *tp)
            for token, to, topic_id in self.cursor.fetchall():
                if token:  # a row without one was inserted only to be locked
                    found[tp] = Position(Token.parse(token), to, topic_id)
        return found

    def update(self, positions: Mapping[TopicPartition, Position]) -> None:
        for tp, at in positions.items():
            self._run(
                f"UPDATE {self.guard} SET token = ?, next_offset = ?, topic_id = ? {_WHERE}",
                str(at.token),
                at.to,
                at.topic_id,
                *tp,
            )

    def close(self) -> None:
        """Rolls back what was not committed, and closes the connection.

        Without the roll-back, sqlite3 would stay locked as long as a statement is open.
        """
        self.connection.rollback()
        self.connection.close()
