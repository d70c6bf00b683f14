"""A ledger of Parquet folders on a plain file system: every message is written once, however often it is delivered.

    ledger = Ledger("/data/orders")

    def handle(df, entry):
        clean(df).write.partitionBy("day").parquet(entry.folder("orders"))

    stream.writeStream.foreachBatch(ledger.sink(handle)).option("checkpointLocation", ...).start()
    ledger.read(spark, "orders")

A batch's files are written into a new folder, which counts only once an entry of the ledger names it. An entry is one
small JSON file. Entries are numbered without gaps, and creating one fails if its number is taken. So writers agree on
an order. An entry says which offsets of each partition are written, under which token (guards.py). It may also replace
folders by a merged one (`compact`), or move a partition back (`rewind`). Every hundredth writer saves the fold of all
entries so far as a checkpoint (ledger_state.py), so that a reader has few entries to read.

Any process with a token may write: a Spark query, a claimed batch, a plain Python service. The path must be on a file
system with hard links that all writers share. Folders that no entry names were left by writers that died, or were
replaced; `vacuum` deletes them. Entries must never be deleted, or their numbers would be taken a second time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from marshal_py.client.values.finished import Kept, Ranges, Source, Span
from marshal_py.errors import InvalidOption, LedgerMoved
from marshal_py.spark.sinks import guards
from marshal_py.spark.sinks.guards import Sink, named
from marshal_py.spark.sinks.ledger_state import LedgerState, Rewind, texts

ENTRIES: Final = "_marshal"
CHECKPOINT: Final = "checkpoint.json"
CHECKPOINT_EVERY: Final = 100  # entries; about so many a reader has to read after the checkpoint, in some ms
MERGE_BELOW_BYTES: Final = 128 * 1024 * 1024  # `compact` leaves larger folders alone: what one Spark task reads
LISTING_OPTION: Final = "spark.sql.sources.parallelPartitionDiscovery.threshold"  # how many folders the driver lists
LISTING_DEFAULT: Final = "32"  # Spark's


class Entry(guards.Entry):
    """Writes a batch into the ledger. Its folders do not count before `commit`."""

    def __init__(self, ledger: Ledger, spans: Mapping[Source, Span], known: Mapping[Source, Kept]) -> None:
        super().__init__(str(ledger.path), spans, known)
        self._ledger = ledger
        self._folders: dict[str, str] = {}
        self._name = _new_name()

    def folder(self, table: str) -> str:
        """Returns the path of a new folder for Parquet files of one table. Call it once per table."""
        self._folders[table] = f"{table}/{self._name}"
        return str(self._ledger.path / table / self._name)

    def commit(self) -> None:
        """Appends the entry to the ledger. Raises WriteFenced, or LedgerMoved if another writer was faster."""
        root = self._ledger.path
        written = {table: folder for table, folder in self._folders.items() if _size(root / folder)}
        content = {"kept": texts(self.after()), "folders": written}
        self._ledger.append(content, lambda: self.recheck(self._ledger.known()))


class Ledger:
    """Keeps the tables of one output folder, and the ledger of their contents."""

    def __init__(self, path: str | Path) -> None:
        """Creates the folder if it does not exist. Raises InvalidOption for a path that is not local."""
        if "://" in str(path):
            raise InvalidOption(
                "path",
                str(path),
                "a folder of a mounted file system, because entries are made by hard links; on object stores use "
                "DeltaOutput or IcebergOutput",
            )
        self.path: Path = Path(path).absolute()
        self._entries = self.path / ENTRIES
        self._entries.mkdir(parents=True, exist_ok=True)
        self._state = LedgerState()

    # --- reading

    def refresh(self) -> None:
        """Reads the entries that were added since the last call."""
        if self._state.next == 0:
            with contextlib.suppress(FileNotFoundError):  # too few entries for one
                self._state = LedgerState.parse((self._entries / CHECKPOINT).read_text(encoding="utf-8"))
        while True:
            try:
                text = self._file(self._state.next).read_text(encoding="utf-8")
            except FileNotFoundError:
                return
            self._state.fold(json.loads(text))

    def _file(self, number: int) -> Path:
        return self._entries / f"{number:012d}.json"

    @property
    def name(self) -> str:
        return str(self.path)

    def known(self, spans: Mapping[Source, Span] | None = None) -> Mapping[Source, Kept]:
        """Returns what the ledger knows of every partition. `spans` has no effect."""
        self.refresh()
        return self._state.kept

    def finished(self) -> dict[Source, Ranges]:
        """Returns which offsets of every partition are in the tables: ascending ranges [start, to)."""
        return {source: kept.finished.ranges for source, kept in self.known().items()}

    def folders(self, table: str) -> list[str]:
        """Returns the folders that hold the table's rows.

        After a `rewind`, older folders also hold rows that no longer belong to the table. `read` leaves such rows out.
        """
        self.refresh()
        return [str(self.path / folder) for folder in self._state.folders.get(table, {})]

    def read(self, spark: SparkSession, table: str) -> DataFrame:
        """Returns the table as it is now.

        It has the columns of the newest folder. Rows of older folders that lack a column have NULL in it. Raises
        InvalidOption if nothing was ever written to the table, or if it was rewound and lacks the columns topic,
        partition and offset.
        """
        self.refresh()
        added = self._state.folders.get(table, {})
        if not added:
            raise InvalidOption("table", table, f"no entry of {self._entries} names rows of it")
        return self._load(spark, table, added)

    def _load(self, spark: SparkSession, table: str, added: Mapping[str, int]) -> DataFrame:
        """Returns the table's rows in the folders `added`, which maps each folder to the number of its entry."""
        based = {"basePath": str(self.path / table)}
        newest = max(added, key=lambda folder: added[folder])
        schema = spark.read.options(**based).parquet(str(self.path / newest)).schema
        parts: dict[tuple[Rewind, ...], list[str]] = {}
        for folder, number in added.items():
            parts.setdefault(self._state.rewinds_after(number), []).append(str(self.path / folder))
        before = spark.conf.get(LISTING_OPTION)
        try:
            # Spark lists more than 32 folders by a job with a task for each. The driver itself is much faster.
            spark.conf.set(LISTING_OPTION, str(len(added) + 1))
            frames = [
                _without(spark.read.options(**based).schema(schema).parquet(*folders), table, rewinds, self._state.kept)
                for rewinds, folders in parts.items()
            ]
        finally:
            spark.conf.set(LISTING_OPTION, before or LISTING_DEFAULT)
        found = frames[0]
        for frame in frames[1:]:
            found = found.unionByName(frame)
        return found.drop("entry")

    # --- writing

    def begin(self, spans: Mapping[Source, Span]) -> Entry:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions.
        """
        return Entry(self, spans, self.known())

    def append(self, content: Mapping[str, Any], check: Callable[[], object]) -> None:
        """Adds an entry with this content under the next free number.

        It calls `check` each time it has read newer entries. If `check` raises, nothing is added and the error passes
        through.
        """
        written = self._write(json.dumps(content))
        try:
            while True:
                self.refresh()
                check()
                try:
                    os.link(written, self._file(self._state.next))
                    break
                except FileExistsError:
                    continue  # another writer took the number: read its entry
        finally:
            written.unlink()
        number = self._state.next
        self.refresh()
        if (number + 1) % CHECKPOINT_EVERY == 0:
            self._write(self._state.text()).replace(self._entries / CHECKPOINT)

    def _write(self, text: str) -> Path:
        """Writes a file with a unique name beside the entries, and waits until it is on the disk."""
        path = self._entries / f".{uuid.uuid4().hex}"
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return path

    def sink(self, handle: Callable[[DataFrame, Entry], object]) -> Sink[Entry]:
        """Returns a function to be given to Spark's foreachBatch.

        `handle(rows, entry)` gets the rows that are not written yet and writes them as Parquet to
        `entry.folder(table)`. The rows are cached while `handle` runs, so that several actions read Kafka once. If
        another writer was faster, `handle` is called again, with fewer rows. Rows of partitions that a later owner has
        written meanwhile are left out (`Sink.last`).
        """
        return Sink(self, handle)

    # --- maintenance

    def rewind(self, topic: str, partition: int, to: int, topic_id: str | None = None) -> None:
        """Removes a partition's messages from offset `to` on from all tables, so that they can be written again.

        Their rows stay in the files, but readers leave them out from now on. For that the tables need the columns
        `topic`, `partition` and `offset`, and `topic_id` if they hold several topics of one name; then `topic_id` says
        which is meant. First pause and drain the group, then call this, then move the group's positions back. Writers
        that began earlier fail with LedgerMoved. Raises InvalidOption if nothing from `to` on is written.
        """
        source = named(self.known(), topic, partition, topic_id, str(self.path))

        def check() -> None:
            ranges = self.known()[source].finished.ranges
            if not ranges or not 0 <= to < ranges[-1][1]:
                rule = f"an offset of {source.tp} that is written: it is written up to {ranges[-1][1] if ranges else 0}"
                raise InvalidOption("to", to, rule)

        self.append({"kept": {}, "folders": {}, "rewinds": {str(source): to}}, check)

    def compact(self, spark: SparkSession, table: str, *, partition_by: tuple[str, ...] = ()) -> int:
        """Merges the small folders of a table into one, while others read and write. Returns how many were merged.

        Folders of 128 MB and more are left alone, unless a rewind has taken rows out of them. `partition_by` names the
        columns by which the table's writers partition its files. Readers that have listed the old folders can read them
        until `vacuum` deletes them. Raises LedgerMoved if the table was rewound or compacted meanwhile.
        """
        self.refresh()
        added = {
            folder: number
            for folder, number in self._state.folders.get(table, {}).items()
            if self._state.rewinds_after(number) or _size(self.path / folder) < MERGE_BELOW_BYTES
        }
        if not added or (len(added) == 1 and not any(map(self._state.rewinds_after, added.values()))):
            return 0
        read_at, merged = self._state.next, f"{table}/{_new_name()}"
        size = sum(_size(self.path / folder) for folder in added)
        frame = self._load(spark, table, added)
        # Without a shuffle: a folder's rows stay together, and each file is about what one task reads.
        writer = frame.coalesce(1 + size // MERGE_BELOW_BYTES).write
        (writer.partitionBy(*partition_by) if partition_by else writer).parquet(str(self.path / merged))

        def check() -> None:
            rewound = any(rewind.number >= read_at for rewind in self._state.rewinds)
            if rewound or not added.keys() <= self._state.folders[table].keys():
                raise LedgerMoved(str(self.path))

        folders = {table: merged} if _size(self.path / merged) else {}
        for folder in added:
            os.utime(self.path / folder)  # from now on it does not count; `vacuum` measures the time since
        self.append({"kept": {}, "folders": folders, "replaces": {table: list(added)}}, check)
        return len(added)

    def vacuum(self, older_than_s: float) -> int:
        """Deletes folders that have held no rows of a table for `older_than_s` seconds. Returns how many it deleted.

        Such folders were replaced by `compact`, or left by writers that died. `older_than_s` must be longer than any
        read and any batch takes; a day is a good value. Raises InvalidOption for a negative number.
        """
        if older_than_s < 0:
            raise InvalidOption("older_than_s", older_than_s, "seconds, longer than any read and any batch takes")
        before, deleted = time.time() - older_than_s, 0
        found = [folder for folder in self.path.glob("*/entry=*") if _changed(folder) <= before]
        self.refresh()  # after listing: folders that were added meanwhile are not in `found`
        counting = {self.path / folder for folders in self._state.folders.values() for folder in folders}
        for folder in found:
            if folder not in counting:
                shutil.rmtree(folder, ignore_errors=True)
                deleted += 1
        return deleted


def _new_name() -> str:
    return f"entry=e{uuid.uuid4().hex}"  # the form of a partition column: Spark reads several at once


def _size(folder: Path) -> int:
    """Returns how many bytes the Parquet files in a folder have; 0 if the folder does not exist."""
    return sum(file.stat().st_size for file in folder.rglob("*.parquet"))


def _changed(folder: Path) -> float:
    """Returns when anything in a folder was last changed, in seconds by the file system's clock."""
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))


def _without(df: DataFrame, table: str, rewinds: tuple[Rewind, ...], known: Collection[Source]) -> DataFrame:
    """Returns the rows of `df` that none of `rewinds` has removed from the table.

    Raises InvalidOption if the table lacks columns that say which rows these are: topic, partition and offset, and
    topic_id if `known` has several topics of one name.
    """
    from pyspark.sql import functions as F

    several = any(sum(one.tp == rewind.source.tp for one in known) > 1 for rewind in rewinds)
    missing = {"topic", "partition", "offset", *(("topic_id",) if several else ())} - set(df.columns)
    if rewinds and missing:
        raise InvalidOption(
            "table",
            table,
            f"a table with the columns {', '.join(sorted(missing))}: the ledger was rewound, and they say which "
            "rows that takes out",
        )
    for rewind in rewinds:
        rewound = (F.col("topic") == rewind.source.topic) & (F.col("partition") == rewind.source.partition)
        rewound = rewound & (F.col("offset") >= rewind.to)
        if "topic_id" in df.columns:
            rewound = rewound & (F.col("topic_id") == rewind.source.topic_id)
        df = df.where(~rewound)
    return df
