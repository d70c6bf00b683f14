"""Finds out why client and server do not agree on TLS, because librdkafka does not say: asks the port itself.

errors.py has the sentence (TlsMismatch). connection_errors.py has what librdkafka says of certificates and versions: it
says that a server's is not valid, and not that it has expired or is another host's.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Mapping
from typing import Any, Final

from marshal_py.errors import TlsMismatch

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
