"""What tables of a data lake have in common (Delta Lake, Iceberg): files first, then one optimistic commit.

An entry collects the rows of a batch and commits them together with the positions. A commit fails if another writer's
commit came in between. Then the entry reads the table again, checks that the other writer had nothing to do with the
same partitions, and commits again with the same files. delta.py and iceberg.py say how a table is read and committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import pyarrow as pa
from pyspark.sql import DataFrame

from marshal_py.errors import LedgerMoved
from marshal_py.protocol.identity import TopicPartition
from marshal_py.spark import guards
from marshal_py.spark.guards import Position, Span, TopicIds

COMMITS_MAX: Final = 100  # tries of one commit; each failure means that another writer succeeded


class LakeEntry(guards.Entry):
    """Writes a batch into a table of a data lake."""

    CONFLICT: ClassVar[type[Exception]]  # what a commit raises that lost to another one

    def __init__(
        self, name: str, spans: Mapping[TopicPartition, Span], positions: Mapping[TopicPartition, Position]
    ) -> None:
        super().__init__(name, spans, positions)
        self._rows: pa.Table | None = None

    def append(self, rows: DataFrame | pa.Table) -> None:
        """Adds the batch's rows: a DataFrame, which Spark's executors write, or a pyarrow table. Call it once per
        entry.

        The rows must have the table's columns. A Delta table that does not exist is created with these columns. Raises
        InvalidOption.
        """
        if hasattr(rows, "sparkSession"):
            self._append_files(rows)
        else:
            self._rows = rows

    def commit(self) -> None:
        """Adds the rows and moves the positions, in one commit. Raises WriteFenced, or LedgerMoved if another writer
        has written the partitions.
        """
        for left in reversed(range(COMMITS_MAX)):
            self._prepare()
            try:
                self._commit_once()
                return
            except self.CONFLICT as error:
                if not left:
                    raise LedgerMoved(self.name) from error
            self.recheck(self._read_again())

    @abstractmethod
    def _append_files(self, rows: DataFrame) -> None:
        """Makes the executors write the files that `commit` will name."""

    def _prepare(self) -> None:
        """Prepares one attempt to commit. `commit` calls it before each attempt."""
        return

    @abstractmethod
    def _commit_once(self) -> None:
        """Tries to commit once. Raises the error `CONFLICT` if another writer's commit came first."""

    @abstractmethod
    def _read_again(self) -> Mapping[TopicPartition, Position]:
        """Reads the table as it is now, and returns the positions of the entry's partitions."""


class LakeOutput(ABC):
    """Writes batches of Marshal streams to a table of a data lake. Other writers may write to it, too."""

    name: str  # the table's name, for errors and logs

    @abstractmethod
    def known(self, spans: Mapping[TopicPartition, Span]) -> Mapping[TopicPartition, Position]:
        """Returns how far these partitions are written, and under which fencing tokens."""

    @abstractmethod
    def begin(self, spans: Mapping[TopicPartition, Span]) -> LakeEntry:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions.
        """

    def sink(
        self, change: Callable[[DataFrame], DataFrame] = lambda rows: rows, topics: TopicIds | None = None
    ) -> Callable[[DataFrame, int], None]:
        """Returns a function to be given to Spark's foreachBatch. It adds the new rows of each batch, as `change`
        returns them.

        Rows of partitions that a later owner has written meanwhile are left out and logged. With `topics`, a topic that
        was deleted and created again starts at offset 0. If `topics` is None, the first messages of the new topic are
        left out, as if they were written already.
        """
        return guards.sink_of(self.name, self, lambda rows, entry: entry.append(change(rows)), topics)
