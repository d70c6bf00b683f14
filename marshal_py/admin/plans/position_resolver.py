"""Resolves what a move of positions names: partitions, offsets, and topics that were created again.

Asks the cluster; writes nothing. Offsets are looked up again before every move: ends change while a group is drained.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from marshal_py.admin.plans.runner import OperationRunner
from marshal_py.admin.views.recreated_topics import RecreatedTopic, check_topology, find_recreated
from marshal_py.admin.views.suggestions import suggestion
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
from marshal_py.errors import AdminFailed, GroupDeleted, GroupMissing, InvalidOption, PositionOutOfRange
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.transport.ports import TopicInfo


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
            "to", named, f"Kafka has no committed offset of {of} for {tp}; {named}|earliest says what then"
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
                    f"knows more partitions of {topic!r} than the {info.partitions} "
                    f"that Kafka has: marshal groups shrink {runner.context.name} {topic} --partitions "
                    f"{info.partitions}",
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
            if colon and number.isdigit():
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
            raise InvalidOption("topics", given, "name at least one topic")
        return sorted(set(found))

    def check(self) -> None:
        """Refuses wrong positions before anything is paused (M3), as `targets.resolve` does. Of a shift of an owned
        partition only the end: its owner may be further than the log says."""
        owned = self._group().claims.values()
        moving = {partition.tp for partition in owned} if self._target.where is None else set()
        self._resolve([tp for tp in self.tps if tp not in moving])
        try:
            self._resolve([tp for tp in self.tps if tp in moving])
        except PositionOutOfRange as error:
            if error.position > error.end:
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
