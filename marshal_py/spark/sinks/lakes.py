"""What tables of a data lake have in common (Delta Lake, Iceberg): files first, then one optimistic commit.

An entry collects the rows of a batch and commits them together with the ranges of their offsets. A commit fails if
another writer's commit came in between. Then the entry reads the table again, checks that the other writer had nothing
to do with the same partitions or with the table's columns, and commits again with the same files. delta.py and
iceberg.py say how a table is read and committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql import DataFrame

from marshal_py.client.values.finished import Kept, Ranges, Source, Span
from marshal_py.errors import InvalidOption, TableChanged
from marshal_py.spark.sinks import guards
from marshal_py.spark.sinks.guards import Sink, named

ALL_ROWS: Final = "true"  # for `rewind`: no row has to be told from another topic's
MERGES: Final = "merge_schema=True adds new columns to the table, and writes NULL where rows lack one"
COMMITS_MAX: Final = 100  # tries of one commit; each failure means that another writer succeeded


class LakeEntry(guards.Entry):
    """Writes a batch into a table of a data lake."""

    CONFLICT: ClassVar[type[Exception]]  # what a commit raises that lost to another one

    def __init__(self, name: str, spans: Mapping[Source, Span], known: Mapping[Source, Kept]) -> None:
        super().__init__(name, spans, known)
        self._rows: pa.Table | None = None

    def append(self, rows: DataFrame | pa.Table) -> None:
        """Adds the batch's rows: a DataFrame, which Spark's executors write, or a pyarrow table. Call it once per
        entry.

        The rows must have the table's columns, with their types; with `merge_schema` new columns are added to the
        table, and columns that the rows lack become NULL. A Delta table that does not exist is created with the
        columns of the rows. Raises InvalidOption, also for rows that the table's constraints forbid.
        """
        if hasattr(rows, "sparkSession"):
            self._append_files(rows)
        else:
            self._rows = self._fitted(rows)

    def commit(self) -> None:
        """Adds rows and offsets in one commit. Raises WriteFenced, TableChanged."""
        for left in reversed(range(COMMITS_MAX)):
            self._prepare()
            try:
                self._commit_once()
                return
            except self.CONFLICT as error:
                if not left:
                    raise TableChanged(self.name) from error
            self.recheck(self._read_again())

    @abstractmethod
    def _append_files(self, rows: DataFrame) -> None:
        """Makes the executors write the files that `commit` will name."""

    @abstractmethod
    def _fitted(self, rows: pa.Table) -> pa.Table:
        """Returns the rows with exactly the table's columns. Raises InvalidOption if they do not fit."""

    def _prepare(self) -> None:
        """Prepares one attempt to commit. `commit` calls it before each attempt."""
        return

    @abstractmethod
    def _commit_once(self) -> None:
        """Tries to commit once. Raises the error `CONFLICT` if another writer's commit came first."""

    @abstractmethod
    def _read_again(self) -> Mapping[Source, Kept]:
        """Reads the table and what it knows of the entry's sources. Raises TableChanged if checked rows may not fit any
        more."""


