"""Answers questions by key with a key index. The answers are those that `Reads` gives by reading everything.

Before each answer the index catches up with the topic as it is at that moment. While another process is writing the
index, `Reads` answers instead. It also answers batches of a key on a compacted topic, because the index still counts
messages that compaction has removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from marshal_py.errors import IndexBusy, IndexUnusable, RangeLost, TooManyKeys
from marshal_py.protocol.identity import TopicPartition
from marshal_py.topics.key_index import Entry, KeyIndex, prefix_of
from marshal_py.topics.keys import ONE, REST, SEPARATOR, has_wildcard, matcher
from marshal_py.topics.reads import Offsets, Page, Reads, newer, place
from marshal_py.topics.request import KEYS_MAX, GetRequest
from marshal_py.transport.ports import Bounds, ClusterAdmin, MessageReader, RawMessage

ADD_AT_ONCE: Final = 50_000  # messages of one transaction
GAP_MAX: Final = 2_000  # offsets that are read and thrown away rather than asked for again


class IndexedReads(Reads):
    """Finds the messages that a GetRequest asks for in one topic; those by key with the topic's index.

    One thread at a time.
    """

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

    def catch_up(self, wait: bool) -> bool:
        """Adds to the index the messages that came since it was last filled. Returns True if it is up to date.

        While another process writes the index, this method returns False at once; with `wait` it waits for that process
        instead, and raises IndexBusy after 30 s.
        """
        tps = self._partitions(GetRequest(batch=1))
        bounds = self._admin.bounds(tps, committed=self._committed)
        self._index.check(bounds)
        reached = self._index.progress()
        starts = {tp: max(bounds[tp].first, reached.get(tp.partition, 0)) for tp in tps}
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
        pending: list[RawMessage] = []
        progress: dict[TopicPartition, int] = {}
        for messages in self._read(starts, ends):
            pending += messages
            for message in messages:
                progress[place(message)] = (message.offset() or 0) + 1
            if len(pending) >= ADD_AT_ONCE:
                self._index.add(pending, progress, wait)
                pending = []
        self._index.add(pending, ends, wait)

    def bounds(self) -> dict[TopicPartition, Bounds]:
        """Returns first and end offset of every partition."""
        return self._admin.bounds(self._partitions(GetRequest(batch=1)), committed=self._committed)

    def _is_compacted(self) -> bool:
        if self._compacted is None:
            self._compacted = "compact" in self._admin.settings(self.topic).get("cleanup.policy", "")
        return self._compacted

    # --- answers

    def _lasts(self, keys: set[bytes], starts: Offsets, ends: Offsets) -> dict[bytes, RawMessage]:
        if not self.catch_up(wait=False):
            return super()._lasts(keys, starts, ends)
        found: dict[bytes, RawMessage] = {}
        open_, below = set(keys), {(tp, key): end for tp, end in ends.items() for key in keys}
        while open_:  # mostly once: an entry whose message is gone makes a second look for its key
            wanted: dict[TopicPartition, dict[int, bytes]] = {}
            for key in open_:
                for tp, start in starts.items():
                    entry = self._index.newest(key, tp.partition, start, below[tp, key])
                    if entry is not None:
                        wanted.setdefault(tp, {})[entry.offset] = key
                        below[tp, key] = entry.offset
            open_ = set()
            for tp, offsets in wanted.items():
                there = self._fetch(tp, offsets)
                open_ |= {key for offset, key in offsets.items() if offset not in there}
                for message in there.values():
                    key = message.key()
                    if key not in found or newer(message, found[key]):
                        found[key] = message
        return found

    def _newest(self, request: GetRequest, starts: Offsets, ends: Offsets) -> list[RawMessage]:
        patterns = request.multi_last or ()
        wild = [pattern for pattern in patterns if isinstance(pattern, str) and has_wildcard(pattern)]
        if not wild or not self.catch_up(wait=False):
            return super()._newest(request, starts, ends)
        keys = {
            pattern.encode() if isinstance(pattern, str) else pattern for pattern in patterns if pattern not in wild
        }
        for pattern in wild:
            test = matcher(pattern)
            keys |= {key for key in self._index.keys(prefix_of(pattern, SEPARATOR, (ONE, REST))) if test(key)}
        if not self._is_compacted():
            known = {
                key
                for key in keys
                for tp, start in starts.items()
                if self._index.newest(key, tp.partition, start, ends[tp]) is not None
            }
            if len(known) > KEYS_MAX:
                raise TooManyKeys(len(known), KEYS_MAX)
        found = self._lasts(keys, starts, ends)
        if len(found) > KEYS_MAX:
            raise TooManyKeys(len(found), KEYS_MAX)
        return [message for message in found.values() if message.value() is not None or request.tombstones]

    def _first(self, request: GetRequest) -> RawMessage | None:
        key = request.key
        if key is None:
            return super()._first(request)
        starts, ends = self._span(request)  # before the index catches up, so that it covers the span
        if not self.catch_up(wait=False):
            return super()._first(request)
        found: list[RawMessage] = []
        for tp, start in starts.items():
            for entry in self._index.following(key, tp.partition, start, ends[tp]):
                message = self._fetch(tp, {entry.offset: key}).get(entry.offset)
                if message is not None and (message.value() is not None or request.tombstones):
                    found.append(message)
                    break
        return min(found, key=lambda m: (m.timestamp()[1], m.partition() or 0), default=None)

    def _following(self, request: GetRequest, starts: Offsets, ends: Offsets) -> Page:
        key = request.key
        if key is None or self._is_compacted() or not self.catch_up(wait=False):
            return super()._following(request, starts, ends)
        kept: dict[TopicPartition, list[RawMessage]] = {}
        total = 0
        for tp, start in starts.items():
            entries: Sequence[Entry] = list(self._index.following(key, tp.partition, start, ends[tp]))
            total += len(entries)
            there = self._fetch(tp, {entry.offset: key for entry in entries[: request.batch]})
            kept[tp] = [there[offset] for offset in sorted(there)]
        return self._page_of(request, kept, total, starts, ends)

    def _fetch(self, tp: TopicPartition, offsets: Mapping[int, bytes]) -> dict[int, RawMessage]:
        """Returns the messages at these offsets, by offset. Messages that no longer exist are left out.

        `offsets`: the key that the index has for each offset. Offsets that are close together are read together. Raises
        IndexUnusable for a message with another key: the topic was created again on a cluster that has no topic ids.
        """
        found: dict[int, RawMessage] = {}
        for start, end, wanted in _runs(sorted(offsets)):
            try:
                for messages in self._reader.read({tp: start}, {tp: end}, self._timeout_s):
                    found |= {at: message for message in messages if (at := message.offset() or 0) in wanted}
            except RangeLost:
                continue  # retention deleted them meanwhile
        for offset, message in found.items():
            if message.key() != offsets[offset]:
                raise IndexUnusable(
                    str(self._index.path),
                    f"it has another key for {tp}@{offset}: the topic was created again; delete the file",
                )
        return found


def _runs(offsets: Sequence[int]) -> list[tuple[int, int, frozenset[int]]]:
    """Cuts sorted offsets into runs in which no gap is longer than GAP_MAX.

    Returns for each run its first offset, the offset after its last one, and the offsets in it.
    """
    found: list[tuple[int, int, frozenset[int]]] = []
    run: list[int] = []
    for offset in offsets:
        if run and offset - run[-1] > GAP_MAX:
            found.append((run[0], run[-1] + 1, frozenset(run)))
            run = []
        run.append(offset)
    if run:
        found.append((run[0], run[-1] + 1, frozenset(run)))
    return found
