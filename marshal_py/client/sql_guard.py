"""Gives each message its effect in a SQL database exactly once, with a guard table beside the effects.

The table has a row per group and partition (finished.py: Source), with the fencing token of the newest owner that has
asked, and the ranges of the offsets that have their effect. Two rules make repeated and late writes harmless: a token
that is older than the row's is refused (PROTOCOL.md K1), and an offset in the ranges has been applied already. Both
hold only because the row changes in the transaction of the effect. A newer owner whose messages all have their effect
raises the token too. Two groups have rows of their own: each gives every message its own effect.

Transactions of one partition wait for each other at its row. With an inbox they do not: it marks each message in a
second table, whose key lets one transaction in, and reads the row behind that. So a newer owner finds the mark of an
older one, or the older one finds the newer token. Marks below the position become ranges of the row, now and then. A
guard knows nothing of marks: a row that an inbox has taken has its ranges in `earlier` alone, and a guard refuses it.

The logic is a generator that yields statements and receives their results. `Guard` and `Inbox` run it over a connection
of sqlite3, psycopg or SQLAlchemy, `AsyncGuard` and `AsyncInbox` over one of aiosqlite, psycopg or SQLAlchemy's asyncio
extension, and spark/sinks/database.py over a DB-API cursor. This file never begins, commits or rolls back a
transaction, and imports no database module.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from marshal_py.client.messages.message import Message, position_of
from marshal_py.client.values.finished import Finished, Kept, Ranges, Source, Span, holds, spans_of_messages, union
from marshal_py.errors import InvalidOption, WriteFenced
from marshal_py.protocol.wire.identity import Token
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.transport.option_names import constructor_checks_names

DEFAULT_TABLE: Final = "applied"
PARAMETER: Final = re.compile(r":([a-z_]+)")  # in the text of a Statement
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")

# The highest range of finished offsets has columns of its own, because nearly every batch only lengthens it. `earlier`
# has the others, as str(Finished).
_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {table} (
    group_name VARCHAR(255), topic VARCHAR(255), partition INTEGER, topic_id VARCHAR(64), token VARCHAR(49) NOT NULL,
    start_offset BIGINT NOT NULL, next_offset BIGINT NOT NULL, earlier TEXT NOT NULL,
    PRIMARY KEY (group_name, topic, partition, topic_id))
"""
_ROW: Final = "group_name = :group_name AND topic = :topic AND partition = :partition AND topic_id = :topic_id"
# Changes one row if nothing is known of the source, or if the offsets follow the highest range and their owner is the
# newest; else none. It also locks the row until the transaction ends, so two owners wait for each other.
_ADVANCE: Final = """
INSERT INTO {table} (group_name, topic, partition, topic_id, token, start_offset, next_offset, earlier)
VALUES (:group_name, :topic, :partition, :topic_id, :token, :start_offset, :next_offset, '')
ON CONFLICT (group_name, topic, partition, topic_id) DO UPDATE SET
    token = excluded.token, next_offset = excluded.next_offset
WHERE {row}.token <= excluded.token AND {row}.next_offset = excluded.start_offset
"""
_LOOK: Final = "SELECT token, start_offset, next_offset, earlier FROM {table} WHERE " + _ROW
# Gives the row to this owner, who has an inbox, unless a later one has it. It also locks the row until the transaction
# ends.
_RAISE: Final = """
INSERT INTO {table} (group_name, topic, partition, topic_id, token, start_offset, next_offset, earlier)
VALUES (:group_name, :topic, :partition, :topic_id, :token, -1, -1, '')
ON CONFLICT (group_name, topic, partition, topic_id) DO UPDATE SET token = excluded.token
WHERE {row}.token <= excluded.token
"""
_MOVE: Final = (
    "UPDATE {table} SET token = :token, start_offset = :start_offset, next_offset = :next_offset, earlier = :earlier "
    "WHERE " + _ROW
)
_ALL: Final = (
    "SELECT partition, topic_id, token, start_offset, next_offset, earlier FROM {table} "
    "WHERE group_name = :group_name AND topic = :topic"
)

