"""Implements the interfaces of ports.py by a small Kafka in memory, for unit tests of client and admin.

A MemoryBroker stands for a cluster; `connect` takes its MemoryTransport instead of servers. It uses no network and no
files. A thread that waits really waits, on a condition. The broker knows nothing of the protocol.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from marshal_py.errors import (
    ClusterUnreachable,
    CoordinationError,
    CoordinationTopicMissing,
    HistoryTruncated,
    MarshalError,
    RangeLost,
    TopicExists,
    TopicMissing,
    TopicRecreated,
    TopicRefused,
)
from marshal_py.protocol.identity import TopicPartition
from marshal_py.transport.assignments import Assignments
from marshal_py.transport.ports import (
    ALL_CAPABILITIES,
    Bounds,
    Broken,
    Chunk,
    LogRecord,
    OutOfRange,
    RawMessage,
    TopicInfo,
)
from marshal_py.transport.topic_checks import KEEP_FOREVER, check_settings

READ_MAX: Final = 10_000  # records taken at once, like DRAIN_MAX of the Kafka transport


class MemoryMessage:
    """Is a message with the methods of confluent_kafka.Message."""

    __slots__ = ("_headers", "_key", "_offset", "_partition", "_timestamp_ms", "_topic", "_value")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None,
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

    def headers(self) -> list[tuple[str, bytes]] | None:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return (1, self._timestamp_ms)


class MemoryBroker:
    """Holds topics, committed offsets, Kafka groups and switches for faults. Any thread may call any method."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # acquired inside C, so an exception in a signal handler cannot leave it locked
        self.changed = threading.Condition(self.lock)
        self.topics: dict[str, list[list[MemoryMessage]]] = {}
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
        self.brokers = 1
        self.settings: dict[str, dict[str, str]] = {}
        self._id = 0

    def create_topic(self, name: str, partitions: int) -> None:
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
        headers: list[tuple[str, bytes]] | None = None,
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
        return self.topics[tp.topic][tp.partition][at : at + limit]

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self)


class MemoryLog:
    """Implements CoordinationLog over a MemoryBroker."""

    def __init__(self, broker: MemoryBroker, topic: str) -> None:
        self.broker, self.topic = broker, topic
        self._at: dict[int, int] = {}
        self.produce_errors = 0

    def follow(self, log: int, offset: int) -> None:
        with self.broker.lock:
            self._at[log] = offset

    def poll(self, timeout_s: float) -> list[LogRecord]:
        with self.broker.lock:
            found = self._read()
            if not found and timeout_s > 0:
                self.broker.changed.wait(timeout_s)
                found = self._read()
            return found

    def _read(self) -> list[LogRecord]:
        found: list[LogRecord] = []
        for log, at in list(self._at.items()):
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

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        tp, at = TopicPartition(self.topic, log), start
        deadline = time.monotonic() + timeout_s
        while at < end:
            with self.broker.lock:
                error = self._out_of_log(tp, at)
                if error is not None:
                    raise error
                found = self.broker.read(tp, at, READ_MAX)
                if not found and not self.broker.changed.wait(deadline - time.monotonic()):
                    raise ClusterUnreachable("memory", f"offset {at} of coordination partition {log}", "nothing came")
            if found:
                at += len(found)
                yield [LogRecord(log, m.offset(), m.value(), m.timestamp()[1], m.key()) for m in found]

    def append(self, log: int, key: bytes, value: bytes) -> bool:
        if self.broker.queue_full:
            self.produce_errors += 1
            return False
        # If the broker is not writable the record is lost, as if a real producer timed out.
        if self.broker.writable:
            with contextlib.suppress(TopicMissing):
                self.broker.produce(self.topic, log, value, key)
        return True

    def bounds(self, log: int, timeout_s: float) -> Bounds:
        with self.broker.lock:
            return self.broker.bounds(TopicPartition(self.topic, log))

    def waiting_for(self) -> str:
        return ""

    def refused(self) -> MarshalError | None:
        return None

    def close(self, flush_s: float) -> None:
        self._at.clear()


