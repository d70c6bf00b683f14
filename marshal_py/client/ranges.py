"""The queue of a consumer that delivers ranges of offsets, because other processes (Spark executors) read the messages.

Ranges takes the place of the DeliveryQueue of a consumer that fetches. Claims, trackers and grants are the same, and so
is the gate (`Member.may_deliver`, D8) that decides whether a claim may deliver now. So leases, pauses, hand-overs and
handler timeouts work as ever; only the messages never come to this process.

To plan is to choose the offsets of a claim's next range (`available`); `take` delivers the range, and `finish` marks it
as done, as a whole. From its delivery to its end it is in flight, and at most one range per claim is (PROTOCOL.md D9).
Everything is called with the Marshal's lock held, but for what `_ask` asks the cluster.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import structs

from marshal_py.client.connection import Ask, Context, TaskSteps
from marshal_py.client.delivery.delivery_queue import positions_of
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.fold.world import Partition
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, Instant, Token, TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE, GRANT_OFFSETS_MAX
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


class PlannedClaim:
    """One claim, the offset from which its next range is planned, and its range in flight (`taken`), if any."""

    __slots__ = ("claim", "next_offset", "requested", "taken")

    def __init__(self, claim: Claim, next_offset: int) -> None:
        self.claim: Claim = claim
        self.next_offset: int = next_offset  # where planning continues
        self.taken: Taken | None = None
        self.requested: tuple[int, int] | None = None  # in at-most-once mode: the range to ask a grant for


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

    def restart(self, tp: TopicPartition, first: int) -> int:
        """Has the next range begin at `first` or above, as those before are lost (D6). Returns where it would have
        begun."""
        planned = self.claims[tp]
        ended, planned.next_offset = planned.next_offset, max(planned.next_offset, first)
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
        bounds: dict[TopicPartition, Bounds] = (yield Ask(lambda: self._context.admin.bounds(tps))) if tps else {}
        with self._context.lock:
            self.source.ends.update({tp: bound.end for tp, bound in bounds.items()})

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
        comes instead."""
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


# --- Keeps the micro-batches of one streaming query: which are delivered, which committed, which planned again
#
# A position moves only over ranges that were delivered to the query and whose batch the query has committed; offsets
# alone prove neither. A delivered batch is *with the query* until it is committed. MicroBatches is pure: its driver
# (planner.py, the simulator) holds the lock, asks the cluster and waits.
#
# A query names a batch by its end offset, which holds the whole plan, the group, and the session of the member that
# planned it. Sessions and epochs are offsets in the group's log, so they mean nothing in another group: a query passes
# only ends of its own group (`group_of`). If the group was deleted and created again since (`life_of`), generations are
# others, so nothing of such an end counts as done. For that member a batch is all that was delivered, whatever has
# become of its claims. A later member of the same query knows only the plan and the log. Two cases:
#
# Committed: the query begins after a batch of session S. The position and the claim of each range decide. The range is
# done if this member has the claim directly after S (or after claims of its own that follow S), in the same generation,
# and the position lies in the range: S has delivered all of it, and no other member can have begun there. (Another
# member may have had the claim between two claims of S, as the log's state keeps only the last claim. The query has
# also done what that member left unfinished.) In every other case the log's position counts, and what lies above it is
# planned again: at worst it is delivered twice.
#
# Replayed: the batch of session S was planned and not committed. A range that this member claims is delivered from the
# position on. A range that the position or the generation has passed is done, or an admin moved it. A range that
# another session has owned since belongs to that session. Ranges of the last two kinds may be left out permanently,
# because the rule for committed batches will never count them as done. While it is not known which of these a range is
# (a dead session is still being waited for, the group is paused), the replay waits: if the range was left out now, that
# rule could count it as done later.


End = dict[str, Any]  # an end offset as the query keeps it: JSON
FIRST: Final[End] = {"b": 0, "r": {}}  # before the first batch; it never changes, since the query compares it


class Planned(NamedTuple):
    """One range of a batch, as the end offset names it: [start, to), planned by `session` under `epoch`."""

    session: int
    epoch: int
    generation: int
    start: int
    to: int


class DeliveredBatch(NamedTuple):
    """The ranges of a batch that is with the query, and the session that delivered them."""

    session: int
    taken: list[Taken]


