"""Decides which message of a key is its last one, when the key is in several partitions.

Offsets decide within a partition. Between partitions, which have no common order, the timestamp of each partition's
last message of the key decides, and the higher partition number if these are equal. Whoever compared any two messages
of a key instead would get another answer for each order in which they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from marshal_py.transport.ports import RawMessage


class LastMessages:
    """By key and partition the last message among those that were added, in any order."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[int, RawMessage]] = {}

    def add(self, key: bytes, message: RawMessage) -> None:
        lasts = self._by_key.setdefault(key, {})
        number = message.partition() or 0
        known = lasts.get(number)
        if known is None or (message.offset() or 0) > (known.offset() or 0):
            lasts[number] = message

    def keys(self) -> Iterable[bytes]:
        return self._by_key.keys()

    def __len__(self) -> int:
        return len(self._by_key)

    def newest(self) -> dict[bytes, RawMessage]:
        """Returns by key its last message over all partitions."""
        return {key: newest(lasts) for key, lasts in self._by_key.items()}


def newest(lasts: Mapping[int, RawMessage]) -> RawMessage:
    """Returns the last message of a key. `lasts`: its last message in each partition, at least one."""
    return max(lasts.values(), key=age)


def age(message: RawMessage) -> tuple[int, int]:
    """Returns what the order of messages between partitions is: the later one is greater."""
    return message.timestamp()[1], message.partition() or 0
