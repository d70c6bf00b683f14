"""The programs of the guides that handle messages, each with a check of what it did. See guides.py."""

from __future__ import annotations

import multiprocessing
import signal
import sqlite3
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any, Final

import pytest

import marshal_py
from marshal_py import Batches, Message, Reject, Retry
from tests.support.client_fixtures import DEADLINE_S, until
from tests.support.guides import KEYS, MESSAGES, VALUES, Place, guide
from tests.support.pages import Enough, Some, Stop, call, run

# --- programs that connect, receive every message, and go on: README.md and others


LAST: Final = b"last"


class Handled:
    """What a handler was given. It ends its program by `end` with one more message, once all others have come."""

    def __init__(self, at: Place, end: type[BaseException] = Enough) -> None:
        self.at, self.end = at, end
        self.values: list[Any] = []
        at.fill(2)

    def add(self, *values: Any) -> None:
        if LAST in values:
            raise self.end
        self.values += values
        if len(self.values) == MESSAGES:
            self.finish()

    def finish(self) -> None:
        self.at.cluster.produce(self.at.topic, LAST)

    def check(self, acked: int = MESSAGES) -> None:
        """Each message came once, and all but the last one were acked."""
        assert sorted(self.values) == sorted(VALUES)
        assert self.at.acked() == acked


def from_the_start(handled: Handled, page: str, number: int, **names: Any) -> None:
    """Runs a program that reads what is there already, until `handled` ends it."""
    block = handled.at.from_the_start(page, number)
    with pytest.raises(handled.end):
        run(block, page, **names)


def _until_a_signal(at: Place, page: str, handler: str, number: signal.Signals) -> None:
    """Runs the first block of a page as a process, because signals come to its main thread."""
    at.fill(2)
    (at.folder / "program.py").write_text(f"{handler}\n\n\n{at.from_the_start(page, 0)}", encoding="utf-8")
    with at.process(["program.py"]) as running:
        assert running.stdout is not None
        stored = [running.stdout.readline() for _ in VALUES]
        running.send_signal(number)
        more, said = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, more, said) == (0, "", "")
    assert sorted(stored) == sorted(f"{value.decode()}\n" for value in VALUES)
    assert at.acked() == MESSAGES


@guide("README.md", 0)
def first_program(at: Place) -> None:
    handler = "import builtins\n\n\ndef print(value):\n    builtins.print(value.decode(), flush=True)"
    _until_a_signal(at, "README.md", handler, signal.SIGINT)


@guide("docs/consumer.md", 0)
def iteration_until_a_signal(at: Place) -> None:
    handler = "def store(value, fence):\n    print(value.decode(), flush=True)"
    _until_a_signal(at, "docs/consumer.md", handler, signal.SIGTERM)


@guide("docs/consumer.md", 1)
def batches_at_most_once(at: Place) -> None:
    """What was delivered is done, also the last one."""
    handled = Handled(at)
    from_the_start(handled, "docs/consumer.md", 1, store=lambda values, fence: handled.add(*values))
    handled.check(MESSAGES + 1)


@guide("docs/consumer.md", 2)
def consume_with_a_handler(at: Place) -> None:
    """An exit ends it."""
    handled = Handled(at, SystemExit)
    from_the_start(handled, "docs/consumer.md", 2, store=lambda value, fence: handled.add(value))
    handled.check()


def coming_from(at: Place, name: str, number: int) -> None:
    handled = Handled(at)
    program = at.run("docs/coming-from.md", number)[name]
    with pytest.raises(Enough):
        call(program, at.servers, handled.add)
    handled.check()


@guide("docs/coming-from.md", 0)
def like_confluent_kafka(at: Place) -> None:
    coming_from(at, "like_confluent_kafka", 0)


@guide("docs/coming-from.md", 1)
def like_aiokafka(at: Place) -> None:
    coming_from(at, "like_aiokafka", 1)


@guide("docs/consumer.md", 3)
def charge_all(at: Place) -> None:
    handled = Handled(at)

    async def charge(message: Any) -> None:
        handled.add(message.value)

    with pytest.raises(Enough):
        call(at.run("docs/consumer.md", 3)["charge_all"], at.servers, charge)
    handled.check()


