"""Batch reads of `spark.read.format("marshal")`: messages between two points, or the ranges of a claimed batch.

The first is for reading messages again while the group continues, for example to rebuild a table or to correct one day;
it has no group, no claims and no position. The driver looks up the offsets of the two points each time Spark plans a
job. The second has the option `ranges` (the JSON that `ranges_json` writes), and `once` (true: a task that Spark tries
again fails). Tasks read both (range_reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from marshal_py.client.values import position_text
from marshal_py.client.values.options import CONNECT_TIMEOUT_S
from marshal_py.errors import InvalidOption, TopicMissing
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.spark.stream.aliases import named_as_given, named_as_written, translate
from marshal_py.spark.stream.messages import COLUMNS, columns_of
from marshal_py.spark.stream.options import OPTIONS as STREAM_OPTIONS
from marshal_py.spark.stream.options import ReadOptions, check_names, flag, number, topics_of
from marshal_py.spark.stream.range_reader import Piece, partitions_of, read_ranges, source_text
from marshal_py.transport.kafka import KafkaTransport

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.transport.ports import ClusterAdmin

OPTIONS: Final = (
    "bootstrap.servers", "topics", "start", "until", "columns", "min_partitions", "read_timeout_s", "connect_timeout_s",
)  # fmt: skip
_COLUMNS: Final = tuple(name for name in COLUMNS if name != "token")
_GROUP: Final = (
    "a batch read holds no claims and leaves groups alone: leave it out, or take spark.readStream, or "
    "marshal_py.spark.claimed_batches"
)


@dataclass(frozen=True)
class BackfillOptions(ReadOptions):
    """The checked options. `start` and `until` are earliest, latest, a time, or offsets by partition."""

    topics: tuple[str, ...]
    start: str
    until: str
    connect_timeout_s: float

    @classmethod
    def of(cls, given: Mapping[str, str]) -> BackfillOptions:
        """Parses options, also under Spark's own names. Raises InvalidOption."""
        options, given_names = translate(given, batch_read=True)
        if "group" in options:
            raise InvalidOption("group", options["group"], _GROUP)
        for name in options:
            if name in STREAM_OPTIONS and name not in OPTIONS:
                rule = f"a stream needs it; without group this is a batch read, which has no option {given_names[name]}"
                raise InvalidOption("group", None, rule)
        check_names(options, OPTIONS)
        with named_as_given(given_names):
            return cls._of(options)

    @classmethod
    def _of(cls, options: Mapping[str, str]) -> BackfillOptions:
        for name in ("topics", "bootstrap.servers"):
            if not options.get(name):
                raise InvalidOption(name, options.get(name), "it must be given, and a stream needs group, too")
        columns = columns_of(options["columns"]) if "columns" in options else _COLUMNS
        if "token" in columns:
            raise InvalidOption("columns", options["columns"], "a batch read has no claims: its rows have no token")
        start, until = options.get("start", position_text.EARLIEST), options.get("until", position_text.LATEST)
        topics = topics_of(options["topics"])
        for name, text in (("start", start), ("until", until)):
            position_text.parse_fixed(text, name)
        return cls(
            topics=topics,
            start=start,
            until=until,
            connect_timeout_s=number(options, "connect_timeout_s", CONNECT_TIMEOUT_S, 1.0),
            **vars(ReadOptions.parse(options, tuple(name for name in columns if name != "token"))),
        )


