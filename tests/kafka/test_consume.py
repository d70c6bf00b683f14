"""`consume` on a real Kafka: with a handler and as an iterator, while partitions move, and its idle heartbeat."""

from __future__ import annotations

import threading
from typing import Any

from confluent_kafka import Producer

import marshal_py
from marshal_py import ConsumeContext, Message
from tests.support.client_fixtures import DEADLINE_S, joined, until
from tests.support.kafka import Cluster, TopicFactory

PARTITIONS = 4
EACH = 100  # messages per partition and half


def fill(cluster: Cluster, topic: str) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for number in range(PARTITIONS * EACH):
        producer.produce(topic, b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(DEADLINE_S) == 0


def test_every_message_is_handled_once_while_partitions_move(kafka: Cluster, topic: TopicFactory) -> None:
    """ADR-37: "Consume() should always utilize idle heartbeats." """
    name = topic(PARTITIONS)
    log = f"{name}-marshal"
    seen: list[tuple[int, int]] = []

    def handle(message: Message[Any, Any]) -> None:
        seen.append((message.partition, message.offset))
        message.ack()

    def iterate(context: ConsumeContext[Any, Any]) -> None:
        for message in context:
            handle(message)

    options = {"coordination_topic": log, "coordination_partitions": 1}
    with marshal_py.connect(kafka.bootstrap, **options) as one, marshal_py.connect(kafka.bootstrap, **options) as two:  # type: ignore[arg-type]
        first = joined(one, name, [name])
        handled = first.consume(handle, max_messages=20, expires_s=1)
        fill(kafka, name)
        until(lambda: len(seen) >= PARTITIONS * EACH, "the first half is handled")
        assert handled._demand.watch is not None
        watch = handled._demand.watch
        until(lambda: watch._answered_ms, "the leaders have answered while no message came")
        second = joined(two, name, [name])
        iterated = second.consume(max_bytes=2_000)
        loop = threading.Thread(target=iterate, args=[iterated])
        loop.start()
        until(
            lambda: len(first.cached_info().claims) == len(second.cached_info().claims) == PARTITIONS // 2,
            "both have partitions",
        )
        fill(kafka, name)
        until(lambda: len(seen) >= 2 * PARTITIONS * EACH, "the second half is handled")
        handled.drain()
        iterated.drain()
        loop.join(DEADLINE_S)
        assert handled.closed
        assert iterated.closed
        assert sorted(seen) == [(partition, offset) for partition in range(PARTITIONS) for offset in range(2 * EACH)]
        # No heartbeat_missed either, unless this machine has stood still for a second.
        assert "handler_failed" not in {event.kind for consumer in (first, second) for event in consumer.events()}
