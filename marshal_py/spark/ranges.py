"""What executors do: read explicit offset ranges of Kafka into Arrow batches, and nothing else.

Strategy: one task per range, one librdkafka client per task, assigned by hand. A range is read when the position has
passed its last offset, however many offsets are missing in between (compaction, transactions); the partition's end
tells so where nothing follows. What cannot be read is an error: Spark's retry, or the next plan, is the way out. No
claim, no position and no coordination here: an executor cannot know them, so rows carry the claim's token.

`format("marshal-ranges")` takes `ranges` (the JSON that `ranges_json` writes), `bootstrap.servers`, `kafka.*` (any
librdkafka setting of a consumer), `columns`, `read_timeout_s` and `once` (true: a task that is tried again refuses).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition
from pyspark.sql.datasource import DataSourceReader, InputPartition

from marshal_py.errors import (
    ClusterUnreachable,
    InvalidOption,
    PartitionError,
    RangeLost,
    RangeReadTwice,
)
from marshal_py.spark.messages import COLUMNS, as_arrow, columns_of
from marshal_py.spark.options import READ_TIMEOUT_S, check_names, flag, kafka_options, number
from marshal_py.transport import settings

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.client.ranges import ClaimedRange

OPTIONS: Final = ("ranges", "bootstrap.servers", "columns", "read_timeout_s", "once")
BATCH_ROWS: Final = 10_000  # of one Arrow batch; from 1,000 to 50,000 it makes no difference
POLL_S: Final = 1.0  # a waiting task looks up so often
READER_ID: Final = "marshal-spark"  # client id, and the group id that librdkafka wants; nothing is committed under it

# A task reads its range as fast as it can and ends: librdkafka's defaults are made for consumers that stay (measured:
# a third of the rows per second). Memory is per task, and `kafka.` options win.
_FETCH: Final[Mapping[str, Any]] = {
    "queued.min.messages": 200_000,
    "queued.max.messages.kbytes": 65_536,
    "fetch.message.max.bytes": 5_000_000,
    "fetch.wait.max.ms": 10,
    "enable.partition.eof": True,  # the only sign of a range whose last offsets are missing at the log's end
}
_REFUSED: Final = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError._FATAL,
})  # fmt: skip


class Piece(NamedTuple):
    """Offsets [start, to) of one partition, with the token of the claim under which they are read."""

    topic: str
    partition: int
    start: int
    to: int
    token: str


class RangePartition(InputPartition):
    """One task. Everything that it needs is in here: a reader is pickled long before its partitions are planned."""

    def __init__(self, piece: Piece, kafka: Mapping[str, Any], timeout_s: float, once: bool,
                 columns: Sequence[str] = COLUMNS) -> None:  # fmt: skip
        super().__init__(piece)
        self.kafka, self.timeout_s, self.once, self.columns = dict(kafka), timeout_s, once, tuple(columns)


def pieces_of(ranges: Iterable[ClaimedRange]) -> list[Piece]:
    return [Piece(one.topic, one.partition, one.start, one.to, str(one.token)) for one in ranges]


def ranges_json(pieces: Iterable[Piece]) -> str:
    """The value of the option `ranges`: [[topic, partition, start, to, token], ...]."""
    return json.dumps([list(piece) for piece in pieces])


def _pieces(text: str | None) -> list[Piece]:
    rule = "a JSON list of [topic, partition, start, to, token], as marshal_py.spark.ranges.ranges_json writes it"
    try:
        pieces = [Piece(*item) for item in json.loads(text or "")]
    except (ValueError, TypeError) as error:
        raise InvalidOption("ranges", text, rule) from error
    for piece in pieces:
        kinds = (str, int, int, int, str)
        if not all(type(field) is kind for field, kind in zip(piece, kinds, strict=True)):
            raise InvalidOption("ranges", list(piece), rule)
        if not 0 <= piece.start <= piece.to or piece.partition < 0:
            raise InvalidOption("ranges", list(piece), "0 <= start <= to, and a partition from 0 on")
    return pieces


class RangesReader(DataSourceReader):
    """The batch source. Makes no client before a task reads."""

    def __init__(self, options: Mapping[str, str]) -> None:
        check_names(options, OPTIONS)
        self._pieces = _pieces(options.get("ranges"))
        self._kafka = kafka_options(options)
        self._columns = columns_of(options.get("columns"))
        self._timeout_s = number(options, "read_timeout_s", READ_TIMEOUT_S, 1.0)
        self._once = flag(options, "once")

    def partitions(self) -> Sequence[InputPartition]:
        return [RangePartition(piece, self._kafka, self._timeout_s, self._once, self._columns)
                for piece in self._pieces if piece.start < piece.to]  # fmt: skip

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes one partition without value of an empty list.
        return read_range(partition) if isinstance(partition, RangePartition) else iter(())


def read_range(partition: RangePartition) -> Iterator[pa.RecordBatch]:
    """The messages of one range. Raises RangeLost, RangeReadTwice, PartitionError, ClusterUnreachable."""
    piece = partition.value
    if partition.once:
        _refuse_retry(piece)
    configuration = settings.data_reader({**_FETCH, **partition.kafka}, READER_ID, READER_ID, None)
    consumer = settings.made(Consumer, configuration)
    try:
        consumer.assign([KafkaPartition(piece.topic, piece.partition, piece.start)])
        yield from _batches(consumer, partition, str(configuration["bootstrap.servers"]))
    finally:
        consumer.close()


def _refuse_retry(piece: Piece) -> None:
    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = 0 if context is None else context.attemptNumber()
    if attempt:
        raise RangeReadTwice(piece.topic, piece.partition, piece.start, piece.to, attempt)


def _batches(consumer: Consumer, partition: RangePartition, servers: str) -> Iterator[pa.RecordBatch]:
    """Arrow batches of BATCH_ROWS, smaller where the broker is slower than the reader."""
    piece, timeout_s = partition.value, partition.timeout_s
    same = {"topic": piece.topic, "partition": piece.partition, "token": piece.token}
    position, trouble = piece.start, "no answer in time"
    rows: list[Message] = []
    deadline = time.monotonic() + timeout_s
    while position < piece.to:
        before = position
        for message in _next(consumer, BATCH_ROWS - len(rows)):
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                trouble = _judge(error, piece)
                continue
            offset = message.offset() or 0
            position = max(position, offset if error is not None else offset + 1)
            if error is None and offset < piece.to:
                rows.append(message)
        if len(rows) >= BATCH_ROWS or (rows and position == before):
            yield as_arrow(rows, partition.columns, same)
            rows = []
            deadline = time.monotonic() + timeout_s  # counted from here: what came before was the sink's time
        elif position > before:
            deadline = time.monotonic() + timeout_s
        elif time.monotonic() >= deadline:
            what = f"{piece.topic}:{piece.partition} from {position} on, planned to {piece.to}"
            raise ClusterUnreachable(servers, what, f"{trouble} ({timeout_s:g} s without progress)")
    if rows:
        yield as_arrow(rows, partition.columns, same)


def _next(consumer: Consumer, count: int) -> list[Message]:
    """What has come, as soon as something has: `consume` with a timeout would wait for all of `count`."""
    first = consumer.poll(POLL_S)
    return [] if first is None else [first, *(consumer.consume(count - 1, 0) if count > 1 else ())]


def _judge(error: KafkaError, piece: Piece) -> str:
    """What to say if it does not pass; raises what cannot."""
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        raise RangeLost(piece.topic, piece.partition, piece.start, piece.to, error.str())
    if error.code() in _REFUSED or error.fatal():
        raise PartitionError(piece.topic, piece.partition, error.str())
    return error.str()
