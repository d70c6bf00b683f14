"""Fetches that fail in a way that may pass: they are tried again, then other members try (D12)."""

from __future__ import annotations

import pytest

import marshal_py
from marshal_py import TopicPartition
from marshal_py.protocol.wire.records import ReleasingPartition
from marshal_py.transport.assignments import FAILURES_MAX, RETRY_MS_MAX
from marshal_py.transport.memory import MemorySource
from tests.support.broker_faults import fail_requests
from tests.support.client_fixtures import BackgroundConsumer, EmbeddedTestCluster, MemoryTestCluster, joined, until

UNKNOWN, CORRUPT_MESSAGE = -1, 2  # UNKNOWN_SERVER_ERROR and CORRUPT_MESSAGE of the protocol of Kafka


@pytest.mark.parametrize("code", [UNKNOWN, CORRUPT_MESSAGE])
def test_one_failed_fetch_does_not_end_the_reading(embedded: EmbeddedTestCluster, code: int) -> None:
    topic = embedded.topic(2)
    with embedded.connect() as marshal, joined(marshal, embedded.group(), [topic]) as consumer:
        for partition in (0, 1):
            embedded.fill(topic, partition, 3)
        with BackgroundConsumer(consumer) as background:
            until(lambda: len(background.seen) == 6, "what was there")
            fail_requests(embedded.broker, "Fetch", *[code] * 8)
            for partition in (0, 1):
                embedded.fill(topic, partition, 3, first=3)
            until(lambda: len(background.seen) == 12, "what came then")
            assert background.error is None


def test_a_partition_whose_fetches_go_on_failing_goes_to_another(memory: MemoryTestCluster) -> None:
    """D12: it is reported, and nothing is lost or comes twice."""
    topic, group = memory.topic(2), memory.group()
    tp = TopicPartition(topic, 0)
    with memory.connect("a") as first, memory.connect("b") as second:
        consumers = [joined(marshal, group, [topic]) for marshal in (first, second)]
        backgrounds = [BackgroundConsumer(consumer) for consumer in consumers]
        until(lambda: all(len(consumer.cached_info().claims) == 1 for consumer in consumers), "one partition each")
        memory.fill(topic, 0, 3)
        until(lambda: sum(len(background.seen) for background in backgrounds) == 3, "what was there")
        owner, other = consumers if tp in consumers[0].cached_info().claims else reversed(consumers)
        source = owner._driver.source
        assert isinstance(source, MemorySource)
        with memory.broker.changed:
            for number in range(FAILURES_MAX):
                source._assignments.fail(tp, "injected", number * RETRY_MS_MAX)
                source._assignments.take((number + 1) * RETRY_MS_MAX)
        events: list[marshal_py.Advisory] = []
        until(lambda: events.extend(owner.events()) or [e for e in events if e.kind == "unreadable"], "it is reported")
        until(lambda: tp in other.cached_info().claims, "the other one has it")
        memory.fill(topic, 0, 3, first=3)
        until(lambda: sum(len(background.seen) for background in backgrounds) == 6, "the other one reads on")
        for background in backgrounds:
            background.stop()
            assert background.error is None
        for consumer in consumers:
            consumer.stop()
    assert [event.text for event in events if event.kind == "unreadable"] == ["injected"]
    assert "unreadable" in [record.reason for record in memory.accepted(group, ReleasingPartition)]
