"""Buffers between the source and the user: messages reach the user once, under the right topic."""

from __future__ import annotations

import pytest

from marshal_py.client.delivery.buffers import Buffer
from marshal_py.protocol.claims import AtLeastOnce, Claim
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_source import KafkaSource
from marshal_py.transport.memory import MemoryMessage
from marshal_py.transport.producer import KafkaProducer

DEADLINE_S = 30.0
TP = TopicPartition("orders", 0)


def messages(first: int, stop: int) -> list[MemoryMessage]:
    return [MemoryMessage(TP.topic, TP.partition, at, None, b"x", None, 0) for at in range(first, stop)]


@pytest.mark.parametrize("came_before", [True, False])
def test_what_was_fetched_ahead_below_the_claim_is_not_delivered(came_before: bool) -> None:
    """A3: fetching ahead began at 3; the owner finished up to 6, before or after the first data came here."""
    buffer = Buffer(TP, 3)
    if came_before:
        buffer.add(messages(3, 10))
    claim = Claim(TP, 100, 0, AtLeastOnce(6))
    buffer.open(claim, 6)
    buffer.next_offset = max(buffer.next_offset, 6)
    if not came_before:
        buffer.add(messages(3, 10))
    assert [m.offset() for part in buffer.fetched for m in part.messages] == [6, 7, 8, 9]
    assert buffer.size == 4
    assert isinstance(claim.tracker, AtLeastOnce)
    assert [list(run.offsets) for run in claim.tracker.runs] == [[6, 7, 8, 9]]


def test_messages_keep_their_topic_when_the_other_topic_goes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of one topic's last partition between fetching and sorting must not rename what was fetched."""
    with Broker(topics={"apples": 1, "pears": 1}) as broker:
        transport = KafkaTransport(broker.bootstrap_servers, DEADLINE_S)
        sink = KafkaProducer(transport)
        for topic in ("apples", "pears"):
            for number in range(20):
                sink.write(topic, f"{topic} {number}".encode(), partition=0)
        sink.flush(DEADLINE_S)
        sink.close()
        source = transport.source("g", "c", {})
        source.learn_leaders(["apples", "pears"])
        source.assign({TopicPartition("apples", 0): 0, TopicPartition("pears", 0): 0})
        plain = KafkaSource._consume
        seen: list[str] = []

        def consume(self: KafkaSource, timeout_s: float, max_messages: int) -> list[object]:
            found = plain(self, timeout_s, max_messages)
            if found:
                self.unassign([TopicPartition("apples", 0)])
            return found  # type: ignore[return-value]

        monkeypatch.setattr(KafkaSource, "_consume", consume)
        while not any(value.startswith("pears") for value in seen):
            for chunk in source.poll(DEADLINE_S, 1_000):
                values = [str(m.value(), "ascii") for m in chunk.messages]
                assert all(value.startswith(chunk.tp.topic) for value in values), (chunk.tp, values)
                seen += values
        source.close()
