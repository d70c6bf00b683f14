"""The state of a consumer and of its claims as plain values, for users.

Everything that tells about a state, these and the metrics, advisories, brokers and topics, is a frozen Struct, and no
tuple: its fields have names alone, so a release can add some and breaks nobody who unpacks or counts them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from typing import Final

from msgspec import Struct

from marshal_py.protocol.claims import AtLeastOnce, Claim
from marshal_py.protocol.member.member_state import Ready
from marshal_py.protocol.wire.identity import Token, TopicPartition
from marshal_py.protocol.wire.records import Heartbeat


class ClaimInfo(Struct, frozen=True):
    """A claim as its owner sees it.

    `position`: the lowest offset that is not finished, where a new owner would begin. Messages that were delivered and
    are not acked are at it or above it. `lag`: messages from there to the end of the partition; -1 if unknown.
    `revoking` says why the claim is going to end; it is "" while its messages are delivered. `drain_s`: for how many
    more seconds a claim that is going to end waits for its handlers; -1 for other claims. In at-least-once mode,
    messages that the handlers have not acked by then are delivered again.
    """

    topic: str
    partition: int
    token: Token
    position: int
    lag: int
    revoking: str = ""
    drain_s: float = -1.0


class ConsumerInfo(Struct, frozen=True):
    """The state of a consumer. `in_flight`: messages delivered and not acked.

    `waiting_for`: what keeps it from working, in words; "" when all is well. A standby says there that it waits for
    "its turn", for whom it stands by and when the next in line takes over, or which of its conditions are not met
    (policy `overflow`). `lag`: messages from the positions of its claims to the ends of the partitions. It is -1 while
    the cluster does not have one of its topics, or the end of one of the partitions is not known yet, and while it owns
    nothing and partitions of its topics are parked, that is, closed to all members until an admin has looked at them.
    `grants_dropped`: as in ConsumerMetrics (metrics.py).

    `pending_messages`: of a running `consume`, messages that were asked for and not delivered; with `max_bytes` only
    those that have come. `pending_bytes`: the same in bytes; 0 unless `max_bytes` was given. What is buffered of a
    partition that delivers nothing new before an ack or a redelivery (`max_acks_pending`) counts in neither.

    `began_at_end`: partitions that had messages, where this consumer began at the end because nothing was committed and
    `start` does not say what then. It reads only what came since.

    `closed`: whether the consumer has ended, by itself or because the program has stopped it.
    """

    group: str
    client_id: str
    session: int
    delivery: str
    paused: bool
    claims: dict[TopicPartition, ClaimInfo]
    lag: int
    in_flight: int
    grants_dropped: int
    late_acks: int
    waiting_for: str
    pending_messages: int = 0
    pending_bytes: int = 0
    began_at_end: tuple[TopicPartition, ...] = ()
    closed: bool = False


# --- Counts what the driver of one consumer executes, since the consumer was made. The counts never fall.


class Counters:
    """Counts `records` handed to the producer, and `heartbeats`: how many of these were heartbeats.

    `claims` were won, and `claims_ended` have ended. `abandoned`: messages that were delivered and not acked when their
    claims ended; `dropped`: these, and those that waited for a handler.
    """

    heartbeats: int
    records: int
    claims: int
    claims_ended: int
    abandoned: int
    dropped: int

    def __init__(self) -> None:
        self.heartbeats = self.records = self.claims = self.claims_ended = self.abandoned = self.dropped = 0

    def count(self, ready: Ready) -> None:
        if ready.send:
            self.records += len(ready.send)
            self.heartbeats += sum(isinstance(record, Heartbeat) for record in ready.send)
        self.claims += len(ready.claimed)
        if ready.lost:
            self.claims_ended += len(ready.lost)
            self.abandoned += sum(in_flight(claim) for claim, _ in ready.lost)
            self.dropped += sum(taken(claim) for claim, _ in ready.lost)


def in_flight(claim: Claim) -> int:
    """Returns how many messages of the claim are delivered and not acked; 0 in at-most-once mode."""
    claim.settle()
    return claim.tracker.in_flight if isinstance(claim.tracker, AtLeastOnce) else 0


def taken(claim: Claim) -> int:
    """Returns how many messages of the claim are delivered, or wait for a handler, and are not acked."""
    claim.settle()
    return claim.tracker.taken if isinstance(claim.tracker, AtLeastOnce) else 0


def awaited(claim: Claim) -> int:
    """Returns how many messages of the claim handlers have or will have, without those that were given back."""
    claim.settle()
    return claim.tracker.awaited if isinstance(claim.tracker, AtLeastOnce) else 0


def oldest_unfinished_ms(claim: Claim, now_ms: int) -> int:
    """Returns for how long the program has had the lowest unfinished message of the claim; 0 without one, and in
    at-most-once mode. `now_ms`: monotonic."""
    claim.settle()
    first = claim.tracker.first_taken() if isinstance(claim.tracker, AtLeastOnce) else None
    return 0 if first is None else max(0, now_ms - first[0])


class LaneInfo(Struct, frozen=True):
    """A lane with unfinished messages. `key`: what names it; None in a lane of a partition or of messages
    without a key. `offset`: its first unfinished message. `waiting`: how many messages wait in it. `state`: "working",
    "retrying", "ready"."""

    topic: str
    partition: int
    key: Hashable
    offset: int
    waiting: int
    state: str


class ProcessStats(Struct, frozen=True):
    """Counts messages of one `process`. Now: `working` (handlers have them), `waiting` (in lanes), `retrying` (given
    back, their lanes wait for them). Since it began: `finished` (acked), `retried` (given back after an error or
    `Retry`, or behind such a message of their list), `ended` (by `Reject`, after their last delivery, or behind such a
    message: they go to the dead letters).

    `waiting_for`: how many of `waiting` wait for what: "worker" (nothing but a free one), "batch" (their list is not
    full yet), "lane" (for a message before them), "retry" (one before them is tried again later), "gate" (their
    partition is paused or moves).
    `oldest_s`: for how long the oldest unfinished message has been here, in work or waiting; 0 if there is none.
    `handler_s`: how many handlers took at most so many seconds, by the bounds of HANDLER_S, and more than all of them;
    `handler_sum_s`: how many seconds all of them took together.
    """

    working: int
    waiting: int
    retrying: int
    finished: int
    retried: int
    ended: int
    waiting_for: dict[str, int] = {}
    oldest_s: float = 0.0
    handler_s: tuple[int, ...] = ()
    handler_sum_s: float = 0.0


# Upper bounds of a histogram, in seconds: those that OpenTelemetry advises for messaging.process.duration, and longer.
HANDLER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)


class HandlerTimes:
    """Counts how long handlers took. Callers hold a lock."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(HANDLER_S) + 1)
        self.sum_s: float = 0.0

    def add(self, took_s: float) -> None:
        self.counts[bisect_left(HANDLER_S, took_s)] += 1
        self.sum_s += took_s
