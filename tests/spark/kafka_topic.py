"""A topic on the real broker for one test, with a group and a coordination topic of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition as KafkaPartition

import marshal_py
from marshal_py import Consumer, Marshal
from marshal_py.client.planner import Planner
from marshal_py.log.observer import Observer
from marshal_py.transport.kafka import KafkaTransport
from tests.support.kafka import Cluster, TopicFactory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INTERVAL_S = 1.0  # the shortest that is allowed: every take-over waits two of them


class KafkaTopic:
    """One data topic, one group, one coordination topic, all with fresh names.

    `written`: (partition, offset) of every message that was produced and not aborted.
    """

    def __init__(self, cluster: Cluster, topic: TopicFactory, partitions: int) -> None:
        self.bootstrap = cluster.bootstrap
        self.partitions = partitions
        self.topic = topic(partitions)
        mark = uuid.uuid4().hex[:8]
        self.group, self.log = f"group-{mark}", f"marshal-{mark}"
        self.written: set[tuple[int, int]] = set()

    def fill(
        self,
        count: int,
        partitions: Iterable[int] | None = None,
        *,
        value: str = "{p}-{n}",
        headers: Sequence[tuple[str, bytes | None]] = (),
        transaction: str = "",
    ) -> None:
        """Produces `count` messages into each partition. `transaction`: "commit" or "abort" for one that ends so."""
        extra = {"transactional.id": f"{self.topic}-{uuid.uuid4().hex[:6]}"} if transaction else {}
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 20, **extra})
        if transaction:
            producer.init_transactions(30)
            producer.begin_transaction()

        def written(error: object, message: Any) -> None:
            assert error is None, error
            if transaction != "abort":
                self.written.add((message.partition(), message.offset()))

        for number in range(count):
            for partition in range(self.partitions) if partitions is None else partitions:
                text = value.format(p=partition, n=number)
                producer.produce(self.topic, text, str(number), partition, headers=list(headers), on_delivery=written)
        assert producer.flush(30) == 0
        if transaction == "abort":
            producer.abort_transaction(30)
        elif transaction:
            producer.commit_transaction(30)

    def truncate(self, partition: int, before: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for future in admin.delete_records([KafkaPartition(self.topic, partition, before)]).values():
            future.result(30)

    @property
    def options(self) -> dict[str, str]:
        """Options of the streaming source for this topic and group."""
        return {
            "group": self.group,
            "topics": self.topic,
            "bootstrap.servers": self.bootstrap,
            "coordination_topic": self.log,
            "coordination_partitions": "2",
            "start": "earliest",
            "heartbeat_interval_s": str(INTERVAL_S),
        }

    def observe(self) -> Observer:
        return Observer(KafkaTransport(self.bootstrap, 30.0), self.log)

    def positions(self) -> dict[int, int]:
        """The group's position by partition, from the coordination log."""
        with self.observe() as observer:
            observer.fold(self.group)
            (group,) = [found for _, found in observer.groups() if found.name == self.group]
            return {tp.partition: part.position for tp, part in sorted(group.partitions.items())}

    def accepted(self, kind: type[Any]) -> list[Any]:
        """Accepted records of this type, in the order of the log."""
        with self.observe() as observer:
            return [
                judged.verdict.record
                for judged in observer.read(self.group)
                if judged.verdict.accepted and isinstance(judged.verdict.record, kind)
            ]

    def connect(self, client_id: str | None = None) -> Marshal:
        return marshal_py.connect(
            self.bootstrap, client_id=client_id, coordination_topic=self.log, coordination_partitions=2
        )

    def consumer(self, marshal: Marshal, **options: Any) -> Consumer:
        return marshal.consumer(
            self.group, [self.topic], **{"heartbeat_interval_s": INTERVAL_S, "start": "earliest", **options}
        )

    def planner(self, marshal: Marshal, **options: Any) -> Planner:
        return marshal.planner(
            self.group, [self.topic], **{"heartbeat_interval_s": INTERVAL_S, "start": "earliest", **options}
        )


def offsets_of(df: DataFrame) -> list[tuple[int, int]]:
    """(partition, offset) of each row, sorted."""
    return sorted((row.partition, row.offset) for row in df.select("partition", "offset").collect())


MakeTopic = Callable[[int], KafkaTopic]  # the fixture `make_topic`: partitions to topic
