"""Reads explicit offset ranges of Kafka into Arrow batches, in Spark's executors. All Kafka sources end up here.

Every task costs Spark some hundredths of a second, and a connection. So ranges of less than TASK_ROWS offsets share
tasks, as long as there are at least TASKS_KEPT tasks. If more tasks are wanted than there are ranges, the longest
ranges are split.

One librdkafka client, assigned by hand, reads the ranges of a task together. A range is complete when the position has
passed its last offset, however many offsets are missing in between (compaction, transactions); if no message follows,
the partition's end-of-file event says so. A range that cannot be read is an error, and Spark's retry or the next plan
reads it again. Executors must not claim, ack or coordinate: they cannot see the log. So rows carry their claim's token.

Spark reuses its Python processes for many tasks, and they reuse their client: connecting costs more than a small range.
Messages are handled in bulk, by functions that loop in C, because Python work per message shows in a job's time.
"""

from __future__ import annotations

import atexit
import gc
import heapq
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from marshal_py.errors import BatchRefused, ClusterUnreachable, PartitionError, RangeLost
from marshal_py.spark.stream.aliases import named_as_written
from marshal_py.spark.stream.messages import COLUMNS, Run, as_arrow
from marshal_py.transport import settings

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.client.ranges import ClaimedRange
    from marshal_py.spark.stream.options import ReadOptions

TASK_ROWS: Final = 10_000  # read in about the time that a task costs anyway
# However few rows there are: what the task does with each row may take long. Spark does not tell a Python source how
# many cores there are.
TASKS_KEPT: Final = 8


class Piece(NamedTuple):
    """The offsets [start, to) of one partition with their claim's token. `source`: the column's text (`source_text`),
    of the whole piece also after a split."""

    topic: str
    partition: int
    start: int
    to: int
    token: str
    source: str = ""

    @property
    def rows(self) -> int:
        """Returns the number of offsets. If some of them have no message, there are fewer rows."""
        return self.to - self.start


def pieces_of(ranges: Iterable[ClaimedRange], group: str) -> list[Piece]:
    return [
        Piece(*one[:4], token=str(one.token), source=source_text(one.topic_id, one.start, one.to, group))
        for one in ranges
    ]


def source_text(topic_id: str, start: int, to: int, group: str = "") -> str:
    """Returns the column `source`, for guards.py: the topic's id, the offsets read together, and the group ("" in a
    batch read)."""
    return f"{topic_id} {start} {to} {group}"


