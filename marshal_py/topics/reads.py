"""Finds the messages of a GetRequest: first the bounds of the partitions, then ranges of offsets, each read once.

Every question has a moment: the ends of the partitions when it was asked (the last stable offsets for read_committed
readers). Messages beyond these ends are not part of the answer, so a busy topic cannot keep a question from ending.
Keys are compared in bulk, by functions that loop in C. The last message of a key is searched backwards and the first
one forwards, in windows that grow.

In this module a span is a pair of maps, `starts` and `ends`: from each partition the offsets `start` to `end` - 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Final, NamedTuple

from marshal_py.errors import BadRequest, MessageNotFound, RangeLost, TopicMissing, UnsupportedPlatform
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.topics.keys import Partitioner, exact, has_wildcard, matcher, shown
from marshal_py.topics.request import (
    KEYS_MAX,
    MAX_BYTES_DEFAULT,
    NOT_BEGUN,
    GetRequest,
    LastMessages,
    age,
    time_ms,
    too_many_keys,
)
from marshal_py.transport.ports import Bounds, ClusterAdmin, MessageReader, RawMessage

WINDOW: Final = 2_000  # offsets per partition that the first look for a key reads
WINDOW_FACTOR: Final = 4  # how much more each next look reads
RETRIES_MAX: Final = 10  # of one reading that retention overtakes: it deletes whole segments, and seldom

Offsets = Mapping[TopicPartition, int]
Matches = Callable[[Sequence[RawMessage]], Iterable[RawMessage]]


class Page(NamedTuple):
    """One page of a batch's answer. `pending`: for each message, how many matching ones come after it. `left`: how many
    match and are not here. `lower`: where the next page begins (or NOT_BEGUN), `up_to`: the last offset of the whole
    answer, by partition. Without a key `pending` and `left` may count offsets."""

    messages: list[RawMessage]
    pending: list[int]
    left: int
    lower: dict[int, int]
    up_to: dict[int, int]


@dataclass(eq=False)
class Reads:
    """Finds the messages that a GetRequest asks for in one topic. One thread at a time. `topic_id`, and the bounds of
    its partitions: as of the newest question."""

    topic: str
    _admin: ClusterAdmin
    _reader: MessageReader
    _choose: Partitioner | None
    _committed: bool
    _timeout_s: float
    topic_id: str = field(default="", init=False)
    _bounds: Mapping[TopicPartition, Bounds] = field(default_factory=dict, init=False)

    # --- one message

    def find(self, request: GetRequest) -> RawMessage:
        """Returns the one message that the request asks for. Raises MessageNotFound."""
        found = self._find(request)
        if found is None or (found.value() is None and not request.tombstones):
            raise MessageNotFound(self.topic, described(request), found is not None)
        return found

    def _find(self, request: GetRequest) -> RawMessage | None:
        if request.last_by_key is not None:
            key = request.key
            assert key is not None
            return self._lasts({key}, *self._span(request)).get(key)
        if request.offset is not None and request.next_by_key is None:
            return self._at(self._only_partition(request, "offset"), request.offset)
        return self._first(request)

    def _at(self, tp: TopicPartition, offset: int) -> RawMessage | None:
        """Returns the message at exactly this offset; None if it does not exist."""
        first, end = self._admin.bounds([tp], committed=self._committed)[tp]
        if not first <= offset < end:
            return None
        try:
            for messages in self._reader.read({tp: offset}, {tp: offset + 1}, self._timeout_s):
                return next(iter(messages), None)
        except RangeLost:
            pass  # deleted meanwhile
        return None

    def _first(self, request: GetRequest) -> RawMessage | None:
        """Returns the oldest match at or after the start, by timestamp over the partitions' first matches; or None."""
        starts, ends = self._span(request)
        found, _ = self._some(request, starts, ends, 1)
        return min([messages[0] for messages in found.values() if messages], key=age, default=None)

    def _some(
        self, request: GetRequest, starts: Offsets, ends: Offsets, most: int
    ) -> tuple[dict[TopicPartition, list[RawMessage]], bool]:
        """Returns by partition the first matches, `most` at most and one that does not fit into max_bytes, and whether
        some may be missing. Partitions are read together, in windows that grow."""
        matches, limit = self._matches(request), request.max_bytes or MAX_BYTES_DEFAULT
        passes_tombstones = not (request.tombstones or request.is_batch)
        kept: dict[TopicPartition, list[RawMessage]] = {tp: [] for tp in starts}
        sizes = dict.fromkeys(starts, 0)
        full: set[TopicPartition] = set()
        left = {tp: start for tp, start in starts.items() if start < ends[tp]}
        window = WINDOW if request.key is not None else min(most, WINDOW)
        while left:
            until = {tp: min(start + window, ends[tp]) for tp, start in left.items()}
            for messages in self._read(left, until):
                for message in matches(messages):
                    tp = place(message)
                    if tp in full or (passes_tombstones and message.value() is None):
                        continue
                    kept[tp].append(message)
                    sizes[tp] += size_of(message)
                    if len(kept[tp]) >= most or sizes[tp] > limit:
                        full.add(tp)
                if full >= left.keys():
                    break
            left = {tp: end for tp, end in until.items() if end < ends[tp] and tp not in full}
            window *= WINDOW_FACTOR
        return kept, bool(full)

    # --- a batch

    def page(self, request: GetRequest) -> Page:
        """Reads and returns the page that answers a batch request."""
        starts, ends = self._span(request)
        if request.multi_last is not None:
            lasts = self._newest(request, starts, ends)
            if len(lasts) > KEYS_MAX:
                raise too_many_keys(len(lasts))
            found = [last for last in lasts.values() if last.value() is not None or request.tombstones]
            found.sort(key=lambda m: (m.partition() or 0, m.offset() or 0))
            count = len(found)
            taken = _cut(found, request)
            pending = [count - at for at in range(1, len(taken) + 1)]
            lower = {tp.partition: start for tp, start in starts.items()}
            for message in taken:  # in this order, so partitions before the last one are done
                lower[message.partition() or 0] = (message.offset() or 0) + 1
            if taken:
                lower |= {tp.partition: ends[tp] for tp in ends if tp.partition < (taken[-1].partition() or 0)}
            return Page(taken, pending, count - len(taken), lower, _last(ends))
        return self._following(request, starts, ends)

    def _following(self, request: GetRequest, starts: Offsets, ends: Offsets) -> Page:
        assert request.batch is not None
        if request.key is None:
            found, more = self._some(request, starts, ends, request.batch)
            return self._page_of(request, found, None, starts, ends, more)
        most, limit = request.batch, request.max_bytes or MAX_BYTES_DEFAULT
        matches, count = self._matches(request), 0
        kept: dict[TopicPartition, list[RawMessage]] = {tp: [] for tp in starts}
        sizes = dict.fromkeys(starts, 0)
        for messages in self._read(starts, ends):
            for message in matches(messages):
                tp = place(message)
                count += 1
                if len(kept[tp]) < most and sizes[tp] <= limit:
                    kept[tp].append(message)
                    sizes[tp] += size_of(message)
        return self._page_of(request, kept, count, starts, ends)

    def _page_of(
        self,
        request: GetRequest,
        kept: Mapping[TopicPartition, Sequence[RawMessage]],
        matching: int | None,
        starts: Offsets,
        ends: Offsets,
        more: bool = False,
    ) -> Page:
        """Makes a page, oldest first, within `batch` and `max_bytes`. `kept`: matches by partition, perhaps the first
        only. `matching`: how many in all; None: unknown, so offsets count. `more`: not all were read."""
        every = list(_by_time(kept))
        taken = _cut(every, request)
        if matching is None and len(taken) == len(every) and not more:
            matching = len(taken)  # nothing that exists is left, whatever offsets are missing
        left = sum(ends[tp] - start for tp, start in starts.items()) if matching is None else matching
        lower, pending = self._lower(request, starts, ends), []
        for message in taken:
            number, offset = message.partition() or 0, message.offset() or 0
            left -= offset + 1 - lower[number] if matching is None else 1
            lower[number] = offset + 1
            pending.append(left)
        return Page(taken, pending, left, lower, _last(ends))

    def _lower(self, request: GetRequest, starts: Offsets, ends: Offsets) -> dict[int, int]:
        """Returns where the answer begins in each partition; NOT_BEGUN where no message is at or after the start."""
        return {
            tp.partition: NOT_BEGUN
            if request.start_time is not None
            and start >= ends[tp]
            and request.lower.get(tp.partition, NOT_BEGUN) == NOT_BEGUN
            else start
            for tp, start in starts.items()
        }

    def _newest(self, request: GetRequest, starts: Offsets, ends: Offsets) -> dict[bytes, RawMessage]:
        """Returns what `_lasts` returns, of the keys that match multi_last. It may raise BadRequest (413) itself."""
        assert request.multi_last is not None
        patterns = request.multi_last
        if not any(isinstance(pattern, str) and has_wildcard(pattern) for pattern in patterns):
            keys = {exact("multi_last", pattern) for pattern in patterns}
            return self._lasts(keys, starts, ends)
        tests = [matcher(pattern) for pattern in patterns]
        found = LastMessages()
        for messages in self._read(starts, ends):
            for message in messages:
                key = message.key()
                if key is not None and any(test(key) for test in tests):
                    found.add(key, message)
        return self._decided(found, starts, starts, ends)

    def _lasts(self, keys: set[bytes], starts: Offsets, ends: Offsets) -> dict[bytes, RawMessage]:
        """Returns by key the last messages that are in the span. What is last is decided from the partitions'
        beginnings on: a later page's span leaves out what earlier pages have."""
        found, lows, window = LastMessages(), dict(ends), WINDOW
        while len(found) < len(keys) and any(lows[tp] > start for tp, start in starts.items()):
            floors = {tp: max(start, lows[tp] - window) for tp, start in starts.items()}
            self._look(found, keys, floors, lows)
            lows, window = floors, window * WINDOW_FACTOR
        return self._decided(found, starts, lows, ends)

    def _decided(self, found: LastMessages, starts: Offsets, lows: Offsets, ends: Offsets) -> dict[bytes, RawMessage]:
        """Returns by key the last messages that are in the span. `found`: from each partition from `lows` on. Another
        partition may have a newer message of a key, so the others are read back to the time of the oldest one found."""
        firsts = {tp: self._bounds[tp].first for tp in starts}
        if found and len(starts) > 1 and any(lows[tp] > first for tp, first in firsts.items()):
            oldest = min(message.timestamp()[1] for message in found.newest().values())
            self._look(found, set(found.keys()), self._floors(firsts, ends, oldest), lows)
        newest = found.newest()
        return {key: last for key, last in newest.items() if (last.offset() or 0) >= starts[place(last)]}

    def _look(self, found: LastMessages, keys: set[bytes], floors: Offsets, lows: Offsets) -> None:
        """Adds the messages of these keys from the offsets `floors` to before `lows`."""
        for messages in self._read(floors, lows):
            for key, message in zip([message.key() for message in messages], messages, strict=True):
                if key in keys:
                    found.add(key, message)

    def _floors(self, starts: Offsets, ends: Offsets, since_ms: int) -> dict[TopicPartition, int]:
        try:
            found = self._admin.offsets_at([*starts], max(0, since_ms))
        except UnsupportedPlatform:
            return dict(starts)  # a cluster that cannot look times up has short logs: everything is read
        return {tp: min(max(start, found.get(tp, ends[tp])), ends[tp]) for tp, start in starts.items()}

    def partitions_with(self, key: bytes) -> list[int]:
        """Returns the numbers of the partitions in which the last message of the key has a value."""
        starts, ends = self._span(GetRequest(batch=1))
        lasts = {tp: self._lasts({key}, {tp: start}, {tp: ends[tp]}).get(key) for tp, start in starts.items()}
        return [tp.partition for tp, last in lasts.items() if last is not None and last.value() is not None]

    # --- where to look

    def _partitions(self, request: GetRequest) -> list[TopicPartition]:
        """Returns the partitions that may have what is wanted. Raises BadRequest, TopicMissing."""
        found = self._admin.describe_topic(self.topic)
        if found is None:
            raise TopicMissing(self.topic)
        if request.topic_id and found.topic_id not in ("", request.topic_id):
            raise BadRequest(f"topic {self.topic!r} was deleted and created again since the first page: ask again")
        self.topic_id, count = found.topic_id, found.partitions
        up_to = request.up_to_offset if isinstance(request.up_to_offset, Mapping) else {}
        for name, number in (
            ("partition=", request.partition or 0),
            ("up_to_offset names partition ", max(up_to, default=0)),
        ):
            if number >= count:
                raise BadRequest(f"{name}{number}: topic {self.topic!r} has partitions 0 to {count - 1}")
        if request.partition is not None:
            return [TopicPartition(self.topic, request.partition)]
        if up_to:
            return [TopicPartition(self.topic, number) for number in sorted(up_to)]
        chosen = self._chosen(request.key, count)
        if chosen is not None:
            return [TopicPartition(self.topic, chosen)]
        return [TopicPartition(self.topic, number) for number in range(count)]

    def _chosen(self, key: bytes | None, count: int) -> int | None:
        """Returns the one of `count` partitions that has the key; None if it may be in any of them."""
        return None if key is None or self._choose is None else self._choose(key, count)

    def partition_of(self, key: bytes, given: int | None) -> int | None:
        """Returns the partition that the user (`given`, checked) or the topic's partitioner names for a key, if any."""
        tps = self._partitions(GetRequest(next_by_key=key, partition=given))
        return None if given is None and self._chosen(key, len(tps)) is None else tps[0].partition

    def _only_partition(self, request: GetRequest, name: str) -> TopicPartition:
        """Returns the partition that the argument `name`, an offset, belongs to. Raises BadRequest, TopicMissing."""
        tps = self._partitions(request)
        if len(tps) > 1:
            raise BadRequest(
                f"{name}={getattr(request, name)} needs partition= too: topic {self.topic!r} has {len(tps)} "
                "partitions, and each has offsets of its own"
            )
        return tps[0]

    def _span(self, request: GetRequest) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """Returns the request's `starts` and `ends`: the present ends for the first page, later those that it had."""
        alone = [name for name in ("offset", "up_to_offset") if isinstance(getattr(request, name), int)]
        tps = [self._only_partition(request, alone[0])] if alone else self._partitions(request)
        # A message at up_to_time still counts, so the answer ends at the first one that is later.
        times = {name: getattr(request, name) for name in ("start_time", "up_to_time")}
        wanted = {name: time_ms(name, at) + (name == "up_to_time") for name, at in times.items() if at is not None}
        bounds, offsets = self._bounds_and_times(tps, [*wanted.values()])
        found = dict(zip(wanted, offsets, strict=True))
        self._bounds, up_to = bounds, request.up_to_offset
        ends = {tp: bounds[tp].end for tp in tps}
        if up_to is not None:
            last = up_to if isinstance(up_to, Mapping) else {tps[0].partition: up_to}
            ends = {tp: min(end, last.get(tp.partition, -1) + 1) for tp, end in ends.items()}
        elif "up_to_time" in found:
            ends = {tp: min(end, found["up_to_time"].get(tp, end)) for tp, end in ends.items()}
        lower = {tp: request.lower.get(tp.partition, NOT_BEGUN) for tp in tps}
        starts = {tp: max(bounds[tp].first, lower[tp]) for tp in tps}
        if request.offset is not None:
            starts = {tp: max(start, request.offset) for tp, start in starts.items()}
        elif "start_time" in found:
            began = found["start_time"]
            starts = {
                tp: max(start, began.get(tp, ends[tp])) if lower[tp] == NOT_BEGUN else start
                for tp, start in starts.items()
            }
        return {tp: min(start, max(ends[tp], 0)) for tp, start in starts.items()}, ends

    def _bounds_and_times(
        self, tps: Sequence[TopicPartition], times_ms: Sequence[int]
    ) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
        """Returns ClusterAdmin.bounds_and_times. A cluster that cannot look times up has short logs, which are read for
        it."""
        try:
            return self._admin.bounds_and_times(tps, times_ms, committed=self._committed)
        except UnsupportedPlatform:
            bounds = self._admin.bounds(tps, committed=self._committed)
            return bounds, [self._read_for(bounds, at_ms) for at_ms in times_ms]

    def _read_for(self, bounds: Mapping[TopicPartition, Bounds], at_ms: int) -> dict[TopicPartition, int]:
        """Returns for each partition the first offset whose message is at or after `at_ms` (since 1970), if any."""
        found: dict[TopicPartition, int] = {}
        starts, ends = ({tp: each[at] for tp, each in bounds.items()} for at in (0, 1))
        for messages in self._read(starts, ends):
            for message in messages:
                if message.timestamp()[1] >= at_ms:
                    found.setdefault(place(message), message.offset() or 0)
        return found

    def _matches(self, request: GetRequest) -> Matches:
        key = request.key
        if key is None:
            return lambda messages: messages

        def with_key(messages: Sequence[RawMessage]) -> Iterable[RawMessage]:
            keys = [message.key() for message in messages]
            return [message for message, got in zip(messages, keys, strict=True) if got == key] if key in keys else ()

        return with_key

    def _read(self, starts: Offsets, ends: Offsets) -> Iterator[Sequence[RawMessage]]:
        """Yields the messages of the span that exist when it comes to them. Raises RangeLost if retention overtakes it
        again and again."""
        left, retries = {tp: start for tp, start in starts.items() if start < ends[tp]}, RETRIES_MAX
        while left:
            reached = dict(left)
            try:
                for messages in self._reader.read(left, {tp: ends[tp] for tp in left}, self._timeout_s):
                    newest = dict(zip(map(methodcaller("partition"), messages), messages, strict=True))
                    reached |= {place(message): (message.offset() or 0) + 1 for message in newest.values()}
                    yield messages
                return
            except RangeLost:
                if not retries:
                    raise
                retries -= 1
            bounds = self._admin.bounds([*reached], committed=self._committed)
            reached = {tp: max(at, bounds[tp].first) for tp, at in reached.items()}
            left = {tp: at for tp, at in reached.items() if at < min(ends[tp], bounds[tp].end)}


