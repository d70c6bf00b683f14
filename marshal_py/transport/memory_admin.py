"""Implements the administration of a MemoryBroker: ClusterAdmin and TopicAdmin of ports.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marshal_py.errors import AlreadyExists, ClusterUnreachable, CoordinationTopicMissing, TopicMissing, TopicRefused
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.memory_broker import MemoryBroker, MemoryConnection, MemoryMessage
from marshal_py.transport.ports import ALL_CAPABILITIES, Bounds, BrokerInfo, ClusterInfo, TopicInfo
from marshal_py.transport.topic_checks import check_settings


class MemoryTopics:
    """Implements TopicAdmin over a MemoryBroker."""

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection

    @property
    def broker(self) -> MemoryBroker:
        """The broker. Raises ClusterUnreachable while the connection is cut."""
        self._connection.check()
        return self._connection.broker

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        with self.broker.lock:
            if name in self.broker.topics:
                raise AlreadyExists("topic", name)
            if replication is not None and replication > self.broker.brokers:
                raise TopicRefused(name, f"replication factor {replication} with {self.broker.brokers} brokers")
            if not dry_run:
                self.broker.create_topic(name, partitions)
                self.broker.settings[name].update(config)

    def grow(self, name: str, partitions: int, dry_run: bool) -> None:
        with self.broker.lock:
            known = len(self._topic(name))
            if partitions <= known:
                raise TopicRefused(name, f"it has {known} partitions, and {partitions} are no more")
            if not dry_run:
                self.broker.grow(name, partitions)

    def alter(self, name: str, config: Mapping[str, str | None], dry_run: bool) -> None:
        with self.broker.lock:
            self._topic(name)
            if not dry_run:
                kept = {**self.broker.settings[name], **config}
                self.broker.settings[name] = {key: value for key, value in kept.items() if value is not None}

    def delete(self, name: str) -> None:
        with self.broker.lock:
            self._topic(name)
            self.broker.delete_topic(name)

    def _topic(self, name: str) -> list[list[MemoryMessage | None]]:
        if name not in self.broker.topics:
            raise TopicMissing(name)
        return self.broker.topics[name]


class MemoryAdmin:
    """Implements ClusterAdmin over a MemoryBroker."""

    capabilities = ALL_CAPABILITIES

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection

    @property
    def broker(self) -> MemoryBroker:
        """The broker. Raises ClusterUnreachable while the connection is cut."""
        self._connection.check()
        return self._connection.broker

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        with self.broker.lock:
            if topic not in self.broker.topics:
                if not self.broker.may_create:
                    raise CoordinationTopicMissing(topic, "not allowed", f"create_topic({topic!r}, {partitions})")
                self.broker.create_topic(topic, partitions)
            check_settings(topic, self.broker.settings[topic], self.broker.brokers, self.broker.brokers, "memory")
            return len(self.broker.topics[topic])

    def describe_topic(self, topic: str) -> TopicInfo | None:
        with self.broker.lock:
            found = self.broker.topics.get(topic)
            known = str(self.broker.ids[topic]) if found is not None and self.broker.tells_ids else ""
            return None if found is None else TopicInfo(len(found), known)

    def describe_cluster(self) -> ClusterInfo:
        with self.broker.lock:
            brokers = tuple(BrokerInfo(number, "memory") for number in range(self.broker.brokers))
            counts = {name: len(partitions) for name, partitions in self.broker.topics.items()}
            return ClusterInfo("memory", brokers, counts, {}, {})

    def topics(self) -> frozenset[str]:
        with self.broker.lock:
            return frozenset(self.broker.topics)

    def partition_count(self, topic: str) -> int | None:
        found = self.describe_topic(topic)
        return None if found is None else found.partitions

    def bounds(
        self, tps: Sequence[TopicPartition], *, committed: bool = False, timeout_s: float | None = None
    ) -> dict[TopicPartition, Bounds]:
        with self.broker.lock:
            for tp in tps:
                if not self.broker.has(tp):
                    raise ClusterUnreachable("memory", f"the ends of {tp}", "there is no such partition")
            return {tp: self.broker.bounds(tp) for tp in tps}

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        with self.broker.lock:
            for tp in tps:
                bounds = self.broker.bounds(tp)
                messages = self.broker.read(tp, bounds.first, bounds.end - bounds.first)
                later = [message.offset() for message in messages if message.timestamp()[1] >= time_ms]
                if later:
                    found[tp] = later[0]
        return found

    def bounds_and_times(
        self, tps: Sequence[TopicPartition], times_ms: Sequence[int], *, committed: bool = False
    ) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
        return self.bounds(tps, committed=committed), [self.offsets_at(tps, at_ms) for at_ms in times_ms]

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self.broker.lock:
            return {tp: self.broker.committed[group, tp] for tp in tps if (group, tp) in self.broker.committed}

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        with self.broker.lock:
            if self.broker.live_kafka.get(group):
                return "the group has live members"
            self.broker.committed.update({(group, tp): offset for tp, offset in positions.items()})
            return ""

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        if not self.broker.may_delete:
            return "not authorized"
        self.broker.delete_records(tp, before)
        return ""

    def topic_admin(self) -> MemoryTopics:
        return MemoryTopics(self._connection)

    def live_kafka_members(self, group: str) -> int:
        return self.broker.live_kafka.get(group, 0)

    def settings(self, topic: str) -> dict[str, str]:
        return dict(self.broker.settings[topic])

    def close(self) -> None:
        pass
