"""Figures of a running Marshal: what was sent, delivered, acked and lost, and how programs read them."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request

import msgspec
import pytest

from marshal_py.admin.group import Group
from marshal_py.client.marshal import Marshal
from marshal_py.client.metrics import ConsumerMetrics
from marshal_py.errors import InvalidOption, UnsupportedPlatform
from marshal_py.metrics import Collector, Metrics, serve
from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import (
    DEADLINE_S,
    LOG,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    until,
)


def only(marshal: Marshal) -> ConsumerMetrics:
    (found,) = marshal.metrics().consumers
    return found


def test_the_figures_of_a_consumer(cluster: TestCluster) -> None:
    topic, group = cluster.topic(2), cluster.group()
    cluster.fill(topic, 0, 10)
    with cluster.connect("one") as marshal:
        assert marshal.metrics().consumers == []
        consumer = joined(marshal, group, [topic])
        until(owns(consumer, 0, 1), "both partitions are claimed")
        messages = collect(consumer, 10, ack=False)
        for message in messages[:4]:
            message.ack()
        found = only(marshal)
        assert (found.group, found.client_id, found.delivery, found.paused) == (group, "one", "at_least_once", False)
        assert (found.claims, found.claims_ended, found.take_overs) == (2, 0, 0)
        assert (found.messages_delivered, found.messages_acked, found.in_flight, found.buffered) == (10, 4, 6, 0)
        assert found.records_sent > found.heartbeats_sent
        until(lambda: only(marshal).round_trip_ms >= 0, "a heartbeat came back")
        assert 0 < only(marshal).lease_left_ms <= 1_000
        first = until(
            lambda: next((p for p in only(marshal).partitions if p.partition == 0 and p.end == 10), None),
            "the end of the partition is known",
        )
        assert (first.position, first.lag, first.in_flight) == (4, 6, 6)
        whole = marshal.metrics()
        assert (whole.client_id, whole.produce_errors, whole.waiting_for) == ("one", 0, "")
        assert whole.records_folded > 4
        assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(whole))), Metrics) == whole
        consumer.stop()
        assert marshal.metrics().consumers == []


def test_messages_one_by_one_are_counted(cluster: TestCluster) -> None:
    topic, group = cluster.topic(), cluster.group()
    cluster.fill(topic, 0, 7)
    for delivery in ("at_least_once", "at_most_once"):
        own = f"{group}-{delivery}"
        with cluster.connect() as marshal, joined(marshal, own, [topic], delivery=delivery) as consumer:
            for number, message in enumerate(consumer, 1):
                message.ack()
                if number == 5:
                    break
            until(lambda m=marshal: only(m).messages_delivered == 5, "all that was handed over is counted")
            if delivery == "at_least_once":
                # The broker may send them in several answers; what came in the first was perhaps five.
                until(lambda m=marshal: only(m).buffered == 2, "the last two are fetched ahead")
                assert only(marshal).messages_acked == 5


def test_a_consumer_that_nobody_asks_keeps_its_partitions_and_shows_it() -> None:
    with MemoryCluster() as broker:
        broker.create_topic("orders")
        marshal = broker.connect()
        consumer = joined(marshal, "billing", ["orders"])
        broker.run_until(lambda: consumer.cached_info().claims)
        broker.advance(600)  # its heartbeats go on
        assert consumer.cached_info().claims
        assert only(marshal).last_asked_ms >= 600_000
        assert consumer.next(0) is None
        assert only(marshal).last_asked_ms < 600_000
        waiting = threading.Thread(target=consumer.next, args=(DEADLINE_S,))
        waiting.start()
        broker.advance(600)
        until(lambda: only(marshal).last_asked_ms < 600_000, "a call that waits asks")
        broker.produce("orders", b"1")
        waiting.join()
        consumer.stop()
        with marshal.planner("billing", ["orders"]):
            assert only(marshal).last_asked_ms == -1, "others read what it plans"


def test_what_waits_for_a_handler_of_a_process_is_not_acked() -> None:
    hold = threading.Event()
    with MemoryCluster() as cluster:
        cluster.create_topic("orders")
        cluster.produce_many("orders", [b""] * 20)
        marshal = cluster.connect()
        consumer = marshal.consumer("billing", ["orders"], start="earliest")
        with consumer.process(lambda message: hold.wait(DEADLINE_S) and None, workers=1) as work:
            cluster.run_until(lambda: work.stats().waiting == 19)
            assert (only(marshal).messages_delivered, only(marshal).messages_acked, only(marshal).in_flight) == (
                20,
                0,
                1,
            )
            cluster.evict(consumer)
            assert only(marshal).messages_acked == 0
            hold.set()


def test_unfinished_messages_of_a_lost_claim_are_not_acked(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 6)
    with memory.connect() as marshal, memory.connect() as other:
        consumer = joined(marshal, group, [topic, memory.topic()])
        messages = collect(consumer, 6, ack=False)
        messages[0].ack()
        consumer.pause([(topic, 0)])
        assert (only(marshal).messages_acked, only(marshal).in_flight) == (1, 5)
        assert Group(other.transport, group, LOG).pause(5.0).token >= 0
        until(lambda: only(marshal).claims_ended == 2, "this client has read what the tool has read")
        found = only(marshal)
        assert (found.in_flight, found.messages_acked) == (0, 1)
        assert messages[1].ack() is False
        assert only(marshal).late_acks == 1


def test_errors_of_the_producer_are_counted(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]):
        memory.broker.queue_full = True
        until(lambda: marshal.metrics().produce_errors > 0, "a heartbeat found the queue full")
        memory.broker.queue_full = False


def test_prometheus_reads_them_over_http(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    with memory.connect("one") as marshal, joined(marshal, group, [topic]) as consumer, serve(marshal, 0) as exporter:
        collect(consumer, 2)
        collect(consumer, 1, ack=False)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        labels = f'{{client_id="one",group="{group}"}}'
        assert f"marshal_messages_delivered_total{labels} 3.0" in text
        assert f"marshal_claims_total{labels} 1.0" in text
        assert f"marshal_last_asked_ms{labels} " in text
        assert f'marshal_position{{group="{group}",partition="0",topic="{topic}"}} 2.0' in text
        assert f'marshal_most_deliveries{{group="{group}",partition="0",topic="{topic}"}} 1.0' in text
        assert "marshal_records_folded_total " in text
        with pytest.raises(InvalidOption, match=f"127.0.0.1:{exporter.port}.*cannot be used.*0 for a free one"):
            serve(marshal, exporter.port)


def test_without_prometheus_the_error_names_the_extra(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with memory.connect() as marshal:
        for use in (lambda: Collector(marshal), lambda: serve(marshal, 0)):
            with pytest.raises(UnsupportedPlatform, match=r"pip install 'marshal_py\[metrics\]'"):
                use()


def test_librdkafkas_statistics_pass_through(embedded: EmbeddedTestCluster) -> None:
    topic = embedded.topic()
    with embedded.connect(statistics_interval_ms=50) as marshal, joined(marshal, embedded.group(), [topic]) as consumer:

        def reported() -> dict[str, str] | None:
            consumer.fetch(1, expires_s=0.05)
            found = marshal.metrics().librdkafka
            return found if len(found) >= 3 else None

        found = until(reported, "log reader, log writer and consumer have reported theirs")
        assert {json.loads(text)["type"] for text in found.values()} == {"producer", "consumer"}
        assert all(json.loads(text)["name"] == name for name, text in found.items())
    with embedded.connect() as marshal:
        assert marshal.metrics().librdkafka == {}


@pytest.mark.parametrize("value", [-1, 0.5, 86_400_001, "1"])
def test_a_wrong_interval_is_named(memory: MemoryTestCluster, value: object) -> None:
    with pytest.raises(InvalidOption, match="statistics_interval_ms"):
        memory.connect(statistics_interval_ms=value)
