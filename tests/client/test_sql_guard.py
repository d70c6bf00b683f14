"""marshal_py.sql: each message's effect once, over every kind of connection that the guard takes.

PostgreSQL is that of tests/support/postgres.py. Owners, kills and late writers are seeded: the same schedule for every
database.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiosqlite
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from marshal_py.client.process.worker_processes import plain
from marshal_py.client.sql_guard import InboxRules
from marshal_py.embedded import Broker
from marshal_py.errors import InvalidOption, OffsetsUnclear, WriteFenced
from marshal_py.protocol.wire.identity import Token
from marshal_py.sql import AsyncGuard, AsyncInbox, Guard, Inbox
from marshal_py.testing import make_batch, make_message
from tests.support import transaction_kills

ACCOUNTS = "CREATE TABLE IF NOT EXISTS account (id VARCHAR(20) PRIMARY KEY, cents INTEGER NOT NULL)"
BOOK = """INSERT INTO account (id, cents) VALUES ('{0}', {1})
ON CONFLICT (id) DO UPDATE SET cents = account.cents + excluded.cents"""


class Payment(NamedTuple):
    group: str
    topic: str
    partition: int
    offset: int
    token: Token
    topic_id: str = ""
    account: str = "alice"
    cents: int = 1


def payment(
    offset: int, epoch: int = 1, partition: int = 0, topic_id: str = "", group: str = "shop", **more: Any
) -> Payment:
    return Payment(group, "payments", partition, offset, Token(b"i" * 16, epoch), topic_id, **more)


# --- databases: each opens connections in which a transaction begins by itself, and ends with the context


class Database:
    def __init__(self, kind: str, url: str, guard: Guard) -> None:
        self.kind, self.url, self.guard = kind, url, guard
        self.engine = (
            sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool) if kind.startswith("sqlalchemy") else None
        )

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        if self.engine is not None:
            with self.engine.begin() as connection:
                yield connection
        elif self.kind == "psycopg":
            with psycopg.connect(self.url) as connection:
                yield connection
        else:
            connection = sqlite3.connect(self.url, timeout=30)
            try:
                with connection:
                    yield connection
            finally:
                connection.close()

    def run(self, connection: Any, sql: str) -> Any:
        return connection.execute(sqlalchemy.text(sql) if self.engine is not None else sql)


def url_of(kind: str, tmp_path: Path, postgres: str) -> str:
    match kind:
        case "sqlite3":
            return str(tmp_path / "a.db")
        case "psycopg":
            return postgres
        case "sqlalchemy-sqlite":
            return f"sqlite:///{tmp_path / 'a.db'}"
    return postgres.replace("postgresql://", "postgresql+psycopg://")


def made(kind: str, tmp_path: Path, postgres: str, guard: Guard) -> Database:
    found = Database(kind, url_of(kind, tmp_path, postgres), guard)
    with found.transaction() as connection:
        for table in ("account", "applied", "applied_marks"):
            found.run(connection, f"DROP TABLE IF EXISTS {table}")
        found.run(connection, ACCOUNTS)
        guard.create(connection)
        guard.create(connection)  # twice is once
    return found


KINDS = ("sqlite3", "psycopg", "sqlalchemy-sqlite", "sqlalchemy-psycopg")


# SQLAlchemy passes on what the drivers do, so `make test` has it with the inbox alone.
BOTH = [
    pytest.param((kind, guard), marks=[pytest.mark.proof] if kind.startswith("sqlalchemy") else [])
    for guard in (Guard, Inbox)
    for kind in KINDS
]


@pytest.fixture(params=BOTH, ids=lambda given: f"{given[0]}-{given[1].__name__}")
def database(request: pytest.FixtureRequest, tmp_path: Path, postgres: str) -> Database:
    kind, guard = request.param
    return made(kind, tmp_path, postgres, guard())


@pytest.fixture(params=KINDS)
def inbox(request: pytest.FixtureRequest, tmp_path: Path, postgres: str) -> Database:
    return made(request.param, tmp_path, postgres, Inbox())


def apply(database: Database, *payments: Payment) -> list[int]:
    """In one transaction; the offsets that were new."""
    with database.transaction() as connection:
        new = database.guard.new(connection, payments)
        for one in new:
            database.run(connection, BOOK.format(one.account, one.cents))
        return [one.offset for one in new]


def balances(database: Database) -> dict[str, int]:
    with database.transaction() as connection:
        return {name: cents for name, cents in database.run(connection, "SELECT id, cents FROM account").fetchall()}


# --- what the guard says


def test_a_message_is_new_once(database: Database) -> None:
    """Under the same token, and under the next owner's."""
    assert apply(database, payment(7)) == [7]
    assert apply(database, payment(7)) == []
    assert apply(database, payment(7, epoch=2)) == []
    assert balances(database) == {"alice": 1}


