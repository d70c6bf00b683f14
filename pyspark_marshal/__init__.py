"""Lets Spark find `format("marshal")`: it searches packages called pyspark_* for a class DefaultSource.

Must import nothing but Spark's base class before it is used: every process that looks for a format imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

    from marshal_py.spark.stream.backfills import BackfillOptions, RangeOptions
    from marshal_py.spark.stream.stream_source import StreamReader


class DefaultSource(DataSource):
    """A structured stream that is a member of a group (spark/stream/stream_source.py), or a batch read without group
    and claims: between two points (spark/stream/backfills.py), or of the option `ranges`, which claimed batches give
    (spark/stream/backfills.py). Spark does not say which one it wants the schema of; the options do.
    """

    @classmethod
    def name(cls) -> str:
        return "marshal"

    def schema(self) -> str:
        from marshal_py.spark.stream.messages import spark_schema
        from marshal_py.spark.stream.options import StreamOptions

        options: Any = StreamOptions.of(self.options) if self.options.get("group") else self._batch_options()
        return spark_schema(options.columns)  # raises InvalidOption at load()

    def _batch_options(self) -> BackfillOptions | RangeOptions:
        from marshal_py.spark.stream.backfills import BackfillOptions, RangeOptions

        return (RangeOptions if "ranges" in self.options else BackfillOptions).of(self.options)

    def streamReader(self, schema: StructType | None) -> StreamReader:
        """`schema` may be the user's, which Spark passes here first. Raises InvalidOption."""
        from marshal_py.spark.stream.messages import check_schema
        from marshal_py.spark.stream.options import StreamOptions
        from marshal_py.spark.stream.stream_source import StreamReader

        options = StreamOptions.of(self.options)
        if schema is not None:
            check_schema(schema.simpleString(), options.columns)
        return StreamReader(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises InvalidOption."""
        from marshal_py.spark.stream.backfills import BackfillOptions, BackfillReader, RangesReader
        from marshal_py.spark.stream.messages import check_schema

        options = self._batch_options()
        check_schema(schema.simpleString(), options.columns)
        return BackfillReader(options) if isinstance(options, BackfillOptions) else RangesReader(options)
