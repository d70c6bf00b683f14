"""What executors do: read explicit offset ranges of Kafka into Arrow batches, and nothing else.

Strategy: a task has ranges of one or more partitions (tasks.py), and one librdkafka client, assigned by hand, reads
them together. A range is read when the position has passed its last offset, however many offsets are missing in between
(compaction, transactions); the partition's end tells so where nothing follows. What cannot be read is an error: Spark's
retry, or the next plan, is the way out. No claim, no position and no coordination here: an executor cannot know them,
so rows carry the claim's token.

Spark's Python processes go from task to task, and so does their client: connecting costs more than a small range.
Messages are handled in bulk, by functions that loop in C: whatever Python does per message shows in a job's time.
"""

from __future__ import annotations

import atexit
import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from marshal_py.errors import ClusterUnreachable, PartitionError, RangeLost, RangeReadTwice
from marshal_py.spark.messages import COLUMNS, Run, as_arrow
from marshal_py.spark.tasks import tasks_of
from marshal_py.transport import settings

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.spark.options import ReadOptions
    from marshal_py.spark.tasks import Piece

BATCH_ROWS: Final = 10_000  # of one Arrow batch; from 1,000 to 50,000 it makes no difference
POLL_S: Final = 1.0  # a waiting task looks up so often
READER_ID: Final = "marshal-spark"  # client id, and the group id that librdkafka wants; nothing is committed under it

# A task reads its ranges as fast as it can and ends: librdkafka's defaults are made for consumers that stay (measured:
# a third of the rows per second). Memory is per task, and `kafka.` options win.
_FETCH: Final[Mapping[str, Any]] = {
    "queued.max.messages.kbytes": 65_536,
    "fetch.wait.max.ms": 10,
    "enable.partition.eof": True,  # the only sign of a range whose last offsets are missing at the log's end
}
# What is fetched beyond a short range is thrown away, and with many partitions that is most of it.
QUEUE_ROWS_MAX: Final = 200_000
FETCH_BYTES_MAX: Final = 5_000_000
FETCH_BYTES_PER_ROW: Final = 512  # asked for at once; longer messages take more than one fetch
_SIZES: Final = (256, 1_024, 4_096, 16_384, 65_536, QUEUE_ROWS_MAX)  # few, so that the next batch finds its client good

_REFUSED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._FATAL,
    }
)


class RangePartition(InputPartition):
    """One task. Everything that it needs is in here: a reader is pickled long before its partitions are planned."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        kafka: Mapping[str, Any],
        timeout_s: float,
        once: bool,
        columns: Sequence[str] = COLUMNS,
    ) -> None:
        """`once`: a second attempt of the task is refused. `timeout_s`: without progress."""
        super().__init__(tuple(pieces))
        self.kafka, self.timeout_s, self.once, self.columns = dict(kafka), timeout_s, once, tuple(columns)


def partitions_of(pieces: Iterable[Piece], options: ReadOptions, *, once: bool) -> list[RangePartition]:
    """The tasks that read these pieces. `once`: a second attempt of a task fails."""
    return [
        RangePartition(task, options.kafka, options.read_timeout_s, once, options.columns)
        for task in tasks_of(pieces, options.min_partitions)
    ]


def read_ranges(task: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yields the messages of a task's ranges; those of one partition come in order.

    Raises RangeLost, RangeReadTwice, PartitionError, ClusterUnreachable.
    """
    if not isinstance(task, RangePartition):
        return  # where a source plans no partitions, Spark makes up one that has no value
    pieces: tuple[Piece, ...] = task.value
    context = TaskContext.get()
    if task.once and context is not None and context.attemptNumber():
        raise RangeReadTwice([piece[:4] for piece in pieces], context.attemptNumber())
    configuration = settings.data_reader({**_FETCH, **_sizes(pieces), **task.kafka}, READER_ID, READER_ID, None)
    consumer = _client(configuration)
    try:
        consumer.assign([KafkaPartition(piece.topic, piece.partition, piece.start) for piece in pieces])
        yield from _Reading(consumer, pieces, str(configuration["bootstrap.servers"])).batches(task)
        consumer.unassign()
    except BaseException:  # also when nobody wants the rest of the rows
        consumer.close()
        raise
    if context is None:
        consumer.close()
    else:
        _idle.append((configuration, consumer))


def _sizes(pieces: Sequence[Piece]) -> dict[str, int]:
    """What librdkafka fetches ahead."""
    longest, together = max(piece.rows for piece in pieces), sum(piece.rows for piece in pieces)
    fetch, queue = (next((size for size in _SIZES if rows <= size), QUEUE_ROWS_MAX) for rows in (longest, together))
    return {"queued.min.messages": queue, "fetch.message.max.bytes": min(fetch * FETCH_BYTES_PER_ROW, FETCH_BYTES_MAX)}


_idle: Final[list[tuple[settings.Settings, Consumer]]] = []  # what the last task of this process left: one at most


