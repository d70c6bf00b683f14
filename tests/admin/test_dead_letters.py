"""Dead letters by their topic: which of several about one message counts, and whether that one was put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from marshal_py.admin import dead_letters
from marshal_py.admin.dead_letters import HEADERS, REDRIVEN, read, redrive
from marshal_py.transport.memory import MemoryTransport
from tests.support.client_fixtures import MemoryTestCluster


def test_clocks_that_differ_do_not_decide_what_was_put_back() -> None:
    """The message fails, is put back, and fails again at a consumer whose clock is a second behind the admin's."""
    memory = MemoryTestCluster()
    topic, letters = memory.topic(), memory.topic()
    named = {"topic": topic, "partition": "0", "offset": "0", "group": "g"}
    own: list[tuple[str, bytes | None]] = [(HEADERS + name, value.encode()) for name, value in named.items()]
    marker: list[tuple[str, bytes | None]] = [(REDRIVEN, f"{topic}/0/0 g".encode())]

    def found() -> list[tuple[int, bool]]:
        return [(one.at.offset, one.redriven) for one in read(MemoryTransport(memory.broker), letters).letters]

    memory.local.produce(letters, b"v", partition=0, headers=own, timestamp_ms=1_000)
    assert found() == [(0, False)]
    memory.local.produce(letters, None, partition=0, headers=marker, timestamp_ms=10_000)
    assert found() == [(0, True)]
    memory.local.produce(letters, b"v", partition=0, headers=own, timestamp_ms=9_000)
    assert found() == [(2, False)]


class Transactions:
    """Stands for a TransactionalWriter, which the cluster in memory has not."""

    def __init__(self, transport: MemoryTransport, _: str) -> None:
        self._writer = transport.writer()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield
        self._writer.flush(1.0)

    def write(self, topic: str, value: Any, key: Any, headers: Any, partition: int) -> None:
        self._writer.write(topic, value, key, headers, partition)

    def close(self) -> None:
        self._writer.close()


def test_a_letter_without_content_is_not_filled_from_another_topic_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic was created again, and has another message at the offset; or fewer partitions."""
    monkeypatch.setattr(dead_letters, "TransactionalWriter", Transactions)
    memory = MemoryTestCluster()
    topic, letters, transport = memory.topic(2), memory.topic(), MemoryTransport(memory.broker)
    named = {"topic": topic, "offset": "0", "group": "g", "left.out": "all", "topic.id": str(memory.broker.ids[topic])}
    for number in range(2):
        memory.local.produce(topic, b"large", partition=number)
        own = [(HEADERS + name, value.encode()) for name, value in {**named, "partition": str(number)}.items()]
        memory.local.produce(letters, None, partition=0, headers=own)

    put_back, lost, *_ = redrive(transport, letters, lambda letter: letter.partition == 0)
    assert ([one.message for one in put_back], lost) == ([f"{topic}/0/0 g"], [])
    memory.broker.delete_topic(topic)
    memory.broker.create_topic(topic, 1)
    memory.local.produce(topic, b"another", partition=0)
    put_back, lost, *_ = redrive(transport, letters, lambda letter: letter.partition == 1)
    assert (put_back, [one.message for one in lost]) == ([], [f"{topic}/1/0 g"])
    memory.local.produce(letters, None, partition=0, headers=[*own[:-1], (f"{HEADERS}partition", b"0")])
    put_back, lost, *_ = redrive(transport, letters, lambda letter: letter.partition == 0)
    assert (put_back, [one.message for one in lost]) == ([], [f"{topic}/0/0 g"])


def test_letters_behind_those_that_are_held_at_once_come_in_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "TransactionalWriter", Transactions)
    monkeypatch.setattr(dead_letters, "LETTERS_MAX", 3)
    memory = MemoryTestCluster()
    topic, letters, transport = memory.topic(), memory.topic(), MemoryTransport(memory.broker)
    named = {"topic": topic, "partition": "0", "group": "g"}
    for number in range(8):
        own = [(HEADERS + name, value.encode()) for name, value in {**named, "offset": str(number)}.items()]
        memory.local.produce(letters, b"v", partition=0, headers=own)
    found = read(transport, letters)
    assert ([one.offset for one in found.letters], found.before, found.more) == ([0, 1, 2], 0, True)
    told = []
    for _ in range(4):
        left = read(transport, letters, left=True)
        done = redrive(transport, letters, lambda _: True)
        assert [one.offset for one in done.put_back] == [one.offset for one in left.letters]
        told.append(([one.offset for one in done.put_back], left.before, done.more))
    assert told == [([0, 1, 2], 0, True), ([3, 4, 5], 3, True), ([6, 7], 3, False), ([], 3, False)]
