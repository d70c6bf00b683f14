"""The programs of docs/acks.md: a confirmed ack, every answer, the dead-letter topic, handles of other processes."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from marshal_py import Consumer, Message
from marshal_py.testing import LocalCluster
from tests.support.pages import Some, blocks, run

PAGE = "acks.md"
CONFIRMED, ANSWERS, LETTERS, HANDLES = blocks(PAGE)
MESSAGES = 6


@pytest.fixture
def consumer(marshal_broker: LocalCluster) -> Iterator[Consumer]:
    marshal_broker.create_topic("orders")
    marshal_broker.produce_many("orders", [b"%d" % number for number in range(MESSAGES)])
    with marshal_broker.connect() as marshal, marshal.consumer("billing", ["orders"], start="earliest") as made:
        yield made


def test_each_effect_is_committed_once_its_ack_is_confirmed(consumer: Consumer, marshal_broker: LocalCluster) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE booked (value BLOB)")

        def book(database: sqlite3.Connection, message: Message) -> None:
            assert database.execute("SELECT count(*) FROM booked").fetchone() == (message.offset,)
            assert marshal_broker.group("billing").positions()["orders", 0] == message.offset
            database.execute("INSERT INTO booked VALUES (?)", (message.value,))

        run(CONFIRMED, PAGE, consumer=Some(consumer, MESSAGES), database=database, book=book)
        assert database.execute("SELECT count(*) FROM booked").fetchone() == (MESSAGES,)
    assert marshal_broker.group("billing").positions()["orders", 0] == MESSAGES


def test_a_message_is_tried_again_ended_and_acked(consumer: Consumer, marshal_broker: LocalCluster) -> None:
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
    run(ANSWERS, PAGE, consumer=Some(consumer, MESSAGES + 1), **program)
    assert sorted(charged) == [b"0", b"1", b"1", b"2", b"3", b"4", b"5"]
    consumer.stop()
    assert marshal_broker.group("billing").positions()["orders", 0] == MESSAGES


def test_a_consumer_with_a_dead_letter_topic(marshal_broker: LocalCluster) -> None:
    for topic in ("orders", "dlq.orders"):
        marshal_broker.create_topic(topic)
    with marshal_broker.connect() as marshal, run(LETTERS, PAGE, marshal=marshal)["consumer"] as consumer:
        marshal_broker.run_until(lambda: len(consumer.claims()) == 1)


def test_a_process_gets_handles_and_sends_them_back(
    consumer: Consumer, marshal_broker: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's function is in a module, where another process finds it."""
    function, loop = HANDLES.split("\n\n\n")
    (tmp_path / "resizing.py").write_text(f"resize = len\n\n\n{function}\n")
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"work": __import__("resizing").work, "consumer": Some(consumer, MESSAGES)}
    run(loop, PAGE, ProcessPoolExecutor=ProcessPoolExecutor, multiprocessing=multiprocessing, **names)
    consumer.stop()
    assert marshal_broker.group("billing").positions()["orders", 0] == MESSAGES
