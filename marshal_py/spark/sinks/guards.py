"""Rules for tables that hold every message once: what a table has of each partition, what a batch may add to it.

Beside the rows, and changed in the same transaction, a table keeps for each partition of each topic the ranges of the
offsets that it has, and the fencing token of the last writer (client/values/finished.py). From these a writer knows
which rows of a repeated batch to leave out, with or without its Spark checkpoint, and whether it may write at all.
Spark's batch numbers are not used: they start again with each checkpoint folder. A batch on its way into a table is an
entry.

The rules are the same for all tables and are here alone. How a table changes rows and ranges in one transaction is in
its own file: delta.py, iceberg.py, database.py.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marshal_py.client.messages.message import Batch, Message
from marshal_py.client.values.finished import (
    Kept,
    LeftOut,
    Ranges,
    Source,
    Span,
    common,
    holds,
    source_of,
    spans_of_messages,
    union,
    without,
)
from marshal_py.errors import InvalidOption, TableChanged, WriteFenced

logger: Final = logging.getLogger("marshal_py.spark")

TRIES_MAX: Final = 10  # a try fails only if another writer was faster with an overlapping batch, which is rare
NEEDED: Final = ("topic", "partition", "offset", "source")


class Entry(ABC):
    """Writes a batch into a table. Leaving its `with` block without `commit` drops it."""

    name: str
    spans: Mapping[Source, Span]
    missing: Mapping[Source, Ranges]  # the offsets of the batch that the table does not have

    def __init__(self, name: str, spans: Mapping[Source, Span], known: Mapping[Source, Kept]) -> None:
        """Begins an entry in the table `name`, which knows `known` of the sources. Raises WriteFenced,
        OffsetsUnclear."""
        self.name, self.spans = name, spans
        self.seen: dict[Source, Kept] = {source: known.get(source, Kept()) for source in spans}
        check_fence(name, spans, self.seen)
        self.missing = {source: self.seen[source].missing(name, source, span.ranges) for source, span in spans.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the batch if it was not committed."""
        return

    def is_new(self, source: Source, offset: int) -> bool:
        """Returns True if this entry writes the partition and the message is not in the table yet."""
        return holds(self.missing.get(source, ()), offset)

    def after(self) -> dict[Source, Kept]:
        """Returns what the table knows of this entry's sources after `commit`."""
        return {source: self.seen[source].after(span) for source, span in self.spans.items()}

    def recheck(self, known: Mapping[Source, Kept]) -> None:
        """Raises WriteFenced or TableChanged if another writer has written these partitions since the entry began."""
        check_fence(self.name, self.spans, known)
        for source, seen in self.seen.items():
            if known.get(source, Kept()).finished != seen.finished:
                raise TableChanged(self.name)

    @abstractmethod
    def commit(self) -> None:
        """Adds the rows to the table and the batch's offsets to its ranges, in one transaction.

        Raises WriteFenced if a later owner has written one of the partitions, and TableChanged if another writer has
        written them since the entry began.
        """


def check_fence(name: str, spans: Mapping[Source, Span], known: Mapping[Source, Kept]) -> None:
    """Checks that no later owner has written one of the partitions. Raises WriteFenced."""
    for source, span in spans.items():
        kept = known.get(source, Kept())
        if kept.fences(span):
            raise WriteFenced(name, str(source.tp), span.token, kept.token)


E = TypeVar("E", bound=Entry)
E_co = TypeVar("E_co", bound=Entry, covariant=True)


class Table(Protocol[E_co]):
    """Declares what a table that keeps ranges beside its rows can do."""

    @property
    def name(self) -> str:
        """Returns the table's name, for errors and logs."""
        ...

    def known(self, spans: Mapping[Source, Span], /) -> Mapping[Source, Kept]:
        """Returns what the table knows of these sources. Those of which it knows nothing are not in the answer."""
        ...

    def begin(self, spans: Mapping[Source, Span], /) -> E_co:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions. Raises OffsetsUnclear.
        """
        ...


class Report(NamedTuple):
    """What became of a batch: by partition the offsets `written`, and `left_out` with the reason."""

    written: Mapping[Source, Ranges]
    left_out: tuple[LeftOut, ...]


def _write(table: Table[E], spans: Mapping[Source, Span], write: Callable[[E], object]) -> Report:
    """Writes a batch; tries again if another writer was faster, TRIES_MAX times. What later owners have is left out.
    Raises TableChanged, WriteFenced."""
    mine, fenced = dict(spans), dict[Source, Span]()
    for left in reversed(range(TRIES_MAX)):
        try:
            with table.begin(mine) as entry:
                write(entry)
                entry.commit()
            return _report(entry.missing, mine, fenced)
        except TableChanged:
            if not left:
                raise
        except WriteFenced:
            if not left:
                raise
            known = table.known(mine)
            late = {source: span for source, span in mine.items() if known.get(source, Kept()).fences(span)}
            fenced |= late
            mine = {source: span for source, span in mine.items() if source not in late}
            if not mine:
                break
    return _report({}, {}, fenced)


def _report(missing: Mapping[Source, Ranges], mine: Mapping[Source, Span], fenced: Mapping[Source, Span]) -> Report:
    there = {source: without(span.ranges, missing[source]) for source, span in mine.items()}
    left_out = [LeftOut(*source, *one, "there") for source, ranges in there.items() for one in ranges]
    left_out += [LeftOut(*source, *one, "fenced") for source, span in fenced.items() for one in span.ranges]
    written = {source: ranges for source, ranges in missing.items() if ranges}
    return Report(written, tuple(sorted(left_out)))


class Sink(Generic[E]):
    """The function for Spark's foreachBatch. It writes each batch, and says what it left out.

    Call `left_out` and `last` in the process in which the function runs: the driver, or over Spark Connect its server.
    """

    last: Report | None

    def __init__(self, table: Table[E], handle: Callable[[DataFrame, E], object]) -> None:
        """`handle(rows, entry)` writes rows into the entry."""
        self._table, self._handle = table, handle
        self._left_out = Counter[str]()
        self.last = None  # what became of the newest batch

    @property
    def left_out(self) -> dict[str, int]:
        """Returns how many offsets were left out since the sink was made, by reason: "there", "fenced"."""
        return dict(self._left_out)

    def __call__(self, df: DataFrame, batch: int) -> None:
        """Writes the batch's rows that are not in the table yet. Raises InvalidOption for rows that are no messages."""
        check_columns(df)
        level = df.storageLevel
        own = not (level.useMemory or level.useDisk)  # a cache that the caller made is the caller's
        kept = df.persist() if own else df
        try:
            rows = Rows(kept)
            if rows.spans:
                report = _write(self._table, rows.spans, lambda entry: self._handle(rows.missing_in(entry), entry))
                self._note(report, batch)
        finally:
            if own:
                kept.unpersist()

    def _note(self, report: Report, batch: int) -> None:
        self.last = report
        for one in report.left_out:
            self._left_out[one.why] += one.to - one.start
            logger.warning("batch %d: left out of %s: %s", batch, self._table.name, one)


