"""Idempotent writes: Parquet that holds every message once, whoever wrote it, however often it was delivered.

    ledger = Ledger("/data/orders")

    def handle(df, entry):
        clean(df).write.partitionBy("day").parquet(entry.folder("orders"))

    stream.writeStream.foreachBatch(ledger.sink(handle)).option("checkpointLocation", ...).start()
    ledger.read(spark, "orders")

Strategy: files are written into a folder of their own, and count only once an entry of the ledger names it. An entry
is one small JSON file, numbered without gaps and made in one step that fails if the number is taken, so writers agree
on an order. It says, per partition, under which fencing token the offsets below which position were written. From that
every writer knows what to leave out (a batch that came again, with or without its Spark checkpoint) and whether it may
write at all: one whose token is older than the newest is fenced off (PROTOCOL.md K1).

Any process with a token may write: a Spark query, a claimed batch, a plain Python service. The path must be on a file
system with hard links that all writers see. A rewound position brings messages that are in the table already: they are
left out. Folders that no entry names are left-overs of writers that died.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from marshal_py.errors import InvalidOption, LedgerMoved, WriteFenced
from marshal_py.protocol.identity import Token, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("marshal_py.spark")

ENTRIES: Final = "_marshal"
TRIES_MAX: Final = 10  # another writer was faster with an overlapping batch: rare, and each time somebody got on


class Span(NamedTuple):
    """What a batch holds of one partition: offsets in [start, to), read under `token`."""

    token: Token
    start: int
    to: int


class Entry:
    """A batch on its way into the ledger. What its folders hold counts from `commit` on."""

    def __init__(self, ledger: Ledger, spans: Mapping[TopicPartition, Span],
                 done: Mapping[TopicPartition, int]) -> None:  # fmt: skip
        self._ledger = ledger
        self.spans = spans
        self.done = done  # per partition: offsets below are in the table already
        self._folders: dict[str, str] = {}
        self._name = f"entry=e{uuid.uuid4().hex}"  # the form of a partition column: Spark reads several at once

    def folder(self, table: str) -> str:
        """A new folder for the files of one table. One per table and entry."""
        self._folders[table] = f"{table}/{self._name}"
        return str(self._ledger.path / table / self._name)

    def is_new(self, tp: TopicPartition, offset: int) -> bool:
        """Whether this message is not in the table yet."""
        return offset >= self.done.get(tp, 0)

    def new_rows(self, df: DataFrame) -> DataFrame:
        """The rows of the batch that are not in the tables yet."""
        from pyspark.sql import functions as F

        for tp, done in self.done.items():
            if done > self.spans[tp].start:
                there = (F.col("topic") == tp.topic) & (F.col("partition") == tp.partition) & (F.col("offset") < done)
                df = df.where(~there)
        return df

    def commit(self) -> None:
        """Makes the entry. Raises WriteFenced, LedgerMoved."""
        self._ledger.append(self)

    @property
    def content(self) -> dict[str, Any]:
        positions = {str(tp): [str(span.token), max(span.to, self.done.get(tp, 0))] for tp, span in self.spans.items()}
        return {"positions": positions, "folders": self._folders}


class Ledger:
    """One output folder: tables, and the ledger of what stands in them."""

    def __init__(self, path: str | Path) -> None:
        """Makes the folder. Raises InvalidOption for a path that is no local one."""
        if "://" in str(path):
            raise InvalidOption("path", str(path), "a folder of a mounted file system: an entry is made by a hard link")
        self.path = Path(path).absolute()
        self._entries = self.path / ENTRIES
        self._entries.mkdir(parents=True, exist_ok=True)
        self._next = 0
        self._positions: dict[TopicPartition, tuple[Token, int]] = {}
        self._folders: dict[str, list[str]] = {}

    # --- reading

    def refresh(self) -> None:
        """Reads the entries that came since the last look."""
        while True:
            try:
                text = self._file(self._next).read_text(encoding="utf-8")
            except FileNotFoundError:
                return
            content = json.loads(text)
            for name, (token, to) in content["positions"].items():
                topic, _, number = name.rpartition(":")
                self._positions[TopicPartition(topic, int(number))] = (Token.parse(token), to)
            for table, folder in content["folders"].items():
                self._folders.setdefault(table, []).append(str(self.path / folder))
            self._next += 1

    def _file(self, number: int) -> Path:
        return self._entries / f"{number:012d}.json"

    def positions(self) -> dict[TopicPartition, int]:
        """Per partition the offset below which everything is in the tables, or was left out by its writer."""
        self.refresh()
        return {tp: to for tp, (_, to) in self._positions.items()}

    def folders(self, table: str) -> list[str]:
        """The folders that count. An entry whose batch had no row for a table may name one that holds no file."""
        self.refresh()
        return [folder for folder in self._folders.get(table, []) if any(Path(folder).rglob("*.parquet"))]

    def read(self, spark: SparkSession, table: str) -> DataFrame:
        """The table, as of now. Raises InvalidOption if nothing was ever written to it."""
        folders = self.folders(table)
        if not folders:
            raise InvalidOption("table", table, f"no entry of {self._entries} names rows of it")
        return spark.read.option("basePath", str(self.path / table)).parquet(*folders).drop("entry")

    # --- writing

    def begin(self, spans: Mapping[TopicPartition, Span]) -> Entry:
        """An entry for a batch that holds these spans. Raises WriteFenced if a later owner has written already."""
        self.refresh()
        self._check(spans)
        return Entry(self, spans, {tp: self._positions[tp][1] for tp in spans if tp in self._positions})

    def _check(self, spans: Mapping[TopicPartition, Span]) -> None:
        for tp, span in spans.items():
            found = self._positions.get(tp)
            if found is not None and found[0] > span.token:
                raise WriteFenced(str(self.path), str(tp), str(span.token), str(found[0]))

    def append(self, entry: Entry) -> None:
        """Makes the entry under the next free number. Raises WriteFenced, LedgerMoved."""
        mine = self._entries / f".{uuid.uuid4().hex}"
        with mine.open("w", encoding="utf-8") as file:
            json.dump(entry.content, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            while True:
                self.refresh()
                self._check(entry.spans)
                if any(entry.done.get(tp, 0) != self._positions[tp][1] for tp in entry.spans if tp in self._positions):
                    raise LedgerMoved(str(self.path))
                try:
                    os.link(mine, self._file(self._next))
                    break
                except FileExistsError:
                    continue  # somebody else took the number: read what it says
        finally:
            mine.unlink()
        self.refresh()

    def sink(self, handle: Callable[[DataFrame, Entry], object]) -> Callable[[DataFrame, int], None]:
        """A function for foreachBatch: `handle(rows, entry)` gets what is not written yet and writes it to folders.

        The rows are kept in memory or on disk while it runs, so that several actions read Kafka once. `handle` may be
        called again with fewer rows when another writer was faster. Rows of partitions that a later owner has written
        meanwhile are left out and logged: they are that owner's, and the query goes on.
        """

        def write(df: DataFrame, batch: int) -> None:
            kept = df.persist()
            try:
                spans = spans_of(kept)
                for left in reversed(range(TRIES_MAX)):
                    mine = self._unfenced(spans)
                    if not mine:
                        break
                    try:
                        entry = self.begin(mine)
                        handle(entry.new_rows(_only(kept, spans, mine)), entry)
                        entry.commit()
                        break
                    except (LedgerMoved, WriteFenced):
                        if not left:
                            raise
            finally:
                kept.unpersist()

        return write

    def _unfenced(self, spans: Mapping[TopicPartition, Span]) -> dict[TopicPartition, Span]:
        """Those that no later owner has written."""
        self.refresh()
        mine = {}
        for tp, span in spans.items():
            try:
                self._check({tp: span})
                mine[tp] = span
            except WriteFenced as error:
                log.warning("offsets %d to %d of %s are left out: %s", span.start, span.to - 1, tp, error)
        return mine


def _only(df: DataFrame, spans: Mapping[TopicPartition, Span], mine: Mapping[TopicPartition, Span]) -> DataFrame:
    """The rows of the partitions in `mine`."""
    from pyspark.sql import functions as F

    for tp in spans.keys() - mine.keys():
        df = df.where(~((F.col("topic") == tp.topic) & (F.col("partition") == tp.partition)))
    return df


def spans_of(df: DataFrame) -> dict[TopicPartition, Span]:
    """What a batch of a Marshal stream holds, by its columns topic, partition, offset and token."""
    from pyspark.sql import functions as F

    rows = df.groupBy("topic", "partition").agg(
        F.min("offset").alias("first"), F.max("offset").alias("last"), F.max("token").alias("token")
    )
    return {TopicPartition(row.topic, row.partition): Span(Token.parse(row.token), row.first, row.last + 1)
            for row in rows.collect()}  # fmt: skip
