"""Writes rows into a Delta Lake table, each message once, also on object stores. Through delta-rs, without a JVM.

    orders = DeltaOutput("s3://lake/orders", {"aws_region": "eu-central-1"})
    stream.writeStream.foreachBatch(orders.sink(clean)).option("checkpointLocation", ...).start()

Executors write Parquet files below the table; one commit adds them and their offsets (lakes.py has the loop). Spark's
own option `txnVersion` does not help: it is one batch number per query, which starts again with a fresh checkpoint, and
blind appends of two queries never conflict.

What the table has of each source is in its app transactions (`txn` actions). They are in every checkpoint of the
table's log, so they survive its clean-up. Each is a name and a whole number, and can be asked for by its name alone. So
a source has several, and all their names begin with marshal/TOPIC:PARTITION:

    /ids N, /id/I/0..4               the topic ids, as numbers of 7 bytes each
    /ID/ranges N, /ID/range/I/start and /to, /ID/unclear/start and /to   the finished offsets
    /ID/token/GROUP/0..3             the newest token of a group: its incarnation in three numbers, its epoch

A commit writes those that have changed. It is believed by everybody who reads the table, and delta-rs enforces nothing
for files that others wrote, so rows are checked first. What cannot be checked is refused: a table with a feature of
which this file does not know that plain Parquet files keep its rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.schema import Field
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from marshal_py.client.values.finished import Finished, Kept, Source, Span
from marshal_py.errors import InvalidOption, TableChanged
from marshal_py.protocol.wire.identity import Token
from marshal_py.spark.sinks import lakes
from marshal_py.spark.sinks.lakes import DataFile, check_names, refuse, spark_uri_of, write_files

_BYTES: Final = 7  # of a text or a token in one number, which has 63 bits
_ID_PARTS: Final = 5  # of the longest topic id: 32 characters
_INCARNATION: Final = ((0, 7), (7, 14), (14, 16))  # the bytes of an incarnation in each number


def known_in(table: DeltaTable | None, spans: Mapping[Source, Span]) -> dict[Source, Kept]:
    """Returns what the table knows of these sources, with the tokens of the spans' groups; nothing without a table.
    Raises InvalidOption for an older version's table."""
    found: dict[Source, Kept] = {}
    if table is None:
        return found
    for source, span in spans.items():
        if table.transaction_version(f"marshal/{source.tp}/log") is not None:
            rule = "a table written by this version: its positions are an older one's; use a new table"
            raise InvalidOption("uri", table.table_uri, rule)
        ranges = _finished(table, source)
        if ranges is not None:
            token = _token(table, source, span.group) if span.group else ""
            found[source] = Kept(ranges, token, span.group if token else "")
    return found


def transactions_of(table: DeltaTable, after: Mapping[Source, Kept]) -> list[Transaction]:
    """Returns what a commit must write so that the table knows `after`."""
    wanted: dict[str, int] = {}
    added: dict[str, list[str]] = {}
    for source, kept in sorted(after.items()):
        known, prefix = f"marshal/{source.tp}", f"marshal/{source.tp}/{source.topic_id}"
        ids = added.setdefault(known, _ids(table, known))
        if source.topic_id not in ids:
            ids.append(source.topic_id)
            text = source.topic_id.encode()
            parts = [text[at : at + _BYTES] for at in range(0, _ID_PARTS * _BYTES, _BYTES)]
            wanted |= {f"{known}/id/{len(ids) - 1}/{n}": int.from_bytes(part, "big") for n, part in enumerate(parts)}
            wanted[f"{known}/ids"] = len(ids)
        ranges, unclear = kept.finished
        wanted[f"{prefix}/ranges"] = len(ranges)
        for at, one in enumerate(ranges):
            wanted |= _pair(f"{prefix}/range/{at}", one)
        wanted |= _pair(f"{prefix}/unclear", unclear)
        if kept.token:
            token = Token.parse(kept.token)
            parts = [token.incarnation[start:to] for start, to in _INCARNATION]
            numbers = [*(int.from_bytes(part, "big") for part in parts), token.epoch]
            wanted |= {f"{prefix}/token/{kept.group}/{at}": number for at, number in enumerate(numbers)}
    return [Transaction(name, number) for name, number in wanted.items() if table.transaction_version(name) != number]


def _pair(name: str, one: tuple[int, int]) -> dict[str, int]:
    return {f"{name}/start": one[0], f"{name}/to": one[1]}


