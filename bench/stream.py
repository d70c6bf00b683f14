"""What do claims cost a Spark stream, and do heartbeats keep their time while executors are busy?

The contestants read the same topic with the same reader, the same batches and a sink that discards all rows:
`format("marshal")`, a member of a group, and a stream source without claims that knows where the last batch ended.

It measures the durations of Spark's batches, except the first, in which workers start; and, from the coordination log,
the longest time between two heartbeats of the query's member, as a share of its interval (one is due each third of it).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from bench.environment import BenchEnvironment, Result, ratio, spread
from bench.spark_session import spark_session
from marshal_py.log.observer import Observer
from marshal_py.protocol.wire.records import Heartbeat
from marshal_py.spark.stream.messages import spark_schema
from marshal_py.spark.stream.options import READ_TIMEOUT_S, kafka_options
from marshal_py.spark.stream.range_reader import Piece, RangePartition, read_ranges
from marshal_py.transport.kafka import KafkaTransport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

PARTITIONS: Final = 4
ROWS, ROWS_TINY = 2_000_000, 4_000
BATCH, BATCH_TINY = 200_000, 1_000
ROUNDS: Final = 3
INTERVAL_S: Final = 2.0  # the default
WAIT_S: Final = 300


class Claimless(DataSource):
    """A stream source with the same ranges in the same batches, without claims."""

    @classmethod
    def name(cls) -> str:
        return "bench-claimless"

    def schema(self) -> str:
        return spark_schema()

    def streamReader(self, schema: Any) -> ClaimlessReader:
        return ClaimlessReader(self.options)


class ClaimlessReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Mapping[str, str]) -> None:
        self.topic, self.each = options["topics"], int(options["each"])
        self.rows, self.kafka = int(options["max_rows_per_batch"]), kafka_options(options)

    def initialOffset(self) -> dict[str, Any]:
        return {"to": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """The topic does not grow."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return {"to": min(self.each, start["to"] + self.rows // PARTITIONS)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [
            RangePartition(
                [Piece(self.topic, number, start["to"], end["to"], "none")], self.kafka, READ_TIMEOUT_S, False
            )
            for number in range(PARTITIONS)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return read_ranges(partition)


def stream(spark: SparkSession, form: str, options: Mapping[str, Any], checkpoint: str) -> tuple[int, list[float]]:
    """Returns the rows, and the rows per second of each batch but the first."""
    query = (
        spark.readStream.format(form)
        .options(**options)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    if not query.awaitTermination(WAIT_S):
        query.stop()
        raise RuntimeError(f"{form} did not finish within {WAIT_S} s")
    batches = [(p.numInputRows, p.batchDuration) for p in query.recentProgress if p.numInputRows]
    return sum(rows for rows, _ in batches), [rows * 1000 / took_ms for rows, took_ms in batches[1:]]


def longest_gap_ms(environment: BenchEnvironment, log: str, group: str) -> int:
    """The longest time between two heartbeats of one session, by the log's timestamps."""
    sent: dict[int, list[int]] = {}
    with Observer(KafkaTransport(environment.bootstrap, 30.0), log) as observer:
        for record, verdict in observer.read(group):
            if isinstance(verdict.record, Heartbeat):
                sent.setdefault(verdict.record.session, []).append(record.timestamp_ms)
    return max((b - a for times in sent.values() for a, b in pairwise(times)), default=0)


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows, batch, rounds = (ROWS_TINY, BATCH_TINY, 1) if tiny else (ROWS, BATCH, ROUNDS)
    topic, log = environment.topic(PARTITIONS), environment.coordination()
    environment.fill(topic, PARTITIONS, rows)
    shared = {"bootstrap.servers": environment.bootstrap, "topics": topic, "max_rows_per_batch": str(batch)}
    rates: dict[str, list[float]] = {"marshal": [], "without claims": []}
    read, gaps_ms = dict.fromkeys(rates, 0), list[int]()
    with spark_session() as spark:
        spark.dataSource.register(Claimless)
        for number in range(rounds):
            group = environment.group("stream")
            member = {**shared, "group": group, "start": "earliest", "coordination_topic": log}
            claimless = {**shared, "each": str(rows // PARTITIONS)}
            turns = (("without claims", "bench-claimless", claimless), ("marshal", "marshal", member))
            for name, form, options in turns:
                checkpoint = environment.folder / f"stream-{number}-{form}"
                count, found = stream(spark, form, options, str(checkpoint))
                shutil.rmtree(checkpoint)
                read[name] += count
                rates[name] += found
            gaps_ms.append(longest_gap_ms(environment, log, group))
    environment.drop(topic)
    share = round(max(gaps_ms) / (INTERVAL_S * 1000), 3)
    lines: list[list[Any]] = [
        [name, spread(found), ratio(found, rates["without claims"]), share if name == "marshal" else None, read[name]]
        for name, found in rates.items()
    ]
    columns = ["contestant", "rows/s", "ratio to none", "longest heartbeat gap / interval", "rows"]
    return Result("stream", columns, lines, [f"{rounds} rounds in turn, batches of {batch:,} rows, noop sink"])
