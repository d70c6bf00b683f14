"""A key index: keeps in one SQLite file where the messages of each key are, and answers questions by key from it.

An index has an entry with offset and time of each message, and a copy of the last message of each key and partition.
It is filled step by step. For each partition it keeps the offset up to which it has entries and copies. Copies and that
offset are written by one transaction. Entries may be written before it: after a crash the same messages are read again,
and their entries are there already. One process writes at a time, and any number read meanwhile (SQLite's write-ahead
log). An entry whose message is gone (retention, compaction) is harmless: the message is not found, and the reader takes
the key's entry before it.

The answers are those that `Reads` gives by reading everything. Before each answer the index catches up with the topic
as it is at that moment. The last message of a key comes from the index itself if that has a copy, and from Kafka
otherwise. While another process is writing the index, `Reads` answers instead. It also answers batches of a key on a
compacted topic, because the index still counts messages that compaction has removed.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import methodcaller
from pathlib import Path
from typing import Final, NamedTuple, Self
from zlib import crc32

import msgspec

from marshal_py.errors import FileUnusable, IndexBusy
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.keys import ONE, REST, SEPARATOR, exact, has_wildcard, matcher
from marshal_py.topics.reads import Offsets, Page, Reads, place
from marshal_py.topics.request import KEYS_MAX, GetRequest, age, too_many_keys
from marshal_py.transport.memory import MemoryMessage
from marshal_py.transport.ports import Bounds, RawMessage

SCHEMA_VERSION: Final = 2
LOCK_TIMEOUT_S: Final = 30.0
COPY_BYTES_MAX: Final = 65_536  # of value and headers; Kafka hands out a larger message as fast as SQLite
CACHE_KIB: Final = 32_768  # of pages at most; a build touches pages everywhere, and SQLite's default is 2 MB
PAGE_BYTES: Final = 8_192  # fewer pages for a build to find and to write than with SQLite's 4,096
LOG_PAGES: Final = 8_192  # of the write-ahead log before SQLite merges it into the file: 64 MiB
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS about (topic TEXT, topic_id TEXT, isolation TEXT, version INTEGER);
CREATE TABLE IF NOT EXISTS progress (partition INTEGER PRIMARY KEY, next_offset INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entry (
    key BLOB, partition INTEGER, offset INTEGER, time_ms INTEGER NOT NULL, PRIMARY KEY (key, partition, offset)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS last_message (
    key BLOB, partition INTEGER, offset INTEGER NOT NULL, content BLOB, checksum INTEGER, PRIMARY KEY (key, partition)
);
"""
ROWS_AT_ONCE: Final = 50  # that one statement inserts: each run of a statement costs as much as a row
_ADD_ENTRY: Final = "INSERT OR IGNORE INTO entry VALUES (?, ?, ?, ?)"
_ADD_COPY: Final = """
INSERT INTO last_message VALUES (?, ?, ?, ?, ?) ON CONFLICT (key, partition) DO UPDATE
SET offset = excluded.offset, content = excluded.content, checksum = excluded.checksum
WHERE excluded.offset > last_message.offset
"""
_DELETE_COPY: Final = "DELETE FROM last_message WHERE key = ? AND partition = ? AND offset < ?"
_OF_KEY: Final = (
    "SELECT key, partition, offset, time_ms FROM entry WHERE key = ? AND partition = ? AND offset >= ? AND offset < ?"
)
_TEMPORARY: Final = """
CREATE TEMP TABLE wanted_key (key BLOB);
CREATE TEMP TABLE wanted_span (partition INTEGER, first INTEGER, end INTEGER);
"""
_LASTS: Final = """
SELECT entry.key, entry.partition, entry.offset, entry.time_ms, last.content, last.checksum
FROM temp.wanted_key AS wanted CROSS JOIN temp.wanted_span AS span CROSS JOIN entry
    ON entry.key = wanted.key AND entry.partition = span.partition AND entry.offset = (
        SELECT max(offset) FROM entry
        WHERE key = wanted.key AND partition = span.partition AND offset >= span.first AND offset < span.end)
LEFT JOIN last_message AS last
    ON last.key = entry.key AND last.partition = entry.partition AND last.offset = entry.offset
"""
_content: Final = msgspec.msgpack.Decoder(tuple[bytes, list[tuple[str, bytes | None]] | None])  # value and headers
_encode: Final = msgspec.msgpack.Encoder().encode


