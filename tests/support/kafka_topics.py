"""Creates topics and the first consumer group on a real Kafka, and waits until they can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic  # confluent_kafka.admin has it too, but its types do not export it

from tests.support.brokers import wait_until

ADMIN_TIMEOUT_S = 60.0  # Creating a topic takes 0.1 s; with 1,000 partitions or a broker being lost, some seconds.
FIRST_GROUP_TIMEOUT_S = 60.0  # The first group on a cluster waits 2 to 4 s for its coordinator's topic.


def create_topic(admin: AdminClient, name: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
    """Creates a topic with the broker's replication. Returns when all partitions have leaders and in-sync replicas."""
    new = NewTopic(name, num_partitions=partitions, config=dict(config or {}))
    admin.create_topics([new], request_timeout=ADMIN_TIMEOUT_S)[name].result(ADMIN_TIMEOUT_S)

    def usable() -> bool:
        try:
            found = admin.list_topics(name, timeout=ADMIN_TIMEOUT_S).topics[name].partitions.values()
        except KafkaException:
            return False
        whole = [p for p in found if p.leader >= 0 and p.error is None and len(p.isrs) == len(p.replicas)]
        return len(whole) == partitions

    wait_until(usable, ADMIN_TIMEOUT_S, f"topic {name} has {partitions} partitions with leaders")


def join_first_group(bootstrap: str, topic: str, **settings: Any) -> None:
    """Joins and leaves a consumer group; for the first group of a cluster, the brokers create the offsets topic."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "enable.auto.commit": False, **settings})
    try:
        consumer.subscribe([topic])

        def assigned() -> bool:
            consumer.poll(0.1)
            return bool(consumer.assignment())

        wait_until(assigned, FIRST_GROUP_TIMEOUT_S, "the first consumer group gets its partition")
    finally:
        consumer.close()
