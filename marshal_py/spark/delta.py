"""Writes rows into a Delta Lake table, each message once, also on object stores. Through delta-rs, without a JVM.

    orders = DeltaOutput("s3://lake/orders", {"aws_region": "eu-central-1"})
    stream.writeStream.foreachBatch(orders.sink(clean)).option("checkpointLocation", ...).start()

Executors write Parquet files below the table; one commit adds them and moves the positions (lakes.py has the loop).
Positions are app transactions (`txn` actions) of the table, three per partition: they are in every checkpoint of the
table's log, so they survive its clean-up. Spark's own option `txnVersion` does not help: it is one batch number per
query, which starts again with a fresh checkpoint, and blind appends of two queries never conflict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame

from marshal_py.errors import InvalidOption
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark import lakes
from marshal_py.spark.guards import Position, Span
from marshal_py.spark.parquet_files import spark_uri_of, write_files

_INCARNATION_BYTES: Final = 16
_TIME_BYTES: Final = 7  # of an incarnation (time, a random byte): all that fits into a version


class DeltaEntry(lakes.LakeEntry):
    """Writes a batch into a Delta table. Nothing of it counts before `commit`."""

    CONFLICT: ClassVar[type[Exception]] = CommitFailedError

    def __init__(self, output: DeltaOutput, spans: Mapping[TopicPartition, Span]) -> None:
        self._output = output
        self._table = output.table()
        super().__init__(output.name, spans, {} if self._table is None else _positions_in(self._table, spans))
        self._files: list[AddAction | RemoveAction] = []
        self._schema: Schema | None = None

    def _append_files(self, rows: DataFrame) -> None:
        table = self._ensure_table(lambda: rows.limit(0).toArrow().schema)
        self._schema = table.schema()
        expected = [field.name for field in self._schema.fields]
        if set(rows.columns) != set(expected):
            raise InvalidOption("rows", rows.columns, f"the columns of {self._output.uri}: {', '.join(expected)}")
        now_ms = int(time.time() * 1000)
        self._files = [
            AddAction(file.path, file.size, file.values, now_ms, True, json.dumps({"numRecords": file.rows}))
            for file in write_files(rows.select(*expected), self._output.spark_uri, table.metadata().partition_columns)
        ]

    def _ensure_table(self, columns: Callable[[], pa.Schema | None]) -> DeltaTable:
        """Returns the table that this entry was checked against, and creates it if there was none.

        After that the entry is checked again, because another writer may have created the table first.
        """
        if self._table is None:
            self._table = self._output.make(columns)
            self.recheck(_positions_in(self._table, self.spans))
        return self._table

    def _prepare(self) -> None:
        self._ensure_table(lambda: None if self._rows is None else self._rows.schema)

    def _commit_once(self) -> None:
        assert self._table is not None  # `_prepare` saw to that
        # Without retries by delta-rs: they would commit after another writer without the check that `commit` makes.
        properties = CommitProperties(max_commit_retries=0, app_transactions=_transactions(self.positions()))
        if self._rows is not None:
            write_deltalake(self._table, self._rows, mode="append", commit_properties=properties)
        else:
            schema = self._schema or self._table.schema()
            self._table.create_write_transaction(self._files, "append", schema, commit_properties=properties)

    def _read_again(self) -> Mapping[TopicPartition, Position]:
        self._table = self._output.table()
        return _positions_in(self._ensure_table(lambda: None), self.spans)


class DeltaOutput(lakes.LakeOutput):
    """Writes batches of Marshal streams to a Delta table. Other writers may write to it, too."""

    uri: str

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        spark_uri: str | None = None,
        partition_by: tuple[str, ...] = (),
    ) -> None:
        """Takes `uri` and `storage_options` for delta-rs, which writes the table's log. A local `uri` is a path.

        `spark_uri` is the same folder for Spark, which writes the files; by default `uri` with s3a:// for s3://.
        `partition_by` names columns, and is used only if the table is created.
        """
        self.name = self.uri = uri
        self.partition_by = partition_by
        self.spark_uri: str = spark_uri or spark_uri_of(uri)
        self._options = dict(storage_options or {})

    def table(self) -> DeltaTable | None:
        """Returns the table as it is now, or None if it does not exist."""
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            return None

    def make(self, columns: Callable[[], pa.Schema | None]) -> DeltaTable:
        """Creates the table if it does not exist, with the schema that `columns` returns.

        Raises InvalidOption if the schema is None.
        """
        schema = columns()
        if schema is None:
            raise InvalidOption("uri", self.uri, "a table that exists, or an entry with rows to create it from")
        DeltaTable.create(
            self.uri,
            Schema.from_arrow(schema),
            mode="ignore",
            partition_by=list(self.partition_by),
            storage_options=self._options,
        )
        return DeltaTable(self.uri, storage_options=self._options)

    def known(self, spans: Mapping[TopicPartition, Span]) -> Mapping[TopicPartition, Position]:
        """Returns how far these partitions are written, and under which fencing tokens."""
        table = self.table()
        return {} if table is None else _positions_in(table, spans)

    def begin(self, spans: Mapping[TopicPartition, Span]) -> DeltaEntry:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions.
        """
        return DeltaEntry(self, spans)


def _positions_in(table: DeltaTable, spans: Mapping[TopicPartition, Span]) -> dict[TopicPartition, Position]:
    """Returns the positions that the table's app transactions hold for these partitions.

    Tokens are kept per partition, but offsets per topic id. So a topic that was created again has a token and no
    offset.
    """
    found = {}
    for tp, span in spans.items():
        since, epoch = (table.transaction_version(f"marshal/{tp}/{what}") for what in ("log", "epoch"))
        if since is None or epoch is None:
            continue
        token = Token(since.to_bytes(_TIME_BYTES, "big").ljust(_INCARNATION_BYTES, b"\0"), epoch)
        if span.token.incarnation[:_TIME_BYTES] == token.incarnation[:_TIME_BYTES]:
            token = Token(span.token.incarnation, epoch)
        to = table.transaction_version(f"marshal/{tp}/next/{span.topic_id}")
        if to is None and span.topic_id:  # written without ids, by a sink without `topics`
            to = table.transaction_version(f"marshal/{tp}/next/")
        found[tp] = Position(token, to or 0, span.topic_id)
    return found


def _transactions(positions: Mapping[TopicPartition, Position]) -> list[Transaction]:
    return [
        Transaction(f"marshal/{tp}/{what}", version)
        for tp, at in positions.items()
        for what, version in (
            ("log", int.from_bytes(at.token.incarnation[:_TIME_BYTES], "big")),
            ("epoch", at.token.epoch),
            (f"next/{at.topic_id}", at.to),
        )
    ]
