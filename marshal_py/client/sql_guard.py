"""Gives each message its effect in a SQL database exactly once, with a guard table beside the effects.

The table has a row per partition, with the fencing token of the newest owner that has asked and the next offset. Two
rules make repeated and late writes harmless: a token that is older than the row's is refused (PROTOCOL.md K1), and an
offset below the row's next offset has been applied already. Both hold only because the row moves in the transaction of
the effect. A newer owner whose messages all have their effect raises the token too.

The logic is one generator that yields statements and receives their results; `Guard` runs it over a connection of
sqlite3, psycopg or SQLAlchemy, `AsyncGuard` over one of aiosqlite, psycopg or SQLAlchemy's asyncio extension. This file
never begins, commits or rolls back a transaction, and imports no database module.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from marshal_py.errors import InvalidOption, WriteFenced
from marshal_py.protocol.identity import Token, TopicPartition

DEFAULT_TABLE: Final = "applied"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")
_PARAMETER: Final = re.compile(r":([a-z_]+)")

CREATE: Final = """
CREATE TABLE IF NOT EXISTS {table} (
    topic VARCHAR(255), partition INTEGER, topic_id VARCHAR(64) NOT NULL DEFAULT '',
    token VARCHAR(49) NOT NULL, next_offset BIGINT NOT NULL, PRIMARY KEY (topic, partition))
"""
# Changes one row if all messages are new and their owner is the newest, else none. It also locks the row until the
# transaction ends, so two owners wait for each other. A topic with another id was recreated and begins again.
_ADVANCE: Final = """
INSERT INTO {table} (topic, partition, topic_id, token, next_offset)
VALUES (:topic, :partition, :topic_id, :token, :next_offset)
ON CONFLICT (topic, partition) DO UPDATE SET
    token = excluded.token, next_offset = excluded.next_offset,
    topic_id = CASE WHEN excluded.topic_id = '' THEN {row}.topic_id ELSE excluded.topic_id END
WHERE {row}.token <= excluded.token AND ({row}.next_offset <= :first_offset
    OR ({row}.topic_id <> '' AND excluded.topic_id <> '' AND {row}.topic_id <> excluded.topic_id))
"""
_LOOK: Final = "SELECT token, next_offset FROM {table} WHERE topic = :topic AND partition = :partition"
_MOVE: Final = """
UPDATE {table} SET token = :token, next_offset = :next_offset WHERE topic = :topic AND partition = :partition
"""
_RAISE: Final = "UPDATE {table} SET token = :token WHERE topic = :topic AND partition = :partition"
_FORGET: Final = "DELETE FROM {table} WHERE topic = :topic"


class Applicable(Protocol):
    """Declares the attributes of a message that the guard needs; `marshal_py.Message` has them."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def token(self) -> Token: ...
    @property
    def topic_id(self) -> str: ...


M = TypeVar("M", bound=Applicable)


class Statement(NamedTuple):
    """Holds SQL with `:name` parameters, and their values.

    `rows`: True if the result's rows are wanted, False if their number is.
    """

    sql: str
    values: Mapping[str, object]
    rows: bool = False


Steps = Generator[Statement, Any, list[M]]


class _Rules:
    """Builds the statements of one guard table, and decides from their results which messages are new. Pure."""

    def __init__(self, table: str = DEFAULT_TABLE) -> None:
        """Takes the table's name, `schema.table` if need be.

        Raises InvalidOption for a text that is no plain SQL name.
        """
        if not isinstance(table, str) or not _NAME.fullmatch(table):
            raise InvalidOption("table", table, "a plain SQL name, as in `applied` or `billing.applied`")
        self.table = table
        self._names = {"table": table, "row": table.rpartition(".")[2]}

    def _statement(self, sql: str, values: Mapping[str, object], rows: bool = False) -> Statement:
        return Statement(sql.format(**self._names).strip(), values, rows)

    def _create(self) -> Statement:
        return self._statement(CREATE, {})

    def _forget(self, topic: str, partitions: Sequence[int] | None) -> list[Statement]:
        if partitions is None:
            return [self._statement(_FORGET, {"topic": topic})]
        sql = _FORGET + " AND partition = :partition"
        return [self._statement(sql, {"topic": topic, "partition": number}) for number in sorted(set(partitions))]

    def _new(self, messages: M | Iterable[M]) -> Steps[M]:
        """Yields the statements that move the guard rows; returns the new messages in the order given.

        It takes the partitions in sorted order, as every writer does, so that no two writers wait for each other in a
        circle.
        """
        given: Any = (messages,) if hasattr(messages, "offset") else messages
        by_partition: dict[TopicPartition, list[M]] = {}
        order: dict[int, int] = {}
        for at, message in enumerate(given):
            order[id(message)] = at
            by_partition.setdefault(TopicPartition(message.topic, message.partition), []).append(message)
        found: list[M] = []
        for tp in sorted(by_partition):
            found += yield from self._new_of(tp, by_partition[tp])
        return sorted(found, key=lambda message: order[id(message)])

    def _new_of(self, tp: TopicPartition, messages: list[M]) -> Steps[M]:
        offsets = [message.offset for message in messages]
        if offsets != sorted(set(offsets)):
            rule = f"messages of {tp} in the order of their offsets: every offset below the highest counts as applied"
            raise InvalidOption("messages", offsets, rule)
        token = str(messages[-1].token)
        values = {
            "topic": tp.topic,
            "partition": tp.partition,
            "topic_id": messages[-1].topic_id,
            "token": token,
            "first_offset": offsets[0],
            "next_offset": offsets[-1] + 1,
        }
        if (yield self._statement(_ADVANCE, values)) == 1:
            return messages
        [(newest, next_offset)] = yield self._statement(_LOOK, _only(values, "topic", "partition"), rows=True)
        if newest > token:
            raise WriteFenced(self.table, str(tp), token, newest)
        new = [message for message in messages if message.offset >= next_offset]
        if new:
            yield self._statement(_MOVE, _only(values, "topic", "partition", "token", "next_offset"))
        elif newest < token:
            yield self._statement(_RAISE, _only(values, "topic", "partition", "token"))
        return new


