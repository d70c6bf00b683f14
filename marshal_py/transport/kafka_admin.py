"""Asks a Kafka cluster about topics, offsets and groups, and makes the few changes that consumers need.

librdkafka sends a request to one broker. That broker may be dying, may no longer lead the partition, or may not know a
new topic yet, so what changes nothing is repeated after a few seconds with fresh metadata. Everything here may wait for
the network, so it is called from a worker thread. Kafka's errors become errors of ours, which say what to do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import confluent_kafka
from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    Uuid,
)
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported, but not by name
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConsumerGroupDescription,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from marshal_py.errors import (
    AccessDenied,
    AlreadyExists,
    ClusterError,
    ClusterUnreachable,
    CoordinationTopicMissing,
    TopicMissing,
    TopicRefused,
    UnsupportedPlatform,
    WrongTopicSetting,
)
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.transport import embedded, settings
from marshal_py.transport.connecting import ConnectionErrors, metadata, told_right
from marshal_py.transport.ports import ALL_CAPABILITIES, Bounds, BrokerInfo, ClusterInfo, Replicas, TopicInfo
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS, SAFE_BROKERS, initial_settings, wrong_settings

T = TypeVar("T")

CREATED_TIMEOUT_S: Final = 15.0
RETRY_PAUSE_S: Final = 0.05  # metadata spreads within tens of ms
LIST_TIMEOUT_S_MIN: Final = 1.0  # the last attempt still gets this long
REQUEST_TIMEOUT_S_MAX: Final = 3600.0  # the most that librdkafka takes
BROKER_TIMEOUT_S: Final = 3.0  # a healthy broker answers in milliseconds; then the next attempt asks another one
_UNANSWERED: Final = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})
# These mean that the broker does not lead the partition, not yet or no longer.
_MOVING: Final = _UNANSWERED | {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
# These mean that the broker does not know the topic, which is new or missing, or that the partition has no leader.
_UNKNOWN: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError._NOENT}
)
_KINDS: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}


def wait_until_shown(servers: str, topic: str, question: Callable[[], T | None]) -> T:
    """Asks until the answer is not None: brokers may learn later of what another one made. Raises ClusterUnreachable
    after CREATED_TIMEOUT_S."""
    deadline = time.monotonic() + CREATED_TIMEOUT_S
    while True:
        failed = ClusterUnreachable(servers, f"{topic} to appear", "it was created and is not shown")
        try:
            answer = question()
        except ClusterUnreachable as error:
            answer, failed = None, error
        if answer is not None:
            return answer
        if time.monotonic() >= deadline:
            raise failed
        time.sleep(RETRY_PAUSE_S)


class Requester(AdminClient):
    """An admin client for requests, with its connections' errors, which librdkafka reports only while it is polled."""

    errors: ConnectionErrors

    def listen(self) -> ConnectionErrors:
        """Polls the client, and returns the errors of its connections."""
        self.poll(0)
        return self.errors

    def reason(self, error: KafkaException | TimeoutError) -> str:
        """Returns why a request failed, with librdkafka's last message."""
        return self.listen().reason(text_of(error))


def make_requester(given: settings.Settings, client_id: str) -> Requester:
    errors = ConnectionErrors(given)
    client = settings.create_client(Requester, {**settings.admin(given, client_id), "error_cb": errors.on_error})
    client.errors = errors
    return client


class SharedRequester:
    """The client of all parts of one connection: each has a thread per broker. Made when needed, freed with its last
    user; any thread may call."""

    def __init__(self, given: settings.Settings, client_id: str) -> None:
        self._given, self._client_id = given, client_id
        self._lock = threading.Lock()
        self._client: Requester | None = None
        self._users = 0
        self._replaced: list[tuple[float, Requester]] = []

    def client(self) -> Requester:
        """Returns the client as it is now. A caller keeps it for one request only, because it may be replaced."""
        with self._lock:
            if self._client is None:
                self._client = make_requester(self._given, self._client_id)
            return self._client

    def join(self) -> None:
        """Notes one more user, who calls `leave` at its end."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Notes that a user has ended. The last one frees the client; a later request makes a new one."""
        with self._lock:
            self._users -= 1
            freed = self._client, self._replaced
            if self._users <= 0:
                self._client, self._replaced = None, []
        del freed  # without the lock, because that ends the client's threads

    def replace(self, client: Requester, kept_s: float) -> None:
        """Replaces the client, unless another thread has, and keeps the old one for `kept_s`: others may wait for its
        answers."""
        with self._lock:
            if self._client is client:
                now_s = time.monotonic()
                recent = [(at_s, old) for at_s, old in self._replaced if now_s - at_s < kept_s]
                self._replaced = [*recent, (now_s, client)]
                self._client = make_requester(self._given, self._client_id)


