"""The micro-batches of one streaming query: what was handed over, what the query has committed, what is planned again.

A position moves only over ranges that were handed over and whose batch the query has committed; nothing is derived from
offsets. Pure: the driver (planner.py, the simulator) holds the lock, asks the cluster and waits.

A query names a batch by its end offset, which holds the whole plan and the session that made it. Within the life that
planned it, a batch is what was handed over, all of it, whatever became of the claims meanwhile. A later life knows the
plan and the log alone:

- **Committed**: the query begins after a batch of session S. Of each of its ranges, position and claim decide. If this
  life has the claim, directly after S (or after claims of its own that follow S) and in the same generation, and the
  position lies in the range, then the range is done: S has handed over all of it, and nobody else can have begun there.
  (But for one that had the claim between two of S: the log's state keeps no claims before the last. What that one left
  unfinished the query has done too.) In every other case the log's position holds, and what lies above it is planned
  again: at worst it is delivered twice.
- **Replayed**: the batch of session S was planned and not committed. A range that this life has the claim of is handed
  over from the position on. One that the position or the generation has passed is done or was moved. One that another
  session has owned since is that session's. All these may be left out for good, because the rule above will never count
  them as done. As long as none of it holds (the dead session is still being waited out, the group is paused) the replay
  waits: a range that was left out then could be taken for done later.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from marshal_py.client.ranges import BEGUN_KEPT, ClaimedRange, Ranges, Taken
from marshal_py.protocol.claim import ClaimPhase
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.protocol.records import AT_MOST_ONCE
from marshal_py.protocol.world import Partition

End = dict[str, Any]  # an end offset as the query keeps it: JSON
FIRST: Final[End] = {"b": 0, "r": {}}  # before the first batch; the same for ever, as the query asks again


class Planned(NamedTuple):
    """One range of a batch, as its end offset has it: offsets [start, to), planned by `session` under `epoch`."""

    session: int
    epoch: int
    generation: int
    start: int
    to: int


class HandedOver(NamedTuple):
    """A batch that is with the query."""

    session: int
    taken: list[Taken]


class Replay(NamedTuple):
    """What became of a batch that an earlier life planned. Nothing is final before `waits` is empty."""

    taken: list[Taken]
    waits: dict[TopicPartition, str]  # why it cannot be told yet
    left_out: dict[TopicPartition, str]  # why it is not read here


def key_of(end: End) -> str:
    return json.dumps(end)


def digest_of(end: End) -> str:
    """Stands for a batch in a message that must be short."""
    return hashlib.sha256(key_of(end).encode()).hexdigest()


def planned_in(end: End, incarnation: bytes) -> dict[TopicPartition, Planned]:
    """The ranges of a batch; none of the first offset, and of another coordination topic's."""
    if end.get("i") != incarnation.hex():
        return {}
    found = {}
    for name, (epoch, generation, start, to) in end["r"].items():
        topic, _, number = name.rpartition(":")
        found[TopicPartition(topic, int(number))] = Planned(end.get("s", NONE), epoch, generation, start, to)
    return found


