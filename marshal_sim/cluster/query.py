"""A streaming query as a simulated process: the shipped MicroBatches, called in Spark's order, under every fault.

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
from typing import Any

from marshal_py.client.ranges.microbatches import FIRST, End, MicroBatches, digest_of, key_of
from marshal_py.client.ranges.ranges import PlannedClaims, Ranges, Taken, share
from marshal_py.errors import BatchOverdue, MarshalError
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import Bounds
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.judge.evidence import Delivery

ASKS = 8  # how often per interval a waiting call is repeated
CALL_MS = 5  # the longest time between two of Spark's calls
BUSY = 0.1  # how often that time may be up to an interval instead
ROWS_MAX = 12  # rows per batch: few, so that a claim takes several batches
SETTLE_INTERVALS = 4  # as in client/planner.py
UNCLAIMED_INTERVALS = 4
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
        self._batches: MicroBatches | None = None
        self._since_ms = environment.now_ms  # when the call that is repeated now was first made
        self._trigger_ms = 0
        # Of the newest plan: when, how much of the log had been read, and as which instance.
        self._gate = (0, 0, b"")
        self._ask_ms = max(1, options.interval_ms // ASKS)
        self._listens = environment.rng.random() < LISTENS
        self._trigger_intervals = TRIGGER_INTERVALS[int(environment.rng.random() * len(TRIGGER_INTERVALS))]

    # --- the member's side

    @property
    def ranges(self) -> Ranges:
        assert self.driver is not None
        assert isinstance(self.driver.queue, Ranges)
        return self.driver.queue

    @property
    def batches(self) -> MicroBatches:
        if self._batches is None:
            ranges = self.ranges
            self._batches = MicroBatches(ranges.member, ranges, ranges.incarnation, self.before)
        return self._batches

    @property
    def overdue(self) -> bool:
        """Tells whether the member has left its group because the query did not call in time."""
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
        self.environment.evidence.queries.add(self.number)
        replays = len(self.checkpoint.ends) > self.checkpoint.commits
        self._ask(self._partitions if replays else self._latest_offset)

    def _ask(self, step: Any, argument: Any = None) -> None:
        """Schedules the next of Spark's calls into this process. The call waits while the process is stopped."""
        rng = self.environment.rng
        most_ms = CALL_MS if rng.random() > BUSY or self.environment.healed else self.options.interval_ms
        delay_ms = 1 + int(rng.random() * most_ms)
        self._since_ms = self.environment.now_ms + delay_ms
        self.environment.schedule(delay_ms, self, step, argument)

    def _retry(self, step: Any, intervals: int) -> bool:
        """Schedules the same call again; returns False if it has been repeated for `intervals` intervals."""
        self._called()
        if self.environment.now_ms - self._since_ms >= intervals * self.options.interval_ms:
            return False
        self.environment.schedule(self._ask_ms, self, step)
        return True

    def _called(self) -> None:
        if self.driver is not None:
            assert isinstance(self.driver.claims, PlannedClaims)
            self.driver.claims.called()

    def _joined(self) -> bool:
        member = self.member
        return member is not None and not self.detached and member.session >= 0 and member.group is not None

    def _latest_offset(self, _: None) -> None:
        self._called()
        if not self._joined():
            self.environment.schedule(self._ask_ms, self, self._latest_offset)
            return
        if not self.ranges.settled() and self._retry(self._latest_offset, SETTLE_INTERVALS):
            return
        now, start = self.now(), self.checkpoint.start
        self._committed(start)
        found = self._available()
        rows_max = 10**9 if self.environment.healed else ROWS_MAX  # what has piled up must be read in time (V3)
        shares = share({tp: end - first for tp, (first, end) in found.items()}, rows_max)
        wanted = [self.ranges.range_of(tp, found[tp][0], found[tp][0] + count) for tp, count in shares.items()]
        self._pass_gate()
        end = self.batches.plan(start, wanted, now)
        if key_of(end) == key_of(start):
            self._next_trigger()
        else:
            self._ask(self._write_ahead, key_of(end))

    def _available(self) -> dict[TopicPartition, tuple[int, int]]:
        """Returns the ranges that each claim could plan now, as Planner.plan does. A position beyond the end parks its
        partition: nobody may claim it (D6).
        """
        member, ranges, ends = self.member, self.ranges, self.environment.broker.ends
        assert member is not None
        bounds = {tp: Bounds(0, ends[tp]) for tp in ranges.claims}
        for tp, position, end in ranges.beyond(bounds):
            detail = records.beyond_end(position, end)
            member.park(ranges.claims[tp].claim.epoch, records.BEYOND_END, detail, self.now())
        return ranges.available(bounds)

    def _pass_gate(self) -> None:
        assert self.member is not None
        self._gate = (self.environment.now_ms, self.world.next_offset, self.member.newest_instance)

    def _commit_heard(self, end: str) -> None:
        """Takes a listener's report of a commit. A commit that this process does not know is ignored."""
        if self.member is None or self.detached:
            return
        known = end in self.batches.delivered
        moved = self.batches.commit_reported(digest_of(json.loads(end)), self.now())
        if known or moved:
            self._called()
            self._settled(end, moved)

    def _committed(self, start: End) -> None:
        self._settled(key_of(start), self.batches.commit(start, self.now()))

    def _settled(self, end: str, moved: bool) -> None:
        member = self.member
        assert member is not None
        assert self.driver is not None
        # A message is finished when its ack counts. If it came too late for a Release, ack or message is repeated.
        positions = {claim.tp: claim.position() for claim in member.claims.values() if not claim.sealed}
        unacked = [*self.checkpoint.unacked, *self.checkpoint.written.pop(end, ())]
        self.checkpoint.unacked = []
        for delivery in unacked:
            if positions.get(TopicPartition(delivery.topic, delivery.partition), 0) > delivery.offset:
                delivery.end_ms = self.environment.now_ms
            else:
                self.checkpoint.unacked.append(delivery)
        if moved:
            member.urgent = True
            self.driver.kick()
            self.ran()

    def _write_ahead(self, end: str) -> None:
        self.checkpoint.ends.append(end)
        self._ask(self._partitions)

    def _partitions(self, _: None) -> None:
        """Answers Spark's `partitions`: first commits the batch before, then takes the ranges of this one."""
        if not self._joined():
            self._called()
            self.environment.schedule(self._ask_ms, self, self._partitions)
            return
        self._called()
        checkpoint = self.checkpoint
        self._committed(checkpoint.start)
        if self.dead:
            return
        end = checkpoint.end(checkpoint.commits)
        taken = self.batches.delivered_ranges(end)
        if taken is None:
            self._available()
            self._pass_gate()
            replay = self.batches.replay(end, self.now())
            if replay.waits:
                paused = self.member is not None and self.member.paused
                if not self._retry(self._partitions, 10**6 if paused else UNCLAIMED_INTERVALS):
                    self._fail()
                return
            taken = replay.taken
        self._run(end, taken)

    def _fail(self) -> None:
        """Ends the query as PartitionsUnread does. An interval later its operator starts it again."""
        self.killed = self.dead = True
        self.environment.schedule(self.options.interval_ms, None, self._revive)

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
