"""Lets Spark find `format("marshal-ranges")`: it searches packages called pyspark_* for a class DefaultSource.

Must import nothing but Spark's base class before it is used: every process that looks for a format imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from marshal_py.spark.stream.ranges import RangesReader


class DefaultSource(DataSource):
    """Explicit offset ranges of Kafka partitions, without claims; marshal_py/spark/stream/ranges.py has the options."""

    @classmethod
    def name(cls) -> str:
        return "marshal-ranges"

    def schema(self) -> str:
        from marshal_py.spark.stream.messages import columns_of, spark_schema

        return spark_schema(columns_of(self.options.get("columns")))

    def reader(self, schema: StructType) -> RangesReader:
        from marshal_py.spark.stream.messages import check_schema, columns_of
        from marshal_py.spark.stream.ranges import RangesReader

        check_schema(schema.simpleString(), columns_of(self.options.get("columns")))
        return RangesReader(self.options)
