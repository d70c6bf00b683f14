"""Connects to a cluster: the first request, and the errors of a connection from then on.

A call into librdkafka cannot be interrupted by a signal, so the first request's timeout is cut into slices; between
them the client's errors are handled. librdkafka cannot tell a TLS listener from a server that hangs up, so a port that
does not answer is tried once with and without TLS.

One refused request or failed authentication proves nothing, because a restarting broker may refuse what the cluster
grants. A refusal counts as permanent once it has been repeated for some time without any success of its kind; a success
clears it. The kinds are READ, WRITE, CONNECTION and, for records that are too large, SIZE (kafka.py). The thread that
polls a client reports its errors; other threads read them.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from msgspec import Struct

from marshal_py.errors import AuthenticationFailed, ClusterUnreachable, InvalidOption, MarshalError, TlsMismatch
from marshal_py.transport import settings

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

_CLOSED: Final = re.compile(r"Disconnected.* in state UP\b")  # at the first request after the one for versions

_REDIRECTED: Final = ("error_cb", "stats_cb", "throttle_cb")  # callbacks that the polling thread passes on


class _Refusal(Struct):
    first_s: float
    last_s: float
    error: MarshalError


def told_right(given: Mapping[str, Any], text: str, right: tuple[str, str, str]) -> str:
    """Returns what a broker said of a refusal, with the right that this client lacks: operation, kind, name."""
    return f"{text}; {settings.principal_of(given)} needs {right[0]} on {right[1]} {right[2]}"


class ConnectionErrors:
    """The errors of one client. `given`: its settings, whose callbacks are called, too. Needs no lock: each step is one
    store."""

    def __init__(self, given: Mapping[str, Any], now_s: Callable[[], float] = time.monotonic) -> None:
        self._given, self._now_s = given, now_s
        self._servers = str(given.get("bootstrap.servers", ""))
        self._words, self._heard_s = "", 0.0
        self._refusals: dict[str, _Refusal] = {}
        self._refused_last = False
        self._succeeded: set[str] = set()

    # --- reported by the client

    def on_error(self, error: KafkaError) -> None:
        """Notes an error, then calls the user's own callback. Is the `error_cb` of the client."""
        code, text = error.code(), error.str()
        if code == KafkaError._ALL_BROKERS_DOWN:  # a message without a reason
            # librdkafka before 2.16 says the same reason once in half a minute, and this at each attempt.
            if self._refused_last and (known := self._refusals.get(CONNECTION)) is not None:
                self.refuse(CONNECTION, known.error)
            if not self.last_words:
                self.note(text)
        else:
            refusal = self._refusal(code, text)
            if refusal is not None:
                self.refuse(CONNECTION, refusal)
            self._refused_last = refusal is not None
            self.note(text)
        own = self._given.get("error_cb")
        if own is not None:
            own(error)

    def _refusal(self, code: int, text: str) -> MarshalError | None:
        if code in _UNAUTHENTICATED:
            return AuthenticationFailed(self._servers, settings.principal_of(self._given), text)
        if code == KafkaError._SSL or _TLS_REFUSED in text:
            return TlsMismatch(self._servers, str(self._given.get("security.protocol", "")), text)
        return None

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
        hint, protocol = "", str(self._given.get("security.protocol", "PLAINTEXT")).upper()
        if not self._succeeded and not protocol.startswith("SASL") and _CLOSED.search(self._words):
            hint = f"; a port with SASL closes connections so: check security.protocol={protocol}"
        return f"{text} ({self._words}{hint})"

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


# --- Finds out why client and server do not agree on TLS, because librdkafka does not say: asks the port itself
#
# errors.py has the sentence (TlsMismatch). ConnectionErrors has what librdkafka says of certificates and versions: it
# says that a server's is not valid, and not that it has expired or is another host's.


PROBE_TIMEOUT_S: Final = 2.0
DEFAULT_PORT: Final = 9092
_API_VERSIONS: Final = struct.pack(">ihhih", 10, 18, 0, 1, -1)  # length, key, version, correlation id, no client id
_ANSWER_BYTES_MAX: Final = 1 << 20
_INVALID: Final = "certificate verify failed"  # OpenSSL's words for each of its reasons


def tls_mismatch(given: Mapping[str, Any]) -> TlsMismatch | None:
    """Returns an error if a server speaks TLS and the client does not, or the reverse.

    Returns None if no server shows that.
    """
    protocol = str(given.get("security.protocol", "plaintext")).lower()
    ours = protocol.endswith("ssl")
    for server in str(given["bootstrap.servers"]).split(","):
        with contextlib.suppress(OSError, ValueError):
            if ours and _speaks_plainly(_address(server)):
                return TlsMismatch(server, protocol, "this port answers without TLS")
            if not ours and _speaks_tls(_address(server)):
                return TlsMismatch(server, protocol, "this port speaks TLS")
    return None


