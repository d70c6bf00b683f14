"""Metrics for Prometheus: a collector over `Marshal.metrics()`, and a small server. Needs the extra `metrics`.

prometheus-client is imported only when it is used: programs without metrics do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, Self

from marshal_py.client.marshal import Marshal
from marshal_py.client.metrics import ConsumerMetrics, PartitionMetrics
from marshal_py.client.metrics_address import LOOPBACK, port_error
from marshal_py.client.values.info import HANDLER_S
from marshal_py.errors import UnsupportedPlatform
from marshal_py.protocol.member.waiting import CAUSES, OBSERVED

PREFIX: Final = "marshal"

# Name of the metric -> help. Counters end in _total when they are shown.
COUNTERS: Final = {
    "heartbeats_sent": "Heartbeats handed to the producer.",
    "records_sent": "Coordination records handed to the producer, heartbeats included.",
    "claims": "Claims that this consumer won.",
    "claims_ended": "Claims that ended, by release or loss.",
    "take_overs": "Claims of partitions whose owner had died.",
    "messages_delivered": "Messages delivered.",
    "messages_acked": "Messages done, in at-least-once mode.",
    "naks": "Messages that handlers gave back, to be delivered again.",
    "redelivered": "Deliveries of messages that had been given back.",
    "terminated": "Messages that handlers ended for good without an ack.",
    "dead_letters": "Messages written to the dead-letter topic.",
    "late_acks": "Acks that came after the claim had ended.",
    "amo_dropped": "Offsets granted and dropped because a lease or claim was lost, in at-most-once mode.",
    "amo_lost": "Offsets that owners which ended without a release may have lost, in at-most-once mode.",
}
FIELDS: Final = {
    "amo_dropped": "grants_dropped",
    "amo_lost": "grants_lost",
}  # metric -> field of ConsumerMetrics, where the names differ
GAUGES: Final = {
    "lease_left_ms": "Milliseconds until this consumer stops delivering unless it reads a heartbeat of its own.",
    "round_trip_ms": "Milliseconds from sending the last heartbeat to reading it back, -1 if none came back.",
    "last_asked_ms": "Milliseconds since the program last asked for messages, -1 for a planner.",
    "in_flight": "Messages delivered and not acked.",
    "buffered": "Messages fetched and not delivered.",
    "parked": "Partitions of its topics that no member may consume until an admin has looked at them.",
    "paused": "1 while the group is paused.",
}
PARTITION_GAUGES: Final = {
    "position": "Next offset to read.",
    "lag": "Messages behind the end, -1 before the first look.",
    "oldest_unacked_ms": "For how long the oldest unacked message's handler has been silent, 0 if there is none.",
    "delayed": "Messages given back that wait to be delivered again; at 1,000 the partition delivers nothing new.",
    "most_deliveries": "Deliveries of the most often delivered unfinished message; it grows with a poison message.",
    "oldest_unfinished_ms": "For how long the program has had its lowest unfinished message, 0 if it has none.",
}
# Of a `process`, by field of ProcessStats.
PROCESS_COUNTERS: Final = {
    "finished": "Messages whose handlers have returned.",
    "retried": "Messages that are tried again after an error or a Retry.",
    "ended": "Messages that were rejected, or have failed too often.",
}
PROCESS_GAUGES: Final = {
    "working": "Messages that handlers have.",
    "retrying": "Messages that were given back, for which their lanes wait.",
    "oldest_s": "For how many seconds the oldest unfinished message has been in work or waiting.",
}


class Collector:
    """Turns `Marshal.metrics()` into metrics of prometheus-client. Use: `registry.register(Collector(marshal))`."""

    def __init__(self, marshal: Marshal) -> None:
        """Collects the metrics of `marshal`. Raises UnsupportedPlatform if prometheus-client is not installed."""
        self._families = _prometheus()
        self._marshal = marshal

    def collect(self) -> Iterator[Any]:  # of prometheus_client.Metric, which is imported only when it is used
        core, found = self._families, self._marshal.metrics()
        yield core.CounterMetricFamily(
            f"{PREFIX}_records_folded", "Coordination records read and folded.", value=found.records_folded
        )
        yield core.CounterMetricFamily(
            f"{PREFIX}_produce_errors", "Coordination records that were not written.", value=found.produce_errors
        )
        yield core.CounterMetricFamily(
            f"{PREFIX}_callbacks_dropped",
            "Callbacks that found too many others waiting.",
            value=found.callbacks_dropped,
        )
        yield core.CounterMetricFamily(
            f"{PREFIX}_stalled_ms", "Milliseconds that the heartbeats' thread did not run.", value=found.stalled_ms
        )
        yield core.GaugeMetricFamily(
            f"{PREFIX}_longest_stall_ms", "Most of these at once.", value=found.longest_stall_ms
        )
        for names, family in ((COUNTERS, core.CounterMetricFamily), (GAUGES, core.GaugeMetricFamily)):
            for name, text in names.items():
                metric = family(f"{PREFIX}_{name}", text, labels=("group", "client_id"))
                for consumer in found.consumers:
                    metric.add_metric(
                        (consumer.group, consumer.client_id), float(getattr(consumer, FIELDS.get(name, name)))
                    )
                yield metric
        metric = core.GaugeMetricFamily(
            f"{PREFIX}_not_consumed",
            "Partitions of the group that nobody consumes, by cause; 1 where it is the group or this consumer.",
            labels=("group", "client_id", "cause"),
        )
        for consumer in found.consumers:
            for cause in (each for each in CAUSES if each not in OBSERVED):
                metric.add_metric((consumer.group, consumer.client_id, cause), consumer.not_consumed.get(cause, 0))
        yield metric
        yield from self._process(found.consumers)
        for name, text in PARTITION_GAUGES.items():
            metric = core.GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=("group", "topic", "partition"))
            for consumer, partition in _claims(found.consumers):
                metric.add_metric((consumer.group, partition.topic, str(partition.partition)), getattr(partition, name))
            yield metric

    def _process(self, consumers: list[ConsumerMetrics]) -> Iterator[Any]:
        """Yields the figures of each `process`."""
        core, labels = self._families, ("group", "client_id")
        running = [((one.group, one.client_id), one.process) for one in consumers if one.process is not None]
        for names, family in ((PROCESS_COUNTERS, core.CounterMetricFamily), (PROCESS_GAUGES, core.GaugeMetricFamily)):
            for name, text in names.items():
                metric = family(f"{PREFIX}_process_{name}", text, labels=labels)
                for named, stats in running:
                    metric.add_metric(named, float(getattr(stats, name)))
                yield metric
        waiting = core.GaugeMetricFamily(
            f"{PREFIX}_process_waiting",
            "Messages that wait in lanes, by what they wait for.",
            labels=(*labels, "reason"),
        )
        times = core.HistogramMetricFamily(f"{PREFIX}_process_handler_s", "Seconds that handlers took.", labels=labels)
        for named, stats in running:
            for reason, count in stats.waiting_for.items():
                waiting.add_metric((*named, reason), count)
            bounds = [*map(str, HANDLER_S), "+Inf"]
            times.add_metric(named, list(zip(bounds, accumulate(stats.handler_s), strict=True)), stats.handler_sum_s)
        yield waiting
        yield times


def _claims(consumers: list[ConsumerMetrics]) -> Iterator[tuple[ConsumerMetrics, PartitionMetrics]]:
    for consumer in consumers:
        for partition in consumer.partitions:
            yield consumer, partition


def _prometheus() -> Any:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise UnsupportedPlatform(
            "the Prometheus exporter", "a Python without prometheus-client", "pip install 'marshal_py[metrics]'"
        ) from error
    return core


class Exporter:
    """Serves metrics over HTTP. It is a context manager: leaving it ends the server, not the Marshal."""

    def __init__(self, marshal: Marshal, port: int, address: str) -> None:
        collector = Collector(marshal)
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise port_error(address, port, error) from error
        self.port: int = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(marshal: Marshal, port: int, address: str = LOOPBACK) -> Exporter:
    """Serves the metrics of a Marshal at http://address:port/metrics until `close`. Port 0 takes a free one.

    With the default address only this machine can ask. With "0.0.0.0" every machine can, which a container needs.
    Raises UnsupportedPlatform without prometheus-client, InvalidOption if the port cannot be used.
    """
    return Exporter(marshal, port, address)
