"""Sources of coordination log records: a live topic, a dump file, a Parquet archive.

A source is a small picklable value. The planner asks it for the spans of the logs, and a task reads one log from it.
Records are (log, offset, time in ms, key, value), each log without gaps and in order. Must not fold, nor import Spark.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.fs  # not pyarrow.dataset: it imports pandas, 0.3 s in each of Spark's planning processes
import pyarrow.parquet

from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.client.values.options import COORDINATION_TOPIC
from marshal_py.errors import HistoryTruncated, InvalidOption, LogGap, TopicRecreated
from marshal_py.log.reader import LogReader
from marshal_py.log.replay import root_among
from marshal_py.protocol.wire.records import OFFSET_MAX, Genesis
from marshal_py.spark.log.columns import RAW, times_ms
from marshal_py.spark.stream.aliases import named_as_written
from marshal_py.spark.stream.options import kafka_options
from marshal_py.transport.dump import Reader
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import Bounds

Raw = tuple[int, int, int, bytes | None, bytes | None]  # log, offset, time in ms, key, value

_OF_LOG: Final = re.compile(r"log=(\d+)").fullmatch
ROWS_PER_READ: Final = 8_192  # rows read at a time from an archive's file, per open file


class LogSource(Protocol):
    """Reads coordination logs from one place: a topic, a dump or an archive.

    Every method raises CoordinationError, ClusterUnreachable, DumpDamaged, InvalidOption.
    """

    def spans(self) -> dict[int, Bounds]:
        """Returns, for each log that has records, its first offset and its end, as of now."""

    def read(self, log: int, first: int, end: int) -> Iterator[Raw]:
        """Yields the records [first, end) of one log. Raises LogGap if one is missing."""


def root_of(origin: LogSource) -> Genesis | None:
    """Returns the Genesis that holds for all logs (L3), or None if no client has written one.

    Raises HistoryTruncated if it is deleted and no confirmed snapshot names it.
    """
    first, end = origin.spans().get(0, Bounds(0, 0))
    records = origin.read(0, first, end) if first < end else ()
    found = root_among(first, ((offset, value) for _, offset, _, _, value in records))
    if found is None and first > 0:
        raise HistoryTruncated(0, first)
    return found


@dataclass
class TopicSource:
    """Reads a live coordination topic. `settings` are librdkafka's. `options`: they were given as options of a format,
    where their names begin with `kafka.`.
    """

    settings: Mapping[str, Any]
    topic: str
    options: bool = False
    topic_id: str = ""  # as `spans` has seen it first

    def _named(self) -> AbstractContextManager[None]:
        return named_as_written(self.settings) if self.options else nullcontext()

    def _reader(self) -> LogReader:
        quiet = {"log_level": 0}  # errors say what librdkafka would print
        with self._named():
            return LogReader(KafkaTransport({**quiet, **self.settings}, CONNECT_TIMEOUT_S), self.topic, "spark")

    def spans(self) -> dict[int, Bounds]:
        """Returns the spans. Raises TopicRecreated if the topic is not the one of the first call."""
        with closing(self._reader()) as reader:
            info = reader.admin.describe_topic(self.topic)
            topic_id = "" if info is None else info.topic_id
            if self.topic_id not in ("", topic_id):
                raise TopicRecreated(0, f"topic id {self.topic_id}", topic_id)
            self.topic_id = topic_id
            found = reader.bounds(range(reader.count))
        return {log: bounds for log, bounds in found.items() if bounds.first < bounds.end}

    def read(self, log: int, first: int, end: int) -> Iterator[Raw]:
        """Yields the records [first, end) of one log. Raises ClusterUnreachable after READ_TIMEOUT_S without a
        record.
        """
        with closing(self._reader()) as reader:
            for record in reader.records({log: end}, {log: first}):
                if record.offset < end:
                    yield record.log, record.offset, record.timestamp_ms, record.key, record.value


@dataclass
class DumpSource:
    """Reads a file of `marshal log dump`. Every task reads all of it, because each checksum depends on those before
    it.
    """

    path: str

    def spans(self) -> dict[int, Bounds]:
        with Reader(Path(self.path)) as reader:
            return {span.log: Bounds(span.first, span.end) for span in reader.header.logs if span.first < span.end}

    def read(self, log: int, first: int, end: int) -> Iterator[Raw]:
        with Reader(Path(self.path)) as reader:
            for record in reader:
                if record.log == log and first <= record.offset < end:
                    yield record.log, record.offset, record.timestamp_ms, record.key, record.value


_Row = tuple[int, int, bytes | None, bytes | None]  # offset, time in ms, key, value


def _batches(file: pyarrow.parquet.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yields the rows of an archive's file, in the order of their offsets."""
    return file.iter_batches(ROWS_PER_READ, columns=list(RAW[1:]))  # type: ignore[no-any-return]


