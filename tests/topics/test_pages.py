"""Pages of the last message of each key, where keys are in several partitions: together they are the one big answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from marshal_py.topics.request import GetRequest, StoredBatch, StoredMessage
from marshal_py.topics.topic import Topic
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

NAME = "users"
T0 = 1_700_000_000_000
KEYS = [f"u{at % 3}.{at}" for at in range(9)]


class Written(NamedTuple):
    partition: int
    offset: int
    key: bytes
    value: bytes | None
    at_ms: int


def write(broker: MemoryBroker, dice: random.Random, count: int) -> list[Written]:
    """Writes messages of few keys to any partition. Their times are mostly in order, sometimes equal or earlier."""
    found = []
    for at in range(count):
        partition, key = dice.randrange(len(broker.topics[NAME])), dice.choice(KEYS).encode()
        value = None if dice.random() < 0.2 else b"%d" % at
        at_ms = T0 + sum(map(len, broker.topics[NAME])) - dice.choice((0, 0, 0, 1, 7))
        offset = len(broker.topics[NAME][partition])
        broker.produce(NAME, partition, value, key, None, at_ms)
        found.append(Written(partition, offset, key, value, at_ms))
    return found


def wanted_of(
    written: list[Written], keys: set[bytes], up_to: dict[int, int], tombstones: bool
) -> list[tuple[int, int, bytes, bytes | None]]:
    """Returns the answer by looking at a list: the last message in each partition, and of these the newest."""
    answer = []
    for key in keys:
        lasts: dict[int, Written] = {}
        for one in written:
            if one.key == key and one.offset <= up_to.get(one.partition, -1):
                lasts[one.partition] = one
        if lasts:
            last = max(lasts.values(), key=lambda one: (one.at_ms, one.partition))
            if last.value is not None or tombstones:
                answer.append((last.partition, last.offset, last.key, last.value))
    return sorted(answer)


def shown(message: StoredMessage) -> tuple[int, int, bytes, bytes | None]:
    return message.partition, message.offset, message.key, message.value


@pytest.mark.parametrize("with_index", [False, True], ids=["reading", "index"])
@pytest.mark.parametrize("compacted", [False, True], ids=["deleted", "compacted"])
@pytest.mark.parametrize("seed", range(25))
def test_the_pages_are_the_one_big_answer(tmp_path: Path, seed: int, compacted: bool, with_index: bool) -> None:
    """ADR-31: This number would be used in subsequent requests as the `up_to_seq` value to ensure batches of multi-gets
    are done around a consistent point in time.

    Each key comes once and with its last message, a deleted key never, and the number of those left counts down to 0,
    whatever is written between two pages.
    """
    dice = random.Random(seed)
    broker = MemoryBroker()
    broker.create_topic(NAME, dice.randrange(1, 4))
    broker.settings[NAME]["cleanup.policy"] = "compact" if compacted else "delete"
    written = write(broker, dice, dice.randrange(1, 40))
    broker.grow(NAME, len(broker.topics[NAME]) + dice.randrange(3))
    written += write(broker, dice, dice.randrange(40))
    topic = Topic(MemoryTransport(broker), NAME)
    if with_index:
        topic.key_index(tmp_path / "keys.db")
    for _ in range(6):
        counts = [len(messages) for messages in broker.topics[NAME]]
        up_to = {number: count - 1 for number, count in enumerate(counts)}
        question: dict[str, Any] = {"tombstones": dice.random() < 0.3}
        if dice.random() < 0.4:
            up_to = {
                number: dice.randrange(-1, count + 3) for number, count in enumerate(counts) if dice.random() < 0.8
            }
            question["up_to_offset"] = up_to
        patterns, keys = dice.choice(
            (
                ([">"], KEYS),
                (["u1.*", "u0.0"], [name for name in KEYS if name.startswith("u1.") or name == "u0.0"]),
                (KEYS[:5], KEYS[:5]),
            )
        )
        wanted = wanted_of(written, {name.encode() for name in keys}, up_to, question["tombstones"])
        size = dice.choice(({"batch": dice.randrange(1, 5)}, {"max_bytes": dice.randrange(1, 60)}))
        pages: list[StoredBatch] = []
        for page in topic.pages(GetRequest(multi_last=patterns, **question, **size)):
            pages.append(page)
            written += write(broker, dice, dice.randrange(3))
        got = [message for page in pages for message in page]
        assert [shown(message) for message in got] == wanted, (patterns, question, size)
        assert [message.num_pending for message in got] == [*range(len(wanted) - 1, -1, -1)]
        assert [page.end.num_pending for page in pages][-1] == 0
    topic.close()


@pytest.mark.parametrize("with_index", [False, True], ids=["reading", "index"])
@pytest.mark.parametrize("newest", [b"NEW", None], ids=["stale", "deleted"])
def test_a_later_page_brings_nothing_old_back(tmp_path: Path, newest: bytes | None, with_index: bool) -> None:
    """The topic grew: the newest message of k is in the first page's partition, an older one in the second's."""
    broker = MemoryBroker()
    broker.create_topic(NAME, 2)
    for at, (partition, key, value) in enumerate(
        [(1, b"k", b"OLD"), (0, b"k", newest), (0, b"a", b"x"), (1, b"b", b"y")]
    ):
        broker.produce(NAME, partition, value, key, None, T0 + at)
    topic = Topic(MemoryTransport(broker), NAME)
    if with_index:
        topic.key_index(tmp_path / "keys.db")
    pages = [message for page in topic.pages(GetRequest(multi_last=[">"], batch=1)) for message in page]
    assert [(message.key, message.value) for message in pages] == [
        *([] if newest is None else [(b"k", newest)]),
        (b"a", b"x"),
        (b"b", b"y"),
    ]
    topic.close()


@pytest.mark.parametrize("with_index", [False, True], ids=["reading", "index"])
def test_what_changed_later_is_the_last_message(tmp_path: Path, with_index: bool) -> None:
    """A message that is written later and is older by its time is not the last one of its key, in no answer."""
    broker = MemoryBroker()
    broker.create_topic(NAME, 2)
    broker.produce(NAME, 0, b"last", b"k", None, T0 + 10)
    topic = Topic(MemoryTransport(broker), NAME)
    if with_index:
        topic.key_index(tmp_path / "keys.db")
    first = topic.get(multi_last=["*"])
    broker.produce(NAME, 1, b"late", b"k", None, T0 + 5)
    broker.produce(NAME, 1, b"new", b"n", None, T0 + 20)
    assert [message.value for message in topic.get_page(first.later_request())] == [b"new"]
    assert topic["k"].value == b"last"
    topic.close()


def test_the_pages_of_a_key_stay_in_its_partition() -> None:
    """The topic grows between two pages, so its partitioner sends the key to another partition from then on."""
    broker = MemoryBroker()
    broker.create_topic(NAME, 1)
    for at in range(5):
        broker.produce(NAME, 0, b"%d" % at, b"k", None, T0 + at)
    topic = Topic(MemoryTransport(broker), NAME, partitioner="murmur2_random")
    got = []
    for page in topic.pages(GetRequest(next_by_key="k", batch=2)):
        got += [message.value for message in page]
        broker.grow(NAME, len(broker.topics[NAME]) + 5)
    assert got == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("key", [None, "k"], ids=["every message", "of a key"])
def test_one_message_always_fits(key: str | None) -> None:
    """ADR-31: as above but limited to a maximum size of messages received in bytes. A message that is larger than that
    comes alone, as in `fetch` of a consumer: otherwise no page would ever get past it.
    """
    broker = MemoryBroker()
    broker.create_topic(NAME, 1)
    for at, value in enumerate((b"1", b"x" * 500, b"3")):
        broker.produce(NAME, 0, value, b"k", None, T0 + at)
    topic = Topic(MemoryTransport(broker), NAME)
    request = GetRequest(next_by_key=key, batch=5, max_bytes=100)
    assert [[message.offset for message in page] for page in topic.pages(request)] == [[0], [1], [2]]
    followed = topic.follow(request, every_s=0)
    assert [next(followed).offset for _ in range(3)] == [0, 1, 2]
    assert len(topic.get(multi_last=["k"], max_bytes=1)) == 1
