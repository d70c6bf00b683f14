"""The programs of the guides in docs/ on a real Kafka: one topic, a group for each program."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

import marshal_py
from marshal_py import Consumer, Marshal, aio
from marshal_py.sql import Guard
from tests.support.client_fixtures import DEADLINE_S, until
from tests.support.kafka import Cluster
from tests.support.kafka_topics import create_topic
from tests.support.pages import Enough, Some, blocks, call, run

MESSAGES = 8


class Programs:
    """The programs of the guides, for a topic of this cluster and a group of their own."""

    def __init__(self, servers: str, topic: str) -> None:
        self.servers, self.topic = servers, topic
        self.group = f"guide-{uuid.uuid4().hex[:8]}"

    def blocks(self, page: str) -> list[str]:
        """The blocks of a page, which name this topic, this group and these servers."""
        there = {
            '"orders"': self.topic,
            '"billing"': self.group,
            '"shop"': self.group,
            '"localhost:9092"': self.servers,
        }
        found = blocks(page)
        for old, new in there.items():
            found = [block.replace(old, repr(new)) for block in found]
        return found

    def names(self, page: str, count: int) -> dict[str, Any]:
        """What the first `count` blocks of a page define."""
        names: dict[str, Any] = {}
        for block in self.blocks(page)[:count]:
            names = run(block, page, **names)
        return names


@pytest.fixture(scope="module")
def topic(kafka: Cluster) -> Iterator[str]:
    admin, name = AdminClient({"bootstrap.servers": kafka.bootstrap}), f"orders-{uuid.uuid4().hex[:8]}"
    create_topic(admin, name, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(MESSAGES):
        producer.produce(name, b'{"id": %d}' % number, b"%d" % number)
    assert producer.flush(DEADLINE_S) == 0
    yield name
    admin.delete_topics([name])


@pytest.fixture(scope="module")
def marshal(kafka: Cluster) -> Iterator[Marshal]:
    with marshal_py.connect(kafka.bootstrap) as connected:
        yield connected


@pytest.fixture
def programs(kafka: Cluster, topic: str) -> Programs:
    return Programs(kafka.bootstrap, topic)


CONNECTING = (
    ("coming-from.md", 3, "like_confluent_kafka"),
    ("coming-from.md", 3, "like_aiokafka"),
    ("coming-from.md", 3, "like_a_subscriber"),
    ("asyncio.md", 1, "charge_all"),
)


@pytest.mark.parametrize(("page", "count", "name"), CONNECTING)
def test_a_program_receives_every_message(programs: Programs, page: str, count: int, name: str) -> None:
    seen: list[Any] = []

    def handle(value: Any) -> None:
        seen.append(value)
        if len(set(seen)) == MESSAGES:
            raise Enough

    async def charge(message: Any) -> None:
        handle(message.value)

    program = programs.names(page, count)[name]
    with pytest.raises(Enough):
        call(program, programs.servers, charge if name == "charge_all" else handle)


def test_the_service_that_the_guide_tests(programs: Programs) -> None:
    """docs/testing.md: it serves its tests, in memory, and Kafka alike."""
    names = programs.names("testing.md", 1)
    [block] = [block for block in programs.blocks("testing.md") if "class Service" in block]
    service = run(block, "testing.md", **names)["Service"](programs.servers)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        until(lambda: len(service.db["charged"]) == MESSAGES, "every order is charged")
    finally:
        service.stop()
        thread.join()


def test_each_effect_once(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/transactions.md: the program ends with its last message, and the database has each one once."""
    consumers: list[Consumer] = []
    seen: set[int] = set()
    new = Guard.new

    @contextmanager
    def noted(consumer: Consumer) -> Iterator[None]:
        consumers.append(consumer)
        yield

    def counted(self: Guard, connection: Any, messages: Any) -> Any:
        seen.add(messages.offset)
        if len(seen) == MESSAGES:
            consumers[0].request_stop()
        return new(self, connection, messages)

    monkeypatch.setattr(marshal_py, "stop_on_signals", noted)
    monkeypatch.setattr(Guard, "new", counted)
    monkeypatch.chdir(tmp_path)
    program = run(programs.blocks("transactions.md")[0], "transactions.md")
    with closing(program["database"]) as database:
        assert database.execute("SELECT count(*), count(DISTINCT id) FROM orders").fetchone() == (MESSAGES, MESSAGES)


def confirmed(programs: Programs, consumer: Some, _: Callable[[Any], None]) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        run(programs.blocks("acks.md")[0], "acks.md", consumer=consumer, database=database, book=lambda *_: None)


def answers(programs: Programs, consumer: Some, handle: Callable[[Any], None]) -> None:
    names = dict.fromkeys(("CardServiceDown", "NotJson"), LookupError)
    run(programs.blocks("acks.md")[1], "acks.md", consumer=consumer, charge=handle, **names)


def in_threads(programs: Programs, consumer: Some, handle: Callable[[Any], None]) -> None:
    programs.names("handlers.md", 3)["in_threads"](consumer, handle)


@pytest.mark.parametrize("program", [confirmed, answers, in_threads])
def test_a_loop_acks_everything(
    programs: Programs, topic: str, marshal: Marshal, program: Callable[[Programs, Some, Any], None]
) -> None:
    """docs/acks.md, docs/handlers.md: the log has the position after the last message."""
    with marshal.consumer(programs.group, [topic], start="earliest") as consumer:
        program(programs, Some(consumer, MESSAGES), lambda message: None)
    assert marshal.group(programs.group).positions()[topic, 0] == MESSAGES


@pytest.mark.parametrize("name", ["charge_in_the_background", "side_by_side"])
def test_a_handler_is_awaited(programs: Programs, topic: str, name: str) -> None:
    """docs/asyncio.md."""
    done: list[int] = []

    async def main() -> None:
        async with (
            aio.connect(programs.servers) as marshal,
            marshal.consumer(programs.group, [topic], start="earliest") as consumer,
        ):

            async def handle(message: Any) -> None:
                done.append(message.offset)
                if len(set(done)) == MESSAGES:
                    consumer.request_stop()

            await asyncio.wait_for(programs.names("asyncio.md", 3)[name](consumer, handle), DEADLINE_S)

    asyncio.run(main())
    assert set(done) == set(range(MESSAGES))