# A mark: the message before `next_offset` has its effect, and from `start_offset` on there is no other one before it.
_CREATE_MARKS: Final = """
CREATE TABLE IF NOT EXISTS {table}_marks (
    group_name VARCHAR(255), topic VARCHAR(255), partition INTEGER, topic_id VARCHAR(64), next_offset BIGINT,
    start_offset BIGINT NOT NULL, PRIMARY KEY (group_name, topic, partition, topic_id, next_offset))
"""
_MARK: Final = """
INSERT INTO {table}_marks (group_name, topic, partition, topic_id, next_offset, start_offset)
VALUES (:group_name, :topic, :partition, :topic_id, :next_offset, :start_offset) ON CONFLICT DO NOTHING
"""
_UNMARK: Final = "DELETE FROM {table}_marks WHERE " + _ROW + " AND next_offset = :next_offset"
_TAKE_MARKS: Final = (
    "DELETE FROM {table}_marks WHERE " + _ROW + " AND next_offset <= :position RETURNING start_offset, next_offset"
)
_MARKS: Final = (
    "SELECT partition, topic_id, start_offset, next_offset FROM {table}_marks "
    "WHERE group_name = :group_name AND topic = :topic"
)
MARKS_MAX: Final = 1_000  # of a partition, until those below its position become ranges: each time takes its row


class Applicable(Protocol):
    """Declares the attributes of a message that the guard needs; `marshal_py.Message` has them."""

    @property
    def group(self) -> str: ...
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
    """SQL with `:name` parameters and values. `rows`: the result's rows are wanted, else their number."""

    sql: str
    values: Mapping[str, object]
    rows: bool = False


S = TypeVar("S")
T = TypeVar("T")
Steps = Generator[Statement, Any, T]
Asking = Generator[Statement | Callable[[], Any], Any, T]  # calls too: what each returns may have to be awaited


@constructor_checks_names()
class Rules:
    """Builds the statements of one guard table, and decides from their results what is new. Pure."""

    _has_marks = False  # as an inbox has

    def __init__(self, table: str = DEFAULT_TABLE) -> None:
        """The table's name, perhaps `schema.table`. Raises InvalidOption for no plain SQL name."""
        if not isinstance(table, str) or not _NAME.fullmatch(table):
            raise InvalidOption("table", table, "a plain SQL name, as in `applied` or `billing.applied`")
        self.table = table
        self._names = {"table": table, "row": table.rpartition(".")[2]}

    def _statement(self, sql: str, values: Mapping[str, object], rows: bool = False) -> Statement:
        return Statement(sql.format(**self._names).strip(), values, rows)

    def creating(self) -> Steps[None]:
        yield self._statement(_CREATE, {})

    def kept(self, group: str, topic: str) -> Steps[dict[Source, Kept]]:
        """Returns what the table knows of a group's topics of this name."""
        rows = yield self._statement(_ALL, {"group_name": group, "topic": topic}, rows=True)
        found = {}
        for number, topic_id, *row in rows:
            source = Source(topic, number, topic_id)
            found[source] = _kept(group, *row)
            self._check_marks(group, source, row[1])
        return found

    def _check_marks(self, group: str, source: Source, start: int) -> None:
        """Raises InvalidOption if an inbox has taken the row, and this is none. `start`: the row's `start_offset`."""
        if start < 0 and not self._has_marks:
            rule = f"the table of a Guard: an Inbox of group {group!r} has marked messages of {source.tp} beside it, "
            rule += "which a Guard does not see; use Inbox or AsyncInbox in every process from now on"
            raise InvalidOption("table", self.table, rule)

    def rewinding(
        self, group: str, topic: str, partitions: Sequence[int] | None, to: int, topic_id: str | None
    ) -> Steps[list[Source]]:
        """Takes the offsets from `to` on out of the rows that are named, and returns their sources. Raises
        InvalidOption."""
        if type(to) is not int or to < 0:
            raise InvalidOption("to", to, "an offset, 0 or more")
        found = []
        for source, kept in sorted((yield from self.kept(group, topic)).items()):
            if partitions is None or source.partition in partitions:
                if topic_id in (None, source.topic_id):
                    yield self._move(group, source, kept.back_to(to))
                    found.append(source)
        return found

    def take(self, group: str, source: Source, span: Span, first: object = None) -> Steps[Ranges | WriteFenced]:
        """Adds one source's offsets to its row; returns the new ones, or the error that a later owner has written, and
        the row stays. `first`: a message of the span, if it has any. Raises OffsetsUnclear, InvalidOption."""
        start, to = span.ranges[0]
        key = _key(group, source)
        advance = {**key, "token": span.token, "start_offset": start, "next_offset": to}
        advanced = _is_changed((yield self._statement(_ADVANCE, advance)))
        if advanced and len(span.ranges) == 1:
            return span.ranges
        [row] = yield self._statement(_LOOK, key, rows=True)
        kept = _kept(group, *row)
        if kept.fences(span):
            return WriteFenced(self.table, str(source.tp), span.token, kept.token)
        self._check_marks(group, source, row[1])
        missing = kept.missing(self.table, source, span.ranges[advanced:])
        if missing or span.token > kept.token:
            position = position_of(first) if isinstance(first, Message) else OFFSET_MAX
            yield self._move(group, source, kept.after(span, position))
        return union((*span.ranges[:advanced], *missing))

    def _move(self, group: str, source: Source, kept: Kept) -> Statement:
        ranges, unclear = kept.finished
        highest = () if self._has_marks else ranges[-1:] or ((0, 0),)
        start, to = highest[0] if highest else (-1, -1)
        earlier = str(Finished(ranges[: len(ranges) - len(highest)], unclear))
        values = {"token": kept.token, "start_offset": start, "next_offset": to, "earlier": earlier}
        return self._statement(_MOVE, {**_key(group, source), **values})

    def _new(self, messages: M | Iterable[M]) -> Steps[list[M]]:
        """Yields the statements; returns new messages in order. Sources are sorted, as by every writer, so that none
        wait in a circle."""
        spans, given = spans_of_messages(messages)
        firsts = dict(reversed(given))
        missing = {of: self.take(span.group, of, span, firsts.get(of)) for of, span in sorted(spans.items())}
        return (yield from _not_applied(given, missing))


