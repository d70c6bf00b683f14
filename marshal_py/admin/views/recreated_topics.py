"""Finds topics of a group that were deleted and created again, and makes the record that accepts them. Pure.

A move of positions accepts the new topic first (PROTOCOL.md F9.10, M16), because positions of the old one mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from marshal_py.errors import GroupMissing, InvalidOption, PartitionParked
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Topology
from marshal_py.transport.option_names import suggestion
from marshal_py.transport.ports import TopicInfo


class RecreatedTopic(NamedTuple):
    """A topic whose id in the cluster, `found`, is not the log's, `known`. `partitions` now; `forgotten`: how many
    positions go."""

    topic: str
    known: str
    found: str
    partitions: int
    forgotten: int

    def accepting(self, group: Group, token: int, by: str) -> Topology:
        """Returns the record by which the group accepts the new topic. `token`: of the pause in which it is sent."""
        return Topology(self.topic, self.partitions, group.topology_offset(self.topic), token, by, self.found)

    def error(self, group: str, partition: int) -> PartitionParked:
        """Returns the error for a call that would need the old topic."""
        tp = TopicPartition(self.topic, partition)
        return records.parked_error(group, tp, records.RECREATED, self.known, self.found)


def find_recreated(group: Group, infos: Mapping[str, TopicInfo]) -> dict[str, RecreatedTopic]:
    """Returns, by name, the topics of `infos` that were created again, as far as both ids are known (D10)."""
    found = {}
    for topic, known in group.topics.items():
        info = infos.get(topic)
        if info is not None and "" not in (known.id, info.topic_id) and known.id != info.topic_id:
            kept = sum(
                tp.topic == topic and tp.partition >= 0 and partition.position != NONE
                for tp, partition in group.partitions.items()
            )
            found[topic] = RecreatedTopic(topic, known.id, info.topic_id, info.partitions, kept)
    return found


def partitions_of(group: Group, recreated: Iterable[RecreatedTopic]) -> set[TopicPartition]:
    """Returns the partitions that nobody may own when the group accepts these topics (F9.10)."""
    topics = {one.topic for one in recreated}
    found = {tp for tp in group.partitions if tp.topic in topics and tp.partition >= 0}
    for topic in topics:
        found |= {TopicPartition(topic, number) for number in range(group.topics[topic].count)}
    return found


def check_topology(
    group: Group | None, name: str, tps: Iterable[TopicPartition], recreated: Mapping[str, RecreatedTopic]
) -> None:
    """Raises GroupMissing unless the log has each partition (F8.2); for `recreated` topics, unless the new one has."""
    if group is None:
        raise GroupMissing(name, "has never been used: start a consumer once, or correct the name")
    for tp in tps:
        topic = group.topics.get(tp.topic)
        if topic is None:
            raise GroupMissing(name, f"has never consumed topic {tp.topic!r}{suggestion(tp.topic, group.topics)}")
        new = recreated.get(tp.topic)
        count = topic.count if new is None or topic.id == new.found else new.partitions
        if not 0 <= tp.partition < count:
            raise GroupMissing(name, f"knows {count} partitions of {tp.topic!r}, not {tp}")


def check_smaller(group: Group, topic: str, there: TopicInfo | None, partitions: int) -> None:
    """Raises PartitionParked or InvalidOption if a topic cannot get so few partitions. `there`: the cluster's, or
    None."""
    for one in find_recreated(group, {} if there is None else {topic: there}).values():
        raise one.error(group.name, 0)
    if there is not None and there.partitions > partitions:
        raise InvalidOption(
            "partitions",
            partitions,
            f"{topic!r} has {there.partitions} in Kafka, so the next "
            "consumer would make it grow again: recreate the topic first",
        )
