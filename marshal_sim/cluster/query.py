"""A streaming query as a simulated process: the shipped Planner, called in Spark's order, under every fault.

For one trigger, Spark calls `latestOffset`, writes its write-ahead log, calls `commit` for the batch before and
`partitions`, runs tasks and sink, and writes its commit log. The process may be killed or frozen between any two of
these steps; the checkpoint outlives it. A trigger may come so late that the member has left the group (`BatchOverdue`);
then the same query continues with a new member. Half of the drivers have a listener, which reports a commit to the
process some time later, maybe between the calls of a later trigger.

A message counts as handed over when its batch reaches the tasks. It counts as finished, and can be acked, when the sink
has written it and Spark has said so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from marshal_py.client.connection import Steps
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.planner import Planner, RangePlanner
from marshal_py.client.ranges import Ranges, Taken
from marshal_py.errors import BatchOverdue, ClusterUnreachable, MarshalError
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.spark.stream.micro_batches import FIRST, End, MicroBatches, QueryPlanner, digest_of, key_of
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.judge.evidence import Delivery

ASKS = 8  # how often per interval a waiting call is repeated
CALL_MS = 5  # the longest time between two of Spark's calls
BUSY = 0.1  # how often that time may be up to an interval instead
ROWS_MAX = 12  # rows per batch: few, so that a claim takes several batches
LISTENS = 0.5  # the share of drivers that have a listener
LATE = 0.2  # the share of reports for which a listener takes up to two intervals
TRIGGER_INTERVALS = (0.0, 0.0, 0.5, 2.0, 8.0)  # the last is beyond every handler timeout of a run


class Checkpoint:
    """Stands for the checkpoint that Spark keeps of a query: the planned end offsets, and the number of committed
    batches.
    """

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.commits = 0
        # For the auditor: what the sink has, by end offset; and messages of committed batches that are not acked yet.
        self.written: dict[str, list[Delivery]] = {}
        self.unacked: list[Delivery] = []

    def end(self, batch: int) -> End:
        """Returns the end offset of a batch by its number. For -1, which is before the first batch, it returns
        FIRST.
        """
        found: End = json.loads(self.ends[batch]) if batch >= 0 else FIRST
        return found

    @property
    def start(self) -> End:
        return self.end(self.commits - 1)


class Query(Client):
    """Simulates a streaming query: Spark's driver and the process of its source, which die together."""

    plans = True

    def __init__(
        self,
        environment: ClientEnvironment,
        number: int,
        group: str,
        options: MemberOptions,
        clock: MachineClock,
        checkpoint: Checkpoint,
        before: MicroBatches | None = None,
    ) -> None:
        """Starts a query from its checkpoint. `before` has the batches of this process's former member, if there was
        one.
        """
        super().__init__(environment, number, group, options, clock, 1)
        self.checkpoint = checkpoint
        self.killed: bool = False  # Spark is gone too
        self.before = before
        self._ready = self._settled = False  # it has joined; its first claims have come
        self._trigger_ms = 0
        # Of the newest plan: when, how much of the log had been read, and as which instance.
        self._gate = (0, 0, b"")
        self._ask_ms = max(1, options.interval_ms // ASKS)
        self._listens = environment.rng.random() < LISTENS
        self._trigger_intervals = TRIGGER_INTERVALS[int(environment.rng.random() * len(TRIGGER_INTERVALS))]

    # --- the member's side

    def _join(self, member: Member) -> ConsumerDriver:
        driver = super()._join(member)
        planner = Planner(self.context, driver, {}, self.ending)
        self.ranges: RangePlanner = planner.ranges
        self.query: QueryPlanner = QueryPlanner(planner, self.before)
        assert isinstance(driver.queue, Ranges)
        self.query.batches = _Batches(driver.queue, self.ranges.incarnation, self.before, self._acked)
        return driver

    @property
    def batches(self) -> MicroBatches:
        return self.query.batches

    @property
    def overdue(self) -> bool:
        """Returns whether the member has left its group because the query did not call in time."""
        return self.driver is not None and isinstance(self.driver.error, BatchOverdue)

    def _reason(self) -> MarshalError | None:
        return None if self.overdue else super()._reason()

    def leave(self, wait_ms: int) -> None:
        """Stops the query for good."""
        self.killed = True
        super().leave(0)

    # --- Spark's side

    def start(self, _: None = None) -> None:
        super().start()
        self.environment.evidence.queries[self.number] = self.options.client_id
        replays = len(self.checkpoint.ends) > self.checkpoint.commits
        self._ask(self._partitions if replays else self._latest_offset)

    def _ask(self, step: Any, argument: Any = None) -> None:
        """Schedules the next of Spark's calls into this process. The call waits while the process is stopped."""
        rng = self.environment.rng
        most_ms = CALL_MS if rng.random() > BUSY or self.environment.healed else self.options.interval_ms
        delay_ms = 1 + int(rng.random() * most_ms)
        self.environment.schedule(delay_ms, self, step, argument)

    def _joined(self) -> bool:
        """Returns whether the member has joined. From then on the query makes its calls whatever becomes of it."""
        member = self.member
        self._ready = self._ready or (member is not None and member.session >= 0 and member.group is not None)
        return self._ready

    def _call(self, waits: Any, steps: Steps[Any], ended: Callable[[Any], None]) -> None:
        """Makes one of Spark's calls. `waits`: the step that makes it again if the cluster does not answer."""

        def over(result: Any, error: MarshalError | None) -> None:
            if error is None:
                ended(result)
            elif not self.killed and not self.overdue:
                self._failed(waits, error)
            elif not self.killed:
                self.environment.schedule(self._ask_ms, None, self._trigger)

        self.front.begin(steps, over)
        self.ran()

    def _failed(self, waits: Any, error: MarshalError) -> None:
        """Ends the query with the error of a call, unless its consumer has ended. Then its operator starts it again."""
        if waits is not None and isinstance(error, ClusterUnreachable):
            self.environment.schedule(self._ask_ms, self, waits)
        elif not self.dead and not self.ending.over:
            self.killed = self.dead = True
            self.environment.schedule(self.options.interval_ms, None, self._revive)

    def _latest_offset(self, _: None) -> None:
        if not self._joined():
            self.environment.schedule(self._ask_ms, self, self._latest_offset)
        else:
            self._call(self._latest_offset, self._next_end(self.checkpoint.start), self._latest)

    def _next_end(self, start: End) -> Steps[End]:
        """Answers Spark's `latestOffset`: acks the batch before, and plans the next one."""
        yield from self._settle()
        yield from self.query.committing(start)
        # What has piled up must be read in time (V3).
        ranges = self.ranges.plan(None if self.environment.healed else ROWS_MAX)
        self._pass_gate()
        return self.query.plan(start, ranges)

    def _settle(self) -> Steps[None]:
        if not self._settled:
            yield from self.ranges.settling()
            self._settled = True

    def _latest(self, end: End) -> None:
        if key_of(end) == key_of(self.checkpoint.start):
            self._next_trigger()
        else:
            self._ask(self._write_ahead, key_of(end))

    def _pass_gate(self) -> None:
        assert self.member is not None
        self._gate = (self.environment.now_ms, self.world.next_offset, self.member.newest_instance)

    def _commit_heard(self, end: str) -> None:
        """Takes a listener's report of a commit. A commit that this process does not know is ignored."""
        if self._ready:
            self.query.commit_reported(digest_of(json.loads(end)))
            self.ran()

    def _acked(self, end: End) -> None:
        """Notes what is finished. A message is when its ack counts: if that came too late for a Release, one of them is
        repeated.
        """
        member = self.member
        assert member is not None
        positions = {claim.tp: claim.position() for claim in member.claims.values() if not claim.sealed}
        unacked = [*self.checkpoint.unacked, *self.checkpoint.written.pop(key_of(end), ())]
        self.checkpoint.unacked = []
        for delivery in unacked:
            if positions.get(TopicPartition(delivery.topic, delivery.partition), 0) > delivery.offset:
                delivery.finish(self.environment.now_ms)
            else:
                self.checkpoint.unacked.append(delivery)

    def _write_ahead(self, end: str) -> None:
        self.checkpoint.ends.append(end)
        self._ask(self._partitions)

    def _partitions(self, _: None) -> None:
        """Takes the ranges of the batch, which an earlier process may have planned."""
        if not self._joined():
            self.environment.schedule(self._ask_ms, self, self._partitions)
            return
        end = self.checkpoint.end(self.checkpoint.commits)
        self._call(None, self._taken(end), lambda taken: self._run(end, taken))

    def _taken(self, end: End) -> Steps[list[Taken]]:
        """Answers Spark's `commit` of the batch before, and `partitions`."""
        if self.checkpoint.commits:
            yield from self.query.committing(self.checkpoint.start)
        taken = self.batches.delivered_ranges(end)
        if taken is None:
            yield from self._settle()
            yield from self.query.committing(self.checkpoint.start)
            taken = yield from self.query.replaying(end)
            self._pass_gate()
        return taken

    def _run(self, end: End, taken: list[Taken]) -> None:
        """Runs the tasks, which read every message that exists in the ranges."""
        environment, (gate_ms, read_to, instance) = self.environment, self._gate
        deliveries = []
        for one in taken:
            tp = one.range.tp
            for offset in environment.broker.fetch(tp, one.range.start, one.range.to - one.range.start):
                if offset < one.range.to:
                    deliveries.append(
                        Delivery(
                            self.group,
                            self.number,
                            instance,
                            one.claim.epoch,
                            tp.topic,
                            tp.partition,
                            offset,
                            read_to,
                            gate_ms,
                            environment.now_ms,
                        )
                    )
        for delivery in deliveries:
            environment.delivered(delivery)
        longest_ms = self.options.handler_timeout_ms + self.options.interval_ms  # one that hangs outlasts the timeout
        duration_ms = sum(environment.handler_ms(one.range.tp) for one in taken)
        duration_ms = min(longest_ms, duration_ms if self.environment.healed else duration_ms * ROWS_MAX // 2)
        environment.schedule(1 + duration_ms, None, self._written, (key_of(end), deliveries))

    def _written(self, state: tuple[str, list[Delivery]]) -> None:
        """Notes that the sink has the batch. Executors go on when the source's process is stopped, but die with the
        driver.
        """
        if self.killed:
            return
        self.checkpoint.written[state[0]] = state[1]
        self.environment.schedule(1, None, self._committed_by_spark)

    def _committed_by_spark(self, _: None) -> None:
        if not self.killed:
            self.checkpoint.commits += 1
            if self._listens:
                rng = self.environment.rng
                most_ms = CALL_MS if rng.random() > LATE else 2 * self.options.interval_ms
                end = self.checkpoint.ends[self.checkpoint.commits - 1]
                self.environment.schedule(1 + int(rng.random() * most_ms), self, self._commit_heard, end)
            self._next_trigger()

    def _next_trigger(self) -> None:
        self._trigger_ms = self.environment.now_ms + int(self._trigger_intervals * self.options.interval_ms)
        self.environment.schedule(self._ask_ms, None, self._trigger)

    def _trigger(self, _: None) -> None:
        if self.killed:
            return
        if self.environment.now_ms < self._trigger_ms and not self.environment.healed:
            left_ms = self._trigger_ms - self.environment.now_ms
            self.environment.schedule(min(left_ms, self.options.interval_ms), None, self._trigger)
            return
        if self.dead and self.overdue:
            self._revive(None)
        elif self.overdue:
            self.environment.schedule(self._ask_ms, None, self._trigger)  # its member is on its way out
        else:
            self._ask(self._latest_offset)

    def _revive(self, _: None) -> None:
        self.environment.revive(self)


class _Batches(MicroBatches):
    """Tells the journal of each commit of the query."""

    def __init__(
        self, ranges: Ranges, incarnation: bytes, before: MicroBatches | None, acked: Callable[[End], None]
    ) -> None:
        super().__init__(ranges.member, ranges, incarnation, before)
        self._tell = acked

    def commit(self, end: End, now: Instant) -> bool:
        moved = super().commit(end, now)
        self._tell(end)
        return moved