def place(message: RawMessage) -> TopicPartition:
    return TopicPartition(message.topic() or "", message.partition() or 0)


def size_of(message: RawMessage) -> int:
    """Returns how many bytes topic, key, headers and value have together."""
    headers = sum(len(name) + len(value or b"") for name, value in message.headers() or ())
    return len(message.topic() or "") + len(message.key() or b"") + headers + len(message.value() or b"")


def described(request: GetRequest) -> str:
    """Returns the question in words, for an error."""
    names = ("partition", "offset", "start_time", "last_by_key", "next_by_key", "multi_last", "batch")
    given = {name: getattr(request, name) for name in names}
    return ", ".join(f"{name}={shown(value)}" for name, value in given.items() if value is not None)


def _by_time(kept: Mapping[TopicPartition, Sequence[RawMessage]]) -> Iterator[RawMessage]:
    """Yields all messages: in offset order per partition, and between partitions the older one first."""
    waiting = {tp: deque(messages) for tp, messages in kept.items() if messages}
    while waiting:
        tp = min(waiting, key=lambda tp: age(waiting[tp][0]))
        yield waiting[tp].popleft()
        if not waiting[tp]:
            del waiting[tp]


def _cut(messages: Sequence[RawMessage], request: GetRequest) -> list[RawMessage]:
    """Returns the first messages within `batch` and `max_bytes`; always one, so that the pages continue after it."""
    limit, size = request.max_bytes or MAX_BYTES_DEFAULT, 0
    taken: list[RawMessage] = []
    for message in messages[: request.batch]:
        size += size_of(message)
        if taken and size > limit:
            break
        taken.append(message)
    return taken


def _last(ends: Offsets) -> dict[int, int]:
    return {tp.partition: end - 1 for tp, end in sorted(ends.items())}