class Replay(NamedTuple):
    """Says what became of each range of a batch that an earlier member planned. It is final once `waits` is empty."""

    taken: list[Taken]  # the ranges that this member delivers
    waits: dict[TopicPartition, str]  # why it is not known yet whether this member delivers the range
    left_out: dict[TopicPartition, str]  # why this member does not deliver the range


def key_of(end: End) -> str:
    return json.dumps(end)


def digest_of(end: End) -> str:
    """Returns the hash of a batch's end offset, which serves as a short name for the batch in messages."""
    return hashlib.sha256(key_of(end).encode()).hexdigest()


def group_of(end: End) -> str | None:
    """Returns the group whose member has planned the batch that ends at `end`. None: FIRST, which no member plans."""
    group: str | None = end.get("g")
    return group


def life_of(end: End) -> int:
    """Returns the offset of the group's last deletion before the batch was planned, or NONE. Since then the group
    begins where its settings say."""
    deleted_at: int = end.get("d", NONE)
    return deleted_at


def planned_in(end: End, incarnation: bytes) -> dict[TopicPartition, Planned]:
    """Returns the ranges of the batch that ends at `end`; none for FIRST or another incarnation."""
    if end.get("i") != incarnation.hex():
        return {}
    found = {}
    for name, (epoch, generation, start, to) in end["r"].items():
        topic, _, number = name.rpartition(":")
        found[TopicPartition(topic, int(number))] = Planned(end.get("s", NONE), epoch, generation, start, to)
    return found


