"""`max_deliver` and the dead-letter topic: what goes there, when it counts as done, and what a failure does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from marshal_py import Consumer, InvalidOption, Message, TopicMissing
from marshal_py.client.messages import answers
from marshal_py.errors import AccessDenied, MessageTooLarge, PartitionError
from marshal_py.protocol.wire.records import Note
from marshal_py.transport.memory import MemoryWriter
from tests.support.client_fixtures import (
    DEADLINE_S,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    places,
    positions,
    until,
)

PREFIX = "__dlq.errors."


class Letters:
    """Reads a dead-letter topic, by a group of its own."""

    def __init__(self, cluster: TestCluster, topic: str) -> None:
        self.cluster, self.topic = cluster, topic

    def read(self, count: int) -> list[dict[str, Any]]:
        """The next `count` letters of a new group: value, key, the user's headers, and ours without their prefix."""
        with self.cluster.connect() as marshal, joined(marshal, self.cluster.group(), [self.topic]) as consumer:
            found = []
            for message in collect(consumer, count):
                own = {name[len(PREFIX) :]: text for name, text in message.headers if name.startswith(PREFIX)}
                kept = [pair for pair in message.headers if not pair[0].startswith(PREFIX)]
                found.append({"value": message.value, "key": message.key, "headers": kept, **own})
            return found


def notes(cluster: TestCluster, group: str, kind: str = "dead_letter") -> list[tuple[int, str]]:
    return [(note.from_, note.text) for note in cluster.accepted(group, Note) if note.kind == kind]


def with_letters(marshal: Any, group: str, topic: str, letters: str, max_deliver: int = 2, **options: Any) -> Consumer:
    return joined(marshal, group, [topic], max_deliver=max_deliver, dead_letter_topic=letters, **options)


def test_a_message_that_is_given_back_too_often_goes_to_the_dead_letter_topic(cluster: TestCluster) -> None:
    """D15: its headers say why, from where and how often; its own are kept; it is done once Kafka has the letter.

    ACKS: `max_deliver` with a dead-letter topic: headers say why, from where and how often.
    """
    topic, letters, group = cluster.topic(), cluster.topic(), cluster.group()
    cluster.put(topic, 0, b"zero")
    cluster.put(topic, 0, b"one", b"key", [("trace", b"7"), (f"{PREFIX}topic", b"an older letter's")])
    cluster.put(topic, 0, b"two")
    with cluster.connect() as marshal:
        with with_letters(marshal, group, topic, letters) as consumer:
            seen = []
            for message in consumer:
                seen.append((message.offset, message.delivery_count))
                assert message.nak(0) if message.offset == 1 else message.ack()
                if len(seen) == 4:
                    break
            assert sorted(seen) == [(0, 1), (1, 1), (1, 2), (2, 1)]
            until(lambda: positions(consumer) == {0: 3}, "the letter is acknowledged")
            figures = marshal.metrics().consumers[0]
            assert (figures.dead_letters, figures.messages_acked, figures.in_flight) == (1, 3, 0)
            until(lambda: notes(cluster, group), "a note in the log")
        assert notes(cluster, group) == [(1, f"in {letters}: given back at delivery_count 2")]
    assert Letters(cluster, letters).read(1) == [
        {
            "value": b"one",
            "key": b"key",
            "headers": [("trace", b"7")],
            "topic": topic.encode(),
            "partition": b"0",
            "offset": b"1",
            "group": group.encode(),
            "delivery.count": b"2",
            "message": b"given back at delivery_count 2",
        }
    ]


def test_a_message_that_is_ended_goes_there_with_its_reason(cluster: TestCluster) -> None:
    """D15: `term` with a dead-letter topic; no `max_deliver` is needed. A stop waits for the letter."""
    topic, letters, group = cluster.topic(), cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 3)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic], dead_letter_topic=letters) as consumer:
            batch = consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S)
            assert batch.term("no JSON")
            assert not batch.term("again"), "they are on their way"
            assert not batch.nak(0)
        found = Letters(cluster, letters).read(3)
        assert [(one["offset"], one["message"], one["delivery.count"]) for one in found] == [
            (b"0", b"no JSON", b"1"),
            (b"1", b"no JSON", b"1"),
            (b"2", b"no JSON", b"1"),
        ]
        cluster.fill(topic, 0, 1, first=3)
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 1)) == [(0, 3)]


