"""Sources of coordination log records: a live topic and a dump file. An archive is a table: replays.py folds it.

A source is a small picklable value. The planner asks it for the spans of the logs, and a task reads one log from it.
Records are (log, offset, time in ms, key, value), each log without gaps and in order. Must not fold, nor import Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from marshal_py.client.values.options import CONNECT_TIMEOUT_S, COORDINATION_TOPIC
from marshal_py.errors import HistoryTruncated, InvalidOption, TopicRecreated
from marshal_py.log.reader import LogReader
from marshal_py.log.replay import root_among
from marshal_py.protocol.wire.records import Genesis
from marshal_py.spark.stream.aliases import named_as_written
from marshal_py.spark.stream.options import kafka_options
from marshal_py.transport.dump import Reader
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import Bounds

Raw = tuple[int, int, int, bytes | None, bytes | None]  # log, offset, time in ms, key, value


class LogSource(Protocol):
    """Reads coordination logs from one place: a topic or a dump. Every method raises CoordinationError,
    ClusterUnreachable, FileUnusable, InvalidOption."""

    def spans(self) -> dict[int, Bounds]:
        """Returns, for each log that has records, its first offset and its end, as of now."""

    def read(self, log: int, first: int, end: int) -> Iterator[Raw]:
        """Yields the records [first, end) of one log. Raises LogGap if one is missing."""


def root_of(origin: LogSource) -> Genesis | None:
    """Returns the Genesis for all logs (L3), None if nobody has written one. Raises HistoryTruncated if it is gone and
    no snapshot names it."""
    first, end = origin.spans().get(0, Bounds(0, 0))
    records = origin.read(0, first, end) if first < end else ()
    found = root_among(first, ((offset, value) for _, offset, _, _, value in records))
    if found is None and first > 0:
        raise HistoryTruncated(0, first)
    return found


@dataclass
class TopicSource:
    """Reads a live coordination topic. `settings` are librdkafka's. `options`: they were given as options of a format,
    where their names begin with `kafka.`."""

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
        """Yields the records [first, end) of one log. Raises ClusterUnreachable after READ_TIMEOUT_S."""
        with closing(self._reader()) as reader:
            for record in reader.records({log: end}, {log: first}):
                if record.offset < end:
                    yield record.log, record.offset, record.timestamp_ms, record.key, record.value


@dataclass
class DumpSource:
    """Reads a dump file; every task reads all of it, because each checksum depends on those before."""

    path: str

    def spans(self) -> dict[int, Bounds]:
        with Reader(Path(self.path)) as reader:
            return {span.log: Bounds(span.first, span.end) for span in reader.header.logs if span.first < span.end}

    def read(self, log: int, first: int, end: int) -> Iterator[Raw]:
        with Reader(Path(self.path)) as reader:
            for record in reader:
                if record.log == log and first <= record.offset < end:
                    yield record.log, record.offset, record.timestamp_ms, record.key, record.value


def source_of(options: Mapping[str, str]) -> LogSource:
    """Returns the source that a format's options name: `path`, or `bootstrap.servers`, `kafka.*`, `coordination_topic`.
    Raises InvalidOption."""
    path, servers = options.get("path"), options.get("bootstrap.servers") or options.get("kafka.bootstrap.servers")
    if (path is None) == (servers is None):
        rule = "give bootstrap.servers (a live topic) or path (a dump), not both"
        raise InvalidOption("path", path, rule, given=path is not None)
    if path is not None:
        local = path.removeprefix("file://")
        if not Path(local).is_file():
            rule = "a file that `marshal log dump` wrote"
            rule += "; an archive is a table: replay(read_archive(spark, path)) folds it"
            raise InvalidOption("path", path, rule)
        return DumpSource(local)
    topic = options.get("coordination_topic", COORDINATION_TOPIC)
    return TopicSource(kafka_options(options), topic, options=True)
