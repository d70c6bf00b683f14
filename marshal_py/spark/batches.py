"""Claimed batches: a Spark job over ranges that an ordinary consumer of this process has claimed.

    with marshal.consumer("billing", ["orders"]) as consumer, claimed_batches(spark, consumer) as batches:
        for batch in batches:
            batch.df.write.mode("append").parquet(path)
            batch.commit()

Claims and heartbeats stay in the driver's own process; executors read what is planned. There is no Spark checkpoint:
the position stands in the coordination log alone. Works in jobs, notebooks and over Spark Connect: nothing here touches
a SparkContext. In at-most-once mode the ranges are granted in the log before `batch.df` exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from marshal_py.client.planner import ClaimedBatch
from marshal_py.errors import InvalidOption
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.spark import jvm
from marshal_py.spark.messages import COLUMNS, columns_of
from marshal_py.spark.options import READ_TIMEOUT_S, as_options
from marshal_py.spark.ranges import ranges_json
from marshal_py.spark.tasks import pieces_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_py.client.consumer import Consumer
    from marshal_py.client.ranges import ClaimedRange
    from marshal_py.spark.tasks import Piece

MAX_ROWS: Final = 1_000_000  # a batch of some seconds: the floor of a Spark job is a third of one


def claimed_batches(
    spark: SparkSession,
    consumer: Consumer,
    *,
    max_rows: int = MAX_ROWS,
    wait_s: float | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
    columns: Sequence[str] = COLUMNS,
    min_partitions: int | None = None,
    until: str | None = None,
    reader: Literal["python", "jvm"] = "python",
    jvm_options: Mapping[str, str] | None = None,
) -> Batches:
    """Batches of at most `max_rows` offsets of what `consumer` claims. A context manager and an iterator.

    The consumer fetches nothing itself from now on. Iteration ends when the consumer stops, or when no data came for
    `wait_s` (0: takes what is there now and ends). `read_timeout_s`: what a task waits without progress.
    `columns`: those of the rows that are wanted. `min_partitions`: tasks of a batch, at least; None: small ranges share
    tasks, down to eight.

    `until`: where every partition ends: a time, offsets or `latest`, in the form of a consumer's `start`, looked up
    now. Iteration then ends when nothing below it is left to this consumer, and `wait_s` is left out.

    `reader`: "jvm" reads by Spark's own Kafka source, where its package is on the session's class path, in
    at-least-once mode. `jvm_options`: options for it, as how to connect in the words of Java's client.
    Raises InvalidOption, PositionOutOfRange, ClusterUnreachable, MissingSpark.
    """
    if max_rows < 1:
        raise InvalidOption("max_rows", max_rows, "at least 1")
    if wait_s is not None and wait_s < 0:
        raise InvalidOption("wait_s", wait_s, "0 takes what is there now; None waits for ever")
    if min_partitions is not None and min_partitions < 1:
        raise InvalidOption("min_partitions", min_partitions, "at least 1; None lets the ranges decide")
    options = {"read_timeout_s": str(read_timeout_s), "columns": ",".join(columns_of(",".join(columns)))}
    if min_partitions is not None:
        options["min_partitions"] = str(min_partitions)
    if until is not None and wait_s:
        raise InvalidOption("wait_s", wait_s, "until is given, and what comes later is not waited for: leave it out")
    if reader not in ("python", "jvm"):
        raise InvalidOption("reader", reader, "python or jvm")
    if reader == "python" and jvm_options is not None:
        raise InvalidOption("jvm_options", sorted(jvm_options), "they are for reader='jvm'")
    if reader == "jvm":
        jvm.check(spark)
    of_jvm = (jvm_options or {}) if reader == "jvm" else None
    return Batches(spark, consumer, max_rows, wait_s, options, until, of_jvm)


class Batch:
    """One claimed batch. Left without `commit` it is planned again (in at-most-once mode: lost)."""

    def __init__(self, claimed: ClaimedBatch, df: DataFrame) -> None:
        self._claimed = claimed
        self.df = df

    @property
    def ranges(self) -> tuple[ClaimedRange, ...]:
        """The claimed ranges, one per partition."""
        return self._claimed.ranges

    @property
    def token(self) -> Token:
        """Greater than the token of every batch that an earlier owner had of one of these partitions."""
        return self._claimed.token

    @property
    def tokens(self) -> dict[TopicPartition, Token]:
        """The fencing token of each partition; rows carry theirs in the column `token`."""
        return self._claimed.tokens

    def check(self) -> None:
        """Raises ClaimLost unless every claim is still held: the fence to ask just before a write."""
        self._claimed.check()

    def in_progress(self) -> None:
        """Begins the consumer's `handler_timeout_s` anew: for batches of several steps."""
        self._claimed.in_progress()

    def commit(self) -> None:
        """The batch is done; returns once the log has its positions. Raises ClaimLost, ClusterUnreachable."""
        self._claimed.commit()

    def give_back(self) -> None:
        """The batch is not done and will be planned again; in at-most-once mode it is lost."""
        self._claimed.give_back()


class Batches:
    """What `claimed_batches` returns."""

    def __init__(
        self,
        spark: SparkSession,
        consumer: Consumer,
        max_rows: int,
        wait_s: float | None,
        options: Mapping[str, str],
        until: str | None,
        of_jvm: Mapping[str, str] | None,
    ) -> None:
        """`of_jvm`: the caller's options for Spark's own source, if that reads."""
        self._spark, self._consumer = spark, consumer
        self._max_rows, self._wait_s = max_rows, wait_s
        self._once = consumer.cached_info().delivery == "at_most_once"
        if not consumer.connection:
            raise InvalidOption("bootstrap.servers", "", "executors can only reach a cluster over the network")
        self._of_jvm = None if of_jvm is None else jvm.options_of(consumer.connection, of_jvm)
        if self._of_jvm is not None and self._once:
            raise InvalidOption(
                "reader",
                "jvm",
                "in at-most-once mode a task that is tried again is refused, which only the Python reader does",
            )
        ours = {} if self._of_jvm is not None else as_options(consumer.connection)
        self._options = {**ours, **options, "once": str(self._once).lower()}
        self._planner = consumer.plan_ranges()
        self._up_to = None if until is None else self._planner.ends_at(until)
        self._last: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._last is not None:
            self._last.give_back()

    def __iter__(self) -> Iterator[Batch]:
        """Raises BatchNotCommitted, BatchOverdue, and what ended the consumer."""
        self._planner.settle()
        while claimed := self._claimed():
            self._last = Batch(claimed, self._df(pieces_of(claimed.ranges)))
            yield self._last

    def _df(self, pieces: list[Piece]) -> DataFrame:
        if self._of_jvm is not None:
            least = {"minPartitions": tasks} if (tasks := self._options.get("min_partitions")) else {}
            return jvm.frame(self._spark, pieces, {**least, **self._of_jvm}, self._options["columns"].split(","))
        return self._spark.read.format("marshal-ranges").options(**self._options, ranges=ranges_json(pieces)).load()

    def _claimed(self) -> ClaimedBatch:
        if self._up_to is None:
            return self._planner.batch(self._max_rows, self._wait_s)
        claimed = self._planner.batch(self._max_rows, 0, self._up_to)
        if not claimed and self._planner.settle():  # what was still to come when we looked first
            claimed = self._planner.batch(self._max_rows, 0, self._up_to)
        return claimed


__all__ = ["Batch", "Batches", "claimed_batches"]
