"""Checks what `fetch`, `next`, `consume`, `seek`, `pause`, `drain` and `wait` are asked for, and fills in the defaults.

Source of the defaults and bounds: ADR-37 of JetStream ("JetStream Simplification"), sections "Fetch", "Next", "Consume"
and "Idle heartbeats". Its `expires` is `expires_s` here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from marshal_py.errors import InvalidOption, NeedsAtLeastOnce
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import RawMessage

OnError = Literal["nak", "stop"]


class NamesPartition(Protocol):
    """Declares what names a partition: confluent-kafka's TopicPartition does, whose offset is not looked at."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...


AnyPartition = TopicPartition | tuple[str, int] | NamesPartition

FETCH_EXPIRES_S: Final = 30.0
FETCH_MESSAGES: Final = 1_000
CONSUME_EXPIRES_S: Final = 30.0
CONSUME_EXPIRES_S_MIN: Final = 1.0
EXPIRES_S_MAX: Final = 3e9  # about a century; what asks for more, infinity for example, gets this
CONSUME_MESSAGES: Final = 1_000
# Stands for "any number" where only bytes are limited (ADR-37, "Max messages and max bytes options").
MESSAGES_ANY: Final = 1_000_000
HEARTBEAT_S_MIN: Final = 0.5
HEARTBEAT_S_MAX: Final = 30.0
HEARTBEAT_ABOVE_S: Final = 30.0  # fetches that may wait longer have a heartbeat unless the caller says otherwise


class Request(NamedTuple):
    """One `fetch`: messages and bytes at most (None: any), `min_messages`. `idle_heartbeat_s` None: nobody watches."""

    max_messages: int | None
    max_bytes: int | None
    min_messages: int
    expires_s: float
    idle_heartbeat_s: float | None

    @property
    def most(self) -> int:
        """Returns `max_messages` as a number."""
        return MESSAGES_ANY if self.max_messages is None else self.max_messages


def check_fetch(
    max_messages: int | None, max_bytes: int | None, expires_s: float, min_messages: int, idle_heartbeat_s: float | None
) -> Request:
    """Returns the request of a `fetch`. Raises InvalidOption."""
    if max_messages is not None:
        check_count("max_messages", max_messages)
    if max_bytes is not None:
        check_count("max_bytes", max_bytes)
    if max_messages is None and max_bytes is None:
        max_messages = FETCH_MESSAGES
    most = MESSAGES_ANY if max_messages is None else max_messages
    check_count("min_messages", min_messages)
    if min_messages > most:
        raise InvalidOption("min_messages", min_messages, f"at most max_messages, which is {most}")
    if not _is_number(expires_s) or not expires_s >= 0:
        raise InvalidOption("expires_s", expires_s, "a number of seconds, at least 0; 0 takes what is there now")
    expires_s = min(expires_s, EXPIRES_S_MAX)
    heartbeat_s = check_heartbeat(idle_heartbeat_s, expires_s)
    if heartbeat_s is None and expires_s > HEARTBEAT_ABOVE_S:
        heartbeat_s = default_heartbeat_s(expires_s)
    return Request(max_messages, max_bytes, min_messages, expires_s, heartbeat_s)


class ConsumeRequest(NamedTuple):
    """One `consume`: `limit` pending messages, or bytes with `in_bytes`; more at `threshold`."""

    limit: int
    threshold: int
    in_bytes: bool
    expires_s: float
    idle_heartbeat_s: float


def check_consume(
    max_messages: int | None = None,
    max_bytes: int | None = None,
    expires_s: float = CONSUME_EXPIRES_S,
    idle_heartbeat_s: float | None = None,
    threshold_messages: int | None = None,
    threshold_bytes: int | None = None,
) -> ConsumeRequest:
    """Returns the request of a `consume`. Raises InvalidOption."""
    if max_messages is not None and max_bytes is not None:
        raise InvalidOption("max_bytes", max_bytes, f"not together with max_messages={max_messages}: choose one limit")
    if not _is_number(expires_s) or not expires_s >= CONSUME_EXPIRES_S_MIN:
        raise InvalidOption("expires_s", expires_s, f"a number of seconds, at least {CONSUME_EXPIRES_S_MIN:g}")
    expires_s = min(expires_s, EXPIRES_S_MAX)
    heartbeat_s = check_heartbeat(idle_heartbeat_s, expires_s) or default_heartbeat_s(expires_s)
    if max_bytes is None:
        if threshold_bytes is not None:
            raise InvalidOption("threshold_bytes", threshold_bytes, "only together with max_bytes")
        limit = CONSUME_MESSAGES if max_messages is None else max_messages
        threshold = _threshold("messages", limit, threshold_messages)
        return ConsumeRequest(limit, threshold, False, expires_s, heartbeat_s)
    if threshold_messages is not None:
        raise InvalidOption(
            "threshold_messages", threshold_messages, "not together with max_bytes: use threshold_bytes"
        )
    threshold = _threshold("bytes", max_bytes, threshold_bytes)
    return ConsumeRequest(max_bytes, threshold, True, expires_s, heartbeat_s)


