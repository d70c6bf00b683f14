"""Decides which fetched messages to ask grants for, in at-most-once mode (PROTOCOL.md D2).

A grant is the log's permission to deliver a range of offsets; the member asks for it. Called with the Marshal's lock
held.
"""

from __future__ import annotations

from collections.abc import Collection

from marshal_py.client.buffers import Buffer
from marshal_py.client.handling_rate import HandlingRate
from marshal_py.protocol.claim import ClaimPhase
from marshal_py.protocol.delivery import AtMostOnce
from marshal_py.protocol.rebalance import GRANTS_AHEAD


def offer(buffers: Collection[Buffer], rate: HandlingRate, grant_messages: int, *, ends: bool) -> bool:
    """Sets each claim's `offer`: offsets to ask a grant for. Returns whether the member can ask for one now.

    A grant holds about a second of the handler's work (`rate`), shared by the partitions, and at most `grant_messages`.
    `ends`: the consumer delivers nothing more, so that nothing is offered.
    """
    something = False
    waiting = sum(buffer.claim is not None and bool(buffer.fetched) for buffer in buffers)
    each = max(1, min(grant_messages, rate.per_second() // max(1, waiting)))
    for buffer in buffers:
        claim = buffer.claim
        if claim is None or not isinstance(claim.tracker, AtMostOnce) or claim.phase is not ClaimPhase.OPEN:
            continue
        if ends:
            claim.offer = None
            continue
        claim.tracker.holds(claim.tracker.delivered_to)  # drops grants that are used up
        if claim.tracker.asked is not None or len(claim.tracker.grants) >= GRANTS_AHEAD:
            continue  # its offer stays as it is: a look at the buffer costs time
        claim.offer = buffer.ungranted(claim.tracker, each)
        something = something or claim.offer is not None
    return something
