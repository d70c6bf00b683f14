"""The figures of a running Marshal: as plain values, the result of `Marshal.metrics()`, and for Prometheus.

It costs a pass over the claims under the lock, and no request. Counts are of this process, since the consumer was made,
and never fall. Messages that are delivered one by one are counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, Protocol, Self

from msgspec import Struct

from marshal_py.client.delivery.buffers import most_deliveries, redeliveries_of
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import not_consumed
from marshal_py.client.values.info import HANDLER_S, ProcessStats, in_flight, oldest_unfinished_ms, taken
from marshal_py.errors import InvalidOption, UnsupportedPlatform
from marshal_py.protocol.claims import Claim
from marshal_py.protocol.member.waiting import CAUSES, OBSERVED
from marshal_py.protocol.wire.identity import NONE, Instant


class PartitionMetrics(Struct, frozen=True):
    """The figures of one claim.

    `position`: next offset to read. `end`, `lag`: -1 while the partition's end is unknown. `lag` is also -1 if the end
    lies below the position: such a partition is being parked, so that no member may consume it until an admin has moved
    the position (PROTOCOL.md D6). `delayed`: messages that handlers gave back (`nak`) and that wait to be delivered
    again; at 1,000 nothing new of the partition is delivered. `oldest_unacked_ms`: for how long the handler of its
    oldest unacked message has been silent; 0 if no handler has a message. `most_deliveries`: how often the message at
    the position, or one above it that came again here, was delivered: the most of those that are unfinished, 0 if there
    is none. A message that is given back again and again, or that kills its consumers, makes it grow.
    `oldest_unfinished_ms`: for how long the program has had the lowest message that is not finished, in a handler, in a
    lane of a `process`, or given back; 0 if it has none.
    """

    topic: str
    partition: int
    epoch: int
    position: int
    end: int
    lag: int
    in_flight: int
    buffered: int
    delayed: int = 0
    oldest_unacked_ms: int = 0
    most_deliveries: int = 0
    oldest_unfinished_ms: int = 0


class ConsumerMetrics(Struct, frozen=True):
    """The figures of one consumer.

    `lease_left_ms`: for how many ms the lease still lets deliveries begin; 0 while the member is fenced.
    `round_trip_ms`: how many ms passed until its last heartbeat was read back; -1 before the first one. `take_overs`:
    claims of partitions whose owner was evicted. `parked`: the partitions of its topics that no member may consume
    until an admin has looked at them. `in_flight`: messages delivered and not acked. `grants_dropped`: offsets that
    were granted, not delivered, and dropped, because the lease or the claim was lost; a stop, a pause or a planned move
    drops none (PROTOCOL.md D3). `grants_lost`: offsets that were granted to the last owner of a partition that this
    consumer took over, and that this owner, whose session ended without giving them back, may have lost: at most so
    many. `naks`: messages that handlers gave back;
    `redelivered`: deliveries of such messages; `terminated`: messages that handlers ended by `term`.
    `dead_letters`: messages that Kafka has acknowledged in the dead-letter topic. `last_asked_ms`: for how many ms the
    program has been in no call that asks for messages (`fetch`, `next`, a loop, `consume`), since the consumer was made
    if in none so far; some hundred at most while it waits in one. -1 for a planner, whose messages others read.
    `not_consumed`: the causes for which nobody consumes partitions of the group, or this consumer none
    (docs/operations.md): of how many partitions each, or 1 where it is all of them or this consumer. `process`: the
    figures of its running `process`, None without one.
    """

    group: str
    client_id: str
    session: int
    delivery: str
    paused: bool
    lease_left_ms: int
    round_trip_ms: int
    heartbeats_sent: int
    records_sent: int
    claims: int
    claims_ended: int
    take_overs: int
    parked: int
    messages_delivered: int
    messages_acked: int
    in_flight: int
    buffered: int
    late_acks: int
    grants_dropped: int
    partitions: list[PartitionMetrics]
    naks: int = 0
    redelivered: int = 0
    terminated: int = 0
    dead_letters: int = 0
    last_asked_ms: int = -1
    grants_lost: int = 0
    not_consumed: dict[str, int] = {}
    process: ProcessStats | None = None

    @property
    def delayed(self) -> int:
        """Returns how many messages wait to be delivered again, because their handlers gave them back."""
        return sum(partition.delayed for partition in self.partitions)

    @property
    def lag(self) -> int:
        """Returns how many messages the claims are behind the ends of their partitions.

        Claims whose partition's end is unknown are left out.
        """
        return sum(partition.lag for partition in self.partitions if partition.lag > 0)


class Metrics(Struct, frozen=True):
    """The figures of one Marshal, taken at `time_ms` (ms since 1970).

    `records_folded`: how many records of the coordination topic it has folded, those of all groups. `librdkafka`: the
    newest statistics of each of its clients as JSON texts, by the client's name; empty unless `connect` was given a
    `statistics_interval_ms`. `callbacks_dropped`: calls of user callbacks that were dropped because 100,000 were
    waiting. `stalled_ms`: for how many ms in all the background thread, which sends the heartbeats, did not run
    although it should have; only stalls of 200 ms or more count. `longest_stall_ms`: the longest of these.
    """

    client_id: str
    coordination_topic: str
    time_ms: int
    records_folded: int
    produce_errors: int
    waiting_for: str
    consumers: list[ConsumerMetrics]
    librdkafka: dict[str, str]
    callbacks_dropped: int = 0
    stalled_ms: int = 0
    longest_stall_ms: int = 0


def consumers_of(drivers: Iterable[ConsumerDriver], now: Instant) -> list[ConsumerMetrics]:
    """Returns the figures of these consumers. Call it with the lock held."""
    return [_consumer(driver, now) for driver in drivers]


def _consumer(driver: ConsumerDriver, now: Instant) -> ConsumerMetrics:
    member, counters, queue = driver.member, driver.counters, driver.queue
    partitions = list(_partitions(driver, member.claims.values(), now))
    unacked = sum(partition.in_flight for partition in partitions)
    had = sum(map(taken, member.claims.values()))
    answers = queue.answers if isinstance(queue, DeliveryQueue) else None
    naks, redelivered, terminated = (answers.naks, answers.redelivered, answers.terminated) if answers else (0, 0, 0)
    letters, undelivered = (answers.letters, answers.undelivered) if answers else (None, 0)
    process = queue.window.process if isinstance(queue, DeliveryQueue) else None
    return ConsumerMetrics(
        member.name,
        member.options.client_id,
        member.session,
        driver.options.delivery,
        member.paused,
        max(0, member.lease_left_ms(now)) if member.session != NONE else 0,
        member.round_trip_ms,
        counters.heartbeats,
        counters.records,
        counters.claims,
        counters.claims_ended,
        member.take_overs,
        len(driver.parked()),
        queue.delivered,
        max(0, queue.delivered + undelivered - redelivered - had - counters.dropped),
        unacked,
        queue.buffered(),
        member.late_acks,
        member.grants_dropped,
        partitions,
        naks,
        redelivered,
        terminated,
        0 if letters is None else letters.written,
        max(0, now.mono_ms - queue.asked_ms) if isinstance(queue, DeliveryQueue) else -1,
        member.grants_lost,
        not_consumed(driver),
        process.stats() if process is not None else None,
    )


def _partitions(driver: ConsumerDriver, claims: Iterable[Claim], now: Instant) -> Iterable[PartitionMetrics]:
    for claim in claims:
        position, end = driver.position(claim), driver.end_offset(claim.tp)
        yield PartitionMetrics(
            *claim.tp,
            claim.epoch,
            position,
            end,
            driver.lag(claim),
            in_flight(claim),
            driver.queue.buffered_of(claim.tp),
            len(again.waiting) if (again := redeliveries_of(claim)) is not None else 0,
            0 if (since_ms := claim.handler_since_ms()) is None else max(0, now.mono_ms - since_ms),
            most_deliveries(claim),
            oldest_unfinished_ms(claim, now.mono_ms),
        )


# --- Where metrics are served, for the servers of a client and of a cluster's groups


LOOPBACK: Final = "127.0.0.1"  # a library opens no port to the network unless it is asked to


def metrics_url(address: str, port: int) -> str:
    """Returns where Prometheus asks; an address of IPv6 is in brackets."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"


