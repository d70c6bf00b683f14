"""Takes the figures of a running Marshal, as plain values: the result of `Marshal.metrics()`.

It costs a pass over the claims under the lock, and no request. Counts are of this process, since the consumer was made,
and never fall. Messages that are delivered one by one are counted chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.redelivery import most_deliveries, redeliveries_of
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.receive.membership import not_consumed
from marshal_py.client.values.info import ProcessStats, in_flight
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
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
        max(0, queue.delivered + undelivered - redelivered - unacked - counters.abandoned),
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
            _oldest_unfinished_ms(claim, now),
        )


def _oldest_unfinished_ms(claim: Claim, now: Instant) -> int:
    first = claim.tracker.first_taken() if isinstance(claim.tracker, AtLeastOnce) else None
    return 0 if first is None else max(0, now.mono_ms - first[0])