def _threshold(unit: str, limit: int, threshold: int | None) -> int:
    """Returns the threshold below which `consume` asks for more: half of the limit, rounded up, if none is given."""
    check_count(f"max_{unit}", limit)
    if threshold is None:
        return -(-limit // 2)
    check_count(f"threshold_{unit}", threshold)
    if threshold > limit:
        raise InvalidOption(f"threshold_{unit}", threshold, f"at most max_{unit}, which is {limit}")
    return threshold


def check_on_error(on_error: OnError | None, at_most_once: bool, group: str) -> OnError:
    """Returns what a `consume` does when its handler raises. Raises InvalidOption, NeedsAtLeastOnce."""
    if on_error is None:
        return "stop" if at_most_once else "nak"
    if on_error not in ("nak", "stop"):
        raise InvalidOption("on_error", on_error, "one of nak, stop")
    if on_error == "nak" and at_most_once:
        raise NeedsAtLeastOnce("nak", group)
    return on_error


def check_heartbeat(idle_heartbeat_s: float | None, expires_s: float) -> float | None:
    """Returns `idle_heartbeat_s`. Raises InvalidOption if it is out of bounds or above half of `expires_s`."""
    if idle_heartbeat_s is None:
        return None
    if not _is_number(idle_heartbeat_s) or not HEARTBEAT_S_MIN <= idle_heartbeat_s <= HEARTBEAT_S_MAX:
        rule = f"{HEARTBEAT_S_MIN:g} to {HEARTBEAT_S_MAX:g} seconds"
        raise InvalidOption("idle_heartbeat_s", idle_heartbeat_s, rule)
    if 2 * idle_heartbeat_s > expires_s:
        rule = f"at most half of expires_s, which is {expires_s:g}: two missed heartbeats must fit into the wait"
        raise InvalidOption("idle_heartbeat_s", idle_heartbeat_s, rule)
    return idle_heartbeat_s


def default_heartbeat_s(expires_s: float) -> float:
    return min(expires_s / 2, HEARTBEAT_S_MAX)


def check_timeout(
    timeout_s: float, rule: str = "a number of seconds, at least 0", *, option: str = "timeout_s"
) -> float:
    """Returns how long a thread may wait, at most EXPIRES_S_MAX: Python waits for no infinity. Raises InvalidOption if
    nobody can wait so long. `rule`: what the option may be."""
    if not _is_number(timeout_s) or not timeout_s >= 0 or math.inf > timeout_s > sys.float_info.max:
        raise InvalidOption(option, timeout_s, rule)
    return min(timeout_s, EXPIRES_S_MAX)


def check_wait(timeout_s: float | None, *, option: str = "timeout_s") -> float | None:
    """Returns for how many seconds a `drain` or `wait` may wait; None stays None. Raises InvalidOption."""
    if timeout_s is None:
        return None
    return check_timeout(timeout_s, "a number of seconds, at least 0, or None", option=option)


def check_partition(partition: object) -> TopicPartition:
    """Returns the partition that a caller names. Raises InvalidOption unless it is a topic's name and a number."""
    named = partition
    if not isinstance(partition, tuple):
        named = getattr(partition, "topic", None), getattr(partition, "partition", None)
    if isinstance(named, tuple) and len(named) == 2:
        topic, number = named
        if isinstance(topic, str) and type(number) is int:
            return TopicPartition(topic, number)
    raise InvalidOption("partition", partition, 'a topic and the number of a partition, as ("orders", 3)')


def check_count(option: str, value: object) -> None:
    """Raises InvalidOption unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOption(option, value, "a whole number, at least 1")


def check_partitions(partitions: object) -> list[TopicPartition]:
    """Returns the partitions that a caller names. Raises InvalidOption, also if it is a single one."""
    single = isinstance(partitions, tuple) and partitions and isinstance(partitions[0], str)
    if single or isinstance(partitions, str) or not isinstance(partitions, Iterable):
        raise InvalidOption("partitions", partitions, 'a list of partitions, as [("orders", 3)]')
    return [check_partition(one) for one in partitions]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- Measures messages in bytes: as memory is bounded (`payload_bytes`), and as a user asks for them (`message_bytes`).


KEYS_SAMPLED: Final = 16  # every value is measured, and the key of one message in this many: that costs as much again


def payload_bytes(messages: Sequence[RawMessage]) -> int:
    """Returns the size in bytes of the values of these messages, and about that of their keys. There must be one."""
    keys = [len(message.key() or b"") for message in messages[::KEYS_SAMPLED]]
    return sum(map(len, messages)) + sum(keys) * len(messages) // len(keys)


def message_bytes(raw: RawMessage) -> int:
    """Returns the size of a message in bytes as `Consumer.fetch` counts it: key, value, headers and topic."""
    headers = raw.headers() or ()
    size = len(raw.key() or b"") + len(raw.value() or b"") + len(raw.topic() or "")
    return size + sum(len(name) + len(value or b"") for name, value in headers)
