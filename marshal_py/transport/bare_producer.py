"""Kafka's producer, straight from confluent_kafka's C module: all that a process with little memory imports of it."""

from __future__ import annotations

from typing import Any

from confluent_kafka.cimpl import KafkaException, Producer

from marshal_py.errors import InvalidOption


def create(settings: dict[str, Any]) -> Any:
    """Returns a producer, a confluent_kafka.Producer. Raises InvalidOption for settings that librdkafka refuses."""
    try:
        return Producer(settings)
    except (KafkaException, TypeError, ValueError) as error:
        raise InvalidOption("settings", sorted(settings), type(error).__name__) from error


def learn(producer: Any, topic: str, timeout_s: float) -> None:
    """Connects, and learns where the topic's partitions are, so that the first record need not wait for that."""
    try:
        producer.list_topics(topic, timeout_s)
    except KafkaException:
        return  # it goes on trying in the background


def enqueue(producer: Any, topic: str, log: int, key: bytes, value: bytes, on_delivery: Any) -> bool:
    """Queues a record; returns False if the queue is full or the producer has failed. `on_delivery(error, message)`."""
    try:
        producer.produce(topic, value, key, log, on_delivery=on_delivery)
    except (KafkaException, BufferError):
        return False
    return True
