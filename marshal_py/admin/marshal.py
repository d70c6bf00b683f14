"""Makes the Marshal that users get: the client's, with the topics and the groups of the cluster as objects.

Marshal is the JetStreamContext of ADR-37, Topic its Stream, Group its consumer as a thing to administer. Groups are
created, changed, found and deleted here alone: a group is not bound to a topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from msgspec import Struct

from marshal_py.admin.group import Group, group_names
from marshal_py.client import marshal
from marshal_py.client.values.options import EMPTY, GroupConfig, check_topics
from marshal_py.errors import AlreadyExists
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.rationalizer import PROTOCOL_VERSION
from marshal_py.protocol.fold.world import FOLD_VERSION
from marshal_py.protocol.wire.identity import check_id
from marshal_py.topics import changes
from marshal_py.topics.keys import ALL
from marshal_py.topics.request import KEYS_MAX, MAX_BYTES_DEFAULT
from marshal_py.topics.topic import Topic
from marshal_py.transport.ports import BrokerInfo, ClusterAdmin, ClusterInfo
from marshal_py.transport.serialization import Deserializer


class MarshalInfo(Struct, frozen=True):
    """A cluster and this library's part in it.

    `cluster_id`: "" if the cluster has none. `brokers`: those that live, by id. `topics`, `partitions`: how many this
    client may see, internal ones included. `limits`: message.max.bytes, num.partitions and default.replication.factor
    of the brokers, if this client may read their configuration; coordination_partitions; multi_last_keys and
    batch_bytes of `Topic.get`. `versions`: of marshal_py, its protocol and its fold, confluent-kafka and librdkafka.
    Kafka does not tell its clients the brokers' version.
    """

    cluster_id: str
    brokers: tuple[BrokerInfo, ...]
    topics: int
    partitions: int
    limits: dict[str, int]
    versions: dict[str, str]


def versions(cluster: ClusterInfo) -> dict[str, str]:
    """Returns the versions of this library and its parts. `cluster`: as its client told of it."""
    own = {"marshal_py": marshal.VERSION.removeprefix("marshal_py "), "protocol": str(PROTOCOL_VERSION)}
    return {**own, "fold": str(FOLD_VERSION), **cluster.client_versions}


class Marshal(marshal.Marshal):
    """A connection to a cluster. Made by `connect`. It is a context manager: leaving it stops its consumers."""

    def info(self) -> MarshalInfo:
        """Returns the cluster's id, brokers and limits, and the versions of this library and its parts."""
        self._context.check_call("Marshal", "info", waits=True)
        found = self._context.admin.describe_cluster()
        own = {
            "coordination_partitions": self.root.partitions,
            "multi_last_keys": KEYS_MAX,
            "batch_bytes": MAX_BYTES_DEFAULT,
        }
        return MarshalInfo(
            found.cluster_id,
            found.brokers,
            len(found.partition_counts),
            sum(found.partition_counts.values()),
            {**found.limits(), **own},
            versions(found),
        )

    # --- topics

    def topic(
        self,
        name: str,
        *,
        partitioner: str = ALL,
        isolation: str = "read_committed",
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
    ) -> Topic:
        """Returns a topic, to read any of its messages from (`Topic.get`); joins no group and sends no request.

        `partitioner`: how the topic's producers choose a partition for a key, "murmur2_random" (Java's default) or
        "consistent_random" (librdkafka's); by default every partition is searched. `isolation`: "read_committed" or
        "read_uncommitted". Close the topic when it is not needed any more. Raises InvalidOption.
        """
        check_topics([name])
        return Topic(
            self.transport,
            name,
            client_id=self.client_id,
            partitioner=partitioner,
            isolation=isolation,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            timeout_s=self._timeout_s,
            coordination_topic=self.coordination_topic,
        )

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        replication: int | None = None,
        settings: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> Topic:
        """Creates a topic and returns it. `replication` None: the cluster's value. `settings`: Kafka's,
        {"retention.ms": "60000"}.

        With `dry_run` Kafka only checks. Raises InvalidOption, BadRequest, AlreadyExists, TopicRefused, AccessDenied,
        ClusterUnreachable; UnsupportedPlatform on the embedded broker, whose Broker object creates topics.
        """
        admin = self._changeable(name, "create_topic")
        changes.create(admin, name, partitions, replication, settings or {}, dry_run)
        return self.topic(name)

    def update_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, str | None] | None = None,
        dry_run: bool = False,
    ) -> None:
        """Gives a topic more `partitions` (in all), changes its settings (None: the cluster's default), or both.

        Consumers see new partitions by themselves; producers may send a key to another one than before. Raises as
        `create_topic`, and TopicMissing; a refusal changes nothing, and after ClusterUnreachable call it again.
        """
        changes.update(self._changeable(name, "update_topic"), name, partitions, settings or {}, dry_run)

    def delete_topic(self, name: str) -> None:
        """Deletes a topic and everything in it, for good. Raises what `update_topic` raises."""
        changes.delete(self._changeable(name, "delete_topic"), name)

    def _changeable(self, name: str, verb: str) -> ClusterAdmin:
        """Returns the admin client if users may change the topic; InvalidOption for the library's and Kafka's own.
        `verb`: for errors."""
        self._context.check_call("Marshal", verb, waits=True)
        check_topics([name])
        changes.check_name(name, self.coordination_topic)
        return self._context.admin

    # --- groups

    def create_group(self, name: str, config: GroupConfig = EMPTY, *, reason: str = "") -> Group:
        """Creates a group before its first consumer, or revives a deleted one. `reason` is for people.

        Writes nothing if the group exists with exactly these settings. Raises AlreadyExists, which names the
        differences, if it has others, InvalidOption, CoordinationError, ClusterUnreachable, ReentrantCall.
        """
        group = self._group(name, "create_group")
        group.create(**config.named(), reason=reason)
        return group

    def update_group(self, name: str, config: GroupConfig, *, reason: str = "") -> Group:
        """Changes the settings of a group that are not None in `config`, as `Group.set_config` does."""
        group = self._group(name, "update_group")
        group.set_config(**config.named(), reason=reason)
        return group

    def create_or_update_group(self, name: str, config: GroupConfig, *, reason: str = "") -> Group:
        """Creates a group, or changes its settings; nothing if it has them. Raises as `create_group` and
        `update_group`."""
        group = self._group(name, "create_or_update_group")
        with Observer(self.transport, self.coordination_topic) as observer:
            observer.fold(name)
            known = next((one for _, one in observer.groups() if one.name == name), None)
        if known is None or known.deleted:
            with suppress(AlreadyExists):  # somebody was faster
                return self.create_group(name, config, reason=reason)
        elif config.is_part_of(known):
            return group
        return self.update_group(name, config, reason=reason)

    def group(self, name: str) -> Group:
        """Returns the operations on a group. Nothing is sent: a group that does not exist shows at the first of
        them."""
        return self._group(name, "group")

    def groups(self, topic: str = "") -> tuple[str, ...]:
        """Returns the sorted names of the groups that are not deleted: all, or those that have consumed `topic`."""
        self._context.check_call("Marshal", "groups", waits=True)
        with Observer(self.transport, self.coordination_topic) as observer:
            return group_names(observer, topic)

    def delete_group(self, name: str, *, force: bool = False, reason: str = "") -> bool:
        """Deletes a group and its positions, with `force` its live consumers too. Returns and raises as
        `Group.delete`."""
        return self._group(name, "delete_group").delete(force=force, reason=reason)

    def _group(self, name: str, verb: str) -> Group:
        self._context.check_call("Marshal", verb, waits=True)
        check_id("group", name)
        return Group(self.transport, name, self.coordination_topic, key=self._key)


connect: Final = Marshal.connect
"""Connects to a cluster: `Marshal.connect`, which has the parameters."""
