"""The handlers of docs/handlers.md: each gets what a crash between effect and ack leaves behind."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from marshal_py import Consumer, Message
from marshal_py.sql import Guard
from marshal_py.testing import LocalCluster
from tests.support.pages import names_of

MESSAGES = 20
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def handlers() -> dict[str, Any]:
    return names_of("handlers.md")


@pytest.fixture
def consumer(marshal_broker: LocalCluster) -> Iterator[Consumer]:
    """A consumer of 20 messages with four keys."""
    marshal_broker.create_topic("orders", 2)
    for number in range(MESSAGES):
        marshal_broker.produce("orders", b"%d" % number, key=b"k%d" % (number % 4))
    with marshal_broker.connect() as marshal, marshal.consumer("billing", ["orders"], start="earliest") as made:
        yield made


class Stop:
    """Asks for a stop once so many calls have been counted."""

    def __init__(self, consumer: Consumer, calls: int) -> None:
        self.consumer, self.left, self.lock = consumer, calls, threading.Lock()

    def count(self) -> None:
        with self.lock:
            self.left -= 1
            if not self.left:
                self.consumer.request_stop()


def test_an_upsert(handlers: dict[str, Any], consumer: Consumer) -> None:
    stop = Stop(consumer, MESSAGES)

    class Store(dict[bytes, bytes]):
        def __setitem__(self, key: bytes, value: bytes) -> None:
            super().__setitem__(key, value)
            stop.count()

    store = Store()
    handlers["upsert"](consumer, store)
    assert store == {b"k%d" % key: b"%d" % (MESSAGES - 4 + key) for key in range(4)}


def test_the_key_of_a_request_is_the_same_again(
    handlers: dict[str, Any], consumer: Consumer, marshal_broker: LocalCluster
) -> None:
    """The first delivery is sent and its ack is lost."""
    first = consumer.fetch(MESSAGES, expires_s=DEADLINE_S)
    sent = {f"{m.topic}/{m.partition}/{m.offset}": m.value for m in first}
    marshal_broker.redeliver(consumer)
    stop, again = Stop(consumer, MESSAGES), {}

    def send(key: str, value: bytes) -> None:
        again[key] = value
        stop.count()

    handlers["request_with_key"](consumer, send)
    assert again == sent


def test_the_outbox_has_each_message_once(
    handlers: dict[str, Any], consumer: Consumer, marshal_broker: LocalCluster
) -> None:
    """Everything was stored, and all acks were lost."""
    guard, database = Guard(), sqlite3.connect(":memory:")
    with database:
        guard.create(database)
        database.execute("CREATE TABLE outbox (id TEXT PRIMARY KEY, body BLOB)")
    for message in consumer.fetch(MESSAGES, expires_s=DEADLINE_S):
        with database:
            for new in guard.new(database, message):
                row = (f"{new.topic}/{new.partition}/{new.offset}", new.value)
                database.execute("INSERT INTO outbox (id, body) VALUES (?, ?)", row)
    marshal_broker.redeliver(consumer)
    stop = Stop(consumer, MESSAGES)

    class Counting:
        def new(self, connection: sqlite3.Connection, message: Message) -> list[Message]:
            stop.count()
            return guard.new(connection, message)

    handlers["remember"](consumer, database, Counting())
    assert database.execute("SELECT count(*), count(DISTINCT body) FROM outbox").fetchone() == (MESSAGES, MESSAGES)
    database.close()


@pytest.mark.parametrize("name", ["in_threads", "in_threads_by_key"])
def test_threads_ack_everything(
    handlers: dict[str, Any], consumer: Consumer, marshal_broker: LocalCluster, name: str
) -> None:
    stop, seen = Stop(consumer, MESSAGES), []

    def handle(message: Message) -> None:
        seen.append((message.key, int(message.value)))
        stop.count()

    handlers[name](consumer, handle, workers=4)
    assert sorted(value for _, value in seen) == list(range(MESSAGES))
    if name == "in_threads_by_key":
        for key in {key for key, _ in seen}:
            values = [value for one, value in seen if one == key]
            assert values == sorted(values), "the order of a key"
    consumer.stop()
    assert sum(marshal_broker.group("billing").positions().values()) == MESSAGES


def test_a_thread_that_fails_gives_its_message_back(handlers: dict[str, Any], consumer: Consumer) -> None:
    stop, failed = Stop(consumer, MESSAGES + 1), threading.Event()

    def handle(message: Message) -> None:
        stop.count()
        if message.value == b"7" and not failed.is_set():
            failed.set()
            raise ConnectionError

    handlers["in_threads"](consumer, handle, workers=4)
    assert stop.left == 0
