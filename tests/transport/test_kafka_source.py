"""How KafkaSource handles the errors that librdkafka returns among the messages; here the tests provide them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport import kafka_source, settings
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.kafka_source import KafkaSource
from marshal_py.transport.ports import OutOfRange

TP = TopicPartition("orders", 0)
JOIN_S = 40.0  # for the end of a thread that waits for nothing


class Refusal:
    """An error in the place of a message: by default, the broker refuses a position."""

    def __init__(self, position: int, code: int = KafkaError._AUTO_OFFSET_RESET) -> None:
        self._position, self._code = position, code

    def error(self) -> KafkaError:
        return KafkaError(self._code)

    def topic(self) -> str:
        return TP.topic

    def partition(self) -> int:
        return TP.partition

    def offset(self) -> int:
        return self._position


@pytest.fixture
def source() -> Iterator[KafkaSource]:
    with Broker(topics={"orders": 1}) as broker:
        source = KafkaTransport(broker.bootstrap_servers, 10.0).source("group", "reader", {})
        yield source
        source.close()


def report(source: KafkaSource, refusal: Refusal) -> None:
    """As if the client had reported it, once it knows what is assigned."""
    source.carry_out()
    assert source._take_errors(cast(Any, [refusal]), 0) == []


@pytest.mark.new_client
def test_a_refused_position_ends_the_fetching_of_its_assignment(source: KafkaSource) -> None:
    source.assign({TP: 100})
    report(source, Refusal(100))
    assert source.out_of_range() == [OutOfRange(TP, 100, source.round(TP))]
    assert not source.fetching(TP)


def test_a_refusal_of_an_earlier_assignment_is_not_reported(source: KafkaSource) -> None:
    """The client reported it before the partition was assigned again, and out_of_range() was not called in between."""
    source.assign({TP: 100})
    report(source, Refusal(100))
    source.unassign([TP])
    source.assign({TP: 0})
    assert source.out_of_range() == []
    assert source.fetching(TP)


def test_a_refusal_that_librdkafka_reports_too_late(source: KafkaSource) -> None:
    """The current assignment never reached the refused position, so its fetch is retried from where it was."""
    source.assign({TP: 100})
    source.carry_out()
    source.unassign([TP])
    source.assign({TP: 0})
    report(source, Refusal(100))
    assert source.out_of_range() == []
    assert source.fetching(TP)


@pytest.mark.parametrize(
    "code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID, KafkaError._UNKNOWN_TOPIC]
)
def test_a_topic_that_is_gone_is_waited_for(source: KafkaSource, code: int) -> None:
    source.assign({TP: 0})
    report(source, Refusal(0, code))
    assert source.broken() == []
    assert source.fetching(TP)


# --- what waiting costs


class WaitingClient:
    """Has no message, and waits as librdkafka does: in whole ms, cut off."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.now_s = 100.0

    def consume(self, count: int, timeout_s: float) -> list[Any]:
        return []

    def poll(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)
        self.now_s += int(timeout_s * 1000) / 1000 or 1e-6

    def close(self) -> None: ...


def waiting(source: KafkaSource, monkeypatch: pytest.MonkeyPatch) -> WaitingClient:
    source.assign({TP: 0})
    source.carry_out()
    source._ends_due = float("inf")
    source._ends_unknown.clear()
    client = WaitingClient()
    monkeypatch.setattr(source, "_consumer", client)
    monkeypatch.setattr(kafka_source, "time", SimpleNamespace(monotonic=lambda: client.now_s))
    return client


def test_the_rest_of_a_millisecond_is_not_polled_in_a_busy_loop(
    source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = waiting(source, monkeypatch)
    source._busy_at = client.now_s - 1.5
    assert source.poll(0.0995, 5) == []
    assert len(client.waits_s) == 1, "0.0995 s are 100 ms: of 99 ms a rest would be left"


def test_the_longer_nothing_comes_the_longer_a_poll_holds_the_client(
    source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = waiting(source, monkeypatch)
    source._busy_at = client.now_s
    assert source.poll(0.0395, 5) == []
    source._busy_at = client.now_s - 1.0
    assert source.poll(0.4995, 5) == []
    assert [round(wait_s, 2) for wait_s in client.waits_s] == [0.02, 0.02, 0.25, 0.25]


# --- what an event loop may ask


def asked(source: KafkaSource, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Notes what the client is asked, and answers that nothing is here."""
    calls: list[tuple[int, float]] = []

    class Client:
        def consume(self, count: int, timeout_s: float) -> list[Any]:
            calls.append((count, timeout_s))
            return []

        def close(self) -> None: ...

    source.carry_out()
    source._ends_due = float("inf")
    monkeypatch.setattr(source, "_consumer", Client())
    return calls


def test_only_what_is_here_is_asked_for(source: KafkaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    source.assign({TP: 0})
    calls = asked(source, monkeypatch)
    source._ends_unknown.clear()
    assert source.poll_now(5) == []
    assert calls == [(5, 0)]


def test_a_client_that_another_thread_uses_is_not_waited_for(
    source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.assign({TP: 0})
    calls = asked(source, monkeypatch)
    answers: list[object] = []
    for lock in (source._client_lock, source._next_caller):
        with lock:
            thread = threading.Thread(target=lambda: answers.append(source.poll_now(5)))
            thread.start()
            thread.join(JOIN_S)
            assert not thread.is_alive()
    assert answers == [None, None]
    assert calls == []


def test_an_assignment_is_left_to_the_thread_that_polls(source: KafkaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """To pass it on may wait for librdkafka's own thread."""
    calls = asked(source, monkeypatch)
    assert source.poll_now(5) is None, "nothing is assigned"
    source.assign({TP: 0})
    assert source.poll_now(5) is None
    assert calls == []


def test_a_callback_for_tokens_does_not_run_on_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka runs `oauth_cb` in the thread that polls, and it may ask a server for a token."""
    given = {
        "bootstrap.servers": "127.0.0.1:9",  # nobody answers there, and nothing is sent
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": lambda _: ("token", time.time() + 3_600),
    }
    source = KafkaSource(settings.data_reader(given, "reader", "group", None))
    source.assign({TP: 0})
    calls = asked(source, monkeypatch)
    assert source.poll_now(5) is None
    assert calls == []
