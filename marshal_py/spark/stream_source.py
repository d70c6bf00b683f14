"""The streaming source: a query that is a member of a group. `spark.readStream.format("marshal")`.

Spark keeps one Python process per running query, beside the driver; the member, its claims and its heartbeats live
there (`Life`). Spark's calls, in the order of one trigger:

    latestOffset(start)    `start` is the end of the last batch that Spark has committed: what was handed over of it is
                           acked. The next ranges are planned, and in at-least-once mode handed over
    (Spark writes the end offset, which holds the whole plan, to its write-ahead log)
    commit(start)          the same news again (and both are old news where a listener tells of commits: commits.py)
    partitions(start, end) the ranges of the batch; in at-most-once mode the log grants them only now
    tasks read             explicit ranges, nothing else

So Spark's checkpoint says what to replay, and the coordination log says what is ours and what is done; microbatches.py
has the rules. In at-most-once mode a replayed batch is empty, and a loss is noted: by this process, which outlives the
JVM, or by the one that is asked to replay. Losing the checkpoint loses no position.

Nothing is claimed in constructors: Spark builds readers for planning alone, and pickles them.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from marshal_py.client.marshal import connect
from marshal_py.client.microbatches import FIRST, MicroBatches, key_of
from marshal_py.client.ranges import ClaimedRange
from marshal_py.errors import BatchOverdue, ClusterUnreachable, InvalidOption
from marshal_py.protocol.identity import TopicPartition
from marshal_py.spark.commits import CommitSocket
from marshal_py.spark.options import StreamOptions
from marshal_py.spark.range_reader import partitions_of, read_ranges
from marshal_py.spark.tasks import pieces_of

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.client.ranges import Taken

log = logging.getLogger("marshal_py.spark")

TOPICS_LOOK_S: Final = 30.0  # between two looks for topics that match a pattern: as often as clients look for leaders
RELEASE_S: Final = 2.0  # what stop() may take; Spark kills the process some time after it asked


class QueryMember:
    """One membership of a query's process: joined when made, until it is closed or falls silent for too long."""

    def __init__(self, options: StreamOptions, before: MicroBatches | None = None) -> None:
        """`before`: what an earlier life of this process has handed over."""
        self.marshal = connect(
            options.kafka,
            client_id=options.client_id,
            timeout_s=options.connect_timeout_s,
            coordination_topic=options.coordination_topic,
            coordination_partitions=options.coordination_partitions,
        )
        try:
            self._pattern, self._looked_s = options.topics_pattern, time.monotonic()
            self.topics = options.topics if self._pattern is None else self.marshal.topics(self._pattern)
            if not self.topics:
                raise InvalidOption("topics_pattern", self._pattern, "the cluster has no topic of such a name")
            self.consumer = self.planner = self.marshal.planner(options.group, self.topics, **options.consumer)
        except BaseException:
            self.marshal.close(RELEASE_S)
            raise
        self.batches = self.planner.micro_batches(before)
        self._commits = self._listen()
        self.planned: dict[str, list[ClaimedRange]] = {}  # at most once: the newest plan, by its end offset as JSON
        self.settled = self.warned = False
        self._rows_min, self._delay_s, self._batch_s = options.rows_min, options.delay_s, -math.inf  # the last batch

    def outgrown(self) -> bool:
        """Whether other topics than this life's match the pattern by now; asks the cluster now and then."""
        now_s = time.monotonic()
        if self._pattern is None or now_s - self._looked_s < TOPICS_LOOK_S:
            return False
        self._looked_s = now_s
        new = sorted(set(self.marshal.topics(self._pattern)) - set(self.topics))
        if new:
            log.info("group %s: topics that match %s came: %s", self.consumer.group, self._pattern, ", ".join(new))
        return bool(new)

    def _listen(self) -> CommitSocket | None:
        """For commits that somebody in the driver tells before Spark does; None where that cannot be."""
        try:
            return CommitSocket(lambda digest: self.planner.commit_told(self.batches, digest))
        except (AttributeError, OSError) as error:
            log.info("commits are heard of with the next trigger: %s", error)
            return None

    def settle(self) -> None:
        """Once per life: the claims that are to come have come, and dead owners have been waited out."""
        if not self.settled:
            self.planner.settle()
            self.settled = True

    def warn_of_fresh_checkpoint(self) -> None:
        """Once per life. Sinks that know batches by their numbers skip those that they have (docs/spark.md)."""
        if not self.warned and self.planner.resumed():
            log.warning(
                "group %s has positions, and this query begins with a fresh checkpoint: it goes on there, "
                "whatever its start says; its batches are numbered from 0 again, and a sink that has such "
                "numbers already, as Spark's file sink in an old folder, skips them",
                self.consumer.group,
            )
        self.warned = True

    def done(self, end: dict[str, Any]) -> None:
        """Spark has committed the batch that ends at `end`, of this life or of an earlier one. Twice is once."""
        self.planner.commit_end(self.batches, end)

    def plan(
        self, start: dict[str, Any], rows_max: int | None, targets: Mapping[TopicPartition, int] | None
    ) -> dict[str, Any]:
        """The next end offset, `start` itself if there is nothing to do."""
        end = self._planned(start, rows_max, targets)
        if end == start and targets is not None and self.planner.settle():
            end = self._planned(start, rows_max, targets)  # what was still to come when we looked first
        if end == start and targets is not None and self.consumer.cached_info().paused:
            log.warning("group %s is paused: the query ends with what was done before", self.consumer.group)
        return end

    def _planned(
        self, start: dict[str, Any], rows_max: int | None, targets: Mapping[TopicPartition, int] | None
    ) -> dict[str, Any]:
        ranges = self.planner.plan(rows_max, targets)
        if targets is None and self._waits_for_more(sum(one.to - one.start for one in ranges)):
            return start
        end = self.planner.plan_end(self.batches, start, ranges)
        self.planned = {key_of(end): ranges}
        return end

    def _waits_for_more(self, rows: int) -> bool:
        """Whether a batch of so few waits: counted from the batch before. The first goes at once."""
        now_s = time.monotonic()
        waits = 0 < rows < self._rows_min and now_s - self._batch_s < self._delay_s
        if rows and not waits:
            self._batch_s = now_s
        return waits

    def take(self, start: dict[str, Any], end: dict[str, Any]) -> list[Taken]:
        """What the batch that ends at `end` holds: planned by this life, or replayed.

        In at-most-once mode a replayed batch is empty: it may have been granted and read. What is lost is noted.
        """
        taken = self.batches.handed_over(end)
        if taken is None:
            planned = self.planned.pop(key_of(end), None)
            if self.planner.at_most_once:
                taken = self.planner.take_end(self.batches, end, planned)
            else:
                self.settle()
                self.done(start)
                taken = self.planner.replay_end(self.batches, end)
            if not taken:
                log.warning(
                    "group %s: batch %d hands over nothing of the %d ranges that were planned",
                    self.consumer.group,
                    end["b"],
                    len(end["r"]),
                )
        return taken

    def report(self) -> dict[str, Any]:
        """For the query's progress. `commits`: where this process listens for commits."""
        info, heard_at = self.consumer.cached_info(), None if self._commits is None else self._commits.address
        return {
            "group": info.group,
            "claims": len(info.claims),
            "lag": info.lag,
            "paused": info.paused,
            "commits": heard_at,
            "partitions": {
                str(tp): {"position": claim.position, "lag": claim.lag} for tp, claim in sorted(info.claims.items())
            },
        }

    def close(self) -> None:
        """Releases every claim at its position."""
        if self._commits is not None:
            self._commits.close()
        self.consumer.stop(RELEASE_S)
        self.marshal.close(RELEASE_S)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What Spark calls. Everything that lives is in `_life`, which exists in the query's own process alone."""

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self._life: QueryMember | None = None
        self._before: MicroBatches | None = None
        self._bounded = False  # availableNow
        self._targets: dict[TopicPartition, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_life": None, "_before": None, "_bounded": False, "_targets": None}

    def _alive(self) -> QueryMember:
        """The life of this process; a new one after a silence that ended the last."""
        if self._life is not None:
            try:
                self._life.planner.alive()
            except BatchOverdue as error:
                log.warning("%s", error)
                self._end_life()
        if self._life is None:
            _stop_on_sigterm()
            self._life = QueryMember(self.options, self._before)
        return self._life

    def _renewed(self) -> QueryMember:
        """A life with the topics of now, for those of a membership stay as they are. Nothing is in flight."""
        self._end_life()
        life = self._alive()
        life.settle()
        return life

    def _end_life(self) -> None:
        """The process goes on, and so do the batches that are with Spark."""
        life, self._life = self._life, None
        if life is not None:
            self._before = life.batches
            life.close()

    # --- Spark's calls

    def initialOffset(self) -> dict[str, Any]:
        return FIRST

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._bounded = True  # nothing is claimed before the offsets are seen: they may be another source's

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows_max = _rows(limit)
        _check_ours(start, start)
        try:
            life = self._alive()
            life.settle()  # before what Spark has done is told: that takes claims
            if key_of(start) == key_of(FIRST):
                life.warn_of_fresh_checkpoint()
            life.done(start)
            if self._bounded and self._targets is None:
                self._targets = life.planner.ends()
            if not self._bounded and life.outgrown():
                life = self._renewed()
            return life.plan(start, rows_max, self._targets)
        except ClusterUnreachable as error:
            if self._bounded or self._life is None:
                raise  # "nothing to do" would end the query as if it were complete
            log.warning("%s; trying again at the next trigger", error)
            return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._life is None else self._life.report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if key_of(start) == key_of(end):
            return []
        _check_ours(end, start)
        pieces = pieces_of(taken.range for taken in self._alive().take(start, end))
        return partitions_of(pieces, self.options, once=self.options.at_most_once)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self._life is not None:
            self._life.done(end)

    def stop(self) -> None:
        """The process ends: Spark has stopped the query, or is gone."""
        life, self._life = self._life, None
        if life is not None:
            life.planner.note_uncommitted(life.batches)
            life.close()


def _check_ours(offset: dict[str, Any], committed: dict[str, Any]) -> None:
    """Spark does not look whose checkpoint it reads. Raises InvalidOption for that of another source."""
    if not isinstance(offset.get("b"), int):
        rule = (
            "the folder holds the checkpoint of another source: take a new one. If it is of format('kafka'), a "
            "group without positions goes on there with this value as startingOffsets"
        )
        raise InvalidOption("checkpointLocation", key_of(committed), rule)


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
