"""Builds the settings of librdkafka's clients: the caller's, and ours where its defaults are slow or wrong for us.

The caller's settings take precedence, except those with which the protocol would break (L9): these raise InvalidOption.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException

from marshal_py.errors import AuthenticationFailed, InvalidOption
from marshal_py.transport.serialization import check_plain

Settings = dict[str, Any]
T = TypeVar("T")

WITNESS: Final = "marshal-witness"  # the client id of a process that publishes last wills

# KIP-320: leader epochs show that the log was cut below what was read, whatever has been written there since. With
# `auto.offset.reset=error` librdkafka reports it by the same code as every refused position, and by this text.
_TRUNCATED: Final = KafkaError(KafkaError._LOG_TRUNCATION).str()

_CALLBACKS: Final = ("error_cb", "oauth_cb", "stats_cb", "throttle_cb")

# Defaults for every client.
_CONNECTION: Final[Mapping[str, Any]] = {
    # A restarted broker is back within seconds; the default backs off to 10 s, five of our intervals.
    "reconnect.backoff.max.ms": 1_000,
    # Nagle's algorithm only adds delay: somebody waits for every record of ours.
    "socket.nagle.disable": True,
    # How long a stale leader may stay unnoticed; the default is 5 minutes.
    "topic.metadata.refresh.interval.ms": 30_000,
    # Errors come as values and events, not as lines on stderr.
    "log_level": 2,  # 3 would print every attempt to reconnect
}

# For every client, whatever the caller's settings say. Neither asking for a topic nor writing to a deleted one may
# create it, because the brokers' default settings are not what the topic needs (L1).
_NEVER: Final[Mapping[str, Any]] = {"allow.auto.create.topics": False}

# For the clients of the coordination log, in addition. When a leader dies, librdkafka looks once for the next one, too
# early, and then only at this interval; heartbeats must be written again before anybody evicts us.
_LOG: Final[Mapping[str, Any]] = {"topic.metadata.refresh.interval.ms": 2_000}

_LOG_READER: Final[Mapping[str, Any]] = {
    "group.id": "marshal-log-reader",  # librdkafka requires one; nothing is ever committed under it
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # L9: a reset would skip history silently
    "isolation.level": "read_uncommitted",  # L9: every reader must see the same records
    "fetch.queue.backoff.ms": 1,  # the default pauses fetching for a second whenever the local queue is full
    "fetch.error.backoff.ms": 50,  # a new leader is there within tens of ms; the default waits half a second
    "check.crcs": True,
}

_LOG_WRITER: Final[Mapping[str, Any]] = {
    "acks": "all",  # L9
    "enable.idempotence": True,  # L9
    "linger.ms": 0,  # a record that waits is a hand-over that waits
    "queue.buffering.max.messages": 10_000,  # a member sends a few per second; a full queue means a lost cluster
    # Late records are harmless and useless: a live member sends them again.
    "message.timeout.ms": 30_000,
}

_DATA: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # D6: a position outside the log is reported, never reset silently
    "isolation.level": "read_committed",
    # The default pauses the fetcher for a second whenever 100,000 messages are queued: it costs a factor of four.
    "fetch.queue.backoff.ms": 1,
    "fetch.error.backoff.ms": 50,
    # All partitions share one queue, and the first message of a new partition waits behind all that is queued. The
    # default of 100,000 is no faster, because a single fetch brings 1 MB of each partition.
    "queued.min.messages": 20_000,
}

_FORBIDDEN: Final[Mapping[str, str]] = {
    "enable.auto.commit": "positions live in the coordination log; Kafka's committed offsets only mirror them",
    "auto.offset.reset": "the library reports positions outside the log; use start= for the first start",
    "group.id": "the group is an argument of consumer()",
    "enable.idempotence": "the coordination log needs idempotent writes",
    "acks": "the coordination log needs acks=all",
    "transactional.id": "the coordination log is written without transactions",
    "partition.assignment.strategy": "partitions are claimed through the coordination log",
}


# What a client gets without the caller's doing. An error that concerns no certain setting need not name these.
_OURS: Final = frozenset().union(_CONNECTION, _NEVER, _LOG_READER, _LOG_WRITER, _DATA, ["client.id"])

LOG_QUEUE_BYTES: Final = 1_048_576  # of records of a log that are read ahead; they fold slower than they come

# How many messages to take from a client at once. CPython collects cyclic garbage when 700 more objects were made than
# freed. Pieces of fewer messages, each freed when the next has come, never start a collection; a thousand messages do,
# which costs a tenth of all time.
PIECE_MESSAGES: Final = 650

MESSAGE_BYTES: Final = 1_000_000  # librdkafka's default of `message.max.bytes`
FETCH_BYTES: Final = 52_428_800  # and that of `fetch.max.bytes`

PROTOCOLS: Final = frozenset({"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"})  # librdkafka takes these before ://


UNKNOWN_PRINCIPAL: Final = "User:NAME"  # the principal in an ACL if the settings name no user


def principal_of(given: Mapping[str, Any]) -> str:
    """Returns the principal that an ACL must name. Without a user in the settings (TLS) only brokers know:
    UNKNOWN_PRINCIPAL."""
    return f"User:{given['sasl.username']}" if "sasl.username" in given else UNKNOWN_PRINCIPAL


def from_user(servers: str | Mapping[str, Any]) -> Settings:
    """Returns the caller's settings, given as a bootstrap string or a mapping of librdkafka's keys."""
    if not isinstance(servers, str | Mapping):
        raise InvalidOption("servers", servers, "a text of host:port, a comma between several, or a mapping")
    given: Settings = {"bootstrap.servers": servers} if isinstance(servers, str) else dict(servers)
    named = given.get("bootstrap.servers")
    if not named or not isinstance(named, str):
        rule = "name at least one host:port; a comma between several"
        if "bootstrap.servers" not in given and (near := get_close_matches("bootstrap.servers", map(str, given), 1)):
            rule += f". Did you mean bootstrap.servers by {near[0]}?"
        raise InvalidOption("bootstrap.servers", named, rule)
    for server in named.split(","):
        scheme, there, _ = server.strip().rpartition("://")
        if there and scheme.upper() not in PROTOCOLS:
            raise InvalidOption("bootstrap.servers", server.strip(), "host:port of a broker, no other address")
        host, colon, port = server.strip().rpartition(":")
        if colon and ":" not in host.rpartition("://")[2].rpartition("]")[2] and not _is_port(port):
            raise InvalidOption("bootstrap.servers", server.strip(), f"host:port, and {port!r} is no number of a port")
    return checked(given)


def _is_port(text: str) -> bool:
    return text.endswith("]") or (text.isdecimal() and 0 < int(text) < 65_536)  # an IPv6 address may have no port


def checked(given: Settings) -> Settings:
    """Returns the caller's settings unchanged. Raises InvalidOption for one with which the protocol would break."""
    for key, reason in _FORBIDDEN.items():
        if key in given:
            raise InvalidOption(key, given[key], reason)
    for key in _CALLBACKS:
        if given.get(key) is not None:  # what None means is for confluent-kafka to say
            check_plain(key, given[key])
    logger = given.get("logger")
    if logger is not None and not callable(getattr(logger, "log", None)):
        raise InvalidOption("logger", logger, "a logger of `logging`, or what has its method `log`")
    return given