def _client(configuration: settings.Settings) -> Consumer:
    while _idle:
        before, consumer = _idle.pop()
        if before == configuration:
            return consumer
        consumer.close()
    return settings.create_client(Consumer, configuration)


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop()[1].close()


class _Reading:
    """The ranges of a task, as far as they are read."""

    def __init__(self, consumer: Consumer, pieces: Sequence[Piece], servers: str) -> None:
        self.consumer, self.servers = consumer, servers
        self.left = {(piece.topic, piece.partition): piece for piece in pieces}
        self.at = {key: piece.start for key, piece in self.left.items()}
        self.alone = len(self.left) == 1
        self.trouble = "no answer in time"

    def batches(self, task: RangePartition) -> Iterator[pa.RecordBatch]:
        while True:
            with _no_garbage():
                batch = self._batch(task)
            if batch is None:
                return
            yield batch

    def _batch(self, task: RangePartition) -> pa.RecordBatch | None:
        """Of BATCH_ROWS, smaller where the broker is slower than the reader; None: all is read."""
        runs: list[Run] = []
        rows, deadline = 0, time.monotonic() + task.timeout_s
        while self.left and rows < BATCH_ROWS:
            before = sum(self.at.values())
            found = self._taken(_next(self.consumer, BATCH_ROWS - rows))
            runs += found
            rows += sum(len(run.messages) for run in found)
            if sum(self.at.values()) > before:
                deadline = time.monotonic() + task.timeout_s
            elif runs:
                break
            elif time.monotonic() >= deadline:
                raise self._stuck(task.timeout_s)
        return as_arrow(runs, task.columns) if runs else None

    def _stuck(self, timeout_s: float) -> ClusterUnreachable:
        (topic, partition), piece = next(iter(self.left.items()))
        what = f"{topic}:{partition} from {self.at[topic, partition]} on, planned to {piece.to}"
        if len(self.left) > 1:
            what += f", and {len(self.left) - 1} more partitions"
        return ClusterUnreachable(self.servers, what, f"{self.trouble} ({timeout_s:g} s without progress)")

    def _taken(self, found: list[Message]) -> list[Run]:
        """What of these messages belongs to the ranges."""
        events: list[Message] = []
        errors = list(map(Message.error, found))
        if any(errors):
            events = [message for message, error in zip(found, errors, strict=True) if error is not None]
            found = [message for message, error in zip(found, errors, strict=True) if error is None]
        runs = [run for key, messages in self._by_partition(found) if (run := self._run(key, messages)).messages]
        for event in events:  # the end of a partition comes behind its messages
            self._told(event)
        return runs

    def _by_partition(self, messages: list[Message]) -> Iterator[tuple[tuple[str, int], list[Message]]]:
        """Messages of one partition after the other, as they came."""
        if self.alone:
            if messages and self.left:
                yield next(iter(self.left)), messages
            return
        for topic, of_topic in _alike(messages, Message.topic):
            for partition, of_both in _alike(of_topic, Message.partition):
                yield (topic, partition), of_both

    def _run(self, key: tuple[str, int], messages: list[Message]) -> Run:
        piece = self.left.get(key)
        if piece is None:  # it was read to its end, and this comes behind it
            return Run(*key, "", [])
        last = _offset(messages[-1])
        if last >= piece.to:
            messages = messages[: bisect_left(messages, piece.to, key=_offset)]
        self._passed(key, last + 1)
        return Run(*key, piece.token, messages)

    def _passed(self, key: tuple[str, int], position: int) -> None:
        piece = self.left[key]
        self.at[key] = min(max(self.at[key], position), piece.to)
        if self.at[key] == piece.to:
            del self.left[key]
            if self.left:
                self.consumer.incremental_unassign([KafkaPartition(*key)])

    def _told(self, event: Message) -> None:
        """The end of a partition, or an error. Raises what does not pass."""
        error, key = event.error(), (event.topic() or "", event.partition() or 0)
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            if key in self.left:
                self._passed(key, _offset(event))
            return
        piece = self.left.get(key) or next(iter(self.left.values()), None)
        if piece is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise RangeLost(piece.topic, piece.partition, piece.start, piece.to, error.str())
        if piece is not None and (error.code() in _REFUSED or error.fatal()):
            raise PartitionError(piece.topic, piece.partition, error.str())
        self.trouble = error.str()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Messages are in no reference cycle, and ten thousand new ones set off Python's collector again and again: that
    took half of the time of reading.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _offset(message: Message) -> int:
    return message.offset() or 0


def _alike(messages: list[Message], what: Callable[[Message], Any]) -> Iterator[tuple[Any, list[Message]]]:
    """Messages that follow each other and are the same in this."""
    start = 0
    for found, same in groupby(map(what, messages)):
        to = start + len(list(same))
        yield found, messages[start:to]
        start = to


def _next(consumer: Consumer, count: int) -> list[Message]:
    """What has come, as soon as something has: `consume` with a timeout would wait for all of `count`."""
    first = consumer.poll(POLL_S)
    return [] if first is None else [first, *(consumer.consume(count - 1, 0) if count > 1 else ())]