def _not_applied(
    given: Sequence[tuple[Source, M]], missing: Mapping[Source, Steps[Ranges | WriteFenced]]
) -> Steps[list[M]]:
    """Yields the statements of `missing`, source by source, and returns the messages that had no effect. A source whose
    owner is stale has none; if all are so, it raises."""
    new: dict[Source, Ranges] = {}
    fenced: list[WriteFenced] = []
    for source, steps in missing.items():
        found = yield from steps
        if isinstance(found, WriteFenced):
            fenced.append(found)
        else:
            new[source] = found
    if fenced and not new:
        raise fenced[0]
    return [one for source, one in given if holds(new.get(source, ()), one.offset)]


def _is_changed(count: int) -> bool:
    """Returns whether a statement has changed its row. Raises InvalidOption if the database module does not know."""
    if count < 0:
        rule = "one that knows how many rows a statement has changed, as soon as it is executed"
        raise InvalidOption("connection", f"a rowcount of {count}", rule)
    return count == 1


def _key(group: str, source: Source) -> dict[str, object]:
    return {"group_name": group, **source._asdict()}


def _kept(group: str, token: str, start: int, to: int, earlier: str) -> Kept:
    found = Finished.parse(earlier)
    return Kept(Finished(union((*found.ranges, (start, to))), found.unclear), token, group)


