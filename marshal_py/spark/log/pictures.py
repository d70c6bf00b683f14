"""The picture of a group (history/picture.py) from raw records in a DataFrame, for example of an archive.

Spark finds the group's log; its records come to this process, in the order of their offsets, which folds them.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, functions

from marshal_py.history.picture import Picture, PictureReader
from marshal_py.log.pictures import Period
from marshal_py.protocol.wire.identity import route
from marshal_py.spark.log.replays import NEEDED, beginnings_of, check_columns, root_of


class GroupLog:
    """The records of the log that has a group. Raises InvalidOption without a root among the records."""

    def __init__(self, df: DataFrame, group: str) -> None:
        check_columns(df)
        self.group: str = group
        self._root = root_of(df)
        self._log = route(group, self._root.partitions)
        time_ms = functions.coalesce(functions.unix_millis("time"), functions.lit(0)).alias("time_ms")
        self._records = df.select(*NEEDED, time_ms).where(functions.col("log") == self._log)

    def newest_ms(self) -> int:
        """Returns the highest timestamp of its records, in ms since 1970; 0 if there is none."""
        return self._records.agg(functions.max("time_ms")).collect()[0][0] or 0

    def picture(self, period: Period) -> Picture | None:
        """Returns the picture of the group in a period, None if the records do not know it. The fold begins where the
        log does. Raises HistoryTruncated; LogGap if a record is missing."""
        beginnings = beginnings_of(self._records, self._root)
        if self._log not in beginnings:
            return None
        world = beginnings[self._log].world()
        reader = PictureReader(world, self.group, period.from_ms, period.to_ms)
        wanted = self._records.where(functions.col("offset") >= world.next_offset)
        for row in wanted.orderBy("offset").toLocalIterator():
            if period.cut and row.time_ms > period.to_ms:
                break
            if row.offset >= world.next_offset:  # an archive may have a record twice
                reader.read(row.offset, row.time_ms, None if row.value is None else bytes(row.value))
        return reader.finish() if self.group in world.groups else None
