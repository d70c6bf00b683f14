"""`nak` and `term`: a message comes again later, or never."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from marshal_py import Advisory, Consumer, InvalidOption, Message
from marshal_py.client.delivery.buffers import redeliveries_of
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.messages import answers
from marshal_py.client.messages.answers import NAK_DELAY_DOUBLED_S_MAX, NAK_DELAY_S_MAX, grown_delay_s
from marshal_py.client.metrics import ConsumerMetrics
from marshal_py.errors import NeedsAtLeastOnce
from marshal_py.protocol import claims
from marshal_py.protocol.wire.records import Note
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

NEVER_S = 3_600.0  # longer than any test


def one(consumer: Consumer) -> Message:
    message = consumer.next(expires_s=DEADLINE_S)
    assert message is not None
    return message


def metrics_of(consumer: Consumer, marshal: Any) -> ConsumerMetrics:
    group = consumer.cached_info().group
    found: ConsumerMetrics = next(one for one in marshal.metrics().consumers if one.group == group)
    return found


def events_of(consumer: Consumer, kind: str) -> list[Advisory]:
    return [event for event in consumer.events() if event.kind == kind]


def test_a_message_that_is_given_back_comes_again(cluster: TestCluster) -> None:
    """`nak`: redelivered to the same owner, order of the others kept, `delivery_count` grows.

    ACKS: The order of the others is kept. `delivery_count` grows with each delivery.
    """
    topic = cluster.topic()
    cluster.fill(topic, 0, 6)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        seen = []
        for message in consumer:
            seen.append((message.offset, message.delivery_count, message.value))
            if message.offset == 1 and message.delivery_count < 3:
                assert message.nak(0)
            else:
                message.ack()
            if len(seen) == 8:
                break
        others = [offset for offset, _, _ in seen if offset != 1]
        assert others == [0, 2, 3, 4, 5]
        assert [(count, value) for offset, count, value in seen if offset == 1] == [(1, b"1"), (2, b"1"), (3, b"1")]
        until(lambda: positions(consumer) == {0: 6}, "everything is done")
        figures = metrics_of(consumer, marshal)
        assert (figures.naks, figures.redelivered, figures.delayed, figures.in_flight) == (2, 2, 0, 0)
        assert figures.messages_acked == 6


def test_it_comes_after_its_delay_and_nothing_waits_for_it(memory: MemoryTestCluster) -> None:
    """ACKS: `nak(delay_s)`: the message is delivered again to the same owner after the delay."""
    with memory.reading(4) as consumer:
        first = one(consumer)
        assert first.nak(delay_s=0.3)
        due = time.monotonic() + 0.3
        assert places(collect(consumer, 3)) == [(0, 1), (0, 2), (0, 3)]
        assert positions(consumer) == {0: 0}, "it is unfinished"
        again = one(consumer)
        assert time.monotonic() >= due
        assert (again.offset, again.delivery_count, again.token) == (0, 2, first.token)
        again.ack()
        assert positions(consumer) == {0: 4}


@pytest.mark.parametrize("how", ["message", "part", "batch"])
def test_parts_and_batches_are_given_back_as_a_whole(memory: MemoryTestCluster, how: str) -> None:
    """What was done before stays done, and what follows each other shares a part when it comes again."""
    with memory.reading(5) as consumer:
        batch = consumer.fetch(5, min_messages=5, expires_s=DEADLINE_S)
        messages = list(batch)
        assert len(messages) == 5
        messages[2].ack()
        if how == "message":
            assert [message.nak(0) for message in messages] == [True, True, False, True, True]
        else:
            assert (batch.parts[0] if how == "part" else batch).nak(0)
        again = consumer.fetch(4, min_messages=4, expires_s=DEADLINE_S)
        assert [part.offsets for part in again.parts] == [[0, 1], [3, 4]]
        assert {message.delivery_count for message in again} == {2}
        again.ack()
        assert positions(consumer) == {0: 5}


def test_the_next_owner_gets_what_waits_at_once(cluster: TestCluster) -> None:
    """D14: the delay is the owner's alone. The Release does not wait for it, and has the count."""
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 4)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            messages = collect(consumer, 4, ack=False)
            messages[2].nak(0)
            again = one(consumer)
            assert again.offset == 2
            assert again.nak(NEVER_S)
            messages[0].nak(NEVER_S)
            assert messages[1].ack()
            assert messages[3].ack()
        with joined(marshal, group, [topic]) as successor:
            found = collect(successor, 2)
            assert [(message.offset, message.delivery_count) for message in found] == [(0, 2), (2, 3)]