@guide("docs/operations.md", 1)
def first_consumer_after_the_migration(at: Place) -> None:
    """Its fallback: nothing is committed. tests/kafka/test_runbooks.py commits."""
    handled = Handled(at)
    with pytest.raises(Enough):
        at.run("docs/operations.md", 1, marshal_py=marshal_py, handle=handled.add)
    handled.check()


# --- docs/acks.md


@guide("docs/acks.md", 1)
def confirmed_acks(at: Place) -> None:
    """Each effect is committed before its ack is in the log, and the next one is begun after that."""
    at.fill()
    with at.consumer() as consumer, closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE booked (value BLOB)")

        def book(database: sqlite3.Connection, message: Message) -> None:
            assert database.execute("SELECT count(*) FROM booked").fetchone() == (message.offset,)
            if message.offset == 1:
                assert at.acked() == 1
            database.execute("INSERT INTO booked VALUES (?)", (message.value,))

        at.run("docs/acks.md", 1, consumer=Some(consumer, MESSAGES), database=database, book=book)
        assert [value for (value,) in database.execute("SELECT value FROM booked")] == VALUES
        assert at.acked() == MESSAGES


@guide("docs/acks.md", 0)
def every_answer(at: Place) -> None:
    """A message is tried again, one is ended, the others are acked."""
    at.fill()

    class NotJson(Exception):
        pass

    class CardServiceDown(Exception):
        pass

    charged: list[bytes] = []

    def charge(value: bytes) -> None:
        charged.append(value)
        if value == b"1" and charged.count(value) == 1:
            raise CardServiceDown
        if value == b"2":
            raise NotJson("no JSON")

    program = {"charge": charge, "NotJson": NotJson, "CardServiceDown": CardServiceDown}
    with at.consumer() as consumer:
        at.run("docs/acks.md", 0, consumer=Some(consumer, MESSAGES + 1), **program)
    assert sorted(charged) == sorted([*VALUES, b"1"])
    assert at.acked() == MESSAGES


@guide("docs/acks.md", 2)
def dead_letters(at: Place) -> None:
    """A message that its handler ends becomes a letter."""
    for topic in (at.topic, at.letters):
        at.cluster.create_topic(topic)
    with at.run("docs/acks.md", 2, marshal=at.marshal)["consumer"] as consumer:
        at.cluster.run_until(lambda: len(consumer.cached_info().claims) == 1)
        at.cluster.produce(at.topic, b"broken", key=b"7")
        message = consumer.next(DEADLINE_S)
        assert message is not None
        message.term("no JSON")
        consumer.drain()
        with at.marshal.topic(at.letters) as letters:
            letter = letters.get(offset=0, partition=0)
    assert (letter.key, letter.value) == (b"7", b"broken")
    assert dict(letter.headers)["__dlq.errors.message"] == b"no JSON"


RESIZE: Final = """
import pathlib


def resize(value):
    pathlib.Path(__file__).with_name(f"{value.decode()}.resized").write_bytes(value)


"""


