"""Creates, changes and deletes topics. Checks each request before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from marshal_py.errors import BadRequest, InvalidOption, TopicMissing
from marshal_py.protocol.wire.records import PARTITION_MAX
from marshal_py.transport.ports import ClusterAdmin

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
    Kafka checks all at once, and a topic that has grown never shrinks. Raises as `create`, TopicMissing, BadRequest for
    fewer partitions."""
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
    grows = partitions is not None and partitions > found.partitions
    if settings:
        topics.alter(name, settings, dry_run)
    if grows:
        assert partitions is not None
        topics.grow(name, partitions, dry_run)


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
