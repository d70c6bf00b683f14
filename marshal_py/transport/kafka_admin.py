"""Questions to a Kafka cluster and the few changes that consumers need: the coordination topic, offsets, groups.

Everything here may wait for the network and is called from a worker thread. Kafka's errors become ours, with the way
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported, but not by name
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from marshal_py.errors import ClusterUnreachable, CoordinationTopicMissing, UnsupportedPlatform, WrongTopicSetting
from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport import embedded, settings
from marshal_py.transport.ports import CAPABILITIES, Bounds
from marshal_py.transport.soundness import FOREVER, SAFE_BROKERS, SAFE_ISR, wrong_settings

T = TypeVar("T")

CREATED_TIMEOUT_S: Final = 15.0
CREATED_POLL_S: Final = 0.05  # metadata spreads within tens of ms
LIST_TIMEOUT_S_MIN: Final = 1.0  # the last attempt still gets this long
_MOVING: Final = frozenset({
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE,
})  # fmt: skip
_DENIED: Final = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.POLICY_VIOLATION,
    KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.INVALID_CONFIG,
})  # fmt: skip


def cluster_id(given: settings.Settings, client_id: str, timeout_s: float) -> str | None:
    """The cluster's id, by its metadata. Raises ClusterUnreachable."""
    client = asker(given, client_id)
    try:
        answer: str | None = client.list_topics(timeout=timeout_s).cluster_id
        return answer
    except KafkaException as error:
        raise ClusterUnreachable(str(given["bootstrap.servers"]), "the cluster's metadata", _text(error)) from error


def asker(given: settings.Settings, client_id: str) -> AdminClient:
    """A client for questions alone."""
    return settings.made(AdminClient, settings.admin(given, client_id))