def _numbers(table: DeltaTable, names: Iterable[str]) -> list[int]:
    return [table.transaction_version(name) or 0 for name in names]


def _finished(table: DeltaTable, source: Source) -> Finished | None:
    prefix = f"marshal/{source.tp}/{source.topic_id}"
    count = table.transaction_version(f"{prefix}/ranges")
    if count is None:
        return None
    pairs = [
        tuple(_numbers(table, _pair(name, (0, 0))))
        for name in (*(f"{prefix}/range/{at}" for at in range(count)), f"{prefix}/unclear")
    ]
    ranges = [(start, to) for start, to in pairs]
    return Finished(tuple(ranges[:-1]), ranges[-1])


def _token(table: DeltaTable, source: Source, group: str) -> str:
    prefix = f"marshal/{source.tp}/{source.topic_id}/token/{group}"
    if table.transaction_version(f"{prefix}/3") is None:
        return ""
    *parts, epoch = _numbers(table, (f"{prefix}/{at}" for at in range(4)))
    sizes = (to - start for start, to in _INCARNATION)
    return str(Token(b"".join(part.to_bytes(size, "big") for part, size in zip(parts, sizes, strict=True)), epoch))


def _ids(table: DeltaTable, known: str) -> list[str]:
    found = []
    for at in range(table.transaction_version(f"{known}/ids") or 0):
        parts = _numbers(table, (f"{known}/id/{at}/{part}" for part in range(_ID_PARTS)))
        found.append(b"".join(part.to_bytes(_BYTES, "big").lstrip(b"\0") for part in parts).decode())
    return found


_CHECK: Final = "delta.constraints."
# Features of writers that ask nothing of files with new rows, or what is checked here.
_KNOWN: Final = frozenset({
    "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors", "domainMetadata",
    "generatedColumns", "identityColumns", "inCommitTimestamp", "invariants", "timestampNtz", "v2Checkpoint",
    "vacuumProtocolCheck",
})  # fmt: skip
_WRITER_MAX: Final = 7  # the version from which a table names its features


