"""`marshal_py.otel`: one span per call of a handler, its parent or links, its errors, and the metrics."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from marshal_py import Batches, Message, Reject, Retry
from marshal_py.errors import InvalidOption
from marshal_py.otel import record_received, settling, traced
from tests.client.test_async_process import opened
from tests.client.test_async_process import until as until_async
from tests.support import worker_handlers
from tests.support.client_fixtures import MemoryTestCluster, joined, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXPORTER, READER = InMemorySpanExporter(), InMemoryMetricReader()


@pytest.fixture(scope="module", autouse=True)
def _providers() -> Iterator[None]:
    """A process may set each provider once."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([READER]))
    yield
    provider.shutdown()


@pytest.fixture(autouse=True)
def _no_spans_before() -> None:
    EXPORTER.clear()


def spans() -> list[ReadableSpan]:
    return sorted(EXPORTER.get_finished_spans(), key=lambda span: span.start_time or 0)


def fill(memory: MemoryTestCluster, count: int) -> str:
    """A topic whose messages name a span of their producer."""
    topic = memory.topic(1)
    for number in range(count):
        headers = [("traceparent", f"00-{TRACE}-{PARENT}-01".encode())]
        memory.put(topic, 0, b"%d" % number, b"k%d" % number, headers=headers)
    return topic


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def metric(name: str) -> list[Any]:
    """The data points of a metric."""
    data = READER.get_metrics_data()
    assert data is not None
    found = [one for each in data.resource_metrics for scope in each.scope_metrics for one in scope.metrics]
    return [point for one in found if one.name == name for point in one.data.data_points]


def test_each_call_is_a_child_of_the_span_in_the_headers(memory: MemoryTestCluster) -> None:
    topic, group, inside = fill(memory, 2), memory.group(), list[Any]()

    def handle(message: Message) -> None:
        inside.append(trace.get_current_span().get_span_context().span_id)

    with (
        memory.connect() as marshal,
        joined(marshal, group, [topic]) as consumer,
        consumer.process(traced(handle), workers=1) as work,
    ):
        until(lambda: work.stats().finished == 2, "both are handled")
    first, second = spans()
    assert (first.name, first.kind) == (f"process {topic}", SpanKind.CONSUMER)
    assert first.parent is not None
    assert (f"{first.parent.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, PARENT)
    assert [one.context.span_id for one in (first, second) if one.context] == inside
    assert attributes(first) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": group,
        "messaging.kafka.offset": 0,
        "messaging.kafka.message.key": "k0",
    }
    counted = [point for point in metric("messaging.client.consumed.messages") if topic in point.attributes.values()]
    assert [point.value for point in counted] == [2]
    took = [point for point in metric("messaging.process.duration") if topic in point.attributes.values()]
    assert [point.count for point in took] == [2]


def test_a_key_that_cannot_be_read_fails_no_handler(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1)

    def no_key(key: bytes | None, _: object) -> None:
        raise ValueError(f"{key!r} is no key")

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], key_deserializer=no_key) as consumer,
        consumer.process(traced(lambda message: None), order="partition", retry=Retry(first_s=0.0)) as work,
    ):
        until(lambda: work.stats().finished == 1, "it is handled")
        assert work.stats().retried == 0
    assert attributes(spans()[0])["messaging.kafka.message.key"] == "k0"


def test_a_link_in_place_of_a_parent(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 1)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(traced(lambda message: None, parent=False)) as work,
    ):
        until(lambda: work.stats().finished == 1, "it is handled")
    (span,) = spans()
    assert span.parent is None
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE]


def test_errors_are_those_of_the_span_and_a_retry_is_none(memory: MemoryTestCluster) -> None:
    topic, letters = fill(memory, 3), memory.topic()

    def handle(message: Message) -> None:
        if message.delivery_count > 1:
            return
        raise (Retry(after_s=0), Reject("no amount"), ValueError("once"))[message.offset]

    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic], dead_letter_topic=letters) as consumer,
        consumer.process(traced(handle), retry=Retry(0.0)) as work,
    ):
        until(lambda: (work.stats().finished, work.stats().ended) == (2, 1), "all are done")
    first = {attributes(span)["messaging.kafka.offset"]: span for span in reversed(spans())}
    assert [first[at].status.status_code for at in range(3)] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]
    assert [attributes(first[at]).get("error.type") for at in range(3)] == [
        None,
        "marshal_py.client.process.processing.Reject",
        "ValueError",
    ]
    assert [event.name for event in first[0].events] == ["retry"]


def test_a_list_is_one_span_with_links(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 3)
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [topic]) as consumer,
        consumer.process(traced(lambda messages: None), batch=Batches(3, wait_s=3_600)) as work,
    ):
        until(lambda: work.stats().finished == 3, "all are handled")
    (span,) = spans()
    assert (attributes(span)["messaging.batch.message_count"], len(span.links), span.parent) == (3, 3, None)


def test_coroutines_are_in_their_spans(memory: MemoryTestCluster) -> None:
    topic, inside = fill(memory, 2), set[int]()

    async def main() -> None:
        async def handle(message: Message) -> None:
            await asyncio.sleep(0)
            inside.add(trace.get_current_span().get_span_context().span_id)

        async with opened(memory, topic) as consumer, consumer.process(traced(handle)) as work:
            await until_async(lambda: work.stats().finished == 2, "both are handled")

    asyncio.run(main())
    assert {span.context.span_id for span in spans() if span.context} == inside
    assert len(inside) == 2


def test_a_traced_handler_goes_to_worker_processes() -> None:
    again = pickle.loads(pickle.dumps(traced(worker_handlers.note, parent=False)))
    assert repr(again) == repr(traced(worker_handlers.note))


def test_a_loop_records_what_it_receives_and_settles(memory: MemoryTestCluster) -> None:
    topic = fill(memory, 2)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        began_ns = time.time_ns()
        batch = consumer.fetch(2, min_messages=2)
        record_received(batch, began_ns)
        with settling(batch, "ack"):
            batch.double_ack()
        record_received(consumer.fetch(1, expires_s=0), time.time_ns())
        with settling(consumer.fetch(1, expires_s=0), "ack"):
            pass
    received, settled = spans()
    assert (received.name, received.start_time, len(received.links)) == (f"poll {topic}", began_ns, 2)
    assert attributes(received)["messaging.operation.type"] == "receive"
    assert (settled.name, attributes(settled)["messaging.operation.type"]) == (f"ack {topic}", "settle")


async def _coroutine(message: Message) -> None: ...


def test_bad_input_is_refused(memory: MemoryTestCluster) -> None:
    with pytest.raises(InvalidOption, match="handler"):
        traced(None)  # type: ignore[type-var]
    topic = fill(memory, 1)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        with pytest.raises(InvalidOption, match="handler"):
            consumer.process(traced(_coroutine))
        batch = consumer.fetch(1, min_messages=1)
        with pytest.raises(InvalidOption, match="answer"), settling(batch, "done"):  # type: ignore[arg-type]
            pass