def list_bounds(
    client: AdminClient, tps: Sequence[TopicPartition], timeout_s: float, servers: str,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[TopicPartition, Bounds]:  # fmt: skip
    """First and end offsets of partitions, in two requests for all. Raises ClusterUnreachable."""
    deadline = time.monotonic() + timeout_s
    found: list[dict[TopicPartition, int]] = []
    while len(found) < 2:
        spec = (OffsetSpec.earliest, OffsetSpec.latest)[len(found)]()  # type: ignore[no-untyped-call]
        wanted = {KafkaPartition(*tp): spec for tp in tps}
        left_s = max(LIST_TIMEOUT_S_MIN, deadline - time.monotonic())
        try:
            futures = client.list_offsets(wanted, isolation_level=isolation, request_timeout=left_s)
            found.append({TopicPartition(tp.topic, tp.partition): future.result(left_s).offset
                          for tp, future in futures.items()})  # fmt: skip
        except (KafkaException, TimeoutError) as error:
            # A topic that is new or changes its leader: the broker that is asked does not lead it, yet or any more.
            if _code(error) in _MOVING and time.monotonic() < deadline:
                time.sleep(CREATED_POLL_S)
                continue
            names = ", ".join(map(str, tps[:3]))
            raise ClusterUnreachable(servers, f"the ends of {names}", _text(error)) from error
    return {tp: Bounds(found[0][tp], found[1][tp]) for tp in tps}


def _text(error: KafkaException | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    cause = error.args[0] if error.args else error
    return cause.str() if isinstance(cause, KafkaError) else str(cause)


def _code(error: KafkaException | TimeoutError) -> int:
    cause = error.args[0] if error.args else None
    return cause.code() if isinstance(cause, KafkaError) else KafkaError.UNKNOWN


class KafkaAdmin:
    """ClusterAdmin over an AdminClient; a Consumer without assignment per group answers for committed offsets."""

    def __init__(self, given: settings.Settings, client_id: str, is_embedded: bool, timeout_s: float) -> None:
        self._given, self._client_id, self._timeout_s = given, client_id, timeout_s
        self._embedded = is_embedded
        self.capabilities = embedded.CAPABILITIES if is_embedded else CAPABILITIES
        self._client = asker(given, client_id)
        self._groups: dict[str, Consumer] = {}
        self._servers = str(given["bootstrap.servers"])

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        try:
            return question()
        except (KafkaException, TimeoutError) as error:
            raise ClusterUnreachable(self._servers, what, _text(error)) from error

    def _wait(self, what: str, future: Future[T]) -> T:
        return self._ask(what, lambda: future.result(self._timeout_s))

    # --- topics

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        found = self.partition_count(topic)
        if found is None:
            self._create(topic, partitions)
            found = self._shown(topic, lambda: self.partition_count(topic))
        if "describe_config" in self.capabilities:
            self._check(topic)
        return found

    def _shown(self, topic: str, question: Callable[[], T | None]) -> T:
        """The answer once there is one: a broker that is asked may learn of a new topic after the one that made it."""
        deadline = time.monotonic() + CREATED_TIMEOUT_S
        while True:
            failed = ClusterUnreachable(self._servers, f"{topic} to appear", "it was created and is not shown")
            try:
                answer = question()
            except ClusterUnreachable as error:
                answer, failed = None, error
            if answer is not None:
                return answer
            if time.monotonic() >= deadline:
                raise failed
            time.sleep(CREATED_POLL_S)

    def _command(self, topic: str, replicas: int) -> str:
        extra = f" --config min.insync.replicas={SAFE_ISR}" if replicas >= SAFE_BROKERS else ""
        return (
            f"kafka-topics.sh --bootstrap-server {self._servers} --create --topic {topic} --partitions 16 "
            f"--replication-factor {replicas} --config cleanup.policy=delete --config retention.ms=-1 "
            f"--config retention.bytes=-1{extra} --config unclean.leader.election.enable=false"
        )

    def _create(self, topic: str, partitions: int) -> None:
        brokers = len(self._metadata(None).brokers)
        replicas = min(brokers, SAFE_BROKERS)
        if "create_topic" not in self.capabilities:
            raise CoordinationTopicMissing(topic, "the embedded broker creates topics only through its Broker object",
                                           f"broker.create_topic({topic!r}, {partitions})")  # fmt: skip
        config = {**FOREVER, "unclean.leader.election.enable": "false"}
        if replicas >= SAFE_BROKERS:
            config["min.insync.replicas"] = str(SAFE_ISR)
        request = NewTopic(topic, num_partitions=partitions, replication_factor=replicas, config=config)
        try:
            self._client.create_topics([request], operation_timeout=self._timeout_s)[topic].result(CREATED_TIMEOUT_S)
        except (KafkaException, TimeoutError) as error:
            if _code(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                return  # another client was faster
            if _code(error) in _DENIED:
                raise CoordinationTopicMissing(topic, _text(error), self._command(topic, replicas)) from error
            raise ClusterUnreachable(self._servers, f"creation of {topic}", _text(error)) from error

    def _check(self, topic: str) -> None:
        for error in self.wrong_settings(topic):
            raise error

    def wrong_settings(self, topic: str) -> list[WrongTopicSetting]:
        """L1: every setting of the coordination topic that could lose history, by name."""
        found = self._shown(topic, lambda: self.settings(topic))
        replicas = self._shown(topic, lambda: self._replicas(topic))
        return list(wrong_settings(topic, found, len(self.brokers()), replicas, self._servers))

    def _replicas(self, topic: str) -> int | None:
        """Of the partition that has the fewest."""
        found = self._metadata(topic).topics.get(topic)
        return min((len(p.replicas) for p in found.partitions.values()), default=None) if found is not None else None

    def _metadata(self, topic: str | None) -> Any:
        # The embedded broker creates a topic that is asked for by name, so there all are listed.
        name = None if self._embedded else topic
        return self._ask("metadata", lambda: self._client.list_topics(name, timeout=self._timeout_s))

    def partition_count(self, topic: str) -> int | None:
        found = self._metadata(topic).topics.get(topic)
        if found is None or not found.partitions:
            return None
        return len(found.partitions)

    def create_topic(self, topic: str, partitions: int) -> None:
        """Creates a data topic, replicated like the coordination topic. Raises ClusterUnreachable with the refusal."""
        replicas = min(len(self.brokers()), SAFE_BROKERS)
        request = NewTopic(topic, num_partitions=partitions, replication_factor=replicas)
        try:
            self._client.create_topics([request], operation_timeout=self._timeout_s)[topic].result(CREATED_TIMEOUT_S)
        except (KafkaException, TimeoutError) as error:
            raise ClusterUnreachable(self._servers, f"creation of {topic}", _text(error)) from error

    def brokers(self) -> dict[int, str]:
        """Address of every live broker, by its id."""
        return {broker.id: f"{broker.host}:{broker.port}" for broker in self._metadata(None).brokers.values()}

    def topic_id(self, topic: str) -> str:
        if self._embedded:
            return ""
        future = self._client.describe_topics(TopicCollection([topic]), request_timeout=self._timeout_s)[topic]
        try:
            return str(future.result(self._timeout_s).topic_id)
        except (KafkaException, TimeoutError) as error:
            if _code(error) == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return "missing"
            raise ClusterUnreachable(self._servers, f"the id of {topic}", _text(error)) from error

    def settings(self, topic: str) -> dict[str, str]:
        if "describe_config" not in self.capabilities:
            return {}
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = self._wait(f"the settings of {topic}", self._client.describe_configs([resource])[resource])
        return {name: str(entry.value) for name, entry in entries.items()}

    # --- offsets

    def bounds(self, tps: Sequence[TopicPartition], *, committed: bool = False) -> dict[TopicPartition, Bounds]:
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        return list_bounds(self._client, tps, self._timeout_s, self._servers, isolation)

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        if "time_lookup" not in self.capabilities:  # the embedded broker would answer that there is no such record
            raise UnsupportedPlatform("a position by time", "the embedded broker", "name an offset, or use Kafka")
        spec = OffsetSpec.for_timestamp(time_ms)
        futures = self._client.list_offsets({KafkaPartition(*tp): spec for tp in tps}, request_timeout=self._timeout_s)
        found = {tp: self._wait(f"the offset of {tp.topic} at a time", future).offset for tp, future in futures.items()}
        return {TopicPartition(tp.topic, tp.partition): offset for tp, offset in found.items() if offset >= 0}

    def _group(self, group: str) -> Consumer:
        found = self._groups.get(group)
        if found is None:
            configuration = settings.data_reader(self._given, self._client_id, group, None)
            found = self._groups[group] = settings.made(Consumer, configuration)
        return found

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        consumer = self._group(group)
        wanted = [KafkaPartition(*tp) for tp in tps]
        found = self._ask(f"committed offsets of {group}", lambda: consumer.committed(wanted, self._timeout_s))
        for answer in found:
            if answer.error is not None:  # not the same as "none": the start would be the fallback then
                raise ClusterUnreachable(self._servers, f"committed offsets of {group}", answer.error.str())
        return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        offsets = [KafkaPartition(*tp, offset) for tp, offset in positions.items()]
        try:
            answers = self._group(group).commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            return _text(error)
        return next((answer.error.str() for answer in answers or [] if answer.error is not None), "")

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        if "truncate" not in self.capabilities:
            return "the embedded broker deletes records only through its Broker object"
        at = KafkaPartition(*tp, before)
        try:
            self._client.delete_records([at], request_timeout=self._timeout_s)[at].result(self._timeout_s)
        except (KafkaException, TimeoutError) as error:
            if _code(error) not in _DENIED and not isinstance(error, TimeoutError):
                raise ClusterUnreachable(self._servers, f"the deletion of records of {tp}", _text(error)) from error
            return _text(error)
        return ""

    def live_kafka_members(self, group: str) -> int:
        future = self._client.describe_consumer_groups([group], request_timeout=self._timeout_s)[group]
        try:
            return len(future.result(self._timeout_s).members)
        except (KafkaException, TimeoutError) as error:
            if _code(error) in (KafkaError.GROUP_ID_NOT_FOUND, KafkaError._UNSUPPORTED_FEATURE,
                                KafkaError.GROUP_AUTHORIZATION_FAILED):  # fmt: skip
                return 0  # no such group, or a cluster that cannot tell: nobody is known to be alive
            raise ClusterUnreachable(self._servers, f"the members of group {group}", _text(error)) from error

    def close(self) -> None:
        for consumer in self._groups.values():
            consumer.close()
        self._groups.clear()