class Guard(_Rules):
    """Uses a guard table over connections of sqlite3 (SQLite 3.24+), psycopg (PostgreSQL) or SQLAlchemy.

    Every method works in the transaction that the connection is in, or that its first statement begins; the caller
    commits it together with the effect. Threads may share a guard.
    """

    def create(self, connection: Any) -> None:
        """Creates the guard table unless it exists. The caller commits."""
        _Connection(connection).run(self._create())

    def new(self, connection: Any, messages: M | Iterable[M]) -> list[M]:
        """Returns those of `messages` that have no effect in the database yet, in their order; empty if all have one.

        `messages`: one message, or several (a `Batch`, a `Part` or a list) of any partitions. Those of one partition
        must be in the order of their offsets. The guard rows move past all of them in the open transaction, so they
        count as applied once it is committed. Apply each returned message, or store it elsewhere, in that transaction
        and commit; or roll back. Commit if none is returned, too: the rows may have new tokens, which refuse earlier
        owners.

        Raises WriteFenced if a later owner has asked about a partition: roll back and do not acknowledge, because that
        owner handles the messages. Raises InvalidOption for messages out of order, for a connection that commits each
        statement by itself, and for one of an unknown module. Errors of the database pass through.
        """
        run, steps = _Connection(connection).run, self._new(messages)
        try:
            statement = next(steps)
            while True:
                statement = steps.send(run(statement))
        except StopIteration as end:
            return list(end.value)

    def forget(self, connection: Any, topic: str, partitions: Sequence[int] | None = None) -> None:
        """Deletes the guard rows of a topic, or of some of its partitions, so that their messages count as new again.

        Call it if an admin has moved positions back so that messages are applied again. Pause the group meanwhile.
        """
        for statement in self._forget(topic, partitions):
            _Connection(connection).run(statement)


class AsyncGuard(_Rules):
    """Does what `Guard` does, over connections of aiosqlite, psycopg (AsyncConnection) or SQLAlchemy (asyncio)."""

    async def create(self, connection: Any) -> None:
        """Does what `Guard.create` does."""
        await _Connection(connection).run_async(self._create())

    async def new(self, connection: Any, messages: M | Iterable[M]) -> list[M]:
        """Does what `Guard.new` does."""
        run, steps = _Connection(connection).run_async, self._new(messages)
        try:
            statement = next(steps)
            while True:
                statement = steps.send(await run(statement))
        except StopIteration as end:
            return list(end.value)

    async def forget(self, connection: Any, topic: str, partitions: Sequence[int] | None = None) -> None:
        """Does what `Guard.forget` does."""
        for statement in self._forget(topic, partitions):
            await _Connection(connection).run_async(statement)


class _Connection:
    """Wraps a user's connection, and passes parameters in the form that its database module takes."""

    def __init__(self, connection: Any) -> None:
        modules = [kind.__module__.partition(".")[0] for kind in type(connection).__mro__]
        self.module = next((name for name in modules if name in _FORMS), "")
        if not self.module:
            rule = f"a connection of {', '.join(sorted(_FORMS))}; for others use the SQL of docs/transactions.md"
            raise InvalidOption("connection", type(connection), rule)
        if _commits_itself(connection, self.module):
            rule = "a connection in a transaction: the effect and the guard's rows must be committed together"
            raise InvalidOption("connection", type(connection), rule)
        self.connection = connection

    def _arguments(self, statement: Statement) -> tuple[Any, Mapping[str, object]]:
        return _FORMS[self.module](statement.sql), statement.values

    def run(self, statement: Statement) -> Any:
        result = self.connection.execute(*self._arguments(statement))
        return result.fetchall() if statement.rows else result.rowcount

    async def run_async(self, statement: Statement) -> Any:
        result = await self.connection.execute(*self._arguments(statement))
        if not statement.rows:
            return result.rowcount
        rows = result.fetchall()
        return await rows if hasattr(rows, "__await__") else rows


def _sqlalchemy_text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


_FORMS: Final[Mapping[str, Any]] = {
    "sqlite3": str,
    "aiosqlite": str,
    "psycopg": lambda sql: _PARAMETER.sub(r"%(\1)s", sql),
    "sqlalchemy": _sqlalchemy_text,
}


def _commits_itself(connection: Any, module: str) -> bool:
    """Tells whether the connection is in no transaction and would commit the next statement by itself."""
    match module:
        case "psycopg":
            return bool(connection.autocommit) and int(connection.info.transaction_status) == 0
        case "sqlalchemy":
            options: Mapping[str, object] = getattr(connection, "get_execution_options", dict)()
            return options.get("isolation_level") == "AUTOCOMMIT"
    if connection.in_transaction:
        return False
    # sqlite3's own `autocommit` (Python 3.12) is True, False, or -1 for the older rule: `isolation_level` decides.
    itself = getattr(connection, "autocommit", -1)
    return itself is True or (itself not in (True, False) and connection.isolation_level is None)


def _only(values: Mapping[str, object], *names: str) -> dict[str, object]:
    """Returns the values of these names alone, as psycopg and SQLAlchemy refuse values that a statement lacks."""
    return {name: values[name] for name in names}
