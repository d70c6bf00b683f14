"""Reads the coordination topic without taking part in it: worlds and verdicts for command-line tools. Never writes.

It finds the root (the Genesis that counts for all logs) in log 0, then reads the wanted logs to their current ends. It
begins at the newest snapshot that its caller's question allows: who asks for the present state needs the records after
the newest one, who asks for the last hour those after the newest one that is older. It creates nothing: no topic, no
Genesis, no group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import Final, NamedTuple, TypeVar

from marshal_py.errors import HistoryTruncated, TopicRecreated
from marshal_py.history.advisories import Advisories
from marshal_py.log import replay
from marshal_py.log.reader import READ_TIMEOUT_S, LogReader
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, TopicPartition, route
from marshal_py.protocol.wire.records import Genesis, Heartbeat, Join, Record
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import Bounds, ClusterAdmin, LogRecord, MessageReader, TopicInfo, Transport

OPENED_AT_ONCE: Final = 2  # logs; one reads while the other waits for the broker, and each has a client of its own
LOOK_BACK_RECORDS: Final = 200_000  # of a log, for a question that may have no answer; they fold in 1 to 2 s

T = TypeVar("T")


class Judged(NamedTuple):
    """A record of the log, and the verdict of the fold on it."""

    record: LogRecord
    verdict: Verdict


class Observer:
    """Reads one coordination topic. It is a context manager.

    - `worlds`: by log, the world as of the last record that was read of it.
    - `extended_ms`: by (log, session), the timestamp of the record that last extended the session (`signs_of`).
    - `as_of_ms`: this machine's clock, in ms since 1970, when the ends were looked up to which the logs were last read.
    - `began`: by log, the offset at which what can be read begins, if older records were deleted and a reader of the
      past (`stretches`, `read` with `back`) has come there.
    - `admin`: asks the cluster.
    - `stopped`: by log, the offset at which `newest` has stopped to look back before it had what it was asked for.
    - `topics`: what Kafka says about the data topics that `ends` was asked for, without topics that are gone.
    """

    def __init__(self, transport: Transport, topic: str, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Connects and finds the `root`, None if nobody has begun; `root_value`: its bytes. `timeout_s`: how long a
        read waits for the next record."""
        self.topic = topic
        self.worlds: dict[int, World] = {}
        self.extended_ms: dict[tuple[int, int], int] = {}
        self.as_of_ms: int = SystemClock().now().wall_ms
        self.began: dict[int, int] = {}
        self.stopped: dict[int, int] = {}
        self.topics: dict[str, TopicInfo] = {}
        self._advisories: dict[int, Advisories] = {}  # by log
        self._next: dict[int, int] = {}  # by log: the offset at which reading continues
        self._missing: set[tuple[int, int]] = set()  # sessions whose last sign was deleted
        self._transport = transport
        self._data: MessageReader | None = None
        self._reader = LogReader(transport, topic, "observer", timeout_s)
        self.admin: ClusterAdmin = self._reader.admin
        try:
            self.root: Genesis | None = self._reader.find_root()
        except BaseException:
            self.close()
            raise
        self.root_value: bytes | None = self._reader.root_value

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        if self._data is not None:
            self._data.close()

    def bounds(self, logs: Iterable[int]) -> dict[int, Bounds]:
        """Returns the first and the end offset of each of these logs. Raises ClusterUnreachable."""
        return self._reader.bounds(logs)

    # --- reading

    def logs_of(self, group: str | None) -> list[int]:
        """Returns the group's log, or all (None); nothing without a root."""
        if self.root is None:
            return []
        return list(range(self.root.partitions)) if group is None else [route(group, self.root.partitions)]

    def read(
        self,
        group: str | None = None,
        back: bool = False,
        since_ms: int | None = None,
        records_max: int | None = None,
        until_ms: int | None = None,
        look: Callable[[World, int], None] = lambda *_: None,
    ) -> Iterator[Judged]:
        """Yields the records of the group's log, or of all, to their ends now, each log in order, from the newest
        confirmed snapshot (N9). `since_ms` (since 1970) or, if fewer, `records_max` in all logs: from one that leaves
        none of these out. If these are fewer, `look` gets, before any record, the world of a snapshot soon after
        `since_ms`, and its time. `back`: every record there is. `until_ms`: only what was written by then. A second
        call continues: iterate to the end. Raises HistoryTruncated (N10), and TopicRecreated in a second call."""
        self.as_of_ms = SystemClock().now().wall_ms
        found = self.bounds(self.logs_of(group))
        if self.worlds and until_ms is None:
            self._reader.check_topic()
            for log, each in found.items():
                if each.end < self._next.get(log, 0):
                    raise TopicRecreated(log, f"a record at offset {self._next[log] - 1}", f"an end at {each.end}")
        if until_ms is not None:
            later = self.first_since(found, until_ms + 1)
            found = {log: Bounds(each.first, min(each.end, later[log])) for log, each in found.items()}
        fresh = [log for log in found if log not in self.worlds]
        first = {} if since_ms is None else self.first_since(fresh, since_ms)
        skipped: dict[int, World] = {}

        def begin(log: int) -> None:
            at = first.get(log)
            if at is not None and records_max is not None:
                at = max(at, found[log].end - records_max // len(fresh))
                world = self._between(log, first[log], at, found[log].first) if first[log] < at else None
                if world is not None:
                    skipped[log] = world
            self._begin(log, found[log], back, at)

        _for_each(begin, fresh)
        for log, world in sorted(skipped.items()):
            for time_ms in self.times_of(log, [world.next_offset - 1]).values():
                look(world, time_ms)
        untouched, left = set(fresh), replay.ATTEMPTS
        while True:
            try:
                for record in self._records(found, exactly=until_ms is not None):
                    untouched.discard(record.log)
                    yield self._judge(record)
                return
            except HistoryTruncated as error:  # by a consumer, after the log was asked where it begins
                log, left = error.log, left - 1
                if log not in untouched or not left:
                    raise
                found[log] = Bounds(self.bounds([log])[log].first, found[log].end)
                begin(log)

    def first_since(self, logs: Iterable[int], time_ms: int) -> dict[int, int]:
        """Returns each log's first offset at or after a time (ms since 1970), or its end; 0 where the broker cannot
        tell."""
        if "time_lookup" not in self._reader.admin.capabilities:
            return dict.fromkeys(logs, 0)
        bounds = self.bounds(logs)
        tps = [TopicPartition(self.topic, log) for log in bounds]
        found = self._reader.admin.offsets_at(tps, time_ms) if tps else {}
        return {tp.partition: found.get(tp, bounds[tp.partition].end) for tp in tps}

    def stretches(self, log: int) -> Iterator[tuple[World, Iterator[Judged]]]:
        """Yields a log in stretches, newest first: the world at its beginning, and its records, which move that world.
        Each begins at a snapshot or the log's beginning. Iterate each to its end; afterwards `follow` and `read`
        continue at the log's end. Raises HistoryTruncated, also if the log is cut meanwhile."""
        self.as_of_ms = SystemClock().now().wall_ms
        (bounds,) = self.bounds([log]).values()
        end = bounds.end
        for world in self._bases(log, bounds):
            began = world.next_offset
            if end == bounds.end:
                self.worlds[log], self._next[log] = world, end
            yield world, self._stretch(world, end)
            end = began
        if bounds.first and log not in self.worlds:
            raise HistoryTruncated(log, bounds.first)
        if bounds.first:
            self.began[log] = end

    def newest(
        self,
        group: str | None,
        tell: Callable[[World, Iterator[Judged]], Iterable[T]],
        count: int | None,
        since_ms: int | None = None,
    ) -> list[T]:
        """Returns what `tell(world, records)` makes of the newest stretches, log by log: the last `count` (None: all)
        and what was written from `since_ms` on. With a `count` alone it ends after LOOK_BACK_RECORDS (`stopped`): what
        is rare may not be there at all."""
        logs = self.logs_of(group)
        least = {} if since_ms is None else self.first_since(logs, since_ms)
        found: list[T] = []
        for log in logs:
            of_log: list[T] = []
            began, left = NONE, replay.ATTEMPTS
            while began == NONE:
                try:
                    for world, records in self.stretches(log):
                        first = world.next_offset
                        of_log = [*tell(world, records), *of_log]
                        began = first
                        if (count is not None and len(of_log) >= count) or began <= least.get(log, NONE):
                            break
                        far = self._next[log] - began >= LOOK_BACK_RECORDS
                        if far and began and count is not None and since_ms is None:
                            self.stopped[log] = began
                            break
                    break
                except HistoryTruncated:  # what is older was deleted meanwhile, by a consumer
                    left -= 1
                    if began != NONE:
                        self.began[log] = began
                    elif not left:
                        raise
            found += of_log if count is None else of_log[max(0, len(of_log) - count) :]
        return found

    def _bases(self, log: int, bounds: Bounds) -> Iterator[World]:
        root = self._reader.root_of(log)
        if replay.is_short(bounds):
            return iter([World(log, root)])
        return replay.bases(self._reader.log, log, root, bounds, bounds.end)

    def _between(self, log: int, since: int, end: int, first: int) -> World | None:
        """Returns the world of a snapshot soon after offset `since`, before `end`; None if there is none."""
        bounds = Bounds(first, min(end, since + replay.SOON_RECORDS // 2))
        with suppress(HistoryTruncated):
            found = replay.bases(
                self._reader.log, log, self._reader.root_of(log), bounds, bounds.end, bounds.end - since
            )
            return next((world for world in found if world.next_offset), None)
        return None

    def _stretch(self, world: World, end: int) -> Iterator[Judged]:
        if world.next_offset >= end:
            return
        for records in self._reader.log.read(world.log, world.next_offset, end, self._reader.timeout_s):
            for record in records:
                if record.offset < end:
                    yield Judged(record, rationalizer.apply(world, record.offset, record.value))

    def records(self, bounds: Mapping[int, Bounds]) -> Iterator[LogRecord]:
        """Yields the records of logs between these `bounds`, and a few later ones, without folding them into `worlds`.
        Raises HistoryTruncated if the first ones were deleted since."""
        self._next |= {log: each.first for log, each in bounds.items()}
        yield from self._records(bounds)

    def oldest(self, log: int) -> World:
        """Returns the world of the earliest possible fold: empty, or of the oldest snapshot. Raises
        HistoryTruncated."""
        (bounds,) = self.bounds([log]).values()
        return replay.oldest_world(self._reader.log, log, self._reader.root_of(log), bounds)

    def history(self, log: int, at: int | None = None) -> tuple[World, Iterator[LogRecord]]:
        """Returns the newest snapshot's world at or below offset `at` and the records after it; else `oldest`."""
        for left in reversed(range(replay.ATTEMPTS)):
            (bounds,) = self.bounds([log]).values()
            world = None
            if at is not None:
                with suppress(HistoryTruncated):
                    world = replay.open_world(self._reader.log, log, self._reader.root_of(log), bounds, at)
            world = world or self.oldest(log)
            records = self.records({log: Bounds(world.next_offset, bounds.end)})
            try:
                return world, chain(list(islice(records, 1)), records)
            except HistoryTruncated:  # by a consumer, after the log was asked where it begins
                if not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def records_of(self, world: World, offsets: Iterable[int]) -> Iterator[tuple[LogRecord, Record]]:
        """Yields single records of the log of `world`, in order. Leaves out what was deleted or cannot be read."""
        for _, record in sorted(replay.records_at(self._reader.log, world.log, offsets).items()):
            found = codec.open_record(record.value, world.crc_seed)
            if found is not None:
                yield record, found

    def times_of(self, log: int, offsets: Iterable[int]) -> dict[int, int]:
        """Returns the timestamps of single records, in ms since 1970, by offset. Deleted ones are left out."""
        return {at: record.timestamp_ms for at, record in replay.records_at(self._reader.log, log, offsets).items()}

    def oldest_ms(self, group: str | None) -> int:
        """Returns the timestamp of the oldest record that is left of a group's log, or of any (None); 0 without one."""
        there = {log: each.first for log, each in self.bounds(self.logs_of(group)).items() if each.first < each.end}
        return min((ms for log, first in there.items() for ms in self.times_of(log, [first]).values()), default=0)

    def newest_ms(self) -> int:
        """Returns the timestamp of the newest record of any log, which is the present of a dump; 0 without one."""
        ends = self.bounds(self.logs_of(None))
        return max((ms for log, each in ends.items() for ms in self.times_of(log, [each.end - 1]).values()), default=0)

    def _begin(self, log: int, bounds: Bounds, back: bool, at: int | None = None) -> None:
        root = self._reader.root_of(log)
        if back:
            world = replay.oldest_world(self._reader.log, log, root, bounds)
        else:
            try:
                world = replay.open_world(self._reader.log, log, root, bounds, at)
            except HistoryTruncated:  # `at` lies before the oldest snapshot that is left
                if at is None:
                    raise
                world = replay.open_world(self._reader.log, log, root, bounds)
        self.worlds[log], self._next[log] = world, world.next_offset
        if back:
            self._advisories[log] = Advisories(world)
            if bounds.first:
                self.began[log] = world.next_offset

    def fold(self, group: str | None = None) -> None:
        """Reads the group's log, or all logs if `group` is None, to the end. Afterwards `worlds` holds their state."""
        for _ in self.read(group):
            pass

    def follow(self, group: str | None = None, back: bool = False) -> Iterator[Judged | None]:
        """Yields what `read` yields, then every new record, without end; None after each poll, so that the caller can
        stop. Raises TopicRecreated."""
        yield from self.read(group, back)
        logs = self.logs_of(group)
        for log in logs:
            self._reader.follow(log, self._next.get(log, 0))  # those that were empty
        while True:
            for record in self._reader.poll():
                if record.log in logs:
                    self._next[record.log] = record.offset + 1
                    yield self._judge(record)
            self._reader.check_topic()
            yield None

    def _records(self, ends: Mapping[int, Bounds], exactly: bool = False) -> Iterator[LogRecord]:
        """Yields the records of these logs from where the last reading of each has ended. `exactly`: none beyond the
        ends, which are read again."""
        for record in self._reader.records({log: bounds.end for log, bounds in ends.items()}, self._next):
            if not exactly or record.offset < ends[record.log].end:
                self._next[record.log] = record.offset + 1
                yield record

    def advisories(self, group: str | None = None, follow: bool = False) -> Iterator[Advisory | None]:
        """Yields the advisories of a group, or of all, per log in order, as far back as can be read, or from the ends
        after `stretches`. With `follow` without end, with None as the method. Deleted records give none (N9)."""
        for log in self.worlds.keys() - self._advisories.keys():
            self._advisories[log] = Advisories(self.worlds[log])
        for judged in self.follow(group, back=True) if follow else self.read(group, back=True):
            if judged is None:
                yield None
            else:
                log = judged.record.log
                yield from _told(group, self._advisories[log], self.worlds[log], judged)

    def told(self, group: str | None, world: World, records: Iterator[Judged]) -> Iterator[Advisory]:
        """Yields the advisories of a stretch of the log (`stretches`)."""
        advisories = Advisories(world)
        if self.worlds.get(world.log) is world:  # the newest stretch, where `advisories` continues
            self._advisories[world.log] = advisories
        for judged in records:
            yield from _told(group, advisories, world, judged)

    def _judge(self, record: LogRecord) -> Judged:
        world = self.worlds[record.log]
        verdict = rationalizer.apply(world, record.offset, record.value)
        said = verdict.record
        if isinstance(said, Heartbeat | Join) and verdict.accepted:
            sign = record.offset if isinstance(said, Join) else said.session
            session = world.groups[verdict.group].sessions.get(sign)
            if session is not None and session.extended == record.offset:
                self.extended_ms[record.log, sign] = record.timestamp_ms
        return Judged(record, verdict)

    # --- looking

    def groups(self) -> list[tuple[int, Group]]:
        """Returns every group in `worlds`, with the number of its log, sorted by name."""
        found = [(log, group) for log, world in self.worlds.items() for group in world.groups.values()]
        return sorted(found, key=lambda pair: pair[1].name)

    def signs_of(self, log: int, group: Group) -> dict[int, int]:
        """Returns when each live session of a group was last extended, ms since 1970. Missing if that record was
        deleted. Who asks for several groups calls `read_signs` before."""
        self.read_signs([(log, group)])
        return {one: self.extended_ms[log, one] for one in group.sessions if (log, one) in self.extended_ms}

    def read_signs(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Reads the records that last extended the live sessions of these groups, unless they were read already: those
        of a log together."""
        unseen: dict[int, dict[int, int]] = {}  # by log: the record, and its session
        for log, group in groups:
            for each in group.sessions.values():
                if (log, each.id) not in self.extended_ms and (log, each.id) not in self._missing:
                    unseen.setdefault(log, {})[each.extended] = each.id
        times: dict[int, dict[int, int]] = {}

        def read(log: int) -> None:
            times[log] = self.times_of(log, unseen[log])

        _for_each(read, sorted(unseen))
        for log, of_log in unseen.items():
            self.extended_ms |= {(log, of_log[at]): at_ms for at, at_ms in times[log].items()}
            self._missing |= {(log, session) for at, session in of_log.items() if at not in times[log]}

    def forget_ended(self) -> None:
        """Forgets the signs of life of ended sessions, for a reader that lives long."""
        live = {(log, session) for log, group in self.groups() for session in group.sessions}
        self.extended_ms = {key: at_ms for key, at_ms in self.extended_ms.items() if key in live}
        self._missing &= live

    def ends(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the data partitions' ends, as far as Kafka has them; then `topics` has their topics."""
        by_topic: dict[str, list[TopicPartition]] = {}  # so that each topic is described once
        for tp in tps:
            by_topic.setdefault(tp.topic, []).append(tp)
        there: list[TopicPartition] = []
        for topic, wanted in by_topic.items():
            info = self._reader.admin.describe_topic(topic)
            if info is not None:
                self.topics[topic] = info
                there += [tp for tp in wanted if 0 <= tp.partition < info.partitions]
        return {tp: bounds.end for tp, bounds in self._reader.admin.bounds(there).items()} if there else {}

    def times_at(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> dict[TopicPartition, int]:
        """Returns the timestamps, in ms since 1970, of the first messages of one topic at or after `starts`, before
        `ends`. Raises RangeLost, AccessDenied without the right to read the topic, ClusterUnreachable."""
        if self._data is None:
            self._data = self._transport.reader("observer", {})
        found: dict[TopicPartition, int] = {}
        for first in (True, False):  # where the first offset holds no message, the next one counts
            at = {tp: start for tp, start in starts.items() if tp not in found}
            to = {tp: min(start + 1, ends[tp]) if first else ends[tp] for tp, start in at.items()}
            for piece in self._data.read(at, to, timeout_s) if at else ():
                for message in piece:
                    tp = TopicPartition(message.topic() or "", message.partition() or 0)
                    found.setdefault(tp, message.timestamp()[1])
                if len(found) == len(starts):
                    break
        return {tp: at_ms for tp, at_ms in found.items() if at_ms > 0}  # else the message has no time

    def ends_before(
        self, tps: Iterable[TopicPartition], time_ms: int, ends: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Returns the ends at a time (ms since 1970). `ends`: those now, for brokers that cannot look up by time, and
        for topics that are not known to be there, as in a dump."""
        wanted = list(tps)
        admin = self._reader.admin
        there = [tp for tp in wanted if tp.topic in self.topics] if "time_lookup" in admin.capabilities else []
        found = admin.offsets_at(there, time_ms) if there else {}
        return {tp: found.get(tp, ends[tp]) for tp in wanted}

    def ends_at(self, tps: Iterable[TopicPartition], times_ms: Sequence[int]) -> list[dict[TopicPartition, int]]:
        """Returns the data partitions' ends at each of these times (ms since 1970); [] if Kafka has none of them, or
        cannot look up by time. Missing where all messages from before a time are deleted."""
        admin = self._reader.admin
        there = list(self.ends(tps)) if "time_lookup" in admin.capabilities else []
        if not there:
            return []
        bounds, found = admin.bounds_and_times(there, times_ms)
        known = [{tp: each.get(tp, bounds[tp].end) for tp in there} for each in found]
        return [
            {tp: end for tp, end in ends.items() if end > bounds[tp].first or not bounds[tp].first or tp not in each}
            for ends, each in zip(known, found, strict=True)
        ]


def _told(group: str | None, advisories: Advisories, world: World, judged: Judged) -> Iterator[Advisory]:
    record, verdict = judged
    told = advisories.read(world.groups.get(verdict.group), verdict, record.timestamp_ms)
    if group is None or verdict.group == group:
        yield from told


def _for_each(call: Callable[[int], None], logs: list[int]) -> None:
    """Calls `call` with each log, of several in threads. Raises what the first log's call raised."""
    if len(logs) <= 1:
        for log in logs:
            call(log)
        return
    pool = ThreadPoolExecutor(OPENED_AT_ONCE, "observer")
    try:
        for _ in pool.map(call, logs):
            pass
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # closing the observer ends those that read
        raise
    pool.shutdown()
