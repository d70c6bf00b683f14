"""A small Kafka in memory: topics, committed offsets, Kafka groups, and switches for faults.

It uses no network and no files, and knows nothing of the protocol. memory.py gives access to it. Each transport has a
MemoryConnection of its own, so that a test can cut off one client and not the others.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from itertools import count
from typing import Final
from weakref import WeakValueDictionary

from marshal_py.errors import ClusterUnreachable, InvalidOption, TopicMissing
from marshal_py.protocol.wire.identity import TopicPartition, check_topic
from marshal_py.transport.clock import SystemClock
from marshal_py.transport.ports import Bounds, Clock
from marshal_py.transport.topic_checks import KEEP_FOREVER

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


def broker_named(servers: str) -> MemoryBroker:
    """Returns the broker of this process whose `bootstrap_servers` are given. Raises InvalidOption."""
    found = _open.get(servers)
    if found is None:
        known = ", ".join(sorted(_open)) or "none"
        raise InvalidOption("bootstrap.servers", servers, f"a cluster in memory that exists in this process: {known}")
    return found


class MemoryConnection:
    """Connects one transport to a MemoryBroker. While it is cut, nothing can be read and what is written is lost."""

    __slots__ = ("broker", "cut")

    broker: MemoryBroker
    cut: bool

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker, self.cut = broker, False

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
