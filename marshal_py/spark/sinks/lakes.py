"""What tables of a data lake have in common (Delta Lake, Iceberg): files first, then one optimistic commit.

Executors write Parquet files below the table, through Spark's own file systems; the driver lists them, also through
Spark, in one job that reads them back: for their statistics, and for the rules that their rows must keep. Files that no
commit names are never read, and the table's own vacuum deletes them.

An entry collects the rows of a batch and commits them together with the ranges of their offsets. A commit fails if
another writer's commit came in between. Then the entry reads the table again, checks that the other writer had nothing
to do with the same partitions or with the table's columns, and commits again with the same files. delta.py and
iceberg.py say how a table is read and committed.
"""

from __future__ import annotations

import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, ClassVar, Final, Generic, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as F

from marshal_py.client.values.finished import Kept, Ranges, Source, Span
from marshal_py.errors import InvalidOption, TableChanged
from marshal_py.spark.sinks import guards
from marshal_py.spark.sinks.guards import Sink, named

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_TIMES: Final = "spark.sql.parquet.outputTimestampType"
_TIMES_DEFAULT: Final = "INT96"
_UTC: Final = {"timeZone": "UTC"}  # of times in the names of folders, which are values of the table
_EPOCH: Final = date(1970, 1, 1)
_INDEXED_MAX: Final = 32  # columns with statistics, as in Delta; more make the table's log large
_PREFIX: Final = 32  # characters of a text in statistics, as in Delta
_HIGHEST: Final = "\U0010ffff"  # a text with it is above all that begin like it


Broken = tuple[int, int | None]  # how many rows break a rule, and the lowest offset among them, if it is known


class DataFile(NamedTuple):
    """One Parquet file: `path` in the table's folder, `size` in bytes, `values` of the partition columns, Delta's
    `stats`, and by rule the rows that are `broken`."""

    path: str
    size: int
    rows: int
    values: dict[str, str | None]
    stats: dict[str, Any]
    broken: dict[str, Broken]


def spark_uri_of(uri: str) -> str:
    """Returns an S3 address as Hadoop's file system writes it. Other addresses are returned unchanged."""
    return "s3a" + uri[2:] if uri.startswith("s3://") else uri


