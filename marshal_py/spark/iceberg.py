"""Writes rows into an Iceberg table, each message once, also on object stores. Through pyiceberg, without a JVM.

    orders = IcebergOutput(load_catalog("lake"), "sales.orders")
    stream.writeStream.foreachBatch(orders.sink(clean)).option("checkpointLocation", ...).start()

Executors write Parquet files below the table's location; one commit adds them and moves the positions (lakes.py has the
loop). Positions are table properties, one per partition, because snapshots expire and properties do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import TableProperties
from pyspark.sql import DataFrame

from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark import lakes
from marshal_py.spark.guards import Position, Span
from marshal_py.spark.parquet_files import spark_uri_of, write_files

PREFIX: Final = "marshal."  # the prefix of the table properties that hold positions


class IcebergEntry(lakes.LakeEntry):
    """Writes a batch into an Iceberg table. Nothing of it counts before `commit`."""

    CONFLICT: ClassVar[type[Exception]] = CommitFailedException

    def __init__(self, output: IcebergOutput, spans: Mapping[TopicPartition, Span]) -> None:
        self._output = output
        self._table = output.table()
        super().__init__(output.name, spans, _positions_in(self._table, spans))
        self._files: list[str] = []

    def _append_files(self, rows: DataFrame) -> None:
        root = f"{self._table.location().rstrip('/')}/data"
        expected = [field.name for field in self._table.schema().fields]
        written = write_files(rows.select(*expected), self._output.spark_uri(root), ())
        self._files = [f"{root}/{file.path}" for file in written]

    def _commit_once(self) -> None:
        moves = {f"{PREFIX}{tp}": f"{at.token} {at.to} {at.topic_id}" for tp, at in self.positions().items()}
        # Without retries by pyiceberg: they would commit after another writer without the check that `commit` makes.
        # This is pyiceberg's copy of the table's properties; the table keeps its own.
        self._table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        with self._table.transaction() as transaction:
            transaction.set_properties(moves)
            if self._rows is not None:
                transaction.append(self._rows)
            else:
                transaction.add_files(self._files, check_duplicate_files=False)

    def _read_again(self) -> Mapping[TopicPartition, Position]:
        self._table = self._output.table()
        return _positions_in(self._table, self.spans)


class IcebergOutput(lakes.LakeOutput):
    """Writes batches of Marshal streams to an Iceberg table. Other writers may write to it, too."""

    catalog: Catalog
    name: str
    spark_uri: Callable[[str], str]

    def __init__(self, catalog: Catalog, name: str, *, spark_uri: Callable[[str], str] = spark_uri_of) -> None:
        """Takes the `name` of a table that exists. `spark_uri` turns an address of the table into the one that Spark
        uses.
        """
        self.catalog, self.name, self.spark_uri = catalog, name, spark_uri

    def table(self) -> IcebergTable:
        """Returns the table as it is now."""
        return self.catalog.load_table(self.name)

    def known(self, spans: Mapping[TopicPartition, Span]) -> Mapping[TopicPartition, Position]:
        """Returns how far these partitions are written, and under which fencing tokens."""
        return _positions_in(self.table(), spans)

    def begin(self, spans: Mapping[TopicPartition, Span]) -> IcebergEntry:
        """Returns an entry for a batch that holds these spans.

        Raises WriteFenced if a later owner has written one of the partitions.
        """
        return IcebergEntry(self, spans)


def _positions_in(table: IcebergTable, spans: Mapping[TopicPartition, Any]) -> dict[TopicPartition, Position]:
    found = {}
    for tp in spans:
        text = table.properties.get(f"{PREFIX}{tp}")
        if text:
            token, to, topic_id = text.split(" ")
            found[tp] = Position(Token.parse(token), int(to), topic_id)
    return found