class Rules:
    """The rules of a table as it is now. Two of them are equal if the rules are."""

    names: list[str]

    def __init__(self, table: DeltaTable, name: str) -> None:
        """Reads the rules of the table `name`. Raises InvalidOption if this writer cannot keep them."""
        self._name, self._schema = name, json.loads(table.schema().to_json())
        self._fields: dict[str, dict[str, Any]] = {field["name"]: field for field in self._schema["fields"]}
        self.names = list(self._fields)
        configuration, protocol = table.metadata().configuration, table.protocol()
        self._checks: dict[str, str] = {
            key.removeprefix(_CHECK): text for key, text in configuration.items() if key.startswith(_CHECK) and text
        }
        unknown = set(protocol.writer_features or ()) - _KNOWN
        mapping = configuration.get("delta.columnMapping.mode") or "none"
        if unknown or protocol.min_writer_version > _WRITER_MAX or mapping != "none":
            found = ", ".join(sorted(unknown)) or f"column mapping {mapping}, version {protocol.min_writer_version}"
            raise InvalidOption("table", name, f"one without {found}: this writer cannot keep its rules")
        for column, field in self._fields.items():
            made = sorted(
                key
                for key in field.get("metadata") or {}
                if key in ("delta.generationExpression", "delta.invariants") or key.startswith("delta.identity.")
            )
            if made:
                rule = f"a column without {', '.join(made)}: this writer cannot keep that (a CHECK constraint it can)"
                raise InvalidOption("table", f"{name}, column {column}", rule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and (self._fields, self._checks) == (other._fields, other._checks)

    __hash__ = None  # type: ignore[assignment]  # nobody needs it

    def check_types(self, given: Schema) -> list[Field]:
        """Returns the columns that the table lacks. Raises InvalidOption for another type."""
        new = []
        for field in given.fields:
            found, known = json.loads(field.to_json()), self._fields.get(field.name)
            if known is None:
                new.append(Field(field.name, field.type, nullable=True))
            elif not _fits(known["type"], found["type"]):
                rule = f"the type that the table {self._name} has: {_shown(known['type'])} (cast the column)"
                raise InvalidOption(f"column {field.name}", _shown(found["type"]), rule)
        return new

    def lacking(self, columns: Sequence[str]) -> dict[str, DataType]:
        """Returns the table's columns that are not in `columns`, with their types: Delta's JSON of them is Spark's."""
        fields = StructType.fromJson(self._schema).fields
        return {field.name: field.dataType for field in fields if field.name not in columns}

    def conditions(self) -> dict[str, str]:
        """Returns, by their names, conditions in Spark's SQL that are true for every row that the table takes."""
        not_null = [name for name, field in self._fields.items() if not field["nullable"]]
        return {
            **{f"NOT NULL of {name}": f"`{name}` IS NOT NULL" for name in not_null},
            **{f"CHECK {name} ({text})": text for name, text in self._checks.items()},
        }

    def check_files(self, files: Sequence[DataFile]) -> None:
        """Checks that no row breaks a condition. Raises InvalidOption."""
        for name in self.conditions():
            found = [file.broken[name] for file in files if name in file.broken]
            if found:
                refuse(self._name, name, found)


def _fits(known: Any, found: Any) -> bool:
    """Returns whether type `found` may be in a column of type `known`, in Delta's JSON. NULLs are looked for at the top
    alone; deeper, a type that may hold them does not fit one that may not."""
    if not isinstance(known, dict) or not isinstance(found, dict):
        return bool(known == found)
    if known["type"] != found["type"]:
        return False
    match known["type"]:
        case "struct":
            theirs = {field["name"]: field for field in found["fields"]}
            return [field["name"] for field in known["fields"]] == list(theirs) and all(
                _fits(field["type"], theirs[field["name"]]["type"])
                and (field["nullable"] or not theirs[field["name"]]["nullable"])
                for field in known["fields"]
            )
        case "array":
            nulls = known["containsNull"] or not found["containsNull"]
            return nulls and _fits(known["elementType"], found["elementType"])
        case "map":
            nulls = known["valueContainsNull"] or not found["valueContainsNull"]
            keys = _fits(known["keyType"], found["keyType"])
            return nulls and keys and _fits(known["valueType"], found["valueType"])
    return bool(known == found)


def nullable(field: pa.Field) -> pa.Field:
    """Returns the column as one that may hold NULL, at every depth."""
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([nullable(one) for one in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(nullable(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(kind.key_field, nullable(kind.item_field))
    return pa.field(field.name, kind)


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(kind)


class DeltaEntry(lakes.LakeEntry):
    """Writes a batch into a Delta table. Nothing of it counts before `commit`."""

    CONFLICT: ClassVar[type[Exception]] = CommitFailedError

    def __init__(self, output: DeltaOutput, spans: Mapping[Source, Span]) -> None:
        self._output = output
        self._table = output.table()
        super().__init__(output.name, spans, known_in(self._table, spans))
        self._files: list[AddAction | RemoveAction] = []
        self._rules: Rules | None = None  # those that the rows were checked against

    def _append_files(self, rows: DataFrame) -> None:
        table = self._fit(rows.limit(0).toArrow().schema)
        assert self._rules is not None
        lacking = {name: F.lit(None).cast(kind) for name, kind in self._rules.lacking(rows.columns).items()}
        if lacking:  # a client of Spark Connect refuses none
            rows = rows.withColumns(lacking)
        rows = rows.select(*self._rules.names)
        partition_by = table.metadata().partition_columns
        written = write_files(rows, self._output.spark_uri, partition_by, self._rules.conditions())
        self._rules.check_files(written)
        now_ms = int(time.time() * 1000)
        self._files = [
            AddAction(file.path, file.size, file.values, now_ms, True, json.dumps(file.stats)) for file in written
        ]

    def _fitted(self, rows: pa.Table) -> pa.Table:
        types = pa.schema(self._fit(rows.schema).schema().to_arrow())
        for field in types:
            if field.name not in rows.schema.names:
                rows = rows.append_column(field, pa.nulls(len(rows), field.type))
        return rows.select(types.names)  # delta-rs itself checks the rows against NOT NULL and CHECK

    def _fit(self, given: pa.Schema) -> DeltaTable:
        """Returns the table if rows of this schema fit it, with their new columns by `merge_schema`. Raises
        InvalidOption."""
        table = self._ensure_table(given)
        rules = Rules(table, self.name)
        check_names(self.name, given.names, rules.names, self._output.merge_schema)
        new = rules.check_types(Schema.from_arrow(given))
        if new:
            try:
                table.alter.add_columns(new, commit_properties=CommitProperties(max_commit_retries=0))
            except CommitFailedError as error:
                raise TableChanged(self.name) from error
            self.recheck(self._read())
            rules = Rules(self._ensure_table(), self.name)
        self._rules = rules
        return self._ensure_table()

    def _ensure_table(self, columns: pa.Schema | None = None) -> DeltaTable:
        """Returns the table, created if there was none; then checks the entry again: another writer may have created it
        first."""
        if self._table is None:
            self._table = self._output.make(columns)
            self.recheck(known_in(self._table, self.spans))
        return self._table

    def _commit_once(self) -> None:
        table = self._ensure_table()
        # Without retries by delta-rs: they would commit after another writer without the check that `commit` makes.
        transactions = transactions_of(table, self.after())
        properties = CommitProperties(max_commit_retries=0, app_transactions=transactions)
        if self._rows is not None:
            write_deltalake(table, self._rows, mode="append", commit_properties=properties)
        else:
            table.create_write_transaction(self._files, "append", table.schema(), commit_properties=properties)

    def _read(self) -> Mapping[Source, Kept]:
        self._table = self._output.table()
        return known_in(self._ensure_table(), self.spans)

    def _read_again(self) -> Mapping[Source, Kept]:
        found = self._read()
        if self._rules is not None and Rules(self._ensure_table(), self.name) != self._rules:
            raise TableChanged(self.name)
        return found


class DeltaOutput(lakes.LakeOutput[DeltaTable | None]):
    """Writes batches of Marshal streams to a Delta table. Other writers may write to it, too."""

    uri: str
    merge_schema: bool

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        spark_uri: str | None = None,
        partition_by: tuple[str, ...] = (),
        merge_schema: bool = False,
    ) -> None:
        """Takes `uri` and `storage_options` for delta-rs, which writes the table's log. A local `uri` is a path.

        `spark_uri` is the same folder for Spark, which writes the files; by default `uri` with s3a:// for s3://.
        `partition_by` names columns, and is used only if the table is created. With `merge_schema` new columns of the
        rows are added to the table.
        """
        self.name = self.uri = uri
        self.partition_by = partition_by
        self.spark_uri: str = spark_uri or spark_uri_of(uri)
        self.merge_schema = merge_schema
        self._options = dict(storage_options or {})

    def table(self) -> DeltaTable | None:
        """Returns the table as it is now, or None if it does not exist."""
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            return None

    def make(self, schema: pa.Schema | None) -> DeltaTable:
        """Creates the table if it does not exist, with these columns. Raises InvalidOption for None."""
        if schema is None:
            raise InvalidOption("uri", self.uri, "a table that exists, or an entry with rows to create it from")
        try:
            DeltaTable.create(
                self.uri,
                Schema.from_arrow(pa.schema([nullable(field) for field in schema])),  # no rule of this batch alone
                mode="ignore",
                partition_by=list(self.partition_by),
                storage_options=self._options,
                commit_properties=CommitProperties(max_commit_retries=0),  # which would replace another's columns
            )
        except CommitFailedError:
            if self.table() is None:
                raise  # no other writer was first
        return DeltaTable(self.uri, storage_options=self._options)

    def known(self, spans: Mapping[Source, Span]) -> Mapping[Source, Kept]:
        return known_in(self.table(), spans)

    def _sources_in(self, table: DeltaTable | None, topic: str, partition: int) -> dict[Source, Kept]:
        if table is None:
            return {}
        sources = [Source(topic, partition, one) for one in _ids(table, f"marshal/{topic}:{partition}")]
        return {source: Kept(_finished(table, source) or Finished()) for source in sources}

    def begin(self, spans: Mapping[Source, Span]) -> DeltaEntry:
        return DeltaEntry(self, spans)

    def _columns(self, table: DeltaTable | None) -> list[str]:
        assert table is not None
        return [field.name for field in table.schema().fields]

    def _rewound(self, table: DeltaTable | None, source: Source, kept: Kept, where: str) -> None:
        assert table is not None  # it has rows of the source
        transactions = transactions_of(table, {source: kept})
        properties = CommitProperties(max_commit_retries=0, app_transactions=transactions)
        before = table.version()
        try:
            table.delete(where, commit_properties=properties)
            if table.version() == before:  # no row was deleted, so delta-rs has committed nothing
                table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
        except CommitFailedError as error:
            raise TableChanged(self.name) from error