def _cells(batch: pa.RecordBatch) -> tuple[list[int], list[int], list[bytes | None], list[bytes | None]]:
    offsets, times, keys, values = (batch.column(name) for name in RAW[1:])
    return offsets.to_pylist(), times_ms(times), keys.to_pylist(), values.to_pylist()


def _is_run(batch: pa.RecordBatch, first: int, end: int) -> bool:
    """Returns True if the batch's offsets count up from `first` without holes or repeats, and are all below `end`."""
    offsets, last = batch.column("offset"), first + batch.num_rows - 1
    return last < end and bool(offsets.equals(pa.array(range(first, last + 1), pa.int64())))


@dataclass
class ArchiveSource:
    """Reads a folder that `marshal spark archive` wrote: log=N/day=D/*.parquet, on any file system that pyarrow
    reads.
    """

    path: str

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # each process opens the files itself

    @cached_property
    def _system(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """Returns the file system, and the folder in it. A path that is not a URI may be relative."""
        path = self.path if "://" in self.path else str(Path(self.path).absolute())
        try:
            system, folder = pyarrow.fs.FileSystem.from_uri(path)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        return system, folder

    def _unreadable(self, error: Exception) -> InvalidOption:
        return InvalidOption("path", self.path, f"an archive or a dump that can be read ({error})")

    @cached_property
    def _files(self) -> dict[int, list[str]]:
        """Returns the files of each log. Leaves out files whose names begin with _ or ., because these are Spark's
        own.
        """
        system, folder = self._system
        try:
            found = system.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True))
        except OSError as error:
            raise self._unreadable(error) from error
        files: dict[int, list[str]] = {}
        for file in found:
            parts = file.path.removeprefix(folder).strip("/").split("/")
            if file.is_file and not any(part.startswith(("_", ".")) for part in parts):
                log = _OF_LOG(parts[0])
                if log is None or len(parts) < 2:
                    raise InvalidOption(
                        "path",
                        self.path,
                        f"a folder written by `marshal spark archive`; {file.path} is in no folder log=N",
                    )
                files.setdefault(int(log[1]), []).append(file.path)
        return files

    @cached_property
    def _pieces_by_log(self) -> dict[int, list[tuple[int, int, str]]]:
        return {}

    def _pieces(self, log: int) -> list[tuple[int, int, str]]:
        """Returns (first offset, last offset, file) for each file of a log, in the order of the first offsets.

        The offsets are read from the files' statistics.
        """
        if log not in self._pieces_by_log:
            self._pieces_by_log[log] = sorted((*self._offsets_in(path), path) for path in self._files.get(log, ()))
        return self._pieces_by_log[log]

    def _open(self, path: str) -> pyarrow.parquet.ParquetFile:
        try:
            return pyarrow.parquet.ParquetFile(path, filesystem=self._system[0])
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def _offsets_in(self, path: str) -> tuple[int, int]:
        with self._open(path) as file:
            at = file.schema_arrow.get_field_index("offset")
            groups = [file.metadata.row_group(i).column(at).statistics for i in range(file.metadata.num_row_groups)]
        return min(group.min for group in groups), max(group.max for group in groups)

    def spans(self) -> dict[int, Bounds]:
        found = {}
        for log in sorted(self._files):
            pieces = self._pieces(log)
            found[log] = Bounds(pieces[0][0], max(last for _, last, _ in pieces) + 1)
        return found

    def read(self, log: int, first: int, end: int) -> Iterator[Raw]:
        """Yields the records [first, end) of one log, each once. Raises LogGap if one is missing.

        Files may overlap, if writers' clocks disagree about the day or if an interrupted run was repeated.
        """
        expected, previous = first, None
        for part in self._parts(log, first, end):
            if isinstance(part, pa.RecordBatch):
                if _is_run(part, expected, end):  # nearly always; then no row needs a check of its own
                    yield from zip(repeat(log), *_cells(part))
                    expected, previous = expected + part.num_rows, part.column("value")[-1].as_py()
                    continue
                part = zip(*_cells(part), strict=True)
            for offset, time_ms, key, value in part:
                if not first <= offset < end or (offset == expected - 1 and previous == value):
                    continue  # not wanted, or archived twice
                if offset != expected:
                    raise LogGap(log, expected, offset)
                yield log, offset, time_ms, key, value
                expected, previous = offset + 1, value
        if expected < end:
            raise LogGap(log, expected, end)

    def _parts(self, log: int, first: int, end: int) -> Iterator[pa.RecordBatch | Iterator[_Row]]:
        """Yields the rows of one log's files in the order of their offsets.

        A file that overlaps no other is read in batches. The rows of files that overlap are merged.
        """
        together: list[tuple[int, int, str]] = []
        for piece in [*self._pieces(log), (OFFSET_MAX, OFFSET_MAX, "")]:
            if together and piece[0] > max(last for _, last, _ in together):
                if len(together) == 1:
                    yield from _batches(self._open(together[0][2]))
                else:
                    yield self._merged(together)
                together = []
            if piece[1] >= first and piece[0] < end:
                together.append(piece)

    def _merged(self, waiting: list[tuple[int, int, str]]) -> Iterator[_Row]:
        """Yields the rows of overlapping files by offset. Each file is opened when its first offset comes, so few are
        open at once.
        """
        heads: list[tuple[int, int, _Row, Iterator[_Row]]] = []
        number = 0
        while waiting or heads:
            while waiting and (not heads or waiting[0][0] <= heads[0][0]):
                number += 1
                file = self._open(waiting.pop(0)[2])
                rows: Iterator[_Row] = (row for batch in _batches(file) for row in zip(*_cells(batch), strict=True))
                row = next(rows, None)
                if row is not None:
                    heapq.heappush(heads, (row[0], number, row, rows))
            _, tie, row, rows = heapq.heappop(heads)
            others = [waiting[0][0]] if waiting else []
            others += [heads[0][0]] if heads else []
            limit = min(others, default=OFFSET_MAX)
            yield row
            for row in rows:  # until another file has an earlier one
                if row[0] > limit:
                    heapq.heappush(heads, (row[0], tie, row, rows))
                    break
                yield row


def source_of(options: Mapping[str, str]) -> LogSource:
    """Returns the source that a format's options name: `path`, or `bootstrap.servers`, `kafka.*`, `coordination_topic`.

    Raises InvalidOption.
    """
    path, servers = options.get("path"), options.get("bootstrap.servers") or options.get("kafka.bootstrap.servers")
    if (path is None) == (servers is None):
        rule = "give bootstrap.servers (a live topic) or path (a dump or archive), not both"
        raise InvalidOption("path", path, rule, given=path is not None)
    if path is not None:
        local = path.removeprefix("file://")
        return DumpSource(local) if Path(local).is_file() else ArchiveSource(local)
    topic = options.get("coordination_topic", COORDINATION_TOPIC)
    return TopicSource(kafka_options(options), topic, options=True)
