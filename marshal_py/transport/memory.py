"""Implements the interfaces of ports.py by a small Kafka in memory, for unit tests of client and admin.

A MemoryBroker stands for a cluster; `connect` takes a MemoryTransport instead of servers. A thread that waits really
waits, on a condition.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

from marshal_py.errors import (
    AlreadyExists,
    ClusterUnreachable,
    CoordinationError,
    CoordinationTopicMissing,
    HistoryTruncated,
    InvalidOption,
    MarshalError,
    RangeLost,
    TopicMissing,
    TopicRecreated,
    TopicRefused,
)
from marshal_py.protocol.wire.identity import TopicPartition, check_topic
from marshal_py.transport.assignments import Assignments
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import (
    ALL_CAPABILITIES,
    Bounds,
    Broken,
    BrokerInfo,
    Chunk,
    Clock,
    ClusterInfo,
    Headers,
    LogRecord,
    OnWritten,
    OutOfRange,
    RawMessage,
    Replicas,
    TopicInfo,
)
from marshal_py.transport.topic_checks import KEEP_FOREVER, wrong_settings

# --- A small Kafka in memory: topics, committed offsets, Kafka groups, and switches for faults
#
# It uses no network and no files, and knows nothing of the protocol. MemoryTransport gives access to it. Each transport
# has a MemoryConnection of its own, so that a test can cut off one client and not the others.


SCHEME: Final = "memory://"

_names = count(1)


class MemoryMessage:
    """A message with the methods of confluent_kafka.Message."""

    __slots__ = ("_headers", "_key", "_offset", "_partition", "_timestamp_ms", "_topic", "_value")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]] | None,
        timestamp_ms: int,
    ) -> None:
        self._topic, self._partition, self._offset = topic, partition, offset
        self._key, self._value, self._headers, self._timestamp_ms = key, value, headers, timestamp_ms

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return (1, self._timestamp_ms)

    def __len__(self) -> int:
        return len(self._value or b"")


class MemoryBroker:
    """Topics, committed offsets, Kafka groups and switches for faults. Any thread may call any method. `clock`: the
    clock of its clients. `bootstrap_servers`: a name for it, which `connect` takes in the same process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = SystemClock() if clock is None else clock
        self.bootstrap_servers: str = f"{SCHEME}{next(_names)}"
        _open[self.bootstrap_servers] = self
        lock = threading.RLock()  # acquired inside C, so an exception in a signal handler cannot leave it locked
        self.lock: AbstractContextManager[object] = lock
        self.changed: threading.Condition = threading.Condition(lock)
        self.topics: dict[str, list[list[MemoryMessage | None]]] = {}  # None: an offset without a message
        self.first: dict[TopicPartition, int] = {}  # lower offsets were deleted
        self.base: dict[TopicPartition, int] = {}  # offset of element 0 of the list
        self.ids: dict[str, int] = {}
        self.committed: dict[tuple[str, TopicPartition], int] = {}
        self.live_kafka: dict[str, int] = {}
        self.writable = True
        self.tells_ids = True  # whether it reports topic ids; Apache Kafka before 2.8 has none
        self.may_create = True
        self.may_delete = True
        self.queue_full = False
        self.down = False  # no client reaches it
        self.brokers = 1
        self.settings: dict[str, dict[str, str]] = {}
        self._id = 0

    def create_topic(self, name: str, partitions: int) -> None:
        """Creates a topic. Raises InvalidOption for a name that Kafka does not take."""
        check_topic(name)
        with self.lock:
            self._id += 1
            self.topics[name] = [[] for _ in range(partitions)]
            self.ids[name] = self._id
            self.settings[name] = dict(KEEP_FOREVER)
            self.changed.notify_all()

    def delete_topic(self, name: str) -> None:
        with self.lock:
            del self.topics[name], self.ids[name]
            for tp in [tp for tp in (*self.first, *self.base) if tp.topic == name]:
                self.first.pop(tp, None)
                self.base.pop(tp, None)
            self.changed.notify_all()

    def grow(self, name: str, partitions: int) -> None:
        with self.lock:
            self.topics[name] += [[] for _ in range(partitions - len(self.topics[name]))]

    def produce(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: list[tuple[str, bytes | None]] | None = None,
        timestamp_ms: int = 0,
    ) -> int:
        """Appends a message. Returns its offset. Raises TopicMissing."""
        with self.lock:
            if topic not in self.topics:
                raise TopicMissing(topic)
            messages = self.topics[topic][partition]
            offset = self.base.get(TopicPartition(topic, partition), 0) + len(messages)
            messages.append(MemoryMessage(topic, partition, offset, key, value, headers, timestamp_ms))
            self.changed.notify_all()
            return offset

    def skip(self, topic: str, partition: int, offsets: int = 1) -> None:
        """Appends offsets that hold no message, as the end of a transaction or an aborted one does."""
        with self.lock:
            self.topics[topic][partition] += [None] * offsets
            self.changed.notify_all()

    def delete_records(self, tp: TopicPartition, before: int) -> None:
        with self.lock:
            self.first[tp] = before
            self.changed.notify_all()

    def has(self, tp: TopicPartition) -> bool:
        return tp.partition < len(self.topics.get(tp.topic, ()))

    def bounds(self, tp: TopicPartition) -> Bounds:
        messages = self.topics[tp.topic][tp.partition]
        base = self.base.get(tp, 0)
        return Bounds(max(self.first.get(tp, 0), base), base + len(messages))

    def read(self, tp: TopicPartition, offset: int, limit: int) -> list[MemoryMessage]:
        """Returns at most `limit` messages from `offset` on. The caller holds `lock` and has checked the bounds."""
        at = offset - self.base.get(tp, 0)
        there = self.topics[tp.topic][tp.partition]
        found: list[MemoryMessage] = []
        while len(found) < limit and at < len(there):
            piece = there[at : at + limit - len(found)]
            found += [message for message in piece if message is not None]
            at += len(piece)
        return found

    def wake(self) -> None:
        """Makes every thread that waits for the broker look again, because a switch or the clock was set."""
        with self.lock:
            self.changed.notify_all()