def _refresh_leaders(client: Requester, topics: Iterable[str], timeout_s: float) -> None:
    """Requests these topics' metadata: librdkafka does not look again when a broker calls its leader epoch old."""
    with contextlib.suppress(KafkaException):  # the request itself will show what is wrong
        for topic in sorted(topics):
            metadata(client, topic, timeout_s)


def as_cluster_error(
    client: Requester, given: settings.Settings, error: KafkaException | TimeoutError, what: str, right: tuple[str, str]
) -> ClusterError:
    """Returns AccessDenied or ClusterUnreachable for a failed request. `what`: in words; `right`: (ACL operation,
    resource)."""
    kind = _KINDS.get(code_of(error))
    if kind is not None:
        return AccessDenied(settings.principal_of(given), right[0], kind, right[1])
    return ClusterUnreachable(str(given["bootstrap.servers"]), what, client.reason(error))


def list_offsets(
    client: Requester,
    tps: Sequence[TopicPartition],
    specs: Sequence[Any],
    timeout_s: float,
    given: settings.Settings,
    *,
    committed: bool = False,
    exists: bool = False,
) -> list[dict[TopicPartition, int]]:
    """Returns for each OffsetSpec and partition its offset, or -1, by one request per spec, all at once. `exists`: a
    broker that does not know the partitions yet is asked again."""
    deadline, passing = time.monotonic() + timeout_s, _MOVING | (_UNKNOWN if exists else frozenset())
    isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    client.listen().forget()
    while True:
        left_s = max(LIST_TIMEOUT_S_MIN, deadline - time.monotonic())
        patience_s = min(left_s, BROKER_TIMEOUT_S)
        try:
            asked = [
                client.list_offsets(
                    {KafkaPartition(*tp): spec for tp in tps},
                    isolation_level=isolation,
                    request_timeout=min(left_s, REQUEST_TIMEOUT_S_MAX),
                )
                for spec in specs
            ]
            found = [
                {
                    TopicPartition(tp.topic, tp.partition): future.result(patience_s).offset
                    for tp, future in futures.items()
                }
                for futures in asked
            ]
            if any(offset < NONE for each in found for offset in each.values()):
                raise TimeoutError  # librdkafka's OFFSET_INVALID, without an error: a broker left this partition out
            return found
        except (KafkaException, TimeoutError) as error:
            if (isinstance(error, TimeoutError) or code_of(error) in passing) and time.monotonic() < deadline:
                time.sleep(RETRY_PAUSE_S)
                _refresh_leaders(client, {tp.topic for tp in tps}, max(0.0, deadline - time.monotonic()))
                continue
            names = ", ".join(map(str, tps[:3]))
            raise as_cluster_error(client, given, error, f"the ends of {names}", ("Describe", tps[0].topic)) from error


def list_bounds(
    client: Requester,
    tps: Sequence[TopicPartition],
    timeout_s: float,
    given: settings.Settings,
    *,
    times_ms: Sequence[int] = (),
    committed: bool = False,
    exists: bool = False,
) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
    """Returns first and end offset of each partition, and for each time the first offset at or after it, if any."""
    specs = [OffsetSpec.earliest(), OffsetSpec.latest()]  # type: ignore[no-untyped-call]
    specs += [OffsetSpec.for_timestamp(at_ms) for at_ms in times_ms]
    first, end, *found = list_offsets(client, tps, specs, timeout_s, given, committed=committed, exists=exists)
    # The answers come in any order: records that were deleted between them must not make a negative range.
    bounds = {tp: Bounds(first[tp], max(first[tp], end[tp])) for tp in tps}
    return bounds, [{tp: offset for tp, offset in each.items() if offset >= 0} for each in found]


