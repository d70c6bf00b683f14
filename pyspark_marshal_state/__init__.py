"""Where Spark finds format("marshal-state"): it looks for the class DefaultSource in packages called pyspark_*.

Imported in every look-up process of every job, so the rest is imported when it is used.
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
