"""Builds the records of one claim: its entry in a heartbeat (PROTOCOL.md T11) and its Release (T16, F6)."""

from __future__ import annotations

from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.fold.world import Partition
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import ClaimState, ReleasingPartition, SeekingPartition


def claim_state(partition: Partition, claim: Claim) -> ClaimState | None:
    """Returns the heartbeat entry of a claim; None if the world already holds the same values (T11)."""
    tracker = claim.tracker
    if isinstance(tracker, AtMostOnce):
        entry = ClaimState(claim.epoch, tracker.handled_to, claim.lag(tracker.delivered_to), tracker.in_flight)
        held = ClaimState(claim.epoch, partition.floor, partition.lag, partition.in_flight)
        return entry if entry != held else None
    position = tracker.position()
    entry = ClaimState(
        claim.epoch, position, claim.lag(position), tracker.in_flight, tracker.attempts(), tracker.progress()
    )
    held = ClaimState(
        claim.epoch, partition.position, partition.lag, partition.in_flight, partition.attempts, partition.progress
    )
    return entry if entry != held else None


def will_entry(claim: Claim) -> ClaimState | None:
    """Returns what a claim keeps for the session's witness (T19); None if the will does not release the claim.

    It counts the message at the position as delivered once more, because the owner will be dead then (F4.5).
    """
    tracker = claim.tracker
    if isinstance(tracker, AtMostOnce) or claim.tp.partition < 0:
        return None
    return ClaimState(claim.epoch, tracker.position(), 0, tracker.in_flight, tracker.attempts(), tracker.progress())


def release(session: int, partition: Partition, claim: Claim) -> ReleasingPartition | SeekingPartition:
    """Returns the Release of a claim, or the SeekingPartition that replaces it by a claim of the same owner (F6.6).

    In at-least-once mode it says where the next owner starts (F6.2), in at-most-once mode it gives back what was
    granted and not handed over (F6.3).
    """
    tracker = claim.tracker
    if claim.seek_to != NONE:
        return SeekingPartition(session, claim.epoch, claim.seek_to)
    if isinstance(tracker, AtMostOnce):
        return ReleasingPartition(
            session,
            claim.epoch,
            NONE,
            claim.successor,
            claim.reason,
            observed=partition.position,
            give=claim.released_position,
            in_flight=tracker.in_flight,
            parked=claim.parking,
        )
    return ReleasingPartition(
        session,
        claim.epoch,
        claim.released_position,
        claim.successor,
        claim.reason,
        attempts=tracker.deliveries(),
        in_flight=tracker.in_flight,
        progress=tracker.progress(),
        parked=claim.parking,
    )
