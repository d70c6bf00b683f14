"""Rules for tables that hold every message once: what a table knows of each partition, what a batch may add to it.

Beside the rows, and changed in the same transaction, a table keeps for each partition its position, which is the offset
below which everything is written, the fencing token of the last writer (a later owner's is greater, PROTOCOL.md K1),
and the topic's id. From these a writer knows which rows of a repeated batch to leave out, with or without its Spark
checkpoint, and whether it may write at all. Spark's batch numbers are not used: they start again with each checkpoint
folder. A batch on its way into a table is an entry.

The rules are the same for all tables and are here alone. How a table changes rows and positions in one transaction is
in its own file: ledger.py, database.py, delta.py, iceberg.py.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from pyspark.sql import DataFrame

from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.client.message import Batch, Message
from marshal_py.errors import InvalidOption, LedgerMoved, PartitionError, WriteFenced
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.transport.kafka import KafkaTransport

logger: Final = logging.getLogger("marshal_py.spark")

TRIES_MAX: Final = 10  # a try fails only if another writer was faster with an overlapping batch, which is rare


class Span(NamedTuple):
    """Names the offsets [start, to) of one partition that a batch holds, read under `token`.

    `topic_id` is "" if it is unknown.
    """

    token: Token
    start: int
    to: int
    topic_id: str = ""


class Position(NamedTuple):
    """Says that a partition is written below the offset `to`. The last writer did so under the fencing token `token`.

    `rewind` changes whenever the position is moved back; it is -1 if that never happened.
    """

    token: Token
    to: int
    topic_id: str = ""
    rewind: int = -1

    def is_of(self, topic_id: str) -> bool:
        """Returns False if the position belongs to a deleted topic of the same name, whose id is not `topic_id`.

        If either id is unknown, it returns True.
        """
        return "" in (self.topic_id, topic_id) or self.topic_id == topic_id


class Entry(ABC):
    """Writes a batch into a table. Nothing that it writes counts before `commit`.

    It is a context manager: leaving the `with` block without `commit` drops the batch.
    """

    name: str
    spans: Mapping[TopicPartition, Span]

    def __init__(
        self, name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]
    ) -> None:
        """Begins an entry in the table `name`, whose `positions` say what is written already. Raises WriteFenced."""
        self.name, self.spans = name, spans
        check_fence(name, spans, positions)
        self.seen: dict[TopicPartition, Position] = {tp: positions[tp] for tp in spans if tp in positions}
        self.done: dict[TopicPartition, int] = {
            tp: seen.to for tp, seen in self.seen.items() if seen.is_of(spans[tp].topic_id)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drops the batch if it was not committed."""
        return

    def is_new(self, tp: TopicPartition, offset: int) -> bool:
        """Returns True if this message is not in the table yet."""
        return offset >= self.done.get(tp, 0)

    def rows_of(self, df: DataFrame, spans: Mapping[TopicPartition, Span]) -> DataFrame:
        """Returns the rows of `df`, which holds `spans`, that are not in the table yet.

        Rows of partitions that this entry does not write are left out.
        """
        from pyspark.sql import functions as F

        left_out = None
        for tp, span in spans.items():
            done = self.done.get(tp, 0) if tp in self.spans else span.to
            if done <= span.start:
                continue
            old = (F.col("topic") == tp.topic) & (F.col("partition") == tp.partition) & (F.col("offset") < done)
            left_out = old if left_out is None else left_out | old
        return df if left_out is None else df.where(~left_out)

    def positions(self) -> dict[TopicPartition, Position]:
        """Returns the positions of this entry's partitions as the table will know them after `commit`."""
        found = {}
        for tp, span in self.spans.items():
            seen = self.seen.get(tp)
            known = span.topic_id or ("" if seen is None else seen.topic_id)
            rewind = -1 if seen is None else seen.rewind
            found[tp] = Position(span.token, max(span.to, self.done.get(tp, 0)), known, rewind)
        return found

    def recheck(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Checks that no other writer has written these partitions since the entry began. Raises WriteFenced,
        LedgerMoved.
        """
        check_fence(self.name, self.spans, positions)
        for tp in self.spans:
            was, now = self.seen.get(tp), positions.get(tp)
            if (was and was[1:]) != (now and now[1:]):
                raise LedgerMoved(self.name)

    @abstractmethod
    def commit(self) -> None:
        """Adds the rows to the table and moves the positions, in one transaction.

        Raises WriteFenced if a later owner has written one of the partitions, and LedgerMoved if another writer has
        written them since the entry began.
        """


def check_fence(name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]) -> None:
    """Checks that no later owner has written one of the partitions. Raises WriteFenced."""
    for tp, span in spans.items():
        found = positions.get(tp)
        if found is not None and found.token > span.token:
            raise WriteFenced(name, str(tp), str(span.token), str(found.token))


class TopicIds:
    """Asks Kafka for topic ids, which tell a topic from a deleted one of the same name."""

    def __init__(self, servers: str | Mapping[str, Any], topics: Iterable[str]) -> None:
        """Takes `servers` as `marshal_py.connect` does, and all topics of the query or the service."""
        self._servers, self._topics = servers, tuple(topics)

    def ask(self) -> dict[str, str]:
        """Returns each topic's present id, "" if the cluster does not know one. Raises ClusterUnreachable."""
        with closing(KafkaTransport(self._servers, CONNECT_TIMEOUT_S).admin()) as admin:
            found = {topic: admin.describe_topic(topic) for topic in self._topics}
        return {topic: "" if info is None else info.topic_id for topic, info in found.items()}


E = TypeVar("E", bound=Entry)
E_co = TypeVar("E_co", bound=Entry, covariant=True)


class Table(Protocol[E_co]):
    """Declares what a table that keeps positions beside its rows can do."""

    def known(self, spans: Mapping[TopicPartition, Span], /) -> Mapping[TopicPartition, Position]:
        """Returns how far these partitions are written now. Partitions of which nothing is written are not in the
        answer.
        """
        ...

    def begin(self, spans: Mapping[TopicPartition, Span]) -> E_co:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions.
        """
        ...


def sink_of(
    name: str, table: Table[E], handle: Callable[[DataFrame, E], object], topics: TopicIds | None
) -> Callable[[DataFrame, int], None]:
    """Returns a function to be given to Spark's foreachBatch. `name`: the table's, for errors and logs.

    `handle(rows, entry)` gets the rows that are not written yet and writes them into `entry`. The rows are cached while
    `handle` runs, so that several actions read Kafka once. If another writer was faster, `handle` is called again, with
    fewer rows. Rows of partitions that a later owner has written meanwhile are left out and logged: that owner handles
    them, and the query continues.

    With `topics`, a topic that was deleted and created again starts at offset 0. Kafka is asked for the ids before and
    after the rows are read. If both answers are equal, all rows are of that topic, because Kafka never gives an id
    twice.
    """

    def write(df: DataFrame, batch: int) -> None:
        kept = df.persist()
        try:
            before = {} if topics is None else topics.ask()
            spans = spans_of(kept)
            if topics is not None:
                spans = _identified(spans, before, topics.ask())
            for left in reversed(range(TRIES_MAX)):
                mine = _unfenced(name, spans, table.known(spans))
                if not mine:
                    break
                try:
                    with table.begin(mine) as entry:
                        _warn_if_nothing_new(entry, batch)
                        handle(entry.rows_of(kept, spans), entry)
                        entry.commit()
                    break
                except (LedgerMoved, WriteFenced):
                    if not left:
                        raise
        finally:
            kept.unpersist()

    return write


def write_batch(table: Table[E], batch: Batch, handle: Callable[[list[Message], E], object]) -> None:
    """Writes a fetched batch from a Python service.

    `handle(messages, entry)` gets the messages that are not written yet, and writes them into `entry`. If another
    writer was faster, it is called again, with fewer messages. Ack the batch afterwards.

    Raises WriteFenced if a later owner has written the partition: then do not ack, because that owner handles the
    messages. Raises LedgerMoved if other writers were faster ten times.
    """
    spans: dict[TopicPartition, Span] = {}
    for part in batch.parts:  # a partition may come in several parts, in order
        tp, offsets = part.topic_partition, part.offsets
        start = spans[tp].start if tp in spans else offsets[0]
        spans[tp] = Span(part.token, start, offsets[-1] + 1, part.topic_id)
    for left in reversed(range(TRIES_MAX)):
        try:
            with table.begin(spans) as entry:
                handle(
                    [
                        message
                        for part in batch.parts
                        for message in part
                        if entry.is_new(part.topic_partition, message.offset)
                    ],
                    entry,
                )
                entry.commit()
            return
        except LedgerMoved:
            if not left:
                raise


def _identified(
    spans: Mapping[TopicPartition, Span], before: Mapping[str, str], after: Mapping[str, str]
) -> dict[TopicPartition, Span]:
    """Returns the spans with the ids of their topics. `before`, `after`: ids asked for before and after the rows were
    read.

    Raises PartitionError if a topic's id has changed, and InvalidOption for a topic that was not asked for.
    """
    for tp in spans:
        if tp.topic not in before:
            raise InvalidOption("topics", sorted(before), f"all topics of the query: this batch has rows of {tp.topic}")
        if before[tp.topic] != after[tp.topic]:
            raise PartitionError(*tp, "the topic was deleted and created again while the batch was read")
    return {tp: span._replace(topic_id=after[tp.topic]) for tp, span in spans.items()}


def _unfenced(
    name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]
) -> dict[TopicPartition, Span]:
    """Returns the spans of partitions that no later owner has written, and logs the other spans."""
    mine = {}
    for tp, span in spans.items():
        try:
            check_fence(name, {tp: span}, positions)
            mine[tp] = span
        except WriteFenced as error:
            logger.warning("offsets %d to %d of %s are left out: %s", span.start, span.to - 1, tp, error)
    return mine


def _warn_if_nothing_new(entry: Entry, batch: int) -> None:
    """Warns if the whole batch is in the table already: it was replayed, or the group's positions were moved back."""
    if all(entry.done.get(tp, 0) >= span.to for tp, span in entry.spans.items()):
        ranges = ", ".join(f"{tp} from {span.start} to {span.to - 1}" for tp, span in sorted(entry.spans.items()))
        logger.warning(
            "batch %d holds nothing new for %s, which has %s. This is normal after a crash; to write a range "
            "again, move the table's position back too",
            batch,
            entry.name,
            ranges,
        )


def spans_of(df: DataFrame) -> dict[TopicPartition, Span]:
    """Returns the span of each partition in a batch of a Marshal stream. Runs a Spark job.

    The batch needs the columns topic, partition, offset and token; topic_id is used if it is there.
    """
    from pyspark.sql import functions as F

    topic_id = F.max("topic_id") if "topic_id" in df.columns else F.lit("")
    rows = df.groupBy("topic", "partition").agg(
        F.min("offset").alias("first"),
        F.max("offset").alias("last"),
        F.max("token").alias("token"),
        topic_id.alias("topic_id"),
    )
    return {
        TopicPartition(row.topic, row.partition): Span(
            Token.parse(row.token), row.first, row.last + 1, row.topic_id or ""
        )
        for row in rows.collect()
    }