class MicroBatches:
    """The batches of one member, in either delivery mode. Every method is called with the Marshal's lock held."""

    member: Member
    ranges: Ranges

    def __init__(self, member: Member, ranges: Ranges, incarnation: bytes, before: MicroBatches | None = None) -> None:
        """`before`: this process's earlier batches; ignored for another `incarnation`, where epochs name other
        claims."""
        if before is not None and before.incarnation != incarnation:
            before = None
        self.member, self.ranges = member, ranges
        self.incarnation: bytes = incarnation
        self.at_most_once: bool = member.options.mode == AT_MOST_ONCE
        self.delivered: dict[str, DeliveredBatch] = (
            before.delivered if before is not None else {}
        )  # by end, until committed
        # Ranges that the query has committed and that no position has been moved over yet.
        self._proven: dict[TopicPartition, Planned] = before._proven if before is not None else {}
        # Ranges that the query has committed and that a claim has finished: the log may not have its position yet.
        self._finished: dict[TopicPartition, Planned] = before._finished if before is not None else {}
        if before is not None:
            for tp, begun in before.ranges.begun.items():
                ranges.begun[tp] = deque([*begun, *ranges.begun.get(tp, ())], BEGUN_KEPT)
        self._replaying: dict[TopicPartition, Taken] = {}
        self._committed: str = before._committed if before is not None else ""  # key of the newest committed batch

    # --- the query has committed

    def commit(self, end: End, now: Instant) -> bool:
        """Moves positions past the committed batch that ends at `end`; returns whether one moved. May be repeated."""
        key = key_of(end)
        if key != self._committed:
            self._committed = key
            batch = self.delivered.pop(key, None)
            if batch is not None:
                moved = self._finish(batch)
                return self.settle_proven(now) or moved
            if not self.at_most_once:
                self._proven |= planned_in(end, self.incarnation)
        return self.settle_proven(now)

    def commit_reported(self, digest: str, now: Instant) -> bool:
        """As `commit`, for a listener's report of a batch's `digest` (`digest_of`), early, late, twice or of another
        member: a batch not with the query now is left to its own call."""
        for key in self.delivered:
            end: End = json.loads(key)
            if digest_of(end) == digest:
                return self.commit(end, now)
        return False

    def _finish(self, batch: DeliveredBatch) -> bool:
        moved = False
        for taken in batch.taken:
            one = taken.range
            done = Planned(batch.session, one.token.epoch, one.generation, one.start, one.to)
            if self.ranges.finish(taken):
                moved = True
                self._note_finished(one.tp, done)
            elif not self.at_most_once:  # the claim is gone, but what was done is done
                self._proven[one.tp] = done
        return moved

    def _note_finished(self, tp: TopicPartition, done: Planned) -> None:
        """Keeps a range that a claim has finished until the log has its position, in at-least-once mode."""
        if self.at_most_once:
            return
        before = self._finished.get(tp)
        if before is not None and before.epoch == done.epoch and before.to == done.start:
            done = done._replace(start=before.start)
        self._finished[tp] = done

    def _look_at_finished(self) -> None:
        """Has `settle_proven` move positions over ranges whose claim ended before the log had its position."""
        for tp, done in list(self._finished.items()):
            part = self._partition(tp)
            if part is None or self._passed(part, done):
                del self._finished[tp]
            elif part.epoch != done.epoch or part.owner == NONE:
                self._proven[tp] = self._finished.pop(tp)

    def settle_proven(self, now: Instant) -> bool:
        """Moves positions over committed ranges of earlier claims; returns whether one moved. A range is kept until its
        partition is claimed again, dropped when it is passed or another process's."""
        self._look_at_finished()
        moved = False
        for tp, proven in list(self._proven.items()):
            part, epoch = self._partition(tp), self._continued_as(tp, proven)
            if part is None or epoch == NONE or self._passed(part, proven) or self._of_others(part, tp, proven.session):
                del self._proven[tp]
            elif proven.epoch != epoch == part.epoch:  # else the claim is being released or will come
                own = self.ranges.claims.get(tp)
                if own is not None and own.taken is None and proven.start <= own.next_offset < proven.to:
                    taken = self.ranges.take(self.ranges.range_of(tp, own.next_offset, proven.to), now)
                    if taken is not None:
                        moved = self.ranges.finish(taken) or moved
                        del self._proven[tp]
                        self._note_finished(tp, proven._replace(epoch=epoch, session=self.member.session))
        return moved

    def _continued_as(self, tp: TopicPartition, planned: Planned) -> int:
        """Returns this process's newest claim's epoch; NONE if another process claimed between it and `planned`."""
        epoch, session = planned.epoch, planned.session
        for begun in self.ranges.begun.get(tp, ()):
            if begun.epoch > epoch:
                if begun.after != session:
                    return NONE
                epoch, session = begun.epoch, begun.session
        return epoch

    def _partition(self, tp: TopicPartition) -> Partition | None:
        group = self.member.group
        return None if group is None else group.partitions.get(tp)

    def _passed(self, part: Partition, planned: Planned) -> bool:
        """Returns whether the range needs no delivery: passed, moved by an admin, or parked (F6.5)."""
        return part.generation != planned.generation or part.position >= planned.to or part.parked != ""

    def _of_others(self, part: Partition, tp: TopicPartition, session: int) -> bool:
        """Returns whether the partition is, or without an owner was last, of a session other than `session` and this
        process's."""
        ours = {session, self.member.session, *(begun.session for begun in self.ranges.begun.get(tp, ()))}
        return part.owner not in ours if part.owner != NONE else part.last_owner not in ours

    # --- the next batch

    def plan(self, start: End, available: Sequence[ClaimedRange], now: Instant) -> End:
        """Returns the end of the batch after `start`, or `start` if nothing is to be read. In at-least-once mode it
        delivers what may be delivered of `available`; in at-most-once mode the driver does (`deliver`), when the query
        has stored the end."""
        for batch in self.delivered.values():  # the query asks for another batch, so it never began this one
            for one in batch.taken:
                self.ranges.give_back(one)
        self.delivered.clear()
        wanted = [one for one in available if one.tp not in self._proven]
        taken_now: list[Taken] = []
        if not self.at_most_once:
            taken_now = [taken for one in wanted if (taken := self.ranges.take(one, now)) is not None]
            wanted = [each.range for each in taken_now]
        if not wanted:
            return start
        end = self.end_of(start, wanted)
        if not self.at_most_once:
            self.deliver(end, taken_now)
        return end

    def end_of(self, start: End, planned: Sequence[ClaimedRange]) -> End:
        """Returns the end offset of a batch of these ranges that follows the batch that ends at `start`."""
        group = self.member.group
        ranges = {
            f"{one.topic}:{one.partition}": [one.token.epoch, one.generation, one.start, one.to]
            for one in sorted(planned)
        }
        return {
            "b": start["b"] + 1,
            "g": self.member.name,
            "d": NONE if group is None else group.deleted_at,
            "i": self.incarnation.hex(),
            "s": self.member.session,
            "r": ranges,
        }

    def delivered_ranges(self, end: End) -> list[Taken] | None:
        """Returns the ranges of the batch that ends at `end`; None if the batch is not with the query."""
        found = self.delivered.get(key_of(end))
        return None if found is None else found.taken

    def deliver(self, end: End, taken: list[Taken]) -> None:
        """Notes that these ranges are with the query now, as the batch that ends at `end`."""
        self.delivered[key_of(end)] = DeliveredBatch(self.member.session, taken)

    # --- at-most-once mode: what is lost with a batch

    def uncommitted(self) -> list[tuple[TopicPartition, int, int]]:
        """Returns the ranges (partition, start, to) that are with the query: they are lost if this process ends now."""
        return [
            (taken.range.tp, taken.range.start, taken.range.to)
            for batch in self.delivered.values()
            for taken in batch.taken
        ]

    def lost_with(self, end: End) -> list[tuple[TopicPartition, int, int]]:
        """Returns the (partition, start, to) lost with an uncommitted batch: the log does not say for which batch it
        granted, but without another member or move in between, what is below the earlier member's end was granted to
        it."""
        found = []
        for tp, planned in planned_in(end, self.incarnation).items():
            part = self._partition(tp)
            if part is not None and part.generation == planned.generation:
                to = min(planned.to, self._ended_at(part, tp, planned))
                found += [(tp, planned.start, to)] if to > planned.start else []
        return found

    def _ended_at(self, part: Partition, tp: TopicPartition, planned: Planned) -> int:
        """Returns the position at which the claim of `planned` ended; NONE if it has not ended or that is unknown."""
        if part.owner == NONE:
            return part.position if part.last_owner == planned.session else NONE
        since = next((begun for begun in self.ranges.begun.get(tp, ()) if begun.epoch > planned.epoch), None)
        if since is None or since.after != planned.session or part.epoch != since.epoch:
            return NONE
        return since.start

    # --- a batch that an earlier member planned

    def replay(self, end: End, now: Instant) -> Replay:
        """Says what becomes of each range of an earlier member's batch; in at-least-once mode it delivers what it may.
        Call again while `waits` has entries."""
        self.settle_proven(now)
        result = Replay([], {}, {})
        for tp, planned in planned_in(end, self.incarnation).items():
            known = self._replaying.get(tp)
            taken = self._replay_one(tp, planned, now, result) if known is None else known
            if taken is not None:
                self._replaying[tp] = taken
                result.taken.append(taken)
        if not result.waits:
            self._replaying.clear()
            self.deliver(end, result.taken)
        return result

    def _replay_one(self, tp: TopicPartition, planned: Planned, now: Instant, result: Replay) -> Taken | None:
        part, group = self._partition(tp), self.member.group
        if part is None:
            if group is not None and self.member.session != NONE:
                result.left_out[tp] = "the group does not have it any more"
            else:
                result.waits[tp] = "this member has not joined yet"
        elif self._passed(part, planned):
            result.left_out[tp] = f"the group is at {part.position}" + (
                " in a newer generation" * (part.generation != planned.generation)
            )
        elif self._of_others(part, tp, planned.session):
            result.left_out[tp] = f"another member has had it since, and the group is at {part.position}"
        elif part.owner != self.member.session or self.member.session == NONE or tp in self._proven:
            paused = group is not None and group.paused
            result.waits[tp] = "the group is paused" if paused else "nobody has claimed it since"
        else:
            return self._replay_own(tp, planned, now, result)
        return None

    def _replay_own(self, tp: TopicPartition, planned: Planned, now: Instant, result: Replay) -> Taken | None:
        own = self.ranges.claims.get(tp)
        if own is None or own.taken is not None or own.claim.phase is not ClaimPhase.OPEN:
            result.waits[tp] = "its claim does not deliver now"
        elif not planned.start <= own.next_offset < planned.to:
            result.left_out[tp] = f"its claim continues at {own.next_offset}"
        else:
            taken = self.ranges.take(self.ranges.range_of(tp, own.next_offset, planned.to), now)
            if taken is None:
                result.waits[tp] = "its claim may not deliver now"
            return taken
        return None
