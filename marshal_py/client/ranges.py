"""The queue of a consumer that delivers ranges of offsets, because other processes (Spark executors) read the messages.

Ranges takes the place of the DeliveryQueue of a consumer that fetches. Claims, trackers and grants are the same, and so
is the gate (`Member.may_deliver`, D8) that decides whether a claim may deliver now. So leases, pauses, hand-overs and
handler timeouts work as ever; only the messages never come to this process.

To plan is to choose the offsets of a claim's next range (`available`); `take` delivers the range, and `finish` marks it
as done, as a whole. From its delivery to its end it is in flight, and at most one range per claim is (PROTOCOL.md D9).
Everything is called with the Marshal's lock held, but for what `_ask` asks the cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import structs

from marshal_py.client.connection import Ask, Context, TaskSteps
from marshal_py.client.delivery.delivery_queue import ENDS_TIMEOUT_S, positions_of
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, Instant, Token, TopicPartition
from marshal_py.protocol.wire.records import GRANT_OFFSETS_MAX
from marshal_py.transport.ports import Bounds, Broken, DataSource, OutOfRange

BEGUN_KEPT: Final = 64  # claims remembered per partition: a batch that was planned before them is delivered again


class ClaimedRange(NamedTuple):
    """Offsets [start, to) of one partition under one claim; some may hold no message. `token`: the claim's.
    `generation`: of the position when claimed; a SetPosition begins a new one. `topic_id`: Kafka's, or ""."""

    topic: str
    partition: int
    start: int
    to: int
    token: Token
    generation: int
    topic_id: str = ""

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Taken(NamedTuple):
    """A delivered range. `run`, from index `first`: which of its offsets are done; None in at-most-once mode."""

    range: ClaimedRange
    claim: Claim
    run: OffsetRun | None
    first: int


class Begun(NamedTuple):
    """One claim of this process: `epoch`, its `session`, the owner `after` which it came; `start`: in at-most-once mode
    where it began, else NONE."""

    epoch: int
    session: int
    after: int
    start: int


@dataclass(eq=False, slots=True)
class PlannedClaim:
    """One claim, the offset from which its next range is planned, and its range in flight (`taken`), if any."""

    claim: Claim
    next_offset: int  # where planning continues
    taken: Taken | None = None
    requested: tuple[int, int] | None = None  # in at-most-once mode: the range to ask a grant for


class UnfetchedSource:
    """The data source of a consumer that fetches nothing. `ends`: the end offsets that the cluster was asked for."""

    def __init__(self, fetching: DataSource) -> None:
        """Wraps the consumer's real source, which stays open, without partitions, until the consumer closes."""
        self._inner = fetching
        self.ends: dict[TopicPartition, int] = {}

    def learn_leaders(self, topics: Iterable[str], anew: bool = False) -> None:
        self._inner.learn_leaders(topics, anew)

    def end_offset(self, tp: TopicPartition) -> int:
        return self.ends.get(tp, -1)

    def out_of_range(self) -> list[OutOfRange]:
        self._inner.out_of_range()  # left over from fetches, which do not matter any more
        return []

    def broken(self) -> list[Broken]:
        self._inner.broken()
        return []

    def round(self, tp: TopicPartition) -> int:
        return 0  # nothing is assigned

    def carry_out(self) -> None:
        self._inner.carry_out()

    def close(self) -> None:
        self._inner.close()


