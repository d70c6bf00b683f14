"""What librdkafka says is wrong with a connection, and when that counts as a refusal for good.

Strategy: one refused request or one failed authentication proves nothing, for a broker that restarts may refuse what
the cluster grants. So a refusal counts once it has been heard again and again over an interval in which nothing of its
kind succeeded; a success forgets it. Asks nobody and raises nothing: who polls the client feeds it, who waits reads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError
from msgspec import Struct

from marshal_py.errors import AuthenticationFailed, MarshalError, TlsMismatch

logger = logging.getLogger("marshal_py")

# Of a connection that has worked: longer than a broker's restart is visible, and than a credential takes to spread.
REFUSED_S: Final = 10.0
# Of one that never has: wrong settings are by far the likelier reason, and somebody waits for `connect`.
REFUSED_NEW_S: Final = 2.0
# Refusals further apart than this are not one trouble; and what was heard so long ago explains nothing now.
STALE_S: Final = 30.0

READ: Final = "Read"
WRITE: Final = "Write"
CONNECTION: Final = "Connection"  # to a broker: authentication, TLS; whatever succeeds disproves it

_UNAUTHENTICATED: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
UNKNOWN_PRINCIPAL: Final = "User:NAME"  # in an ACL for somebody whom the settings do not name


class _Refusal(Struct):
    first_s: float
    last_s: float
    error: MarshalError


def principal_of(given: Mapping[str, Any]) -> str:
    """Whom an ACL must name. Where no user stands in the settings (TLS), only the brokers know."""
    return f"User:{given['sasl.username']}" if "sasl.username" in given else UNKNOWN_PRINCIPAL


class ConnectionErrors:
    """The troubles of one connection, or of one client. `given`: its settings, for the user's own callbacks, too.

    Without locks: each step is one store of a dict or an attribute.
    """

    def __init__(self, given: Mapping[str, Any], now_s: Callable[[], float] = time.monotonic) -> None:
        self._given, self._now_s = given, now_s
        self._servers = str(given.get("bootstrap.servers", ""))
        self._words, self._heard_s = "", 0.0
        self._refusals: dict[str, _Refusal] = {}
        self._succeeded: set[str] = set()

    # --- what is heard

    def on_error(self, error: KafkaError) -> None:
        """The `error_cb` of a client: notes it, then tells the user's own."""
        code, text = error.code(), error.str()
        if code in _UNAUTHENTICATED:
            self.refuse(CONNECTION, AuthenticationFailed(self._servers, principal_of(self._given), text))
        elif code == KafkaError._SSL:
            protocol = str(self._given.get("security.protocol", ""))
            self.refuse(CONNECTION, TlsMismatch(self._servers, protocol, text))
        if code != KafkaError._ALL_BROKERS_DOWN or not self.last_words:  # which says nothing of the reason
            self.note(text)
        own = self._given.get("error_cb")
        if own is not None:
            own(error)

    def log(self, level: int, form: str, *values: object) -> None:
        """The `logger` of a client: a connection that was cut is told there alone."""
        if "FAIL" in values:
            self.note(str(values[-1]).partition("]: ")[2] or str(values[-1]))
        own = self._given.get("logger")
        if own is not None:
            own.log(level, form, *values)

    def note(self, text: str) -> None:
        self._words, self._heard_s = text, self._now_s()

    def refuse(self, kind: str, error: MarshalError) -> None:
        """A request of this kind, or a connection, was refused just now."""
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
        """Before a question: what was heard earlier is not its reason."""
        self._words = ""

    # --- what it comes to

    @property
    def last_words(self) -> str:
        """librdkafka's last words; "" when all is well."""
        return self._words

    def reason(self, text: str) -> str:
        """`text`, with what librdkafka said last."""
        if not self._words or self._now_s() - self._heard_s > STALE_S or self._words in text:
            return text
        return f"{text} ({self._words})"

    def refused(self) -> MarshalError | None:
        """What is refused for good; None if that is not proven, or not any more."""
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
    """The settings, with the user's callbacks handed to `call` instead of being run by whoever polls the client."""
    found = dict(given)
    for name in ("error_cb", "stats_cb", "throttle_cb"):
        own = given.get(name)
        if own is not None:
            found[name] = _redirected(own, call)
    if given.get("logger") is not None:
        found["logger"] = _RedirectedLogger(given["logger"], call)
    return found


def _redirected(own: Callable[[Any], object], call: Callable[[Callable[[], object]], object]) -> Callable[[Any], None]:
    def told(value: Any) -> None:
        call(lambda: own(value))

    return told


class _RedirectedLogger:
    """What librdkafka's clients need of a logger."""

    def __init__(self, own: logging.Logger, call: Callable[[Callable[[], object]], object]) -> None:
        self._own, self._call = own, call

    def log(self, level: int, form: str, *values: object) -> None:
        self._call(lambda: self._own.log(level, form, *values))


def call_directly(call: Callable[[], object]) -> None:
    """Runs a callback of the user's at once, where nobody heartbeats. What it raises is logged."""
    try:
        call()
    except Exception:
        logger.exception("a callback failed")