def named_cause(refused: TlsMismatch, given: Mapping[str, Any]) -> TlsMismatch:
    """Returns the error with what is wrong with a server's certificate, if librdkafka refused it and a look tells."""
    if _INVALID not in refused.reason:
        return refused
    for server in str(given["bootstrap.servers"]).split(","):
        try:
            context = ssl.create_default_context(cafile=given.get("ssl.ca.location"), cadata=given.get("ssl.ca.pem"))
            address = _address(server)
            with socket.create_connection(address, PROBE_TIMEOUT_S) as raw:
                context.wrap_socket(raw, server_hostname=address[0]).close()
        except ssl.SSLCertVerificationError as error:
            reason = f"the certificate of this server is refused: {error.verify_message}"
            return TlsMismatch(server.strip(), refused.protocol, reason)
        except (OSError, ValueError):
            continue  # not reachable, or a server without TLS
    return refused


def _address(server: str) -> tuple[str, int]:
    host, colon, port = server.strip().rpartition("//")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if colon else (port, DEFAULT_PORT)


def _speaks_tls(address: tuple[str, int]) -> bool:
    """Returns whether the server answers a TLS handshake, whatever the certificates. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, PROBE_TIMEOUT_S) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=address[0]):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (
                error.reason or ""
            )  # a refusal in TLS: of our versions, or for lack of a client certificate


def _speaks_plainly(address: tuple[str, int]) -> bool:
    """Returns whether the server answers an ApiVersions request without TLS. Raises OSError."""
    with socket.create_connection(address, PROBE_TIMEOUT_S) as raw, raw.makefile("rb") as answer:
        raw.sendall(_API_VERSIONS)
        head = answer.read(8)
        return len(head) == 8 and 0 < int.from_bytes(head[:4], "big") <= _ANSWER_BYTES_MAX and head[4:] == b"\0\0\0\1"


# Ctrl-C may have to wait for one slice. An answer that comes after its slice is lost, so a slow cluster needs longer
# slices: a quarter of the time waited so far, within these bounds.
SLICE_S_MIN: Final = 0.25
SLICE_S_MAX: Final = 4.0
PROBE_AFTER_S: Final = 1.0
WARN_EVERY_S: Final = 5.0  # between two warnings while it waits; the first comes after WARN_AFTER_S
WARN_AFTER_S: Final = 2.0
LOG_INFO: Final = 6  # librdkafka's level; it reports cut connections there

# Errors that may pass. All others are final.
_WAITS: Final = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN})


TIMEOUT_S_MAX: Final = 3_600.0  # librdkafka takes no more for a request of an admin; who asks for more gets this


def check_timeout(timeout_s: float) -> float:
    """Returns how long a call may wait, at most TIMEOUT_S_MAX. Raises InvalidOption unless it is a time."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidOption("timeout_s", timeout_s, "a number of seconds, more than 0")
    return min(timeout_s, TIMEOUT_S_MAX)


def metadata(
    client: Any, topic: str | None, timeout_s: float, on_no_answer: Callable[[str], None] | None = None
) -> Any:
    """Returns `client.list_topics`, asked for in slices of the timeout. `topic` None: all. `on_no_answer(reason)` is
    called after each slice without an answer, and may raise. Raises KafkaException."""
    began_s = time.monotonic()
    deadline = began_s + timeout_s
    while True:
        now_s = time.monotonic()
        left_s = max(0.01, deadline - now_s)
        slice_s = min(max(SLICE_S_MIN, (now_s - began_s) / 4), SLICE_S_MAX)
        try:
            return client.list_topics(topic, timeout=min(slice_s, left_s))
        except KafkaException as error:
            if error.args[0].code() not in _WAITS or time.monotonic() >= deadline:
                raise
            if on_no_answer is not None:
                on_no_answer(error.args[0].str())


def cluster_id(given: settings.Settings, client_id: str, timeout_s: float) -> str | None:
    """Returns the cluster's id, None if it has none. Raises ClusterUnreachable, AuthenticationFailed, TlsMismatch."""
    errors, servers = ConnectionErrors(given), str(given["bootstrap.servers"])
    client: AdminClient = settings.create_client(
        AdminClient,
        {**settings.admin(given, client_id), "error_cb": errors.on_error, "logger": errors, "log_level": LOG_INFO},
    )
    began_s = time.monotonic()
    warn_s, probed = began_s + WARN_AFTER_S, False

    def on_no_answer(text: str) -> None:
        nonlocal warn_s, probed
        client.poll(0)
        if (refused := errors.refused()) is not None:
            raise named_cause(refused, given) if isinstance(refused, TlsMismatch) else refused
        if not probed and time.monotonic() >= began_s + PROBE_AFTER_S:
            probed = True
            if (mismatch := tls_mismatch(given)) is not None:
                raise mismatch
        now_s = time.monotonic()
        if now_s >= warn_s:
            warn_s = now_s + WARN_EVERY_S
            logger.warning("connecting to %s: no answer for %.0f s: %s", servers, now_s - began_s, errors.reason(text))

    try:
        found: str | None = metadata(client, None, timeout_s, on_no_answer).cluster_id
        return found
    except KafkaException as error:
        client.poll(0)
        reason = errors.reason(error.args[0].str())
        raise ClusterUnreachable(servers, "the cluster's metadata", reason) from error
