"""Resolves what a move of positions names: partitions, offsets, and topics that were created again.

Asks the cluster; writes nothing. Offsets are looked up again before every move: ends change while a group is drained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from marshal_py.admin.plans.runner import OperationRunner
from marshal_py.admin.plans.targets import Target, resolve
from marshal_py.admin.views.recreated_topics import RecreatedTopic, check_topology, find_recreated
from marshal_py.admin.views.suggestions import suggestion
from marshal_py.client.values.position_text import Facts, at_times, committed_at
from marshal_py.errors import AdminFailed, GroupDeleted, GroupMissing, InvalidOption, PositionOutOfRange
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import TopicInfo


class PositionResolver:
    """Finds the partitions of one move, and looks their new positions up."""

    def __init__(self, runner: OperationRunner, topics: str | Sequence[str | TopicPartition], target: Target) -> None:
        """Finds the partitions that `topics` and `target` name, and topics created again. Raises PartitionParked for
        these with a shift or committed offsets, which refer to the topic that is gone."""
        self._runner, self._target = runner, target
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
        return resolve(self._target, tps, positions, Facts(admin.bounds(tps), self._committed, times))
