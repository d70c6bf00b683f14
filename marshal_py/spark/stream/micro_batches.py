"""The micro-batches of one streaming query: which are delivered, which committed, which planned again.

A position moves only over ranges that were delivered to the query and whose batch the query has committed; offsets
alone prove neither. A delivered batch is *with the query* until it is committed. MicroBatches is pure: QueryPlanner
holds the lock, asks the cluster and waits.

A query names a batch by its end offset, which holds the whole plan, the group, and the session of the member that
planned it. Sessions and epochs are offsets in the group's log, so they mean nothing in another group: a query passes
only ends of its own group (`group_of`). If the group was deleted and created again since (`life_of`), generations are
others, so nothing of such an end counts as done. For that member a batch is all that was delivered, whatever has
become of its claims. A later member of the same query knows only the plan and the log. Two cases:

Committed: the query begins after a batch of session S. The position and the claim of each range decide. The range is
done if this member has the claim directly after S (or after claims of its own that follow S), in the same generation,
and the position lies in the range: S has delivered all of it, and no other member can have begun there. (Another
member may have had the claim between two claims of S, as the log's state keeps only the last claim. The query has
also done what that member left unfinished.) In every other case the log's position counts, and what lies above it is
planned again: at worst it is delivered twice.

Replayed: the batch of session S was planned and not committed. A range that this member claims is delivered from the
position on. A range that the position or the generation has passed is done, or an admin moved it. A range that
another session has owned since belongs to that session. Ranges of the last two kinds may be left out permanently,
because the rule for committed batches will never count them as done. While it is not known which of these a range is
(a dead session is still being waited for, the group is paused), the replay waits: if the range was left out now, that
rule could count it as done later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from marshal_py.client.connection import Change, Steps
from marshal_py.client.membership import WAIT_SLICE_S
from marshal_py.client.planner import SETTLE_INTERVALS, Planner
from marshal_py.client.ranges import BEGUN_KEPT, ClaimedRange, Ranges, Taken
from marshal_py.errors import AckNotConfirmed, ClaimLost, MembersAlive, PartitionsUnread
from marshal_py.protocol.claims import ClaimPhase
from marshal_py.protocol.fold.world import Partition
from marshal_py.protocol.member.advisory import UNCOMMITTED
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE

SHARED: Final = (
    "this query has state that needs all messages (stateful=true), and other members get part of them; give each such "
    "query a group of its own, or stop the other members and start this query again"
)

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


class QueryPlanner:
    """Plans the micro-batches of a streaming query, which keeps their ends in its checkpoint."""

    batches: MicroBatches

    def __init__(self, planner: Planner, before: MicroBatches | None = None) -> None:
        """`before`: the batches of the query's earlier member in this process."""
        self._ranges = ranges = planner.ranges
        self._context, self._driver, self._member = ranges.context, ranges.driver, ranges.member
        self.batches = MicroBatches(ranges.member, ranges.queue, ranges.incarnation, before)

    def resumed(self) -> bool:
        """Returns whether a claim continues an earlier owner's work, above the partition's first offset. Raises
        ClusterUnreachable."""
        with self._context.outbox, self._context.lock:
            group, absent = self._member.group, self._driver.topic_watch.absent
            claims = [tp for tp in self._ranges.queue.claims if tp.topic not in absent]
            parts = {} if group is None else {tp: group.partitions[tp] for tp in claims}
            continued = {tp: part.position for tp, part in parts.items() if part.last_owner != NONE}
        bounds = self._context.admin.bounds(list(continued)) if continued else {}
        return any(position > bounds[tp].first for tp, position in continued.items())

    def deleted_at(self) -> int:
        """Returns the offset of the group's last deletion, after which it was created again; NONE if there was none."""
        with self._context.lock:
            group = self._member.group
            return NONE if group is None else group.deleted_at

    def others(self) -> dict[str, bool]:
        """Returns the other live members by client id; True: proven to have been there before. One that is silent since
        this joined may be dead."""
        with self._context.outbox, self._context.lock:
            group, own = self._member.group, self._member.session
            found = [] if group is None else [one for one in group.sessions.values() if one.id != own]
            return {one.join.client_id: one.id < own <= one.extended for one in found}

    def check_alone(self) -> None:
        """Returns once this is the only member; others have four heartbeat intervals, unless they were there before.
        Raises MembersAlive."""
        deadline = self._context.monotonic() + self._driver.options.heartbeat_interval_s * SETTLE_INTERVALS
        while others := self.others():
            self._ranges.alive()
            left_s = deadline - self._context.monotonic()
            if any(others.values()) or left_s <= 0:
                raise MembersAlive(self._member.name, SHARED, tuple(sorted(others)))
            with self._context.outbox, self._context.lock:
                self._context.changed.wait(min(WAIT_SLICE_S, left_s))

    def commit(self, end: End) -> None:
        """Moves positions past the committed batch that ends at `end`, and waits for the log, but no more than some
        seconds: in an outage they are sent until it has them. After a lost claim they move with the next one
        (`MicroBatches.settle_proven`)."""
        self._context.complete(self.committing(end))

    def committing(self, end: End) -> Steps[None]:
        """Does what `commit` does, in steps."""
        with self._context.outbox, self._context.lock:
            moved = self.batches.commit(end, self._context.clock.now())
        self._ranges.alive()
        if moved and not self._ranges.at_most_once:
            with contextlib.suppress(ClaimLost, AckNotConfirmed):  # an outage of brokers must not end the query
                yield from self._ranges.flushing()

    def commit_reported(self, digest: str) -> None:
        """As `commit`, for a listener's early report of the `digest` of the end; any thread, also twice, without a
        wait."""
        with self._context.outbox, self._context.lock:
            if self.batches.commit_reported(digest, self._context.clock.now()):
                self._ranges.called()
                self._member.urgent = True
                self._driver.kick()

    def plan(self, start: End, available: Sequence[ClaimedRange]) -> End:
        """Returns the end of the batch after `start`, or `start` if nothing is to be read. In at-least-once mode it
        delivers the ranges."""
        self._ranges.alive()
        with self._context.outbox, self._context.lock:
            return self.batches.plan(start, available, self._context.clock.now())

    def take(self, end: End, wanted: Sequence[ClaimedRange] | None) -> list[Taken]:
        """In at-most-once mode: delivers what the log grants of the batch that ends at `end`. `wanted` None: an earlier
        consumer planned it, whose tasks may have read it, so nothing is delivered and the loss is noted."""
        if wanted is None:
            self._ranges.settle()
        taken = self._ranges.take(wanted or [])
        with self._context.outbox, self._context.lock:
            if wanted is None:
                self._note(self.batches.lost_with(end))
            self.batches.deliver(end, taken)
        return taken

    def note_uncommitted(self) -> None:
        """At the end of this process, in at-most-once mode: notes delivered and uncommitted ranges as lost."""
        if self._ranges.at_most_once:
            with self._context.outbox, self._context.lock:
                self._note(self.batches.uncommitted())

    def _note(self, lost: Sequence[tuple[TopicPartition, int, int]]) -> None:
        for tp, start, to in lost:
            self._member.note(UNCOMMITTED, tp, start, to)

    def replay(self, end: End) -> list[Taken]:
        """Delivers what this consumer must read of an earlier one's batch, when that is known; in a pause it waits
        without limit. Raises PartitionsUnread after four heartbeat intervals."""
        return self._context.complete(self.replaying(end))

    def replaying(self, end: End) -> Steps[list[Taken]]:
        """Does what `replay` does, in steps."""
        wait_s = self._driver.options.heartbeat_interval_s * SETTLE_INTERVALS
        deadline, said = self._context.monotonic() + wait_s, ""
        self._ranges.plan(None)  # skips what retention has deleted since (D6)
        while True:
            self._ranges.alive()
            with self._context.outbox, self._context.lock:
                replay = self.batches.replay(end, self._context.clock.now())
                if not replay.waits:
                    break
                if self._member.paused:
                    deadline = self._context.monotonic() + wait_s
                elif self._context.monotonic() >= deadline:
                    raise PartitionsUnread(self._member.name, _named(replay.waits), planned=True)
                seen = self._context.changes
            if _in_words(replay.waits) != said:
                said = _in_words(replay.waits)
                group = self._member.name
                self._context.logger.info("group %s: a batch that was planned before waits: %s", group, said)
            yield Change(WAIT_SLICE_S, seen)
        if replay.left_out:
            self._context.logger.warning(
                "group %s: of a batch that was planned before, %d of %d ranges are not read here: %s",
                self._member.name,
                len(replay.left_out),
                len(replay.left_out) + len(replay.taken),
                _in_words(replay.left_out),
            )
        return replay.taken


def _named(reasons: Mapping[TopicPartition, str]) -> dict[str, str]:
    return {str(tp): reason for tp, reason in sorted(reasons.items())}


def _in_words(reasons: Mapping[TopicPartition, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in _named(reasons).items())
