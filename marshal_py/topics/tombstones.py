"""Deletes keys of a compacted topic by tombstones: messages that have the key and no value."""

from __future__ import annotations

from collections.abc import Iterable

from marshal_py.errors import BadRequest
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import ClusterAdmin, Transport

POLICY = "cleanup.policy"


def check_compacted(admin: ClusterAdmin, topic: str) -> None:
    """Raises BadRequest if Kafka keeps a key's older messages. Clusters that do not describe topics are not asked."""
    policy = admin.settings(topic).get(POLICY, "compact")
    if "compact" not in policy:
        raise BadRequest(
            f"topic {topic!r} has cleanup.policy={policy}, so Kafka would keep the messages that a tombstone deletes: "
            "set it to compact, or delete the beginning of partitions by purge"
        )


def write_tombstones(
    transport: Transport, topic: str, key: bytes, partitions: Iterable[int], timeout_s: float
) -> dict[int, int]:
    """Writes a tombstone to each partition; returns their offsets. Raises as MessageWriter.write and flush."""
    found: dict[int, int] = {}

    def on_written(tp: TopicPartition, offset: int) -> None:
        found[tp.partition] = offset

    writer = transport.writer(on_written)
    try:
        for number in partitions:
            writer.write(topic, None, key, partition=number)
        writer.flush(timeout_s)
    finally:
        writer.close()
    return found
