"""Creates, changes and deletes topics, and deletes what is in one. Checks each request before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from marshal_py.errors import BadRequest, InvalidOption, TopicMissing, TopicRefused
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import PARTITION_MAX
from marshal_py.topics.request import Time, check_number, time_ms
from marshal_py.transport.ports import Bounds, ClusterAdmin, Transport

INTERNAL: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
NOT_YOURS: Final = "a topic of yours: this one belongs to the library or to Kafka"
REPLICATION_MAX: Final = 32_767  # Kafka's own


def check_name(name: str, coordination_topic: str) -> None:
    """Raises InvalidOption for a topic of the library or of Kafka, which users may neither change nor purge."""
    if name == coordination_topic or name in INTERNAL:
        raise InvalidOption("topic", name, NOT_YOURS)


def create(
    admin: ClusterAdmin,
    name: str,
    partitions: int,
    replication: int | None,
    settings: Mapping[str, str],
    dry_run: bool = False,
) -> None:
    """Creates a topic; with `dry_run` Kafka only checks. `replication` None: the cluster's default. Raises BadRequest,
    AlreadyExists, TopicRefused, AccessDenied, UnsupportedPlatform."""
    _check_count("partitions", partitions, PARTITION_MAX)
    if replication is not None:
        _check_count("replication", replication, REPLICATION_MAX)
    _check_settings(settings)
    admin.topic_admin().create(name, partitions, replication, settings, dry_run)


def update(
    admin: ClusterAdmin, name: str, partitions: int | None, settings: Mapping[str, str | None], dry_run: bool = False
) -> None:
    """Adds partitions (up to `partitions`) and changes settings (None: the cluster's default). Settings come first:
    Kafka checks all at once, and a topic that has grown never shrinks; but before, Kafka says whether it may grow, so
    that a refusal changes nothing. Raises as `create`, TopicMissing, BadRequest for fewer partitions."""
    if partitions is None and not settings:
        raise BadRequest("name what should change: partitions, settings, or both")
    _check_settings(settings)
    found = admin.describe_topic(name)
    if found is None:
        raise TopicMissing(name)
    if partitions is not None:
        _check_count("partitions", partitions, PARTITION_MAX)
        if partitions < found.partitions:
            raise BadRequest(
                f"partitions={partitions}: topic {name!r} has {found.partitions}, and Kafka's topics never shrink"
            )
    topics = admin.topic_admin()
    more = partitions if partitions is not None and partitions > found.partitions else None
    if more is not None and (settings or dry_run):
        topics.grow(name, more, True)
    if settings:
        topics.alter(name, settings, dry_run)
    if more is not None and not dry_run:
        topics.grow(name, more, False)


def delete(admin: ClusterAdmin, name: str) -> None:
    """Deletes a topic and everything in it. Raises TopicMissing, TopicRefused, AccessDenied, UnsupportedPlatform."""
    if admin.describe_topic(name) is None:
        raise TopicMissing(name)
    admin.topic_admin().delete(name)


def _check_count(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise BadRequest(f"{name}={value!r}: a whole number, 1 to {most}")


def _check_settings(settings: Mapping[str, str | None]) -> None:
    for key, value in settings.items():
        if not isinstance(key, str) or not key or not (value is None or isinstance(value, str)):
            raise BadRequest(
                f"setting {key!r}={value!r}: names and values are texts, as in {{'retention.ms': '60000'}}"
            )


# --- What is in a topic: the beginnings of its partitions, and keys of a compacted one, by tombstones
#
# A tombstone is a message that has the key and no value.


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
