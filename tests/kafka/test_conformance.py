"""The promises of the ports over Apache Kafka, which must keep all of them; tests/transport tests the other transports.

The tests at the end show how clients react to events that only a real cluster can cause.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported, but not by name
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from marshal_py import Consumer, TopicPartition, connect
from marshal_py.errors import HistoryTruncated, LogGap, MarshalError, MembersAlive, TopicRecreated
from marshal_py.transport import settings
from marshal_py.transport.kafka import GATHER_BYTES, KafkaTransport
from tests.support import conformance
from tests.support.conformance import DEADLINE_S, KafkaRig, Rig, until
from tests.support.kafka import Cluster, start_cluster


class ApacheRig(KafkaRig):
    """A cluster of tests/support/kafka.py, whose topics are created, changed and deleted by the admin protocol."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

    def topic(self, partitions: int = 1) -> str:
        name = f"c-{uuid.uuid4().hex[:12]}"
        self.create(name, partitions, {"retention.ms": "-1"})
        return name

    def create(self, name: str, partitions: int, config: dict[str, str], replicas: int = -1) -> None:
        new = NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=config)
        self.admin.create_topics([new])[name].result(DEADLINE_S)
        until(lambda: self._usable(name, partitions), f"{name} has leaders")

    def _usable(self, name: str, partitions: int) -> bool:
        found = self.admin.list_topics(timeout=DEADLINE_S).topics.get(name)
        return found is not None and [p.leader > 0 for p in found.partitions.values()] == [True] * partitions

    def truncate(self, topic: str, partition: int, before: int) -> None:
        for future in self.admin.delete_records([KafkaPartition(topic, partition, before)]).values():
            future.result(DEADLINE_S)

    def recreate(self, topic: str, partitions: int) -> None:
        self.admin.delete_topics([topic])[topic].result(DEADLINE_S)
        until(lambda: topic not in self.admin.list_topics(timeout=DEADLINE_S).topics, f"{topic} is gone")
        self.create(topic, partitions, {})

    def grow(self, topic: str, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(DEADLINE_S)
        # The rig's producer must know the new partitions, too, or it refuses to write there.
        listed = self._producer.list_topics
        until(lambda: len(listed(topic, DEADLINE_S).topics[topic].partitions) == partitions, "the producer knows them")

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        entries = [ConfigEntry(k, v, incremental_operation=AlterConfigOpType.SET) for k, v in settings.items()]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(DEADLINE_S)
        until(lambda: self._described(topic).items() >= settings.items(), f"the settings of {topic}")

    def _described(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        found = self.admin.describe_configs([resource])[resource].result(DEADLINE_S)
        return {name: str(entry.value) for name, entry in found.items()}


@pytest.fixture
def rig(kafka: Cluster) -> Iterator[Rig]:
    rig = ApacheRig(kafka.bootstrap)
    yield rig
    rig.close()


class TestLog(conformance.LogPromises):
    pass


class TestSource(conformance.SourcePromises):
    pass


class TestAdmin(conformance.AdminPromises):
    pass


class TestTruncate(conformance.TruncatePromises):
    pass


class TestGrow(conformance.GrowPromises):
    pass


class TestDescribe(conformance.DescribePromises):
    pass


class TestCreate(conformance.CreatePromises):
    pass


class TestLongLog(conformance.LongLogPromises):
    pass


class TestLookup(conformance.LookupPromises):
    pass


class TestCannotCreate(conformance.CannotCreatePromises):
    def test_a_client_without_the_right(self) -> None:
        """All clients may do whatever no ACL mentions; one ACL forbids them to create topics."""
        authorizer = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        }
        with start_cluster(1, authorizer) as cluster:
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
            rules = [
                AclBinding(kind, name, ResourcePatternType.LITERAL, "User:*", "*", operation, permission)
                for kind, name, operation, permission in (
                    (ResourceType.BROKER, "kafka-cluster", AclOperation.ALL, AclPermissionType.ALLOW),
                    (ResourceType.BROKER, "kafka-cluster", AclOperation.CREATE, AclPermissionType.DENY),
                    (ResourceType.TOPIC, "__marshal", AclOperation.CREATE, AclPermissionType.DENY),
                    (ResourceType.TOPIC, "__marshal", AclOperation.DESCRIBE, AclPermissionType.ALLOW),
                )
            ]
            for future in admin.create_acls(rules).values():
                future.result(DEADLINE_S)
            self.refuses_with_the_command_that_fixes_it(KafkaTransport(cluster.bootstrap, DEADLINE_S), "__marshal")


# --- clients, under events that only a real cluster can cause


def coordination(rig: ApacheRig) -> str:
    """Creates a coordination topic for this test alone."""
    name = f"coordination-{uuid.uuid4().hex[:12]}"
    rig.create(name, 1, {"retention.ms": "-1"})
    return name


def ends_with(consumer: Consumer, kind: type[MarshalError]) -> str:
    with pytest.raises(kind) as raised:
        until(lambda: consumer.fetch(1, expires_s=0.05), "an error")
    return str(raised.value)


@pytest.fixture
def apache(kafka: Cluster) -> ApacheRig:
    return ApacheRig(kafka.bootstrap)


def test_a_transaction_in_the_coordination_log_is_a_gap(apache: ApacheRig) -> None:
    """L8: the transaction's marker takes an offset that no reader sees."""
    log, topic = coordination(apache), apache.topic(1)
    with connect(apache.bootstrap, coordination_topic=log) as marshal:
        consumer = marshal.consumer("g", [topic], heartbeat_interval_s=1.0)
        producer = Producer({"bootstrap.servers": apache.bootstrap, "transactional.id": log})
        producer.init_transactions(DEADLINE_S)
        producer.begin_transaction()
        producer.produce(log, b"x", partition=0)
        producer.commit_transaction(DEADLINE_S)
        ends_with(consumer, LogGap)


def test_a_coordination_topic_that_was_recreated(apache: ApacheRig) -> None:
    log, topic = coordination(apache), apache.topic(1)
    with connect(apache.bootstrap, coordination_topic=log) as marshal:
        consumer = marshal.consumer("g", [topic], heartbeat_interval_s=1.0)
        apache.recreate(log, 1)
        marshal._loop._metadata_due = 0.0
        ends_with(consumer, TopicRecreated)


def test_truncated_history_is_refused(apache: ApacheRig) -> None:
    log, topic = coordination(apache), apache.topic(1)
    with connect(apache.bootstrap, coordination_topic=log) as marshal:
        marshal.consumer("g", [topic], heartbeat_interval_s=1.0).stop()
    apache.truncate(log, 0, 2)
    with pytest.raises(HistoryTruncated):
        connect(apache.bootstrap, coordination_topic=log)


def test_a_log_is_gathered_by_a_client_whose_fetches_wait(apache: ApacheRig, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Mapping[str, Any]] = []
    create = settings.create_client

    def spy(kind: Callable[[dict[str, Any]], object], given: Mapping[str, Any]) -> object:
        created.append(given)
        return create(kind, given)

    topic, transport = apache.topic(1), apache.transport()
    apache.produce(topic, 0, conformance.numbered(0, 10))
    monkeypatch.setattr(settings, "create_client", spy)
    log = transport.log(topic, "reader")
    log.follow(0, 0)
    assert len(conformance.read_log(log, 10)) == 10
    log.gather(True)
    until(lambda: not log.poll(0.01) and created[-1].get("fetch.min.bytes") == GATHER_BYTES, "it waits for bytes")
    log.gather(False)
    until(lambda: not log.poll(0.01) and "fetch.min.bytes" not in created[-1], "it does not")
    apache.produce(topic, 0, conformance.numbered(10, 20))
    assert [record.offset for record in conformance.read_log(log, 10)] == list(range(10, 20))
    log.gather(True)
    log.poll(0.0)
    log.close(0.0)  # the next client may still connect


def test_live_ordinary_consumers_keep_their_group(apache: ApacheRig) -> None:
    log, topic = coordination(apache), apache.topic(1)
    group = f"g-{uuid.uuid4().hex}"
    leave = apache.join_kafka_group(group, topic)
    with connect(apache.bootstrap, coordination_topic=log) as marshal:
        with pytest.raises(MembersAlive):
            marshal.consumer(group, [topic])
        refused = marshal._context.admin.commit(group, {TopicPartition(topic, 0): 0})
        assert "ordinary Kafka consumers" in refused
        leave()
        until(lambda: marshal._context.admin.live_kafka_members(group) == 0, "the group is empty")
        marshal.consumer(group, [topic]).stop()


def test_a_lost_range_a_new_partition_and_the_mirror(apache: ApacheRig) -> None:
    log, topic = coordination(apache), apache.topic(1)
    group = f"g-{uuid.uuid4().hex}"
    apache.produce(topic, 0, conformance.numbered(0, 10))
    apache.truncate(topic, 0, 4)
    tp = TopicPartition(topic, 0)
    with connect(apache.bootstrap, coordination_topic=log) as marshal:
        marshal._context.admin.commit(group, {tp: 1})
        with marshal.consumer(group, [topic], heartbeat_interval_s=1.0) as consumer:
            batch = consumer.fetch(6, min_messages=6, expires_s=DEADLINE_S)
            assert [m.offset for m in batch] == list(range(4, 10))
            batch.ack()
            assert [(e.offset, e.to) for e in consumer.events() if e.kind == "offset_lost"] == [(1, 4)]
            apache.grow(topic, 2)
            apache.produce(topic, 1, [b"early"])
            marshal._loop._metadata_due = 0.0
            late = consumer.fetch(1, expires_s=DEADLINE_S)
            assert [(m.partition, m.offset, m.value) for m in late] == [(1, 0, b"early")]
            late.ack()
        tps = [tp, TopicPartition(topic, 1)]
        until(lambda: marshal._context.admin.committed(group, tps) == {tps[0]: 10, tps[1]: 1}, "the mirror")
