"""Ranges instead of messages: what a Station holds whose messages are read elsewhere, by Spark's executors.

`Ranges` stands where otherwise a Flow stands: the same claims, trackers, grants and gate, so that leases, pauses,
hand-overs and handler timeouts are the member's as ever; only the bytes never come here. At most one range per claim is
in flight (PROTOCOL.md D9): a range is to a claim what a message is to a handler. Everything is called with the
Marshal's lock held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from marshal_py.protocol.claim import Claim, ClaimPhase
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce, OffsetRun
from marshal_py.protocol.identity import NONE, Instant, Token, TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.protocol.records import GRANT_OFFSETS_MAX
from marshal_py.transport.ports import Bounds

BEGUN_KEPT: Final = 64  # claims of a partition: who has had more since a batch was planned delivers it again


class ClaimedRange(NamedTuple):
    """Offsets [start, to) of one partition under one claim. Offsets in between may not exist.

    `generation`: of the position that it begins at; a SetPosition makes a new one.
    """

    topic: str
    partition: int
    start: int
    to: int
    token: Token
    generation: int

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Taken(NamedTuple):
    """A range that was handed over, and what finishes it. `run` is None in at-most-once mode."""

    range: ClaimedRange
    claim: Claim
    run: OffsetRun | None
    first: int


class Begun(NamedTuple):
    """A claim of this process: its epoch and session, and the session that owned the partition directly before."""

    epoch: int
    session: int
    after: int


class PlannedClaim:
    """One claim as a planner sees it."""

    __slots__ = ("claim", "next_offset", "requested", "taken")

    def __init__(self, claim: Claim, next_offset: int) -> None:
        self.claim = claim
        self.next_offset = next_offset  # where planning goes on
        self.taken: Taken | None = None
        self.requested: tuple[int, int] | None = None  # in at-most-once mode: the range that a grant is wanted for


class Ranges:
    """All lots of one Consumer."""

    def __init__(self, member: Member, incarnation: bytes) -> None:
        self.member, self.incarnation = member, incarnation
        self.claims: dict[TopicPartition, PlannedClaim] = {}
        self.begun: dict[TopicPartition, deque[Begun]] = {}  # the newest claims, in their order, also those that ended
        self.prefetching: set[TopicPartition] = set()
        self.user_paused: set[TopicPartition] = set()
        self.at_most_once = False  # of the first claim: a group has one mode

    # --- what the Station tells, as it tells a Flow

    delivered = 0  # nothing passes through this process: other processes read the ranges

    def buffered(self) -> int:
        return 0

    def buffered_of(self, tp: TopicPartition) -> int:
        return 0

    def has(self, tp: TopicPartition) -> bool:
        """Whether the partition is claimed here."""
        return tp in self.claims

    def start_prefetch(self, tp: TopicPartition, position: int) -> None:
        """Nothing is fetched ahead; the successor is ready as soon as it knows the partition's end (A3)."""
        self.prefetching.add(tp)

    def open(self, claims: Iterable[Claim], positions: Mapping[TopicPartition, int]) -> None:
        """Claims were read accepted: plan from their positions."""
        for claim in claims:
            self.prefetching.discard(claim.tp)
            self.at_most_once = isinstance(claim.tracker, AtMostOnce)
            self.claims[claim.tp] = PlannedClaim(claim, positions[claim.tp])
            self._note_begun(claim)

    def _note_begun(self, claim: Claim) -> None:
        group = self.member.group
        assert group is not None
        known = self.begun.setdefault(claim.tp, deque(maxlen=BEGUN_KEPT))
        if not known or known[-1].epoch < claim.epoch:
            known.append(Begun(claim.epoch, self.member.session, group.partitions[claim.tp].last_owner))

    def drop(self, tps: Iterable[TopicPartition]) -> None:
        """Claims are gone, or their hand-over will not come."""
        for tp in tps:
            self.claims.pop(tp, None)
            self.prefetching.discard(tp)

    def restart(self, tp: TopicPartition, position: int) -> None:
        """Go on at `position`: what lies before it is lost (D6)."""
        self.claims[tp].next_offset = position

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Local pause by the user: the claims stay."""
        self.user_paused.update(tps)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        self.user_paused.difference_update(tps)

    def ends_wanted(self) -> list[TopicPartition]:
        """Partitions whose ends are wanted: for planning, for the lag, for hand-overs."""
        return [*self.claims, *self.prefetching]

    def settled(self) -> bool:
        """Whether nobody's partition is still to come here: each is this member's or a live one's."""
        member = self.member
        group = member.group
        if group is None or member.session == NONE or member.session not in group.sessions:
            return False
        if group.paused:
            return True
        limit = member.options.claims_max
        if limit and len(member.claims) >= limit:
            return True
        for topic in member.options.topics:
            known = group.topics.get(topic)
            if known is None:
                return False
            for number in range(known.count):
                part = group.partitions.get(TopicPartition(topic, number))
                if part is not None and part.parked:
                    continue  # nobody's until an admin has looked at it
                owner = None if part is None else group.sessions.get(part.owner)
                # An owner that has shown no sign of life since we joined may be dead: it is being waited out.
                if owner is None or (owner.id != member.session and owner.extended < member.session):
                    return False
        return not member.awaits_hand_overs(group)

    # --- planning

    def adopt(self, claims: Iterable[Claim]) -> None:
        """Claims of before this consumer planned: what was fetched for them and not handed over is forgotten."""
        for claim in claims:
            if isinstance(claim.tracker, AtLeastOnce):
                start = claim.tracker.forget_undelivered()
            else:
                self.member.drop_grants(claim)
                start = claim.tracker.delivered_to
            self.open([claim], {claim.tp: start})

    def available(self, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, tuple[int, int]]:
        """[start, to) that each open claim could plan now. A lost range is noted in the log and passed (D6)."""
        found: dict[TopicPartition, tuple[int, int]] = {}
        for tp, planned in self.claims.items():
            if (
                tp not in bounds
                or planned.claim.phase is not ClaimPhase.OPEN
                or planned.taken is not None
                or tp in self.user_paused
            ):
                continue
            first, end = bounds[tp]
            start, end = self._unfinished(planned, end)
            if start < first:
                self.member.note("offset_lost", tp, start, first)
                self.restart(tp, first)
                start = first
            if start < end:
                found[tp] = (start, end)
        return found

    def beyond(self, bounds: Mapping[TopicPartition, Bounds]) -> list[tuple[TopicPartition, int, int]]:
        """Claims whose position lies beyond the end, with position and end (D6)."""
        return [
            (tp, self._next(planned), bounds[tp].end)
            for tp, planned in self.claims.items()
            if tp in bounds and self._next(planned) > bounds[tp].end
        ]

    def _unfinished(self, planned: PlannedClaim, end: int) -> tuple[int, int]:
        """Where planning goes on, and up to where: around what an earlier owner has finished (D1)."""
        start, tracker = self._next(planned), planned.claim.tracker
        if isinstance(tracker, AtMostOnce):
            return start, end
        if end < tracker.finished_to():
            tracker.discard_inherited()
        low, high = tracker.next_finished(start)
        while low <= start:
            start = planned.next_offset = high
            low, high = tracker.next_finished(start)
        return start, min(end, low)

    def _next(self, planned: PlannedClaim) -> int:
        tracker = planned.claim.tracker
        if isinstance(tracker, AtLeastOnce):
            return planned.next_offset
        tracker.holds(tracker.delivered_to)  # drops what is used up
        if tracker.grants:
            return max(tracker.grants[0].start, tracker.delivered_to)  # granted for a plan that was given up
        return max(planned.next_offset, tracker.delivered_to)

    def range_of(self, tp: TopicPartition, start: int, to: int) -> ClaimedRange:
        """The range as it would be claimed now."""
        claim = self.claims[tp].claim
        return ClaimedRange(*tp, start, to, Token(self.incarnation, claim.epoch), claim.generation)

    # --- handing over and finishing

    def take(self, wanted: ClaimedRange, now: Instant) -> Taken | None:
        """Hands a range over, behind the gate (D8). None if the claim, the gate or the position says no."""
        planned = self.claims.get(wanted.tp)
        if planned is None or planned.taken is not None or planned.claim.epoch != wanted.token.epoch:
            return None
        if wanted.tp in self.user_paused or not self.member.may_deliver(planned.claim.epoch, now):
            return None
        tracker = planned.claim.tracker
        if isinstance(tracker, AtLeastOnce):
            if planned.next_offset != wanted.start:
                return None
            run = tracker.add(range(wanted.start, wanted.to))
            planned.taken = Taken(wanted, planned.claim, run, run.deliver(wanted.to - wanted.start, now.mono_ms))
        else:
            start = self._next(planned)
            if not tracker.holds(start):
                return None
            wanted = wanted._replace(start=start, to=tracker.grants[0].to)
            tracker.deliver(wanted.to - 1, now.mono_ms)
            planned.requested, planned.taken = None, Taken(wanted, planned.claim, None, 0)
        planned.next_offset = wanted.to
        return planned.taken

    def finish(self, taken: Taken) -> bool:
        """The range is done. False if the claim has been released or lost meanwhile."""
        planned = self.claims.get(taken.range.tp)
        if planned is not None and planned.taken is taken:
            planned.taken = None
        if taken.claim.sealed:
            return not self.member.ack_is_late(taken.claim)
        if taken.run is not None:
            taken.run.finish_range(taken.first, taken.first + taken.range.to - taken.range.start)
        elif isinstance(taken.claim.tracker, AtMostOnce):
            taken.claim.tracker.returned()
        return True

    def give_back(self, taken: Taken) -> None:
        """The range was not done and will be planned again; in at-most-once mode it is lost."""
        planned = self.claims.get(taken.range.tp)
        if planned is None or planned.taken is not taken:
            return
        planned.taken = None
        if isinstance(planned.claim.tracker, AtLeastOnce) and taken.run is not None:
            planned.next_offset = planned.claim.tracker.withdraw(taken.run, taken.first)
        elif isinstance(planned.claim.tracker, AtMostOnce):
            planned.claim.tracker.returned()

    def touch(self, taken: Taken, now: Instant) -> None:
        """The range is still being worked on: begins its handler timeout anew (D4)."""
        tracker = taken.claim.tracker
        if isinstance(tracker, AtLeastOnce):
            tracker.touch_all(now.mono_ms)
        elif tracker.in_flight_since_ms is not None:
            tracker.in_flight_since_ms = now.mono_ms

    # --- at-most-once mode

    def request_grant(self, wanted: ClaimedRange) -> None:
        """A grant is wanted for this range, unless one is there (D2)."""
        planned = self.claims.get(wanted.tp)
        if planned is not None and planned.claim.epoch == wanted.token.epoch and planned.taken is None:
            planned.requested = (wanted.start, min(wanted.to, wanted.start + GRANT_OFFSETS_MAX))

    def clear_requests(self) -> None:
        for planned in self.claims.values():
            planned.requested = None

    def waits_for_grant(self) -> bool:
        """Whether a wish of a claim that may still deliver has no grant yet."""
        return any(
            planned.requested is not None
            and planned.claim.phase is ClaimPhase.OPEN
            and isinstance(planned.claim.tracker, AtMostOnce)
            and not planned.claim.tracker.grants
            for planned in self.claims.values()
        )

    def offer(self) -> bool:
        """Tells the member what is to be granted. True if there is something to ask for."""
        something = False
        for planned in self.claims.values():
            tracker = planned.claim.tracker
            if isinstance(tracker, AtMostOnce):
                planned.claim.offer = planned.requested if not tracker.grants else None
                something = something or (planned.claim.offer is not None and tracker.asked is None)
        return something


def share(available: Mapping[TopicPartition, int], rows_max: int) -> dict[TopicPartition, int]:
    """How many rows each partition gives to a batch of at most `rows_max`: even shares, what one lacks others fill."""
    shares: dict[TopicPartition, int] = {}
    left = rows_max
    for at, (tp, count) in enumerate(sorted(available.items(), key=lambda item: (item[1], item[0]))):
        shares[tp] = min(count, left // (len(available) - at))
        left -= shares[tp]
    return {tp: count for tp, count in shares.items() if count}