def write_batch(table: Table[E], batch: Batch, handle: Callable[[list[Message], E], object]) -> Report:
    """Writes a fetched batch from a Python service. Returns what was written and what was left out.

    `handle(messages, entry)` gets the messages that are not written yet, and writes them into `entry`. If another
    writer was faster, it is called again, with fewer messages. Messages of a partition that a later owner has written
    are left out. Ack the batch afterwards: for messages of a later owner that changes nothing.

    Raises WriteFenced if later owners have all its partitions: then do not ack. Raises TableChanged if other writers
    were faster ten times, and OffsetsUnclear.
    """
    spans, given = spans_of_messages(batch)
    if not spans:
        return Report({}, ())
    report = _write(
        table,
        spans,
        lambda entry: handle([message for source, message in given if entry.is_new(source, message.offset)], entry),
    )
    if all(one.why == "fenced" for one in report.left_out) and not report.written and report.left_out:
        check_fence(table.name, spans, table.known(spans))
    return report


def check_columns(df: DataFrame) -> None:
    """Checks that rows say which message they are. Raises InvalidOption."""
    lacking = [name for name in NEEDED if name not in df.columns]
    if lacking:
        raise InvalidOption(
            "columns",
            df.columns,
            f"rows that are messages, with the columns {', '.join(NEEDED)}; {', '.join(lacking)} is not there. Choose "
            f"other columns in the sink's function. What groupBy and windows make are no messages, so no sink can know "
            f"which of it is in a table: write it under its key (docs/spark.md)",
        )


class Rows:
    """Knows which offsets of which sources the rows of a batch stand for. Making it runs a Spark job."""

    spans: dict[Source, Span]

    def __init__(self, df: DataFrame) -> None:
        """Takes rows of a stream or batch read. Raises InvalidOption for a stream's rows without token."""
        self._df = df
        token = F.max("token") if "token" in df.columns else F.lit(None)
        found = df.groupBy("topic", "partition", "source").agg(token.alias("token")).collect()
        self._parts: list[tuple[str, int, str, Source, Ranges]] = []
        spans: dict[Source, Span] = {}
        for row in found:
            topic_id, start, to, group = row.source.split(" ", 3)
            if group and not row.token:
                raise InvalidOption("columns", df.columns, "the column token too: the rows are those of a claim")
            source = source_of(row.topic, row.partition, topic_id, row.token or "")
            ranges = ((int(start), int(to)),)
            self._parts.append((row.topic, row.partition, row.source, source, ranges))
            before = spans.get(source, Span((), "", group))
            if group != before.group:
                rule = f"rows of {source.tp} that one group has read: write the others in a query of their own"
                raise InvalidOption("group", sorted({group, before.group}), rule)
            spans[source] = Span(union((*before.ranges, *ranges)), max(before.token, row.token or ""), group)
        self.spans = dict(sorted(spans.items()))

    def missing_in(self, entry: Entry) -> DataFrame:
        """Returns the rows that the entry must write, with the column `topic_id` in place of `source`."""
        ids = F.substring_index("source", " ", 1)
        left_out: Column | None = None
        for topic, number, text, source, ranges in self._parts:
            missing = common(ranges, entry.missing.get(source, ()))
            if missing == ranges:
                continue
            old = (F.col("topic") == topic) & (F.col("partition") == number) & (F.col("source") == text)
            for start, to in missing:
                old = old & ~F.col("offset").between(start, to - 1)
            left_out = old if left_out is None else left_out | old
        rows = self._df if left_out is None else self._df.where(~left_out)
        return rows.withColumn("topic_id", ids).drop("source")


def named(known: Iterable[Source], topic: str, partition: int, topic_id: str | None, table: str) -> Source:
    """Returns the one source of `known` that is meant. Raises InvalidOption if there is none, or more than one."""
    found = [one for one in known if one[:2] == (topic, partition) and topic_id in (None, one.topic_id)]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(sorted(one.topic_id for one in found))
    rule = f"one of {ids}: {table} has rows of topics of the name {topic}" if found else "a partition that was written"
    raise InvalidOption("topic_id" if found else "partition", topic_id if found else f"{topic}:{partition}", rule)
