"""Lets Spark find `format("marshal-state")`: it searches packages called pyspark_* for a class DefaultSource.

Must import nothing but Spark's base class before it is used: every process that looks for a format imports it.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "marshal-state"

    def schema(self) -> StructType:
        from marshal_py.spark import log_tables

        return log_tables.state_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from marshal_py.spark import log_tables

        return log_tables.state_reader(self.options)
