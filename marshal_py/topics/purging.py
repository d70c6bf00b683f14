"""A topic, and deletes what is in it: the beginning of its partitions by offset, by time, or up to the newest messages;
keys of a compacted topic by tombstones, which are messages that have the key and no value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from marshal_py.errors import BadRequest, TopicMissing, TopicRefused
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.request import Time, check_number, time_ms
from marshal_py.transport.ports import Bounds, ClusterAdmin, Transport


class TopicInfo(Struct, frozen=True):
    """A topic. `topic_id`: Kafka's, "" where the cluster has none. `partitions`: first and end offset of each
    partition, by its number. `settings`: the topic's configuration; empty where the cluster does not describe it."""

    name: str
    topic_id: str
    partitions: dict[int, Bounds]
    settings: dict[str, str]

    @property
    def offsets(self) -> int:
        """Returns how many offsets all partitions span. There are fewer messages where the log has holes."""
        return sum(end - first for first, end in self.partitions.values())


class Purged(NamedTuple):
    """What a purge did to a partition: first offset `before` and `after`; `end` after its last message."""

    before: int
    after: int
    end: int


class PurgeTarget(NamedTuple):
    """Where partitions begin after a purge, as in `Topic.purge`: exactly one of the first three is not None."""

    before_offset: int | Mapping[int, int] | None
    before_time: Time | None
    keep: int | None
    partition: int | None

    def check(self) -> None:
        """Raises BadRequest if the fields contradict each other, or one is out of bounds or of a wrong type."""
        given = [name for name, value in zip(self._fields[:3], self[:3], strict=True) if value is not None]
        if len(given) != 1:
            named = ", ".join(given) or "none of them"
            raise BadRequest(f"{named}: name one of before_offset=..., before_time=... and keep=...")
        for name in ("partition", "keep"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0)
        if isinstance(self.before_offset, Mapping):
            if self.partition is not None:
                raise BadRequest("before_offset names partitions already: leave partition out")
            for partition, offset in self.before_offset.items():
                check_number("before_offset's partition", partition, 0)
                check_number("before_offset", offset, 0)
        elif self.before_offset is not None:
            check_number("before_offset", self.before_offset, 0)
            if self.partition is None:
                raise BadRequest(
                    "before_offset is a number: name its partition too, or give a map of partition: offset"
                )
        if self.before_time is not None:
            time_ms("before_time", self.before_time)


def info_of(admin: ClusterAdmin, name: str) -> TopicInfo:
    """Returns the description of a topic. Raises TopicMissing."""
    found = admin.describe_topic(name)
    if found is None:
        raise TopicMissing(name)
    bounds = admin.bounds([TopicPartition(name, number) for number in range(found.partitions)])
    partitions = {tp.partition: each for tp, each in sorted(bounds.items())}
    return TopicInfo(name, found.topic_id, partitions, admin.settings(name))


def purge(admin: ClusterAdmin, name: str, target: PurgeTarget, dry_run: bool) -> dict[int, Purged]:
    """Deletes what the target names, all checked before; with `dry_run` nothing. Returns that by partition. Raises as
    `Topic.purge`."""
    target.check()
    known = info_of(admin, name).partitions
    starts = _starts(admin, name, target, known)
    for number, start in starts.items():
        if number not in known:
            raise BadRequest(f"partition={number}: topic {name!r} has partitions 0 to {len(known) - 1}")
        if start > known[number].end:
            raise BadRequest(f"before_offset={start}: {name}:{number} ends at {known[number].end}")
    found = {}
    for number, start in sorted(starts.items()):
        before, end = known[number]
        if start > before and not dry_run:
            refused = admin.delete_records(TopicPartition(name, number), start)
            if refused:
                raise TopicRefused(
                    name,
                    f"it deletes no records of {name}:{number} ({refused}); the topic's cleanup.policy must contain "
                    "delete, and the client needs the right to delete",
                )
        found[number] = Purged(before, max(before, start), end)
    return found


def _starts(admin: ClusterAdmin, name: str, target: PurgeTarget, known: Mapping[int, Bounds]) -> dict[int, int]:
    """Returns by partition number the offset at which each partition of the target should begin."""
    if isinstance(target.before_offset, Mapping):
        return dict(target.before_offset)
    numbers = [*known] if target.partition is None else [target.partition]
    if target.before_offset is not None:
        return dict.fromkeys(numbers, target.before_offset)
    ends = {number: known[number].end for number in numbers if number in known}
    if target.keep is not None:
        return {number: max(0, ends.get(number, 0) - target.keep) for number in numbers}
    tps = [TopicPartition(name, number) for number in ends]
    found = admin.offsets_at(tps, time_ms("before_time", target.before_time))
    return {number: found.get(TopicPartition(name, number), ends.get(number, 0)) for number in numbers}


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