def test_of_a_batch_only_what_is_missing_is_new(database: Database) -> None:
    assert apply(database, payment(0), payment(1)) == [0, 1]
    assert apply(database, *[payment(offset, epoch=2) for offset in range(4)]) == [2, 3]
    assert apply(database, payment(9, epoch=2), payment(0, partition=1, epoch=2)) == [9, 0], "holes are no messages"
    assert balances(database) == {"alice": 6}


def test_a_later_owner_fences_an_earlier_one(database: Database) -> None:
    """K1, S4: also for a message that nobody has applied; the transaction leaves no trace."""
    apply(database, payment(7, epoch=11))
    apply(database, payment(0, epoch=11, partition=2))
    with pytest.raises(WriteFenced, match="drop the batch"):
        apply(database, payment(8, epoch=10), payment(1, epoch=10, partition=2))
    assert balances(database) == {"alice": 2}
    assert apply(database, payment(8, epoch=11), payment(0, partition=1, epoch=1)) == [8, 0], "it holds per partition"


def test_what_a_later_owner_has_is_left_out_of_a_batch(database: Database) -> None:
    """Finding 27: the partition that is still owned is applied, and the whole batch can be acked."""
    apply(database, payment(7, epoch=11))
    assert apply(database, payment(8, epoch=10), payment(0, partition=1, epoch=10)) == [0]
    assert apply(database, payment(0, partition=1, epoch=10), payment(8, epoch=11)) == [8]


def test_a_batch_that_comes_back_after_the_next_one_is_new(database: Database) -> None:
    """Finding 20: it failed once, was given back, and the next one was applied meanwhile."""
    assert apply(database, *map(payment, range(10, 20))) == [*range(10, 20)]
    assert apply(database, *map(payment, range(30, 40))) == [*range(30, 40)]
    assert apply(database, *map(payment, range(15, 32))) == [*range(20, 30)]
    assert apply(database, *map(payment, reversed(range(12)))) == [*reversed(range(10))], "in any order"
    with database.transaction() as connection:
        assert [*database.guard.finished(connection, "shop", "payments").values()] == [((0, 40),)]


def test_two_groups_and_two_clusters_have_effects_of_their_own(database: Database) -> None:
    """Finding 21: the same topic for another group, and a topic of the same name on another cluster."""
    assert apply(database, payment(0, topic_id="eu"), payment(1, topic_id="eu")) == [0, 1]
    assert apply(database, payment(0, topic_id="us")) == [0]
    assert apply(database, payment(0, topic_id="eu", group="audit")) == [0]
    other = payment(0)._replace(token=Token(b"j" * 16, 1))
    assert apply(database, payment(0)) == apply(database, other) == [0], "without ids, by the coordination topic"
    with pytest.raises(InvalidOption, match="of groups audit, shop"):
        apply(database, payment(2, topic_id="eu"), payment(2, topic_id="eu", group="audit"))


def test_holes_that_were_given_up_are_refused(tmp_path: Path) -> None:
    """As the markers of transactions leave them: what comes from there again is neither applied nor passed over."""
    database = made("sqlite3", tmp_path, "", Guard())
    apply(database, *[payment(offset) for offset in range(0, 1024, 2)])
    with pytest.raises(OffsetsUnclear, match="may or may not have"):
        apply(database, payment(2))
    assert apply(database, payment(1022), payment(1023)) == [1023]
    with database.transaction() as connection:
        database.guard.rewind(connection, "shop", "payments", to=1)
    assert apply(database, payment(0), payment(1), payment(2)) == [1, 2]


def test_an_owner_that_only_repeats_fences_the_earlier_ones(database: Database) -> None:
    """K1: the row has the newest token that the database has seen, also if that owner had nothing new."""
    assert apply(database, payment(3), payment(0, partition=1)) == [3, 0]
    assert apply(database, payment(3, epoch=2), payment(0, partition=1)) == []
    with pytest.raises(WriteFenced, match="drop the batch"):
        apply(database, payment(4))
    assert apply(database, payment(1, partition=1)) == [1], "the other partition has its owner still"
    assert apply(database, payment(4, epoch=2)) == [4]
    assert balances(database) == {"alice": 4}


def test_an_equal_token_writes_nothing() -> None:
    """The guard asks and looks, and no more."""
    steps = Guard()._new(payment(3, epoch=2))
    assert "INSERT" in next(steps).sql
    assert "SELECT" in steps.send(0).sql
    with pytest.raises(StopIteration):
        steps.send([(str(payment(3, epoch=2).token), 0, 4, "")])


