"""Answers questions by key with a key index. The answers are those that `Reads` gives by reading everything.

Before each answer the index catches up with the topic as it is at that moment. The last message of a key comes from the
index itself if that has a copy, and from Kafka otherwise. While another process is writing the index, `Reads` answers
instead. It also answers batches of a key on a compacted topic, because the index still counts messages that compaction
has removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import methodcaller
from typing import Final

from marshal_py.errors import FileUnusable, IndexBusy, RangeLost
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.key_index import Entry, EntryColumns, KeyIndex, Lasts, contents_of, prefix_of
from marshal_py.topics.keys import ONE, REST, SEPARATOR, has_wildcard, matcher
from marshal_py.topics.reads import Offsets, Page, Reads, place
from marshal_py.topics.request import KEYS_MAX, GetRequest, too_many_keys
from marshal_py.topics.stored import age
from marshal_py.transport.ports import Bounds, ClusterAdmin, MessageReader, RawMessage

ADD_AT_ONCE: Final = 100_000  # entries of one transaction; more are hardly faster
# How much is read between two writes of copies: what an update reads again after a crash. The more, the fewer messages
# are copied that are not the last of their key.
REACH_MESSAGES: Final = 1_000_000
REACH_KEYS: Final = 200_000  # with the last message of each in memory
REACH_BYTES: Final = 128 * 1024 * 1024  # of keys and of what is copied
GAP_MAX: Final = 500  # offsets that are read and thrown away: they come with the same fetch, or cost as much as one


class IndexedReads(Reads):
    """Finds what a GetRequest asks for in one topic, by key with the topic's index. One thread at a time."""

    def __init__(
        self,
        topic: str,
        admin: ClusterAdmin,
        reader: MessageReader,
        partitioner: str,
        committed: bool,
        timeout_s: float,
        index: KeyIndex,
    ) -> None:
        super().__init__(topic, admin, reader, partitioner, committed, timeout_s)
        self._index = index
        self._compacted: bool | None = None

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
        keys = {
            pattern.encode() if isinstance(pattern, str) else pattern for pattern in patterns if pattern not in wild
        }
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
            for message in self._read_runs(spans):
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

    def _read_runs(self, spans: Mapping[TopicPartition, tuple[int, int]]) -> list[RawMessage]:
        """Returns the messages of one run [first, second) per partition; none of a run that retention has deleted."""
        starts, ends = {tp: run[0] for tp, run in spans.items()}, {tp: run[1] for tp, run in spans.items()}
        try:
            return [message for messages in self._read(starts, ends) for message in messages]
        except RangeLost:
            if len(spans) == 1:
                return []
            return [message for tp, run in spans.items() for message in self._read_runs({tp: run})]


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
