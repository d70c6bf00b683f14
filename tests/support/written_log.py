"""A coordination log in a MemoryBroker whose records a test writes itself, with the times that it wants."""

from __future__ import annotations

from marshal_py.log.observer import Observer
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, NONE, TopicPartition, route
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, ClaimingPartition, Genesis, Join, Record, Topology
from marshal_py.transport.memory import MemoryBroker, MemoryTransport

COORDINATION = "__marshal"
INCARNATION = bytes(16)


class WrittenLog:
    """`logs` coordination partitions. `now_ms`: the timestamp of the next record, in ms since 1970."""

    def __init__(self, now_ms: int, logs: int = 2) -> None:
        self.broker, self.now_ms, self.logs = MemoryBroker(), now_ms, logs
        self.transport = MemoryTransport(self.broker)
        self.broker.create_topic(COORDINATION, logs)
        self._instances = 0
        for log in range(logs):
            root = Genesis(INCARNATION, logs, HASH_NAME, 2)
            self.broker.produce(COORDINATION, log, codec.encode(root, "", INCARNATION), timestamp_ms=now_ms)

    def observer(self) -> Observer:
        return Observer(self.transport, COORDINATION)

    def write(self, record: Record, group: str) -> int:
        """Returns the record's offset."""
        log = route(group, self.logs)
        value = codec.encode(record, group, INCARNATION)
        self.broker.produce(COORDINATION, log, value, timestamp_ms=self.now_ms)
        return self.broker.bounds(TopicPartition(COORDINATION, log)).end - 1

    def join(self, group: str, client: str, topic: str, interval_ms: int = 1_000, witness: str = "") -> int:
        """Returns the session."""
        self._instances += 1
        instance = self._instances.to_bytes(16, "big")
        return self.write(Join(client, instance, AT_LEAST_ONCE, interval_ms, (topic,), witness=witness), group)

    def own(self, group: str, client: str, topic: str, partitions: int, witness: str = "") -> tuple[int, list[int]]:
        """A consumer that owns all of a topic, from 0 on. Returns its session, and the epochs of its claims."""
        if topic not in self.broker.topics:
            self.broker.create_topic(topic, partitions)
        session = self.join(group, client, topic, witness=witness)
        self.write(Topology(topic, partitions, NONE), group)
        return session, [
            self.write(ClaimingPartition(session, topic, number, NONE, 0), group) for number in range(partitions)
        ]

    def fill(self, topic: str, partition: int, messages: int) -> None:
        """Writes messages of now."""
        for _ in range(messages):
            self.broker.produce(topic, partition, b"", timestamp_ms=self.now_ms)