class InboxRules(Rules):
    """Builds the statements of one inbox. It counts the marks that it has made since it last took some away."""

    _has_marks = True

    def __init__(self, table: str = DEFAULT_TABLE) -> None:
        super().__init__(table)
        self._marked: Counter[Source] = Counter()

    def creating(self) -> Steps[None]:
        yield from super().creating()
        yield self._statement(_CREATE_MARKS, {})

    def kept(self, group: str, topic: str) -> Steps[dict[Source, Kept]]:
        # The marks first: whatever takes some away meanwhile leaves them in the row, and a source with marks has a row.
        rows = yield self._statement(_MARKS, {"group_name": group, "topic": topic}, rows=True)
        found = yield from super().kept(group, topic)
        marks: dict[Source, list[tuple[int, int]]] = {}
        for number, topic_id, start, to in rows:
            marks.setdefault(Source(topic, number, topic_id), []).append((start, to))
        for source, ranges in marks.items():
            found[source] = _with(found.get(source, Kept(group=group)), ranges)
        return found

    def rewinding(
        self, group: str, topic: str, partitions: Sequence[int] | None, to: int, topic_id: str | None
    ) -> Steps[list[Source]]:
        found = yield from super().rewinding(group, topic, partitions, to, topic_id)
        for source in found:  # the rows have them now
            yield self._statement(_TAKE_MARKS, {**_key(group, source), "position": OFFSET_MAX}, rows=True)
        return found

    def _new(self, messages: M | Iterable[M]) -> Steps[list[M]]:
        """Yields the statements that mark the messages; returns the new ones in the order given.

        It takes sources and offsets in sorted order, and the row of a source behind its marks, as every inbox does. So
        no two transactions wait for each other in a circle.
        """
        _, given = spans_of_messages(messages)
        of: dict[Source, list[M]] = {}
        for source, one in sorted(given, key=lambda pair: (pair[0], pair[1].offset)):
            of.setdefault(source, []).append(one)
        missing = {source: self._mark(source, some) for source, some in of.items()}
        return (yield from _not_applied(given, missing))

    def _mark(self, source: Source, some: Sequence[M]) -> Steps[Ranges | WriteFenced]:
        """Marks messages of one source, and returns the offsets of those that had no effect.

        If a later owner has written, the marks go again, and the error that says so is returned. Raises OffsetsUnclear.
        """
        span = Span((), max(str(one.token) for one in some), some[0].group)
        key = _key(span.group, source)
        marked: list[int] = []
        for one in some:
            [(start, to)] = spans_of_messages(one)[0][source].ranges
            if _is_changed((yield self._statement(_MARK, {**key, "start_offset": start, "next_offset": to}))):
                marked.append(to)
        rows = yield self._statement(_LOOK, key, rows=True)
        self._marked[source] += len(marked)
        takes = not rows or rows[0][0] < span.token or rows[0][1] >= 0 or self._marked[source] >= MARKS_MAX
        if takes:
            yield self._statement(_RAISE, {**key, "token": span.token})
            rows = yield self._statement(_LOOK, key, rows=True)  # another transaction may have had it meanwhile
        kept = _kept(span.group, *rows[0])
        if kept.fences(span):
            for to in marked:
                yield self._statement(_UNMARK, {**key, "next_offset": to})
            return WriteFenced(self.table, str(source.tp), span.token, kept.token)
        missing = kept.missing(self.table, source, union((to - 1, to) for to in marked))
        if takes:
            taken: Sequence[tuple[int, int]] = ()
            if isinstance(first := some[0], Message):
                self._marked[source] = 0
                taken = yield self._statement(_TAKE_MARKS, {**key, "position": position_of(first)}, rows=True)
            if taken or rows[0][1] >= 0:  # else the row stays as it is
                yield self._move(span.group, source, _with(kept, taken))
        return missing


def _with(kept: Kept, ranges: Iterable[tuple[int, int]]) -> Kept:
    return kept._replace(finished=kept.finished.add(union(ranges)))


class Guard(Rules):
    """Uses a guard table over connections of sqlite3 (SQLite 3.24+), psycopg (PostgreSQL) or SQLAlchemy.

    Every method works in the transaction that the connection is in, or that its first statement begins; the caller
    commits it together with the effect. Threads may share a guard.
    """

    def _run(self, connection: Any, steps: Steps[T], at_read_committed: bool = False) -> T:
        found = _Connection(connection, awaited=False)
        return run(found.run, found.checked(steps, at_read_committed))

    def create(self, connection: Any) -> None:
        """Creates the guard table unless it exists. The caller commits."""
        self._run(connection, self.creating())

    def new(self, connection: Any, messages: M | Iterable[M]) -> list[M]:
        """Returns those of `messages` that this consumer must apply, in their order: they have no effect in the
        database yet. Left out are messages that have one, and those of a partition that a later owner has.

        `messages`: one message, or several (a `Batch`, a `Part` or a list) of any partitions of one group, in any
        order. In the open transaction the guard rows take all of them, so they count as applied once it is committed.
        Apply each returned message, or store it elsewhere, in that transaction and commit; or roll back. Commit if none
        is returned, too: the rows may have new tokens, which refuse earlier owners. Then ack all messages that were
        given; the ack of one that a later owner has changes nothing, because it comes too late.

        Raises WriteFenced if later owners have all the partitions: roll back and do not ack. Raises OffsetsUnclear;
        InvalidOption for a guard whose table an inbox has used, for messages of two groups, for one that is given
        twice, for what is no message, for a connection that commits each statement by itself, for one of psycopg in
        pipeline mode, and for one of an unknown module. Errors of the database pass through.
        """
        return self._run(connection, self._new(messages), self._has_marks)

    def finished(self, connection: Any, group: str, topic: str) -> dict[Source, Ranges]:
        """Returns which offsets have their effect: ascending ranges [start, to) for each partition.

        A topic that was created again, or one of the same name on another cluster, has partitions of its own
        (`topic_id`).
        """
        found = self._run(connection, self.kept(group, topic))
        return {source: kept.finished.ranges for source, kept in found.items()}

    def rewind(
        self,
        connection: Any,
        group: str,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        to: int = 0,
        topic_id: str | None = None,
    ) -> list[Source]:
        """Makes the messages of a topic, or of some of its partitions, from offset `to` on count as new again.

        `topic_id`: of the topic whose messages are meant; None means all topics of this name. Returns the partitions of
        which the table has rows: none for a group or topic that it does not know. Undo the effects in the same
        transaction, and pause the group meanwhile. Raises InvalidOption for a `to` that is no offset.
        """
        return self._run(connection, self.rewinding(group, topic, partitions, to, topic_id), self._has_marks)


