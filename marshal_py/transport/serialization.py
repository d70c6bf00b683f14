"""What deserializers get beside the bytes of a message, as confluent-kafka's own deserializers expect it."""

from __future__ import annotations

from typing import Any

from marshal_py.transport.ports import RawMessage


class SerializationContext:
    """Has the attributes of confluent_kafka.serialization.SerializationContext.

    `field`: "key" or "value", whichever the bytes are.
    """

    __slots__ = ("field", "headers", "topic")

    def __init__(self, topic: str, field: str, headers: Any) -> None:
        self.topic, self.field, self.headers = topic, field, headers


def context_of(raw: RawMessage, field: str) -> SerializationContext:
    """Returns the context of the key or the value of a message."""
    return SerializationContext(raw.topic() or "", field, raw.headers())