class MemorySource:
    """Implements DataSource over a MemoryBroker."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self._assignments = Assignments()
        self._closed = False

    def learn_leaders(self, topics: Iterable[str]) -> None:
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

    def _read(self, max_messages: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._closed:
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
                chunks.append(Chunk(tp, self._assignments.received(tp, fetched.reached + len(messages)), messages))
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

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[RawMessage]]:
        for tp, start in starts.items():
            at, end = start, ends[tp]
            while at < end:
                with self.broker.lock:
                    if not self.broker.has(tp):
                        raise RangeLost(tp.topic, tp.partition, at, end, "no such partition")
                    bounds = self.broker.bounds(tp)
                    if not bounds.first <= at <= bounds.end:
                        raise RangeLost(tp.topic, tp.partition, at, end, f"it holds {bounds.first} to {bounds.end}")
                    found = self.broker.read(tp, at, min(READ_MAX, end - at))
                if not found:
                    break  # the end of the partition
                at += len(found)
                yield found

    def close(self) -> None:
        pass


class MemoryTopics:
    """Implements TopicAdmin over a MemoryBroker."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    def create(
        self, name: str, partitions: int, replication: int | None, config: Mapping[str, str], dry_run: bool
    ) -> None:
        with self.broker.lock:
            if name in self.broker.topics:
                raise TopicExists(name)
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

    def _topic(self, name: str) -> list[list[MemoryMessage]]:
        if name not in self.broker.topics:
            raise TopicMissing(name)
        return self.broker.topics[name]


class MemoryAdmin:
    """Implements ClusterAdmin over a MemoryBroker."""

    capabilities = ALL_CAPABILITIES

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    def prepare_coordination(self, topic: str, partitions: int) -> int:
        with self.broker.lock:
            if topic not in self.broker.topics:
                if not self.broker.may_create:
                    raise CoordinationTopicMissing(topic, "not allowed", f"create_topic({topic!r}, {partitions})")
                self.broker.create_topic(topic, partitions)
            check_settings(topic, self.broker.settings[topic], self.broker.brokers, self.broker.brokers, "memory")
            return len(self.broker.topics[topic])

    def describe_topic(self, topic: str) -> TopicInfo | None:
        with self.broker.lock:
            found = self.broker.topics.get(topic)
            known = str(self.broker.ids[topic]) if found is not None and self.broker.tells_ids else ""
            return None if found is None else TopicInfo(len(found), known)

    def topics(self) -> frozenset[str]:
        with self.broker.lock:
            return frozenset(self.broker.topics)

    def partition_count(self, topic: str) -> int | None:
        found = self.describe_topic(topic)
        return None if found is None else found.partitions

    def bounds(self, tps: Sequence[TopicPartition], *, committed: bool = False) -> dict[TopicPartition, Bounds]:
        with self.broker.lock:
            for tp in tps:
                if not self.broker.has(tp):
                    raise ClusterUnreachable("memory", f"the ends of {tp}", "there is no such partition")
            return {tp: self.broker.bounds(tp) for tp in tps}

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

    def topic_admin(self) -> MemoryTopics:
        return MemoryTopics(self.broker)

    def live_kafka_members(self, group: str) -> int:
        return self.broker.live_kafka.get(group, 0)

    def settings(self, topic: str) -> dict[str, str]:
        return dict(self.broker.settings[topic])

    def close(self) -> None:
        pass


class MemoryTransport:
    """Gives access to a MemoryBroker."""

    name = "memory"

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    def log(self, topic: str, client_id: str, writes: bool = True) -> MemoryLog:
        return MemoryLog(self.broker, topic)

    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> MemorySource:
        return MemorySource(self.broker)

    def reader(self, client_id: str, settings: Mapping[str, Any]) -> MemoryReader:
        return MemoryReader(self.broker)

    def admin(self) -> MemoryAdmin:
        return MemoryAdmin(self.broker)
