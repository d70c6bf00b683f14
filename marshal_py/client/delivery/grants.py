"""Decides which offsets to ask grants for, in at-most-once mode (PROTOCOL.md D2).

A grant is the log's permission to deliver a range of offsets; the member asks for it. A fast user's grants are asked
for before the messages are taken from the source, up to the end of the partition: messages that wait in Python for
their grant cost the garbage collector a visit at each collection. Called with the Marshal's lock held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from marshal_py.client.delivery.buffers import Buffer
from marshal_py.client.delivery.prefetch import SLOW_PER_S, HandlingRate
from marshal_py.client.values.options import BOUNDS
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtMostOnce
from marshal_py.protocol.member.rebalance import GRANTS_AHEAD
from marshal_py.transport.ports import DataSource

GRANTED_MS: Final = 2_000  # of the handler's work at most are granted and not delivered, in all partitions together


def before_fetching(rate: HandlingRate) -> bool:
    """Returns whether to ask for unfetched offsets: for a fast user. A slow one's grants, and those near a partition's
    end, where a transaction may be open, are for fetched messages only: nothing is granted that may come late or
    never."""
    return rate.per_second() >= SLOW_PER_S


def backlog(delivering: Iterable[tuple[Buffer, Claim]], source: DataSource) -> bool:
    """Returns whether a partition has a whole grant of offsets that are not fetched."""
    return any(source.end_offset(claim.tp) - buffer.next_offset >= BOUNDS.grant for buffer, claim in delivering)


def all_fetched(buffer: Buffer, tracker: AtMostOnce, spent: bool) -> bool:
    """Returns whether no more can be granted now, and all granted were fetched. `spent`: the consumer has all its
    grants (`Offered`)."""
    no_more = len(tracker.grants) >= GRANTS_AHEAD or (spent and tracker.asked is None)
    return no_more and tracker.granted_to() <= buffer.next_offset


def awaited(delivering: Iterable[tuple[Buffer, Claim]]) -> bool:
    """Returns whether fetched messages wait for their grant."""
    return any(
        buffer.fetched and isinstance(claim.tracker, AtMostOnce) and buffer.next_offset > claim.tracker.granted_to()
        for buffer, claim in delivering
    )


def asked(delivering: Iterable[tuple[Buffer, Claim]]) -> bool:
    """Returns whether a grant of fetched messages was asked for and not read yet, or is about to be asked for."""
    return any(
        buffer.fetched
        and isinstance(claim.tracker, AtMostOnce)
        and (claim.offer is not None or claim.tracker.asked is not None)
        for buffer, claim in delivering
    )


class Offered(NamedTuple):
    """Says what `offer` did. `something`: the member can ask for a grant now. `spent`: no more may be granted now."""

    something: bool
    spent: bool


def offer(buffers: Collection[Buffer], source: DataSource, rate: HandlingRate, *, ends: bool) -> Offered:
    """Sets each claim's `offer`: about a second of work (`rate`), shared, BOUNDS.grant at most. All undelivered grants
    are GRANTED_MS of work at most, or one message, as a crash loses them. `buffers` in the order of delivery. `ends`:
    nothing more is delivered or offered."""
    if ends:
        for buffer in buffers:
            if buffer.claim is not None:
                buffer.claim.offer = None
        return Offered(False, False)
    ahead = before_fetching(rate)
    lacking: list[tuple[Buffer, Claim, AtMostOnce, int]] = []  # with the offset up to which to ask
    waiting = 0  # partitions that have messages, fetched or not
    supplied = False  # whether another partition will need its next grant soon
    for buffer in buffers:
        claim = buffer.claim
        if claim is None:
            continue
        waiting += bool(buffer.fetched)
        tracker = claim.tracker
        if not isinstance(tracker, AtMostOnce) or claim.phase is not ClaimPhase.OPEN:
            continue
        if not buffer.fetched:
            tracker.skipped(buffer.next_offset)
        tracker.holds(buffer.first_offset(tracker))  # drops grants that are used up, or hold no message
        may_fetch = ahead and not buffer.held_back and source.fetching(claim.tp)
        end = source.end_offset(claim.tp) if may_fetch else -1
        more = end > tracker.granted_to()
        waiting += more and not buffer.fetched
        if tracker.asked is not None or len(tracker.grants) >= GRANTS_AHEAD:
            supplied = supplied or more  # its offer stays as it is: a look at the buffer costs time
        else:
            lacking.append((buffer, claim, tracker, end))
    each = max(1, min(BOUNDS.grant, rate.within(1_000) // max(1, waiting)))
    # One record asks for all partitions. So a fast user's next grants wait until every partition needs one, but no
    # longer than the first of them has half a grant left.
    now = not (ahead and supplied) or any(_half_used(buffer, tracker, each) for buffer, _, tracker, _ in lacking)
    something = False
    left = rate.within(GRANTED_MS) - _undelivered(buffers) if now and lacking else 0
    for buffer, claim, tracker, end in lacking:
        count = min(each, left)
        claim.offer = buffer.ungranted(tracker, count, end) if count > 0 else None
        if claim.offer is not None:
            something, left = True, left - count
    return Offered(something, bool(now and lacking) and left <= 0)


def _undelivered(buffers: Iterable[Buffer]) -> int:
    """Returns how many messages are granted or asked for, and not delivered."""
    total = 0
    for buffer in buffers:
        tracker = buffer.claim.tracker if buffer.claim is not None else None
        if isinstance(tracker, AtMostOnce) and (tracker.grants or tracker.asked is not None):
            to = tracker.granted_to() if tracker.asked is None else tracker.asked[2]
            total += buffer.below(to, tracker)
    return total


def _half_used(buffer: Buffer, tracker: AtMostOnce, each: int) -> bool:
    granted_to = tracker.granted_to()
    return buffer.next_offset > granted_to or 2 * (granted_to - tracker.delivered_to) <= each
