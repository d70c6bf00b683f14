"""Tables that hold every message once: what a table knows of each partition, and what a batch may add to it.

Strategy: beside the rows, and changed in the same transaction, a table keeps per partition the offset below which
everything is written, the fencing token of the last writer (PROTOCOL.md K1) and the id of the topic. From that every
writer knows what to leave out (a batch that comes again, with or without its Spark checkpoint) and whether it may write
at all. Batch numbers are not used: they begin again with each checkpoint folder.

The rules are here, once for all tables; how rows and positions get into one transaction is each table's own affair
(ledger.py, database.py, delta.py, iceberg.py).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, TypeVar

from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.errors import InvalidOption, LedgerMoved, PartitionError, WriteFenced
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.transport.kafka import KafkaTransport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from marshal_py.client.message import Batch, Message

log = logging.getLogger("marshal_py.spark")

TRIES_MAX: Final = 10  # another writer was faster with an overlapping batch: rare, and each time somebody got on


class Span(NamedTuple):
    """What a batch holds of one partition: offsets in [start, to), read under `token`. "" is an unknown topic id."""

    token: Token
    start: int
    to: int
    topic_id: str = ""


class Position(NamedTuple):
    """How far a partition is written: everything below `to`, last under `token`, of the topic with this id.

    `rewind`: a number that changes when the position is moved back.
    """

    token: Token
    to: int
    topic_id: str = ""
    rewind: int = -1

    def is_of(self, topic_id: str) -> bool:
        """Whether the offsets are of that topic. One that was deleted and made again has another id."""
        return "" in (self.topic_id, topic_id) or self.topic_id == topic_id


class Entry(ABC):
    """A batch on its way into a table. What it wrote counts from `commit` on. A context manager: leaving it without
    `commit` gives the batch up."""

    def __init__(
        self, name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]
    ) -> None:
        """`name`: of the table, for errors. Raises WriteFenced."""
        self.name, self.spans = name, spans
        check_fence(name, spans, positions)
        self.seen = {tp: positions[tp] for tp in spans if tp in positions}
        self.done = {tp: seen.to for tp, seen in self.seen.items() if seen.is_of(spans[tp].topic_id)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what was not committed."""
        return

    def is_new(self, tp: TopicPartition, offset: int) -> bool:
        """Whether this message is not in the table yet."""
        return offset >= self.done.get(tp, 0)

    def new_rows(self, df: DataFrame) -> DataFrame:
        """The rows of the batch that are not in the table yet."""
        return self.rows_of(df, self.spans)

    def rows_of(self, df: DataFrame, spans: Mapping[TopicPartition, Span]) -> DataFrame:
        """The same of a batch that holds `spans`: partitions that this entry does not write are left out."""
        from pyspark.sql import functions as F

        out = None
        for tp, span in spans.items():
            done = self.done.get(tp, 0) if tp in self.spans else span.to
            if done <= span.start:
                continue
            there = (F.col("topic") == tp.topic) & (F.col("partition") == tp.partition) & (F.col("offset") < done)
            out = there if out is None else out | there
        return df if out is None else df.where(~out)

    def positions(self) -> dict[TopicPartition, Position]:
        """What the table knows once this entry is made."""
        found = {}
        for tp, span in self.spans.items():
            seen = self.seen.get(tp)
            known = span.topic_id or ("" if seen is None else seen.topic_id)
            rewind = -1 if seen is None else seen.rewind
            found[tp] = Position(span.token, max(span.to, self.done.get(tp, 0)), known, rewind)
        return found

    def recheck(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Whether what the table knows now is what this entry began with. Raises WriteFenced, LedgerMoved."""
        check_fence(self.name, self.spans, positions)
        for tp in self.spans:
            was, now = self.seen.get(tp), positions.get(tp)
            if (was and was[1:]) != (now and now[1:]):
                raise LedgerMoved(self.name)

    @abstractmethod
    def commit(self) -> None:
        """Makes rows and positions count, together. Raises WriteFenced, LedgerMoved."""


def check_fence(name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]) -> None:
    """Raises WriteFenced if a later owner has written one of the partitions."""
    for tp, span in spans.items():
        found = positions.get(tp)
        if found is not None and found.token > span.token:
            raise WriteFenced(name, str(tp), str(span.token), str(found.token))


class TopicIds:
    """Tells topics of one name apart: Kafka gives each an id of its own, also when it is deleted and made again."""

    def __init__(self, servers: str | Mapping[str, Any], topics: Iterable[str]) -> None:
        """`servers`: as for `marshal_py.connect`. `topics`: all of the query, or of the service."""
        self._servers, self._topics = servers, tuple(topics)

    def ask(self) -> dict[str, str]:
        """The id of each topic as of now; "" where the cluster has none to tell. Raises ClusterUnreachable."""
        with closing(KafkaTransport(self._servers, CONNECT_TIMEOUT_S).admin()) as admin:
            found = {topic: admin.describe_topic(topic) for topic in self._topics}
        return {topic: "" if info is None else info.topic_id for topic, info in found.items()}


E = TypeVar("E", bound=Entry)
E_co = TypeVar("E_co", bound=Entry, covariant=True)


class Table(Protocol[E_co]):
    """A table that keeps positions beside its rows."""

    def known(self, spans: Mapping[TopicPartition, Span], /) -> Mapping[TopicPartition, Position]:
        """How far the partitions of these spans are written, as of now. One of which nothing is written is missing."""
        ...

    def begin(self, spans: Mapping[TopicPartition, Span]) -> E_co:
        """An entry for a batch that holds these spans. Raises WriteFenced."""
        ...


def sink_of(
    name: str, table: Table[E], handle: Callable[[DataFrame, E], object], topics: TopicIds | None
) -> Callable[[DataFrame, int], None]:
    """A function for foreachBatch: `handle(rows, entry)` gets what is not written yet and writes it into `entry`.

    The rows are kept in memory or on disk while it runs, so that several actions read Kafka once. `handle` may be
    called again with fewer rows when another writer was faster. Rows of partitions that a later owner has written
    meanwhile are left out and logged: they are that owner's, and the query goes on.

    With `topics`, topics that were deleted and made again are told apart. Kafka is asked before and after the rows are
    read: between two equal answers the topic was the same, for no id is given twice.
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
                        _tell_nothing_new(entry, batch)
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
    """The same for a Python service: `handle(messages, entry)` gets those of a fetched batch that are not written yet.

    It is called again with fewer when another writer was faster. Ack the batch afterwards. Raises WriteFenced if a
    later owner has written: then do not ack, the messages are that owner's.
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
    """The spans with the ids of their topics. Raises PartitionError, InvalidOption."""
    for tp in spans:
        if tp.topic not in before:
            raise InvalidOption("topics", sorted(before), f"all topics of the query: this batch has rows of {tp.topic}")
        if before[tp.topic] != after[tp.topic]:
            raise PartitionError(*tp, "the topic was deleted and made again while the batch was read")
    return {tp: span._replace(topic_id=after[tp.topic]) for tp, span in spans.items()}


def _unfenced(
    name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]
) -> dict[TopicPartition, Span]:
    """Those that no later owner has written."""
    mine = {}
    for tp, span in spans.items():
        try:
            check_fence(name, {tp: span}, positions)
            mine[tp] = span
        except WriteFenced as error:
            log.warning("offsets %d to %d of %s are left out: %s", span.start, span.to - 1, tp, error)
    return mine


def _tell_nothing_new(entry: Entry, batch: int) -> None:
    """A batch that is in the table already: it was replayed, or somebody moved the group's positions back."""
    if all(entry.done.get(tp, 0) >= span.to for tp, span in entry.spans.items()):
        there = ", ".join(f"{tp} from {span.start} to {span.to - 1}" for tp, span in sorted(entry.spans.items()))
        log.warning(
            "batch %d holds nothing new for %s, which has %s: right after a crash; to write a range again, "
            "move the table back too",
            batch,
            entry.name,
            there,
        )


def spans_of(df: DataFrame) -> dict[TopicPartition, Span]:
    """What a batch of a Marshal stream holds, by its columns topic, partition, offset, token and, if any, topic_id."""
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
