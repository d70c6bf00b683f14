"""Answers of handlers on a real Kafka: redeliveries, dead letters by the idempotent producer, confirmed acks."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import Producer

import marshal_py
from tests.support.client_fixtures import collect, joined, positions, until
from tests.support.kafka import Cluster, TopicFactory


def test_a_message_comes_again_and_then_goes_to_the_dead_letter_topic(kafka: Cluster, topic: TopicFactory) -> None:
    """D14, D15: over a broker that stores the letter with acks=all; the log has each answer.

    ACKS: `delivery_count` grows with each delivery. `max_deliver` with a dead-letter topic: headers say why, from
    where and how often.
    """
    orders, letters, group = topic(1), topic(1), f"answers-{uuid.uuid4().hex[:8]}"
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(3):
        producer.produce(orders, b"%d" % number, b"key", 0, headers=[("trace", b"7")])
    assert producer.flush(30.0) == 0
    with marshal_py.connect(kafka.bootstrap) as marshal:
        with joined(marshal, group, [orders], max_deliver=2, dead_letter_topic=letters) as consumer:
            seen = []
            for message in consumer:
                seen.append((message.offset, message.delivery_count))
                assert message.nak(0) if message.offset == 1 else message.double_ack()
                if len(seen) == 4:
                    break
            assert sorted(seen) == [(0, 1), (1, 1), (1, 2), (2, 1)]
            until(lambda: positions(consumer) == {0: 3}, "Kafka has acknowledged the letter")
        with joined(marshal, f"{group}-letters", [letters]) as consumer:
            letter = collect(consumer, 1)[0]
    headers = dict(letter.headers)
    assert (letter.key, letter.value, headers["trace"]) == (b"key", b"1", b"7")
    assert headers["__dlq.errors.offset"] == b"1"
    assert headers["__dlq.errors.delivery.count"] == b"2"
    assert headers["__dlq.errors.message"] == b"given back at delivery_count 2"


LARGE = 3_500_000


@pytest.mark.parametrize(
    ("size", "limit", "letter_limit"),
    [(LARGE, "4000000", "4000000"), (1_048_400, None, "2000000"), (1_048_400, None, None), (LARGE, "4000000", "9000")],
    ids=["larger than a client's limit", "just below Kafka's limit", "its headers are too much", "a small topic"],
)
def test_every_message_that_kafka_has_taken_gets_a_letter(
    kafka: Cluster, topic: TopicFactory, size: int, limit: str | None, letter_limit: str | None
) -> None:
    """D15: whole if the dead-letter topic takes it, else without its content. The position moves on in any case."""
    orders, letters = (
        topic(1, config={} if most is None else {"max.message.bytes": most}) for most in (limit, letter_limit)
    )
    group = f"answers-{uuid.uuid4().hex[:8]}"
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "message.max.bytes": 4_000_000})
    producer.produce(orders, b"x" * size, b"key", 0, headers=[("trace", None)])
    producer.produce(orders, b"ok", b"key", 0)
    assert producer.flush(30.0) == 0
    with marshal_py.connect(kafka.bootstrap) as marshal:
        with joined(marshal, group, [orders], max_deliver=5, dead_letter_topic=letters) as consumer:
            large, small = collect(consumer, 2, ack=False)
            assert large.term("cannot parse")
            assert small.ack()
            until(lambda: positions(consumer) == {0: 2}, "Kafka has acknowledged the letter")
        with joined(marshal, f"{group}-letters", [letters]) as consumer:
            letter = collect(consumer, 1)[0]
    headers = dict(letter.headers)
    assert headers["__dlq.errors.offset"] == b"0"
    assert headers["__dlq.errors.message"] == b"cannot parse"
    if letter_limit in ("4000000", "2000000"):
        assert (len(letter.value or b""), letter.key, headers["trace"]) == (size, b"key", None)
        assert "__dlq.errors.left.out" not in headers
    else:
        assert (letter.value, letter.key, "trace" in headers) == (None, None, False)
        assert str(size).encode() in (headers["__dlq.errors.left.out"] or b"")
