"""`marshal dead-letters` on Apache Kafka: what it lists, and that it puts each message back once, whatever ends it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from marshal_py.admin import dead_letters
from marshal_py.errors import TopicRefused
from marshal_py.topics.request import GetRequest, StoredMessage
from marshal_py.topics.topic import Topic
from marshal_py.transport import producer as transactions
from marshal_py.transport.kafka import KafkaTransport
from tests.cli.shell import Shell
from tests.support.kafka import Cluster, wait_until

DEADLINE_S = 60.0


class Place:
    """A topic of two partitions, and a dead-letter topic with letters."""

    def __init__(self, kafka: Cluster) -> None:
        self.shell = Shell(kafka.bootstrap)
        self.transport = KafkaTransport(kafka.bootstrap, DEADLINE_S)
        self.orders, self.dlq = f"orders-{time.time_ns()}", f"dlq-{time.time_ns()}"
        self.admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        made = self.admin.create_topics([NewTopic(self.orders, 2, 1), NewTopic(self.dlq, 2, 1)])
        for one in made.values():
            one.result(DEADLINE_S)
        self.producer = Producer({"bootstrap.servers": kafka.bootstrap})

    def letter(self, offset: int, error: str = "Timeout", group: str = "billing", **more: str) -> None:
        """A letter about the message at this offset of partition 1; its key and value are the offset."""
        own = {"topic": self.orders, "partition": "1", "offset": str(offset), "group": group, "message": error, **more}
        headers: list[Any] = [("trace", b"7"), *((f"__dlq.errors.{name}", text.encode()) for name, text in own.items())]
        content = None if "left.out" in more else b"%d" % offset
        self.producer.produce(self.dlq, content, content, 0, headers=headers)
        assert self.producer.flush(DEADLINE_S) == 0

    def redrive(self, *arguments: str) -> Any:
        return self.shell.run("dead-letters", "redrive", self.dlq, *arguments)

    def listed(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.shell.json("dead-letters", "ls", self.dlq, *arguments)
        return found

    def put_back(self) -> list[StoredMessage]:
        wait_until(self._settled, DEADLINE_S, "Kafka shows what was committed some ms after it has said so")
        topic = Topic(self.transport, self.orders)
        try:
            return [one for page in topic.pages(GetRequest(batch=100)) for one in page]
        finally:
            topic.close()

    def _settled(self) -> bool:
        """Whether no transaction is open: the first offset of one would be the end for who reads what is committed."""
        tps = {TopicPartition(self.orders, number): OffsetSpec.latest() for number in (0, 1)}
        asked = [self.admin.list_offsets(tps, isolation_level=level) for level in IsolationLevel]
        committed, written = ([one.result(DEADLINE_S).offset for one in each.values()] for each in asked)
        return committed == written


@pytest.fixture
def place(kafka: Cluster) -> Place:
    return Place(kafka)


def test_letters_are_listed_and_chosen(place: Place) -> None:
    for offset, error in enumerate(("Timeout", "no amount", "Timeout")):
        place.letter(offset, error, **{"delivery.count": "5"})
    place.letter(0, "written again after a crash")
    place.producer.produce(place.dlq, b"no letter")
    place.letter(0, "Timeout", group="audit")
    assert [(one["offset"], one["error"]) for one in place.listed("--group", "billing")] == [
        (0, "written again after a crash"),
        (1, "no amount"),
        (2, "Timeout"),
    ]
    assert [one["offset"] for one in place.listed("--group", "billing", "--error", "Time")] == [0, 2]
    assert [one["error"] for one in place.listed("--key", "1")] == ["no amount"]
    assert place.listed("--until", "2020-01-31T12:00:00Z") == []
    assert len(place.listed("--since", "2020-01-31T12:00:00Z")) == len(place.listed("--since", "-1h")) == 4
    nothing = place.shell.run("dead-letters", "ls", place.dlq, "--error", "no such reason")
    assert nothing.stderr == f"topic {place.dlq!r} has no dead letter that was asked for\n"
    listed = place.shell.run("dead-letters", "ls", place.dlq, "--key", "1").stdout
    assert f"{place.orders}:1@1" in listed
    assert "no amount" in listed
    assert [one["at"]["value"] for one in place.listed("--key", "1")] == ["1"]
    heads, line = place.shell.run("dead-letters", "ls", place.dlq, "--key", "1", "-o", "wide").stdout.splitlines()
    assert heads.split()[:3] == ["letter", "written", "key"]
    assert re.fullmatch(r"0@\d+", line.split()[0]), "what `show` takes"
    assert "no amount" in line


def test_one_letter_is_shown_whole(place: Place) -> None:
    place.letter(0)
    place.letter(7, "no amount", **{"delivery.count": "5"})
    shown = place.shell.run("dead-letters", "show", place.dlq, "0@1").stdout
    why = f"group billing gave {place.orders}:1@7 up at delivery 5: no amount"
    for line in (why, "key    7", "header trace: 7", "header __dlq.errors.offset: 7"):
        assert line in shown.splitlines()
    assert shown.splitlines()[-1] == "7", "the value"
    found = place.shell.json("dead-letters", "show", place.dlq, "0@1")
    assert (found["error"], found["at"]["value"], found["redriven"]) == ("no amount", "7", False)
    assert "has no letter at 1@0" in place.shell.run("dead-letters", "show", place.dlq, "1@0").stderr
    assert place.shell.run("dead-letters", "show", place.dlq, "17").exit_code == 2


def test_each_message_is_put_back_once(place: Place) -> None:
    for offset in range(3):
        place.letter(offset)
    place.letter(1)  # the same message again
    dry = place.redrive("--dry-run")
    assert "3 would be put back, 0 were before: nothing was written" in dry.stderr
    assert place.put_back() == []
    first = place.redrive("--yes", "--key", "1", "--json")
    assert json.loads(first.stdout) == {"topic": place.dlq, "put_back": 1, "before": 0, "lost": []}
    assert place.redrive("--yes").stdout == "2 put back, 1 were before\n"
    assert place.redrive("--yes").stdout == "0 put back, 3 were before\n"
    copies = place.put_back()
    assert [(one.partition, one.key, one.value) for one in copies] == [(1, b"%d" % at, b"%d" % at) for at in (1, 0, 2)]
    assert dict(copies[0].headers) == {"trace": b"7", "__dlq.redriven": f"{place.orders}/1/1 billing".encode()}
    assert [one["redriven"] for one in place.listed()] == [True] * 3


def test_a_message_that_fails_again_is_put_back_again(place: Place) -> None:
    """The group was moved back to it, or its topic was created again: the letter is newer than the marker."""
    place.letter(1)
    assert place.redrive("--yes").stdout == "1 put back, 0 were before\n"
    assert [one["redriven"] for one in place.listed()] == [True]
    place.letter(1, "again")
    assert [(one["error"], one["redriven"]) for one in place.listed()] == [("again", False)]
    assert place.redrive("--yes").stdout == "1 put back, 0 were before\n"
    assert place.redrive("--yes").stdout == "0 put back, 1 were before\n"
    assert [one.key for one in place.put_back()] == [b"1", b"1"]


def test_what_ends_a_run_puts_nothing_back_twice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second transaction fails after its first message: the next run goes on behind the first transaction."""
    monkeypatch.setattr(dead_letters, "AT_ONCE", 2)
    for offset in range(5):
        place.letter(offset)
    write, writes = transactions.TransactionalWriter.write, list[object]()

    def fails(self: Any, *arguments: Any) -> None:
        writes.append(arguments)
        if len(writes) == 6:
            raise ZeroDivisionError
        write(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(transactions.TransactionalWriter, "write", fails)
        with pytest.raises(ZeroDivisionError):
            dead_letters.redrive(place.transport, place.dlq, lambda letter: True)
    assert [one.key for one in place.put_back()] == [b"0", b"1"]
    assert place.redrive("--yes").stdout == "3 put back, 2 were before\n"
    assert [one.key for one in place.put_back()] == [b"%d" % at for at in range(5)]


def test_a_message_that_kafka_refuses_is_named(place: Place) -> None:
    """Its topic was created again with fewer partitions."""
    place.letter(0, partition="7")
    refused = place.redrive("--yes").stderr
    assert f"{place.orders}:7" in refused
    assert "Unknown partition" in refused


def test_a_second_run_ends_the_first(place: Place) -> None:
    place.letter(0)
    first = transactions.TransactionalWriter(place.transport, f"marshal-redrive-{place.dlq}")
    assert place.redrive("--yes").stdout == "1 put back, 0 were before\n"
    with pytest.raises(TopicRefused, match="another writer"), first.transaction():
        first.write(place.orders, b"late", None, [], 1)
    first.close()
    assert [one.value for one in place.put_back()] == [b"0"]


def test_a_letter_without_content_has_that_of_its_message(place: Place) -> None:
    place.producer.produce(place.orders, b"large", b"key", 1)
    assert place.producer.flush(DEADLINE_S) == 0
    place.letter(0, **{"left.out": "key, value and headers"})
    place.letter(7, **{"left.out": "key, value and headers"})
    result = place.redrive("--yes")
    assert result.exit_code == 1
    assert "1 letters have no content, and their messages are gone" in result.stderr
    assert [(one.key, one.value) for one in place.put_back()] == [(b"key", b"large")] * 2
    assert place.redrive("--yes").stdout == "0 put back, 1 were before\n"


def test_what_cannot_be_put_back_is_refused(place: Place) -> None:
    place.letter(0)
    place.letter(0, group="audit")
    result = place.redrive("--yes")
    assert result.exit_code == 1
    assert "audit, billing" in result.stderr
    place.letter(1, topic=place.dlq)
    assert "another one than that of the messages" in place.redrive("--yes", "--key", "1").stderr
    assert place.redrive("--yes", "--group", "nobody").exit_code == 0
    assert place.shell.run("dead-letters", "ls", "missing-topic").exit_code == 1