def create_client(client: Callable[[dict[str, Any]], T], configuration: Mapping[str, Any]) -> T:
    """Makes a client of librdkafka. Raises InvalidOption for a refused setting, AuthenticationFailed without a token of
    `oauth_cb`."""
    try:
        return client(dict(configuration))
    except (KafkaException, TypeError, ValueError, SystemError) as error:
        # confluent-kafka may call a callback with its error set already: a SystemError, whose cause is that error.
        cause = error.__cause__ if isinstance(error, SystemError) else error
        if not isinstance(cause, KafkaException | TypeError | ValueError):
            raise
        raised = cause.args[0] if cause.args else None
        said = (raised.str() if isinstance(raised, KafkaError) else str(cause)).strip()
        if "oauth_cb" in configuration and "OAuth token" in said:
            servers = str(configuration["bootstrap.servers"])
            raise AuthenticationFailed(
                servers, principal_of(configuration), f"oauth_cb gave no token: {said}"
            ) from error
        meant = [key for key in configuration if any(f"{quote}{key}{quote}" in said for quote in "\"'`")]
        if len(meant) != 1:
            meant = meant or [key for key in configuration if f" {key} " in said]  # a file that cannot be read
            known = meant[0] if len(meant) == 1 else meant or sorted(configuration.keys() - _OURS)
            raise InvalidOption("settings", known, said) from error
        if "No such configuration property" in said:  # its value may be a password
            dotted = meant[0].replace("_", ".")
            advice = "" if dotted == meant[0] else f". librdkafka writes its settings with dots: {dotted}?"
            raise InvalidOption("settings", meant[0], said + advice) from error
        raise InvalidOption(meant[0], configuration[meant[0]], said) from error