def test_a_drain_does_not_wait_for_what_waits(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic])
        assert one(consumer).nak(NEVER_S)
        consumer.drain(timeout_s=NEVER_S)
        assert consumer.cached_info().closed


def test_an_ack_ends_the_wait_and_a_nak_of_what_is_done_does_nothing(memory: MemoryTestCluster) -> None:
    with memory.reading(2) as consumer:
        first, second = collect(consumer, 2, ack=False)
        assert first.nak(0)
        assert first.ack()
        assert not first.nak(0)
        assert consumer.next(expires_s=0.1) is None
        second.ack()
        assert positions(consumer) == {0: 2}


def test_a_nak_of_an_earlier_delivery_does_nothing(memory: MemoryTestCluster) -> None:
    """Another handler has the message. An ack of the earlier object is one of the message."""
    with memory.reading(4) as consumer:
        batch = consumer.fetch(4, min_messages=4)
        assert batch[1].nak(0)
        again = one(consumer)
        assert (again.offset, again.delivery_count) == (1, 2)
        assert not batch[1].nak(0)
        assert batch.nak(0), "of the other three"
        others = consumer.fetch(4, min_messages=3)
        assert [(message.offset, message.delivery_count) for message in others] == [(0, 2), (2, 2), (3, 2)]
        assert again.nak(0)
        assert [(message.offset, message.delivery_count) for message in consumer.fetch(1)] == [(1, 3)]
        assert not again.nak(0)
        assert others.nak(0)
        mixed = consumer.fetch(3, min_messages=3)
        assert mixed.nak(0), "parts of different deliveries"
        assert again.ack()
        assert [message.offset for message in consumer.fetch(4, expires_s=DEADLINE_S, min_messages=3)] == [0, 2, 3]
        assert consumer.next(0.0) is None


