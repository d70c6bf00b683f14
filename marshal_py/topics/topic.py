"""Gives programs a topic as an object: reads any of its messages by offset, time or key, apart from every group.

Only `purge` and `delete_key` change it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from marshal_py.errors import BadRequest, DeserializationFailed, InvalidOption, MessageNotFound, TopicMissing
from marshal_py.protocol.wire.identity import TopicPartition, check_topic
from marshal_py.topics.changes import (
    Purged,
    PurgeTarget,
    TopicInfo,
    check_compacted,
    check_name,
    info_of,
    purge,
    write_tombstones,
)
from marshal_py.topics.key_index import IndexedReads, KeyIndex, Status
from marshal_py.topics.keys import ALL, PARTITIONERS, Key, exact, shown
from marshal_py.topics.reads import Reads, described
from marshal_py.topics.request import EndOfBatch, GetRequest, StoredBatch, StoredMessage, Time
from marshal_py.transport.connecting import check_timeout
from marshal_py.transport.ports import ClusterAdmin, MessageReader, RawMessage, Transport
from marshal_py.transport.serialization import Deserializer, check_plain, context_of

TIMEOUT_S: Final = 30.0
FOLLOW_S: Final = 0.5  # between two looks for later messages
FOLLOW_PAGE: Final = 1_000  # messages that are read before the first of them is returned

Progress = Callable[[int, int], None]


class ReportingReader:
    """A MessageReader over another one that calls `on_progress(read, wanted)` after each list: how many offsets of all
    ranges so far are done."""

    def __init__(self, reader: MessageReader, on_progress: Progress) -> None:
        self._reader, self._on_progress = reader, on_progress
        self._read = self._wanted = 0

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[RawMessage]]:
        self._wanted += sum(ends[tp] - start for tp, start in starts.items())
        for messages in self._reader.read(starts, ends, timeout_s):
            self._read += len(messages)
            self._on_progress(min(self._read, self._wanted), self._wanted)
            yield messages
        self._read = self._wanted  # holes are read, too

    def close(self) -> None:
        self._reader.close()


class Topic:
    """Reads one topic. Any thread may call it; one question is answered at a time.

    With `client.rack` among the connection's settings the nearest replica answers, once it has what the leader had when
    the question was asked. `close`, or the end of a `with` block, frees the connection.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        *,
        client_id: str = "marshal-get",
        partitioner: str = ALL,
        isolation: str = "read_committed",
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        timeout_s: float = TIMEOUT_S,
        coordination_topic: str = "",
        on_progress: Progress | None = None,
    ) -> None:
        """`coordination_topic`: may not be changed here. `on_progress(read, wanted)`: offsets read, of those to read at
        most."""
        check_topic(name)
        if partitioner not in PARTITIONERS:
            raise InvalidOption("partitioner", partitioner, f"one of {', '.join(PARTITIONERS)}")
        if isolation not in ("read_committed", "read_uncommitted"):
            raise InvalidOption("isolation", isolation, "read_committed or read_uncommitted")
        timeout_s = check_timeout(timeout_s)
        for option, given in (("key_deserializer", key_deserializer), ("value_deserializer", value_deserializer)):
            if given is not None:
                check_plain(option, given)
        self.name = name
        self._transport, self._client_id = transport, client_id
        self._partitioner, self._isolation, self._timeout_s = partitioner, isolation, timeout_s
        self._key, self._value = key_deserializer, value_deserializer
        self._coordination_topic, self._on_progress = coordination_topic, on_progress
        self._lock = threading.Lock()
        self._open: tuple[ClusterAdmin, MessageReader] | None = None
        self._index: KeyIndex | None = None

    def get(
        self,
        *,
        offset: int | None = None,
        partition: int | None = None,
        start_time: Time | None = None,
        last_by_key: Key | None = None,
        next_by_key: Key | None = None,
        batch: int | None = None,
        max_bytes: int | None = None,
        multi_last: Sequence[Key] | None = None,
        up_to_offset: int | Mapping[int, int] | None = None,
        up_to_time: Time | None = None,
        tombstones: bool = False,
    ) -> Any:
        """Returns one message, or with `batch` or `multi_last` a StoredBatch (ADR-31).

        - `offset`: exactly that message; a topic of several partitions needs `partition` as well.
        - `start_time`: the first message at or after it; a datetime or RFC 3339 text, without a zone taken as UTC.
        - `last_by_key`: the last message of this key.
        - `next_by_key`: the first message of this key, at or after `offset` or `start_time` if one is given.
        - `batch`: up to so many messages, from `offset` or `start_time` on, otherwise from the topic's beginning; with
          `next_by_key` only messages of that key.
        - `multi_last`: the last message of each of these keys, at most 1,024; `*` stands for one token between dots,
          `>` for the rest. Messages after `up_to_offset` or `up_to_time` are ignored, so the answer shows the topic as
          it was then. `up_to_offset` is a map of partition: offset, and partitions that it leaves out are ignored, too;
          or a number, which needs `partition` if the topic has several.
        - `max_bytes`: how many bytes a batch may have (topics, keys, headers and values); 64 MiB if left out. One
          message always fits.
        - `tombstones`: whether messages that delete their key are found, too; otherwise they are passed over. A batch
          without `multi_last` always has them.

        Raises BadRequest for a request that is empty or contradicts itself (408), or matches too many keys (413);
        MessageNotFound (404), TopicMissing, DeserializationFailed, AccessDenied, ClusterUnreachable; RangeLost where
        retention deletes what is read again and again.
        """
        request = GetRequest(
            offset=offset,
            partition=partition,
            start_time=start_time,
            last_by_key=last_by_key,
            next_by_key=next_by_key,
            batch=batch,
            max_bytes=max_bytes,
            multi_last=multi_last,
            up_to_offset=up_to_offset,
            up_to_time=up_to_time,
            tombstones=tombstones,
        )
        return self.get_page(request) if request.is_batch else self.find(request)

    # Without these, Python would ask `topic[0]`, `topic[1]`, ... for `in` and for iteration.
    __iter__ = None
    __contains__ = None

    def __getitem__(self, key: Key) -> StoredMessage:
        """Returns the last message of a key: ADR-31's subject-appended form, which takes no further arguments.

        Raises what `get` raises; MessageNotFound is a KeyError.
        """
        if isinstance(key, tuple | slice):
            raise BadRequest(f"topic[{key!r}]: one key and nothing else; use get() for more")
        return self.find(GetRequest(last_by_key=key))

    def find(self, request: GetRequest) -> StoredMessage:
        """Returns the answer to a request for one message. Raises what `get` raises."""
        with self._lock:
            raw = self._reads().find(request)
        return self._stored(raw, None, None)

    def get_page(self, request: GetRequest) -> StoredBatch:
        """Returns the answer to a request for a batch, for example one that `StoredBatch.next_request` returned.

        Raises what `get` raises, and BadRequest for None, which `next_request` returns after the last page. An answer
        that is continued by `next_request` or `later_request` may have nothing more, so then the batch is empty and
        MessageNotFound is not raised.
        """
        batch = self._page(request)
        if not batch and not batch.end.num_pending and not request.lower:
            raise MessageNotFound(self.name, described(request))
        return batch

    def _page(self, request: GetRequest) -> StoredBatch:
        """Returns the answer to a request for a batch, an empty one if nothing matches."""
        if not isinstance(request, GetRequest) or not request.is_batch:
            rule = "a page answers a GetRequest with batch or multi_last; after the last page, next_request() is None"
            raise BadRequest(f"request={request!r}: {rule}")
        with self._lock:
            reads = self._reads()
            page = reads.page(request)
        last: dict[int, int] = {}
        messages = []
        for raw, pending in zip(page.messages, page.pending, strict=True):
            number, at = raw.partition() or 0, raw.offset() or 0
            messages.append(self._stored(raw, pending, last.get(number, -1)))
            last[number] = at
        end = EndOfBatch(page.left, last, page.up_to)
        following = request.page(page.lower, page.up_to, reads.topic_id) if page.left else None
        return StoredBatch(messages, end, following, request.after(page.lower, page.up_to, reads.topic_id))

    def pages(self, request: GetRequest) -> Iterator[StoredBatch]:
        """Yields every page of a question. All pages show the point in time of the first one.

        If nothing matches there is one page, without messages. Otherwise raises what `get_page` raises.
        """
        following: GetRequest | None = request
        while following is not None:
            batch = self._page(following)
            yield batch
            following = batch.next_request()

    def follow(self, request: GetRequest, *, every_s: float = FOLLOW_S) -> Iterator[StoredMessage]:
        """Yields everything that answers the request, then what is written later and answers it, without end.

        `offset`, `start_time` and `next_by_key` begin there; of `last_by_key` and `multi_last` the last message of each
        key comes first, and then the last one of each key that has changed, every `every_s` seconds. Waits in between,
        so leave the loop to end it. Raises what `get` raises, but not MessageNotFound, and BadRequest for a request
        with `up_to_offset` or `up_to_time` and for a topic that was deleted and created again.
        """
        following = request.followed(FOLLOW_PAGE)
        while True:
            for page in self.pages(following):
                yield from page
                later = page.later_request()
            following = later
            time.sleep(every_s)

    def info(self) -> TopicInfo:
        """Returns what the cluster says of the topic. Raises TopicMissing, ClusterUnreachable, AccessDenied."""
        with self._lock:
            admin, _ = self._connection()
            return info_of(admin, self.name)

    def purge(
        self,
        *,
        before_offset: int | Mapping[int, int] | None = None,
        before_time: Time | None = None,
        keep: int | None = None,
        partition: int | None = None,
        dry_run: bool = False,
    ) -> dict[int, Purged]:
        """Deletes the beginning of partitions, for good. Returns by partition number where it began and begins now.

        Name exactly one of `before_offset`, `before_time` and `keep`. `before_offset` deletes messages with lower
        offsets (a number with `partition`, or a map of partition: offset). `before_time` deletes older messages (a
        datetime or RFC 3339 text, without a zone taken as UTC). `keep` deletes all but the last so many offsets of each
        partition. `partition` limits the purge to one partition. With `dry_run` nothing is deleted. Kafka deletes by
        DeleteRecords (KIP-107).

        Raises BadRequest if none or several are named and for an offset beyond the end, InvalidOption for the
        coordination topic and Kafka's own, TopicMissing, UnsupportedPlatform, ClusterUnreachable. Raises TopicRefused
        where Kafka refuses (a topic that is compacted only, a missing right); then partitions with lower numbers have
        been purged already.
        """
        check_name(self.name, self._coordination_topic)
        with self._lock:
            admin, _ = self._connection()
            target = PurgeTarget(before_offset, before_time, keep, partition)
            return purge(admin, self.name, target, dry_run)

    def delete_key(self, key: Key, *, partition: int | None = None) -> dict[int, int]:
        """Deletes a key of a compacted topic: writes a tombstone, a message with the key and without a value.

        From then on the key is not found (404, unless `tombstones` is asked for), and Kafka removes its older messages
        when it compacts. Returns the tombstone's offset by partition number. The tombstone goes to `partition`, or to
        the one that the topic's `partitioner` chooses. If neither is given, it goes to every partition that has the
        key, which must be searched for it, even if the topic has one partition alone.

        Raises BadRequest for a topic without compaction, MessageNotFound if the search finds nothing to delete,
        BadRequest for a key that is none and for a partition that does not exist, InvalidOption for the coordination
        topic and Kafka's own, TopicMissing, AccessDenied, ClusterUnreachable.
        """
        check_name(self.name, self._coordination_topic)
        wanted = exact("key", key)
        with self._lock:
            reads = self._reads()
            number = reads.partition_of(wanted, partition)
            check_compacted(self._connection()[0], self.name)
            numbers = reads.partitions_with(wanted) if number is None else [number]
            if not numbers:
                raise MessageNotFound(self.name, f"key={shown(key)}")
            return write_tombstones(self._transport, self.name, wanted, numbers, self._timeout_s)

    def key_index(self, path: str | Path) -> KeyIndex:
        """Opens the key index in this file, or creates it, and answers questions by key with it from now on.

        Each question brings the index up to date first. For a long topic that takes a while the first time;
        `update_index` does it beforehand.

        The file also has a copy of the last message of each key, so `last_by_key` and `multi_last` as of now read
        nothing from Kafka. Messages of more than 64 KiB and tombstones are not copied. Nothing is with
        read_uncommitted, whose newest messages go when their transaction aborts, nor on a cluster without topic ids
        (Apache Kafka before 2.8).

        Raises FileUnusable, IndexBusy, TopicMissing, ClusterUnreachable.
        """
        with self._lock:
            admin, _ = self._connection()
            there = admin.describe_topic(self.name)
            if there is None:
                raise TopicMissing(self.name)
            index = KeyIndex(path, self.name, there.topic_id, self._isolation)
            if self._index is not None:
                self._index.close()
            self._index = index
            return index

    def update_index(self) -> Status:
        """Indexes everything that the topic holds now. Returns what the index holds then.

        Raises InvalidOption if `key_index` was not called, IndexBusy if another process writes the index for 30 s,
        FileUnusable.
        """
        with self._lock:
            self._indexed().update()
        return self.index_status()

    def index_status(self) -> Status:
        """Returns what the index holds, and how far it is behind the topic. Changes nothing.

        Raises InvalidOption if `key_index` was not called.
        """
        with self._lock:
            reads = self._indexed()
            assert self._index is not None
            return self._index.status({tp: bounds.end for tp, bounds in reads.bounds().items()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and the index. A later question opens another connection, without the index."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None
            if self._open is not None:
                for part in self._open:
                    part.close()
                self._open = None

    def _indexed(self) -> IndexedReads:
        reads = self._reads()
        if not isinstance(reads, IndexedReads):
            raise InvalidOption("key_index", None, "open one first: topic.key_index(path)", given=False)
        return reads

    def _connection(self) -> tuple[ClusterAdmin, MessageReader]:
        if self._open is None:
            settings = {"isolation.level": self._isolation}
            self._open = self._transport.admin(), self._transport.reader(self._client_id, settings)
        return self._open

    def _reads(self) -> Reads:
        committed, (admin, reader) = self._isolation == "read_committed", self._connection()
        if self._on_progress is not None:
            reader = ReportingReader(reader, self._on_progress)
        arguments = (self.name, admin, reader, PARTITIONERS[self._partitioner], committed, self._timeout_s)
        return Reads(*arguments) if self._index is None else IndexedReads(*arguments, self._index)

    def _stored(self, raw: RawMessage, pending: int | None, last_offset: int | None) -> StoredMessage:
        kind, at_ms = raw.timestamp()
        topic, headers = raw.topic() or self.name, raw.headers()
        return StoredMessage(
            topic,
            raw.partition() or 0,
            raw.offset() or 0,
            at_ms if kind else -1,
            _deserialized(raw, "key", raw.key(), self._key),
            _deserialized(raw, "value", raw.value(), self._value),
            tuple(headers or ()),
            pending,
            last_offset,
        )

    def __repr__(self) -> str:
        return f"Topic({self.name!r})"


def _deserialized(raw: RawMessage, field: str, content: bytes | None, read: Deserializer | None) -> Any:
    if read is None:
        return content
    try:
        return read(content, context_of(raw, field))
    except Exception as error:  # whatever the user's function raises
        where = raw.topic() or "", raw.partition() or 0, raw.offset() or 0
        raise DeserializationFailed(*where, field, repr(error)) from error
