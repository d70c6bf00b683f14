"""Requests to a cluster with dying brokers, or with brokers that do not know a new topic yet, are repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from marshal_py.errors import AccessDenied, ClusterUnreachable, CoordinationError
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import kafka, kafka_admin, settings
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_admin import SharedRequester, ask_any_broker, list_bounds
from tests.support.broker_faults import set_leader
from tests.support.client_fixtures import DEADLINE_S, until

LOG = "__marshal"


@pytest.fixture
def brokers() -> Iterator[Broker]:
    with Broker(brokers=3, topics={LOG: 1}) as broker:
        set_leader(broker, LOG, 0, 1)
        yield broker


def failed(code: int) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_exception(KafkaException(KafkaError(code)))
    return answer


def done(value: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


class Client(kafka_admin.Requester):
    """Gives the answers that a test has planned."""

    def __init__(self, *answers: Future[Any]) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
        self.errors = kafka_admin.ConnectionErrors({})
        self.answers = list(answers)
        self.looked = 0

    def ask(self) -> Future[Any]:
        return self.answers.pop(0)

    def list_offsets(self, wanted: Any, **_: Any) -> Any:
        return dict.fromkeys(wanted, self.answers.pop(0))

    def list_topics(self, *_: Any, **__: Any) -> Any:
        self.looked += 1


class Offset:
    offset = 7


def test_a_broker_that_does_not_answer_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata are refreshed before the next attempt: they decide which broker is asked."""
    monkeypatch.setattr(kafka_admin, "BROKER_TIMEOUT_S", 0.01)
    client = Client(Future(), failed(KafkaError._TRANSPORT), done(5))
    assert ask_any_broker(client, client.ask, DEADLINE_S) == 5
    assert client.looked == 2


def test_a_refusal_is_an_answer() -> None:
    client = Client(failed(KafkaError.UNKNOWN_TOPIC_OR_PART))
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        ask_any_broker(client, client.ask, DEADLINE_S)


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._NOENT], ids=["unknown", "no leader"])
def test_a_broker_that_does_not_know_the_new_coordination_topic_is_asked_again(code: int) -> None:
    tp = TopicPartition(LOG, 0)
    answers = [failed(code), failed(code), done(Offset), failed(code), done(Offset), done(Offset)]  # two per attempt
    client = Client(*answers)
    assert list_bounds(client, [tp], DEADLINE_S, {}, exists=True) == ({tp: (7, 7)}, [])
    assert client.looked == 2
    with pytest.raises(ClusterUnreachable):  # a data topic may have been deleted
        list_bounds(Client(failed(code), failed(code)), [tp], DEADLINE_S, {"bootstrap.servers": "x"})


def test_a_partition_that_an_answer_leaves_out_is_asked_for_again() -> None:
    """librdkafka gives it the offset -1001 and no error, for example while 1,000 partitions get their leaders."""

    class Invalid:
        offset = -1001

    tp = TopicPartition(LOG, 0)
    client = Client(done(Invalid), done(Offset), done(Offset), done(Offset))  # two per attempt
    assert list_bounds(client, [tp], DEADLINE_S, {}) == ({tp: (7, 7)}, [])
    assert client.looked == 1


def test_a_leader_lost_during_a_request_is_looked_up_again(brokers: Broker) -> None:
    log = KafkaTransport({"bootstrap.servers": brokers.bootstrap_servers, "log_level": 0}, DEADLINE_S).log(LOG, "c")
    assert log.bounds(0, DEADLINE_S).end == 0
    asked, found = threading.Event(), list[Any]()
    client = log._requester.client()
    ask = client.list_offsets

    def spy(*given: Any, **more: Any) -> Any:
        asked.set()
        return ask(*given, **more)

    client.list_offsets = spy  # type: ignore[method-assign]
    brokers.broker_down(1)
    waiting = threading.Thread(target=lambda: found.append(log.bounds(0, DEADLINE_S)))
    waiting.start()
    assert asked.wait(DEADLINE_S)
    set_leader(brokers, LOG, 0, 2)
    until(lambda: found, "the new leader answers")
    waiting.join()
    log.close(0.0)


def test_a_client_that_is_replaced_still_answers_others(brokers: Broker) -> None:
    """Otherwise its end would fail every request that waits for it."""
    shared = SharedRequester({"bootstrap.servers": brokers.bootstrap_servers}, "c")
    before = shared.client()
    shared.replace(before, DEADLINE_S)
    shared.replace(before, DEADLINE_S)
    assert shared.client() is not before
    assert [old for _, old in shared._replaced] == [before]
    assert shared.client().listen().last_words == ""


