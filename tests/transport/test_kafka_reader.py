"""Readings whose clients a test plays: what a broker's last answer means when the time has just passed."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import kafka, settings
from marshal_py.transport.kafka import KafkaReader

ORDERS = TopicPartition("orders", 0)


class Client:
    """Gives a message, and then the end of its partition, at the end of the reading's time."""

    made = 0

    def __init__(self, *_: Any) -> None:
        Client.made += 1
        self._messages = [Message(topic="orders", partition=0, offset=3)] if Client.made == 1 else []

    def consume(self, *_: Any) -> list[Message]:
        given, self._messages = self._messages, []
        return given

    def poll(self, timeout_s: float) -> Message:
        return Message(topic="orders", partition=0, offset=9, error=KafkaError(KafkaError._PARTITION_EOF))

    def __getattr__(self, name: str) -> Any:  # assign, unassign, position: nothing follows from them here
        return lambda *_: []


@pytest.mark.parametrize("with_a_message", [True, False])
def test_the_end_of_the_last_partition_comes_as_the_time_has_passed(
    monkeypatch: pytest.MonkeyPatch, with_a_message: bool
) -> None:
    monkeypatch.setattr(Client, "made", 0 if with_a_message else 1)
    before = Client.made
    monkeypatch.setattr(settings, "create_client", lambda kind, given: Client())
    monkeypatch.setattr(kafka, "metadata", lambda *_: None)
    reader = KafkaReader({"bootstrap.servers": "127.0.0.1:1"}, "reader", None)
    found = list(reader.read({ORDERS: 3}, {ORDERS: 9}, timeout_s=0.0))
    assert [message.offset() for some in found for message in some] == ([3] if with_a_message else [])
    assert Client.made - before == 1  # nothing is left that another one could read