def test_a_late_answer_does_nothing(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        batch = consumer.fetch(1, expires_s=DEADLINE_S)
        consumer.stop()
        assert (batch.nak(), batch.term("too late")) == (False, False)
        with joined(marshal, group, [topic]) as successor:
            assert one(successor).delivery_count == 2
        assert [note for note in memory.accepted(group, Note) if note.kind == "terminated"] == []


def test_what_an_exception_kept_from_the_user_comes_again(memory: MemoryTestCluster) -> None:
    """Ctrl-C inside a fetch: the message is due again, and its count did not grow."""
    with memory.reading(1) as consumer:
        assert one(consumer).nak(0)
        queue, context = consumer._queue, consumer._context
        with context.lock:
            queue.begin()
            assert [part.offsets for part, _ in queue.take(1, None, context.clock.now())] == [[0]]
            queue.take_back()
        again = one(consumer)
        assert (again.offset, again.delivery_count) == (0, 2)


def test_an_ack_after_a_nak_counts_before_anything_has_noted_it(memory: MemoryTestCluster) -> None:
    """Both ways to take what is due, right after the ack."""
    with memory.reading(1) as consumer:
        message = one(consumer)
        assert (message.nak(0), message.ack()) == (True, True)
        queue, context, claim = consumer._queue, consumer._context, message._delivered.claim
        found = redeliveries_of(claim)
        assert isinstance(queue, DeliveryQueue)
        assert found is not None
        assert [*queue.redelivering.deliver(claim, found, context.clock.now())] == []

    with memory.reading(1) as consumer:
        message = one(consumer)
        assert (message.nak(0), message.ack()) == (True, True)
        queue, context = consumer._queue, consumer._context
        with context.lock:
            queue.begin()
            assert [part.offsets for part, _ in queue.take(1, None, context.clock.now())] == []


def test_bytes_bound_what_comes_again(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    for _ in range(4):
        memory.put(topic, 0, b"x" * 1_000)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        for message in collect(consumer, 4, ack=False):
            message.nak(0)
        sizes = []
        while sum(sizes) < 4:
            batch = consumer.fetch(10, min_messages=10, max_bytes=2_500, expires_s=0.05)
            sizes.append(len(batch))
            batch.ack()
        assert max(sizes) == 2


# --- bounds


def test_a_storm_stops_what_is_new_and_is_reported(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nak storm never stops a partition silently: event and metric. Other partitions continue.

    ACKS: A nak storm never stops a partition silently: an event and a metric say so.
    """
    monkeypatch.setattr(claims, "WAITING_MAX", 5)
    topic = memory.topic(2)
    memory.fill(topic, 0, 9)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        messages = collect(consumer, 5, ack=False)
        for message in messages:
            message.nak(NEVER_S)
        assert consumer.fetch(10, min_messages=10, expires_s=0.1).parts == []
        memory.fill(topic, 1, 3)
        assert places(collect(consumer, 3)) == [(1, 0), (1, 1), (1, 2)]
        until(lambda: len(found := events_of(consumer, "nak_storm")) == 1 and "5 messages" in found[0].text, "an event")
        figures = metrics_of(consumer, marshal)
        assert (figures.delayed, {one.partition: one.delayed for one in figures.partitions}) == (5, {0: 5, 1: 0})
        assert consumer._queue.deliverable(consumer._queue.clock_now()) == 0
        messages[0].ack()
        found = collect(consumer, 4)
        assert places(found) == [(0, 5), (0, 6), (0, 7), (0, 8)]


@pytest.mark.bounds(prefetch=4)
def test_an_iteration_goes_on_after_a_storm(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "WAITING_MAX", 3)
    with memory.reading(30) as consumer:
        done = []
        for message in consumer:
            if message.delivery_count == 1:
                message.nak(0.01)
                continue
            message.ack()
            done.append(message.offset)
            if len(done) == 30:
                break
        assert sorted(done) == [*range(30)]


def test_a_poison_message_is_reported(memory: MemoryTestCluster) -> None:
    """A message that is given back after many deliveries is visible by event and metric, here and in the log.

    ACKS: A poison message is reported by an event and a metric.
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        for _ in range(11):
            assert one(consumer).nak(0)
        texts = [
            "5 deliveries, and its handler gave it back again",
            "10 deliveries, and its handler gave it back again",
        ]

        def noted() -> bool:
            return [note.text for note in memory.accepted(group, Note) if note.kind == "poison_message"] == texts

        until(noted, "two notes in the log")
        assert [(event.offset, event.text) for event in events_of(consumer, "poison_message")] == [
            (0, text) for text in texts
        ]
        figures = metrics_of(consumer, marshal)
        assert (figures.naks, [one.most_deliveries for one in figures.partitions]) == (11, [11])


def test_a_message_that_owners_did_not_finish_is_reported_with_the_claim(memory: MemoryTestCluster) -> None:
    """D11: each owner counts a delivery, so a message that ends their processes is known from the fourth claim on."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect() as marshal:
        for deliveries in range(4):
            with joined(marshal, group, [topic]) as consumer:
                until(lambda consumer=consumer: consumer.cached_info().claims, "the partition is ours")
                figures = metrics_of(consumer, marshal)
                assert [one.most_deliveries for one in figures.partitions] == [deliveries]
                reported = [
                    (event.topic, event.partition, event.offset) for event in events_of(consumer, "poison_message")
                ]
                assert reported == ([(topic, 0, 0)] if deliveries == 3 else [])
                assert one(consumer).delivery_count == deliveries + 1


def test_the_metric_of_a_poison_message_is_of_the_one_that_comes_most_often(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)

    def figure() -> int:
        (found,) = marshal.metrics().consumers
        return found.partitions[0].most_deliveries

    with memory.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            until(lambda: consumer.cached_info().claims, "the partition is ours")
            assert figure() == 0
            first, poison, last = collect(consumer, 3, ack=False)
            assert figure() == 1
            for count in (2, 3, 4):
                poison.nak(0)
                assert figure() == count - 1, "it waits"
                poison = one(consumer)
                assert (poison.offset, figure()) == (1, count)
            last.nak(0)
            one(consumer).ack()
            assert figure() == 4
            poison.ack()
            assert figure() == 1
            first.nak(0)
            first = one(consumer)
            assert figure() == 2
        with joined(marshal, group, [topic]) as successor:
            until(lambda: successor.cached_info().claims, "the partition is the next owner's")
            assert figure() == 2
            assert one(successor).delivery_count == 3
            assert figure() == 3


def test_the_default_delay_grows() -> None:
    assert [grown_delay_s(count) for count in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert grown_delay_s(100) == NAK_DELAY_DOUBLED_S_MAX


def test_without_a_delay_it_grows_with_the_deliveries(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    monkeypatch.setattr(answers, "grown_delay_s", lambda count: counts.append(count) or 0.0)
    with memory.reading(1) as consumer:
        for _ in range(3):
            one(consumer).nak()
        assert counts == [1, 2, 3]


# --- term


def test_a_terminated_message_never_comes_again(cluster: TestCluster) -> None:
    """`term(reason)`: never again; an advisory names the reason.

    ACKS: `term(reason)`: the message never comes again, and an advisory says why.
    """
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 3)
    with cluster.connect() as marshal:
        with joined(marshal, group, [topic]) as consumer:
            messages = collect(consumer, 3, ack=False)
            assert messages[0].term("no JSON")
            assert not messages[0].term("no JSON")
            assert not messages[0].nak(0)
            assert messages[2].nak(NEVER_S)
            assert messages[2].term()
            messages[1].ack()
            assert positions(consumer) == {0: 3}
            until(lambda: len(terminations(cluster, group)) == 2, "two notes in the log")
            assert metrics_of(consumer, marshal).terminated == 2
        assert terminations(cluster, group) == [(topic, 0, 0, 1, "no JSON"), (topic, 0, 2, 3, "")]
        with joined(marshal, group, [topic]) as successor:
            cluster.fill(topic, 0, 1, first=3)
            assert places(collect(successor, 1)) == [(0, 3)]


def terminations(cluster: TestCluster, group: str) -> list[tuple[str, int, int, int, str]]:
    notes = [note for note in cluster.accepted(group, Note) if note.kind == "terminated"]
    return [(note.topic, note.partition, note.from_, note.to, note.text) for note in notes]


def test_many_terminations_are_few_records(memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Note is a record that every member reads: after the first few of a period one stands for the rest."""
    monkeypatch.setattr(answers, "NOTES_EACH_MAX", 2)
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 500)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        consumer._queue.answers.reports.end_period()
        with consumer._context.lock:
            consumer._queue.answers.reports._left = 2
        messages = collect(consumer, 500, ack=False)
        with consumer._context.outbox, consumer._context.lock:  # no period ends meanwhile
            for message in messages:
                message.term(f"bad {message.offset}")

        def spanned() -> bool:
            return sum(to - start for _, _, start, to, _ in terminations(memory, group)) == 500

        until(spanned, "all are reported")
        found = terminations(memory, group)
        assert len(found) == 3
        assert found[-1] == (topic, 0, 2, 500, "498 messages of this range; the last one: bad 499")
        assert positions(consumer) == {0: 500}


# --- bad input


@pytest.mark.parametrize("delay_s", [-1, NAK_DELAY_S_MAX + 1, float("nan"), float("inf"), True, "1"])
def test_a_delay_that_cannot_be_is_refused(memory: MemoryTestCluster, delay_s: Any) -> None:
    with memory.reading(1) as consumer:
        batch = consumer.fetch(1, expires_s=DEADLINE_S)
        for target in (batch, batch.parts[0], next(iter(batch))):
            with pytest.raises(InvalidOption, match=r"delay_s=.* from 0 to 86400, or None"):
                target.nak(delay_s)
        with pytest.raises(InvalidOption, match="reason=5"):
            batch.term(5)  # type: ignore[arg-type]
        assert batch.ack()


def test_in_at_most_once_groups_they_are_refused_by_name(memory: MemoryTestCluster) -> None:
    """In at-most-once groups `nak` and `term` are refused by name, also when they come late.

    ACKS: In at-most-once groups `nak` and `term` are refused by name.
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic], delivery="at_most_once")
        batch = consumer.fetch(1, expires_s=DEADLINE_S)
        targets = (batch, batch.parts[0], next(iter(batch)))
        for _, target in itertools.product(range(2), targets):
            with pytest.raises(NeedsAtLeastOnce, match=rf"nak\(\) needs .*{group!r} delivers at most once"):
                target.nak()
            with pytest.raises(NeedsAtLeastOnce, match=r"term\(\) needs"):
                target.term("why")
            consumer.stop()


@pytest.mark.parametrize(
    ("first", "second", "returned", "done"),
    [
        ("ack", "nak", False, True),
        ("ack", "term", False, True),
        ("ack", "ack", True, True),
        ("nak", "ack", True, True),
        ("nak", "nak", True, False),
        ("nak", "term", True, True),
        ("term", "ack", True, True),
        ("term", "nak", False, True),
        ("term", "term", False, True),
    ],
)
def test_a_second_answer(memory: MemoryTestCluster, first: str, second: str, returned: bool, done: bool) -> None:
    """The table of docs/acks.md.

    ACKS: A second answer to a message never undoes the first one.
    """
    with memory.reading(1) as consumer:
        message = collect(consumer, 1, ack=False)[0]
        answers = {"ack": message.ack, "nak": lambda: message.nak(3_600), "term": message.term}
        assert answers[first]()
        assert answers[second]() is returned
        assert positions(consumer) == {0: 1 if done else 0}


@pytest.mark.parametrize(("reason", "kept"), [("x" * 501, "x" * 255), ("\u00e9" * 300, "\u00e9" * 127)])
def test_the_reason_of_term_is_kept_up_to_its_bound(memory: MemoryTestCluster, reason: str, kept: str) -> None:
    """ACKS: its first 255 bytes of utf-8 are in the advisory."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        assert collect(consumer, 1, ack=False)[0].term(reason)
        until(lambda: terminations(memory, group), "it is in the log")
    assert [text for *_, text in terminations(memory, group)] == [kept]
