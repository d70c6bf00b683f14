"""A cluster in memory whose data sources return messages as librdkafka does: through one queue for all partitions.

A fetch brings one block per partition, one after the other. Nothing is fetched while the queue is long, or holds
`queue_bytes`; an answer brings half as many bytes at most. A pause or a new assignment drops what is queued of a
partition.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.memory import MemoryConnection, MemoryMessage, MemorySource, MemoryTransport
from marshal_py.transport.ports import Chunk
from tests.support.client_fixtures import MemoryTestCluster

BLOCK = 1_000  # messages of one partition that a fetch brings
QUEUED = 2_000  # from so many on nothing more is fetched


class OneQueueSource(MemorySource):
    """Counts its polls and the messages that it returned."""

    def __init__(self, connection: MemoryConnection, queue_bytes: int | None) -> None:
        super().__init__(connection)
        self._queue_bytes = sys.maxsize if queue_bytes is None else queue_bytes
        self._cut: TopicPartition | None = None  # did not fit into the last answer, so it comes first in the next one
        self._queue: deque[tuple[TopicPartition, int, MemoryMessage]] = deque()  # with the round that fetched it
        self._to: dict[tuple[TopicPartition, int], int] = {}  # what is fetched next, by round
        self.polls = self.handed_out = 0

    def _read(self, max_messages: int) -> list[Chunk]:
        self.polls += 1
        if self._closed:
            return []
        self._assignments.take(0)
        self._fetch()
        chunks: list[Chunk] = []
        for _ in range(min(max_messages, len(self._queue))):
            tp, round_, message = self._queue.popleft()
            if not chunks or chunks[-1].tp != tp:
                chunks.append(Chunk(tp, round_, []))
            chunks[-1].messages.append(message)  # type: ignore[attr-defined]
            self._assignments.received(tp, message.offset() + 1)
            self.handed_out += 1
        return chunks

    def _fetch(self) -> None:
        fetched = {(tp, one.round): one for tp, one in self._assignments.fetched.items() if not one.paused}
        self._queue = deque(entry for entry in self._queue if entry[:2] in fetched)
        if len(self._queue) >= QUEUED or sum(len(message) for _, _, message in self._queue) >= self._queue_bytes:
            return
        left_bytes = self._queue_bytes // 2
        begin = next((at for at, (tp, _) in enumerate(fetched) if tp == self._cut), 0)
        entries = list(fetched.items())
        for (tp, round_), one in entries[begin:] + entries[:begin]:
            at = self._to.get((tp, round_), one.reached)
            for message in self.broker.read(tp, at, BLOCK):
                left_bytes -= len(message)
                if left_bytes < 0:
                    self._cut = tp
                    return
                self._to[tp, round_] = message.offset() + 1
                self._queue.append((tp, round_, message))


class OneQueueTransport(MemoryTransport):
    def source(
        self, group: str, client_id: str, settings: Mapping[str, Any], queue_bytes: int | None = None
    ) -> OneQueueSource:
        return OneQueueSource(self.connection, queue_bytes)


class OneQueueTestCluster(MemoryTestCluster):
    @property
    def target(self) -> OneQueueTransport:
        return OneQueueTransport(self.broker)