def log_reader(given: Settings, client_id: str, fetch_wait_ms: int) -> Settings:
    return {
        **_CONNECTION,
        **_LOG,
        "client.id": client_id,
        "fetch.wait.max.ms": fetch_wait_ms,
        **_queue(LOG_QUEUE_BYTES, given),
        **given,
        **_LOG_READER,
        **_NEVER,
    }


def log_writer(given: Settings, client_id: str) -> Settings:
    keep = {k: v for k, v in given.items() if not k.startswith(("fetch.", "queued."))}
    return {**_CONNECTION, **_LOG, "client.id": client_id, **keep, **_LOG_WRITER, **_NEVER}


def will_writer(given: Settings, timeout_ms: int) -> Settings:
    """Returns the settings of a witness's producer, which gives a record up `timeout_ms` after it was sent (T19)."""
    return {
        **log_writer(given, WITNESS),
        "client.id": WITNESS,  # one for all, so that sessions with the same settings share a producer
        "message.timeout.ms": timeout_ms,
        "queue.buffering.max.messages": 100_000,  # the most claims of many sessions that die together
        # It waits for years and writes once; a leader that has moved is looked up when the time comes.
        "topic.metadata.refresh.interval.ms": 30_000,
    }


def data_reader(
    given: Settings, client_id: str, group: str, fetch_wait_ms: int | None, queue_bytes: int | None = None
) -> Settings:
    wait = {} if fetch_wait_ms is None else {"fetch.wait.max.ms": fetch_wait_ms}
    bound = {} if queue_bytes is None else _queue(queue_bytes, given)
    return {
        **_CONNECTION,
        **_DATA,
        **wait,
        **bound,
        "client.id": client_id,
        **given,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        **_NEVER,
    }


def _queue(size_bytes: int, given: Settings) -> Settings:
    """Returns settings for a queue of `size_bytes` and answers of half as much: librdkafka fetches while it holds less,
    and adds the answer."""
    largest = given.get("message.max.bytes", MESSAGE_BYTES)  # librdkafka refuses answers that hold less than one
    least = int(largest) if str(largest).isdecimal() else MESSAGE_BYTES  # what else it says of other values, it says
    return {
        "queued.max.messages.kbytes": max(1, size_bytes // 1024),
        "fetch.max.bytes": max(least, min(FETCH_BYTES, size_bytes // 2)),
    }


def admin(given: Settings, client_id: str) -> Settings:
    # A client for requests is seldom polled, so statistics would pile up in it.
    other = ("fetch.", "queued.", "isolation.", "check.", "stat")
    keep = {k: v for k, v in given.items() if not k.startswith(other)}
    return {**_CONNECTION, "client.id": client_id, **keep, **_NEVER}


def default_client_id() -> str:
    """Returns the host name. Callers make it unique."""
    return socket.gethostname() or "marshal"


def truncation_text(error: KafkaError) -> str:
    """Returns librdkafka's text if the error says that a log lost its newest records, else an empty text."""
    return error.str() if _TRUNCATED in error.str() else ""
