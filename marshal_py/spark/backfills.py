"""`spark.read.format("marshal")`: messages between two points, as a batch. No group, no claims, no position.

For what has to be read again while the group goes on: a table that is made anew, a day that was counted wrong. The
driver looks the points up whenever Spark plans a job, and the tasks read explicit ranges (reading.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from marshal_py.client import start_positions
from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.client.options import check_topics
from marshal_py.errors import InvalidOption, TopicMissing
from marshal_py.protocol.identity import TopicPartition
from marshal_py.spark.aliases import translated
from marshal_py.spark.messages import COLUMNS, columns_of
from marshal_py.spark.options import OPTIONS as STREAM_OPTIONS
from marshal_py.spark.options import READ_TIMEOUT_S, check_names, kafka_options, min_partitions, number
from marshal_py.spark.reading import RangePartition, read_ranges
from marshal_py.spark.tasks import Piece, tasks_of
from marshal_py.transport.kafka import KafkaTransport

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.transport.ports import ClusterAdmin

OPTIONS: Final = (
    "bootstrap.servers",
    "topics",
    "start",
    "until",
    "columns",
    "min_partitions",
    "read_timeout_s",
    "connect_timeout_s",
)
_COLUMNS: Final = tuple(name for name in COLUMNS if name != "token")
_GROUP: Final = (
    "a batch read holds no claims and leaves groups alone: leave it out, or take spark.readStream, or "
    "marshal_py.spark.claimed_batches"
)


@dataclass(frozen=True)
class BackfillOptions:
    """`start` and `until` have the form of a consumer's `start`: a word, a time, or offsets by partition."""

    topics: tuple[str, ...]
    start: str
    until: str
    columns: tuple[str, ...]
    min_partitions: int | None
    read_timeout_s: float
    connect_timeout_s: float
    kafka: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, str]) -> BackfillOptions:
        """`given`: under our names or those of Spark's own Kafka source. Raises InvalidOption, InvalidName."""
        options, said = translated(given, bounded=True)
        if "group" in options:
            raise InvalidOption("group", options["group"], _GROUP)
        try:
            check_names(options, OPTIONS)
        except InvalidOption as error:
            name = said.get(error.option, error.option)
            if error.option in STREAM_OPTIONS:
                raise InvalidOption(
                    "group", None, f"a stream needs it; without group this is a batch read, which has no option {name}"
                ) from error
            raise InvalidOption(name, error.value, error.rule) from error
        for name in ("topics", "bootstrap.servers"):
            if not options.get(name):
                raise InvalidOption(name, options.get(name), "it must be given, and a stream needs group, too")
        columns = columns_of(options["columns"]) if "columns" in options else _COLUMNS
        if "token" in columns and "columns" in given:
            raise InvalidOption("columns", options["columns"], "a batch read has no claims: its rows have no token")
        start, until = options.get("start", start_positions.EARLIEST), options.get("until", start_positions.LATEST)
        topics = check_topics([topic.strip() for topic in options["topics"].split(",") if topic.strip()])
        for name, text in (("start", start), ("until", until)):
            start_positions.parse_fixed(text, name)
        return cls(
            topics=topics,
            start=start,
            until=until,
            columns=tuple(n for n in columns if n != "token"),
            min_partitions=min_partitions(options),
            read_timeout_s=number(options, "read_timeout_s", READ_TIMEOUT_S, 1.0),
            connect_timeout_s=number(options, "connect_timeout_s", CONNECT_TIMEOUT_S, 1.0),
            kafka=kafka_options(options),
        )


class BackfillReader(DataSourceReader):
    """Asks the cluster when Spark plans a job, and not before."""

    def __init__(self, options: BackfillOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Raises TopicMissing, InvalidOption, PositionOutOfRange, ClusterUnreachable, AccessDenied."""
        options = self.options
        admin = KafkaTransport(options.kafka, options.connect_timeout_s).admin()
        try:
            pieces = self._pieces(admin)
        finally:
            admin.close()
        return [
            RangePartition(task, options.kafka, options.read_timeout_s, once=False, columns=options.columns)
            for task in tasks_of(pieces, options.min_partitions)
        ]

    def _pieces(self, admin: ClusterAdmin) -> list[Piece]:
        options = self.options
        committed = options.kafka.get("isolation.level", "read_committed") == "read_committed"
        tps = self._partitions(admin)
        begins = start_positions.offsets(options.start, "start", tps, admin, committed=committed)
        ends = start_positions.offsets(options.until, "until", tps, admin, committed=committed)
        until = start_positions.parse(options.until, "until")
        for tp in tps:
            end = until.named.get(tp, until.rest)
            if begins[tp] > ends[tp] and end is not None and end.kind != start_positions.LATEST:
                raise InvalidOption(
                    "until",
                    options.until,
                    f"it lies before start={options.start}: {tp} would be read from {begins[tp]} to {ends[tp]}",
                )
        return [Piece(*tp, begins[tp], max(begins[tp], ends[tp]), "") for tp in tps]

    def _partitions(self, admin: ClusterAdmin) -> list[TopicPartition]:
        """Those that `start` or `until` name by their numbers; else all of the topics."""
        options = self.options
        counts: dict[str, int] = {}
        for topic in options.topics:
            count = admin.partition_count(topic)
            if count is None:
                raise TopicMissing(topic)
            counts[topic] = count
        everything = [TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)]
        for name, text in (("start", options.start), ("until", options.until)):
            named = start_positions.parse(text, name).named
            if unknown := sorted(named.keys() - set(everything)):
                raise InvalidOption(name, text, f"{unknown[0]} is no partition of {', '.join(options.topics)}")
            if named:
                return sorted(named)
        return everything

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes one partition without value of an empty list.
        return read_ranges(partition) if isinstance(partition, RangePartition) else iter(())
