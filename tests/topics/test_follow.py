"""Topic.follow, requests for what came later, and the progress of a long read; over a cluster in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marshal_py.errors import BadRequest
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.request import GetRequest, StoredBatch
from marshal_py.topics.topic import Topic
from marshal_py.transport import memory
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

NAME = "users"
T0 = 1_700_000_000_000


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic(NAME, 2)
    return made


def write(broker: MemoryBroker, *messages: tuple[int, str, str | None]) -> None:
    for partition, key, value in messages:
        at_ms = T0 + sum(map(len, broker.topics[NAME]))
        broker.produce(NAME, partition, None if value is None else value.encode(), key.encode(), None, at_ms)


def values(found: Iterator[Any], count: int) -> list[str | None]:
    return [None if message.value is None else message.value.decode() for message in itertools.islice(found, count)]


@pytest.mark.parametrize(
    ("question", "first", "later"),
    [
        ({"batch": 1}, ["1", "2", "3"], ["4", "5", None]),
        ({"offset": 1, "partition": 0}, ["3"], ["5"]),
        ({"start_time": "2023-11-14T22:13:20.002Z"}, ["3"], ["4", "5", None]),
        ({"next_by_key": "a"}, ["1", "3"], ["5"]),
        ({"last_by_key": "a"}, ["3"], ["5"]),
        ({"multi_last": ["*"]}, ["3", "2"], ["5"]),
        ({"multi_last": ["*"], "tombstones": True}, ["3", "2"], ["5", None]),
    ],
)
def test_an_answer_is_followed(
    broker: MemoryBroker, question: dict[str, Any], first: list[str], later: list[str | None]
) -> None:
    """Everything that matches now, and then what comes; of each key its last message."""
    write(broker, (0, "a", "1"), (1, "b", "2"), (0, "a", "3"))
    found = Topic(MemoryTransport(broker), NAME).follow(GetRequest(**question), every_s=0)
    assert values(found, len(first)) == first
    write(broker, (1, "b", "4"), (0, "a", "5"), (1, "b", None))
    assert values(found, len(later)) == later


def test_new_partitions_are_followed(broker: MemoryBroker) -> None:
    found = Topic(MemoryTransport(broker), NAME).follow(GetRequest(batch=5), every_s=0)
    write(broker, (0, "a", "1"))
    assert values(found, 1) == ["1"]
    broker.grow(NAME, 3)
    write(broker, (2, "c", "2"))
    assert values(found, 1) == ["2"]


def test_what_cannot_be_followed(broker: MemoryBroker) -> None:
    """A request with an end, a topic that is another one meanwhile, and too many keys."""
    topic = Topic(MemoryTransport(broker), NAME)
    for end in ({"up_to_offset": {0: 1}}, {"up_to_time": "2026-01-01"}):
        with pytest.raises(BadRequest, match="cannot be followed"):
            next(topic.follow(GetRequest(multi_last=["a"], **end)))
    write(broker, (0, "a", "1"))
    found = topic.follow(GetRequest(batch=5), every_s=0)
    next(found)
    broker.delete_topic(NAME)
    broker.create_topic(NAME, 2)
    with pytest.raises(BadRequest, match="created again"):
        next(found)
    write(broker, *((0, f"k{at}", "v") for at in range(1025)))
    with pytest.raises(BadRequest, match="1025 keys") as many:
        next(topic.follow(GetRequest(multi_last=["*"])))
    assert many.value.status == 413


def test_what_came_later(broker: MemoryBroker) -> None:
    """A program that asks now and then needs no loop: each answer makes the request for what comes after it."""
    topic = Topic(MemoryTransport(broker), NAME)
    write(broker, (0, "a", "1"), (1, "b", "2"))
    first = topic.get(multi_last=["*"])
    write(broker, (0, "a", "3"))
    second = topic.get_page(first.later_request())
    assert [message.value for message in second] == [b"3"]
    assert list(topic.get_page(second.later_request())) == []


def test_what_came_later_begins_where_the_question_did(broker: MemoryBroker) -> None:
    """An offset that does not exist yet stays the beginning, however often the program asks."""
    topic = Topic(MemoryTransport(broker), NAME)
    write(broker, (0, "a", "1"))
    (page,) = topic.pages(GetRequest(offset=3, partition=0, batch=5))
    write(broker, (0, "a", "2"))
    page = topic.get_page(page.later_request())
    assert list(page) == []
    write(broker, (0, "a", "3"), (0, "a", "4"), (0, "a", "5"))
    assert [message.offset for message in topic.get_page(page.later_request())] == [3, 4]


def test_a_time_that_has_not_come_is_waited_for(broker: MemoryBroker) -> None:
    """Per partition: where the answer has begun, an older message counts, as in one answer."""
    topic = Topic(MemoryTransport(broker), NAME)
    write(broker, (0, "a", "before"))
    (page,) = topic.pages(GetRequest(start_time="2023-11-14T22:13:20.002Z", batch=1))  # T0 + 2 ms
    write(broker, (0, "a", "before"), (1, "a", "1"), (1, "a", "2"))
    *_, page = topic.pages(page.later_request())
    assert [message.value for message in page] == [b"2"]
    for partition, value, at_ms in ((0, b"old", T0), (1, b"3", T0), (0, b"4", T0 + 9), (0, b"5", T0)):
        broker.produce(NAME, partition, value, b"a", None, at_ms)
    later = [message.value for page in topic.pages(page.later_request()) for message in page]
    assert later == [b"3", b"4", b"5"]


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize(
    "question", [{"next_by_key": "k29"}, {"next_by_key": "k29", "batch": 5}, {"multi_last": ["*"]}, {"batch": 99}]
)
def test_retention_that_overtakes_a_question(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, question: dict[str, Any], with_index: bool
) -> None:
    """The answer goes on with what is left, once each."""
    monkeypatch.setattr(memory, "READ_MAX", 5)
    write(broker, *((0, f"k{at}", "v") for at in range(30)))
    topic = Topic(
        MemoryTransport(broker), NAME, on_progress=lambda *_: broker.delete_records(TopicPartition(NAME, 0), 20)
    )
    if with_index:
        topic.key_index(tmp_path / "index")
        topic.update_index()
    answer = topic.get(**question)
    found = [message.offset for message in answer] if isinstance(answer, StoredBatch) else [answer.offset]
    assert len(found) == len(set(found))
    assert found[-1] == 29
    topic.close()


def test_progress_is_reported(broker: MemoryBroker) -> None:
    write(broker, *((at % 2, f"k{at}", "v") for at in range(100)))
    seen: list[tuple[int, int]] = []
    with Topic(MemoryTransport(broker), NAME, on_progress=lambda *progress: seen.append(progress)) as topic:
        assert len(topic.get(multi_last=["*"])) == 100
    assert seen == [(50, 100), (100, 100)]