def test_all_parts_of_a_connection_share_one_client(brokers: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client has a thread per broker. The last part that closes frees it."""
    made: list[str] = []
    create = settings.create_client

    def count(kind: Callable[[dict[str, Any]], Any], configuration: Mapping[str, Any]) -> Any:
        made.append(getattr(kind, "__name__", ""))
        return create(kind, configuration)

    transport = KafkaTransport(brokers.bootstrap_servers, DEADLINE_S)
    monkeypatch.setattr(settings, "create_client", count)
    log, admin, other = transport.log(LOG, "c"), transport.admin(), transport.admin()
    assert log.bounds(0, DEADLINE_S).end == 0
    assert admin.partition_count(LOG) == other.partition_count(LOG)
    assert sorted(made) == ["Consumer", "Producer", "Requester"]
    client = transport._requester.client()
    admin.close()
    admin.close()
    log.close(0.0)
    assert transport._requester.client() is client, "one of them still uses it"
    other.close()
    assert transport._requester._client is None
    assert log.append(0, b"k", b"v") is False, "a closed log makes no new client"


def test_pieces_of_a_log_are_read_by_one_client(brokers: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """To connect costs more than to read some hundred records. A client that nobody needs for a while is closed."""
    log = KafkaTransport(brokers.bootstrap_servers, DEADLINE_S).log(LOG, "c")
    for number in range(30):
        assert log.append(0, b"k", b"%d" % number)
    until(lambda: (log.poll(0.0), log.bounds(0, DEADLINE_S).end == 30)[1], "all are written")
    made: list[Any] = []
    create = settings.create_client

    def count(kind: Callable[[dict[str, Any]], Any], configuration: Mapping[str, Any]) -> Any:
        made.append(create(kind, configuration))
        return made[-1]

    def read(start: int) -> Iterator[tuple[int, bytes | None]]:
        for piece in log.read(0, start, start + 5, DEADLINE_S):
            yield from ((one.offset, one.value) for one in piece)

    monkeypatch.setattr(settings, "create_client", count)
    for at in (20, 0, 10):
        assert list(read(at))[:5] == [(at + each, b"%d" % (at + each)) for each in range(5)]
    assert len(made) == 1
    left = read(5)
    assert next(left) == (5, b"5")
    assert next(read(7)) == (7, b"7"), "at the same time"
    assert [next(left), len(made)] == [(6, b"6"), 2]
    list(left)
    assert len(log._idle) == 1, "that which read to its end; the other one was closed"
    monkeypatch.setattr(kafka, "IDLE_S", 0.0)
    until(lambda: (log.poll(0.0), not log._idle)[1], "it is closed")
    log.close(0.0)


def test_an_error_of_the_log_before_is_none_of_this_one(brokers: Broker) -> None:
    """librdkafka gives a refused position out after the assignment has changed, too."""
    log = KafkaTransport(brokers.bootstrap_servers, DEADLINE_S).log(LOG, "c", writes=False)

    def refused(partition: int, code: int = KafkaError._AUTO_OFFSET_RESET) -> Any:
        return SimpleNamespace(error=lambda: KafkaError(code), partition=lambda: partition)

    assert log._record(refused(1), 0, 5) is None
    with pytest.raises(CoordinationError):
        log._record(refused(0), 0, 5)
    with pytest.raises(AccessDenied, match="Read"):
        log._record(refused(0, KafkaError.TOPIC_AUTHORIZATION_FAILED), 0, 5)
    log.close(0.0)


def test_a_coordinator_that_has_just_been_elected_is_asked_again() -> None:
    """In a new cluster a group has no coordinator at first."""
    codes = [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS]

    def ask(client: object, timeout_s: float) -> Future[Any]:
        return failed(codes.pop(0)) if codes else done("described")

    with Broker() as broker:
        admin = KafkaTransport(broker.bootstrap_servers, 10.0).admin()
        try:
            assert admin._ask_coordinator(ask) == "described"
            codes.append(KafkaError.GROUP_AUTHORIZATION_FAILED)
            with pytest.raises(KafkaException):
                admin._ask_coordinator(ask)
        finally:
            admin.close()