def test_what_raises_in_the_transaction_is_new_again(database: Database) -> None:

    def fails() -> None:
        with database.transaction() as connection:
            assert database.guard.new(connection, payment(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert apply(database, payment(3)) == [3]


def test_a_recreated_topic_begins_again(database: Database) -> None:
    assert apply(database, payment(5, topic_id="one")) == [5]
    assert apply(database, payment(5, epoch=2, topic_id="one")) == []
    assert apply(database, payment(0, epoch=3, topic_id="two")) == [0]
    assert apply(database, payment(1, epoch=5, topic_id="two")) == [1]
    assert apply(database, payment(5, epoch=6, topic_id="one"), payment(4, epoch=6, topic_id="one")) == [4]


def test_a_rewound_partition_is_new_again(database: Database) -> None:
    """Finding 22. The history before the first message needs no rewind."""
    apply(database, payment(5), payment(6), payment(5, partition=1))
    with database.transaction() as connection:
        [source] = database.guard.rewind(connection, "shop", "payments", [1])
        assert source.tp == ("payments", 1)
    assert apply(database, payment(5), payment(5, partition=1)) == [5]
    with database.transaction() as connection:
        assert len(database.guard.rewind(connection, "shop", "payments", to=6)) == 2
        assert not database.guard.rewind(connection, "audit", "payments")
        assert not database.guard.rewind(connection, "shop", "payments", topic_id="another")
    assert apply(database, payment(4), payment(5), payment(6), payment(5, partition=1)) == [4, 6]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_balances_are_exact_after_kills_and_late_owners(database: Database, seed: int) -> None:
    """Owners die with messages in hand, successors repeat some, and those thought dead go on under old tokens."""
    dice = random.Random(seed)
    logs = [[(f"account {dice.randrange(4)}", dice.randrange(1, 1000)) for _ in range(25)] for _ in range(3)]
    owners: list[list[list[int]]] = [[[0, 0]] for _ in logs]  # per partition: epoch and next offset, newest last
    newest = [0 for _ in logs]  # per partition: the newest epoch that the database has seen
    epoch = refused = repeated = 0
    while any(of_one[-1][1] < 25 for of_one in owners):
        number = dice.randrange(3)
        of_one = owners[number]
        if dice.random() < 0.1:
            epoch += 1
            of_one.append([epoch, max(0, of_one[-1][1] - dice.randrange(4))])
        owner = of_one[-1] if dice.random() < 0.8 else dice.choice(of_one)
        offsets = range(owner[1], min(25, owner[1] + dice.randrange(1, 4)))
        if not offsets:
            continue
        batch = [
            payment(at, owner[0], number, account=logs[number][at][0], cents=logs[number][at][1]) for at in offsets
        ]
        try:
            repeated += len(apply(database, *batch)) < len(batch)
        except WriteFenced:
            assert owner[0] < newest[number]
            refused += 1
        else:
            newest[number] = max(newest[number], owner[0])
        with database.transaction() as connection:
            rows = database.run(connection, f"SELECT token FROM applied WHERE partition = {number}").fetchall()
        assert [*rows[0]] == [str(payment(0, newest[number]).token)], "that of the newest owner that has asked"
        owner[1] = offsets[-1] + 1 if dice.random() < 0.9 else owner[1]
    expected: dict[str, int] = {}
    for account, cents in (entry for log in logs for entry in log):
        expected[account] = expected.get(account, 0) + cents
    assert balances(database) == expected
    assert min(refused, repeated) > 0


def test_two_owners_of_one_partition_wait_for_each_other(database: Database) -> None:
    """The second one sees what the first one has committed meanwhile, and applies nothing twice."""
    first_is_in, seen = threading.Event(), []

    def second() -> None:
        first_is_in.wait(30)
        seen.extend(apply(database, payment(0, epoch=2), payment(1, epoch=2)))

    thread = threading.Thread(target=second)
    thread.start()
    with database.transaction() as connection:
        assert database.guard.new(connection, payment(0))
        database.run(connection, BOOK.format("alice", 1))
        first_is_in.set()
        thread.join(0.2)  # it waits for the row; if it does not, it comes to the wrong result below
    thread.join(30)
    assert seen == [1]
    assert balances(database) == {"alice": 2}


# --- asyncio


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncIterator[Any]:
    if kind == "aiosqlite":
        async with aiosqlite.connect(url) as connection:
            yield connection
            await connection.commit()
    elif kind == "psycopg":
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection
    else:
        engine = create_async_engine(url)
        try:
            async with engine.begin() as connection:
                yield connection
        finally:
            await engine.dispose()


@pytest.mark.parametrize("make", [AsyncGuard, AsyncInbox])
@pytest.mark.parametrize("kind", ["aiosqlite", "psycopg", "sqlalchemy"])
def test_the_same_with_await(kind: str, make: type[AsyncGuard], tmp_path: Path, postgres: str) -> None:
    url = postgres
    if kind == "aiosqlite":
        url = str(tmp_path / "b.db")
    elif kind == "sqlalchemy":
        url = f"sqlite+aiosqlite:///{tmp_path / 'c.db'}"
    guard = make(f"applied_{make.__name__}")

    async def new(*payments: Payment) -> list[int]:
        async with opened(kind, url) as connection:
            return [one.offset for one in await guard.new(connection, payments)]

    async def scenario() -> None:
        async with opened(kind, url) as connection:
            await guard.create(connection)
            await guard.rewind(connection, "shop", "payments")
        assert await new(payment(0), payment(1)) == [0, 1]
        assert await new(payment(1, epoch=2), payment(2, epoch=2)) == [2]
        with pytest.raises(WriteFenced):
            await new(payment(3, epoch=1))
        assert await new(payment(2, epoch=3)) == []
        with pytest.raises(WriteFenced):
            await new(payment(3, epoch=2))
        async with opened(kind, url) as connection:
            await guard.rewind(connection, "shop", "payments", [0])
            assert await guard.finished(connection, "shop", "payments")
        assert await new(payment(2, epoch=3)) == [2], "a rewind keeps the fence"

    asyncio.run(scenario())


# --- wrong input


def autocommitting_sqlite(tmp_path: Path, postgres: str) -> Any:
    return sqlite3.connect(tmp_path / "a.db", isolation_level=None)


def autocommitting_psycopg(tmp_path: Path, postgres: str) -> Any:
    return psycopg.connect(postgres, autocommit=True)


def test_pipeline_mode_is_refused(tmp_path: Path, postgres: str) -> None:
    """No statement says there how many rows it has changed, so each message would seem to have its effect already."""
    engine = sqlalchemy.create_engine(url_of("sqlalchemy-psycopg", tmp_path, postgres), poolclass=sqlalchemy.NullPool)
    for guard in (Guard(), Inbox()):
        database = made("psycopg", tmp_path, postgres, guard)
        with psycopg.connect(postgres) as plain_one, engine.begin() as of_engine:
            for connection, driver in ((plain_one, plain_one), (of_engine, of_engine.connection.driver_connection)):
                with driver.pipeline(), pytest.raises(InvalidOption, match="pipeline mode"):
                    guard.new(connection, payment(0))
        assert apply(database, payment(0)) == [0]

    async def scenario() -> None:
        async with opened("psycopg", postgres) as connection, connection.pipeline():
            with pytest.raises(InvalidOption, match="pipeline mode"):
                await AsyncGuard().new(connection, payment(1))

    asyncio.run(scenario())


@pytest.mark.parametrize("guard", [Guard(), Inbox()], ids=["guard", "inbox"])
def test_a_number_of_rows_that_is_not_known_is_refused(guard: Guard) -> None:
    """Whatever the database module: a message that has no effect yet would pass for one that has."""
    steps = guard._new(payment(3))
    next(steps)
    with pytest.raises(InvalidOption, match="a rowcount of -1"):
        steps.send(-1)


@pytest.mark.parametrize("make", [autocommitting_sqlite, autocommitting_psycopg])
def test_a_connection_that_commits_by_itself_is_refused(
    make: Callable[[Path, str], Any], tmp_path: Path, postgres: str
) -> None:
    connection = make(tmp_path, postgres)
    with pytest.raises(InvalidOption, match="in a transaction"):
        Guard().new(connection, payment(0))
    connection.execute("BEGIN")
    Guard("own").create(connection)
    assert Guard("own").new(connection, payment(0)), "in a transaction of its own it is welcome"
    connection.execute("ROLLBACK")
    connection.close()


def test_the_other_guard_is_named_for_the_other_kind_of_connection(tmp_path: Path, postgres: str) -> None:
    """Each database module and SQLAlchemy has connections whose calls are awaited, and others."""
    file = tmp_path / "a.db"

    async def scenario() -> None:
        for kind, url in (("aiosqlite", str(file)), ("psycopg", postgres), ("", f"sqlite+aiosqlite:///{file}")):
            async with opened(kind, url) as awaited:
                with pytest.raises(
                    InvalidOption, match=r"not awaited, for Guard or Inbox; for this one use AsyncGuard or"
                ):
                    Guard().create(awaited)
                with pytest.raises(InvalidOption, match="use AsyncGuard"):
                    Guard().new(awaited, payment(0))
        engine = sqlalchemy.create_engine(f"sqlite:///{file}", poolclass=sqlalchemy.NullPool)
        with sqlite3.connect(file) as one, psycopg.connect(postgres) as two, engine.connect() as three:
            for plain in (one, two, three):
                with pytest.raises(
                    InvalidOption, match=r"that is awaited, for AsyncGuard or AsyncInbox; for this one use Guard or"
                ):
                    await AsyncGuard().create(plain)
                with pytest.raises(InvalidOption, match="use Guard"):
                    await AsyncGuard().new(plain, payment(0))
        one.close()

    asyncio.run(scenario())


def test_an_autocommitting_engine_is_refused(tmp_path: Path) -> None:
    """Whoever was given the level: the connection, the engine, or what made the engine; so also of a session."""
    url, level = f"sqlite:///{tmp_path / 'a.db'}", {"isolation_level": "AUTOCOMMIT"}
    plain = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    made = sqlalchemy.create_engine(url, **level, poolclass=sqlalchemy.NullPool)
    for engine in (plain.execution_options(**level), made):
        for connection in (engine.connect(), Session(engine)):
            with connection, pytest.raises(InvalidOption, match="in a transaction"):
                Guard().create(connection)
    set_later = plain.connect().execution_options(**level)
    with set_later, pytest.raises(InvalidOption, match="in a transaction"):
        Guard().create(set_later)
    lower = sqlalchemy.create_engine(url, isolation_level="autocommit", poolclass=sqlalchemy.NullPool)
    with lower.connect() as connection, pytest.raises(InvalidOption, match="in a transaction"):
        Guard().create(connection)
    with Session(plain) as session:
        session.connection(execution_options=level)
        with pytest.raises(InvalidOption, match="in a transaction"):
            Guard().create(session)
    with Session(plain) as session:
        Guard().create(session)
        assert Guard().new(session, payment(0))


def test_a_driver_that_commits_by_itself_is_refused(tmp_path: Path, postgres: str) -> None:
    """SQLAlchemy was given no level, and the driver's connection was; unless the transaction is begun by an event."""
    of_psycopg = url_of("sqlalchemy-psycopg", tmp_path, postgres)
    for url, arguments in (("sqlite://", {"isolation_level": None}), (of_psycopg, {"autocommit": True})):
        engine = sqlalchemy.create_engine(url, connect_args=arguments)
        for connection in (engine.connect(), Session(engine)):
            with connection, pytest.raises(InvalidOption, match="in a transaction"):
                Guard().create(connection)

        @sqlalchemy.event.listens_for(engine, "begin")
        def begin(connection: sqlalchemy.Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        for connection in (engine.connect(), Session(engine)):
            with connection:
                Guard("by_event").create(connection)
                assert Guard("by_event").new(connection, payment(0))
                connection.rollback()
        engine.dispose()


class SelfCommitting(sqlite3.Connection):
    """Has the `autocommit` of Python 3.12, which is read in the thread of the connection alone."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.thread = threading.get_ident()

    @property
    def autocommit(self) -> bool:
        assert threading.get_ident() == self.thread
        return True


def test_an_aiosqlite_connection_that_commits_by_itself_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with aiosqlite.connect(tmp_path / "a.db", factory=SelfCommitting) as connection:
            with pytest.raises(InvalidOption, match="in a transaction"):
                await AsyncGuard().create(connection)
        async with aiosqlite.connect(tmp_path / "a.db", isolation_level=None) as connection:
            with pytest.raises(InvalidOption, match="in a transaction"):
                await AsyncGuard().create(connection)
        url = f"sqlite+aiosqlite:///{tmp_path / 'a.db'}"
        engine = create_async_engine(url, connect_args={"isolation_level": None}, poolclass=sqlalchemy.NullPool)
        for connection in (engine.connect(), AsyncSession(engine)):
            async with connection:
                with pytest.raises(InvalidOption, match="in a transaction"):
                    await AsyncGuard().create(connection)

    asyncio.run(scenario())


def test_an_autocommitting_engine_of_asyncio_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        url, level = f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", {"isolation_level": "AUTOCOMMIT"}
        engine = create_async_engine(url, poolclass=sqlalchemy.NullPool)
        for connection in (
            engine.execution_options(**level).connect(),
            AsyncSession(engine.execution_options(**level)),
            create_async_engine(url, **level, poolclass=sqlalchemy.NullPool).connect(),
        ):
            async with connection:
                with pytest.raises(InvalidOption, match="in a transaction"):
                    await AsyncGuard().create(connection)
        async with AsyncSession(engine) as session:
            await AsyncGuard().create(session)
            assert await AsyncGuard().new(session, payment(0))

    asyncio.run(scenario())


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("kind", ["sqlite3", "psycopg"])
@pytest.mark.parametrize("guard", [Guard(), Inbox()], ids=["guard", "inbox"])
def test_a_connection_may_make_rows_of_another_kind(kind: str, guard: Guard, tmp_path: Path, postgres: str) -> None:
    database = made(kind, tmp_path, postgres, guard)
    for found in ([0, 1], []):
        with database.transaction() as connection:
            connection.row_factory = as_dict if kind == "sqlite3" else dict_row
            assert [one.offset for one in guard.new(connection, [payment(0), payment(1)])] == found
            assert [*guard.finished(connection, "shop", "payments").values()] == [((0, 2),)]
            [row] = connection.execute("SELECT count(*) AS rows FROM applied").fetchall()
            assert row == {"rows": 1}, "the program's own statements have its rows"


@pytest.mark.parametrize("kind", ["aiosqlite", "psycopg"])
def test_a_connection_of_asyncio_may_make_rows_of_another_kind(kind: str, tmp_path: Path, postgres: str) -> None:
    made("psycopg", tmp_path, postgres, Inbox())

    async def scenario() -> None:
        async with opened(kind, str(tmp_path / "a.db") if kind == "aiosqlite" else postgres) as connection:
            connection.row_factory = as_dict if kind == "aiosqlite" else dict_row
            await AsyncInbox().create(connection)
            assert await AsyncInbox().new(connection, payment(0))
            assert await AsyncInbox().new(connection, payment(0)) == []

    asyncio.run(scenario())


def test_a_message_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        Guard().create(connection)
        with pytest.raises(InvalidOption, match="each message once"):
            Guard().new(connection, [payment(1), payment(1)])
        assert Guard().new(connection, []) == []


PLAIN = plain(make_message())


@pytest.mark.parametrize(
    "wrong", [None, "x", 3, [payment(1), None], b"x", PLAIN, [PLAIN], make_batch([make_message()]).parts]
)
@pytest.mark.parametrize("guard", [Guard(), Inbox()], ids=["guard", "inbox"])
def test_what_is_no_message_is_refused_by_name(tmp_path: Path, guard: Guard, wrong: Any) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        guard.create(connection)
        with pytest.raises(InvalidOption, match=r"^messages=.*a message, a batch, a part, or several"):
            guard.new(connection, wrong)


@pytest.mark.parametrize("wrong", [-1, None, "0", True, 1.5])
def test_a_partition_is_rewound_to_an_offset(tmp_path: Path, wrong: Any) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        guard = Guard()
        guard.create(connection)
        guard.new(connection, [payment(0), payment(1)])
        with pytest.raises(InvalidOption, match=r"^to=.*an offset, 0 or more"):
            guard.rewind(connection, "shop", "payments", to=wrong)
        assert guard.new(connection, payment(0)) == []
        assert guard.rewind(connection, "nobody", "payments") == []


def test_what_lies_between_the_messages_of_a_fetch_makes_no_holes(tmp_path: Path) -> None:
    """Markers of transactions: the fetch that returned the messages has seen that there is nothing between them."""
    messages = [make_message(offset=offset) for offset in (0, 2, 4, 9)]
    batch = make_batch(messages)
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        guard = Guard()
        guard.create(connection)
        assert guard.new(connection, batch[:2]) == list(messages[:2])
        assert guard.new(connection, batch[2]) == [messages[2]]
        assert guard.new(connection, batch[3:]) == [messages[3]]
        assert [*guard.finished(connection, "test", "test").values()] == [((0, 10),)]
        assert guard.new(connection, batch) == []


@pytest.mark.parametrize("table", ["", "a b", "a;drop", "a.b.c", "1a", None])
def test_a_table_has_a_plain_name(table: Any) -> None:
    with pytest.raises(InvalidOption, match="plain SQL name"):
        Guard(table)


def test_an_unknown_connection_is_named() -> None:
    with pytest.raises(InvalidOption, match="aiosqlite, psycopg, sqlalchemy, sqlite3"):
        Guard().create(object())


# --- an inbox


def rows_of(database: Database, table: str) -> int:
    with database.transaction() as connection:
        return int(database.run(connection, f"SELECT count(*) FROM {table}").fetchall()[0][0])


def test_transactions_of_one_partition_do_not_wait_for_each_other(tmp_path: Path, postgres: str) -> None:
    """The first one is open while the others commit. SQLite has one writer at a time, whatever it writes."""
    database = made("psycopg", tmp_path, postgres, Inbox())
    assert apply(database, payment(0)) == [0], "the first one of an owner takes the row"
    with database.transaction() as connection:
        assert database.guard.new(connection, payment(1))
        assert apply(database, payment(2)) == [2]
        assert apply(database, payment(5), payment(4)) == [5, 4]
    assert balances(database) == {"alice": 4}


def test_an_owner_that_was_late_finds_the_newer_token(tmp_path: Path, postgres: str) -> None:
    """K1: whether the newer owner has committed before the older one marks its message, or while it does."""
    database = made("psycopg", tmp_path, postgres, Inbox())
    assert apply(database, payment(0)) == [0]
    newer_is_in, outcome = threading.Event(), list[object]()

    def older() -> None:
        newer_is_in.wait(30)
        try:
            outcome.append(apply(database, payment(1)))
        except WriteFenced as error:
            outcome.append(type(error))

    thread = threading.Thread(target=older)
    thread.start()
    with database.transaction() as connection:
        assert database.guard.new(connection, payment(1, epoch=2))
        database.run(connection, BOOK.format("alice", 1))
        newer_is_in.set()
        thread.join(0.2)
        assert not outcome, "it waits for the mark"
    thread.join(30)
    assert outcome == [WriteFenced]
    with pytest.raises(WriteFenced):
        apply(database, payment(9))
    assert apply(database, payment(9, epoch=2)) == [9], "the older one has left no mark"
    assert balances(database) == {"alice": 3}


def test_a_fenced_partition_of_a_batch_leaves_no_mark(inbox: Database) -> None:
    apply(inbox, payment(7, epoch=11))
    assert apply(inbox, payment(8, epoch=10), payment(0, partition=1, epoch=10)) == [0]
    assert apply(inbox, payment(8, epoch=11)) == [8]


def test_marks_below_the_position_become_ranges(inbox: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is bounded: what is left has a mark for each message from the position on, and the newest ones."""
    monkeypatch.setattr("marshal_py.client.sql_guard.MARKS_MAX", 10)
    messages = [make_message(offset=offset) for offset in range(100)]
    batch = make_batch(messages)
    for message in batch:
        with inbox.transaction() as connection:
            assert inbox.guard.new(connection, message) == [message]
        if message.offset != 50:
            message.ack()
    assert 50 <= rows_of(inbox, "applied_marks") <= 60
    batch[50].ack()
    with inbox.transaction() as connection:
        assert [*inbox.guard.finished(connection, "test", "test").values()] == [((0, 100),)]
        assert inbox.guard.new(connection, batch) == []
        assert [one.partition for one in inbox.guard.rewind(connection, "test", "test", to=20)] == [0]
    assert rows_of(inbox, "applied_marks") == 0
    with inbox.transaction() as connection:
        assert [one.offset for one in inbox.guard.new(connection, batch)] == [*range(20, 100)]


LEVELS = ("REPEATABLE READ", "SERIALIZABLE")


@pytest.mark.parametrize("level", LEVELS)
def test_an_inbox_needs_read_committed(level: str, tmp_path: Path, postgres: str) -> None:
    """An older owner's transaction would see neither a newer owner's mark nor the range that it has become. Whoever set
    the level: the connection, the transaction, the server, or SQLAlchemy."""
    database = made("psycopg", tmp_path, postgres, Inbox())
    by_server = "-c default_transaction_isolation=" + level.lower().replace(" ", r"\ ")
    with psycopg.connect(postgres) as one, psycopg.connect(postgres) as two:
        one.isolation_level = psycopg.IsolationLevel[level.replace(" ", "_")]
        two.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        for connection in (one, two, psycopg.connect(postgres, options=by_server)):
            with pytest.raises(InvalidOption, match=f"at {level}.*READ COMMITTED, for an Inbox"):
                database.guard.new(connection, payment(0))
            with pytest.raises(InvalidOption, match=f"at {level}"):
                database.guard.rewind(connection, "shop", "payments")
            assert database.guard.finished(connection, "shop", "payments") == {}
            assert Guard().new(connection, payment(0)), "it waits for the row, or fails with an error"
            connection.rollback()
        connection.close()
    engine = sqlalchemy.create_engine(
        url_of("sqlalchemy-psycopg", tmp_path, postgres), isolation_level=level, poolclass=sqlalchemy.NullPool
    )
    for found in (engine.connect(), Session(engine)):
        with found, pytest.raises(InvalidOption, match=f"at {level}"):
            database.guard.new(found, payment(0))

    async def scenario() -> None:
        async with opened("psycopg", postgres) as connection:
            await connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            with pytest.raises(InvalidOption, match=f"at {level}"):
                await AsyncInbox().new(connection, payment(0))

    asyncio.run(scenario())
    assert apply(database, payment(0)) == [0]


def test_a_row_that_comes_while_an_inbox_is_read_is_found() -> None:
    """The first message of a partition commits its mark and its row between the two statements."""
    key = (0, "id")
    steps = InboxRules().kept("shop", "payments")
    assert "_marks" in next(steps).sql, "marks that become ranges meanwhile are in the row then"
    steps.send([])
    with pytest.raises(StopIteration) as ended:
        steps.send([(*key, str(payment(0).token), -1, -1, "0-1")])
    assert [kept.finished.ranges for kept in ended.value.value.values()] == [((0, 1),)]
    steps = InboxRules().kept("shop", "payments")
    next(steps)
    steps.send([(*key, 0, 1)])
    with pytest.raises(StopIteration) as ended:
        steps.send([])
    assert [kept.finished.ranges for kept in ended.value.value.values()] == [((0, 1),)], "its row was deleted by hand"


def test_an_inbox_goes_on_where_a_guard_was(inbox: Database) -> None:
    with inbox.transaction() as connection:
        assert Guard().new(connection, [payment(0), payment(1)])
    assert apply(inbox, payment(1), payment(2)) == [2]


@pytest.mark.parametrize("before", [(), (0, 1)])
def test_a_guard_refuses_what_an_inbox_has_marked(inbox: Database, before: tuple[int, ...]) -> None:
    """It would not see the marks, so it would give messages their effect again. Other partitions are not refused."""
    with inbox.transaction() as connection:
        assert len(Guard().new(connection, [payment(offset) for offset in before])) == len(before)
    assert apply(inbox, payment(5)) == [5]
    refused = "an Inbox of group 'shop' has marked messages of payments:0 beside it"
    for epoch in (1, 2):
        with inbox.transaction() as connection, pytest.raises(InvalidOption, match=refused):
            Guard().new(connection, payment(6, epoch=epoch))
    with inbox.transaction() as connection:
        with pytest.raises(InvalidOption, match=refused):
            Guard().finished(connection, "shop", "payments")
        with pytest.raises(InvalidOption, match=refused):
            Guard().rewind(connection, "shop", "payments", to=0)
        assert Guard().new(connection, payment(0, partition=1))
    assert apply(inbox, payment(5), payment(6)) == [6]
    assert apply(inbox, payment(7, epoch=3)) == [7]
    with inbox.transaction() as connection, pytest.raises(WriteFenced):
        Guard().new(connection, payment(8))


def test_messages_that_were_given_back_leave_no_hole_that_is_forgotten(tmp_path: Path) -> None:
    """A service answers every other time: what waits comes again, and the table knows that it is missing."""
    database = made("sqlite3", tmp_path, "", Guard())
    batch = make_batch([make_message(offset=offset) for offset in range(1000)])
    for message in batch:
        if message.offset % 2:
            with database.transaction() as connection:
                assert database.guard.new(connection, message) == [message]
            message.ack()
    for message in batch:
        with database.transaction() as connection:
            assert database.guard.new(connection, message) == ([] if message.offset % 2 else [message])
        message.ack()
    with database.transaction() as connection:
        assert [*database.guard.finished(connection, "test", "test").values()] == [((0, 1000),)]


def test_the_key_of_a_message_is_its_own() -> None:
    one, again, next_ = make_message(offset=3), make_message(offset=3), make_message(offset=4)
    assert one.idempotency_key == again.idempotency_key != next_.idempotency_key
    assert one.idempotency_key.startswith("test/test/")
    assert one.idempotency_key.endswith("/0/3")


# --- the guide's program, killed


@pytest.mark.parametrize("name", ["guard", pytest.param("inbox", marks=pytest.mark.proof)])
def test_the_guide_applies_each_message_once_whatever_ends(name: str, tmp_path: Path) -> None:
    """Two kills and a stop; by the thousand: python -m tests.support.transaction_kills."""
    with Broker(topics={"__marshal": 16, transaction_kills.TOPIC: 4}) as broker:
        ends = [int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGKILL)]
        count = transaction_kills.run(broker.bootstrap_servers, tmp_path, 400, ends, 2, seed=1, name=name)
    assert count == (400, 0, 0)
