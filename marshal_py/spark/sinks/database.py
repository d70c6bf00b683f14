"""Writes rows into a database, each message once: the guard table changes in the same transaction as the effect.

    database = Database(lambda: psycopg.connect("dbname=shop"))

    def handle(rows, entry):
        entry.cursor.executemany("INSERT INTO orders VALUES (%s, %s)", [(row.id, row.cents) for row in rows.collect()])

    stream.writeStream.foreachBatch(database.sink(handle)).option("checkpointLocation", ...).start()

There is one transaction per batch, over one DB-API connection of the driver. It changes the guard table's row of each
partition, which locks it, runs the effect and commits. Two writers of one partition wait for each other. Spark's own
JDBC writer cannot do this: it commits once per task, over its own connections.

The guard table and its rules are those of `marshal_py.sql` (client/sql_guard.py), so a Python service of the same group
may use a `Guard` of that table beside a query.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pyspark.sql import DataFrame

from marshal_py.client.sql_guard import DEFAULT_TABLE, PARAMETER, Rules, Statement, run
from marshal_py.client.values.finished import Kept, Ranges, Source, Span
from marshal_py.errors import InvalidOption, WriteFenced
from marshal_py.spark.sinks import guards
from marshal_py.spark.sinks.guards import Sink

T = TypeVar("T")
_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class DatabaseEntry(guards.Entry):
    """Writes a batch in an open transaction. A statement belongs to it only if it runs on `cursor`."""

    name: str
    spans: Mapping[Source, Span]
    missing: Mapping[Source, Ranges]

    def __init__(self, database: Database, spans: Mapping[Source, Span]) -> None:
        self.name, self.spans = database.name, spans
        self._session = _Session(database)
        missing: dict[Source, Ranges] = {}
        self.missing = missing
        try:
            for source, span in sorted(spans.items()):  # all writers lock in this order
                found = run(self._session.run, database.rules.take(database.group_of(span), source, span))
                if isinstance(found, WriteFenced):
                    raise found
                missing[source] = found
        except BaseException:
            self._session.close()
            raise
        self.cursor: Any = self._session.cursor

    def commit(self) -> None:
        """Commits. If the database raises an error, nothing is written."""
        self._session.connection.commit()

    def close(self) -> None:
        self._session.close()


class Database:
    """Writes the effects of messages to a database, whose guard table says which messages have theirs."""

    connect: Callable[[], Any]
    guard: str
    name: str

    def __init__(self, connect: Callable[[], Any], guard: str = DEFAULT_TABLE, *, group: str = "") -> None:
        """Takes `connect`, which makes a DB-API connection that begins transactions by itself, as sqlite3's and
        psycopg's do. The database must know INSERT ... ON CONFLICT, as SQLite and PostgreSQL do.

        `guard` is the name of the guard table, which `create` creates. `group`: whose effects those of a batch read
        are; streams and services have a group.
        """
        self.connect, self.guard, self.name, self._group = connect, guard, guard, group
        self.rules: Rules = Rules(guard)

    def group_of(self, span: Span) -> str:
        """Returns the group whose effects a batch has. Raises InvalidOption for that of a batch read."""
        if span.group or self._group:
            return span.group or self._group
        rule = "the group whose effects these are, as Database(..., group=...): a batch read has none"
        raise InvalidOption("group", "", rule)

    def create(self) -> None:
        """Creates the guard table if it does not exist."""
        self._in_session(lambda session: run(session.run, self.rules.creating()))

    def known(self, spans: Mapping[Source, Span]) -> Mapping[Source, Kept]:
        """Returns what the guard table knows of these partitions."""
        names = {(self.group_of(span), source.topic) for source, span in spans.items()}
        found: dict[Source, Kept] = {}
        for group, topic in sorted(names):
            found |= self._kept(group, topic)
        return found

    def _kept(self, group: str, topic: str) -> dict[Source, Kept]:
        return self._in_session(lambda session: run(session.run, self.rules.kept(group, topic)))

    def finished(self, group: str, topic: str) -> dict[Source, Ranges]:
        """Returns which offsets have their effect: ascending ranges [start, to) for each partition."""
        return {source: kept.finished.ranges for source, kept in self._kept(group, topic).items()}

    def rewind(
        self,
        group: str,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        to: int = 0,
        topic_id: str | None = None,
        undo: Callable[[Any], object] = lambda cursor: None,
    ) -> list[Source]:
        """Makes the messages of a topic, or of some of its partitions, from offset `to` on count as new again.

        `undo(cursor)` takes their effects back, in the same transaction. `topic_id`: of the topic whose messages are
        meant; None means all topics of this name. Returns the partitions of which the table has rows. Pause the group
        meanwhile.
        """

        def rewound(session: _Session) -> list[Source]:
            found = run(session.run, self.rules.rewinding(group, topic, partitions, to, topic_id))
            undo(session.cursor)
            return found

        return self._in_session(rewound)

    def begin(self, spans: Mapping[Source, Span]) -> DatabaseEntry:
        """Begins a transaction for a batch that holds these spans. Other writers of its partitions wait until it ends.

        Raises WriteFenced, OffsetsUnclear.
        """
        return DatabaseEntry(self, spans)

    def sink(self, handle: Callable[[DataFrame, DatabaseEntry], object]) -> Sink[DatabaseEntry]:
        """Returns a function to be given to Spark's foreachBatch.

        `handle(rows, entry)` gets the rows that are not written yet and writes them with `entry.cursor`; it must not
        commit. Rows of partitions that a later owner has written meanwhile are left out (`Sink.last`).
        """
        return Sink(self, handle)

    def _in_session(self, work: Callable[[_Session], T]) -> T:
        session = _Session(self)
        try:
            found = work(session)
            session.connection.commit()
            return found
        finally:
            session.close()


class _Session:
    """One database connection, and runs the statements for the guard table."""

    def __init__(self, database: Database) -> None:
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
        self.cursor = self.connection.cursor()

    def run(self, statement: Statement) -> Any:
        names = PARAMETER.findall(statement.sql)
        self.cursor.execute(PARAMETER.sub(self._mark, statement.sql), [statement.values[name] for name in names])
        return self.cursor.fetchall() if statement.rows else self.cursor.rowcount

    def close(self) -> None:
        """Rolls back what was not committed (else sqlite3 stays locked while a statement is open) and closes."""
        self.connection.rollback()
        self.connection.close()
