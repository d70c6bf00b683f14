"""Connects to one coordination topic, finds its root, and reads its logs to their ends and beyond. Creates nothing.

Observers, admin operations and tools for whole logs each have such a connection of their own. A Marshal's background
thread reads the same way (replay.py says where a log begins), but its users wait in other threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from marshal_py.errors import ClusterUnreachable, CoordinationTopicMissing, HistoryTruncated, TopicRecreated
from marshal_py.log import replay
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Genesis
from marshal_py.transport.ports import Bounds, ClusterAdmin, CoordinationLog, LogRecord, Transport

POLL_S: Final = 0.1  # seconds that a reader waits at a time, so that ctrl-C can end it
READ_TIMEOUT_S: Final = 30.0  # without a record before a known end; then the cluster counts as unreachable
CHECK_S: Final = 5.0  # as often a reader that goes on asks whether its topic is still the same: a request


class LogReader:
    """Reads the logs of one coordination topic. One thread at a time.

    - `root`: the Genesis that counts for all logs, once `find_root` has found it.
    - `root_value`: the bytes of its record, or of a copy if that is deleted.
    - `count`: how many partitions the topic has.
    """

    admin: ClusterAdmin
    log: CoordinationLog

    def __init__(
        self, transport: Transport, topic: str, who: str, timeout_s: float = READ_TIMEOUT_S, *, writes: bool = False
    ) -> None:
        """Connects. `who`: for the client id. `timeout_s`: for the next record. `writes`: the producer connects at
        once."""
        self.topic: str = topic
        self.timeout_s: float = timeout_s
        self.root: Genesis | None = None
        self.root_value: bytes | None = None
        self._passed: dict[int, int] = {}  # by log: the offset from which polls continue
        self.admin = transport.admin()
        try:
            info = self.admin.describe_topic(topic)
            if info is None:
                raise CoordinationTopicMissing(
                    topic, "reading it creates nothing", "start a consumer, which creates it, or name the right topic"
                )
            self.count: int = info.partitions
            self._topic_id: str = info.topic_id
            self._check_due_s: float = time.monotonic() + CHECK_S
            self.log = transport.log(topic, f"{who}-{transport.name}", writes=writes)
        except BaseException:
            self.admin.close()
            raise

    def close(self, flush_s: float = 0.0) -> None:
        """Disconnects. `flush_s`: how long it may take to send what was appended, in seconds."""
        self.log.close(flush_s)
        self.admin.close()

    def bounds(self, logs: Iterable[int]) -> dict[int, Bounds]:
        """Returns the first and the end offset of each of these logs. Raises ClusterUnreachable."""
        tps = [TopicPartition(self.topic, log) for log in logs]
        found = self.admin.bounds(tps, timeout_s=self.timeout_s) if tps else {}
        return {tp.partition: bounds for tp, bounds in found.items()}

    def check_topic(self) -> None:
        """Raises TopicRecreated if the topic is not the one that was opened, even where offsets fit (L8). It asks every
        CHECK_S. A topic that is gone is for the next request to tell."""
        now_s = time.monotonic()
        if now_s < self._check_due_s:
            return
        self._check_due_s = now_s + CHECK_S
        info = self.admin.describe_topic(self.topic)
        if info is not None and self._topic_id and info.topic_id != self._topic_id:
            raise TopicRecreated(0, f"topic id {self._topic_id}", info.topic_id)

    def find_root(self) -> Genesis | None:
        """Returns the root of log 0 (L3), None if nobody has begun. Raises ForeignTopic, TopicRecreated for fewer
        partitions than it says, HistoryTruncated, ClusterUnreachable."""
        if self.root is None:
            bounds = self.bounds([0])[0]
            if not replay.is_short(bounds):  # else it is folded just as fast
                replay.refuse_foreign(self.admin, self.log, self.topic)
            if not bounds.first:
                try:
                    self.root = self._first_genesis(bounds.end)
                except HistoryTruncated:  # by a consumer, since the log was asked where it begins
                    bounds = self.bounds([0])[0]
            if bounds.first:
                self.root = replay.open_world(self.log, 0, None, bounds).genesis
                assert self.root is not None  # a snapshot names it
                self.root_value = codec.encode(self.root, "", self.root.incarnation)
            if self.root is None:
                replay.refuse_foreign(self.admin, self.log, self.topic)
            elif self.root.partitions > self.count:
                raise TopicRecreated(0, f"{self.root.partitions} partitions", str(self.count))
        return self.root

    def _first_genesis(self, end: int) -> Genesis | None:
        world = World(0)
        for record in self.records({0: end}, {}):
            rationalizer.apply(world, record.offset, record.value)
            if world.genesis is not None:
                self.root_value = record.value
                break
        return world.genesis

    def open_world(self, log: int, at: int | None = None) -> World:
        """Returns the world to read this log on from (N9, replay.open_world). Call `find_root` before."""
        (bounds,) = self.bounds([log]).values()
        return replay.open_world(self.log, log, self.root_of(log), bounds, at)

    def root_of(self, log: int) -> Genesis | None:
        """Returns the root as a world of this log knows it from the beginning: None for log 0, which holds it."""
        return self.root if log else None

    # --- reading

    def follow(self, log: int, at: int) -> None:
        """Has `poll` return this log's records from `at` on, also those that came already."""
        if self._passed.get(log) != at:
            self._passed[log] = at
            self.log.follow(log, at)

    def poll(self, wait_s: float = POLL_S) -> list[LogRecord]:
        """Returns new records of the followed logs; [] after `wait_s`. Raises AccessDenied as soon as the cluster
        refuses."""
        records = self.log.poll(wait_s)
        for record in records:
            self._passed[record.log] = record.offset + 1
        if not records and (refused := self.log.refused()) is not None:
            raise refused
        return records

    def records(self, ends: Mapping[int, int], at: Mapping[int, int]) -> Iterator[LogRecord]:
        """Yields the logs' records from the offsets `at` to those of `ends` (a few more may come). Others of followed
        logs come again later. The caller may stop anywhere. Raises ClusterUnreachable after `timeout_s` without any."""
        left = {log for log, end in ends.items() if at.get(log, 0) < end}
        for log in left:
            self.follow(log, at.get(log, 0))
        deadline = time.monotonic() + self.timeout_s
        while left:
            records = self.poll()
            if records:
                deadline = time.monotonic() + self.timeout_s
            elif time.monotonic() >= deadline:
                raise self.unreachable(min(left))
            for record in records:
                end = ends.get(record.log)
                if end is None:
                    continue
                if record.offset + 1 >= end:
                    left.discard(record.log)
                yield record  # also after the end: it came with the rest and would be lost otherwise

    def unreachable(self, log: int) -> ClusterUnreachable:
        """Returns the error for a log whose next record does not come."""
        reason = self.log.waiting_for() or "no answer in time"
        return ClusterUnreachable("the cluster", f"the end of coordination partition {log}", reason)
