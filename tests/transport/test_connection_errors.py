"""When a refusal counts as one for good: persistence decides, a success clears, the last words are kept."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from marshal_py.errors import AccessDenied, AuthenticationFailed, MarshalError, TlsMismatch
from marshal_py.transport.connection_errors import (
    CONNECTION,
    READ,
    REFUSED_NEW_S,
    REFUSED_S,
    STALE_S,
    WRITE,
    ConnectionErrors,
    apart,
)

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
def trouble(clock: Clock) -> ConnectionErrors:
    return ConnectionErrors(GIVEN, clock)


def again_and_again(
    trouble: ConnectionErrors, clock: Clock, kind: str, for_s: float, error: MarshalError = DENIED
) -> None:
    """Once a second."""
    for _ in range(round(for_s) + 1):
        trouble.refuse(kind, error)
        clock.now_s += 1.0
    clock.now_s -= 1.0


def test_one_refused_request_proves_nothing(trouble: ConnectionErrors, clock: Clock) -> None:
    trouble.succeed(WRITE)
    trouble.refuse(WRITE, DENIED)
    clock.now_s += 3_600.0
    assert trouble.refused() is None


def test_a_refusal_that_persists_counts(trouble: ConnectionErrors, clock: Clock) -> None:
    trouble.succeed(WRITE)
    again_and_again(trouble, clock, WRITE, REFUSED_S - 1)
    assert trouble.refused() is None
    trouble.refuse(WRITE, DENIED)
    clock.now_s += 1.0
    trouble.refuse(WRITE, DENIED)
    assert trouble.refused() is DENIED


def test_a_connection_that_never_worked_is_judged_sooner(trouble: ConnectionErrors, clock: Clock) -> None:
    trouble.succeed(READ)
    again_and_again(trouble, clock, WRITE, REFUSED_NEW_S)
    assert trouble.refused() is DENIED


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_a_success_clears(trouble: ConnectionErrors, clock: Clock, kind: str) -> None:
    again_and_again(trouble, clock, kind, 2 * REFUSED_S)
    trouble.succeed(kind)
    assert trouble.refused() is None
    trouble.refuse(kind, DENIED)
    clock.now_s += REFUSED_S - 1
    trouble.refuse(kind, DENIED)
    assert trouble.refused() is None, "it begins anew"


def test_what_can_be_read_says_nothing_of_writes(trouble: ConnectionErrors, clock: Clock) -> None:
    again_and_again(trouble, clock, WRITE, REFUSED_S)
    trouble.succeed(READ)
    assert trouble.refused() is DENIED


def test_one_restarting_broker_ends_nothing(trouble: ConnectionErrors, clock: Clock) -> None:
    """It refuses to authenticate for a minute, while the others serve."""
    for _ in range(60):
        trouble.heard(KafkaError(KafkaError._AUTHENTICATION, "broker 3: Authentication failed"))
        clock.now_s += 1.0
        trouble.succeed(READ)
        assert trouble.refused() is None


def test_a_trouble_of_long_ago_is_over(trouble: ConnectionErrors, clock: Clock) -> None:
    """A connection that nobody used since heard of no success, either."""
    again_and_again(trouble, clock, CONNECTION, REFUSED_S)
    assert trouble.refused() is DENIED
    clock.now_s += STALE_S + 1
    assert trouble.refused() is None
    trouble.refuse(CONNECTION, DENIED)
    assert trouble.refused() is None, "it begins anew"


def refused_after(trouble: ConnectionErrors, clock: Clock, code: int, words: str) -> MarshalError | None:
    """What the client says four times, once a second."""
    for _ in range(4):
        trouble.heard(KafkaError(code, words))
        clock.now_s += 1.0
    return trouble.refused()


def test_a_wrong_password_is_named(trouble: ConnectionErrors, clock: Clock) -> None:
    refused = refused_after(trouble, clock, KafkaError._AUTHENTICATION, "Invalid username or password")
    assert isinstance(refused, AuthenticationFailed)
    assert (refused.servers, refused.principal, refused.retriable) == ("broker:9092", "User:a", False)
    assert "Invalid username or password" in str(refused)


def test_a_certificate_that_is_not_trusted_is_named(trouble: ConnectionErrors, clock: Clock) -> None:
    refused = refused_after(trouble, clock, KafkaError._SSL, "SSL handshake failed: certificate verify failed")
    assert isinstance(refused, TlsMismatch)
    assert (refused.protocol, refused.retriable) == ("SASL_SSL", False)
    assert "certificate verify failed" in str(refused)


def test_the_last_words_are_kept_until_all_is_well(trouble: ConnectionErrors, clock: Clock) -> None:
    trouble.heard(KafkaError(KafkaError._RESOLVE, "Failed to resolve 'x'"))
    trouble.heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert trouble.words == "Failed to resolve 'x'", "that all are down says less"
    assert trouble.reason("no answer in time") == "no answer in time (Failed to resolve 'x')"
    trouble.succeed(READ)
    assert trouble.reason("no answer in time") == "no answer in time"
    trouble.heard(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    assert trouble.words == "1/1 brokers are down"
    clock.now_s += STALE_S + 1
    assert trouble.reason("no answer in time") == "no answer in time", "it explains nothing any more"


def test_the_users_own_callbacks_are_called_elsewhere() -> None:
    """By whoever runs them: nothing of theirs runs on the thread that polls."""
    waiting: list[object] = []
    heard: list[object] = []

    class Logger:
        def log(self, *line: object) -> None:
            heard.append(line)

    given = {"error_cb": heard.append, "stats_cb": heard.append, "logger": Logger(), "linger.ms": 0}
    own = apart(given, waiting.append)
    error = KafkaError(KafkaError._TRANSPORT, "down")
    ConnectionErrors(own).heard(error)
    own["stats_cb"]("{}")
    own["logger"].log(30, "%s", "line")
    assert heard == []
    for call in waiting:
        call()  # type: ignore[operator]
    assert heard == [error, "{}", (30, "%s", "line")]
    assert own["linger.ms"] == 0