class AsyncGuard(Rules):
    """Does what `Guard` does, over connections of aiosqlite, psycopg (AsyncConnection) or SQLAlchemy (asyncio)."""

    async def _run(self, connection: Any, steps: Steps[T], at_read_committed: bool = False) -> T:
        found = _Connection(connection, awaited=True)
        asking = found.checked(steps, at_read_committed)
        try:
            step = next(asking)
            while True:
                step = asking.send(await found.run_async(step))
        except StopIteration as end:
            result: T = end.value
            return result

    async def create(self, connection: Any) -> None:
        """Does what `Guard.create` does."""
        await self._run(connection, self.creating())

    async def new(self, connection: Any, messages: M | Iterable[M]) -> list[M]:
        """Does what `Guard.new` does."""
        return await self._run(connection, self._new(messages), self._has_marks)

    async def finished(self, connection: Any, group: str, topic: str) -> dict[Source, Ranges]:
        """Does what `Guard.finished` does."""
        found = await self._run(connection, self.kept(group, topic))
        return {source: kept.finished.ranges for source, kept in found.items()}

    async def rewind(
        self,
        connection: Any,
        group: str,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        to: int = 0,
        topic_id: str | None = None,
    ) -> list[Source]:
        """Does what `Guard.rewind` does."""
        return await self._run(connection, self.rewinding(group, topic, partitions, to, topic_id), self._has_marks)


class Inbox(InboxRules, Guard):
    """Does what `Guard` does, for handlers in parallel: transactions of one partition do not wait for each other.

    It has the guard's table and a second one beside it, with a row for each message from the position on:
    `applied_marks`. SQLite must be 3.35 or newer. In PostgreSQL `new` and `rewind` need the isolation level READ
    COMMITTED, and raise InvalidOption at any other. Call `new` once per transaction. A group that has used a guard may
    go on with an inbox of the same table; from then on a guard refuses the partitions that the inbox had
    (InvalidOption).
    """


class AsyncInbox(InboxRules, AsyncGuard):
    """Does what `Inbox` does, over the connections of `AsyncGuard`."""


def run(execute: Callable[[S], Any], steps: Generator[S, Any, T]) -> T:
    """Returns what the generator returns; `execute` runs each of its steps."""
    try:
        step = next(steps)
        while True:
            step = steps.send(execute(step))
    except StopIteration as end:
        result: T = end.value
        return result