class Entry(NamedTuple):
    """Says where one message of a key is, and its time."""

    key: bytes
    partition: int
    offset: int
    time_ms: int


class EntryColumns(NamedTuple):
    """Entries as lists of equal length, one per field of an Entry."""

    keys: list[bytes]
    partitions: list[int]
    offsets: list[int]
    times_ms: list[int]


class Lasts(NamedTuple):
    """By key the offset and the content (see `contents_of`) of its last message in one partition."""

    offsets: dict[bytes, int]
    contents: dict[bytes, bytes | None]


class Status(msgspec.Struct, frozen=True):
    """Says what an index holds. `behind`: how many offsets it has not read yet, over all partitions. `copies`: of how
    many messages it also has the value and headers."""

    topic: str
    keys: int
    messages: int
    behind: int
    copies: int


class KeyIndex:
    """The index of one topic in a file. `Topic.key_index` makes it. One thread at a time; a context manager."""

    path: Path
    topic: str
    topic_id: str  # that the file is bound to; "" if the cluster had no topic ids when it was created
    has_copies: bool  # not of messages whose transaction may abort, nor of a topic that may be another one by now

    def __init__(self, path: str | Path, topic: str, topic_id: str, isolation: str) -> None:
        """Opens or creates the file. `topic_id`: "" without ids. `isolation`: which messages there are. Raises
        FileUnusable if it is another topic's or isolation's, or no index; IndexBusy after 30 s of another writer."""
        self.path, self.topic, self.topic_id = Path(path), topic, topic_id
        try:
            self._database = sqlite3.connect(
                self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise FileUnusable(str(path), f"{error}: give a path in a folder that exists and may be written") from error
        try:
            with self._errors():
                self._database.execute(f"PRAGMA page_size={PAGE_BYTES}")  # of a new file
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute("PRAGMA synchronous=NORMAL")
                self._database.execute(f"PRAGMA cache_size={-CACHE_KIB}")
                self._database.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
                self._database.executescript(_SCHEMA + _TEMPORARY)
                self._check(topic, topic_id, isolation)
                self.has_copies = bool(self.topic_id) and isolation == "read_committed"
        except BaseException:
            self._database.close()
            raise

    def _check(self, topic: str, topic_id: str, isolation: str) -> None:
        with self._transaction():
            found = self._database.execute("SELECT topic, topic_id, isolation, version FROM about").fetchone()
            if found is None:
                row = (topic, topic_id, isolation, SCHEMA_VERSION)
                self._database.execute("INSERT INTO about VALUES (?, ?, ?, ?)", row)
                return
        if found[3] != SCHEMA_VERSION:
            raise FileUnusable(
                str(self.path), f"it has version {found[3]}, this release reads {SCHEMA_VERSION}: delete it"
            )
        if found[0] != topic:
            raise FileUnusable(
                str(self.path), f"it is the index of topic {found[0]!r}: give {topic!r} a file of its own"
            )
        self.topic_id = found[1]
        self._check_id(topic_id)
        if found[2] != isolation:
            raise FileUnusable(str(self.path), f"it was built for {found[2]}: give {isolation} a file of its own")

    def _check_id(self, topic_id: str) -> None:
        if self.topic_id and topic_id and self.topic_id != topic_id:
            raise FileUnusable(
                str(self.path), f"topic {self.topic!r} was deleted and created again since: delete the file"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    # --- writing

    def add(self, entries: EntryColumns, wait: bool) -> None:
        """Adds entries in one transaction. Raises IndexBusy while another process writes; with `wait` after 30 s."""
        # Sorted, so that rows that follow each other are neighbours in the file.
        order = sorted(range(len(entries.keys)), key=entries.keys.__getitem__)
        cut = len(order) - len(order) % ROWS_AT_ONCE
        with self._errors(), self._transaction(wait):
            for part, count in ((order[:cut], ROWS_AT_ONCE), (order[cut:], 1)):
                rows = zip(*[map(column.__getitem__, part) for column in entries], strict=True)
                values = chain.from_iterable(rows)
                sql = _ADD_ENTRY + ", (?, ?, ?, ?)" * (count - 1)
                self._database.executemany(sql, zip(*[values] * (4 * count), strict=True))

    def reach(self, lasts: Mapping[int, Lasts], progress: Mapping[TopicPartition, int], wait: bool) -> None:
        """Copies messages and notes the offset after the last indexed one (`progress`), in one transaction; all entries
        must be there. `lasts`: by partition, the last message of each key since the last call; nothing without
        `has_copies`. `wait`: as in `add`."""
        with self._errors(), self._transaction(wait):
            for partition, (offsets, contents) in lasts.items():
                kept = sorted([(key, content) for key, content in contents.items() if content is not None])
                copies = ((key, partition, offsets[key], content, crc32(content)) for key, content in kept)
                self._database.executemany(_ADD_COPY, copies)
                outdated = sorted([key for key, content in contents.items() if content is None])
                self._database.executemany(_DELETE_COPY, ((key, partition, offsets[key]) for key in outdated))
            self._database.executemany(
                "INSERT INTO progress VALUES (?, ?) ON CONFLICT (partition) DO UPDATE SET "
                "next_offset = max(next_offset, excluded.next_offset)",
                [(tp.partition, offset) for tp, offset in progress.items()],
            )

    def check(self, bounds: Mapping[TopicPartition, Bounds], topic_id: str) -> None:
        """Raises FileUnusable if the topic has another id ("" without ids), or a partition ends below what was
        indexed: it was created again, or lost its newest messages."""
        self._check_id(topic_id)
        reached = self.progress()
        for tp, found in bounds.items():
            if reached.get(tp.partition, 0) > found.end:
                raise FileUnusable(
                    str(self.path),
                    f"it has read {tp} up to {reached[tp.partition]} and the log ends at {found.end}: the topic was "
                    "created again or lost its tail; delete the file",
                )

    def forget(self, bounds: Mapping[TopicPartition, Bounds], wait: bool) -> None:
        """Deletes the entries below the first offset of each partition. `wait` means what it means in `add`."""
        gone = [(tp.partition, found.first) for tp, found in bounds.items() if found.first > 0]
        with self._errors(), self._transaction(wait):
            for table in ("entry", "last_message"):
                self._database.executemany(f"DELETE FROM {table} WHERE partition = ? AND offset < ?", gone)

    # --- looking

    def progress(self) -> dict[int, int]:
        """Returns by partition the offset up to which it is indexed."""
        with self._errors():
            return dict(self._database.execute("SELECT partition, next_offset FROM progress"))

    def newest(self, key: bytes, partition: int, start: int, end: int) -> Entry | None:
        """Returns a key's last entry in a partition with an offset from `start` to `end` - 1, else None."""
        with self._errors():
            found = self._database.execute(
                f"{_OF_KEY} ORDER BY offset DESC LIMIT 1", (key, partition, start, end)
            ).fetchone()
        return None if found is None else Entry._make(found)

    def lasts(
        self, keys: Iterable[bytes], spans: Mapping[int, tuple[int, int]]
    ) -> list[tuple[Entry, RawMessage | None]]:
        """Returns the last entry of each key in each partition, and its copy if any, by one statement. `spans`: by
        partition, [first, end)."""
        with self._errors():
            self._database.execute("DELETE FROM temp.wanted_key")
            self._database.execute("DELETE FROM temp.wanted_span")
            self._database.executemany("INSERT INTO temp.wanted_key VALUES (?)", [(key,) for key in keys])
            rows = [(partition, start, end) for partition, (start, end) in spans.items()]
            self._database.executemany("INSERT INTO temp.wanted_span VALUES (?, ?, ?)", rows)
            return [(Entry._make(row[:4]), self._copy_of(*row)) for row in self._database.execute(_LASTS)]

    def _copy_of(
        self, key: bytes, partition: int, offset: int, time_ms: int, content: bytes | None, checksum: int
    ) -> RawMessage | None:
        if content is None:
            return None
        if crc32(content) != checksum:  # SQLite itself has none, and nobody reads the message again
            raise FileUnusable(str(self.path), f"its copy of {self.topic}:{partition}@{offset} is damaged: delete it")
        value, headers = _content.decode(content)
        return MemoryMessage(self.topic, partition, offset, key, value, headers, time_ms)

    def following(self, key: bytes, partition: int, start: int, end: int) -> Iterator[Entry]:
        """Yields a key's entries in a partition with offsets from `start` to `end` - 1, in offset order."""
        with self._errors():
            yield from map(
                Entry._make, self._database.execute(f"{_OF_KEY} ORDER BY offset", (key, partition, start, end))
            )

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        """Yields the keys that begin with these bytes, in order."""
        after = _after(prefix)
        sql, values = "SELECT DISTINCT key FROM entry WHERE key >= ?", (prefix,)
        if after is not None:
            sql, values = sql + " AND key < ?", (prefix, after)  # type: ignore[assignment]
        with self._errors():
            for (key,) in self._database.execute(sql, values):
                yield key

    def status(self, ends: Mapping[TopicPartition, int]) -> Status:
        """Returns what the index holds, and how far it is behind. `ends`: the end offset of each partition."""
        reached = self.progress()
        with self._errors():
            [(keys, messages)] = self._database.execute("SELECT count(DISTINCT key), count(*) FROM entry")
            [(copies,)] = self._database.execute("SELECT count(*) FROM last_message")
        behind = sum(max(0, end - reached.get(tp.partition, 0)) for tp, end in ends.items())
        return Status(self.topic, keys, messages, behind, copies)

    # --- the file

    @contextmanager
    def _transaction(self, wait: bool = True) -> Iterator[None]:
        self._database.execute(f"PRAGMA busy_timeout={int(LOCK_TIMEOUT_S * 1000) if wait else 0}")
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite has ended it already if the disk is full
                self._database.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns SQLite's errors into IndexBusy and FileUnusable. A full disk or a damaged file leave the index as it
        was."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise IndexBusy(str(self.path), LOCK_TIMEOUT_S) from error
            raise FileUnusable(str(self.path), _with_way_out(str(error))) from error
        except sqlite3.DatabaseError as error:
            raise FileUnusable(str(self.path), f"{error}: it is no index, or damaged; delete the file") from error


def contents_of(messages: Iterable[RawMessage], kinds: Iterable[int]) -> list[bytes | None]:
    """Returns value and headers of each message as bytes; None for one that is not copied: a tombstone (only the topic
    knows whether it is there), without a time, or too large. `kinds`: of timestamps, 0 for none."""
    found = [
        _encode((message.value(), message.headers())) if kind and message.value() is not None else None
        for message, kind in zip(messages, kinds, strict=True)
    ]
    return [None if content is None or len(content) > COPY_BYTES_MAX else content for content in found]


def _with_way_out(reason: str) -> str:
    """Returns SQLite's reason with what people can do about it."""
    if "full" in reason:
        return f"{reason}: make room, or give a path on another disk; the index is as it was"
    if "readonly" in reason:
        return f"{reason}: give a file that may be written"
    return f"{reason}: delete the file"


def _after(prefix: bytes) -> bytes | None:
    """Returns the smallest bytes that are greater than all bytes with this prefix; None if there are none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def prefix_of(pattern: str, separator: str, wildcards: Sequence[str]) -> bytes:
    """Returns the bytes with which every key begins that matches a pattern of `separator` and `wildcards`."""
    fixed: list[str] = []
    for token in pattern.split(separator):
        if token in wildcards:
            return (separator.join(fixed) + separator if fixed else "").encode(errors="surrogateescape")
        fixed.append(token)
    return pattern.encode(errors="surrogateescape")


ADD_AT_ONCE: Final = 100_000  # entries of one transaction; more are hardly faster
# How much is read between two writes of copies: what an update reads again after a crash. The more, the fewer messages
# are copied that are not the last of their key.
REACH_MESSAGES: Final = 1_000_000
REACH_KEYS: Final = 200_000  # with the last message of each in memory
REACH_BYTES: Final = 128 * 1024 * 1024  # of keys and of what is copied
GAP_MAX: Final = 500  # offsets that are read and thrown away: they come with the same fetch, or cost as much as one


@dataclass(eq=False)
class IndexedReads(Reads):
    """Finds what a GetRequest asks for in one topic, by key with the topic's index. One thread at a time."""

    _index: KeyIndex
    _compacted: bool | None = field(default=None, init=False)

    # --- the index

    def update(self) -> None:
        """Adds everything to the index that the topic holds now. Raises IndexBusy after 30 s."""
        self._catch_up(self.bounds(), wait=True)

    def _is_current(self) -> bool:
        """Brings the index up to the moment of the present question. Returns False if another process writes it."""
        return self._catch_up(self._bounds, wait=False)

    def _catch_up(self, bounds: Mapping[TopicPartition, Bounds], wait: bool) -> bool:
        """Indexes what came since. True if up to date, as for the partitions of `bounds`; False while another process
        writes, or with `wait`, after 30 s, IndexBusy."""
        self._index.check(bounds, self.topic_id)
        reached = self._index.progress()
        starts = {tp: max(found.first, reached.get(tp.partition, 0)) for tp, found in bounds.items()}
        behind = {tp: start for tp, start in starts.items() if start < bounds[tp].end}
        try:
            if behind:
                self._index_range(behind, {tp: bounds[tp].end for tp in behind}, wait)
            if any(found.first > 0 for found in bounds.values()) and behind:
                self._index.forget(bounds, wait)
        except IndexBusy:
            if wait:
                raise
            return False
        return True

    def _index_range(self, starts: Offsets, ends: Offsets, wait: bool) -> None:
        new = _Unwritten(self._index.has_copies)
        for messages in self._read(starts, ends):
            for number, run in groupby(messages, methodcaller("partition")):
                new.append(number or 0, list(run))
            full = new.is_full()
            if full or len(new.entries.keys) >= ADD_AT_ONCE:
                self._index.add(new.entries, wait)
                new.entries = EntryColumns([], [], [], [])
            if full:
                progress = {TopicPartition(self.topic, number): offset for number, offset in new.progress.items()}
                self._index.reach(new.lasts, progress, wait)
                new = _Unwritten(self._index.has_copies)
        self._index.add(new.entries, wait)
        self._index.reach(new.lasts, ends, wait)

    def bounds(self) -> dict[TopicPartition, Bounds]:
        """Returns first and end offset of every partition."""
        return self._admin.bounds(self._partitions(GetRequest(batch=1)), committed=self._committed)

    def _is_compacted(self) -> bool:
        if self._compacted is None:
            self._compacted = "compact" in self._admin.settings(self.topic).get("cleanup.policy", "")
        return self._compacted

    # --- answers

    def _lasts(self, keys: set[bytes], starts: Offsets, ends: Offsets) -> dict[bytes, RawMessage]:
        if not self._is_current():
            return super()._lasts(keys, starts, ends)
        found: dict[bytes, RawMessage] = {}
        undecided: dict[bytes, dict[int, tuple[Entry, RawMessage | None]]] = {}  # by key and partition, the last entry
        fresh = {tp.partition for tp in starts if self._copies_count(tp, ends)}
        spans = {tp.partition: (self._bounds[tp].first, ends[tp]) for tp in starts}
        for entry, copy in self._index.lasts(keys, spans):
            lasts = undecided.setdefault(entry.key, {})
            lasts[entry.partition] = entry, copy if entry.partition in fresh else None
        while undecided:  # mostly once: an entry whose message is gone makes a second look for its key
            newest = {key: max(lasts.values(), key=lambda last: _age(last[0])) for key, lasts in undecided.items()}
            wanted = [entry for entry, copy in newest.values() if copy is None and self._matters(entry, starts)]
            by_place = {TopicPartition(self.topic, entry.partition): dict[int, bytes]() for entry in wanted}
            for entry in wanted:
                by_place[TopicPartition(self.topic, entry.partition)][entry.offset] = entry.key
            there = self._fetch(by_place)
            for key, (entry, copy) in newest.items():
                tp, lasts = TopicPartition(self.topic, entry.partition), undecided[key]
                message = there.get(tp, {}).get(entry.offset) if copy is None else copy
                if message is None and self._matters(entry, starts):  # it is gone
                    before = self._index.newest(key, entry.partition, self._bounds[tp].first, entry.offset)
                    del lasts[entry.partition]
                    if before is not None:
                        lasts[entry.partition] = before, None
                    if lasts:
                        continue
                elif message is not None and entry.offset >= starts[tp]:
                    found[key] = message
                del undecided[key]
        return found

    def _matters(self, entry: Entry, starts: Offsets) -> bool:
        """Returns whether the answer depends on the entry's message: it is in the span, or may be compacted away, so
        that another one may be the last."""
        return entry.offset >= starts[TopicPartition(self.topic, entry.partition)] or self._is_compacted()

    def _copies_count(self, tp: TopicPartition, ends: Offsets) -> bool:
        """Returns whether Kafka certainly still has the copied messages of a partition. The newest of a key is never
        compacted away, and retention deletes below the first offset; as of an earlier offset it is read. Only the
        topic's id shows that it is the indexed one."""
        return self._index.has_copies and self._index.topic_id == self.topic_id and ends[tp] >= self._bounds[tp].end

    def _newest(self, request: GetRequest, starts: Offsets, ends: Offsets) -> dict[bytes, RawMessage]:
        patterns = request.multi_last or ()
        wild = [pattern for pattern in patterns if isinstance(pattern, str) and has_wildcard(pattern)]
        if not wild or not self._is_current():
            return super()._newest(request, starts, ends)
        keys = {exact("multi_last", pattern) for pattern in patterns if pattern not in wild}
        for pattern in wild:
            test = matcher(pattern)
            keys |= {key for key in self._index.keys(prefix_of(pattern, SEPARATOR, (ONE, REST))) if test(key)}
        if not self._is_compacted():  # the entries are enough to count, and nothing is read if they are too many
            keys = {key for key in keys if self._is_in_span(key, starts, ends)}
            if len(keys) > KEYS_MAX:
                raise too_many_keys(len(keys))
        return self._lasts(keys, starts, ends)

    def _is_in_span(self, key: bytes, starts: Offsets, ends: Offsets) -> bool:
        """Returns whether a key's last entry, over all partitions, is in the span."""
        looks = (self._index.newest(key, tp.partition, self._bounds[tp].first, ends[tp]) for tp in starts)
        last = max([entry for entry in looks if entry is not None], key=_age, default=None)
        return last is not None and last.offset >= starts[TopicPartition(self.topic, last.partition)]

    def _first(self, request: GetRequest) -> RawMessage | None:
        key = request.key
        if key is None:
            return super()._first(request)
        starts, ends = self._span(request)  # before the index catches up, so that it covers the span
        if not self._is_current():
            return super()._first(request)
        found: list[RawMessage] = []
        for tp, start in starts.items():
            for entry in self._index.following(key, tp.partition, start, ends[tp]):
                message = self._fetch({tp: {entry.offset: key}})[tp].get(entry.offset)
                if message is not None and (message.value() is not None or request.tombstones):
                    found.append(message)
                    break
        return min(found, key=age, default=None)

    def _following(self, request: GetRequest, starts: Offsets, ends: Offsets) -> Page:
        key = request.key
        if key is None or self._is_compacted() or not self._is_current():
            return super()._following(request, starts, ends)
        wanted: dict[TopicPartition, dict[int, bytes]] = {}
        total = 0
        for tp, start in starts.items():
            entries: Sequence[Entry] = list(self._index.following(key, tp.partition, start, ends[tp]))
            total += len(entries)
            wanted[tp] = {entry.offset: key for entry in entries[: request.batch]}
        kept = {tp: [there[offset] for offset in sorted(there)] for tp, there in self._fetch(wanted).items()}
        total -= sum(len(offsets) - len(kept[tp]) for tp, offsets in wanted.items())  # what retention deleted meanwhile
        return self._page_of(request, kept, total, starts, ends)

    def _fetch(
        self, wanted: Mapping[TopicPartition, Mapping[int, bytes]]
    ) -> dict[TopicPartition, dict[int, RawMessage]]:
        """Returns the messages that still exist at these offsets. `wanted`: by partition, the key of each offset. Near
        offsets are read together, all partitions at once. Raises FileUnusable for another key: the topic was created
        again on a cluster without ids."""
        found: dict[TopicPartition, dict[int, RawMessage]] = {tp: {} for tp in wanted}
        runs = {tp: deque(_runs(sorted(offsets))) for tp, offsets in wanted.items()}
        while spans := {tp: left.popleft() for tp, left in runs.items() if left}:
            starts, ends = ({tp: run[at] for tp, run in spans.items()} for at in (0, 1))
            for messages in self._read(starts, ends):
                for message in messages:
                    tp, offset = place(message), message.offset() or 0
                    if offset in wanted[tp]:
                        found[tp][offset] = message
        for tp, there in found.items():
            for offset, message in there.items():
                if message.key() != wanted[tp][offset]:
                    raise FileUnusable(
                        str(self._index.path),
                        f"it has another key for {tp}@{offset}: the topic was created again; delete the file",
                    )
        return found


def _age(entry: Entry) -> tuple[int, int]:
    """Returns of an entry what `age` returns of its message."""
    return entry.time_ms, entry.partition


class _Unwritten:
    """What an update has read and not written: bytes and numbers in a few lists and dicts, because Python's garbage
    collector visited kept messages again and again, which took as long as everything else."""

    def __init__(self, copies: bool) -> None:
        self.entries: EntryColumns = EntryColumns([], [], [], [])
        self.lasts: dict[int, Lasts] = {}  # by partition
        self.progress: dict[int, int] = {}  # by partition, the offset after the last one
        self._copies, self._count, self._size = copies, 0, 0

    def append(self, partition: int, run: Sequence[RawMessage]) -> None:
        """Adds messages of one partition, in offset order."""
        self.progress[partition] = (run[-1].offset() or 0) + 1
        self._count += len(run)
        keys: list[bytes] = [message.key() for message in run]
        if None in keys:
            run = [message for message in run if message.key() is not None]
            keys = [message.key() for message in run]
        offsets = [message.offset() or 0 for message in run]
        times = [message.timestamp() for message in run]
        self._size += sum(map(len, keys))
        entries = self.entries
        entries.keys.extend(keys)
        entries.partitions.extend([partition] * len(run))
        entries.offsets.extend(offsets)
        entries.times_ms.extend([at_ms for _, at_ms in times])
        if self._copies:
            contents = contents_of(run, [kind for kind, _ in times])
            self._size += sum([len(content or b"") for content in contents])
            lasts = self.lasts.setdefault(partition, Lasts({}, {}))
            lasts.offsets.update(zip(keys, offsets, strict=True))
            lasts.contents.update(zip(keys, contents, strict=True))

    def is_full(self) -> bool:
        """Returns whether everything should be written now."""
        keys = sum(len(lasts.offsets) for lasts in self.lasts.values())
        return self._count >= REACH_MESSAGES or keys >= REACH_KEYS or self._size >= REACH_BYTES


def _runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts sorted offsets into runs [first, end) without gaps longer than GAP_MAX."""
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and offset - found[-1][1] < GAP_MAX:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    return found