def ask_any_broker(client: Requester, ask: Callable[[], Future[T]], timeout_s: float) -> T:
    """Returns the result of a request for any broker. librdkafka (2.16) asks the controller of the metadata and
    refreshes these after half a minute, so this does. Raises KafkaException, TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return ask().result(max(0.0, min(left_s, BROKER_TIMEOUT_S)))
        except (KafkaException, TimeoutError) as error:
            passing = isinstance(error, TimeoutError) or code_of(error) in _UNANSWERED
            if not passing or left_s <= BROKER_TIMEOUT_S:
                raise
            with contextlib.suppress(KafkaException):  # the request itself will show what is wrong
                metadata(client, None, BROKER_TIMEOUT_S)


def text_of(error: KafkaException | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    cause = error.args[0] if error.args else error
    return cause.str() if isinstance(cause, KafkaError) else str(cause)


def code_of(error: KafkaException | TimeoutError) -> int:
    cause = error.args[0] if error.args else None
    return cause.code() if isinstance(cause, KafkaError) else KafkaError.UNKNOWN


# --- Creates, changes and deletes topics of a Kafka cluster. Each request is one call; a refusal is an error
#
# Kafka's controller answers before the brokers know what it has decided. So what makes partitions returns when the
# brokers show them: a consumer that joins next finds them.


BROKER_DEFAULT: Final = -1  # of the replication factor: what the cluster is configured for (KIP-464)
SHOWN_ANSWERS: Final = 12  # in a row: each comes from any broker, and the last one may be tens of ms behind
_REFUSED: Final = frozenset({
    KafkaError.INVALID_PARTITIONS, KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.INVALID_REPLICA_ASSIGNMENT,
    KafkaError.INVALID_CONFIG, KafkaError.INVALID_REQUEST, KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_DELETION_DISABLED, KafkaError.TOPIC_EXCEPTION,
})  # fmt: skip


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


# These mean that the group's coordinator has just been elected or soon will be: in a new cluster, or while it moves.
_COORDINATOR_MOVES: Final = frozenset(
    {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS}
)
COORDINATOR_PAUSE_S: Final = 0.25  # between two such requests
COORDINATOR_TIMEOUT_S: Final = 2.0  # a coordinator answers in milliseconds; after this a new client asks once more
NO_TOPIC_ID: Final = str(Uuid(0, 0))  # the answer of brokers that are too old for topic ids
_DENIED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_CONFIG,
    }
)


class KafkaAdmin:
    """Implements ClusterAdmin over an AdminClient."""

    def __init__(
        self, given: settings.Settings, requester: SharedRequester, is_embedded: bool, timeout_s: float
    ) -> None:
        self._given, self._requester, self._timeout_s = given, requester, timeout_s
        self._embedded = is_embedded
        self.capabilities: frozenset[str] = embedded.CAPABILITIES if is_embedded else ALL_CAPABILITIES
        self._closed = False
        requester.join()
        self._servers = str(given["bootstrap.servers"])

    @property
    def _client(self) -> Requester:
        return self._requester.client()

    def _ask(self, what: str, question: Callable[[], T], right: tuple[str, str] = ("Describe", "")) -> T:
        self._client.listen().forget()
        try:
            return question()
        except (KafkaException, TimeoutError) as error:
            raise as_cluster_error(self._client, self._given, error, what, right) from error

    def _wait(self, what: str, ask: Callable[[], Future[T]], right: tuple[str, str]) -> T:
        return self._ask(what, lambda: ask_any_broker(self._client, ask, self._timeout_s), right)

    def _ask_coordinator(self, ask: Callable[[AdminClient, float], Future[T]]) -> T:
        """Returns a group coordinator's answer to `ask(client, request_timeout)`. Raises KafkaException, TimeoutError.
        A request that times out inside librdkafka (2.16) ends the process if a connection comes back, so none does:
        this method waits, and a late request ends with its client. The next attempt has a new one."""
        first_s = min(COORDINATOR_TIMEOUT_S, self._timeout_s)
        deadline = time.monotonic() + max(self._timeout_s, first_s + LIST_TIMEOUT_S_MIN)
        late: KafkaException | TimeoutError | None = None
        patience_s = first_s
        while late is None or time.monotonic() < deadline:
            client = self._client
            try:
                return ask(client, REQUEST_TIMEOUT_S_MAX).result(patience_s)
            except TimeoutError as error:
                late, patience_s = error, max(LIST_TIMEOUT_S_MIN, deadline - time.monotonic())
                self._requester.replace(client, self._timeout_s)  # at most once per COORDINATOR_TIMEOUT_S
            except KafkaException as error:
                if code_of(error) not in _COORDINATOR_MOVES:
                    raise
                late = error
                time.sleep(COORDINATOR_PAUSE_S)
        raise late

    # --- topics

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        found = self.partition_count(topic)
        if found is None:
            self._create(topic, partitions)
            found = wait_until_shown(self._servers, topic, lambda: self.partition_count(topic))
        if "describe_config" in self.capabilities:
            for error in self.wrong_settings(topic, partitions):
                raise error
        return found

    def _create_command(self, topic: str, replicas: int, partitions: int) -> str:
        config = " ".join(f"--config {key}={value}" for key, value in initial_settings(replicas).items())
        return (
            f"kafka-topics.sh --bootstrap-server {self._servers} --create --topic {topic} "
            f"--partitions {partitions} --replication-factor {replicas} {config}"
        )

    def _create(self, topic: str, partitions: int) -> None:
        if "create_topic" not in self.capabilities:
            raise CoordinationTopicMissing(
                topic,
                "the embedded broker creates topics only through its Broker object",
                f"broker.create_topic({topic!r}, {partitions})",
            )
        present = min(len(self._metadata(None).brokers), SAFE_BROKERS)
        # First as many as a cluster should have: a broker that is down for now is listed by nobody, and would leave the
        # topic with fewer replicas for ever. Kafka refuses if there are not so many brokers.
        for replicas in dict.fromkeys((SAFE_BROKERS, present)):
            request = NewTopic(
                topic, num_partitions=partitions, replication_factor=replicas, config=initial_settings(replicas)
            )
            try:
                created = self._client.create_topics([request], operation_timeout=self._timeout_s)[topic]
                created.result(CREATED_TIMEOUT_S)
                return
            except (KafkaException, TimeoutError) as error:
                if code_of(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                    return  # another client was faster
                if code_of(error) == KafkaError.INVALID_REPLICATION_FACTOR and replicas != present:
                    continue
                if code_of(error) in _DENIED:
                    command = self._create_command(topic, present, partitions)
                    raise CoordinationTopicMissing(topic, text_of(error), command) from error
                raise ClusterUnreachable(self._servers, f"creation of {topic}", self._client.reason(error)) from error

    def wrong_settings(self, topic: str, partitions: int = COORDINATION_PARTITIONS) -> list[WrongTopicSetting]:
        """Returns an error for every setting of the topic that could lose history (L1). The command adds missing
        `partitions` to a topic that is empty."""
        found = wait_until_shown(self._servers, topic, lambda: self.settings(topic))
        replicas = wait_until_shown(self._servers, topic, lambda: self._replicas(topic))
        brokers = len(self.brokers())
        if not [*wrong_settings(topic, found, brokers, replicas, self._servers)]:
            return []
        return [*wrong_settings(topic, found, brokers, replicas, self._servers, self.can_grow(topic, partitions))]

    def can_grow(self, topic: str, partitions: int) -> int:
        """Returns `partitions` if the topic has fewer and is empty, else 0, as if the cluster does not say: a Genesis
        fixes the count (L3)."""
        with contextlib.suppress(ClusterError):
            found = self.partition_count(topic) or partitions
            if found < partitions:
                ends = self.bounds([TopicPartition(topic, number) for number in range(found)]).values()
                return 0 if any(bounds.end for bounds in ends) else partitions
        return 0

    def _replicas(self, topic: str) -> int | None:
        """Returns the replica count of the partition that has the fewest; None if there is no such topic."""
        found = self._metadata(topic).topics.get(topic)
        return min((len(p.replicas) for p in found.partitions.values()), default=None) if found is not None else None

    def _metadata(self, topic: str | None) -> Any:
        # The embedded broker creates a topic when it is asked for it by name, so all topics are listed there.
        name = None if self._embedded else topic
        return self._ask("metadata", lambda: metadata(self._client, name, self._timeout_s))

    def describe_topic(self, topic: str) -> TopicInfo | None:
        if self._embedded:  # it cannot describe topics, and they have no ids
            listed = self._metadata(topic).topics.get(topic)
            return TopicInfo(len(listed.partitions)) if listed is not None and listed.partitions else None
        collection = TopicCollection([topic])
        self._client.listen().forget()
        try:
            found = ask_any_broker(
                self._client,
                lambda: self._client.describe_topics(collection, request_timeout=self._timeout_s)[topic],
                self._timeout_s,
            )
        except (KafkaException, TimeoutError) as error:
            if code_of(error) == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            # None would mean that there is no such topic, which is not known if the client has no right to ask.
            what = f"the description of {topic}"
            raise as_cluster_error(self._client, self._given, error, what, ("Describe", topic)) from error
        topic_id = str(found.topic_id)
        return TopicInfo(len(found.partitions), "" if topic_id == NO_TOPIC_ID else topic_id)

    def topics(self) -> frozenset[str]:
        return frozenset(self._metadata(None).topics)

    def partition_count(self, topic: str) -> int | None:
        found = self.describe_topic(topic)
        return None if found is None else found.partitions

    def topic_admin(self) -> KafkaTopics:
        if "create_topic" not in self.capabilities:
            raise UnsupportedPlatform(
                "changing topics", "the embedded broker", "call create_topic of its Broker object instead"
            )
        return KafkaTopics(self._client, self._given, self._timeout_s, self.describe_topic)

    def brokers(self) -> dict[int, str]:
        """Returns the address (host:port) of every live broker, by its id."""
        return {broker.id: f"{broker.host}:{broker.port}" for broker in self._metadata(None).brokers.values()}

    def describe_cluster(self) -> ClusterInfo:
        found = self._metadata(None)
        counts = {name: len(topic.partitions) for name, topic in found.topics.items()}
        own, racks = dict[str, str](), dict[int, str]()
        if not self._embedded:  # it answers neither question
            described = self._wait(
                "the cluster",
                lambda: self._client.describe_cluster(request_timeout=self._timeout_s),
                ("Describe", found.cluster_id),
            )
            racks = {node.id: node.rack or "" for node in described.nodes}
            with contextlib.suppress(AccessDenied):
                own = self._settings_of(ResourceType.BROKER, str(min(found.brokers)))
        brokers = tuple(BrokerInfo(number, at, racks.get(number, "")) for number, at in sorted(self.brokers().items()))
        versions = {
            "confluent-kafka": str(confluent_kafka.__version__),
            "librdkafka": str(confluent_kafka.libversion()[0]),
        }
        return ClusterInfo(found.cluster_id or "", brokers, counts, own, versions)

    def settings(self, topic: str) -> dict[str, str]:
        return self._settings_of(ResourceType.TOPIC, topic) if "describe_config" in self.capabilities else {}

    def _settings_of(self, kind: ResourceType, name: str) -> dict[str, str]:
        resource = ConfigResource(kind, name)
        entries = self._wait(
            f"the settings of {name}",
            lambda: self._client.describe_configs([resource])[resource],
            ("DescribeConfigs", name),
        )
        return {setting: str(entry.value) for setting, entry in entries.items()}

    # --- offsets

    def bounds(
        self, tps: Sequence[TopicPartition], *, committed: bool = False, timeout_s: float | None = None
    ) -> dict[TopicPartition, Bounds]:
        within_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        return list_bounds(self._client, tps, within_s, self._given, committed=committed)[0]

    def told_offsets(
        self, tps: Sequence[TopicPartition], timeout_s: float, *, first: bool = False
    ) -> dict[TopicPartition, int]:
        if not tps:
            return {}
        client, within_s = self._client, min(timeout_s, self._timeout_s)
        deadline, found = time.monotonic() + within_s, dict[TopicPartition, int]()
        spec = OffsetSpec.earliest() if first else OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = client.list_offsets({KafkaPartition(*tp): spec for tp in tps}, request_timeout=within_s)
        for tp, future in asked.items():
            with contextlib.suppress(KafkaException, TimeoutError):
                offset = future.result(max(0.0, deadline - time.monotonic())).offset
                if offset >= 0:
                    found[TopicPartition(tp.topic, tp.partition)] = offset
        if len(found) < len(tps):  # so that the next call asks the leaders that there are then
            missing = {tp.topic for tp in tps if tp not in found}
            _refresh_leaders(client, missing, max(0.0, deadline - time.monotonic()))
        return found

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        self._check_time_lookup()
        [found] = list_offsets(self._client, tps, [OffsetSpec.for_timestamp(time_ms)], self._timeout_s, self._given)
        return {tp: offset for tp, offset in found.items() if offset >= 0}

    def bounds_and_times(
        self, tps: Sequence[TopicPartition], times_ms: Sequence[int], *, committed: bool = False
    ) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
        if times_ms:
            self._check_time_lookup()
        return list_bounds(self._client, tps, self._timeout_s, self._given, times_ms=times_ms, committed=committed)

    def _check_time_lookup(self) -> None:
        if "time_lookup" not in self.capabilities:  # the embedded broker would answer that no record is that late
            raise UnsupportedPlatform("a position by time", "the embedded broker", "name an offset, or use Kafka")

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        # The admin client asks, because a Consumer without the right to find its coordinator retries until the timeout.
        what = f"committed offsets of {group}"
        wanted = ConsumerGroupTopicPartitions(group, [KafkaPartition(*tp) for tp in tps])

        def ask(client: AdminClient, timeout_s: float) -> Future[ConsumerGroupTopicPartitions]:
            return client.list_consumer_group_offsets([wanted], request_timeout=timeout_s)[group]

        found = self._ask(what, lambda: self._ask_coordinator(ask), ("Describe", group)).topic_partitions or []
        for answer in found:
            if answer.error is not None:  # not "no committed offset", which would make the consumer use its fallback
                right = ("Describe", answer.topic)
                raise as_cluster_error(self._client, self._given, KafkaException(answer.error), what, right)
        return {TopicPartition(p.topic, p.partition): p.offset for p in found if p.offset >= 0}

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        wanted = ConsumerGroupTopicPartitions(group, [KafkaPartition(*tp, at) for tp, at in positions.items()])

        def ask(client: AdminClient, timeout_s: float) -> Future[ConsumerGroupTopicPartitions]:
            return client.alter_consumer_group_offsets([wanted], request_timeout=timeout_s)[group]

        try:
            answers = self._ask_coordinator(ask).topic_partitions or []
            refused = next((answer.error for answer in answers if answer.error is not None), None)
            if refused is None:
                return ""
            raise KafkaException(refused)
        except (KafkaException, TimeoutError) as error:
            if code_of(error) == KafkaError.GROUP_AUTHORIZATION_FAILED:
                return told_right(self._given, text_of(error), ("Read", "group", group))
            if code_of(error) == KafkaError.UNKNOWN_MEMBER_ID:
                return f"{text_of(error)}: ordinary Kafka consumers use this group id, and read the same messages"
            return text_of(error)

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        if "truncate" not in self.capabilities:
            return "the embedded broker deletes records only through its Broker object"
        at = KafkaPartition(*tp, before)
        try:
            self._client.delete_records([at], request_timeout=self._timeout_s)[at].result(self._timeout_s)
        except (KafkaException, TimeoutError) as error:
            if code_of(error) == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return told_right(self._given, text_of(error), ("Delete", "topic", tp.topic))
            if code_of(error) in _DENIED:
                return text_of(error)
            reason = self._client.reason(error)
            raise ClusterUnreachable(self._servers, f"the deletion of records of {tp}", reason) from error
        return ""

    def live_kafka_members(self, group: str) -> int:
        try:
            return len(self._group(group).members)
        except (KafkaException, TimeoutError) as error:
            if code_of(error) in (
                KafkaError.GROUP_ID_NOT_FOUND,
                KafkaError._UNSUPPORTED_FEATURE,
                KafkaError.GROUP_AUTHORIZATION_FAILED,
            ):
                return 0  # no such group, or the cluster does not say: no member is known
            reason = self._client.reason(error)
            raise ClusterUnreachable(self._servers, f"the members of group {group}", reason) from error

    def _group(self, group: str, *, rights: bool = False) -> ConsumerGroupDescription:
        """Returns the coordinator's description of a group, with our `rights` on it if asked. Raises KafkaException,
        TimeoutError."""

        def ask(client: AdminClient, timeout_s: float) -> Future[ConsumerGroupDescription]:
            return client.describe_consumer_groups(
                [group], request_timeout=timeout_s, include_authorized_operations=rights
            )[group]

        return self._ask_coordinator(ask)

    def allowed(self, kind: str, name: str) -> frozenset[str]:
        """Returns what this client may do on a topic or group (`kind`), named as in ACLs; everything without an
        authorizer. Raises ClusterUnreachable, TopicMissing."""
        what = f"the rights on {kind} {name}"
        try:
            if kind == "topic":
                found = self._wait(
                    what,
                    lambda: self._client.describe_topics(
                        TopicCollection([name]), request_timeout=self._timeout_s, include_authorized_operations=True
                    )[name],
                    ("Describe", name),
                ).authorized_operations
            else:
                group = self._ask(what, lambda: self._group(name, rights=True), ("Describe", name))
                found = group.authorized_operations
        except AccessDenied:
            return frozenset()
        except ClusterUnreachable:
            if kind == "topic" and self.partition_count(name) is None:
                raise TopicMissing(name) from None
            raise
        return frozenset("".join(word.capitalize() for word in one.name.split("_")) for one in found or ())

    def replicas(self, topic: str) -> dict[int, Replicas]:
        found = self._metadata(topic).topics.get(topic)
        partitions = {} if found is None else found.partitions
        return {p.id: Replicas(p.leader, tuple(p.replicas), tuple(p.isrs)) for p in partitions.values()}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._requester.leave()
