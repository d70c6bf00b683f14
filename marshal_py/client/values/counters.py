"""Counts what the driver of one consumer executes, since the consumer was made. The counts never fall."""

from __future__ import annotations

from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.member.member_state import Ready
from marshal_py.protocol.wire.records import Heartbeat


class Counters:
    """Counts `records` handed to the producer, and `heartbeats`: how many of these were heartbeats.

    `claims` were won, and `claims_ended` have ended. `abandoned`: messages that were delivered and not acked when their
    claims ended.
    """

    heartbeats: int
    records: int
    claims: int
    claims_ended: int
    abandoned: int

    def __init__(self) -> None:
        self.heartbeats = self.records = self.claims = self.claims_ended = self.abandoned = 0

    def count(self, ready: Ready) -> None:
        self.records += len(ready.send)
        self.heartbeats += sum(isinstance(record, Heartbeat) for record in ready.send)
        self.claims += len(ready.claimed)
        self.claims_ended += len(ready.lost)
        self.abandoned += sum(in_flight(claim) for claim, _ in ready.lost)


def in_flight(claim: Claim) -> int:
    """Returns how many messages of the claim are delivered and not acked; 0 in at-most-once mode."""
    claim.settle()
    return claim.tracker.in_flight if isinstance(claim.tracker, AtLeastOnce) else 0


def held(claim: Claim) -> int:
    """Returns how many messages of the claim handlers have: those in flight, without those that were given back."""
    claim.settle()
    return claim.tracker.held if isinstance(claim.tracker, AtLeastOnce) else 0
