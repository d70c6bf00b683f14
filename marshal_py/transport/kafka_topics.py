"""Creates, changes and deletes topics of a Kafka cluster. Each request is one call; a refusal is an error.

Kafka's controller answers before the brokers know what it has decided. So what makes partitions returns when the
brokers show them: a consumer that joins next finds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic, ResourceType  # type: ignore[attr-defined]

from marshal_py.errors import AccessDenied, AlreadyExists, TopicMissing, TopicRefused
from marshal_py.transport import settings
from marshal_py.transport.ports import TopicInfo
from marshal_py.transport.requests import Requester, as_cluster_error, code_of, text_of, wait_until_shown

BROKER_DEFAULT: Final = -1  # of the replication factor: what the cluster is configured for (KIP-464)
SHOWN_ANSWERS: Final = 12  # in a row: each comes from any broker, and the last one may be tens of ms behind
_REFUSED: Final = frozenset(
    {
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_REPLICA_ASSIGNMENT,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_REQUEST,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_DELETION_DISABLED,
        KafkaError.TOPIC_EXCEPTION,
    }
)


class KafkaTopics:
    """Implements TopicAdmin over an AdminClient."""

    def __init__(
        self, client: Requester, given: settings.Settings, timeout_s: float, describe: Callable[[str], TopicInfo | None]
    ) -> None:
        """`describe`: returns what a broker knows of a topic now, None if it knows of none."""
        self._client, self._given, self._timeout_s, self._describe = client, given, timeout_s, describe

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        old_id = ""
        with contextlib.suppress(AccessDenied):  # who may create a topic need not be allowed to describe it
            deleted = self._describe(name)  # a moment ago: if it is still there, Kafka refuses to create it
            old_id = "" if deleted is None else deleted.topic_id
        request = NewTopic(
            name, partitions, BROKER_DEFAULT if replication is None else replication, config=dict(config)
        )
        self._carry_out(
            name,
            "Create",
            lambda: self._client.create_topics([request], operation_timeout=self._timeout_s, validate_only=dry_run)[
                name
            ],
        )
        if not dry_run:
            self._wait_until_shown(name, partitions, old_id)

    def grow(self, name: str, partitions: int, dry_run: bool) -> None:
        request = NewPartitions(name, partitions)
        self._carry_out(
            name,
            "Alter",
            lambda: self._client.create_partitions([request], operation_timeout=self._timeout_s, validate_only=dry_run)[
                name
            ],
        )
        if not dry_run:
            self._wait_until_shown(name, partitions)

    def _wait_until_shown(self, name: str, partitions: int, old_id: str = "") -> None:
        """Waits until the brokers show so many partitions of a topic without the id `old_id`; not for one that this
        client may not see."""

        def shown() -> bool | None:
            for _ in range(SHOWN_ANSWERS):
                found = self._describe(name)
                if found is None or found.partitions < partitions or (old_id and found.topic_id == old_id):
                    return None
            return True

        with contextlib.suppress(AccessDenied):
            wait_until_shown(str(self._given["bootstrap.servers"]), name, shown)

    def alter(self, name: str, config: Mapping[str, str | None], dry_run: bool) -> None:
        entries = [
            ConfigEntry(
                key,
                value if value is not None else "",
                incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
            )
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        self._carry_out(
            name,
            "AlterConfigs",
            lambda: self._client.incremental_alter_configs([resource], validate_only=dry_run)[resource],
        )

    def delete(self, name: str) -> None:
        self._carry_out(
            name, "Delete", lambda: self._client.delete_topics([name], operation_timeout=self._timeout_s)[name]
        )

    def _carry_out(self, name: str, operation: str, ask: Callable[[], Future[Any]]) -> None:
        self._client.listen().forget()
        try:
            ask().result(self._timeout_s)
        except (KafkaException, TimeoutError) as error:
            code = code_of(error)
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                raise AlreadyExists("topic", name) from error
            if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise TopicMissing(name) from error
            if code in _REFUSED:
                raise TopicRefused(name, text_of(error)) from error
            what = f"{operation} of topic {name}"
            raise as_cluster_error(self._client, self._given, error, what, (operation, name)) from error
