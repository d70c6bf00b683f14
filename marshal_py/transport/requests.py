"""A client for questions, and how they are asked: again while nobody answers, with librdkafka's last words if it fails.

A question goes to one broker. That one may be dying, may not lead a partition any more, or may not have heard of a new
topic; so it is asked anew after a few seconds, of whoever is there by then. Changes are not made here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # re-exported, but not by name

from marshal_py.errors import AccessDenied, ClusterError, ClusterUnreachable
from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport import settings
from marshal_py.transport.connecting import metadata
from marshal_py.transport.connection_errors import ConnectionErrors, principal_of
from marshal_py.transport.ports import Bounds

T = TypeVar("T")

RETRY_PAUSE_S: Final = 0.05  # metadata spreads within tens of ms
LIST_TIMEOUT_S_MIN: Final = 1.0  # the last attempt still gets this long
BROKER_TIMEOUT_S: Final = 3.0  # A broker answers in milliseconds; then another one is asked, or who leads by now.
_UNANSWERED: Final = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})
# The broker that is asked does not lead the partition, yet or any more.
_MOVING: Final = _UNANSWERED | {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
# A broker has not heard of the topic: it is new, or it is not there at all. So are partitions that nobody leads.
_UNKNOWN: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError._NOENT}
)
_KINDS: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}


class Requester(AdminClient):
    """A client for questions alone. It hears what librdkafka says of its connections only while it is polled."""

    errors: ConnectionErrors

    def listen(self) -> ConnectionErrors:
        """What librdkafka has said since the last look."""
        self.poll(0)
        return self.errors

    def reason(self, error: KafkaException | TimeoutError) -> str:
        """Why a question failed, with librdkafka's last words."""
        return self.listen().reason(text_of(error))


def make_requester(given: settings.Settings, client_id: str) -> Requester:
    errors = ConnectionErrors(given)
    client = settings.create_client(Requester, {**settings.admin(given, client_id), "error_cb": errors.on_error})
    client.errors = errors
    return client


def _refresh_leaders(client: Requester, topics: Iterable[str], timeout_s: float) -> None:
    """librdkafka asks by the leader epoch that it knows, and does not ask anew when a broker says that it is old."""
    with contextlib.suppress(KafkaException):  # what is wrong, the question itself will say
        for topic in sorted(topics):
            metadata(client, topic, timeout_s)


def as_cluster_error(
    client: Requester, given: settings.Settings, error: KafkaException | TimeoutError, what: str, right: tuple[str, str]
) -> ClusterError:
    """Kafka's refusal as one of ours. `right`: the operation and what it is done with, if it was a matter of rights."""
    kind = _KINDS.get(code_of(error))
    if kind is not None:
        return AccessDenied(principal_of(given), right[0], kind, right[1])
    return ClusterUnreachable(str(given["bootstrap.servers"]), what, client.reason(error))


def list_offsets(
    client: Requester,
    tps: Sequence[TopicPartition],
    spec: Any,
    timeout_s: float,
    given: settings.Settings,
    *,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    exists: bool = False,
) -> dict[TopicPartition, int]:
    """One offset of each partition, -1 where there is none, in one request for all.

    `exists`: the partitions are there, so that a broker which has not heard of them will. Raises ClusterUnreachable,
    AccessDenied.
    """
    deadline, passing = time.monotonic() + timeout_s, _MOVING | (_UNKNOWN if exists else frozenset())
    wanted = {KafkaPartition(*tp): spec for tp in tps}
    client.listen().forget()
    while True:
        left_s = max(LIST_TIMEOUT_S_MIN, deadline - time.monotonic())
        patience_s = min(left_s, BROKER_TIMEOUT_S)
        try:
            futures = client.list_offsets(wanted, isolation_level=isolation, request_timeout=left_s)
            return {
                TopicPartition(tp.topic, tp.partition): future.result(patience_s).offset
                for tp, future in futures.items()
            }
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
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    exists: bool = False,
) -> dict[TopicPartition, Bounds]:
    """First and end offsets of partitions. As `list_offsets`, twice."""
    deadline = time.monotonic() + timeout_s
    earliest, latest = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]
    first = list_offsets(client, tps, earliest, timeout_s, given, isolation=isolation, exists=exists)
    left_s = deadline - time.monotonic()
    end = list_offsets(client, tps, latest, left_s, given, isolation=isolation, exists=exists)
    return {tp: Bounds(first[tp], end[tp]) for tp in tps}


def ask_any_broker(client: Requester, ask: Callable[[], Future[T]], timeout_s: float) -> T:
    """The answer of any broker. Raises KafkaException, TimeoutError.

    librdkafka (2.16) sends such questions to the broker that metadata call the controller, and asks for metadata anew
    only after half a minute. (A KRaft cluster calls any of its live brokers so.)
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return ask().result(max(0.0, min(left_s, BROKER_TIMEOUT_S)))
        except (KafkaException, TimeoutError) as error:
            passing = isinstance(error, TimeoutError) or code_of(error) in _UNANSWERED
            if not passing or left_s <= BROKER_TIMEOUT_S:
                raise
            with contextlib.suppress(KafkaException):  # what is wrong, the question itself will say
                metadata(client, None, BROKER_TIMEOUT_S)


def text_of(error: KafkaException | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    cause = error.args[0] if error.args else error
    return cause.str() if isinstance(cause, KafkaError) else str(cause)


def code_of(error: KafkaException | TimeoutError) -> int:
    cause = error.args[0] if error.args else None
    return cause.code() if isinstance(cause, KafkaError) else KafkaError.UNKNOWN