_open: WeakValueDictionary[str, MemoryBroker] = WeakValueDictionary()


@dataclass(eq=False, slots=True)
class MemoryConnection:
    """Connects one transport to a MemoryBroker. While it is cut, nothing can be read and what is written is lost."""

    broker: MemoryBroker
    cut: bool = False

    @property
    def up(self) -> bool:
        return not (self.cut or self.broker.down)

    def check(self) -> None:
        """Raises ClusterUnreachable while there is no connection."""
        if not self.up:
            raise ClusterUnreachable("memory", "an answer", self.problem())

    def problem(self) -> str:
        """Returns why there is no connection, as text for people; "" if there is one."""
        return "" if self.up else "the cluster is down" if self.broker.down else "the connection is cut"


READ_MAX: Final = 10_000  # records taken at once, like DRAIN_MAX of the Kafka transport


class MemoryAdmin:
    """Implements ClusterAdmin and TopicAdmin over a MemoryBroker."""

    capabilities = ALL_CAPABILITIES

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection

    @property
    def broker(self) -> MemoryBroker:
        """The broker. Raises ClusterUnreachable while the connection is cut."""
        self._connection.check()
        return self._connection.broker

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        with self.broker.lock:
            if topic not in self.broker.topics:
                if not self.broker.may_create:
                    raise CoordinationTopicMissing(topic, "not allowed", f"create_topic({topic!r}, {partitions})")
                self.broker.create_topic(topic, partitions)
            brokers = self.broker.brokers
            for error in wrong_settings(topic, self.broker.settings[topic], brokers, brokers, "memory"):
                raise error
            return len(self.broker.topics[topic])

    def describe_topic(self, topic: str) -> TopicInfo | None:
        with self.broker.lock:
            found = self.broker.topics.get(topic)
            known = str(self.broker.ids[topic]) if found is not None and self.broker.tells_ids else ""
            return None if found is None else TopicInfo(len(found), known)

    def replicas(self, topic: str) -> dict[int, Replicas]:
        with self.broker.lock:
            return {number: Replicas(0, (0,), (0,)) for number in range(len(self.broker.topics.get(topic, ())))}

    def describe_cluster(self) -> ClusterInfo:
        with self.broker.lock:
            brokers = tuple(BrokerInfo(number, "memory") for number in range(self.broker.brokers))
            counts = {name: len(partitions) for name, partitions in self.broker.topics.items()}
            return ClusterInfo("memory", brokers, counts, {}, {})

    def topics(self) -> frozenset[str]:
        with self.broker.lock:
            return frozenset(self.broker.topics)

    def partition_count(self, topic: str) -> int | None:
        found = self.describe_topic(topic)
        return None if found is None else found.partitions

    def bounds(
        self, tps: Sequence[TopicPartition], *, committed: bool = False, timeout_s: float | None = None
    ) -> dict[TopicPartition, Bounds]:
        with self.broker.lock:
            for tp in tps:
                if not self.broker.has(tp):
                    raise ClusterUnreachable("memory", f"the ends of {tp}", "there is no such partition")
            return {tp: self.broker.bounds(tp) for tp in tps}

    def told_offsets(
        self, tps: Sequence[TopicPartition], timeout_s: float, *, first: bool = False
    ) -> dict[TopicPartition, int]:
        with self.broker.lock:
            bounds = {tp: self.broker.bounds(tp) for tp in tps if self.broker.has(tp)}
        return {tp: each.first if first else each.end for tp, each in bounds.items()}

    def offsets_at(self, tps: Sequence[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        with self.broker.lock:
            for tp in tps:
                bounds = self.broker.bounds(tp)
                messages = self.broker.read(tp, bounds.first, bounds.end - bounds.first)
                later = [message.offset() for message in messages if message.timestamp()[1] >= time_ms]
                if later:
                    found[tp] = later[0]
        return found

    def bounds_and_times(
        self, tps: Sequence[TopicPartition], times_ms: Sequence[int], *, committed: bool = False
    ) -> tuple[dict[TopicPartition, Bounds], list[dict[TopicPartition, int]]]:
        return self.bounds(tps, committed=committed), [self.offsets_at(tps, at_ms) for at_ms in times_ms]

    def committed(self, group: str, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self.broker.lock:
            return {tp: self.broker.committed[group, tp] for tp in tps if (group, tp) in self.broker.committed}

    def commit(self, group: str, positions: Mapping[TopicPartition, int]) -> str:
        with self.broker.lock:
            if self.broker.live_kafka.get(group):
                return "the group has live members"
            self.broker.committed.update({(group, tp): offset for tp, offset in positions.items()})
            return ""

    def delete_records(self, tp: TopicPartition, before: int) -> str:
        if not self.broker.may_delete:
            return "not authorized"
        self.broker.delete_records(tp, before)
        return ""

    def topic_admin(self) -> MemoryAdmin:
        return self

    def live_kafka_members(self, group: str) -> int:
        return self.broker.live_kafka.get(group, 0)

    def settings(self, topic: str) -> dict[str, str]:
        return dict(self.broker.settings[topic])

    def close(self) -> None:
        pass

    # --- changes of topics

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        with self.broker.lock:
            if name in self.broker.topics:
                raise AlreadyExists("topic", name)
            if replication is not None and replication > self.broker.brokers:
                raise TopicRefused(name, f"replication factor {replication} with {self.broker.brokers} brokers")
            if not dry_run:
                self.broker.create_topic(name, partitions)
                self.broker.settings[name].update(config)

    def grow(self, name: str, partitions: int, dry_run: bool) -> None:
        with self.broker.lock:
            known = len(self._topic(name))
            if partitions <= known:
                raise TopicRefused(name, f"it has {known} partitions, and {partitions} are no more")
            if not dry_run:
                self.broker.grow(name, partitions)

    def alter(self, name: str, config: Mapping[str, str | None], dry_run: bool) -> None:
        with self.broker.lock:
            self._topic(name)
            if not dry_run:
                kept = {**self.broker.settings[name], **config}
                self.broker.settings[name] = {key: value for key, value in kept.items() if value is not None}

    def delete(self, name: str) -> None:
        with self.broker.lock:
            self._topic(name)
            self.broker.delete_topic(name)

    def _topic(self, name: str) -> list[list[MemoryMessage | None]]:
        if name not in self.broker.topics:
            raise TopicMissing(name)
        return self.broker.topics[name]


class MemoryLog:
    """Implements CoordinationLog over a MemoryBroker."""

    broker: MemoryBroker
    topic: str

    def __init__(self, connection: MemoryConnection, topic: str) -> None:
        self._connection, self.broker, self.topic = connection, connection.broker, topic
        self._at: dict[int, int] = {}
        self.produce_errors: int = 0

    def follow(self, log: int, offset: int) -> None:
        with self.broker.lock:
            self._at[log] = offset
            self.broker.changed.notify_all()  # a poll that waits did not know of this log

    def poll(self, timeout_s: float) -> list[LogRecord]:
        with self.broker.lock:
            found = self._read()
            if not found and timeout_s > 0:
                self.broker.changed.wait(timeout_s)
                found = self._read()
            return found

    def _read(self) -> list[LogRecord]:
        found: list[LogRecord] = []
        for log, at in list(self._at.items()) if self._connection.up else ():
            tp = TopicPartition(self.topic, log)
            error = self._out_of_log(tp, at)
            if error is not None:
                if found:
                    return found  # the error is raised by the next call
                del self._at[log]
                raise error
            for message in self.broker.read(tp, at, READ_MAX):
                found.append(LogRecord(log, message.offset(), message.value(), message.timestamp()[1], message.key()))
                self._at[log] = message.offset() + 1
        return found

    def _out_of_log(self, tp: TopicPartition, at: int) -> CoordinationError | None:
        if self.topic not in self.broker.topics:
            return TopicRecreated(tp.partition, f"offset {at}", "no topic")
        bounds = self.broker.bounds(tp)
        if at < bounds.first:
            return HistoryTruncated(tp.partition, bounds.first)
        if at > bounds.end:
            return TopicRecreated(tp.partition, f"offset {at}", f"end {bounds.end}")
        return None

    def gather(self, on: bool) -> None:
        pass

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        tp, at = TopicPartition(self.topic, log), start
        deadline = time.monotonic() + timeout_s
        while at < end:
            with self.broker.lock:
                self._connection.check()
                error = self._out_of_log(tp, at)
                if error is not None:
                    raise error
                found = self.broker.read(tp, at, READ_MAX)
                if not found and not self.broker.changed.wait(deadline - time.monotonic()):
                    raise ClusterUnreachable("memory", f"offset {at} of coordination partition {log}", "nothing came")
            if found:
                at = found[-1].offset() + 1
                yield [LogRecord(log, m.offset(), m.value(), m.timestamp()[1], m.key()) for m in found]

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        if self.broker.queue_full:
            self.produce_errors += 1
            return False
        # If the broker is not writable the record is lost, as if a real producer timed out.
        if self.broker.writable and self._connection.up:
            with contextlib.suppress(TopicMissing):
                self.broker.produce(self.topic, log, value, key, timestamp_ms=self.broker.clock.now().wall_ms)
        return True

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        with self.broker.lock:
            self._connection.check()
            return self.broker.bounds(TopicPartition(self.topic, log))

    def waiting_for(self) -> str:
        return self._connection.problem()

    def refused(self) -> MarshalError | None:
        return None

    def close(self, flush_s: float) -> None:
        self._at.clear()


class MemorySource:
    """Implements DataSource over a MemoryBroker."""

    broker: MemoryBroker

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection, self.broker = connection, connection.broker
        self._assignments = Assignments()
        self._closed = False

    def learn_leaders(self, topics: Iterable[str], anew: bool = False) -> None:
        pass

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        with self.broker.lock:
            self._assignments.assign(positions)
            self.broker.changed.notify_all()

    def unassign(self, tps: Iterable[TopicPartition]) -> None:
        with self.broker.lock:
            self._assignments.unassign(tps)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        with self.broker.lock:
            self._assignments.pause(tps)

    def resume(self, positions: Mapping[TopicPartition, int]) -> None:
        self.assign(positions)

    def round(self, tp: TopicPartition) -> int:
        return self._assignments.round(tp)

    def fetching(self, tp: TopicPartition) -> bool:
        return self._assignments.fetching(tp)

    def poll(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        with self.broker.lock:
            found = self._read(max_messages)
            if not found and timeout_s > 0 and not self._closed:
                self.broker.changed.wait(timeout_s)
                found = self._read(max_messages)
            return found

    def poll_now(self, max_messages: int) -> list[Chunk] | None:
        return self.poll(0.0, max_messages)

    def _read(self, max_messages: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._closed or not self._connection.up:
            return chunks
        self._assignments.take(0)
        for tp, fetched in list(self._assignments.fetched.items()):
            if fetched.paused or not self.broker.has(tp) or max_messages <= 0:
                continue
            bounds = self.broker.bounds(tp)
            if not bounds.first <= fetched.reached <= bounds.end:
                self._assignments.refuse(tp, fetched.reached, "", 0)
                continue
            messages: Sequence[RawMessage] = self.broker.read(tp, fetched.reached, max_messages)
            if messages:
                max_messages -= len(messages)
                to = (messages[-1].offset() or 0) + 1
                chunks.append(Chunk(tp, self._assignments.received(tp, to), messages))
            elif round_ := self._assignments.skipped(tp, bounds.end):
                chunks.insert(0, Chunk(tp, round_, (), bounds.end))
        return chunks

    def carry_out(self) -> None:
        pass  # `poll` applies them, and nothing delays it

    def out_of_range(self) -> list[OutOfRange]:
        return self._assignments.out_of_range()

    def broken(self) -> list[Broken]:
        return self._assignments.broken()

    def end_offset(self, tp: TopicPartition) -> int:
        with self.broker.lock:
            return self.broker.bounds(tp).end if self.broker.has(tp) else -1

    def close(self) -> None:
        with self.broker.lock:
            self._closed = True
            self.broker.changed.notify_all()


class MemoryReader:
    """Implements MessageReader over a MemoryBroker."""

    broker: MemoryBroker

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection, self.broker = connection, connection.broker

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[RawMessage]]:
        for tp, start in starts.items():
            at, end = start, ends[tp]
            while at < end:
                with self.broker.lock:
                    self._connection.check()
                    if not self.broker.has(tp):
                        raise RangeLost(tp.topic, tp.partition, at, end, "no such partition")
                    bounds = self.broker.bounds(tp)
                    if not bounds.first <= at <= bounds.end:
                        raise RangeLost(tp.topic, tp.partition, at, end, f"it holds {bounds.first} to {bounds.end}")
                    found = self.broker.read(tp, at, min(READ_MAX, end - at))
                found = [message for message in found if message.offset() < end]
                if not found:
                    break  # the end of the partition
                at = found[-1].offset() + 1
                yield found

    def close(self) -> None:
        pass


class MemoryWriter:
    """Implements MessageWriter over a MemoryBroker. Keys choose their partition as librdkafka's do by default."""

    broker: MemoryBroker

    def __init__(self, connection: MemoryConnection, on_written: OnWritten | None) -> None:
        self._connection, self.broker, self._on_written = connection, connection.broker, on_written

    def write(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        with self.broker.lock:
            self._connection.check()
            if topic not in self.broker.topics:
                raise TopicMissing(topic)
            count = len(self.broker.topics[topic])
            if partition is not None and not 0 <= partition < count:
                raise InvalidOption("partition", partition, f"topic {topic!r} has the partitions 0 to {count - 1}")
            number = zlib.crc32(key or b"") % count if partition is None else partition
            at_ms = timestamp_ms or self.broker.clock.now().wall_ms
            offset = self.broker.produce(topic, number, value, key, list(headers) or None, at_ms)
        if self._on_written is not None:
            self._on_written(TopicPartition(topic, number), offset)

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryTransport:
    """Gives access to a MemoryBroker, over a connection of its own."""

    broker: MemoryBroker
    connection: MemoryConnection

    name = "memory"

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker, self.connection = broker, MemoryConnection(broker)

    @property
    def clock(self) -> Clock:
        return self.broker.clock

    def log(self, topic: str, client_id: str, writes: bool = True) -> MemoryLog:
        return MemoryLog(self.connection, topic)

    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> MemorySource:
        return MemorySource(self.connection)

    def reader(self, client_id: str, settings: Mapping[str, Any]) -> MemoryReader:
        return MemoryReader(self.connection)

    def writer(self, on_written: OnWritten | None = None) -> MemoryWriter:
        return MemoryWriter(self.connection, on_written)

    def admin(self) -> MemoryAdmin:
        return MemoryAdmin(self.connection)


def named_transport(servers_or_config: str | Mapping[str, Any]) -> MemoryTransport | None:
    """Returns a transport to the broker in memory that is named; None if real servers are. Raises InvalidOption."""
    given = servers_or_config
    servers = given.get("bootstrap.servers") if isinstance(given, Mapping) else given
    if not isinstance(servers, str) or not servers.startswith(SCHEME):
        return None
    broker = _open.get(servers)
    if broker is None:
        known = ", ".join(sorted(_open)) or "none"
        raise InvalidOption("bootstrap.servers", servers, f"a cluster in memory that exists in this process: {known}")
    return MemoryTransport(broker)
