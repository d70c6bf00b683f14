"""Reports how far a question has read: a MessageReader around another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import MessageReader, RawMessage

Progress = Callable[[int, int], None]


class ReportingReader:
    """A MessageReader over another one that calls `on_progress(read, wanted)` after each list: how many offsets of all
    ranges so far are done."""

    def __init__(self, reader: MessageReader, on_progress: Progress) -> None:
        self._reader, self._on_progress = reader, on_progress
        self._read = self._wanted = 0

    def read(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], timeout_s: float
    ) -> Iterator[Sequence[RawMessage]]:
        self._wanted += sum(ends[tp] - start for tp, start in starts.items())
        for messages in self._reader.read(starts, ends, timeout_s):
            self._read += len(messages)
            self._on_progress(min(self._read, self._wanted), self._wanted)
            yield messages
        self._read = self._wanted  # holes are read, too

    def close(self) -> None:
        self._reader.close()