def port_error(address: str, port: int, error: Exception) -> InvalidOption:
    """Returns the error for a port that cannot be used."""
    return InvalidOption(
        "metrics port",
        f"{address}:{port}",
        f"it cannot be used ({error}): name another port, 0 for a free one, or another address of this machine",
    )


# --- Metrics for Prometheus: a collector over `Marshal.metrics()`, and a small server. Needs the extra `metrics`.
#
# prometheus-client is imported only when it is used: programs without metrics do not need it.


PREFIX: Final = "marshal"

# Name of the metric -> help. Counters end in _total when they are shown. Of the Marshal, by field of Metrics:
OF_THE_MARSHAL: Final = {
    "records_folded": "Coordination records read and folded.",
    "produce_errors": "Coordination records that were not written.",
    "callbacks_dropped": "Callbacks that found too many others waiting.",
    "stalled_ms": "Milliseconds that the heartbeats' thread did not run.",
    "longest_stall_ms": "Most of these at once.",
}
# Of each consumer:
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
    "retried": "Messages that are tried again after an error or a Retry, or behind such a message in a list.",
    "ended": "Messages that were rejected, or have failed too often.",
}
PROCESS_GAUGES: Final = {
    "working": "Messages that handlers have.",
    "retrying": "Messages that were given back, for which their lanes wait.",
    "oldest_s": "For how many seconds the oldest unfinished message has been in work or waiting.",
}


class Measured(Protocol):
    """Has figures: a Marshal of either front."""

    def metrics(self) -> Metrics: ...


class Collector:
    """Turns `Marshal.metrics()` into metrics of prometheus-client. Use: `registry.register(Collector(marshal))`."""

    def __init__(self, marshal: Measured) -> None:
        """Collects the metrics of `marshal`. Raises UnsupportedPlatform if prometheus-client is not installed."""
        self._families = _prometheus()
        self._marshal = marshal

    def collect(self) -> Iterator[Any]:  # of prometheus_client.Metric, which is imported only when it is used
        core, found = self._families, self._marshal.metrics()
        for name, text in OF_THE_MARSHAL.items():
            family = core.GaugeMetricFamily if name == "longest_stall_ms" else core.CounterMetricFamily
            yield family(f"{PREFIX}_{name}", text, value=getattr(found, name))
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
            for consumer in found.consumers:
                for one in consumer.partitions:
                    metric.add_metric((consumer.group, one.topic, str(one.partition)), getattr(one, name))
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

    def __init__(self, marshal: Measured, port: int, address: str) -> None:
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


def serve(marshal: Measured, port: int, address: str = LOOPBACK) -> Exporter:
    """Serves the metrics of a Marshal at http://address:port/metrics until `close`. Port 0 takes a free one.

    With the default address only this machine can ask. With "0.0.0.0" every machine can, which a container needs.
    Raises UnsupportedPlatform without prometheus-client, InvalidOption if the port cannot be used.
    """
    return Exporter(marshal, port, address)
