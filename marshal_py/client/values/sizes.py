"""Measures messages in bytes: as memory is bounded (`payload_bytes`), and as a user asks for them (`message_bytes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from marshal_py.transport.ports import RawMessage

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
