"""What a consumer tells of itself: plain values, made under the lock, without a way back."""

from __future__ import annotations

from typing import NamedTuple

from marshal_py.protocol.identity import Token, TopicPartition


class ClaimInfo(NamedTuple):
    """A claim as its owner sees it. `position`: next offset to read. `lag`: messages behind the end, -1 if unknown.

    `revoking` says why the claim is to go, "" while messages of it are handed over. `drain_s`: for how many seconds it
    still waits for its handlers, -1 while it is not to go. What they have not acked by then is delivered again in
    at-least-once mode.
    """

    topic: str
    partition: int
    token: Token
    position: int
    lag: int
    revoking: str = ""
    drain_s: float = -1.0


class ConsumerInfo(NamedTuple):
    """What a consumer knows of itself. Offsets are next offsets to read; `waiting_for` is "" when all is well.

    `lag` is of its claims. It is -1 where nobody knows how far behind it is: while the cluster does not have one of its
    topics, and while it owns nothing and partitions of its topics are parked.
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
