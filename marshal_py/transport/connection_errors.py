"""Keeps the errors of a connection: librdkafka's last message, and refusals, which become permanent in time.

One refused request or failed authentication proves nothing, because a restarting broker may refuse what the cluster
grants. A refusal counts as permanent once it has been repeated for some time without any success of its kind; a success
clears it. The kinds are READ, WRITE, CONNECTION and, for records that are too large, SIZE (kafka.py).

This module sends no request and raises nothing: the thread that polls the client reports errors to it, and other
threads read them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError
from msgspec import Struct

from marshal_py.errors import AuthenticationFailed, MarshalError, TlsMismatch

logger: Final = logging.getLogger("marshal_py")

# How long refusals must repeat on a connection that has worked: longer than a broker restarts and credentials spread.
REFUSED_S: Final = 10.0
# The same where nothing has worked yet: wrong settings are far more likely then, and the caller of `connect` waits.
REFUSED_NEW_S: Final = 2.0
# Refusals that are further apart do not belong together, and an older error message explains nothing.
STALE_S: Final = 30.0

READ: Final = "Read"
WRITE: Final = "Write"
CONNECTION: Final = "Connection"  # authentication or TLS; any success disproves it

_UNAUTHENTICATED: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
_TLS_REFUSED: Final = "SSL alert number"  # a server's word on our certificate, which comes after the handshake
UNKNOWN_PRINCIPAL: Final = "User:NAME"  # the principal in an ACL if the settings name no user

_REDIRECTED: Final = ("error_cb", "stats_cb", "throttle_cb")  # callbacks that the polling thread passes on


class _Refusal(Struct):
    first_s: float
    last_s: float
    error: MarshalError


def principal_of(given: Mapping[str, Any]) -> str:
    """Returns the principal that an ACL must name. Without a user in the settings (TLS) only brokers know:
    UNKNOWN_PRINCIPAL."""
    return f"User:{given['sasl.username']}" if "sasl.username" in given else UNKNOWN_PRINCIPAL


def told_right(given: Mapping[str, Any], text: str, right: tuple[str, str, str]) -> str:
    """Returns what a broker said of a refusal, with the right that this client lacks: operation, kind, name."""
    return f"{text}; {principal_of(given)} needs {right[0]} on {right[1]} {right[2]}"


class ConnectionErrors:
    """The errors of one client. `given`: its settings, whose callbacks are called, too. Needs no lock: each step is one
    store."""

    def __init__(self, given: Mapping[str, Any], now_s: Callable[[], float] = time.monotonic) -> None:
        self._given, self._now_s = given, now_s
        self._servers = str(given.get("bootstrap.servers", ""))
        self._words, self._heard_s = "", 0.0
        self._refusals: dict[str, _Refusal] = {}
        self._succeeded: set[str] = set()

    # --- reported by the client

    def on_error(self, error: KafkaError) -> None:
        """Notes an error, then calls the user's own callback. Is the `error_cb` of the client."""
        code, text = error.code(), error.str()
        if code in _UNAUTHENTICATED:
            self.refuse(CONNECTION, AuthenticationFailed(self._servers, principal_of(self._given), text))
        elif code == KafkaError._SSL or _TLS_REFUSED in text:
            protocol = str(self._given.get("security.protocol", ""))
            self.refuse(CONNECTION, TlsMismatch(self._servers, protocol, text))
        if code != KafkaError._ALL_BROKERS_DOWN or not self.last_words:  # a message without a reason
            self.note(text)
        own = self._given.get("error_cb")
        if own is not None:
            own(error)

    def log(self, level: int, form: str, *values: object) -> None:
        """The `logger` of the client: notes a connection that was cut, which librdkafka reports nowhere else, then
        calls the user's."""
        if "FAIL" in values:
            self.note(str(values[-1]).partition("]: ")[2] or str(values[-1]))
        own = self._given.get("logger")
        if own is not None:
            own.log(level, form, *values)

    def note(self, text: str) -> None:
        self._words, self._heard_s = text, self._now_s()

    def refuse(self, kind: str, error: MarshalError) -> None:
        """Notes that a request of this kind, or a connection, has just been refused."""
        now_s, known = self._now_s(), self._refusals.get(kind)
        if known is None or (kind != WRITE and now_s - known.last_s > STALE_S):  # writes may be minutes apart
            self._refusals[kind] = _Refusal(now_s, now_s, error)
        else:
            known.last_s, known.error = now_s, error

    def succeed(self, kind: str) -> None:
        self._succeeded.add(kind)
        self._words = ""
        if self._refusals:
            self._refusals.pop(kind, None)
            self._refusals.pop(CONNECTION, None)

    def forget(self) -> None:
        """Forgets the last message. Is called before a request, whose failure an earlier error would not explain."""
        self._words = ""

    # --- called by threads that wait for the cluster

    @property
    def last_words(self) -> str:
        """Returns librdkafka's last error message; "" after a success."""
        return self._words

    def reason(self, text: str) -> str:
        """Returns `text` followed by librdkafka's last message, unless that is old or already part of `text`."""
        if not self._words or self._now_s() - self._heard_s > STALE_S or self._words in text:
            return text
        return f"{text} ({self._words})"

    def refused(self) -> MarshalError | None:
        """Returns the error of a permanent refusal; None if there is none."""
        if not self._refusals:
            return None
        now_s = self._now_s()
        for kind, refusal in self._refusals.copy().items():
            worked = bool(self._succeeded) if kind == CONNECTION else kind in self._succeeded
            persistence_s = refusal.last_s - refusal.first_s
            if persistence_s >= (REFUSED_S if worked else REFUSED_NEW_S) and now_s - refusal.last_s <= STALE_S:
                return refusal.error
        return None


def redirect_callbacks(given: Mapping[str, Any], call: Callable[[Callable[[], object]], object]) -> dict[str, Any]:
    """Returns the settings with the user's callbacks run by `call` instead of the polling thread."""
    found = dict(given)
    for name in _REDIRECTED:
        own = given.get(name)
        if own is not None:
            found[name] = _redirected(own, call)
    if given.get("logger") is not None:
        found["logger"] = _RedirectedLogger(given["logger"], call)
    return found


def calls_while_polled(given: Mapping[str, Any]) -> bool:
    """Returns whether librdkafka may run user code that `redirect_callbacks` does not wrap while polled
    (`oauth_cb`)."""
    return any(callable(value) and name not in _REDIRECTED for name, value in given.items())


def _redirected(own: Callable[[Any], object], call: Callable[[Callable[[], object]], object]) -> Callable[[Any], None]:
    def callback(value: Any) -> None:
        call(lambda: own(value))

    return callback


class _RedirectedLogger:
    """Stands in for the user's logger as far as librdkafka's clients need one; `call` runs the user's."""

    def __init__(self, own: logging.Logger, call: Callable[[Callable[[], object]], object]) -> None:
        self._own, self._call = own, call

    def log(self, level: int, form: str, *values: object) -> None:
        self._call(lambda: self._own.log(level, form, *values))


def call_directly(call: Callable[[], object]) -> None:
    """Runs a user's callback in this thread and logs what it raises: for commands, whose threads send no heartbeats."""
    try:
        call()
    except Exception:
        logger.exception("a callback failed")