def test_what_owners_left_unanswered_too_often_is_not_delivered_again(memory: MemoryTestCluster) -> None:
    """D15, D11: the log counts the deliveries of earlier owners, at the position and above it."""
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 6)
    with memory.connect() as marshal:
        for _ in range(2):
            with joined(marshal, group, [topic]) as consumer:
                batch = consumer.fetch(6, min_messages=6, expires_s=DEADLINE_S)
                assert len(batch) == 6, "twice they are delivered"
                for message in batch:
                    if message.offset in (3, 5):
                        message.nak(3_600)
        memory.fill(topic, 0, 2, first=6)
        with with_letters(marshal, group, topic, letters) as consumer:
            assert places(collect(consumer, 2)) == [(0, 6), (0, 7)]
            until(lambda: positions(consumer) == {0: 8}, "all letters are written")
            figures = marshal.metrics().consumers[0]
            assert (figures.dead_letters, figures.messages_delivered, figures.messages_acked) == (6, 2, 8)
    found = Letters(memory, letters).read(6)
    assert [(one["offset"], one["message"]) for one in found] == [
        (b"%d" % offset, b"the log counts 2 deliveries, which may be too many, and has no ack") for offset in range(6)
    ]


def test_an_iteration_leaves_out_what_is_exhausted(memory: MemoryTestCluster) -> None:
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            messages = collect(consumer, 5, ack=False)
            for message in messages:
                if message.offset in (1, 2, 4):
                    message.ack()
        with with_letters(marshal, group, topic, letters, max_deliver=1) as consumer:
            memory.fill(topic, 0, 1, first=5)
            assert next(iter(consumer)).offset == 5
            until(lambda: positions(consumer) == {0: 5}, "0 and 3 are in the dead-letter topic")
    assert [one["offset"] for one in Letters(memory, letters).read(2)] == [b"0", b"3"]


# --- a letter counts when Kafka has it


class Gate:
    """Stops the writer before it flushes, until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

        def flush(writer: MemoryWriter, timeout_s: float) -> None:
            self.reached.set()
            assert self.open.wait(DEADLINE_S)

        monkeypatch.setattr(MemoryWriter, "flush", flush)


def test_it_is_unfinished_until_the_letter_is_acknowledged(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead letter is acknowledged by Kafka before its offset counts as finished; a hand-over waits for it.

    ACKS: A dead letter is acknowledged by Kafka before its offset counts as finished.
    """
    topic, letters = memory.topic(), memory.topic()
    memory.fill(topic, 0, 2)
    gate = Gate(monkeypatch)
    with memory.connect() as marshal, with_letters(marshal, memory.group(), topic, letters) as consumer:
        first, second = collect(consumer, 2, ack=False)
        second.ack()
        assert first.term("bad")
        assert gate.reached.wait(DEADLINE_S)
        claim = next(iter(consumer._member.claims.values()))
        assert positions(consumer) == {0: 0}
        assert (claim.tracker.oldest(), claim.tracker.held) == (None, 1)  # type: ignore[union-attr]
        gate.open.set()
        until(lambda: positions(consumer) == {0: 2}, "it counts now")
        assert claim.tracker.held == 0  # type: ignore[union-attr]


