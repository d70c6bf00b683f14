"""Figures of a running Marshal, as plain values: what `Marshal.metrics()` returns, and where the figures come from.

Taking them costs a pass over the claims under the lock, and asks nobody. Counts are of this process since the consumer
was made; they never fall. Messages that are handed over one by one are counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from marshal_py.client.delivery_queue import DeliveryQueue
from marshal_py.protocol.claim import Claim
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.protocol.ready import Ready
from marshal_py.protocol.records import Heartbeat

if TYPE_CHECKING:
    from marshal_py.client.consumer_driver import ConsumerDriver
    from marshal_py.client.loop import Loop


class PartitionMetrics(Struct, frozen=True):
    """A claim. `position`: next offset to read. `end` and `lag` are -1 before the first look at the partition.

    `lag` is also -1 where the end lies below the position: such a partition is being parked (PROTOCOL.md D6).
    """

    topic: str
    partition: int
    epoch: int
    position: int
    end: int
    lag: int
    in_flight: int
    buffered: int


class ConsumerMetrics(Struct, frozen=True):
    """One consumer. `lease_left_ms` is 0 while it is fenced, `round_trip_ms` -1 until a heartbeat came back.

    `take_overs` are claims of partitions whose owner was evicted, `parked` the partitions of its topics that nobody may
    consume until an admin has looked at them. `in_flight`: handed over and not acked. `grants_dropped`: offsets granted
    and dropped, because the lease or the claim was lost; a stop, a pause or a planned move drops none (PROTOCOL.md D3).
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

    @property
    def lag(self) -> int:
        """Messages behind the ends of all partitions whose end is known."""
        return sum(partition.lag for partition in self.partitions if partition.lag > 0)


class Metrics(Struct, frozen=True):
    """One look at a Marshal. `records_folded`: of the coordination log, every group's. `time_ms`: when it was taken.

    `librdkafka`: the newest statistics of each of its clients as JSON texts, by the client's name; empty unless
    `connect` was given a `statistics_interval_ms`. `callbacks_dropped`: calls of the user's that found 100,000 waiting.
    `stalled_ms`, `longest_stall_ms`: in all and at once, how long the thread that heartbeats did not run although it
    should have (200 ms or more at a time).
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


class Counters:
    """Counts of one consumer, from the duties that its station executes."""

    def __init__(self) -> None:
        self.heartbeats = self.records = self.claims = self.claims_ended = self.abandoned = 0

    def count(self, ready: Ready) -> None:
        self.records += len(ready.send)
        self.heartbeats += sum(isinstance(record, Heartbeat) for record in ready.send)
        self.claims += len(ready.claimed)
        self.claims_ended += len(ready.lost)
        self.abandoned += sum(_in_flight(claim) for claim, _ in ready.lost)


def consumers_of(loop: Loop, now: Instant) -> list[ConsumerMetrics]:
    """Every consumer that has not ended. The lock is held."""
    return [_consumer(driver, now) for driver in loop.drivers]


def _consumer(driver: ConsumerDriver, now: Instant) -> ConsumerMetrics:
    member, tally, queue = driver.member, driver.tally, driver.queue
    partitions = list(_partitions(driver, member.claims.values()))
    in_flight = sum(partition.in_flight for partition in partitions)
    # A consumer that plans ranges hands no messages over: others read what it grants.
    delivered = queue.delivered if isinstance(queue, DeliveryQueue) else 0
    return ConsumerMetrics(
        member.name,
        member.options.client_id,
        member.session,
        driver.options.delivery,
        member.paused,
        max(0, member.lease_left_ms(now)) if member.session != NONE else 0,
        member.round_trip_ms,
        tally.heartbeats,
        tally.records,
        tally.claims,
        tally.claims_ended,
        member.take_overs,
        len(driver.parked()),
        delivered,
        max(0, delivered - in_flight - tally.abandoned),
        in_flight,
        queue.buffered() if isinstance(queue, DeliveryQueue) else 0,
        member.late_acks,
        member.grants_dropped,
        partitions,
    )


def _partitions(driver: ConsumerDriver, claims: Iterable[Claim]) -> Iterable[PartitionMetrics]:
    buffers = driver.queue.buffers if isinstance(driver.queue, DeliveryQueue) else {}
    for claim in claims:
        position, end = driver.position(claim), driver.end_offset(claim.tp)
        buffer = buffers.get(claim.tp)
        yield PartitionMetrics(
            *claim.tp,
            claim.epoch,
            position,
            end,
            driver.lag(claim),
            _in_flight(claim),
            buffer.size if buffer is not None else 0,
        )


def _in_flight(claim: Claim) -> int:
    return claim.tracker.in_flight if isinstance(claim.tracker, AtLeastOnce) else 0
