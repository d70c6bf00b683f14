"""Makes the first request to a cluster: does it answer, and if not, why? Requests metadata and nothing else.

A call into librdkafka cannot be interrupted by a signal, so the timeout is cut into slices; between them the client's
errors are handled. librdkafka cannot tell a TLS listener from a server that hangs up, so a port that does not answer is
tried once with and without TLS.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from marshal_py.errors import ClusterUnreachable, InvalidOption, TlsMismatch
from marshal_py.transport import settings
from marshal_py.transport.connection_errors import ConnectionErrors

# --- Finds out why client and server do not agree on TLS, because librdkafka does not say: asks the port itself
#
# errors.py has the sentence (TlsMismatch). connection_errors.py has what librdkafka says of certificates and
# versions: it says that a server's is not valid, and not that it has expired or is another host's.


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


logger: Final = logging.getLogger("marshal_py")

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


def check_timeout(timeout_s: float) -> None:
    """Raises InvalidOption unless a call may wait for so long."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidOption("timeout_s", timeout_s, "a number of seconds, more than 0")


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