class _Connection:
    """Wraps a user's connection, and passes parameters in the form that its database module takes."""

    def __init__(self, connection: Any, *, awaited: bool) -> None:
        """`awaited`: whether the caller awaits what the connection returns, as AsyncGuard does and Guard does not."""
        self.module = _module_of(connection)
        if not self.module:
            rule = f"a connection of {', '.join(sorted(_FORMS))}; for others use the SQL of docs/acks.md"
            raise InvalidOption("connection", type(connection), rule)
        if _is_awaited(connection, self.module) is not awaited:
            used, other = "Guard or Inbox", "AsyncGuard or AsyncInbox"
            used, other = (other, used) if awaited else (used, other)
            rule = f"a connection that is {'' if awaited else 'not '}awaited, for {used}; for this one use {other}"
            raise InvalidOption("connection", type(connection), rule)
        self.connection = connection

    def checked(self, steps: Steps[T], at_read_committed: bool) -> Asking[T]:
        """Yields what finds out how the connection commits, and then the steps. Raises InvalidOption before those.

        `at_read_committed`: a statement of the steps must see what others have committed before it. At another level
        PostgreSQL shows an inbox what there was when the transaction began: a mark that has become a range since is in
        neither table. SQLite shows the last state to whoever writes.
        """
        driver, has_levels, commits = self.connection, self.module == "psycopg", False
        if self.module == "sqlalchemy":
            sync = yield from self._begun()
            driver, has_levels = sync.connection.driver_connection, sync.dialect.name == "postgresql"
            of_engine = sync.dialect._on_connect_isolation_level  # of create_engine
            level = sync.get_execution_options().get("isolation_level", of_engine)
            commits = str(level).upper() == "AUTOCOMMIT"
        if commits or (yield from _commits_itself(driver)):
            rule = "a connection in a transaction: the effect and the guard's rows must be committed together"
            raise InvalidOption("connection", type(self.connection), rule)
        if _module_of(driver) == "psycopg" and int(driver.pgconn.pipeline_status):
            rule = (
                "a connection outside of pipeline mode, in which no statement says at once how many rows it has changed"
            )
            raise InvalidOption("connection", type(self.connection), rule)
        if at_read_committed and has_levels:
            [[level]] = yield Statement("SHOW transaction_isolation", {}, rows=True)
            if level != "read committed":
                rule = "the isolation level READ COMMITTED, for an Inbox: at others it misses marks that became ranges"
                raise InvalidOption("connection", f"at {level.upper()}", rule)
        return (yield from steps)

    def _begun(self) -> Asking[Any]:
        """Returns the connection of SQLAlchemy that is not awaited, and has it begin, as its first statement would.
        A program may have the driver's transaction begin with it, by an event."""
        found = self.connection
        if hasattr(found, "get_bind"):  # a session
            found = yield found.connection
        elif not found.in_transaction():
            yield found.begin
        return getattr(found, "sync_connection", found)

    def _arguments(self, statement: Statement) -> tuple[Any, Mapping[str, object]]:
        return _FORMS[self.module](statement.sql), statement.values

    def _executing(self, statement: Statement) -> Any:
        """Returns the result, or what is awaited for it. `row_factory` of psycopg may be one that makes no tuples."""
        on = self.connection
        if self.module == "psycopg":
            from psycopg.rows import tuple_row

            on = on.cursor(row_factory=tuple_row)
        return on.execute(*self._arguments(statement))

    def run(self, step: Statement | Callable[[], Any]) -> Any:
        if not isinstance(step, Statement):
            return step()
        result = self._executing(step)
        return self._fetching(result) if step.rows else result.rowcount

    async def run_async(self, step: Statement | Callable[[], Any]) -> Any:
        if not isinstance(step, Statement):
            return await step()
        result = await self._executing(step)
        if not step.rows:
            return result.rowcount
        rows = self._fetching(result)
        return await rows if hasattr(rows, "__await__") else rows

    def _fetching(self, result: Any) -> Any:
        """Returns the rows, or what is awaited for them, as tuples."""
        if self.module in ("sqlite3", "aiosqlite"):
            result.row_factory = None
        return result.fetchall()


def _sqlalchemy_text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


_FORMS: Final[Mapping[str, Any]] = {
    "sqlite3": str,
    "aiosqlite": str,
    "psycopg": lambda sql: PARAMETER.sub(r"%(\1)s", sql),
    "sqlalchemy": _sqlalchemy_text,
}


def _module_of(connection: Any) -> str:
    """Returns the name of the database module, "" for one that is not in `_FORMS`."""
    modules = [kind.__module__.partition(".")[0] for kind in type(connection).__mro__]
    return next((name for name in modules if name in _FORMS), "")


def _is_awaited(connection: Any, module: str) -> bool:
    """Returns whether `execute` of the connection is awaited. That of aiosqlite returns an object of its own."""
    return module == "aiosqlite" or inspect.iscoroutinefunction(getattr(connection, "execute", None))


def _commits_itself(driver: Any) -> Asking[bool]:
    """Returns whether a driver's connection is in no transaction and would commit the next statement by itself. That of
    a module that is not known here does not."""
    match _module_of(driver):
        case "psycopg":
            return bool(driver.autocommit) and int(driver.info.transaction_status) == 0
        case "sqlite3":
            itself = getattr(driver, "autocommit", -1)
        case "aiosqlite":  # it has no `autocommit`, and that of its sqlite3 connection is read in its thread alone
            itself = yield partial(driver._execute, getattr, driver._conn, "autocommit", -1)
        case _:
            return False
    # sqlite3's own `autocommit` (Python 3.12) is True, False, or -1 for the older rule: `isolation_level` decides.
    by_level = itself not in (True, False) and driver.isolation_level is None
    return not driver.in_transaction and (itself is True or by_level)
