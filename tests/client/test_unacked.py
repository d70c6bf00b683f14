"""The early event about a message without an answer, before the handler timeout takes its partition away."""

from __future__ import annotations

import pytest

from marshal_py import Advisory, Consumer, ConsumerOptions
from marshal_py.client.messages.answers import UnackedWatch
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from tests.support.client_fixtures import MemoryTestCluster, calm, collect, until

TP = TopicPartition("orders", 3)


class Advised:
    """Stands for a member: keeps what it is told to advise."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def advise(self, kind: str, tp: TopicPartition, *, epoch: int, offset: int, text: str) -> None:
        assert (kind, tp, epoch) == ("unacked", TP, 9)
        self.found.append((offset, text))

    def request_tick(self) -> None:
        pass

    def take(self) -> list[tuple[int, str]]:
        found, self.found = self.found, []
        return found


def watch() -> tuple[UnackedWatch, Advised]:
    advised = Advised()
    options = ConsumerOptions(handler_timeout_s=100.0)
    return UnackedWatch(advised, options), advised  # type: ignore[arg-type]


def at(seconds: float) -> Instant:
    return Instant(round(1000 * seconds), 0, 0)


def test_each_quarter_of_the_timeout_is_reported_once() -> None:
    """`oldest unacked message is N s old`: early, three times at most, and again for another message.

    ACKS: The event about an unacked message comes early: `oldest unacked message is N s old`.
    """
    found, advised = watch()
    tracker = AtLeastOnce(7)
    run = tracker.add(range(7, 10))
    run.deliver(3, 0)
    claim = Claim(TP, 9, 0, tracker)
    texts = []
    for second in range(100):
        found.look([claim], at(second))
        texts += [(second, *one) for one in advised.take()]
    end = "; at 100 s (handler_timeout_s) its partition is released"
    assert texts == [(age, 7, f"the oldest unacked message is {age} s old{end}") for age in (25, 50, 75)]
    run.finish(0)
    run.touch(1, 3, 99_000)
    found.look([claim], at(100))
    assert advised.take() == []
    found.look([claim], at(125))
    assert advised.take() == [(8, f"the oldest unacked message is 26 s old{end}")]


def test_a_message_that_was_given_back_is_not_unacked() -> None:
    found, advised = watch()
    tracker = AtLeastOnce(0)
    run = tracker.add(range(1))
    run.deliver(1, 0)
    tracker.give_back(run, 0, None, 90_000)
    found.look([Claim(TP, 9, 0, tracker)], at(80))
    assert advised.take() == []


def test_in_at_most_once_mode_the_message_is_not_known() -> None:
    found, advised = watch()
    tracker = AtMostOnce(0)
    tracker.granted(0, 5)
    tracker.deliver(4, 0, 5)
    found.look([Claim(TP, 9, 0, tracker)], at(60))
    assert [offset for offset, _ in advised.take()] == [NONE]


@pytest.mark.bounds(unacked=5)
def test_a_claim_that_tracks_too_much_is_reported_once() -> None:
    """Never silently: nothing more is fetched at BOUNDS.unacked."""
    found, advised = watch()
    tracker = AtLeastOnce(0)
    run = tracker.add(range(6))
    run.deliver(6, 0)
    run.finish_range(1, 6)
    claim = Claim(TP, 9, 0, tracker)
    for second in range(3):
        found.look([claim], at(second))
    assert advised.take() == [(0, "6 messages are tracked above it: no more are fetched")]
    run.finish(0)
    found.look([claim], at(4))
    tracker.add(range(6, 12)).deliver(6, 4_000)
    found.look([claim], at(5))
    assert len(advised.take()) == 1, "it is full again"
    claim.sealed = True
    found.look([claim], at(99))
    assert advised.take() == []


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_the_event_and_the_metric_of_a_consumer(memory: MemoryTestCluster, delivery: str) -> None:
    """ACKS: The event about an unacked message comes early: `oldest unacked message is N s old`."""
    topic = memory.topic()
    memory.fill(topic, 0, 1)
    with memory.connect() as marshal:
        consumer = calm(marshal, memory.group(), [topic], delivery=delivery, handler_timeout_s=400.0)
        with consumer:
            collect(consumer, 1, ack=False)
            memory.local.advance(110)
            event = until(lambda: unacked(consumer), "an event before the timeout")
            assert (event.topic, event.partition) == (topic, 0)
            assert event.offset == (0 if delivery == "at_least_once" else NONE)
            assert "s old; at 400 s (handler_timeout_s) its partition is released" in event.text
            (figures,) = marshal.metrics().consumers[0].partitions
            assert figures.oldest_unacked_ms > 0


def unacked(consumer: Consumer) -> Advisory | None:
    return next((event for event in consumer.events() if event.kind == "unacked"), None)