class Ranges:
    """The claims of one consumer that plans ranges, and their ranges in flight."""

    member: Member
    incarnation: bytes

    def __init__(
        self,
        context: Context,
        member: Member,
        source: DataSource,
        options: ConsumerOptions,
        incarnation: bytes,
        submit: Callable[[str, Callable[[], object]], None],
        absent: Callable[[], Collection[str]],
    ) -> None:
        """`submit(name, task)`: runs a task on the worker thread. `absent`: topics that the cluster lacks."""
        self.member, self.incarnation = member, incarnation
        self._context, self._submit, self._absent = context, submit, absent
        self.source: UnfetchedSource = UnfetchedSource(source)
        member.poison_guard.end_all()
        member.asked = None  # its readers ask elsewhere, so nobody here knows whether the user is idle (A11)
        self._timeout_ms = round(1000 * options.handler_timeout_s)
        if options.hand_over_timeout_s is None:  # a range is long work, and its reader elsewhere cannot be stopped
            whole_ms = member.options.handler_timeout_ms
            member.options = structs.replace(member.options, hand_over_timeout_ms=whole_ms)
        self._called_ms: int | None = None  # None until the group has this member: a join may take long
        self.claims: dict[TopicPartition, PlannedClaim] = {}
        self.begun: dict[TopicPartition, deque[Begun]] = {}  # the newest claims, oldest first, ended ones too
        self.prefetching: set[TopicPartition] = set()
        self.user_paused: set[TopicPartition] = set()
        self.at_most_once: bool = False  # known from the first claim on: a group has one mode

    # --- called by the driver, as on a DeliveryQueue

    delivered = 0  # nothing passes through this process: other processes read the ranges

    def buffered(self) -> int:
        return 0

    def buffered_of(self, tp: TopicPartition) -> int:
        return 0

    def has(self, tp: TopicPartition) -> bool:
        """Returns whether this consumer has claimed the partition."""
        return tp in self.claims

    def start_prefetch(self, tp: TopicPartition, position: int) -> None:
        """Notes that `tp` will be handed over to this member, which is ready once it knows the partition's end (A3)."""
        self.prefetching.add(tp)

    def begin_claims(self, claims: Iterable[Claim]) -> None:
        """Begins to plan ranges of these claims, which the log has accepted."""
        for claim, position in positions_of(claims, self.member):
            self.prefetching.discard(claim.tp)
            self.at_most_once = isinstance(claim.tracker, AtMostOnce)
            if isinstance(claim.tracker, AtLeastOnce):
                claim.tracker.in_ranges = True
            self.claims[claim.tp] = PlannedClaim(claim, position)
            self._note_begun(claim)

    def _note_begun(self, claim: Claim) -> None:
        group = self.member.group
        start = claim.tracker.began if isinstance(claim.tracker, AtMostOnce) else NONE
        assert group is not None
        known = self.begun.setdefault(claim.tp, deque(maxlen=BEGUN_KEPT))
        if not known or known[-1].epoch < claim.epoch:
            known.append(Begun(claim.epoch, self.member.session, group.partitions[claim.tp].last_owner, start))

    def drop(self, tps: Iterable[TopicPartition]) -> None:
        """Forgets these partitions: their claims are gone, or they will not be handed over to this member."""
        for tp in tps:
            self.claims.pop(tp, None)
            self.prefetching.discard(tp)
            self.source.ends.pop(tp, None)  # it will be too old when the partition comes back

    def restart(self, tp: TopicPartition, first: int) -> int:
        """Has the next range begin at `first` or above, as those before are lost (D6). Returns where it would have
        begun."""
        planned = self.claims[tp]
        ended, planned.next_offset = planned.next_offset, max(planned.next_offset, first)
        if isinstance(planned.claim.tracker, AtLeastOnce):
            planned.claim.tracker.reached(planned.next_offset)  # as in a DeliveryQueue
        return ended

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Makes `available` and `take` leave out these partitions until `resume` is called. The claims stay."""
        self.user_paused.update(tps)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        self.user_paused.difference_update(tps)

    def settled(self) -> bool:
        """Returns whether no further partitions are to be expected soon: each is parked or owned by a live member and
        none is on its way here; or a pause, or the limit of claims."""
        member = self.member
        group = member.group
        if group is None or member.session == NONE or member.session not in group.sessions:
            return False
        if group.paused:
            return True
        if self.full():
            return True
        for topic in member.options.topics:
            known = group.topics.get(topic)
            if known is None:
                return False
            for number in range(known.count):
                tp = TopicPartition(topic, number)
                part = group.partitions.get(tp)
                if part is not None and part.parked:
                    continue  # no member may claim it until an admin has looked at it
                if self.unowned(tp):
                    return False
        return not member.awaits_hand_overs(group)

    def full(self) -> bool:
        """Returns whether this member has reached its limit of claims."""
        limit = self.member.options.claims_max
        return bool(limit) and len(self.member.claims) >= limit

    def unowned(self, tp: TopicPartition) -> bool:
        """Returns whether no live member owns the partition. An owner without a sign of life since this one joined is
        waited for."""
        member, group = self.member, self.member.group
        part = None if group is None else group.partitions.get(tp)
        owner = None if group is None or part is None else group.sessions.get(part.owner)
        return owner is None or (owner.id != member.session and owner.extended < member.session)

    # --- its user, and the ends of partitions, which no fetch reports
    #
    # A user who stops calling loses the claims: with no range in flight, nothing but calls shows that somebody reads.

    writing = False  # it delivers no messages, so it has no dead letters

    def close(self) -> None:
        """Does nothing."""

    def end_claims(self, claims: Iterable[Claim]) -> None:
        """Does nothing: `drop` forgets them."""

    def look(self) -> None:
        """Has the worker thread ask the cluster for the partitions' end offsets, if any are needed."""
        if self._ends_wanted():
            self._submit("the ends of partitions", self._ask)

    def _ends_wanted(self) -> list[TopicPartition]:
        """Returns the partitions whose ends to ask for: claimed ones, for the lag; those to be handed over, which shows
        readiness."""
        return [*self.claims, *self.prefetching]

    def _ask(self) -> TaskSteps:
        """Asks the cluster for the end offsets. They give the lag, and show that this member can take over (A3)."""
        with self._context.lock:
            tps = [tp for tp in self._ends_wanted() if tp.topic not in self._absent()]
        ends: dict[TopicPartition, int] = yield Ask(lambda: self._context.admin.told_offsets(tps, ENDS_TIMEOUT_S))
        with self._context.lock:
            self.source.ends |= ends

    def called(self) -> None:
        """Notes that the user has just called, so somebody still reads."""
        self._called_ms = self._context.clock.now().mono_ms

    def overdue(self, now: Instant) -> bool:
        """Returns whether the user's last call is at least `handler_timeout_s` ago (D9)."""
        return self._called_ms is not None and now.mono_ms - self._called_ms >= self._timeout_ms

    # --- planning

    def available(self, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, tuple[int, int]]:
        """Returns what [start, to) each claim could deliver next, below `bounds`; not if it delivers no more, has a
        range in flight, or is paused here. Deleted offsets are noted as lost and skipped (D6)."""
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
        """Returns the claims whose position lies beyond the end in `bounds`, as (partition, position, end) (D6)."""
        return [
            (tp, self._next(planned), bounds[tp].end)
            for tp, planned in self.claims.items()
            if tp in bounds and self._next(planned) > bounds[tp].end
        ]

    def _unfinished(self, planned: PlannedClaim, end: int) -> tuple[int, int]:
        """Returns the next [start, to) below `end` that no earlier owner has finished (D1)."""
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
        """Returns the offsets [start, to) of `tp` as a range under this member's present claim of the partition."""
        claim = self.claims[tp].claim
        return ClaimedRange(*tp, start, to, Token(self.incarnation, claim.epoch), claim.generation, claim.topic_id)

    # --- delivering and finishing

    def take(self, wanted: ClaimedRange, now: Instant) -> Taken | None:
        """Delivers and returns a range; None if its claim has changed or a range in flight, the gate is shut, or it is
        paused. In at-least-once mode it begins at the next offset; in at-most-once mode the oldest undelivered grant
        comes instead, as far as the range goes."""
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
            if start >= wanted.to or not tracker.holds(start):
                return None
            wanted = wanted._replace(start=start, to=min(tracker.grants[0].to, wanted.to))
            tracker.deliver(wanted.to - 1, now.mono_ms)
            planned.requested, planned.taken = None, Taken(wanted, planned.claim, None, 0)
        planned.next_offset = wanted.to
        return planned.taken

    def finish(self, taken: Taken) -> bool:
        """Marks a delivered range as done. Returns False if the claim has been released or lost since the delivery."""
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
        """Takes back a delivered range that was not done: it is planned again; in at-most-once mode it is lost."""
        planned = self.claims.get(taken.range.tp)
        if planned is None or planned.taken is not taken:
            return
        planned.taken = None
        if isinstance(planned.claim.tracker, AtLeastOnce) and taken.run is not None:
            planned.next_offset = planned.claim.tracker.withdraw(taken.run, taken.first)
        elif isinstance(planned.claim.tracker, AtMostOnce):
            planned.claim.tracker.returned()

    def touch(self, taken: Taken, now: Instant) -> None:
        """Notes that the range is still being worked on: its handler timeout starts again (D4)."""
        tracker = taken.claim.tracker
        if isinstance(tracker, AtLeastOnce):
            tracker.touch_all(now.mono_ms)
        elif tracker.in_flight_since_ms is not None:
            tracker.in_flight_since_ms = now.mono_ms

    # --- at-most-once mode

    def request_grant(self, wanted: ClaimedRange) -> None:
        """Notes that the next `offer` must ask for a grant of this range (D2)."""
        planned = self.claims.get(wanted.tp)
        if planned is not None and planned.claim.epoch == wanted.token.epoch and planned.taken is None:
            planned.requested = (wanted.start, min(wanted.to, wanted.start + GRANT_OFFSETS_MAX))

    def clear_requests(self) -> None:
        for planned in self.claims.values():
            planned.requested = None

    def waits_for_grant(self) -> bool:
        """Returns whether a claim that may still deliver has a request (`request_grant`) and no grant yet."""
        return any(
            planned.requested is not None
            and planned.claim.phase is ClaimPhase.OPEN
            and isinstance(planned.claim.tracker, AtMostOnce)
            and not planned.claim.tracker.grants
            for planned in self.claims.values()
        )

    def offer(self) -> bool:
        """Sets `Claim.offer` to the requested ranges, or None. Returns whether one was not asked for yet."""
        something = False
        for planned in self.claims.values():
            tracker = planned.claim.tracker
            if isinstance(tracker, AtMostOnce):
                planned.claim.offer = planned.requested if not tracker.grants else None
                something = something or (planned.claim.offer is not None and tracker.asked is None)
        return something


def share(available: Mapping[TopicPartition, int], rows_max: int) -> dict[TopicPartition, int]:
    """Returns how many of `available` offsets of each partition a batch of `rows_max` takes: even shares, filled up by
    others."""
    shares: dict[TopicPartition, int] = {}
    left = rows_max
    for at, (tp, count) in enumerate(sorted(available.items(), key=lambda item: (item[1], item[0]))):
        shares[tp] = min(count, left // (len(available) - at))
        left -= shares[tp]
    return {tp: count for tp, count in shares.items() if count}
