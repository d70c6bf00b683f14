"""Writes rows into an Iceberg table, each message once, also on object stores. Through pyiceberg, without a JVM.

    orders = IcebergOutput(load_catalog("lake"), "sales.orders")
    stream.writeStream.foreachBatch(orders.sink(clean)).option("checkpointLocation", ...).start()

Executors write Parquet files below the table's location; one commit adds them and their offsets (lakes.py has the
loop). What the table has is in table properties, one per source, because snapshots expire and properties do not.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import TableProperties
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from marshal_py.client.values.finished import Finished, Kept, Source, Span
from marshal_py.errors import InvalidOption, TableChanged
from marshal_py.spark.sinks import lakes
from marshal_py.spark.sinks.lakes import Broken, check_names, not_null, nulls_in, refuse, spark_uri_of, write_files

PREFIX: Final = "marshal."  # of the table properties that say what the table has: marshal.TOPIC:PARTITION:TOPIC_ID


class IcebergEntry(lakes.LakeEntry):
    """Writes a batch into an Iceberg table. Nothing of it counts before `commit`."""

    CONFLICT: ClassVar[type[Exception]] = CommitFailedException

    def __init__(self, output: IcebergOutput, spans: Mapping[Source, Span]) -> None:
        self._output = output
        self._table = output.table()
        super().__init__(output.name, spans, _known_in(self._table, spans))
        self._files: list[str] = []

    def _append_files(self, rows: DataFrame) -> None:
        if not self._table.spec().is_unpartitioned():
            rule = "one without partitions, as Spark's files hold rows of several (a pyarrow table can be appended)"
            raise InvalidOption("table", self.name, rule)
        schema = rows.limit(0).toArrow().schema
        self._fit(schema)
        root = f"{self._table.location().rstrip('/')}/data"
        names, types = schema.names, self._table.schema().as_arrow()
        lacking = {name: F.lit(None) for name in types.names if name not in names}
        if lacking:
            empty = rows.sparkSession.createDataFrame(
                pa.table({name: [] for name in lacking}, schema=pa.schema([types.field(name) for name in lacking]))
            ).schema
            lacking = {name: F.lit(None).cast(empty[name].dataType) for name in lacking}
        if lacking:  # a client of Spark Connect refuses none
            rows = rows.withColumns(lacking)
        rows = rows.select(*types.names)
        open_ones = [one.name for one in rows.schema.fields if one.nullable and not types.field(one.name).nullable]
        try:
            checked = not_null(rows, open_ones) if open_ones else rows
            written = write_files(checked, self._output.spark_uri(root), ())
        except PySparkException:
            self._refuse_nulls(nulls_in(rows, open_ones) if open_ones else {})
            raise
        self._files = [f"{root}/{file.path}" for file in written]

    def _fitted(self, rows: pa.Table) -> pa.Table:
        self._fit(rows.schema)
        types = self._table.schema().as_arrow()
        nulls = {
            name: pa.nulls(len(rows), types.field(name).type) for name in types.names if name not in rows.schema.names
        }
        for name, column in nulls.items():
            rows = rows.append_column(name, column)
        rows = rows.select(types.names)
        fields = [rows.schema.field(one.name).with_nullable(one.nullable) for one in types]
        for field in fields:
            count = 0 if field.nullable else rows.column(field.name).null_count
            if count:
                self._refuse_nulls({field.name: (count, None)})
        return pa.Table.from_arrays(rows.columns, schema=pa.schema(fields))

    def _refuse_nulls(self, found: Mapping[str, Broken]) -> None:
        """Raises InvalidOption if rows have NULL in a column that requires a value."""
        for name, broken in found.items():
            refuse(self.name, f"NOT NULL of {name}", [broken])

    def _fit(self, given: pa.Schema) -> None:
        """Raises InvalidOption unless rows of this schema fit the table, whose new columns `merge_schema` adds."""
        expected = self._table.schema().as_arrow()
        check_names(self.name, given.names, expected.names, self._output.merge_schema)
        for name in expected.names:
            field, kind = expected.field(name), given.field(name).type if name in given.names else None
            if kind is not None and _plain(kind) != _plain(field.type):
                raise InvalidOption(f"column {name}", kind, f"the type of the table {self.name}: {field.type}")
            if not field.nullable and kind is None:
                rule = f"a column of the rows, because the table {self.name} requires a value (or drop the rule)"
                raise InvalidOption(f"column {name}", kind, rule, given=False)
        new = [given.field(name).with_nullable(True) for name in given.names if name not in expected.names]
        if new:
            try:
                with self._table.update_schema() as update:
                    update.union_by_name(pa.schema(new))
            except CommitFailedException as error:
                raise TableChanged(self.name) from error
            self.recheck(self._read())

    def _commit_once(self) -> None:
        moves = {f"{PREFIX}{source}": _text(kept) for source, kept in self.after().items()}
        # Without retries by pyiceberg: they would commit after another writer without the check that `commit` makes.
        # This is pyiceberg's copy of the table's properties; the table keeps its own.
        self._table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        with self._table.transaction() as transaction:
            transaction.set_properties(moves)
            if self._rows is not None:
                transaction.append(self._rows)
            else:
                transaction.add_files(self._files, check_duplicate_files=False)

    def _read(self) -> Mapping[Source, Kept]:
        self._table = self._output.table()
        return _known_in(self._table, self.spans)

    def _read_again(self) -> Mapping[Source, Kept]:
        before = self._table.schema()
        found = self._read()
        if self._table.schema() != before:
            raise TableChanged(self.name)
        return found


class IcebergOutput(lakes.LakeOutput[IcebergTable]):
    """Writes batches of Marshal streams to an Iceberg table. Other writers may write to it, too."""

    catalog: Catalog
    merge_schema: bool
    name: str
    spark_uri: Callable[[str], str]

    def __init__(
        self, catalog: Catalog, name: str, *, spark_uri: Callable[[str], str] = spark_uri_of, merge_schema: bool = False
    ) -> None:
        """Takes the `name` of a table that exists. `spark_uri` turns an address of the table into the one that Spark
        uses. With `merge_schema` new columns of the rows are added to the table.
        """
        self.catalog, self.name, self.spark_uri, self.merge_schema = catalog, name, spark_uri, merge_schema

    def table(self) -> IcebergTable:
        return self.catalog.load_table(self.name)

    def known(self, spans: Mapping[Source, Span]) -> Mapping[Source, Kept]:
        return _known_in(self.table(), spans)

    def _sources_in(self, table: IcebergTable, topic: str, partition: int) -> dict[Source, Kept]:
        found = {}
        start = f"{PREFIX}{topic}:{partition}:"
        for name, text in table.properties.items():
            if name.startswith(start):
                found[Source(topic, partition, name.removeprefix(start))] = _parse(name, text)
        return found

    def begin(self, spans: Mapping[Source, Span]) -> IcebergEntry:
        return IcebergEntry(self, spans)

    def _columns(self, table: IcebergTable) -> list[str]:
        return [field.name for field in table.schema().fields]

    def _rewound(self, table: IcebergTable, source: Source, kept: Kept, where: str) -> None:
        table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        try:
            with table.transaction() as transaction:
                transaction.set_properties({f"{PREFIX}{source}": _text(kept)})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # that no row matches, which is no mistake here
                    transaction.delete(where)
                if transaction.table_metadata.current_snapshot_id == table.metadata.current_snapshot_id:
                    # No row was deleted, and properties alone conflict with no other commit. A snapshot does.
                    transaction.append(table.schema().as_arrow().empty_table())
        except CommitFailedException as error:
            raise TableChanged(self.name) from error


def _known_in(table: IcebergTable, spans: Mapping[Source, Span]) -> dict[Source, Kept]:
    found = {}
    for source in spans:
        if f"{PREFIX}{source.tp}" in table.properties:
            rule = "a table written by this version; that property is an older one's: remove it, or use a new table"
            raise InvalidOption("table", f"property {PREFIX}{source.tp}", rule)
        name = f"{PREFIX}{source}"
        if name in table.properties:
            found[source] = _parse(name, table.properties[name])
    return found


def _text(kept: Kept) -> str:
    return json.dumps([str(kept.finished), kept.token, kept.group])


def _parse(name: str, text: str) -> Kept:
    try:
        finished, token, group = json.loads(text)
        return Kept(Finished.parse(finished), token, group)
    except ValueError as error:
        raise InvalidOption("table", f"property {name}={text}", "as this version writes it") from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """Returns the type without what makes no difference here: sizes of offsets, names of elements, the time zone."""
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _plain(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), pa.field("value", _plain(kind.item_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, _plain(part.type)) for part in kind])
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    return kind
