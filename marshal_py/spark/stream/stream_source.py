"""The streaming source `spark.readStream.format("marshal")`: a query that is a member of a group.

Spark keeps one Python process per running query, beside the driver. The member lives there, with its claims and its
heartbeats (`QueryMember`). Spark's calls, in the order of one trigger:

    latestOffset(start)    `start` is the end of the last batch that Spark has committed; the member acks that batch.
                           Then it plans the next ranges, and in at-least-once mode hands them over
    (Spark writes the end offset, which holds the whole plan, to its write-ahead log)
    commit(start)          reports the same commit again (a listener may have reported it earlier: commits.py)
    partitions(start, end) returns the batch's ranges; in at-most-once mode the log grants them only now
    tasks read             explicit ranges, nothing else

So Spark's checkpoint says what to replay, and the coordination log says what this member owns and what is done.
micro_batches.py has the rules. In at-most-once mode a replayed batch is empty and a loss is noted in the
log: by this process, which outlives the JVM, or by the process that Spark asks to replay. Losing the checkpoint loses
no position.

Constructors must not claim anything: Spark also builds readers just for planning, and pickles them.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from marshal_py.client.driver import last_wills
from marshal_py.client.marshal import Marshal, connect
from marshal_py.client.planner import Planner, RangePlanner
from marshal_py.client.ranges import ClaimedRange
from marshal_py.errors import BatchOverdue, ClusterUnreachable, InvalidOption
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.spark.stream.aliases import named_as_written
from marshal_py.spark.stream.commits import CommitSocket
from marshal_py.spark.stream.micro_batches import FIRST, MicroBatches, QueryPlanner, group_of, key_of, life_of
from marshal_py.spark.stream.options import StreamOptions
from marshal_py.spark.stream.range_reader import partitions_of, pieces_of, read_ranges

if TYPE_CHECKING:
    import pyarrow as pa

    from marshal_py.client.ranges import Taken

logger: Final = logging.getLogger("marshal_py.spark")

TOPICS_CHECK_S: Final = 30.0  # between two searches for topics that match a pattern; a lookup each
_FROM_KAFKA: Final = (
    ". If it was format('kafka'), a group without positions continues there if this value is given as startingOffsets"
)
RELEASE_S: Final = 2.0  # for stop(); Spark kills the process some time after it asked it to end


class QueryMember:
    """A query's membership in its group. It joins when it is made, and leaves when it is closed or overdue."""

    settled: bool
    stateful: bool
    warned: bool

    def __init__(self, options: StreamOptions, earlier: MicroBatches | None = None) -> None:
        """Joins the group. `earlier` has the batches that an earlier member of this process has handed over."""
        self.marshal: Marshal = _connected(options)
        try:
            self._pattern, self._checked_s = options.topics_pattern, time.monotonic()
            self.topics: tuple[str, ...] = (
                options.topics if self._pattern is None else self.marshal.topics(self._pattern)
            )
            if not self.topics:
                raise InvalidOption("topics_pattern", self._pattern, "the cluster has no topic of such a name")
            self.planner: Planner = self.marshal.planner(options.group, self.topics, **options.consumer)
        except BaseException:
            self.marshal.close(RELEASE_S)
            raise
        self.query: QueryPlanner = QueryPlanner(self.planner, earlier)
        self.ranges: RangePlanner = self.planner.ranges
        self._commits = self._open_commit_socket()
        self.planned: dict[str, list[ClaimedRange]] = {}  # at-most-once: the newest plan, by its end offset
        self.settled = self.warned = False
        self.stateful, self._restart = options.stateful, options.restart
        self._planned_to: dict[TopicPartition, int] = {}  # where the newest batch ends
        self._rows_min, self._delay_s = options.rows_min, options.delay_s
        self._last_batch_s = -math.inf

    def has_new_topics(self) -> bool:
        """Returns whether topics that match have appeared; asks once in TOPICS_CHECK_S."""
        now_s = time.monotonic()
        if self._pattern is None or now_s - self._checked_s < TOPICS_CHECK_S:
            return False
        self._checked_s = now_s
        new = sorted(set(self.marshal.topics(self._pattern)) - set(self.topics))
        if new:
            logger.info("group %s: new topics match %s: %s", self.planner.group, self._pattern, ", ".join(new))
        return bool(new)

    def _open_commit_socket(self) -> CommitSocket | None:
        """Opens the socket for a listener's reports; None where there are no such sockets."""
        try:
            return CommitSocket(self.query.commit_reported)
        except (AttributeError, OSError) as error:
            logger.info("commits are known at the next trigger only: %s", error)
            return None

    def settle(self) -> None:
        """Waits, once, until the first claims are granted and dead owners evicted."""
        if not self.settled:
            self.ranges.settle()
            self.settled = True

    def notice_fresh_checkpoint(self) -> None:
        """Warns once if the group has positions and the checkpoint is new: batches are numbered from 0, and a sink may
        skip numbers that it has (docs/spark.md). Raises InvalidOption for a query with state, which begins empty and
        misses what the positions have passed."""
        if self.stateful and not self._restart and self.query.resumed():
            raise InvalidOption(
                "stateful",
                "true",
                f"the checkpoint is new, and group {self.planner.group!r} has positions already: what was in open "
                f"windows is behind them. Restore the checkpoint folder; or take a new group, which reads from start; "
                f"or move the positions to the earliest with `marshal set-position {quote(self.planner.group)} TOPIC "
                f"--to earliest`; or begin with empty state at the positions: stateful=restart",
            )
        if not self.warned and self.query.resumed():
            logger.warning(
                "group %s has positions, and this query begins with a fresh checkpoint: it continues at the "
                "group's positions and ignores its option start. Its batches are numbered from 0 again; a sink "
                "that has such numbers already, as Spark's file sink in an old folder, skips them",
                self.planner.group,
            )
        self.warned = True

    def check_origin(self, offset: dict[str, Any]) -> None:
        """Warns if the checkpoint is of another coordination topic, or from before the group was deleted: its batches
        mean nothing. Raises InvalidOption for a query with state, which has messages that may come again."""
        if offset == FIRST:
            return
        way = "Take a new checkpointLocation"
        found = ""
        if offset["i"] != self.ranges.incarnation.hex():
            found = "the checkpoint is from another coordination topic, or from before it was created again"
            way += ", or the coordination_topic that the checkpoint is from"
        elif life_of(offset) != self.query.deleted_at():
            found = f"the checkpoint is from before group {self.planner.group!r} was deleted and created again"
        else:
            return
        if self.stateful:
            raise InvalidOption(
                "stateful",
                "true",
                f"{found}: its state has messages that group {self.planner.group!r} delivers again if it begins before "
                f"them here. {way}",
            )
        if not self.warned:
            logger.warning(
                "group %s: %s: the query continues at the group's positions here, or at its option start",
                self.planner.group,
                found,
            )
        self.warned = True

    def plan(
        self, start: dict[str, Any], rows_max: int | None, targets: Mapping[TopicPartition, int] | None
    ) -> dict[str, Any]:
        """Returns the next end offset, or `start` for nothing to do. `rows_max`: offsets in the batch. `targets`: where
        the query ends (availableNow), or None; there it raises PartitionsParked or PartitionsUnread."""
        end = self._plan_once(start, rows_max, targets)
        if end == start and targets is not None and self.ranges.settle():
            end = self._plan_once(start, rows_max, targets)  # claims were granted meanwhile
        if end == start and targets is not None:
            self.ranges.check_read(targets)  # last, when everything else is read
        return end

    def _plan_once(
        self, start: dict[str, Any], rows_max: int | None, targets: Mapping[TopicPartition, int] | None
    ) -> dict[str, Any]:
        self._planned_to = {}
        ranges = self.ranges.plan(rows_max, targets)
        if targets is None and self._waits_for_more(sum(one.to - one.start for one in ranges)):
            return start
        end = self.query.plan(start, ranges)
        self.planned = {key_of(end): ranges}
        if end != start:
            self._planned_to = {one.tp: one.to for one in ranges}
        return end

    def _waits_for_more(self, rows: int) -> bool:
        """Returns whether a batch of `rows` waits for more, until an option's time after the last one; the first never
        does."""
        now_s = time.monotonic()
        waits = 0 < rows < self._rows_min and now_s - self._last_batch_s < self._delay_s
        if rows and not waits:
            self._last_batch_s = now_s
        return waits

    def take(self, start: dict[str, Any], end: dict[str, Any]) -> list[Taken]:
        """Returns the ranges of the batch that ends at `end`. In at-most-once mode a replayed one is empty, because it
        may have been read, and the loss is noted."""
        taken = self.query.batches.delivered_ranges(end)
        if taken is None:
            planned = self.planned.pop(key_of(end), None)
            if self.ranges.at_most_once:
                taken = self.query.take(end, planned)
            else:
                self.settle()
                self.query.commit(start)
                taken = self.query.replay(end)
            if not taken:
                logger.warning(
                    "group %s: batch %d is empty; %d ranges were planned for it",
                    self.planner.group,
                    end["b"],
                    len(end["r"]),
                )
        return taken

    def report(self) -> dict[str, Any]:
        """Returns the figures for Spark's progress, posted after the batch just planned. `commits`: the socket's
        address."""
        info = self.planner.cached_info()
        positions = {tp: max(claim.position, self._planned_to.get(tp, 0)) for tp, claim in sorted(info.claims.items())}
        lags = {
            tp: claim.lag if claim.lag < 0 else max(0, claim.lag + claim.position - positions[tp])
            for tp, claim in info.claims.items()
        }
        return {
            "group": info.group,
            "claims": len(info.claims),
            "lag": info.lag if info.lag < 0 else sum(max(0, lag) for lag in lags.values()),
            "paused": info.paused,
            "commits": None if self._commits is None else self._commits.address,
            "partitions": {str(tp): {"position": at, "lag": lags[tp]} for tp, at in positions.items()},
        }

    def close(self) -> None:
        """Releases every claim at its position, and leaves the group."""
        if self._commits is not None:
            self._commits.close()
        self.planner.stop(RELEASE_S)
        self.marshal.close(RELEASE_S)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The object that Spark calls. Only the one in the query's own process has a member."""

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self._member: QueryMember | None = None
        self._earlier: MicroBatches | None = None
        self._available_now = False
        self._targets: dict[TopicPartition, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_member": None, "_earlier": None, "_available_now": False, "_targets": None}

    def _joined(self) -> QueryMember:
        """Returns this process's member. Joins the group if there is none, or if the last one was overdue."""
        if self._member is not None:
            try:
                self._member.ranges.alive()
            except BatchOverdue as error:
                logger.warning("%s", error)
                self._leave()
        if self._member is None:
            _stop_on_sigterm()
            self._member = QueryMember(self.options, self._earlier)
        return self._member

    def _rejoined(self) -> QueryMember:
        """Returns a new member, with the topics of now: a member's never change. Only between batches."""
        self._leave()
        member = self._joined()
        member.settle()
        return member

    def _leave(self) -> None:
        """Leaves the group. The process continues, and so do the batches that were handed to Spark."""
        member, self._member = self._member, None
        if member is not None:
            self._earlier = member.query.batches
            member.close()

    # --- Spark's calls

    def initialOffset(self) -> dict[str, Any]:
        return FIRST

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True  # claims nothing yet: the checkpoint may be another source's

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows_max = _rows(limit)
        _check_ours(start, start, self.options.group)
        try:
            member = self._joined()
            member.settle()  # first: acking Spark's last batch takes claims
            if member.stateful:
                member.query.check_alone()
            if key_of(start) == key_of(FIRST):
                member.notice_fresh_checkpoint()
            member.check_origin(start)
            member.query.commit(start)
            if self._available_now and self._targets is None:
                self._targets = member.ranges.ends()
            if not self._available_now and member.has_new_topics():
                member = self._rejoined()
            return member.plan(start, rows_max, self._targets)
        except ClusterUnreachable as error:
            if self._available_now or self._member is None:
                raise  # "nothing to do" would end the query as if it were complete
            self._member.ranges.note_unanswered(error)
            return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._member is None else self._member.report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if key_of(start) == key_of(end):
            return []
        _check_ours(start, start, self.options.group)
        _check_ours(end, start, self.options.group)
        member = self._joined()
        member.check_origin(end)
        pieces = pieces_of((taken.range for taken in member.take(start, end)), self.options.group)
        return partitions_of(pieces, self.options, once=self.options.at_most_once)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self._member is not None:
            self._member.query.commit(end)

    def stop(self) -> None:
        """Leaves the group for good. Called when the process ends, because Spark has stopped the query or is gone."""
        member, self._member = self._member, None
        if member is not None:
            member.query.note_uncommitted()
            member.close()


def _check_ours(offset: dict[str, Any], committed: dict[str, Any], group: str) -> None:
    """Raises InvalidOption for another source's or group's offset, which Spark does not check."""
    if not isinstance(offset.get("b"), int):
        rule = f"the folder holds the checkpoint of another source: use a new folder{_FROM_KAFKA}"
        raise InvalidOption("checkpointLocation", json.dumps(committed), rule)
    other = group_of(offset)
    if other != group and offset != FIRST:
        owner, way = ("no group that it names", "") if other is None else (f"group {other!r}", f"; or group={other!r}")
        rule = (
            f"the checkpoint folder is that of {owner}, and what it says of batches counts in its group alone: take "
            f"another checkpointLocation, and the query begins where group {group!r} is{way}"
        )
        raise InvalidOption("group", group, rule)


def _connected(options: StreamOptions) -> Marshal:
    with named_as_written(options.kafka):
        return connect(
            options.kafka,
            client_id=options.client_id,
            timeout_s=options.connect_timeout_s,
            coordination_topic=options.coordination_topic,
            coordination_partitions=options.coordination_partitions,
            last_will=last_wills.of_program(options.kafka),
        )


def _rows(limit: ReadLimit) -> int | None:
    match limit:
        case ReadMaxRows():
            return limit.max_rows
        case ReadAllAvailable():
            return None
    raise InvalidOption("limit", type(limit).__name__, "this source limits a batch by rows: use max_rows_per_batch")


def _stop_on_sigterm() -> None:
    """Has SIGTERM call `stop`, which Spark does not, so that nobody must evict this member. Spark sends it twice: the
    second must not interrupt the release."""

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gc.freeze()  # Python collects garbage several times as it ends; over Spark's modules that takes 0.1 s and more
        raise SystemExit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
