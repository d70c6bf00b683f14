"""Writes rows into a Delta Lake table, each message once, also on object stores. Through delta-rs, without a JVM.

    orders = DeltaOutput("s3://lake/orders", {"aws_region": "eu-central-1"})
    stream.writeStream.foreachBatch(orders.sink(clean)).option("checkpointLocation", ...).start()

Executors write Parquet files below the table; one commit adds them and their offsets (lakes.py has the loop). What the
table has is in its app transactions (delta_ranges.py). Spark's own option `txnVersion` does not help: it is one batch
number per query, which starts again with a fresh checkpoint, and blind appends of two queries never conflict.

A commit of files is believed by everybody who reads the table, so rows are checked first (delta_rules.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame

from marshal_py.client.values.finished import Kept, Source, Span
from marshal_py.errors import InvalidOption, TableChanged
from marshal_py.spark.sinks import delta_ranges, lakes
from marshal_py.spark.sinks.delta_rules import Rules, nullable
from marshal_py.spark.sinks.lakes import check_names
from marshal_py.spark.sinks.parquet_files import spark_uri_of, write_files


class DeltaEntry(lakes.LakeEntry):
    """Writes a batch into a Delta table. Nothing of it counts before `commit`."""

    CONFLICT: ClassVar[type[Exception]] = CommitFailedError

    def __init__(self, output: DeltaOutput, spans: Mapping[Source, Span]) -> None:
        self._output = output
        self._table = output.table()
        super().__init__(output.name, spans, {} if self._table is None else delta_ranges.known_in(self._table, spans))
        self._files: list[AddAction | RemoveAction] = []
        self._rules: Rules | None = None  # those that the rows were checked against

    def _append_files(self, rows: DataFrame) -> None:
        from pyspark.sql import functions as F

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
        table = self._ensure_table(lambda: given)
        rules = Rules(table, self.name)
        check_names(self.name, given.names, rules.names, self._output.merge_schema)
        new = rules.check_types(Schema.from_arrow(given))
        if new:
            try:
                table.alter.add_columns(new, commit_properties=CommitProperties(max_commit_retries=0))
            except CommitFailedError as error:
                raise TableChanged(self.name) from error
            self.recheck(self._read())
            rules = Rules(self._ensure_table(lambda: None), self.name)
        self._rules = rules
        return self._ensure_table(lambda: None)

    def _ensure_table(self, columns: Callable[[], pa.Schema | None]) -> DeltaTable:
        """Returns the table, created if there was none; then checks the entry again: another writer may have created it
        first."""
        if self._table is None:
            self._table = self._output.make(columns)
            self.recheck(delta_ranges.known_in(self._table, self.spans))
        return self._table

    def _prepare(self) -> None:
        self._ensure_table(lambda: None)

    def _commit_once(self) -> None:
        assert self._table is not None  # `_prepare` saw to that
        # Without retries by delta-rs: they would commit after another writer without the check that `commit` makes.
        transactions = delta_ranges.transactions(self._table, self.after())
        properties = CommitProperties(max_commit_retries=0, app_transactions=transactions)
        if self._rows is not None:
            write_deltalake(self._table, self._rows, mode="append", commit_properties=properties)
        else:
            schema = self._table.schema()
            self._table.create_write_transaction(self._files, "append", schema, commit_properties=properties)

    def _read(self) -> Mapping[Source, Kept]:
        self._table = self._output.table()
        return delta_ranges.known_in(self._ensure_table(lambda: None), self.spans)

    def _read_again(self) -> Mapping[Source, Kept]:
        found = self._read()
        if self._rules is not None and Rules(self._ensure_table(lambda: None), self.name) != self._rules:
            raise TableChanged(self.name)
        return found


class DeltaOutput(lakes.LakeOutput):
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

    def make(self, columns: Callable[[], pa.Schema | None]) -> DeltaTable:
        """Creates the table if it does not exist, with the schema of `columns`. Raises InvalidOption for None."""
        schema = columns()
        if schema is None:
            raise InvalidOption("uri", self.uri, "a table that exists, or an entry with rows to create it from")
        DeltaTable.create(
            self.uri,
            Schema.from_arrow(pa.schema([nullable(field) for field in schema])),  # no rule that only this batch keeps
            mode="ignore",
            partition_by=list(self.partition_by),
            storage_options=self._options,
        )
        return DeltaTable(self.uri, storage_options=self._options)

    def known(self, spans: Mapping[Source, Span]) -> Mapping[Source, Kept]:
        table = self.table()
        return {} if table is None else delta_ranges.known_in(table, spans)

    def sources(self, topic: str, partition: int) -> dict[Source, Kept]:
        table = self.table()
        return {} if table is None else delta_ranges.sources_in(table, topic, partition)

    def begin(self, spans: Mapping[Source, Span]) -> DeltaEntry:
        return DeltaEntry(self, spans)

    def _columns(self) -> list[str]:
        table = self.table()
        assert table is not None
        return [field.name for field in table.schema().fields]

    def _rewound(self, source: Source, kept: Kept, where: str) -> None:
        table = self.table()
        assert table is not None  # it has rows of the source
        transactions = delta_ranges.transactions(table, {source: kept})
        properties = CommitProperties(max_commit_retries=0, app_transactions=transactions)
        try:
            table.delete(where, commit_properties=properties)
            if table.version() == 0 or self.known({source: Span(())})[source].finished != kept.finished:
                # No row was deleted, so delta-rs has committed nothing.
                table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
        except CommitFailedError as error:
            raise TableChanged(self.name) from error