@guide("docs/acks.md", 3)
def handles(at: Place) -> None:
    """Workers are other processes. Their function is in a module, where they find it."""
    at.fill()
    function, loop = at.block("docs/acks.md", 3).split("\n\n\n")
    (at.folder / "resizing.py").write_text(RESIZE + function, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(at.folder)
        patch.delitem(sys.modules, "resizing", raising=False)
        names: dict[str, Any] = {"work": __import__("resizing").work, "multiprocessing": multiprocessing}
        with at.consumer() as consumer:
            names |= {"ProcessPoolExecutor": ProcessPoolExecutor, "consumer": Some(consumer, MESSAGES)}
            exec(compile(loop, "docs/acks.md", "exec"), names)
    assert {file.read_bytes() for file in at.folder.glob("*.resized")} == set(VALUES)
    assert at.acked() == MESSAGES


@guide("docs/process.md", 0)
def in_parallel(at: Place) -> None:
    """A payment that fails is tried again, an order without an amount is not."""
    at.fill(2)
    failed, paid = threading.Event(), list[int]()
    with at.consumer() as consumer:
        stop = Stop(consumer, MESSAGES + 1)

        def order_of(value: bytes) -> dict[str, int]:
            if value == b"5":
                stop.count()
                return {}
            return {"amount": int(value)}

        def pay(order: dict[str, int]) -> None:
            stop.count()
            if order["amount"] == 7 and not failed.is_set():
                failed.set()
                raise ConnectionError
            paid.append(order["amount"])

        at.run("docs/process.md", 0, consumer=consumer, json=SimpleNamespace(loads=order_of), pay=pay)
    assert sorted(paid) == [0, 1, 2, 3, 4, 6, 7]
    assert at.acked() == MESSAGES


@guide("docs/process.md", 1)
def in_lists(at: Place) -> None:
    """Two documents are refused once, each the last of its key, and come again alone."""
    at.fill(2)
    stored, refused = list[bytes](), set[bytes]()
    with at.consumer() as consumer:
        stop = Stop(consumer, MESSAGES + 2)

        def bulk(messages: list[Message]) -> list[ConnectionError | None]:
            outcomes: list[ConnectionError | None] = []
            for message in messages:
                stop.count()
                once = message.value in (b"5", b"6") and message.value not in refused
                (refused.add if once else stored.append)(message.value or b"")
                outcomes.append(ConnectionError() if once else None)
            return outcomes

        at.run("docs/process.md", 1, consumer=consumer, index=SimpleNamespace(bulk=bulk))
    assert sorted(set(stored)) == sorted(VALUES)
    assert at.acked() == MESSAGES


@guide("docs/process.md", 2)
def in_lists_of_effects(at: Place) -> None:
    """The first messages of a key and without a key fail once, and that of another key for good. Nothing behind them is
    done twice, and nothing is passed over."""
    at.fill(2)
    for value in (b"no key", b"no key either"):
        at.cluster.produce(at.topic, value, partition=0)
    done, failing, count = list[bytes](), {b"0", b"no key"}, MESSAGES + 2

    def attempt(message: Message) -> Exception | None:
        value = message.value or b""
        if value in failing:
            failing.remove(value)
            return ConnectionError()
        if value == b"1":
            return Reject("never")
        done.append(value)
        return None

    write = at.run("docs/process.md", 2, attempt=attempt)["write"]
    with at.consumer() as consumer, consumer.process(write, batch=Batches(count), retry=Retry(0.01)):
        at.cluster.run_until(lambda: at.acked() == count)
    assert sorted(done) == sorted({*VALUES, b"no key", b"no key either"} - {b"1"})


@guide("docs/process.md", 3)
def in_spans(at: Place) -> None:
    at.fill(2)
    with at.consumer() as consumer:
        stop = Stop(consumer, MESSAGES)
        at.run("docs/process.md", 3, consumer=consumer, charge=lambda message: stop.count())
    assert at.acked() == MESSAGES


@guide("docs/process.md", 5)
def in_worker_processes(at: Place) -> None:
    """A process with worker processes, which a signal ends."""
    at.fill(2)
    (at.folder / "seals.py").write_text(at.block("docs/process.md", 5), encoding="utf-8")
    with at.process(["seals.py"]) as running:
        until(lambda: running.poll() is not None or len(list(at.folder.glob("?-?"))) == MESSAGES, "all are sealed")
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, said) == (0, "")
    assert at.acked() == MESSAGES


@guide("docs/process.md", 6)
def each_effect_once_in_parallel(at: Place) -> None:
    """A process, which a signal ends."""
    _each_effect_once(at, "docs/process.md", 6)


@guide("docs/acks.md", 4)
def each_effect_once(at: Place) -> None:
    """A process, which a signal ends."""
    _each_effect_once(at, "docs/acks.md", 4)


def _each_effect_once(at: Place, page: str, number: int) -> None:
    at.fill(2)
    path = at.folder / "shop.db"
    (at.folder / "shop.py").write_text(at.block(page, number), encoding="utf-8")

    def stored() -> list[tuple[str, bytes]]:
        with closing(sqlite3.connect(path, timeout=DEADLINE_S)) as database:
            try:
                return database.execute("SELECT id, value FROM orders").fetchall()
            except sqlite3.OperationalError:  # no table yet
                return []

    with at.process(["shop.py"]) as running:
        until(lambda: running.poll() is not None or len(stored()) == MESSAGES, "everything is stored")
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, said) == (0, "")
    assert sorted(stored()) == sorted((str(b"k%d" % (number % KEYS)), VALUES[number]) for number in range(MESSAGES))
    assert at.acked() == MESSAGES
