"""Sends read-only requests to a cluster and repeats them while no broker answers.

librdkafka sends a request to one broker. That broker may be dying, may no longer lead the partition, or may not know a
new topic yet, so the request is repeated after a few seconds with fresh metadata. If it fails for good, the error
carries librdkafka's last message. Nothing here changes the cluster.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # re-exported, but not by name

from marshal_py.errors import AccessDenied, ClusterError, ClusterUnreachable
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.connecting import metadata
from marshal_py.transport.connection_errors import ConnectionErrors, principal_of
from marshal_py.transport.ports import Bounds

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
        return AccessDenied(principal_of(given), right[0], kind, right[1])
    return ClusterUnreachable(str(given["bootstrap.servers"]), what, client.reason(error))


def list_offsets(
    client: Requester,
    tps: Sequence[TopicPartition],
    specs: Sequence[Any],
    timeout_s: float,
    given: settings.Settings,
    *,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    exists: bool = False,
) -> list[dict[TopicPartition, int]]:
    """Returns for each OffsetSpec and partition its offset, or -1, by one request per spec, all at once. `exists`: a
    broker that does not know the partitions yet is asked again."""
    deadline, passing = time.monotonic() + timeout_s, _MOVING | (_UNKNOWN if exists else frozenset())
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
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    exists: bool = False,
) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
    """Returns first and end offset of each partition, and for each time the first offset at or after it, if any."""
    specs = [OffsetSpec.earliest(), OffsetSpec.latest()]  # type: ignore[no-untyped-call]
    specs += [OffsetSpec.for_timestamp(at_ms) for at_ms in times_ms]
    first, end, *found = list_offsets(client, tps, specs, timeout_s, given, isolation=isolation, exists=exists)
    # The answers come in any order: records that were deleted between them must not make a negative range.
    bounds = {tp: Bounds(first[tp], max(first[tp], end[tp])) for tp in tps}
    return bounds, [{tp: offset for tp, offset in each.items() if offset >= 0} for each in found]


def told_offsets(
    client: Requester, tps: Sequence[TopicPartition], timeout_s: float, first: bool
) -> dict[TopicPartition, int]:
    """Returns ends, or `first` offsets, as ClusterAdmin.told_offsets says."""
    if not tps:
        return {}
    deadline, found = time.monotonic() + timeout_s, dict[TopicPartition, int]()
    spec = OffsetSpec.earliest() if first else OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = client.list_offsets({KafkaPartition(*tp): spec for tp in tps}, request_timeout=timeout_s)
    for tp, future in asked.items():
        with contextlib.suppress(KafkaException, TimeoutError):
            offset = future.result(max(0.0, deadline - time.monotonic())).offset
            if offset >= 0:
                found[TopicPartition(tp.topic, tp.partition)] = offset
    if len(found) < len(tps):  # so that the next call asks the leaders that there are then
        missing = {tp.topic for tp in tps if tp not in found}
        _refresh_leaders(client, missing, max(0.0, deadline - time.monotonic()))
    return found


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
