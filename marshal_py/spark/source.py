"""The streaming source: a query that is a member of a group. `spark.readStream.format("marshal")`.

Spark keeps one Python process per running query, beside the driver; the member, its claims and its heartbeats live
there (`Life`). Spark's calls, in the order of one trigger:

    latestOffset(start)    `start` is the end of the last batch that is done: it is acked. The next ranges are planned
    (Spark writes the end offset, which holds the whole plan, to its write-ahead log)
    partitions(start, end) the ranges are handed over behind the gate; in at-most-once mode the log grants them only now
    tasks read             explicit ranges, nothing else

So Spark's checkpoint says what to replay, and the coordination log says what is ours and what is done. A range that
cannot be replayed here is simply not read: the log's position has not passed it, so it is planned again, by whoever
owns it then. In at-most-once mode a replayed batch is empty. Losing the checkpoint loses no position.

Nothing is claimed in constructors: Spark builds readers for planning alone, and pickles them.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from marshal_py.client.marshal import CONNECT_TIMEOUT_S, connect
from marshal_py.client.options import COORDINATION_PARTITIONS, COORDINATION_TOPIC, ConsumerOptions, check_topics
from marshal_py.client.ranges import ClaimedRange
from marshal_py.errors import BatchOverdue, ClaimLost, ClusterUnreachable, InvalidOption
from marshal_py.protocol.identity import TopicPartition, check_id
from marshal_py.spark.ranges import (
    READ_TIMEOUT_S,
    RangePartition,
    check_names,
    flag,
    kafka_options,
    number,
    pieces_of,
    read_range,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.client.ranges import Taken

log = logging.getLogger("marshal_py.spark")

MAX_ROWS: Final = 1_000_000  # a batch of a few seconds: in at-least-once mode a crash makes it twice
RELEASE_S: Final = 2.0  # what stop() may take; Spark kills the process some time after it asked
_FIRST: Final[dict[str, Any]] = {"b": 0, "r": {}}  # before the first batch; the same for ever, as Spark asks again

_TEXTS: Final = ("delivery", "policy", "member", "start", "start_fallback")
_NUMBERS: Final = ("heartbeat_interval_s", "handler_timeout_s")
_COUNTS: Final = ("max_claims", "capacity")
_FLAGS: Final = ("fast_reclaim", "join_live_kafka_group", "mirror_offsets")
_OWN: Final = ("group", "topics", "bootstrap.servers", "client_id", "max_rows_per_batch", "read_timeout_s",
               "coordination_topic", "coordination_partitions", "connect_timeout_s")  # fmt: skip
OPTIONS: Final = (*_OWN, *_TEXTS, *_NUMBERS, *_COUNTS, *_FLAGS)


@dataclass(frozen=True)
class StreamOptions:
    """The options of a stream, checked: `group`, `topics` (comma-separated), `bootstrap.servers`, `kafka.*`, ..."""

    group: str
    topics: tuple[str, ...]
    client_id: str | None
    rows_max: int
    read_timeout_s: float
    connect_timeout_s: float
    coordination_topic: str
    coordination_partitions: int
    kafka: Mapping[str, Any]
    consumer: Mapping[str, Any]  # of ConsumerOptions

    @classmethod
    def of(cls, options: Mapping[str, str]) -> StreamOptions:
        """Raises InvalidOption, InvalidName."""
        check_names(options, OPTIONS)
        for name in ("group", "topics", "bootstrap.servers"):
            if not options.get(name):
                raise InvalidOption(name, options.get(name), "it must be given")
        topics = check_topics([topic.strip() for topic in options["topics"].split(",") if topic.strip()])
        consumer: dict[str, Any] = {name: options[name] for name in _TEXTS if name in options}
        consumer |= {name: number(options, name, 0, 0) for name in _NUMBERS if name in options}
        consumer |= {name: _count(options, name, 0) for name in _COUNTS if name in options}
        consumer |= {name: flag(options, name) for name in _FLAGS if name in options}
        ConsumerOptions(**consumer)
        return cls(
            check_id("group", options["group"]), topics, options.get("client_id"),
            _count(options, "max_rows_per_batch", MAX_ROWS), number(options, "read_timeout_s", READ_TIMEOUT_S, 1.0),
            number(options, "connect_timeout_s", CONNECT_TIMEOUT_S, 1.0),
            options.get("coordination_topic", COORDINATION_TOPIC),
            _count(options, "coordination_partitions", COORDINATION_PARTITIONS), kafka_options(options), consumer,
        )  # fmt: skip

    @property
    def at_most_once(self) -> bool:
        return self.consumer.get("delivery") == "at_most_once"


def _count(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidOption(name, text, "a whole number from 1 on")
    return int(text)


class Life:
    """One membership of a query's process: joined when made, until it is closed or falls silent for too long."""

    def __init__(self, options: StreamOptions) -> None:
        self.marshal = connect(options.kafka, client_id=options.client_id, timeout_s=options.connect_timeout_s,
                               coordination_topic=options.coordination_topic,
                               coordination_partitions=options.coordination_partitions)  # fmt: skip
        try:
            self.consumer = self.marshal.consumer(options.group, options.topics, **options.consumer)
            self.planner = self.consumer.plan_ranges()
        except BaseException:
            self.marshal.close(RELEASE_S)
            raise
        self.planned: dict[str, list[ClaimedRange]] = {}  # the newest plan, by its end offset as JSON
        self.taken: dict[str, list[Taken]] = {}  # what was handed over for the newest end offset, and is not done
        self.settled = False

    def settle(self) -> None:
        """Once per life: the claims that are to come have come, and dead owners have been waited out."""
        if not self.settled:
            self.planner.settle()
            self.settled = True

    # --- Spark says that a batch is done

    def done(self, end: dict[str, Any]) -> None:
        """Acks the batch that ended at `end`, by this life or by an earlier one. Twice is once."""
        taken = self.taken.pop(_text(end), None)
        if taken is not None:
            try:
                self.planner.finish(taken)
            except ClaimLost as error:
                log.warning("%s", error)
        if not self.planner.at_most_once and end.get("i") == self.planner.incarnation.hex():
            for name, (_, generation, start, to) in end["r"].items():
                found = self.planner.position(_partition(name))
                # The same generation: nobody has moved the position since, so what Spark has done is done.
                if found is not None and found[1] == generation and start <= found[2] < to:
                    self.planner.done_before(_partition(name), to)

    # --- the next batch

    def plan(self, start: dict[str, Any], rows_max: int | None,
             targets: Mapping[TopicPartition, int] | None) -> dict[str, Any]:  # fmt: skip
        """The next end offset, `start` itself if there is nothing to do."""
        self.settle()
        ranges = self.planner.plan(rows_max, targets)
        if not ranges and targets is not None and self.planner.settle():
            ranges = self.planner.plan(rows_max, targets)  # what was still to come when we looked first
        if not ranges:
            if targets is not None and self.consumer.cached_info().paused:
                log.warning("group %s is paused: the query ends with what was done before", self.consumer.group)
            return start
        end = {"b": start["b"] + 1, "i": self.planner.incarnation.hex(),
               "r": {f"{one.topic}:{one.partition}": [one.token.epoch, one.generation, one.start, one.to]
                     for one in sorted(ranges)}}  # fmt: skip
        self.planned = {_text(end): ranges}
        return end

    def take(self, start: dict[str, Any], end: dict[str, Any]) -> list[Taken]:
        """Hands over the ranges of the batch that ends at `end`: planned by this life, or replayed."""
        key = _text(end)
        if key not in self.taken:
            planned = self.planned.pop(key, None)
            self.taken = {key: self.planner.take(self._replayed(start, end) if planned is None else planned)}
        return self.taken[key]

    def _replayed(self, start: dict[str, Any], end: dict[str, Any]) -> list[ClaimedRange]:
        """What of a batch that an earlier life planned may be read here and now.

        In at-most-once mode nothing: it may have been granted and read. Else what is ours and not done.
        """
        if self.planner.at_most_once or end.get("i") != self.planner.incarnation.hex():
            return []
        self.settle()
        self.done(start)
        self.planner.plan(None)  # passes what retention has deleted meanwhile (D6)
        ranges = []
        for name, (_, generation, first, to) in end["r"].items():
            found = self.planner.position(_partition(name))
            if found is not None and found[1] == generation and first <= found[2] < to:
                ranges.append(ClaimedRange(*_partition(name), found[2], to, found[0], generation))
        return ranges

    def report(self) -> dict[str, Any]:
        """For the query's progress."""
        info = self.consumer.cached_info()
        return {"group": info.group, "claims": len(info.claims), "lag": info.lag, "paused": info.paused,
                "partitions": {str(tp): {"position": claim.position, "lag": claim.lag}
                               for tp, claim in sorted(info.claims.items())}}  # fmt: skip

    def close(self) -> None:
        """Releases every claim at its position."""
        self.consumer.stop(RELEASE_S)
        self.marshal.close(RELEASE_S)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What Spark calls. Everything that lives is in `_life`, which exists in the query's own process alone."""

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self._life: Life | None = None
        self._targets: dict[TopicPartition, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_life": None, "_targets": None}

    def _alive(self) -> Life:
        """The life of this process; a new one after a silence that ended the last."""
        if self._life is not None:
            try:
                self._life.planner.alive()
            except BatchOverdue as error:
                log.warning("%s", error)
                self.stop()
        if self._life is None:
            _stop_on_sigterm()
            self._life = Life(self.options)
        return self._life

    # --- Spark's calls

    def initialOffset(self) -> dict[str, Any]:
        return _FIRST

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._targets = self._alive().planner.ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows_max = _rows(limit)
        try:
            life = self._alive()
            life.done(start)
            return life.plan(start, rows_max, self._targets)
        except ClusterUnreachable as error:
            if self._targets is not None or self._life is None:
                raise  # "nothing to do" would end the query as if it were complete
            log.warning("%s; trying again at the next trigger", error)
            return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._life is None else self._life.report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if _text(start) == _text(end):
            return []
        options = self.options
        return [RangePartition(piece, options.kafka, options.read_timeout_s, options.at_most_once)
                for piece in pieces_of(taken.range for taken in self._alive().take(start, end))]  # fmt: skip

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return read_range(partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self._life is not None:
            self._life.done(end)

    def stop(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            life.close()


def _text(offset: dict[str, Any]) -> str:
    return json.dumps(offset)


def _partition(name: str) -> TopicPartition:
    topic, _, partition = name.rpartition(":")
    return TopicPartition(topic, int(partition))


def _rows(limit: ReadLimit) -> int | None:
    match limit:
        case ReadMaxRows():
            return limit.max_rows
        case ReadAllAvailable():
            return None
    raise InvalidOption("limit", type(limit).__name__, "this source is limited by rows: max_rows_per_batch")


def _stop_on_sigterm() -> None:
    """Spark ends a query's process by SIGTERM and would not call `stop`: the claims would wait for their eviction.

    Twice: the second signal must not interrupt the release that the first one began.
    """

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
