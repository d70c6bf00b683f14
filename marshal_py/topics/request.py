"""One question to a topic, checked, as in JetStream's Direct Get (ADR-31), and its answer: messages, alone or batched.

It reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Self, overload

from marshal_py.errors import BadRequest
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.topics.keys import Key, exact, matcher
from marshal_py.transport.option_names import constructor_checks_names
from marshal_py.transport.ports import RawMessage

MAX_BYTES_DEFAULT: Final = 64 * 1024 * 1024  # as in ADR-31: what a server sends at most without max_bytes
KEYS_MAX: Final = 1024  # keys that one multi_last may name or find
TOO_MANY: Final = 413  # ADR-31's status for more of them
NOT_BEGUN: Final = -1  # in `lower`: no message of the partition is at or after `start_time` yet
Time = str | datetime


def too_many_keys(keys: int) -> BadRequest:
    return BadRequest(
        f"multi_last matches {keys} keys, at most {KEYS_MAX} are answered: name fewer keys, or read the topic with a "
        "consumer",
        TOO_MANY,
    )


@constructor_checks_names()
@dataclass(frozen=True, kw_only=True)
class GetRequest:
    """Says what `Topic.get` was asked. Its construction raises BadRequest (408, 413). Fields mean what they mean in
    `Topic.get`. `StoredBatch.next_request` makes the request for the next page: there `lower` is the first offset of
    each partition that is still to be read, `up_to_offset` the last one that the answer covers, and `topic_id` Kafka's
    id of the topic, so that all pages show one topic at one point in time."""

    offset: int | None = None
    partition: int | None = None
    start_time: Time | None = None
    last_by_key: Key | None = None
    next_by_key: Key | None = None
    batch: int | None = None
    max_bytes: int | None = None
    multi_last: Sequence[Key] | None = None
    up_to_offset: int | Mapping[int, int] | None = None
    up_to_time: Time | None = None
    tombstones: bool = False
    lower: Mapping[int, int] = field(default_factory=dict)
    topic_id: str = ""

    def __post_init__(self) -> None:
        if self.asks_nothing:
            raise BadRequest(
                "the request is empty: name offset=, start_time=, last_by_key=, next_by_key=, batch= or multi_last="
            )
        for name, least in (("offset", 0), ("partition", 0), ("batch", 1), ("max_bytes", 1)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least)
        if type(self.tombstones) is not bool:
            raise BadRequest(f"tombstones={self.tombstones!r}: True or False")
        self._check_combination()
        self._check_keys()
        for name in ("start_time", "up_to_time"):
            if getattr(self, name) is not None:
                time_ms(name, getattr(self, name))
        self._check_up_to()

    @property
    def asks_nothing(self) -> bool:
        wanted = (self.offset, self.start_time, self.last_by_key, self.next_by_key, self.batch, self.multi_last)
        return all(value is None for value in wanted)

    @property
    def is_batch(self) -> bool:
        """Returns whether the answer is a StoredBatch."""
        return self.batch is not None or self.multi_last is not None

    @property
    def key(self) -> bytes | None:
        """Returns the key that last_by_key or next_by_key names, as bytes; None if neither is given."""
        key = self.next_by_key if self.last_by_key is None else self.last_by_key
        return None if key is None else exact("last_by_key" if self.next_by_key is None else "next_by_key", key)

    def page(self, lower: Mapping[int, int], up_to: Mapping[int, int], topic_id: str) -> Self:
        """Returns the question about what is left, at the same point in time: from `lower` to `up_to` by partition, of
        the topic `topic_id`."""
        return replace(
            self,
            offset=None,
            start_time=self.start_time if NOT_BEGUN in lower.values() else None,
            lower=dict(lower),
            up_to_offset=dict(up_to),
            up_to_time=None,
            topic_id=topic_id,
            batch=self.batch or OFFSET_MAX,
        )

    def followed(self, page: int) -> Self:
        """Returns the request whose pages, and those of `after` it, are everything that matches, now and later. `page`:
        messages per page by default. Raises BadRequest if the request has an end."""
        if self.up_to_offset is not None or self.up_to_time is not None:
            raise BadRequest("up_to_offset and up_to_time end the answer, so it cannot be followed")
        if self.last_by_key is not None:
            key = self.key
            assert key is not None
            return replace(self, last_by_key=None, multi_last=[key], batch=page)
        return replace(self, batch=self.batch or page)

    def after(self, lower: Mapping[int, int], up_to: Mapping[int, int], topic_id: str) -> Self:
        """Returns the same question about messages that came later, none before its own start. The arguments mean what
        they mean in `page`."""
        least = self.offset or 0
        starts = {
            partition: max(offset + 1, least, self.lower.get(partition, 0))
            if lower[partition] != NOT_BEGUN
            else NOT_BEGUN
            for partition, offset in up_to.items()
        }
        return replace(
            self,
            offset=None,
            start_time=self.start_time if NOT_BEGUN in starts.values() else None,
            lower=starts,
            up_to_offset=None,
            up_to_time=None,
            topic_id=topic_id,
        )

    def _check_combination(self) -> None:
        if self.last_by_key is not None:
            self._refuse("last_by_key", "offset", "start_time", "next_by_key", "batch", "max_bytes", "multi_last")
        if self.multi_last is not None:
            self._refuse("multi_last", "offset", "start_time", "next_by_key")
        if self.offset is not None:
            self._refuse("offset", "start_time")
        if not self.is_batch and self.max_bytes is not None:
            raise BadRequest("max_bytes bounds a batch: give batch= or multi_last= as well")
        if self.up_to_offset is not None and self.up_to_time is not None:
            raise BadRequest("up_to_offset and up_to_time contradict each other: give one")
        if (
            self.multi_last is None
            and not self.lower
            and (self.up_to_offset is not None or self.up_to_time is not None)
        ):
            raise BadRequest("up_to_offset and up_to_time belong to multi_last")

    def _refuse(self, name: str, *others: str) -> None:
        given = [other for other in others if getattr(self, other) is not None]
        if given:
            raise BadRequest(f"{name}= and {'=, '.join(given)}= contradict each other: give one")

    def _check_keys(self) -> None:
        _ = self.key
        if self.multi_last is None:
            return
        is_list = isinstance(self.multi_last, Collection) and not isinstance(self.multi_last, str | bytes | Mapping)
        if not is_list or not self.multi_last:
            raise BadRequest(f"multi_last={self.multi_last!r}: a list of keys and patterns, at least one")
        if len(self.multi_last) > KEYS_MAX:
            raise too_many_keys(len(self.multi_last))
        for pattern in self.multi_last:
            matcher(pattern)

    def _check_up_to(self) -> None:
        if isinstance(self.up_to_offset, Mapping):
            for partition, offset in self.up_to_offset.items():
                check_number("up_to_offset's partition", partition, 0)
                check_number("up_to_offset", offset, -1)
        elif self.up_to_offset is not None:
            check_number("up_to_offset", self.up_to_offset, 0)


def check_number(name: str, value: object, least: int) -> None:
    """Raises BadRequest for a value of the argument `name` that is no int from `least` to OFFSET_MAX."""
    if type(value) is not int or not least <= value <= OFFSET_MAX:
        raise BadRequest(f"{name}={value!r}: a whole number, at least {least} and at most {OFFSET_MAX}")


def epoch_ms(when: str | datetime) -> int:
    """Returns a datetime or ISO-8601 text, UTC without a zone, as ms since 1970. Raises ValueError."""
    at = datetime.fromisoformat(when) if isinstance(when, str) else when
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return max(0, round(at.timestamp() * 1000))


def time_ms(name: str, when: object) -> int:
    """Returns the time in the argument `name` as ms since 1970. Raises BadRequest."""
    try:
        if isinstance(when, str | datetime):
            return epoch_ms(when)
    except ValueError:
        pass
    raise BadRequest(f"{name}={when!r}: a datetime, or a time as 2026-01-31T12:00:00Z")


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
