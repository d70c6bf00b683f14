"""A stream in Python that costs as little as one can: what no source in Python can be cheaper than.

Its rows have the columns and sizes of those that bench/spark.py reads, but come from no Kafka: each task makes one
Arrow batch and yields it again and again. There is no group, no claim and no position. It must import nothing heavy
before a task reads, because Spark starts a Python process for each query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

NAME: Final = "bench-floor"
BATCH_ROWS: Final = 10_000
VALUE_BYTES: Final = 100  # as BenchEnvironment.fill writes them


class FloorSource(DataSource):
    """The options `rows` and `tasks` say how many rows there are, and how many tasks share them evenly."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        from marshal_py.spark.stream.messages import spark_schema

        return spark_schema()

    def streamReader(self, schema: StructType) -> FloorReader:
        return FloorReader(self.options)


class FloorReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Has all rows in one batch."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.rows, self.tasks = int(options["rows"]), int(options["tasks"])

    def initialOffset(self) -> dict[str, Any]:
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return {"at": self.rows}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self.tasks)] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = self.rows // self.tasks
        batch = rows(min(BATCH_ROWS, left), partition.value)
        while left:
            yield batch.slice(0, left)
            left -= min(left, len(batch))

    def commit(self, end: dict[str, Any]) -> None:
        pass


def rows(count: int, partition: int) -> pa.RecordBatch:
    """Returns `count` rows without keys and headers."""
    import numpy as np
    import pyarrow as pa

    from marshal_py.spark.stream.messages import arrow_schema

    schema = arrow_schema()
    constant = {"value": b"x" * VALUE_BYTES, "topic": "bench-0123456789ab", "partition": partition, "token": "1024"}
    counted = {"offset": 0, "timestamp": 1_700_000_000_000_000}

    def array(column: pa.Field) -> pa.Array:
        if column.name in counted:
            return pa.array(np.arange(count) + counted[column.name], column.type)
        return pa.repeat(pa.scalar(constant.get(column.name), column.type), count)

    return pa.RecordBatch.from_arrays([array(column) for column in schema], schema=schema)