def not_null(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Returns the rows with these columns as required ones. Spark believes such a schema and looks at no row, so the
    tasks look, and fail."""

    def checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in names:
                if batch.column(name).null_count:
                    raise ValueError(f"NULL in column {name}, which must not have it")
            yield batch

    fields = [
        types.StructField(one.name, one.dataType, one.nullable and one.name not in names) for one in df.schema.fields
    ]
    return df.mapInArrow(checked, types.StructType(fields))


def nulls_in(df: DataFrame, names: Sequence[str]) -> dict[str, Broken]:
    """Returns for each of these columns how many rows have NULL in it, and the lowest offset; none if no row has."""
    wanted = [one for name in names for one in _breaks(df, F.col(f"`{name}`").isNotNull())]
    (found,) = df.agg(*(one.alias(f"_{at}") for at, one in enumerate(wanted))).collect()
    counted = zip(names, found[0::2], found[1::2], strict=True)
    return {name: (count, first) for name, count, first in counted if count}


def _breaks(df: DataFrame, keeps: Column) -> list[Column]:
    """Returns what Spark computes of rows for which `keeps` is not true: how many there are, and the lowest offset."""
    breaks = ~F.coalesce(keeps, F.lit(False))
    offset = F.col("offset") if "offset" in df.columns else F.lit(None).cast("long")
    return [F.count_if(breaks), F.min(F.when(breaks, offset))]


def refuse(name: str, rule: str, broken: Sequence[Broken]) -> NoReturn:
    """Raises InvalidOption for rows that break a rule of the table `name`. `broken`: one or more counts of them."""
    first = min((offset for _, offset in broken if offset is not None), default=None)
    where = "" if first is None else f", the first at offset {first}"
    way = f"rows that keep the rules of the table {name}: mend or drop the others in the function that the sink has, "
    way += "or send them to a topic of their own; or take the rule from the table"
    raise InvalidOption("rows", f"{sum(count for count, _ in broken)} of them break {rule}{where}", way)


def write_files(
    df: DataFrame, root: str, partition_by: Sequence[str], rules: Mapping[str, str] | None = None
) -> list[DataFile]:
    """Writes the rows into a new folder below `root`; returns the files that have rows. `rules`: SQL conditions by name
    that must hold."""
    name = f"marshal-{uuid.uuid4().hex}"
    folder = f"{root.rstrip('/')}/{name}"
    conf = df.sparkSession.conf
    before = conf.get(_TIMES)
    try:
        conf.set(_TIMES, "TIMESTAMP_MICROS")  # neither table format has Spark's default
        writer = df.write.options(**_UTC)
        (writer.partitionBy(*partition_by) if partition_by else writer).parquet(folder)
    finally:
        conf.set(_TIMES, before or _TIMES_DEFAULT)
    given, columns = dict(rules or {}), _indexed(df, partition_by)
    wanted = [F.count("*")]
    for rule in given.values():
        wanted += _breaks(df, F.expr(rule))
    for column, (shown, _) in columns.items():
        value = shown(F.col(f"`{column}`"))
        wanted += [F.count(value), F.min(value), F.max(value)]
    found = (
        df.sparkSession.read.options(**_UTC)
        .schema(df.schema)
        .parquet(folder)
        .groupBy("_metadata.file_path", "_metadata.file_size")
        .agg(*(one.alias(f"_{at}") for at, one in enumerate(wanted)))
        .collect()
    )
    files = []
    for path, size, rows, *rest in found:
        below = unquote(path[path.index(name) :])  # `path` is a URL; this is the file's name
        parts = [part.partition("=") for part in below.split("/")[1:-1]]
        values = {unquote(key): None if value == _NULL else unquote(value) for key, _, value in parts}
        counts = zip(given, rest[0::2], rest[1::2], strict=False)
        broken = {rule: (count, first) for rule, count, first in counts if count}
        stats = _stats(rows, columns, rest[2 * len(given) :])
        files.append(DataFile(below, size, rows, values, stats, broken))
    return files


Indexed = tuple[Callable[[Column], Column], Callable[[Any], Any]]


def _indexed(df: DataFrame, partition_by: Sequence[str]) -> dict[str, Indexed]:
    """Returns which columns get statistics, and how: what Spark computes of a value, and how JSON has the result."""

    def same(value: Any) -> Any:
        return value

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    kinds: list[tuple[tuple[type[types.DataType], ...], Indexed]] = [
        ((types.ByteType, types.ShortType, types.IntegerType, types.LongType), (same, same)),
        ((types.FloatType, types.DoubleType), (same, finite)),
        ((types.StringType,), (same, same)),
        # As a number: Python has no date after the year 9999.
        ((types.DateType,), (F.unix_date, lambda days: (_EPOCH + timedelta(days)).isoformat())),
        ((types.TimestampType,), (F.unix_micros, _time)),
    ]
    found: dict[str, Indexed] = {}
    for field in df.schema.fields:
        how = next((how for classes, how in kinds if type(field.dataType) in classes), None)
        if how is not None and field.name not in partition_by and len(found) < _INDEXED_MAX:
            found[field.name] = how
    return found


def _time(micros: int) -> str:
    return datetime.fromtimestamp(micros // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{micros % 1_000_000:06}Z"


def _stats(rows: int, columns: Mapping[str, Indexed], found: Sequence[Any]) -> dict[str, Any]:
    """Returns Delta's statistics of a file from the count, least and greatest of each column; none for what JSON cannot
    hold (NaN, infinity, far years)."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at, (name, (_, shown)) in enumerate(columns.items()):
        count, low, high = found[3 * at : 3 * at + 3]
        nulls[name] = rows - count
        if low is None:
            continue
        try:
            bounds = shown(low), shown(high)
        except (ValueError, OverflowError, OSError):
            continue
        if None in bounds:
            continue
        if isinstance(low, str):
            bounds = low[:_PREFIX], high if len(high) <= _PREFIX else high[:_PREFIX] + _HIGHEST
        least[name], greatest[name] = bounds
    return {"numRecords": rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}


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

    @abstractmethod
    def _commit_once(self) -> None:
        """Tries to commit once. Raises the error `CONFLICT` if another writer's commit came first."""

    @abstractmethod
    def _read_again(self) -> Mapping[Source, Kept]:
        """Reads the table and what it knows of the entry's sources. Raises TableChanged if checked rows may not fit any
        more."""


T = TypeVar("T")


class LakeOutput(ABC, Generic[T]):
    """Writes batches of Marshal streams to a table of a data lake. Other writers may write to it, too. A `T` is the
    table as its library has loaded it."""

    name: str  # the table's name, for errors and logs

    @abstractmethod
    def table(self) -> T:
        """Returns the table as it is now."""

    @abstractmethod
    def known(self, spans: Mapping[Source, Span]) -> Mapping[Source, Kept]:
        """Returns what the table knows of these sources, with the fencing tokens of the groups that `spans` names."""

    @abstractmethod
    def begin(self, spans: Mapping[Source, Span]) -> LakeEntry:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions. Raises OffsetsUnclear.
        """

    @abstractmethod
    def _sources_in(self, table: T, topic: str, partition: int) -> dict[Source, Kept]:
        """Returns what the table knows of this partition of all topics of the name; without tokens."""

    @abstractmethod
    def _columns(self, table: T) -> list[str]:
        """Returns the names of the table's columns. It has rows of Marshal streams."""

    @abstractmethod
    def _rewound(self, table: T, source: Source, kept: Kept, where: str) -> None:
        """Commits the change. Raises TableChanged if another writer has committed since `table` was loaded."""

    def finished(self, topic: str, partition: int) -> dict[Source, Ranges]:
        """Returns which offsets of the partition the table has: ascending ranges [start, to).

        A topic that was created again, or one of the same name on another cluster, is a source of its own (`topic_id`).
        """
        known = self._sources_in(self.table(), topic, partition)
        return {source: kept.finished.ranges for source, kept in known.items()}

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
        table = self.table()  # loaded once: what another writer commits from here on must fail the commit
        known = self._sources_in(table, topic, partition)
        source = named(known, topic, partition, topic_id, self.name)
        rows = self._rows_from(set(self._columns(table)), source, to, where, len(known) > 1)
        self._rewound(table, source, known[source].back_to(to), rows)
        return source

    def _rows_from(self, there: set[str], source: Source, to: int, where: str | None, several: bool) -> str:
        """Returns the SQL condition for a source's rows from offset `to` on, in a table with the columns `there`.
        `several` topics have the name. Raises InvalidOption."""
        wanted = {
            "topic": f"topic = '{source.topic}'",
            "partition": f"partition = {source.partition}",
            "offset": f"offset >= {to}",
            **({"topic_id": f"topic_id = '{source.topic_id}'"} if several else {}),
        }
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
