"""Idempotent writes on a plain file system: Parquet that holds every message once, however often it was delivered.

    ledger = Ledger("/data/orders")

    def handle(df, entry):
        clean(df).write.partitionBy("day").parquet(entry.folder("orders"))

    stream.writeStream.foreachBatch(ledger.sink(handle)).option("checkpointLocation", ...).start()
    ledger.read(spark, "orders")

Strategy: files are written into a folder of their own, and count only once an entry of the ledger names it. An entry
is one small JSON file, numbered without gaps and made in one step that fails if the number is taken, so writers agree
on an order. It says up to where each partition is written, and under which token (guards.py). An entry may also replace
folders by a merged one (`compact`), or move a partition back (`rewind`). Every hundredth writer leaves the fold of all
entries so far (ledger_state.py), so that a reader reads few of them.

Any process with a token may write: a Spark query, a claimed batch, a plain Python service. The path must be on a file
system with hard links that all writers see. Folders that no entry names are left-overs of writers that died, or were
replaced; `vacuum` deletes them. Entries are never deleted: a number that is free again would be taken twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from marshal_py.errors import InvalidOption, LedgerMoved
from marshal_py.protocol.identity import TopicPartition
from marshal_py.spark import guards
from marshal_py.spark.guards import Position, Span, TopicIds
from marshal_py.spark.ledger_state import LedgerState, Rewind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENTRIES: Final = "_marshal"
CHECKPOINT: Final = "checkpoint.json"
CHECKPOINT_EVERY: Final = 100  # entries; a reader reads at most so many, some ms, beside the checkpoint
MERGE_BELOW_BYTES: Final = 128 * 1024 * 1024  # `compact` leaves folders alone that hold so much: Spark's size of a task
LISTED_IN_DRIVER_MAX: Final = "spark.sql.sources.parallelPartitionDiscovery.threshold"


class Entry(guards.Entry):
    """A batch on its way into the ledger. What its folders hold counts from `commit` on."""

    def __init__(
        self, ledger: Ledger, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]
    ) -> None:
        super().__init__(str(ledger.path), spans, positions)
        self._ledger = ledger
        self._folders: dict[str, str] = {}
        self._name = _new_name()

    def folder(self, table: str) -> str:
        """A new folder for the Parquet files of one table. One per table and entry."""
        self._folders[table] = f"{table}/{self._name}"
        return str(self._ledger.path / table / self._name)

    def commit(self) -> None:
        """Makes the entry. Raises WriteFenced, LedgerMoved."""
        root = self._ledger.path
        written = {table: folder for table, folder in self._folders.items() if _size(root / folder)}
        positions = {str(tp): [str(to.token), to.to, to.topic_id] for tp, to in self.positions().items()}
        self._ledger.append({"positions": positions, "folders": written}, lambda: self.recheck(self._ledger.known()))


class Ledger:
    """One output folder: tables, and the ledger of what stands in them."""

    def __init__(self, path: str | Path) -> None:
        """Makes the folder. Raises InvalidOption for a path that is no local one."""
        if "://" in str(path):
            raise InvalidOption(
                "path",
                str(path),
                "a folder of a mounted file system: an entry is made by a hard "
                "link; on object stores, DeltaOutput or IcebergOutput",
            )
        self.path = Path(path).absolute()
        self._entries = self.path / ENTRIES
        self._entries.mkdir(parents=True, exist_ok=True)
        self._state = LedgerState()

    # --- reading

    def refresh(self) -> None:
        """Reads the entries that came since the last look."""
        if self._state.next == 0:
            with contextlib.suppress(FileNotFoundError):  # there are few entries
                self._state = LedgerState.parse((self._entries / CHECKPOINT).read_text(encoding="utf-8"))
        while True:
            try:
                text = self._file(self._state.next).read_text(encoding="utf-8")
            except FileNotFoundError:
                return
            self._state.fold(json.loads(text))

    def _file(self, number: int) -> Path:
        return self._entries / f"{number:012d}.json"

    def known(self, spans: Mapping[TopicPartition, Span] | None = None) -> Mapping[TopicPartition, Position]:
        """Per partition how far it is written, and by whom. Of all partitions, whichever are asked for."""
        self.refresh()
        return self._state.positions

    def positions(self) -> dict[TopicPartition, int]:
        """Per partition the offset below which everything is in the tables, or was left out by its writer."""
        return {tp: position.to for tp, position in self.known().items()}

    def folders(self, table: str) -> list[str]:
        """The folders that count. After a `rewind`, older ones hold rows that do not count any more: see `read`."""
        self.refresh()
        return [str(self.path / folder) for folder in self._state.folders.get(table, {})]

    def read(self, spark: SparkSession, table: str) -> DataFrame:
        """The table, as of now. Columns are those of the newest folder; what older ones lack is NULL.

        Raises InvalidOption if nothing was ever written to it, or if it lacks the columns that tell which rows a
        rewind has taken out.
        """
        self.refresh()
        born = self._state.folders.get(table, {})
        if not born:
            raise InvalidOption("table", table, f"no entry of {self._entries} names rows of it")
        return self._load(spark, table, born)

    def _load(self, spark: SparkSession, table: str, born: Mapping[str, int]) -> DataFrame:
        """The rows of some of its folders that count."""
        based = {"basePath": str(self.path / table)}
        newest = max(born, key=lambda folder: born[folder])
        schema = spark.read.options(**based).parquet(str(self.path / newest)).schema
        parts: dict[tuple[Rewind, ...], list[str]] = {}
        for folder, number in born.items():
            parts.setdefault(self._state.rewinds_after(number), []).append(str(self.path / folder))
        before = spark.conf.get(LISTED_IN_DRIVER_MAX)
        try:
            # Spark lists more than 32 folders by a job with a task for each. Here the driver lists them in a moment.
            spark.conf.set(LISTED_IN_DRIVER_MAX, str(len(born) + 1))
            frames = [
                _without(spark.read.options(**based).schema(schema).parquet(*folders), table, rewinds)
                for rewinds, folders in parts.items()
            ]
        finally:
            spark.conf.set(LISTED_IN_DRIVER_MAX, before or "32")
        found = frames[0]
        for frame in frames[1:]:
            found = found.unionByName(frame)
        return found.drop("entry")

    # --- writing

    def begin(self, spans: Mapping[TopicPartition, Span]) -> Entry:
        """An entry for a batch that holds these spans. Raises WriteFenced if a later owner has written already."""
        return Entry(self, spans, self.known())

    def append(self, content: Mapping[str, Any], check: Callable[[], object]) -> None:
        """Makes an entry under the next free number. `check` is asked after every look: what it raises ends it."""
        mine = self._write(json.dumps(content))
        try:
            while True:
                self.refresh()
                check()
                try:
                    os.link(mine, self._file(self._state.next))
                    break
                except FileExistsError:
                    continue  # somebody else took the number: read what it says
        finally:
            mine.unlink()
        made = self._state.next
        self.refresh()
        if (made + 1) % CHECKPOINT_EVERY == 0:
            self._write(self._state.text()).replace(self._entries / CHECKPOINT)

    def _write(self, text: str) -> Path:
        """A file of a name of its own beside the entries, on the disk."""
        path = self._entries / f".{uuid.uuid4().hex}"
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return path

    def sink(
        self, handle: Callable[[DataFrame, Entry], object], topics: TopicIds | None = None
    ) -> Callable[[DataFrame, int], None]:
        """A function for foreachBatch: `handle(rows, entry)` gets what is not written yet and writes it to folders.

        The rows are kept in memory or on disk while it runs, so that several actions read Kafka once. `handle` may be
        called again with fewer rows when another writer was faster. Rows of partitions that a later owner has written
        meanwhile are left out and logged: they are that owner's, and the query goes on. With `topics`, a topic that was
        deleted and made again begins anew; without, its first messages are taken for those that are there.
        """
        return guards.sink_of(str(self.path), self, handle, topics)

    # --- maintenance

    def rewind(self, topic: str, partition: int, to: int) -> None:
        """Takes the rows of a partition from offset `to` on out of all tables, so that they are written again.

        Readers leave the old rows out from now on; for that the tables need the columns `topic`, `partition` and
        `offset`. Call it while the group is paused and drained, before the group's positions are moved back. Writers
        that began before it are refused. Raises InvalidOption for an offset that is not written yet.
        """
        tp = TopicPartition(topic, partition)

        def check() -> None:
            written = self.known().get(tp)
            if written is None or not 0 <= to < written.to:
                upto = "nothing of it is" if written is None else f"it is written up to {written.to}"
                raise InvalidOption("to", to, f"an offset of {tp} that is written: {upto}")

        self.append({"positions": {}, "folders": {}, "rewinds": {str(tp): to}}, check)

    def compact(self, spark: SparkSession, table: str, *, partition_by: tuple[str, ...] = ()) -> int:
        """Merges the small folders of a table into one, beside readers and writers. Returns how many were merged.

        Folders of 128 MB and more are left alone, unless a rewind has taken rows out of them. `partition_by`: the
        columns by which the table's writers partition its files. Readers that listed the old folders go on reading
        them, until `vacuum` deletes them. Raises LedgerMoved if the table was rewound or compacted meanwhile.
        """
        self.refresh()
        born = {
            folder: number
            for folder, number in self._state.folders.get(table, {}).items()
            if self._state.rewinds_after(number) or _size(self.path / folder) < MERGE_BELOW_BYTES
        }
        if not born or (len(born) == 1 and not any(map(self._state.rewinds_after, born.values()))):
            return 0
        read_at, merged = self._state.next, f"{table}/{_new_name()}"
        size = sum(_size(self.path / folder) for folder in born)
        frame = self._load(spark, table, born)
        # Without a shuffle; the rows of a folder stay together, and files come out at about the size of a task.
        writer = frame.coalesce(1 + size // MERGE_BELOW_BYTES).write
        (writer.partitionBy(*partition_by) if partition_by else writer).parquet(str(self.path / merged))

        def check() -> None:
            rewound = any(rewind.number >= read_at for rewind in self._state.rewinds)
            if rewound or not born.keys() <= self._state.folders[table].keys():
                raise LedgerMoved(str(self.path))

        folders = {table: merged} if _size(self.path / merged) else {}
        for folder in born:
            os.utime(self.path / folder)  # from here on it does not count: `vacuum` takes the time since
        self.append({"positions": {}, "folders": folders, "replaces": {table: list(born)}}, check)
        return len(born)

    def vacuum(self, older_than_s: float) -> int:
        """Deletes folders that have not counted for so long. Returns how many.

        They are what `compact` replaced and what dead writers left. `older_than_s` must be longer than any reader reads
        and any batch lasts: a day is a good value. Raises InvalidOption for a negative one.
        """
        if older_than_s < 0:
            raise InvalidOption("older_than_s", older_than_s, "seconds, longer than any reader reads and batch lasts")
        before, gone = time.time() - older_than_s, 0
        found = [folder for folder in self.path.glob("*/entry=*") if _changed(folder) <= before]
        self.refresh()  # after the look: what is younger than this is not in `found`
        counting = {self.path / folder for folders in self._state.folders.values() for folder in folders}
        for folder in found:
            if folder not in counting:
                shutil.rmtree(folder, ignore_errors=True)
                gone += 1
        return gone


def _new_name() -> str:
    return f"entry=e{uuid.uuid4().hex}"  # the form of a partition column: Spark reads several at once


def _size(folder: Path) -> int:
    """Bytes of the Parquet files in a folder. 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*.parquet"))


def _changed(folder: Path) -> float:
    """When the newest thing in a folder was made, by the file system."""
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))


def _without(df: DataFrame, table: str, rewinds: tuple[Rewind, ...]) -> DataFrame:
    """The rows that no rewind has taken out."""
    from pyspark.sql import functions as F

    missing = {"topic", "partition", "offset"} - set(df.columns)
    if rewinds and missing:
        raise InvalidOption(
            "table",
            table,
            f"a table with the columns {', '.join(sorted(missing))}: the ledger was "
            f"rewound, and they tell which rows that takes out",
        )
    for rewind in rewinds:
        there = (F.col("topic") == rewind.tp.topic) & (F.col("partition") == rewind.tp.partition)
        there = there & (F.col("offset") >= rewind.to)
        if rewind.topic_id and "topic_id" in df.columns:
            there = there & (F.col("topic_id") == rewind.topic_id)
        df = df.where(~there)
    return df
