"""What a topic answers: stored messages, alone or in a batch with its end. Values; they read nothing by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

from marshal_py.topics.request import GetRequest

END_OF_BATCH: Final = 204


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a topic. `key` and `value` are bytes or None, or what the topic's deserializers made of them.

    `timestamp`: ms since 1970, -1 if there is none. In a batch `num_pending` is how many messages that match come after
    this one, and `last_offset` the offset of the batch's message before it in the same partition, -1 for the first.
    Without a key filter `num_pending` counts offsets, so it is too high where compaction or transactions left holes.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any
    value: Any
    headers: tuple[tuple[str, bytes], ...] = ()
    num_pending: int | None = None
    last_offset: int | None = None

    @property
    def tombstone(self) -> bool:
        """Whether it deletes its key: a message without value."""
        return self.value is None


@dataclass(frozen=True, slots=True)
class EndOfBatch:
    """How a batch ended. `num_pending`: messages that match and are not in it; 0 means that all is read.

    `last_offset`: the last offset in the batch, by partition. `up_to`: the last offset that counts, by partition, as of
    the first request: the point in time of all pages. `status` is 204, `description` "EOB", as in ADR-31.
    """

    num_pending: int
    last_offset: Mapping[int, int]
    up_to: Mapping[int, int]
    status: int = END_OF_BATCH
    description: str = "EOB"


class StoredBatch(Sequence[StoredMessage]):
    """The messages of one answer: by partition and offset for multi_last, else by time, per partition by offset."""

    def __init__(self, messages: Sequence[StoredMessage], end: EndOfBatch, following: GetRequest | None) -> None:
        self._messages, self.end, self._following = tuple(messages), end, following

    def next_request(self) -> GetRequest | None:
        """The question for the next page, at the same point in time, for `Topic.get_page`; None when all is read."""
        return self._following

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