class LakeOutput(ABC):
    """Writes batches of Marshal streams to a table of a data lake. Other writers may write to it, too."""

    name: str  # the table's name, for errors and logs

    @abstractmethod
    def known(self, spans: Mapping[Source, Span]) -> Mapping[Source, Kept]:
        """Returns what the table knows of these sources, with the fencing tokens of the groups that `spans` names."""

    @abstractmethod
    def sources(self, topic: str, partition: int) -> dict[Source, Kept]:
        """Returns what the table knows of this partition of all topics of the name; without tokens."""

    @abstractmethod
    def begin(self, spans: Mapping[Source, Span]) -> LakeEntry:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions. Raises OffsetsUnclear.
        """

    @abstractmethod
    def _columns(self) -> list[str]:
        """Returns the names of the table's columns. It has rows of Marshal streams."""

    @abstractmethod
    def _rewound(self, source: Source, kept: Kept, where: str) -> None:
        """Commits the change. Raises TableChanged if another writer committed meanwhile."""

    def finished(self, topic: str, partition: int) -> dict[Source, Ranges]:
        """Returns which offsets of the partition the table has: ascending ranges [start, to).

        A topic that was created again, or one of the same name on another cluster, is a source of its own (`topic_id`).
        """
        return {source: kept.finished.ranges for source, kept in self.sources(topic, partition).items()}

    def rewind(
        self, topic: str, partition: int, to: int, *, where: str | None = None, topic_id: str | None = None
    ) -> Source:
        """Makes a partition's messages from offset `to` on count as not written, and deletes their rows, in one commit.

        The columns topic, partition and offset say which rows these are. Store them as the stream has them. `topic_id`
        must be given if the table has rows of several topics of this name; then the column topic_id is needed, too.

        `where`: what the columns that the table lacks would say, in the table's own SQL, for example "country = 'eu'"
        if each country has a topic; "true" if all rows of that partition number and those offsets are this topic's. It
        is required if a column is missing, and refused otherwise: rows in the range that it kept would be written a
        second time.

        Pause the group meanwhile, and move its position back then. What was never written, such as the history before
        the group's start, needs no rewind. Returns the source. Raises InvalidOption, TableChanged.
        """
        if to < 0:
            raise InvalidOption("to", to, "an offset from 0 on")
        known = self.sources(topic, partition)
        source = named(known, topic, partition, topic_id, self.name)
        self._rewound(source, known[source].back_to(to), self._rows_from(source, to, where, len(known) > 1))
        return source

    def _rows_from(self, source: Source, to: int, where: str | None, several: bool) -> str:
        """Returns the SQL condition for a source's rows from offset `to` on. `several` topics have the name. Raises
        InvalidOption."""
        wanted = {
            "topic": f"topic = '{source.topic}'",
            "partition": f"partition = {source.partition}",
            "offset": f"offset >= {to}",
            **({"topic_id": f"topic_id = '{source.topic_id}'"} if several else {}),
        }
        there = set(self._columns())
        missing = ", ".join(sorted(wanted.keys() - there))
        rows = f"the rows of {source.tp} from offset {to} on"
        if missing and where is None:
            rule = f"{self.name} has no column {missing}: give a condition that is true for {rows}, and for no others"
            raise InvalidOption("where", where, f"{rule} ({ALL_ROWS!r} if the other columns suffice)", given=False)
        if where is not None and not missing:
            rule = f"no condition: the columns {', '.join(wanted)} say which are {rows}. Leave it out"
            raise InvalidOption("where", where, rule)
        conditions = [text for name, text in wanted.items() if name in there]
        if where is not None and (where != ALL_ROWS or not conditions):  # pyiceberg's AND takes no TRUE
            conditions.append(f"({where})" if conditions else where)
        return " AND ".join(conditions)

    def sink(self, change: Callable[[DataFrame], DataFrame] = lambda rows: rows) -> Sink[Any]:
        """Returns a function to be given to Spark's foreachBatch. It adds the new rows of each batch, as `change`
        returns them.

        Rows of partitions that a later owner has written meanwhile are left out (`Sink.last`).
        """
        return Sink(self, lambda rows, entry: entry.append(change(rows)))


def check_names(name: str, given: list[str], expected: list[str], merge_schema: bool) -> None:
    """Raises InvalidOption unless rows have exactly the table's columns, in any order; with `merge_schema` also
    others."""
    if len(set(given)) < len(given):
        raise InvalidOption("rows", given, "each column once")
    if merge_schema or set(given) == set(expected):
        return
    says = [f"{', '.join(sorted(set(expected) - set(given)))} is not there"] if set(expected) - set(given) else []
    says += (
        [f"{', '.join(sorted(set(given) - set(expected)))} is not in the table"] if set(given) - set(expected) else []
    )
    rule = f"the columns of {name}: {', '.join(expected)}; {'; '.join(says)}. {MERGES}"
    raise InvalidOption("rows", given, rule)