class BackfillReader(DataSourceReader):
    """Plans and reads the messages. It asks the cluster only when Spark plans a job."""

    def __init__(self, options: BackfillOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Returns the tasks. Raises TopicMissing, InvalidOption, PositionOutOfRange, ClusterUnreachable,
        AccessDenied."""
        kafka = self.options.kafka
        with named_as_written(kafka), closing(KafkaTransport(kafka, self.options.connect_timeout_s).admin()) as admin:
            return partitions_of(self._pieces(admin), self.options, once=False)

    def _pieces(self, admin: ClusterAdmin) -> list[Piece]:
        options = self.options
        committed = options.kafka.get("isolation.level", "read_committed") == "read_committed"
        tps, ids = self._partitions(admin)
        begins = position_text.offsets(options.start, "start", tps, admin, committed=committed)
        ends = position_text.offsets(options.until, "until", tps, admin, committed=committed)
        until = position_text.parse(options.until, "until")
        for tp in tps:
            end = until.named.get(tp, until.rest)
            if begins[tp] > ends[tp] and end is not None and end.kind != position_text.LATEST:
                raise InvalidOption(
                    "until",
                    options.until,
                    f"it lies before start={options.start}: {tp} would be read from {begins[tp]} to {ends[tp]}",
                )
        pieces = ((*tp, begins[tp], max(begins[tp], ends[tp])) for tp in tps)
        return [
            Piece(topic, number, start, to, "", source_text(ids[topic], start, to))
            for topic, number, start, to in pieces
        ]

    def _partitions(self, admin: ClusterAdmin) -> tuple[list[TopicPartition], dict[str, str]]:
        """Returns the partitions that `start` or `until` names, or all of the topics, and each topic's id."""
        options = self.options
        counts: dict[str, int] = {}
        ids: dict[str, str] = {}
        for topic in options.topics:
            info = admin.describe_topic(topic)
            if info is None:
                raise TopicMissing(topic)
            counts[topic], ids[topic] = info.partitions, info.topic_id
        all_partitions = [TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)]
        for name, text in (("start", options.start), ("until", options.until)):
            named = position_text.parse(text, name).named
            if unknown := sorted(named.keys() - set(all_partitions)):
                raise InvalidOption(name, text, f"{unknown[0]} is no partition of {', '.join(options.topics)}")
            if named:
                return sorted(named), ids
        return all_partitions, ids

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(partition)


RANGE_OPTIONS: Final = ("ranges", "bootstrap.servers", "columns", "min_partitions", "read_timeout_s", "once")


def ranges_json(pieces: Iterable[Piece]) -> str:
    """Returns the value of the option `ranges`: [[topic, partition, start, to, token, source], ...]."""
    return json.dumps([list(piece) for piece in pieces])


def _pieces(text: str) -> list[Piece]:
    rule = "a JSON list of [topic, partition, start, to, token, source]; ranges_json writes it"
    try:
        pieces = [Piece(*item) for item in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise InvalidOption("ranges", text, rule) from error
    seen: set[tuple[str, int]] = set()
    for piece in pieces:
        kinds = (str, int, int, int, str, str)
        if not all(type(field) is kind for field, kind in zip(piece, kinds, strict=True)):
            raise InvalidOption("ranges", list(piece), rule)
        if not 0 <= piece.start <= piece.to or piece.partition < 0:
            raise InvalidOption("ranges", list(piece), "0 <= start <= to, and a partition from 0 on")
        if (piece.topic, piece.partition) in seen:
            raise InvalidOption("ranges", list(piece), "one range of each partition; others in a read of their own")
        seen.add((piece.topic, piece.partition))
    return pieces


@dataclass(frozen=True)
class RangeOptions(ReadOptions):
    """The checked options of a read of explicit ranges."""

    pieces: tuple[Piece, ...]
    once: bool

    @classmethod
    def of(cls, given: Mapping[str, str]) -> RangeOptions:
        """Parses the options. Raises InvalidOption."""
        check_names(given, RANGE_OPTIONS)
        pieces = tuple(_pieces(given["ranges"]))
        return cls(pieces=pieces, once=flag(given, "once"), **vars(ReadOptions.parse(given)))


class RangesReader(DataSourceReader):
    """Plans and reads the ranges. Only tasks connect to Kafka."""

    def __init__(self, options: RangeOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return partitions_of(self._options.pieces, self._options, once=self._options.once)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(partition)
