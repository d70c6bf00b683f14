"""What a topic answers: stored messages, alone or in a batch with its end. None of it reads from Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

from marshal_py.topics.request import GetRequest
from marshal_py.transport.ports import RawMessage

END_OF_BATCH: Final = 204


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a topic. `key` and `value` are bytes or None, or what the deserializers made of them.

    `timestamp`: ms since 1970, -1 if there is none. Only in a batch: `num_pending` is how many messages that match the
    request come after this one; `last_offset` is the offset of the message before it in the batch and in the same
    partition, -1 for the first. Without a key filter `num_pending` counts offsets, so it is too high where compaction
    or transactions left holes.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any
    value: Any
    headers: tuple[tuple[str, bytes | None], ...] = ()
    num_pending: int | None = None
    last_offset: int | None = None

    @property
    def tombstone(self) -> bool:
        """Returns whether the message has no value, and so deletes its key."""
        return self.value is None


@dataclass(frozen=True, slots=True)
class EndOfBatch:
    """Says how a batch ended. `num_pending`: how many messages match but are not in the batch; 0 if all was read.

    `last_offset`: the offset of the last message in the batch, for each partition that has one there. `up_to`: for each
    partition, the last offset that the whole answer covers; the first request fixes it, so that all pages show the same
    point in time. `status` (204) and `description` ("EOB") are what ADR-31 says.
    """

    num_pending: int
    last_offset: Mapping[int, int]
    up_to: Mapping[int, int]
    status: int = END_OF_BATCH
    description: str = "EOB"


class StoredBatch(Sequence[StoredMessage]):
    """The messages of one answer, and how it ended (`end`).

    For multi_last they are in the order of partition and offset, otherwise by time, and in each partition by offset.
    """

    end: EndOfBatch

    def __init__(
        self, messages: Sequence[StoredMessage], end: EndOfBatch, following: GetRequest | None, later: GetRequest
    ) -> None:
        self._messages, self.end, self._following, self._later = tuple(messages), end, following, later

    def next_request(self) -> GetRequest | None:
        """Returns the request for the next page, at the same point in time; None when all is read.

        Pass it to `Topic.get_page`.
        """
        return self._following

    def later_request(self) -> GetRequest:
        """Returns the same question about messages that come after the point in time of this answer.

        Pass it to `Topic.get_page`. Of `multi_last` it asks for the keys that have changed since.
        """
        return self._later

    @overload
    def __getitem__(self, index: int) -> StoredMessage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredMessage]: ...
    def __getitem__(self, index: int | slice) -> StoredMessage | Sequence[StoredMessage]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[StoredMessage]:
        return iter(self._messages)

    def __repr__(self) -> str:
        return f"StoredBatch({len(self)} messages, {self.end.num_pending} pending)"


class LastMessages:
    """By key and partition the last message among those that were added, in any order.

    Offsets decide within a partition. Between partitions, which have no common order, the timestamp of each partition's
    last message of the key decides, and the higher partition number if these are equal. Whoever compared any two
    messages of a key instead would get another answer for each order in which they are read.
    """

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
