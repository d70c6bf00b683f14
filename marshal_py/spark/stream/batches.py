"""Claimed batches: Spark jobs over ranges that a planner of this process has claimed.

    with marshal.planner("billing", ["orders"]) as planner, claimed_batches(spark, planner) as batches:
        for batch in batches:
            batch.df.write.mode("append").parquet(path)
            batch.commit()

Claims and heartbeats stay in the driver's own process; executors read the planned ranges. There is no Spark checkpoint:
only the coordination log has the position. In at-most-once mode the log grants the ranges before `batch.df` exists.
Works in jobs, notebooks and over Spark Connect, so nothing here may touch a SparkContext.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from pyspark.sql import DataFrame, SparkSession

from marshal_py.client.planner import ClaimedBatch, Planner
from marshal_py.client.ranges import Taken
from marshal_py.errors import InvalidOption
from marshal_py.spark.stream.backfills import ranges_json
from marshal_py.spark.stream.messages import COLUMNS, columns_of
from marshal_py.spark.stream.options import MAX_ROWS, READ_TIMEOUT_S, ReadOptions, as_options
from marshal_py.spark.stream.range_reader import pieces_of


def claimed_batches(
    spark: SparkSession,
    planner: Planner,
    *,
    max_rows: int = MAX_ROWS,
    wait_s: float | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
    columns: Sequence[str] = COLUMNS,
    min_partitions: int | None = None,
    until: str | None = None,
) -> Batches:
    """Returns a context manager and iterator of batches, each of at most `max_rows` offsets of `planner`'s claims.

    `planner` is what `Marshal.planner` returns. Iteration ends when it stops, or when no messages came for `wait_s`
    seconds (0: takes what is there now and ends; None: waits until the planner stops).

    `read_timeout_s`: a task fails after so many seconds without progress. `columns` selects the columns of the rows.
    `min_partitions` is the least number of tasks per batch. With None, small ranges share tasks, of which at least
    eight are kept.

    `until` says where every partition ends: a time, offsets or `latest`, written as a consumer's `start` and looked up
    now. Iteration then ends when this planner has nothing left before that end; leave `wait_s` out.

    Raises InvalidOption, PositionOutOfRange, ClusterUnreachable.
    """
    if max_rows < 1:
        raise InvalidOption("max_rows", max_rows, "at least 1")
    if wait_s is not None and wait_s < 0:
        raise InvalidOption("wait_s", wait_s, "0 takes what is there now; None waits until the planner stops")
    if min_partitions is not None and min_partitions < 1:
        raise InvalidOption("min_partitions", min_partitions, "at least 1; None lets the ranges decide")
    options = {"read_timeout_s": str(read_timeout_s), "columns": ",".join(columns_of(",".join(columns)))}
    if min_partitions is not None:
        options["min_partitions"] = str(min_partitions)
    if until is not None and wait_s:
        raise InvalidOption("wait_s", wait_s, "leave it out: until is given, and later messages are not waited for")
    return Batches(spark, planner, max_rows, wait_s, options, until)


class Batch(ClaimedBatch):
    """One claimed batch; `df` has its rows. Without `commit` it is planned again, or lost in at-most-once mode."""

    def __init__(self, planner: Planner, taken: Sequence[Taken], df: DataFrame) -> None:
        super().__init__(planner, taken)
        self.df = df


class Batches:
    """Makes the batches. This is the context manager and iterator that `claimed_batches` returns."""

    def __init__(
        self,
        spark: SparkSession,
        planner: Planner,
        max_rows: int,
        wait_s: float | None,
        options: Mapping[str, str],
        until: str | None,
    ) -> None:
        """`options`: those with which every batch is read (backfills.py)."""
        self._spark, self._planner, self._max_rows, self._wait_s = spark, planner, max_rows, wait_s
        if not planner.connection:
            raise InvalidOption("bootstrap.servers", "", "executors can only reach a cluster over the network")
        self._options = {**as_options(planner.connection), **options, "once": str(planner.ranges.at_most_once).lower()}
        ReadOptions.parse(self._options)  # Spark checks them when a batch is read, and it may be granted by then
        self._up_to = None if until is None else self._planner.ranges.ends_at(until)
        self._last: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._last.give_back()

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches. Raises BatchRefused, BatchOverdue, and the error that ended the planner.

        With `until`, it raises PartitionsParked or PartitionsUnread at the end if something before that end is left
        that nobody reads.
        """
        self._planner.ranges.settle()
        while taken := self._taken():
            pieces = pieces_of((one.range for one in taken), self._planner.group)
            try:
                df = self._spark.read.format("marshal").options(**self._options, ranges=ranges_json(pieces)).load()
            except BaseException:  # such as a session that is stopped
                self._planner.ranges.give_back(taken)
                raise
            self._last = Batch(self._planner, taken, df)
            yield self._last
        if self._up_to is not None and not self._planner.ranges.stopping:
            self._planner.ranges.check_read(self._up_to)

    def _taken(self) -> list[Taken]:
        if self._up_to is None:
            return self._planner.ranges.await_batch(self._max_rows, self._wait_s)
        taken = self._planner.ranges.await_batch(self._max_rows, 0, self._up_to)
        if not taken and self._planner.ranges.settle():  # claims were granted meanwhile
            taken = self._planner.ranges.await_batch(self._max_rows, 0, self._up_to)
        return taken


__all__ = ["Batch", "Batches", "claimed_batches"]