def tasks_of(pieces: Iterable[Piece], wanted: int | None = None) -> list[tuple[Piece, ...]]:
    """Returns each task's pieces, without empty ones: `wanted` tasks or more if there are enough offsets; None:
    TASKS_KEPT if there are enough pieces, and none is split. Pieces of different partitions stay so."""
    todo = _split([piece for piece in pieces if piece.rows], wanted or 0)
    alone = [(piece,) for piece in todo if piece.rows >= TASK_ROWS]
    small = [piece for piece in todo if piece.rows < TASK_ROWS]
    by_rows = -(-sum(piece.rows for piece in small) // TASK_ROWS)
    return alone + _share(small, max(by_rows, (wanted or TASKS_KEPT) - len(alone)))


def _split(pieces: Sequence[Piece], wanted: int) -> list[Piece]:
    """Splits the longest pieces into even parts, until there are `wanted` pieces."""
    parts = [1] * len(pieces)
    heap = [(-float(piece.rows), number) for number, piece in enumerate(pieces)]
    heapq.heapify(heap)
    for _ in range(min(wanted, sum(piece.rows for piece in pieces)) - len(pieces)):
        number = heap[0][1]
        parts[number] += 1
        heapq.heapreplace(heap, (-pieces[number].rows / parts[number], number))
    return [
        piece._replace(
            start=piece.start + piece.rows * part // count, to=piece.start + piece.rows * (part + 1) // count
        )
        for piece, count in zip(pieces, parts, strict=True)
        for part in range(count)
    ]


def _share(pieces: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """Distributes pieces over at most `count` tasks: the longest first, each to the one with the fewest offsets."""
    tasks: list[list[Piece]] = [[] for _ in range(min(max(1, count), len(pieces)))]
    heap = [(0, number) for number in range(len(tasks))]
    for piece in sorted(pieces, key=lambda piece: -piece.rows):
        rows, number = heap[0]
        tasks[number].append(piece)
        heapq.heapreplace(heap, (rows + piece.rows, number))
    return [tuple(task) for task in tasks]


BATCH_ROWS: Final = 10_000  # of one Arrow batch; from 1,000 to 50,000 it makes no difference
BATCH_BYTES: Final = 16 << 20  # of values; with larger messages a batch has fewer rows, or a task would need gigabytes
FIRST_ROWS: Final = 100  # taken at first, when the size of the messages is not known
POLL_S: Final = 1.0  # how long one poll waits; then the deadline is checked
READER_ID: Final = "marshal-spark"  # client id, and the group id that librdkafka requires; it commits nothing

# A task reads its ranges as fast as it can and ends. librdkafka's defaults are for long-lived consumers, and read a
# third of the rows per second. Memory is per task; `kafka.` options override these.
_FETCH: Final[Mapping[str, Any]] = {
    "queued.max.messages.kbytes": 65_536,
    "fetch.wait.max.ms": 10,
    "enable.partition.eof": True,  # completes a range whose last offsets are missing at the log's end
}
# What is fetched beyond a short range is thrown away; with many partitions that would be most of it.
QUEUE_ROWS_MAX: Final = 200_000
FETCH_BYTES_MAX: Final = 5_000_000
FETCH_BYTES_PER_ROW: Final = 512  # a guess; longer messages take more than one fetch
_SIZES: Final = (256, 1_024, 4_096, 16_384, 65_536, QUEUE_ROWS_MAX)  # few, so that the next task can reuse the client

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
    """One task with all that it needs, and no reader: Spark pickles readers before it plans tasks."""

    kafka: dict[str, Any]
    timeout_s: float
    once: bool
    columns: tuple[str, ...]

    def __init__(
        self,
        pieces: Sequence[Piece],
        kafka: Mapping[str, Any],
        timeout_s: float,
        once: bool,
        columns: Sequence[str] = COLUMNS,
    ) -> None:
        """`pieces`: its ranges; `kafka`: librdkafka's settings; `timeout_s` without progress fails it; with `once` a
        second attempt fails."""
        super().__init__(tuple(pieces))
        self.kafka, self.timeout_s, self.once, self.columns = dict(kafka), timeout_s, once, tuple(columns)


def partitions_of(pieces: Iterable[Piece], options: ReadOptions, *, once: bool) -> list[RangePartition]:
    """Returns the tasks that read these pieces. With `once`, a second attempt of a task fails."""
    return [
        RangePartition(task, options.kafka, options.read_timeout_s, once, options.columns)
        for task in tasks_of(pieces, options.min_partitions)
    ]


def read_ranges(task: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yields a task's messages, each partition's in order. Raises RangeLost, BatchRefused, PartitionError,
    ClusterUnreachable."""
    if not isinstance(task, RangePartition):
        return  # where a source plans no partitions, Spark makes up one that has no value
    pieces: tuple[Piece, ...] = task.value
    context = TaskContext.get()
    if task.once and context is not None and context.attemptNumber():
        named = ", ".join(f"{topic}:{partition} [{start}, {to})" for topic, partition, start, to, *_ in pieces)
        raise BatchRefused(named, context.attemptNumber())
    configuration = settings.data_reader({**_FETCH, **_sizes(pieces), **task.kafka}, READER_ID, READER_ID, None)
    if context is not None:
        _spare_collector()
    ids = {piece.topic: piece.source.partition(" ")[0] for piece in pieces}
    with named_as_written(task.kafka):
        consumer = _client(configuration, ids)
    try:
        consumer.assign([KafkaPartition(piece.topic, piece.partition, piece.start) for piece in pieces])
        yield from _RangeReader(consumer, pieces, str(configuration["bootstrap.servers"])).batches(task)
        consumer.unassign()
    except BaseException:  # also when Spark wants no more rows
        consumer.close()
        raise
    if context is None:
        consumer.close()
    else:
        _idle.append((configuration, consumer, ids))


def _sizes(pieces: Sequence[Piece]) -> dict[str, int]:
    """Returns the librdkafka settings that say how much it fetches ahead, fitted to the size of these pieces."""
    longest, together = max(piece.rows for piece in pieces), sum(piece.rows for piece in pieces)
    fetch, queue = (next((size for size in _SIZES if rows <= size), QUEUE_ROWS_MAX) for rows in (longest, together))
    return {"queued.min.messages": queue, "fetch.message.max.bytes": min(fetch * FETCH_BYTES_PER_ROW, FETCH_BYTES_MAX)}


# The client that the last task of this process left, one at most, and the ids of all topics that it has read.
_idle: Final[list[tuple[settings.Settings, Consumer, dict[str, str]]]] = []


def _client(configuration: settings.Settings, ids: dict[str, str]) -> Consumer:
    """Returns a client for topics of these ids, and adds to `ids` what else it has read. One that has read a topic
    before it was created again would wait for it without end (KafkaSource._replace_client)."""
    while _idle:
        before, consumer, known = _idle.pop()
        if before == configuration and all(known.get(topic, of) == of for topic, of in ids.items()):
            ids.update(known)
            return consumer
        consumer.close()
    return settings.create_client(Consumer, configuration)


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop()[1].close()


class _RangeReader:
    """Reads the ranges of one task, and knows how far each is read."""

    def __init__(self, consumer: Consumer, pieces: Sequence[Piece], servers: str) -> None:
        self.consumer, self.servers = consumer, servers
        self.left = {(piece.topic, piece.partition): piece for piece in pieces}
        self.at = {key: piece.start for key, piece in self.left.items()}
        self.alone = len(self.left) == 1
        self.last_error = "no answer in time"
        self.mean_bytes = 0.0  # of the values that came last; 0 until some came

    def batches(self, task: RangePartition) -> Iterator[pa.RecordBatch]:
        while True:
            with _gc_paused():
                batch = self._batch(task)
            if batch is None:
                return
            yield batch

    def _batch(self, task: RangePartition) -> pa.RecordBatch | None:
        """Returns the next batch, smaller if the broker is slow or messages are large; None at the end."""
        runs: list[Run] = []
        rows = size_bytes = 0
        deadline = time.monotonic() + task.timeout_s
        while self.left and rows < BATCH_ROWS and size_bytes < BATCH_BYTES:
            before = sum(self.at.values())
            messages = _poll(self.consumer, self._fitting(BATCH_ROWS - rows, BATCH_BYTES - size_bytes))
            came_bytes = sum(map(len, messages))
            self.mean_bytes = max(1.0, came_bytes / len(messages)) if messages else self.mean_bytes
            found = self._take(messages)
            runs += found
            rows += sum(len(run.messages) for run in found)
            size_bytes += came_bytes
            if sum(self.at.values()) > before:
                deadline = time.monotonic() + task.timeout_s
            elif runs:
                break
            elif time.monotonic() >= deadline:
                raise self._stuck(task.timeout_s)
        return as_arrow(runs, task.columns) if runs else None

    def _fitting(self, rows: int, size_bytes: int) -> int:
        """Returns how many messages to take at once, so that they probably fit into a batch."""
        return min(rows, max(1, int(size_bytes / self.mean_bytes)) if self.mean_bytes else FIRST_ROWS)

    def _stuck(self, timeout_s: float) -> ClusterUnreachable:
        (topic, partition), piece = next(iter(self.left.items()))
        what = f"{topic}:{partition} from {self.at[topic, partition]} on, planned to {piece.to}"
        if len(self.left) > 1:
            what += f", and {len(self.left) - 1} more partitions"
        return ClusterUnreachable(self.servers, what, f"{self.last_error} ({timeout_s:g} s without progress)")

    def _take(self, found: list[Message]) -> list[Run]:
        """Returns the messages of `found` that belong to the ranges, and handles the events among them."""
        events: list[Message] = []
        if any(map(Message.error, found)):
            events = [message for message in found if message.error() is not None]
            found = [message for message in found if message.error() is None]
        runs = [run for key, messages in self._by_partition(found) if (run := self._run(key, messages)).messages]
        for event in events:  # last: the end of a partition follows its messages
            self._handle_event(event)
        return runs

    def _by_partition(self, messages: list[Message]) -> Iterator[tuple[tuple[str, int], list[Message]]]:
        """Yields stretches of messages of one partition, in the order in which they came."""
        if self.alone:
            if messages and self.left:
                yield next(iter(self.left)), messages
            return
        for topic, of_topic in _adjacent(messages, Message.topic):
            for partition, of_both in _adjacent(of_topic, Message.partition):
                yield (topic, partition), of_both

    def _run(self, key: tuple[str, int], messages: list[Message]) -> Run:
        piece = self.left.get(key)
        if piece is None:  # the range is complete, and these messages follow it
            return Run(*key, "", [])
        last = _offset(messages[-1])
        if last >= piece.to:
            messages = messages[: bisect_left(messages, piece.to, key=_offset)]
        self._advance(key, last + 1)
        return Run(*key, piece.token, messages, piece.source)

    def _advance(self, key: tuple[str, int], position: int) -> None:
        piece = self.left[key]
        self.at[key] = min(max(self.at[key], position), piece.to)
        if self.at[key] == piece.to:
            del self.left[key]
            if self.left:
                self.consumer.incremental_unassign([KafkaPartition(*key)])

    def _handle_event(self, event: Message) -> None:
        """Handles the end of a partition, or an error; raises errors that do not pass by waiting."""
        error, key = event.error(), (event.topic() or "", event.partition() or 0)
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            if key in self.left:
                self._advance(key, _offset(event))
            return
        piece = self.left.get(key) or next(iter(self.left.values()), None)
        if piece is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise RangeLost(piece.topic, piece.partition, piece.start, piece.to, error.str())
        if piece is not None and (error.code() in _REFUSED or error.fatal()):
            raise PartitionError(piece.topic, piece.partition, error.str())
        self.last_error = error.str()


_spared: Final[list[int]] = []  # the process in which _spare_collector did its work


def _spare_collector() -> None:
    """Exempts a worker's objects from garbage collections, once per process: Spark's worker collects after each task,
    which visits all of pyspark, pandas and pyarrow and costs more than a small task. They are still freed by reference
    count."""
    if _spared != [os.getpid()]:  # also after a fork
        _spared[:] = [os.getpid()]
        gc.collect()
        gc.freeze()


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Switches the garbage collector off: messages are in no cycles, but thousands of new ones start it again and
    again, which took half of the time of reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _offset(message: Message) -> int:
    return message.offset() or 0


def _adjacent(messages: list[Message], what: Callable[[Message], Any]) -> Iterator[tuple[Any, list[Message]]]:
    """Yields stretches of adjacent messages for which `what` returns the same value, with that value."""
    start = 0
    for found, same in groupby(map(what, messages)):
        to = start + len(list(same))
        yield found, messages[start:to]
        start = to


def _poll(consumer: Consumer, count: int) -> list[Message]:
    """Returns at most `count` messages, as soon as there is one; `consume` alone would wait for all."""
    first = consumer.poll(POLL_S)
    return [] if first is None else [first, *(consumer.consume(count - 1, 0) if count > 1 else ())]
