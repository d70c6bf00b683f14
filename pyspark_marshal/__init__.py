"""Spark finds `format("marshal")` here, by the name of this package. Light: every look-up process imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

    from marshal_py.spark.stream_source import StreamReader


class DefaultSource(DataSource):
    """A structured stream that is a member of a group (marshal_py/spark/options.py), or a batch read without group and
    claims (backfills.py). The option `group` tells which, for Spark does not.
    """

    @classmethod
    def name(cls) -> str:
        return "marshal"

    def schema(self) -> str:
        from marshal_py.spark.backfills import BackfillOptions
        from marshal_py.spark.messages import spark_schema
        from marshal_py.spark.options import StreamOptions

        kind = StreamOptions if self.options.get("group") else BackfillOptions
        return spark_schema(kind.of(self.options).columns)  # a wrong option is named here, at load()

    def streamReader(self, schema: StructType | None) -> StreamReader:
        """`schema`: also one that the user has set, of which Spark tells nobody before. Raises InvalidOption."""
        from marshal_py.spark.messages import check_schema
        from marshal_py.spark.options import StreamOptions
        from marshal_py.spark.stream_source import StreamReader

        options = StreamOptions.of(self.options)
        if schema is not None:
            check_schema(schema.simpleString(), options.columns)
        return StreamReader(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises InvalidOption."""
        from marshal_py.spark.backfills import BackfillOptions, BackfillReader
        from marshal_py.spark.messages import check_schema

        options = BackfillOptions.of(self.options)
        check_schema(schema.simpleString(), options.columns)
        return BackfillReader(options)