class MicroBatches:
    """Of one member, in at-least-once or at-most-once mode. Everything is called under the driver's lock."""

    def __init__(self, member: Member, ranges: Ranges, incarnation: bytes, before: MicroBatches | None = None) -> None:
        """`before`: of an earlier membership of the same process, which knows what it has handed over.

        That counts within one incarnation of the log alone: in another one the same epochs are other claims.
        """
        if before is not None and before.incarnation != incarnation:
            before = None
        self.member, self.ranges = member, ranges
        self.incarnation: bytes = incarnation
        self.at_most_once = member.options.mode == AT_MOST_ONCE
        self.handed: dict[str, HandedOver] = before.handed if before is not None else {}  # by end, until committed
        # What is done and not yet told to the log.
        self._proven: dict[TopicPartition, Planned] = before._proven if before is not None else {}
        if before is not None:
            for tp, begun in before.ranges.begun.items():
                ranges.begun[tp] = deque([*begun, *ranges.begun.get(tp, ())], BEGUN_KEPT)
        self._replaying: dict[TopicPartition, Taken] = {}
        self._committed: str = before._committed if before is not None else ""  # key of the newest

    # --- the query has committed

    def commit(self, end: End, now: Instant) -> bool:
        """The batch that ends at `end` is done. True if a position moved. Twice is once."""
        key = key_of(end)
        if key != self._committed:
            self._committed = key
            handed = self.handed.pop(key, None)
            if handed is not None:
                moved = self._finish(handed)
                return self.settle_proven(now) or moved
            if not self.at_most_once:
                self._proven |= planned_in(end, self.incarnation)
        return self.settle_proven(now)

    def commit_reported(self, digest: str, now: Instant) -> bool:
        """As `commit`, from whoever has heard of it beside the query: early, late, twice, or of another life's batch.

        Counts for batches that are with the query now. The query itself tells all others.
        """
        for key in self.handed:
            end: End = json.loads(key)
            if digest_of(end) == digest:
                return self.commit(end, now)
        return False

    def _finish(self, handed: HandedOver) -> bool:
        moved = False
        for taken in handed.taken:
            one = taken.range
            if self.ranges.finish(taken):
                moved = True
            elif not self.at_most_once:  # the claim is gone, but what was done is done
                self._proven[one.tp] = Planned(handed.session, one.token.epoch, one.generation, one.start, one.to)
        return moved

    def settle_proven(self, now: Instant) -> bool:
        """Moves positions over what earlier claims did, where that can be told now. True if one moved."""
        moved = False
        for tp, proven in list(self._proven.items()):
            part, epoch = self._partition(tp), self._goes_on_as(tp, proven)
            if part is None or epoch == NONE or self._passed(part, proven) or self._of_others(part, tp, proven.session):
                del self._proven[tp]
            elif proven.epoch != epoch == part.epoch:  # else it is being released, or its claim is to come
                planned_claim = self.ranges.claims.get(tp)
                if (
                    planned_claim is not None
                    and planned_claim.taken is None
                    and proven.start <= planned_claim.next_offset < proven.to
                ):
                    taken = self.ranges.take(self.ranges.range_of(tp, planned_claim.next_offset, proven.to), now)
                    if taken is not None:
                        moved = self.ranges.finish(taken) or moved
                        del self._proven[tp]
        return moved

    def _goes_on_as(self, tp: TopicPartition, planned: Planned) -> int:
        """The newest claim of this process that follows the planned one; NONE if somebody else's lies in between.

        The planned epoch itself as long as this process has not claimed the partition since.
        """
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
        """Whether the log is beyond this range: done, moved by an admin, parked until an admin moves it (F6.5)."""
        return part.generation != planned.generation or part.position >= planned.to or part.parked != ""

    def _of_others(self, part: Partition, tp: TopicPartition, session: int) -> bool:
        """Whether somebody else than `session` and this process has the claim, or was the last to have it."""
        ours = {session, self.member.session, *(begun.session for begun in self.ranges.begun.get(tp, ()))}
        return part.owner not in ours if part.owner != NONE else part.last_owner not in ours

    # --- the next batch

    def plan(self, start: End, available: Sequence[ClaimedRange], now: Instant) -> End:
        """The end offset of the next batch; `start` itself if there is nothing to do.

        In at-least-once mode the ranges are handed over here, behind the gate: the batch is then what its plan says. In
        at-most-once mode `hand_over` does it, when the query has written the plan down.
        """
        for handed in self.handed.values():  # the query asks for a batch while it has one: that one never began
            for given in handed.taken:
                self.ranges.give_back(given)
        self.handed.clear()
        wanted = [one for one in available if one.tp not in self._proven]
        taken_now: list[Taken] = []
        if not self.at_most_once:
            taken_now = [taken for one in wanted if (taken := self.ranges.take(one, now)) is not None]
            wanted = [each.range for each in taken_now]
        if not wanted:
            return start
        end = self.end_of(start, wanted)
        if not self.at_most_once:
            self.hand_over(end, taken_now)
        return end

    def end_of(self, start: End, planned: Sequence[ClaimedRange]) -> End:
        """The end offset that holds this plan."""
        ranges = {
            f"{one.topic}:{one.partition}": [one.token.epoch, one.generation, one.start, one.to]
            for one in sorted(planned)
        }
        return {"b": start["b"] + 1, "i": self.incarnation.hex(), "s": self.member.session, "r": ranges}

    def handed_over(self, end: End) -> list[Taken] | None:
        """What the batch holds; None if this life did not hand it over."""
        found = self.handed.get(key_of(end))
        return None if found is None else found.taken

    def hand_over(self, end: End, taken: list[Taken]) -> None:
        """These ranges are with the query: planned, granted or replayed."""
        self.handed[key_of(end)] = HandedOver(self.member.session, taken)

    # --- at-most-once mode: what is lost with a batch

    def uncommitted(self) -> list[tuple[TopicPartition, int, int]]:
        """[start, to) of what is with the query: lost if this process ends now."""
        return [
            (taken.range.tp, taken.range.start, taken.range.to)
            for handed in self.handed.values()
            for taken in handed.taken
        ]

    def lost_with(self, end: End) -> list[tuple[TopicPartition, int, int]]:
        """[start, to) of what an earlier life was granted of a batch that it has planned and the query not committed.

        As far as the log tells, whose grants have no author: if nobody has had the partition between that life and this
        one, and no admin has moved it, what lies below the position at which that life ended was granted to it.
        """
        found = []
        for tp, planned in planned_in(end, self.incarnation).items():
            part = self._partition(tp)
            if part is not None and part.generation == planned.generation:
                to = min(planned.to, self._ended_at(part, tp, planned))
                found += [(tp, planned.start, to)] if to > planned.start else []
        return found

    def _ended_at(self, part: Partition, tp: TopicPartition, planned: Planned) -> int:
        """The position when the planned claim ended; NONE if that is not known, or it has not."""
        if part.owner == NONE:
            return part.position if part.last_owner == planned.session else NONE
        since = next((begun for begun in self.ranges.begun.get(tp, ()) if begun.epoch > planned.epoch), None)
        ours = since is not None and since.after == planned.session and part.epoch == since.epoch
        return part.began if ours else NONE

    # --- a batch that an earlier life planned

    def replay(self, end: End, now: Instant) -> Replay:
        """At-least-once mode: hands over what may be read here and now. Call it again while something waits."""
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
            self.hand_over(end, result.taken)
        return result

    def _replay_one(self, tp: TopicPartition, planned: Planned, now: Instant, result: Replay) -> Taken | None:
        part, group = self._partition(tp), self.member.group
        if part is None:
            if group is not None and self.member.session != NONE:
                result.left_out[tp] = "the group does not have it any more"
            else:
                result.waits[tp] = "this member has not joined yet"
        elif self._passed(part, planned):
            result.left_out[tp] = f"the group stands at {part.position}" + (
                " in a newer generation" * (part.generation != planned.generation)
            )
        elif self._of_others(part, tp, planned.session):
            result.left_out[tp] = f"another member has had it since, and the group stands at {part.position}"
        elif part.owner != self.member.session or self.member.session == NONE or tp in self._proven:
            paused = group is not None and group.paused
            result.waits[tp] = "the group is paused" if paused else "nobody has claimed it since"
        else:
            return self._replay_own(tp, planned, now, result)
        return None

    def _replay_own(self, tp: TopicPartition, planned: Planned, now: Instant, result: Replay) -> Taken | None:
        planned_claim = self.ranges.claims.get(tp)
        if planned_claim is None or planned_claim.taken is not None or planned_claim.claim.phase is not ClaimPhase.OPEN:
            result.waits[tp] = "its claim does not deliver now"
        elif not planned.start <= planned_claim.next_offset < planned.to:
            result.left_out[tp] = f"its claim goes on at {planned_claim.next_offset}"
        else:
            taken = self.ranges.take(self.ranges.range_of(tp, planned_claim.next_offset, planned.to), now)
            if taken is None:
                result.waits[tp] = "its claim may not deliver now"
            return taken
        return None
