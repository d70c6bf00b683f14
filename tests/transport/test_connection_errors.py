"""When a refusal counts as permanent: if it persists without a success. The last message is kept."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import KafkaError

from marshal_py.errors import AccessDenied, AuthenticationFailed, MarshalError, TlsMismatch
from marshal_py.transport.connecting import (
    CONNECTION,
    READ,
    REFUSED_NEW_S,
    REFUSED_S,
    STALE_S,
    WRITE,
    ConnectionErrors,
    call_directly,
    calls_while_polled,
    redirect_callbacks,
)
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import TransactionalWriter
from tests.support.client_fixtures import DEADLINE_S, until

DENIED = AccessDenied("User:a", "Write", "topic", "__marshal")
GIVEN = {"bootstrap.servers": "broker:9092", "sasl.username": "a", "security.protocol": "SASL_SSL"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def errors(clock: Clock) -> ConnectionErrors:
    return ConnectionErrors(GIVEN, clock)


def refuse_every_second(
    errors: ConnectionErrors, clock: Clock, kind: str, for_s: float, error: MarshalError = DENIED
) -> None:
    for _ in range(round(for_s) + 1):
        errors.refuse(kind, error)
        clock.now_s += 1.0
    clock.now_s -= 1.0


def test_one_refused_request_proves_nothing(errors: ConnectionErrors, clock: Clock) -> None:
    errors.succeed(WRITE)
    errors.refuse(WRITE, DENIED)
    clock.now_s += 3_600.0
    assert errors.refused() is None


def test_a_refusal_that_persists_counts(errors: ConnectionErrors, clock: Clock) -> None:
    errors.succeed(WRITE)
    refuse_every_second(errors, clock, WRITE, REFUSED_S - 1)
    assert errors.refused() is None
    errors.refuse(WRITE, DENIED)
    clock.now_s += 1.0
    errors.refuse(WRITE, DENIED)
    assert errors.refused() is DENIED


def test_a_connection_that_never_worked_is_judged_sooner(errors: ConnectionErrors, clock: Clock) -> None:
    errors.succeed(READ)
    refuse_every_second(errors, clock, WRITE, REFUSED_NEW_S)
    assert errors.refused() is DENIED


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_a_success_clears(errors: ConnectionErrors, clock: Clock, kind: str) -> None:
    refuse_every_second(errors, clock, kind, 2 * REFUSED_S)
    errors.succeed(kind)
    assert errors.refused() is None
    errors.refuse(kind, DENIED)
    clock.now_s += REFUSED_S - 1
    errors.refuse(kind, DENIED)
    assert errors.refused() is None, "counting starts again"


def test_successful_reads_prove_nothing_about_writes(errors: ConnectionErrors, clock: Clock) -> None:
    refuse_every_second(errors, clock, WRITE, REFUSED_S)
    errors.succeed(READ)
    assert errors.refused() is DENIED


def test_one_restarting_broker_ends_nothing(errors: ConnectionErrors, clock: Clock) -> None:
    """It refuses to authenticate for a minute, while the others serve."""
    for _ in range(60):
        errors.on_error(KafkaError(KafkaError._AUTHENTICATION, "broker 3: Authentication failed"))
        clock.now_s += 1.0
        errors.succeed(READ)
        assert errors.refused() is None


def test_a_refusal_that_the_client_says_once_persists_while_no_broker_answers(
    errors: ConnectionErrors, clock: Clock
) -> None:
    """As librdkafka before 2.16 does, unless another error comes after it."""
    down, refused = KafkaError(KafkaError._ALL_BROKERS_DOWN), KafkaError(KafkaError._AUTHENTICATION, "wrong password")
    for between, expected in ([], AuthenticationFailed), ([KafkaError(KafkaError._TRANSPORT, "refused")], type(None)):
        errors.succeed(CONNECTION)
        for error in (refused, *between, down):
            errors.on_error(error)
        clock.now_s += REFUSED_S
        errors.on_error(down)
        assert isinstance(errors.refused(), expected)


def test_an_old_refusal_does_not_count(errors: ConnectionErrors, clock: Clock) -> None:
    """A connection that has not been used since has had no success, either."""
    refuse_every_second(errors, clock, CONNECTION, REFUSED_S)
    assert errors.refused() is DENIED
    clock.now_s += STALE_S + 1
    assert errors.refused() is None
    errors.refuse(CONNECTION, DENIED)
    assert errors.refused() is None, "counting starts again"


def refused_after(errors: ConnectionErrors, clock: Clock, code: int, words: str) -> MarshalError | None:
    """What counts as refused after the client has reported an error four times, once a second."""
    for _ in range(4):
        errors.on_error(KafkaError(code, words))
        clock.now_s += 1.0
    return errors.refused()


def test_a_wrong_password_is_named(errors: ConnectionErrors, clock: Clock) -> None:
    refused = refused_after(errors, clock, KafkaError._AUTHENTICATION, "Invalid username or password")
    assert isinstance(refused, AuthenticationFailed)
    assert (refused.servers, refused.principal, refused.retriable) == ("broker:9092", "User:a", False)
    assert "Invalid username or password; check security.protocol" in str(refused), "or the port is without SASL"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (KafkaError._SSL, "SSL handshake failed: certificate verify failed"),
        (KafkaError._TRANSPORT, "Receive failed: SSL routines::ssl/tls alert certificate unknown: SSL alert number 46"),
    ],
    ids=["the server's", "the client's"],
)
def test_a_certificate_that_is_not_trusted_is_named(
    errors: ConnectionErrors, clock: Clock, code: int, words: str
) -> None:
    refused = refused_after(errors, clock, code, words)
    assert isinstance(refused, TlsMismatch)
    assert (refused.protocol, refused.retriable) == ("SASL_SSL", False)
    assert words in str(refused)


@pytest.mark.parametrize(
    "words", ["Disconnected (after 3ms in state UP)", "Disconnected: SSL ... (after 0ms in state UP)"]
)
def test_a_port_with_sasl_that_closes_each_connection_is_named(words: str) -> None:
    given = {"bootstrap.servers": "broker:9092", "security.protocol": "ssl"}
    for protocol, hint in (
        (given, "check security.protocol=SSL)"),
        ({}, "check security.protocol=PLAINTEXT)"),
        (GIVEN, ""),
    ):
        errors = ConnectionErrors(protocol)
        errors.on_error(KafkaError(KafkaError._TRANSPORT, words))
        assert errors.reason("no answer").endswith(hint or f"({words})")
        errors.succeed(READ)
        errors.on_error(KafkaError(KafkaError._TRANSPORT, words))
        assert errors.reason("no answer") == f"no answer ({words})", "it had worked"


def test_the_last_message_is_kept_until_a_success(errors: ConnectionErrors, clock: Clock) -> None:
    errors.on_error(KafkaError(KafkaError._RESOLVE, "Failed to resolve 'x'"))
    errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert errors.last_words == "Failed to resolve 'x'", "that all brokers are down says less"
    assert errors.reason("no answer in time") == "no answer in time (Failed to resolve 'x')"
    errors.succeed(READ)
    assert errors.reason("no answer in time") == "no answer in time"
    errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert errors.last_words == "1/1 brokers are down"
    clock.now_s += STALE_S + 1
    assert errors.reason("no answer in time") == "no answer in time", "it is too old to be the reason"


def test_the_users_callbacks_do_not_run_on_the_polling_thread() -> None:
    waiting: list[object] = []
    heard: list[object] = []

    class Logger:
        def log(self, *line: object) -> None:
            heard.append(line)

    given = {"error_cb": heard.append, "stats_cb": heard.append, "logger": Logger(), "linger.ms": 0}
    own = redirect_callbacks(given, waiting.append)
    error = KafkaError(KafkaError._TRANSPORT, "down")
    ConnectionErrors(own).on_error(error)
    own["stats_cb"]("{}")
    own["logger"].log(30, "%s", "line")
    assert heard == []
    for call in waiting:
        call()  # type: ignore[operator]
    assert heard == [error, "{}", (30, "%s", "line")]
    assert own["linger.ms"] == 0


@pytest.mark.parametrize("transactional", [False, True])
def test_nor_do_they_run_on_a_thread_that_writes(transactional: bool) -> None:
    """What one of them raises would come out of the call that polls."""
    waiting: list[object] = []

    def fails(error: KafkaError) -> None:
        raise AssertionError(error)

    with Broker(topics={"orders": 1}) as broker:
        given = {"bootstrap.servers": broker.bootstrap_servers, "error_cb": fails, "log_level": 0}
        transport = KafkaTransport(given, DEADLINE_S, waiting.append)
        writer = TransactionalWriter(transport, "me") if transactional else transport.writer()
        broker.broker_down(1)
        until(lambda: (writer._producer.poll(0.01), waiting)[1], "the error callback is called")
        writer.close()


def test_what_librdkafka_calls_in_the_thread_that_polls_is_known() -> None:
    """Whatever it is named: a later librdkafka may call more than `oauth_cb`."""
    passed_on = {"error_cb": print, "stats_cb": print, "throttle_cb": print, "logger": logging.getLogger("marshal_py")}
    assert not calls_while_polled({**GIVEN, **passed_on, "linger.ms": 0})
    assert not calls_while_polled({**redirect_callbacks(passed_on, call_directly), "oauth_cb": None})
    for name in ("oauth_cb", "a_new_cb"):
        assert calls_while_polled({**GIVEN, **passed_on, name: print})