def test_with_one_pending_nothing_is_delivered_before_the_letter_is_acknowledged(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the message was delivered by an earlier owner alone, and the letter makes the next one the first."""
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    gate = Gate(monkeypatch)
    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            assert places(collect(consumer, 1, ack=False)) == [(0, 0)]
        with with_letters(marshal, group, topic, letters, max_deliver=1, max_acks_pending=1) as consumer:
            found: list[Message] = []

            def look() -> None:
                found.extend(consumer.fetch(1, expires_s=0.0))

            until(lambda: (look(), gate.reached.is_set())[1], "the letter is on its way")
            look()
            assert found == []
            gate.open.set()
            assert places(collect(consumer, 1)) == [(0, 1)]


def test_a_crash_before_the_acknowledgement_repeats_the_letter_and_loses_nothing(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the letter and its acknowledgement may repeat the letter.

    ACKS: A crash between the two may repeat it.
    """
    monkeypatch.setattr("marshal_py.client.membership.LETTERS_TIMEOUT_S", 0.05)
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        with monkeypatch.context() as patch:
            gate = Gate(patch)
            with with_letters(marshal, group, topic, letters) as consumer:
                assert collect(consumer, 1, ack=False)[0].term("bad")
                assert gate.reached.wait(DEADLINE_S)
            gate.open.set()
        with with_letters(marshal, group, topic, letters) as successor:
            again = collect(successor, 1, ack=False)[0]
            assert again.delivery_count == 2
            again.term("bad")
            until(lambda: positions(successor) == {0: 1}, "the second letter counts")
    assert [one["delivery.count"] for one in Letters(memory, letters).read(2)] == [b"1", b"2"]


def test_a_letter_that_is_refused_stops_no_other_and_is_tried_again(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never silently: an event with the reason, and the message stays unfinished.

    ACKS: What the cluster refuses is tried again, and an event says why.
    """
    monkeypatch.setattr(answers, "RETRY_S", 0.01)
    monkeypatch.setattr(answers, "RETRY_S_MAX", 0.01)
    refuses = threading.Event()
    refuses.set()
    write = MemoryWriter.write

    def refuse(writer: MemoryWriter, topic: str, value: bytes | None, *rest: Any) -> None:
        if value == b"0" and refuses.is_set():
            raise PartitionError(topic, 0, "the test says so")
        write(writer, topic, value, *rest)

    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    monkeypatch.setattr(MemoryWriter, "write", refuse)
    with memory.connect() as marshal, with_letters(marshal, group, topic, letters) as consumer:
        for message in collect(consumer, 3, ack=False):
            message.term("bad")
        until(lambda: {offset for offset, _ in notes(memory, group)} >= {1, 2}, "the others are written")
        assert positions(consumer) == {0: 0}
        failed = [event for event in consumer.events() if event.kind == "dead_letter_failed"]
        assert [(event.offset, "the test says so" in event.text) for event in failed] == [(0, True)]
        refuses.clear()
        until(lambda: positions(consumer) == {0: 3}, "it is tried again")


def test_a_message_too_large_for_the_topic_gets_a_letter_without_its_content(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D15: the position does not stay for ever. The letter says what was left out, and where it is.

    The two that the topic takes come whole, though all three were written at once.
    """
    write = MemoryWriter.write

    def refuse(writer: MemoryWriter, topic: str, value: bytes | None, *rest: Any) -> None:
        if len(value or b"") > 1_000:
            raise MessageTooLarge("a message", len(value or b""), "the test says so")
        write(writer, topic, value, *rest)

    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    for value in (b"x" * 5_000, b"one", b"two"):
        memory.put(topic, 0, value, b"key", [("trace", b"7")])
    monkeypatch.setattr(MemoryWriter, "write", refuse)
    with memory.connect() as marshal, with_letters(marshal, group, topic, letters) as consumer:
        assert consumer.fetch(3, min_messages=3, expires_s=DEADLINE_S).term("bad")
        until(lambda: positions(consumer) == {0: 3}, "all of them are done")
        assert not [event for event in consumer.events() if event.kind == "dead_letter_failed"]
        found = sorted(Letters(memory, letters).read(3), key=lambda letter: letter["offset"])
        assert [letter["value"] for letter in found] == [None, b"one", b"two"]
        assert found[0] == {
            "value": None,
            "key": None,
            "headers": [],
            "topic": topic.encode(),
            "partition": b"0",
            "offset": b"0",
            "group": group.encode(),
            "delivery.count": b"1",
            "message": b"bad",
            "left.out": b"key, value (5000 bytes) and headers: the test says so",
            "topic.id": str(memory.broker.ids[topic]).encode(),
        }
        assert found[1]["headers"] == [("trace", b"7")]
        until(lambda: len(notes(memory, group)) == 3, "notes in the log")
    assert (0, f"in {letters}, without its content, which is too large for it: bad") in notes(memory, group)


def test_a_topic_that_takes_not_even_that_is_reported_and_tried_again(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "RETRY_S", 0.01)
    monkeypatch.setattr(answers, "RETRY_S_MAX", 0.01)
    write, refuses = MemoryWriter.write, threading.Event()
    refuses.set()

    def refuse(*arguments: Any) -> None:
        if refuses.is_set():
            raise MessageTooLarge("a message", 500, "the test says so")
        write(*arguments)

    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    monkeypatch.setattr(MemoryWriter, "write", refuse)
    with memory.connect() as marshal, with_letters(marshal, group, topic, letters) as consumer:
        collect(consumer, 1, ack=False)[0].term("bad")
        failed: list[str] = []
        until(
            lambda: failed.extend(e.text for e in consumer.events() if e.kind == "dead_letter_failed") or failed,
            "an event",
        )
        assert "500 bytes is too large" in failed[0]
        refuses.clear()
        until(lambda: positions(consumer) == {0: 1}, "it is tried again")


def test_the_reason_in_a_letter_has_500_characters_at_most(memory: MemoryTestCluster) -> None:
    """ACKS: its first 500 characters are in a dead letter."""
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, with_letters(marshal, group, topic, letters) as consumer:
        collect(consumer, 1, ack=False)[0].term("\u00e9" * 501)
        until(lambda: positions(consumer) == {0: 1}, "the letter is written")
    assert Letters(memory, letters).read(1)[0]["message"].decode() == "\u00e9" * 500


def test_null_headers_stay_null_in_a_letter(memory: MemoryTestCluster) -> None:
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.put(topic, 0, b"one", b"key", [("trace", None), ("empty", b"")])
    with memory.connect() as marshal, with_letters(marshal, group, topic, letters) as consumer:
        message = collect(consumer, 1, ack=False)[0]
        assert message.headers == [("trace", None), ("empty", b"")]
        message.term("bad")
        until(lambda: positions(consumer) == {0: 1}, "the letter is written")
    assert Letters(memory, letters).read(1)[0]["headers"] == [("trace", None), ("empty", b"")]


def test_an_ack_that_comes_meanwhile_counts(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RETRY_S", 0.01)
    topic, letters, group = memory.topic(), memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    monkeypatch.setattr(MemoryWriter, "write", _denied)
    with memory.connect() as marshal, with_letters(marshal, group, topic, letters) as consumer:
        message = collect(consumer, 1, ack=False)[0]
        message.term("bad")
        assert message.ack()
        assert positions(consumer) == {0: 1}
        assert not consumer._driver.queue.writing


def _denied(writer: MemoryWriter, topic: str, *_: object) -> None:
    raise AccessDenied("User:test", "Write", "topic", topic)


def test_a_stop_does_not_wait_long_for_a_cluster_that_refuses(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marshal_py.client.membership.LETTERS_TIMEOUT_S", 0.1)
    topic, letters = memory.topic(), memory.topic()
    memory.fill(topic, 0, 1)
    monkeypatch.setattr(MemoryWriter, "write", _denied)
    with memory.connect() as marshal:
        consumer = with_letters(marshal, memory.group(), topic, letters)
        collect(consumer, 1, ack=False)[0].term("bad")
        began = time.monotonic()
        consumer.stop(DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S, "it gave up before its own time was over"
        worker = consumer._queue.answers.letters._worker  # type: ignore[union-attr]
        assert worker is not None
        until(lambda: not worker.alive, "the thread ends")


# --- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_deliver": 5}, "name a dead_letter_topic as well"),
        ({"max_deliver": 0, "dead_letter_topic": "d"}, "max_deliver=0 .* from 1 to"),
        ({"max_deliver": True, "dead_letter_topic": "d"}, "max_deliver=True"),
        ({"max_deliver": 2.5, "dead_letter_topic": "d"}, "max_deliver=2.5"),
        ({"delivery": "at_most_once", "max_deliver": 5}, "max_deliver=5 .* nothing is delivered again"),
        ({"delivery": "at_most_once", "dead_letter_topic": "d"}, "dead_letter_topic='d' .* nothing is delivered again"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    memory: MemoryTestCluster, options: dict[str, Any], words: str
) -> None:
    """`max_deliver` is refused by name in at-most-once groups.

    ACKS: In at-most-once groups `max_deliver` is refused by name.
    """
    with memory.connect() as marshal, pytest.raises(InvalidOption, match=words):
        joined(marshal, memory.group(), [memory.topic()], **options)


def test_a_dead_letter_topic_must_exist_and_be_another_one(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal:
        with pytest.raises(TopicMissing, match="no-such-topic"):
            with_letters(marshal, group, topic, "no-such-topic")
        for wrong in (topic, marshal.coordination_topic):
            with pytest.raises(InvalidOption, match=f"dead_letter_topic='{wrong}' .* another topic"):
                with_letters(marshal, group, topic, wrong)
        with pytest.raises(InvalidOption, match="plans ranges"):
            marshal.planner(group, [topic], dead_letter_topic=memory.topic())
        workers = [thread.name for thread in threading.enumerate() if thread.name == f"marshal-worker-{group}"]
        assert not workers, "what is refused leaves nothing behind"
