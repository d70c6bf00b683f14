"""Moves positions of a live group by one plan: pause, drain, one atomic record, resume (PROTOCOL.md M1-M10).

At each tick the plan reads from the world how far it is. First the group is not paused for it; then partitions are
still owned; then they are free and the new positions are looked up; at last they are moved. The outcome is MOVED once
one of its SetPositions was read as accepted, NOT_MOVED if none of them can be accepted any more, and UNKNOWN otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Final, NamedTuple

from marshal_py.admin.plans.operation import BY_BYTES_MAX, USUAL, GroupContext, Operation, OperationRunner, Terms
from marshal_py.admin.plans.pause import Drain, PauseLock
from marshal_py.admin.views.recreated_topics import RecreatedTopic, check_topology, find_recreated, partitions_of
from marshal_py.client.values.position_text import (
    COMMITTED,
    Facts,
    Point,
    Where,
    at_times,
    committed_at,
    offset,
    parse,
    points_of,
)
from marshal_py.errors import (
    AdminBusy,
    AdminFailed,
    AdminGaveUp,
    GroupDeleted,
    GroupMissing,
    InvalidOption,
    MarshalError,
    PositionOutOfRange,
    first_of,
)
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire import codec, progress
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import OFFSET_MAX, Move, SetPosition, Topology
from marshal_py.transport.option_names import suggestion
from marshal_py.transport.ports import TopicInfo

MOVED: Final = "moved"
NOT_MOVED: Final = AdminFailed.NOT_MOVED
UNKNOWN: Final = AdminFailed.UNKNOWN
NO_TOPICS: Final[Mapping[str, RecreatedTopic]] = {}


class PositionPlan(Operation):
    """Moves the positions of some partitions of a group: all of them, or none."""

    undone = "no position moved, and none will"

    def __init__(
        self,
        context: GroupContext,
        tps: Iterable[TopicPartition],
        terms: Terms = USUAL,
        *,
        stay_paused: bool = False,
        recreated: Mapping[str, RecreatedTopic] = NO_TOPICS,
    ) -> None:
        """Plans to move the positions of `tps`. `recreated`: topics, by name, that the group accepts as they are now
        before. `stay_paused` after the move. Raises InvalidRecord if too large, GroupMissing."""
        super().__init__(context, terms)
        self.tps: list[TopicPartition] = sorted(set(tps))
        self.recreated = recreated
        self.accepted: set[str] = set()  # new topics that a record of this run made the group's
        self._stay_paused = stay_paused
        check_topology(context.group, context.name, self.tps, recreated)
        check_size(context, self.tps)
        self.pause_lock: PauseLock = PauseLock(self, self.reason or "set-position")
        self.by: str = context.author.signed(self.reason)
        group = context.group
        assert group is not None  # check_topology raises an error if it is
        self.drain: Drain = Drain(self, set(self.tps) | partitions_of(group, recreated.values()))
        self.moved: SetPosition | None = None  # our record, once it was read as accepted
        self.moved_at: int = NONE
        self.before: dict[TopicPartition, int] = {}  # positions as they were when the move was sent
        self.finished: dict[TopicPartition, list[Range]] = {}  # and what was finished above them
        self.token: int = NONE  # of the pause that remains, if one does
        self._resolved: Mapping[TopicPartition, int] | None = None
        self._resolved_for: tuple[tuple[int, int], ...] = ()
        self._reported_moving = False

    # --- reading

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.drain.read(verdict)
        record = verdict.record
        if isinstance(record, SetPosition) and verdict.accepted and self.context.author.wrote(record.by):
            self.moved, self.moved_at = record, verdict.offset  # any of our attempts counts (M6)
            self.report("moved", offset=verdict.offset)
        elif isinstance(record, Topology) and verdict.accepted and self.context.author.wrote(record.by):
            self.accepted.add(record.topic)
            self.report("accepted", record.topic, offset=verdict.offset)

    @property
    def resume(self) -> bool:
        """Says whether the move also ends the pause. A pause that another run made is left in place (M2)."""
        return not self._stay_paused and self.pause_lock.adopted is None

    @property
    def outcome(self) -> str:
        """Returns MOVED, UNKNOWN (the move may still happen) or NOT_MOVED (it cannot happen any more)."""
        if self.moved is not None:
            return MOVED
        return UNKNOWN if self._may_land(self.context.group) else NOT_MOVED

    def _may_land(self, group: Group | None) -> bool:
        """Returns whether a copy of the move can still be accepted (M7): only while the pause that it names runs
        (F8.1), and tokens only grow."""
        if group is None or group.deleted or group.opaque_at != NONE:
            return False
        return any(record.token == group.pause_change for record in self.sent(SetPosition))

    # --- acting

    def positions_resolved(self, positions: Mapping[TopicPartition, int]) -> None:
        """Takes the new positions that the driver has looked up."""
        self._resolved = positions

    def act(self, group: Group, now: Instant) -> None:
        if self.moved is not None:
            self._leave_moved(group, now)
            return
        try:
            check_topology(group, group.name, self.tps, self.recreated)
        except GroupMissing as error:
            self.give_up(AdminFailed(group.name, AdminFailed.NOT_MOVED, str(error)))
            return
        if not self.pause_lock.acquire(group, now) or not self.drain.empty(group, now) or not self._accept(group, now):
            return
        states = tuple(_state(group, tp) for tp in self.tps)
        if self._resolved is None or self._resolved_for != states:
            self._resolved, self._resolved_for = None, states
            self.step.resolve_positions = True  # positions no longer change: nobody owns them, and nobody can claim
            return
        if not self._reported_moving:
            self._reported_moving = True
            self.report("moving", f"{len(self.tps)} partitions", offset=group.pause_change)
        self.before = {tp: position for tp, (_, position) in zip(self.tps, states, strict=True)}
        self.finished = finished_of(group)
        moves = tuple(Move(*tp, version, self._resolved[tp]) for tp, (version, _) in zip(self.tps, states, strict=True))
        self.send(SetPosition(group.pause_change, moves, self.resume, self.by), now)

    def _accept(self, group: Group, now: Instant) -> bool:
        """Makes the group accept topics that were created again (M16); True once the log says so. Only while nobody
        owns a partition of them."""
        waiting = False
        for one in self.recreated.values():
            known = group.topics[one.topic].id
            if known == one.found:
                continue  # accepted already, by this run, by one before it, or by a consumer
            if known != one.known:
                self.give_up(
                    AdminFailed(
                        group.name, AdminFailed.NOT_MOVED, f"topic {one.topic!r} was created again once more: try again"
                    )
                )
            else:
                self.send(one.accepting(group, group.pause_change, self.by), now)
            waiting = True
        return not waiting

    def _leave_moved(self, group: Group, now: Instant) -> None:
        """Ends the operation after the move; if the pause stays, when its token is final. If the move ended it, the
        fold rejects our other records (F8.4)."""
        stays = self.context.own_pause is not None or (group.paused and self.pause_lock.adopted is not None)
        if self.resume or not stays or self.pause_lock.settled(group):
            self.token = group.pause_change if stays else NONE
            self.end()
        else:
            self.pause_lock.acquire(group, now)

    # --- giving up

    def pause_ended(self, by: str) -> MarshalError:
        return AdminFailed(self.context.name, AdminFailed.NOT_MOVED, f"the pause was ended by {by or 'somebody'}")

    def timeout_error(self) -> MarshalError:
        names, waited_s = self.drain.names(self.context.group), self.patience_ms / 1000
        why = AdminGaveUp(self.context.name, "the pause", waited_s, held_by=names)
        return AdminFailed(self.context.name, AdminFailed.NOT_MOVED, str(why))

    def close(self, group: Group, now: Instant) -> bool:
        if self.moved is not None and self.resume:
            return True
        if self.pause_lock.adopted is not None:
            return not self._may_land(group)  # M8: this run does not end a pause that it adopted
        return self.pause_lock.release(group, now)

    def end(self, error: MarshalError | None = None) -> None:
        """Ends the operation with the error that fits `outcome`, and names `error` as its reason; none if the positions
        moved."""
        if self.outcome == MOVED:
            error = None  # the move was accepted while the operation gave up
        elif self.outcome == UNKNOWN:
            error = AdminFailed(self.context.name, AdminFailed.UNKNOWN, str(error), self.command())
        elif error is not None:
            error = self._not_moved(error)
        super().end(error)

    def _not_moved(self, error: MarshalError) -> MarshalError:
        """Returns the error for a move that did not happen, with the recreated topics that the group has accepted or
        may: their positions are forgotten all the same (M16)."""
        notes = [
            f"topic {topic!r} is the new one for the group now, and its partitions start at their beginnings"
            for topic in sorted(self.accepted)
        ]
        notes += [f"the new topic {topic!r} may still be accepted" for topic in sorted(self._acceptable())]
        if isinstance(error, AdminBusy) and not notes:
            return error
        reason = error.detail if isinstance(error, AdminFailed) and error.outcome == NOT_MOVED else str(error)
        if notes and isinstance(error, AdminGaveUp) and not error.waited_s:
            reason = "it was interrupted"  # the error's own text says that nothing will happen, which may be wrong here
        return AdminFailed(self.context.name, AdminFailed.NOT_MOVED, "; ".join([reason, *notes]))

    def _acceptable(self) -> set[str]:
        """Returns the recreated topics that may still be accepted: a record was sent, not read yet, and needs no
        pause."""
        group = self.context.group
        if group is None or group.deleted or (group.config is not None and group.config.on_topic_recreated == "fail"):
            return set()
        sent = self.sent(Topology)
        return {record.topic for record in sent if record.observed == group.topology_offset(record.topic)}

    def command(self) -> str:
        """Returns the command that shows later what became of the move."""
        return f"marshal explain {quote(self.context.name)} {self.tps[0]}"


def _state(group: Group, tp: TopicPartition) -> tuple[int, int]:
    """Returns a partition's version (the offset that last changed its owner or position) and position; NONE without
    it."""
    known = group.partitions.get(tp)
    return (NONE, NONE) if known is None else (known.version, known.position)


def finished_of(group: Group) -> dict[TopicPartition, list[Range]]:
    """Returns what is finished above the positions, as far as the log says. Every move forgets it (D1)."""
    found = {tp: progress.decode(p.position, p.progress) for tp, p in group.partitions.items() if p.progress}
    return {tp: [one for one in ranges if not one.times] for tp, ranges in found.items()}


def check_size(context: GroupContext, tps: Iterable[TopicPartition]) -> None:
    """Raises InvalidRecord if the record of the move could be too large, with the longest values."""
    moves = tuple(Move(*tp, OFFSET_MAX, OFFSET_MAX) for tp in tps)
    record = SetPosition(OFFSET_MAX, moves, True, context.author.signed("x" * BY_BYTES_MAX))
    genesis = context.world.genesis
    codec.encode(record, context.name, b"" if genesis is None else genesis.incarnation)


# --- Resolves what a move of positions names: partitions, offsets, and topics that were created again
#
# Asks the cluster; writes nothing. Offsets are looked up again before every move: ends change while a group is drained.


class Target(NamedTuple):
    """What the caller gave as the target: a place, or None and how far to shift, which may be negative."""

    where: Where | None
    shift_by: int = 0

    @property
    def named(self) -> Mapping[TopicPartition, Point]:
        """Returns the points of a table, by partition; empty if the target is no table."""
        return {} if self.where is None else self.where.named

    @property
    def of_the_past(self) -> bool:
        """Returns whether the target refers to the topic as it was: a shift, or committed offsets of some partition."""
        if self.where is None:
            return True
        return any(point is not None and point.kind == COMMITTED for point in (self.where.rest, *self.named.values()))

    def points(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, Point]:
        """Returns the point of each partition; none for a shift. Raises InvalidOption if a table lacks one."""
        return {} if self.where is None else points_of(self.where, tps, "to", "the table")


def target_of(to: str | int | Target | None, shift_by: int | None, group: str) -> Target:
    """Returns the target, named in one of two ways. `group`: whose lines may be in a table. Raises InvalidOption for
    none or both."""
    if (to is None) == (shift_by is None):
        raise InvalidOption("to", to, "give either `to` or `shift_by`")
    if shift_by is not None:
        return Target(None, shift_by)
    return to if isinstance(to, Target) else Target(parse(str(to), "to", group=group))


def resolve(
    target: Target, tps: Iterable[TopicPartition], positions: Mapping[TopicPartition, int], facts: Facts
) -> dict[TopicPartition, int]:
    """Returns the target's offset in each partition. `positions`: the world's, or NONE. Raises PositionOutOfRange, or
    InvalidOption if a fact is missing."""
    tps = list(tps)
    points = target.points(tps)
    found = {tp: _shifted(tp, target.shift_by, positions) if not points else _at(tp, points[tp], facts) for tp in tps}
    for tp, position in found.items():
        first, end = facts.bounds[tp]
        if not first <= position <= end:
            raise PositionOutOfRange(*tp, position, first, end)
    return found


def _shifted(tp: TopicPartition, by: int, positions: Mapping[TopicPartition, int]) -> int:
    if positions.get(tp, NONE) == NONE:
        raise InvalidOption("shift_by", by, f"{tp} has no position yet")
    return positions[tp] + by


def _at(tp: TopicPartition, point: Point, facts: Facts) -> int:
    found = offset(tp, point, facts)
    if found is None:
        named = f"{COMMITTED}:{point.group}" if point.group else COMMITTED
        of = f"group {point.group!r}" if point.group else "the group"
        raise InvalidOption(
            "to",
            named,
            f"Kafka has no committed offset of {of} for {tp}; {named}|earliest or {named}|latest says what then",
        )
    return found


class PositionResolver:
    """Finds the partitions of one move, and looks their new positions up."""

    def __init__(self, runner: OperationRunner, topics: str | Sequence[str | TopicPartition], target: Target) -> None:
        """Finds the partitions that `topics` and `target` name, and topics created again. Raises PartitionParked for
        these with a shift or committed offsets, which refer to the topic that is gone."""
        self._runner, self._target = runner, target
        self.firsts: dict[TopicPartition, int] = {}  # the first offsets, as `positions` looked them up last
        given = [topics] if isinstance(topics, str) else list(topics)
        names = {one.topic if isinstance(one, TopicPartition) else one.partition(":")[0] for one in given}
        names |= {tp.topic for tp in target.named} if not given else set()
        group = self._group()
        if group.deleted:
            raise GroupDeleted(group.name)
        self._infos = {name: self._look(name) for name in sorted(names) if name in group.topics}
        self.recreated: dict[str, RecreatedTopic] = find_recreated(group, self._infos)
        self.tps: list[TopicPartition] = self._partitions(given)
        check_topology(group, runner.context.name, self.tps, self.recreated)
        for topic, info in self._infos.items():
            if any(tp.topic == topic and tp.partition >= info.partitions for tp in self.tps):
                raise GroupMissing(
                    runner.context.name,
                    f"knows more partitions of {topic!r} than the {info.partitions} that Kafka has: marshal groups "
                    f"update {quote(runner.context.name)} --shrink {topic}={info.partitions}",
                )
        if target.of_the_past:
            # A shift starts from a position of the topic that is gone, and committed offsets are such positions.
            for one in self.recreated.values():
                raise one.error(group.name, self._first_of(one.topic))
        # Offsets that the group commits while it releases its partitions must not change the target.
        self._committed = committed_at(target.points(self.tps), runner.context.name, runner.admin)

    def _group(self) -> Group:
        group = self._runner.context.group
        assert group is not None  # Group.runner raises an error if it is
        return group

    def _look(self, topic: str) -> TopicInfo:
        info = self._runner.admin.describe_topic(topic)
        if info is None:
            raise GroupMissing(self._runner.context.name, f"consumed {topic!r}, which does not exist any more")
        return info

    def _first_of(self, topic: str) -> int:
        return min(tp.partition for tp in self.tps if tp.topic == topic)

    def _partitions(self, given: Sequence[str | TopicPartition]) -> list[TopicPartition]:
        """Returns the partitions that the caller named, or those of the target's table if the caller named none."""
        group = self._group()
        found: list[TopicPartition] = []
        table = sorted(self._target.named)
        for one in given:
            if isinstance(one, TopicPartition):
                found.append(one)
                continue
            topic, colon, number = one.rpartition(":")
            if colon and number.isdecimal():
                found.append(TopicPartition(topic, int(number)))
            elif table:
                found += [tp for tp in table if tp.topic == one]
            elif one in group.topics:
                count = self.recreated[one].partitions if one in self.recreated else group.topics[one].count
                found += [TopicPartition(one, partition) for partition in range(count)]
            else:
                raise GroupMissing(
                    self._runner.context.name, f"has never consumed topic {one!r}{suggestion(one, group.topics)}"
                )
        if table:
            found = found if given else table
            missing = sorted(set(found) - set(table))
            if missing:
                raise InvalidOption("to", "the file", f"it does not name {missing[0]}")
        if not found:
            rule = f"the table names only {first_of(map(str, table), 5)}" if table else "name at least one topic"
            raise InvalidOption("topics", given, rule)
        return sorted(set(found))

    def check(self) -> None:
        """Refuses wrong positions before anything is paused (M3), as `resolve` does. Of a shift of an owned partition
        only what is beyond the end, or would be below the beginning from there, too: its owner may be further than the
        log says."""
        owned = self._group().claims.values()
        moving = {partition.tp for partition in owned} if self._target.where is None else set()
        self._resolve([tp for tp in self.tps if tp not in moving])
        try:
            self._resolve([tp for tp in self.tps if tp in moving])
        except PositionOutOfRange as error:
            if error.position > error.end or error.end + self._target.shift_by < error.first:
                raise

    def positions(self) -> dict[TopicPartition, int]:
        """Looks the new positions up. Raises AdminFailed for a topic created again meanwhile."""
        for topic, before in self._infos.items():
            if self._look(topic).topic_id != before.topic_id:
                raise AdminFailed(
                    self._runner.context.name,
                    AdminFailed.NOT_MOVED,
                    f"topic {topic!r} was created again meanwhile: try again",
                )
        return self._resolve(self.tps)

    def _resolve(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        if not tps:
            return {}
        admin, group = self._runner.admin, self._group()
        times = at_times(self._target.points(tps), admin, time.time_ns() // 1_000_000)
        positions = {tp: group.partitions[tp].position for tp in tps if tp in group.partitions}
        bounds = admin.bounds(tps)
        self.firsts |= {tp: bound.first for tp, bound in bounds.items()}
        return resolve(self._target, tps, positions, Facts(bounds, self._committed, times))
