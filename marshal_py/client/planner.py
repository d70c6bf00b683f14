"""A consumer that fetches nothing: it plans ranges of offsets, which other readers (Spark's executors) read.

    planner = marshal.planner("billing", ["orders"])
    with planner.batch(1_000_000) as batch:
        read(batch.ranges)          # somewhere else
        batch.commit()

It joins, heartbeats, claims and releases like any other consumer. `plan` finds the next ranges. `take` delivers those
that `Member.may_deliver` allows (D8); in at-most-once mode it waits before that until the log has granted them.
`finish` acks them. One thread at a time may call a planner; any thread may call `commit_reported`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from marshal_py.client import membership
from marshal_py.client.connection import Change, Context, Repeats, Steps
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import LEAVE_TIMEOUT_S, WAIT_SLICE_S, Ending, Membership
from marshal_py.client.messages.answers import Acked
from marshal_py.client.ranges import ClaimedRange, End, MicroBatches, Ranges, Taken, share
from marshal_py.client.values import position_text
from marshal_py.errors import BatchRefused, ClaimLost, ClusterUnreachable, InvalidOption, MembersAlive, PartitionsUnread
from marshal_py.protocol.member.advisory import UNCOMMITTED
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, Token, TopicPartition

# Heartbeat intervals: two until a dead owner's lease has ended; the rest for claims and a slow broker.
SETTLE_INTERVALS: Final = 4.0
SHARED: Final = (
    "this query has state that needs all messages (stateful=true), and other members get part of them; give each such "
    "query a group of its own, or stop the other members and start this query again"
)
GRANT_INTERVALS: Final = 1.0  # heartbeat intervals to wait for a grant, which takes one round trip of the log
LOOK_S: Final = 0.25  # seconds between two questions to the cluster for new data; each costs two requests


class ClaimedBatch:
    """Ranges of offsets that the planner delivered together.

    It is a context manager: leaving it without `commit` has the ranges planned again; in at-most-once mode they are
    lost.
    """

    def __init__(self, planner: Planner, taken: Sequence[Taken]) -> None:
        self._planner = planner
        self.taken: tuple[Taken, ...] = tuple(taken)
        self.open: bool = True

    @property
    def ranges(self) -> tuple[ClaimedRange, ...]:
        return tuple(taken.range for taken in self.taken)

    @property
    def tokens(self) -> dict[TopicPartition, Token]:
        """Returns the fencing token of each partition (PROTOCOL.md K1)."""
        return {taken.range.tp: taken.range.token for taken in self.taken}

    @property
    def token(self) -> Token:
        """Returns the greatest of `tokens`.

        It is greater than the token of any batch in which an earlier owner had one of these partitions.
        """
        return max(taken.range.token for taken in self.taken)

    @property
    def offsets(self) -> int:
        """Returns how many offsets the ranges span; there are fewer messages where the log has gaps."""
        return sum(taken.range.to - taken.range.start for taken in self.taken)

    def __bool__(self) -> bool:
        return bool(self.taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_back()

    def check(self) -> None:
        """Raises ClaimLost if one of the batch's claims is not held any more. Call it just before a write."""
        self._planner.ranges.check(self.taken)

    def in_progress(self) -> None:
        """Says that the batch is still being worked on: `handler_timeout_s` starts again."""
        self._planner.ranges.touch(self.taken)

    def commit(self) -> None:
        """Marks the batch as done, and returns once the log has accepted the positions. A second call does nothing.

        Raises ClaimLost if some claims were released or lost before; the positions of the others are accepted all the
        same. Raises AckNotConfirmed if no answer comes; the positions are still sent until one does.
        """
        if self.open:
            self.open = False
            self._planner.ranges.finish(self.taken)

    def give_back(self) -> None:
        """Gives the batch up: its ranges are planned again; in at-most-once mode they are lost."""
        if self.open:
            self.open = False
            self._planner.ranges.give_back(self.taken)


class Planner(Membership):
    """Plans ranges of offsets for other readers, as a member of a group. `Marshal.planner` makes one.

    `ranges`: the steps that `batch` is made of, for the sources of this library.
    """

    def __init__(self, context: Context, driver: ConsumerDriver, connection: Mapping[str, Any], ending: Ending) -> None:
        super().__init__(context, driver, connection, ending)
        self.ranges: RangePlanner = RangePlanner(self)
        self._batch: ClaimedBatch | None = None

    @property
    def group(self) -> str:
        return self._member.name

    def _confirm(self, ack: Callable[[], list[Acked]]) -> None:
        """Calls `ack`, and returns once the log has accepted the positions."""
        self._pass("flush")
        self._context.complete(self._confirmed(self._confirmations.accepted(ack, LEAVE_TIMEOUT_S)))

    def _flushing(self) -> Steps[None]:
        """Does what `flush` does, in steps."""
        self._pass("flush")
        yield from self._flush(LEAVE_TIMEOUT_S)

    # --- batches

    def batch(
        self, rows_max: int, wait_s: float | None = None, up_to: Mapping[TopicPartition, int] | None = None
    ) -> ClaimedBatch:
        """Waits for data, and returns the next batch of at most `rows_max` offsets.

        `up_to`: the offset before which the batch ends in each partition. The wait takes at most `wait_s` seconds;
        None: until the consumer stops. The batch is empty (and false) if no data came or the consumer is stopping. A
        cluster that does not answer is asked again while there is time to wait. Raises BatchRefused if the last
        batch was neither committed nor given back, and what `plan` raises.
        """
        if rows_max < 1:
            raise InvalidOption("max_rows", rows_max, "at least 1")
        if self._batch is not None and self._batch.open:
            raise BatchRefused(f"the last batch of {self._batch.offsets} offsets")
        deadline = None if wait_s is None else self._context.monotonic() + wait_s
        while not self._ending.stopping:
            try:
                taken = self.ranges.take(self.ranges.plan(rows_max, up_to))
            except ClusterUnreachable as error:
                if deadline is not None and self._context.monotonic() >= deadline:
                    raise
                self.ranges.note_unanswered(error)
                taken = []
            if taken:
                self._batch = ClaimedBatch(self, taken)
                return self._batch
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - self._context.monotonic())
            if left_s <= 0:
                break
            with self._context.outbox, self._context.lock:
                self._context.changed.wait(left_s)
        if self._ending.over:
            self._ending.raise_if_ended()
        return ClaimedBatch(self, ())


class RangePlanner:
    """Looks what a planner's claims could deliver, delivers it, and acks it. Its calls are the planner's calls."""

    def __init__(self, planner: Planner) -> None:
        driver = planner._driver
        assert isinstance(driver.queue, Ranges)
        self._planner, self._context, self._driver = planner, planner._context, driver
        self._member, self._ending = planner._member, planner._ending
        self._ranges, self._source = driver.queue, driver.queue.source
        self._repeats = Repeats()
        stable = planner.connection.get("isolation.level", "read_committed")
        self._committed_ends = stable == "read_committed"

    @property
    def stopping(self) -> bool:
        """Returns whether the consumer has ended, is draining, or was asked to stop."""
        return self._ending.stopping

    @property
    def at_most_once(self) -> bool:
        return self._driver.options.delivery == "at_most_once"

    @property
    def incarnation(self) -> bytes:
        return self._driver.incarnation

    def alive(self) -> None:
        """Notes that the user has called, so somebody still reads (D9). Raises the error that ended the consumer."""
        self._context.check_call("Consumer", "plan", waits=True)
        self._ending.raise_if_ended()
        self._ranges.called()

    # --- looking

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until no further partitions are to be expected soon (`Ranges.settled`); False after `timeout_s` (four
        heartbeat intervals), or at a stop."""
        return self._context.complete(self.settling(timeout_s))

    def settling(self, timeout_s: float | None = None) -> Steps[bool]:
        """Does what `settle` does, in steps."""
        intervals_s = self._driver.options.heartbeat_interval_s * SETTLE_INTERVALS
        deadline = self._context.monotonic() + (intervals_s if timeout_s is None else timeout_s)
        while True:
            self.alive()
            with self._context.outbox, self._context.lock:
                if self._ranges.settled():
                    return True
                left_s = deadline - self._context.monotonic()
                if left_s <= 0 or self.stopping:
                    return False
                seen = self._context.changes
            yield Change(min(WAIT_SLICE_S, left_s), seen)

    def resumed(self) -> bool:
        """Returns whether a claim continues an earlier owner's work, above position 0."""
        with self._context.outbox, self._context.lock:
            group = self._member.group
            parts = [] if group is None else [group.partitions[tp] for tp in self._ranges.claims]
            return any(part.last_owner != NONE and part.position > 0 for part in parts)

    def deleted_at(self) -> int:
        """Returns the offset of the group's last deletion, after which it was created again; NONE if there was none."""
        with self._context.lock:
            group = self._member.group
            return NONE if group is None else group.deleted_at

    def others(self) -> dict[str, bool]:
        """Returns the other live members by client id; True: proven to have been there before. One that is silent since
        this joined may be dead."""
        with self._context.outbox, self._context.lock:
            group, own = self._member.group, self._member.session
            found = [] if group is None else [one for one in group.sessions.values() if one.id != own]
            return {one.join.client_id: one.id < own <= one.extended for one in found}

    def check_alone(self) -> None:
        """Returns once this is the only member; others have four heartbeat intervals, unless they were there before.
        Raises MembersAlive."""
        deadline = self._context.monotonic() + self._driver.options.heartbeat_interval_s * SETTLE_INTERVALS
        while others := self.others():
            self.alive()
            left_s = deadline - self._context.monotonic()
            if any(others.values()) or left_s <= 0:
                raise MembersAlive(self._planner.group, SHARED, tuple(sorted(others)))
            with self._context.outbox, self._context.lock:
                self._context.changed.wait(min(WAIT_SLICE_S, left_s))

    def check_read(self, ends: Mapping[TopicPartition, int]) -> None:
        """Raises PartitionsParked or PartitionsUnread if nobody reads something that lies before `ends`."""
        with self._context.lock:
            membership.check_read(self._driver, ends)

    def _partitions(self) -> list[TopicPartition]:
        """Returns all partitions of this consumer's topics, claimed or not."""
        counts = {topic: self._context.admin.partition_count(topic) or 0 for topic in self._member.options.topics}
        return [TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)]

    def ends_at(self, until: str) -> dict[TopicPartition, int]:
        """Returns the offset of `until` (a `start`, not `committed`) in each partition. Raises as `offsets` does."""
        return position_text.offsets(
            until, "until", self._partitions(), self._context.admin, committed=self._committed_ends
        )

    def ends(self) -> dict[TopicPartition, int]:
        """Returns the end offset of every partition of this consumer's topics, claimed or not."""
        return self.ends_at(position_text.LATEST)

    def plan(self, rows_max: int | None, up_to: Mapping[TopicPartition, int] | None = None) -> list[ClaimedRange]:
        """Returns the next range of each claim that may deliver and has no range in flight. May be empty.

        All ranges together have at most `rows_max` offsets. `up_to`: the offset before which each partition's range
        ends; partitions that it does not name get no range, nor do those of a topic that is gone. A partition whose
        position lies beyond its end is parked: no member may consume it until an admin has moved the position
        (PROTOCOL.md D6). The method delivers nothing.
        Raises ClusterUnreachable, and the error that ended the consumer.
        """
        self.alive()
        with self._context.lock:
            absent = self._driver.topic_watch.absent
            tps = [tp for tp in self._ranges.claims if tp.topic not in absent]
        if not tps:
            return []
        bounds = self._context.admin.bounds(tps, committed=self._committed_ends)
        with self._context.lock:
            beyond = self._ranges.beyond(bounds)
        if beyond:
            self._park_beyond([tp for tp, _, _ in beyond])
        with self._context.outbox, self._context.lock:
            self._source.ends.update((tp, bounds[tp].end) for tp in tps)
            found = self._ranges.available(bounds)
            if up_to is not None:
                found = {tp: (start, min(end, up_to.get(tp, 0))) for tp, (start, end) in found.items()}
            counts = {tp: end - start for tp, (start, end) in found.items() if start < end}
            shares = counts if rows_max is None else share(counts, rows_max)
            return [self._ranges.range_of(tp, found[tp][0], found[tp][0] + count) for tp, count in shares.items()]

    def note_unanswered(self, error: ClusterUnreachable) -> None:
        """Logs that `plan` failed and is tried again, once a minute per cause; looks whether a topic is gone."""
        self._driver.look_at_topics()
        if self._repeats.due(str(error)):
            self._context.logger.warning("%s; trying again", error)

    def _park_beyond(self, tps: list[TopicPartition]) -> None:
        """Parks those of `tps` beyond the partition's real end (D6), after open transactions. `plan` sees the committed
        end, and a group that began at the real one must not be parked."""
        bounds = self._context.admin.bounds(tps)
        with self._context.outbox, self._context.lock:
            beyond = self._ranges.beyond(bounds)
            for tp, position, end in beyond:
                self._driver.park(tp, records.BEYOND_END, records.beyond_end(position, end))

    # --- delivering

    def take(self, wanted: Sequence[ClaimedRange]) -> list[Taken]:
        """Delivers and returns those of the ranges that may be delivered now; `plan` finds the others again."""
        self.alive()
        if self.at_most_once:
            self._await_grants(wanted)
        with self._context.outbox, self._context.lock:
            now = self._context.clock.now()
            try:
                return [taken for one in wanted if (taken := self._ranges.take(one, now)) is not None]
            finally:
                self._ranges.clear_requests()

    def _await_grants(self, wanted: Sequence[ClaimedRange]) -> None:
        deadline = self._context.monotonic() + self._driver.options.heartbeat_interval_s * GRANT_INTERVALS
        with self._context.outbox, self._context.lock:
            for one in wanted:
                self._ranges.request_grant(one)
            while self._ranges.waits_for_grant() and self._context.monotonic() < deadline and not self._driver.ended:
                self._driver.ask_grants(self._context.clock.now())
                self._context.changed.wait(WAIT_SLICE_S)

    # --- finishing

    def check(self, taken: Iterable[Taken]) -> None:
        """Raises ClaimLost if a claim of these ranges was released or lost, or if the lease has ended."""
        self.alive()
        with self._context.lock:
            now, member = self._context.clock.now(), self._member
            valid = member.lease_left_ms(now) >= 0
            lost = [one.range.tp for one in taken if one.claim.sealed or not valid]
        if lost:
            raise ClaimLost(self._planner.group, tuple(map(str, lost)))

    def touch(self, taken: Iterable[Taken]) -> None:
        self.alive()
        with self._context.lock:
            now = self._context.clock.now()
            for one in taken:
                self._ranges.touch(one, now)

    def finish(self, taken: Iterable[Taken]) -> None:
        """Acks the ranges and waits for the log, except in at-most-once mode, where grants have moved the positions.
        Raises ClaimLost, AckNotConfirmed."""

        def ack() -> list[Acked]:
            with self._context.outbox, self._context.lock:
                return [
                    Acked(one.claim, [(one.range.start, one.range.to)], late=not self._ranges.finish(one))
                    for one in taken
                ]

        self.alive()
        self._planner._confirm(ack)

    def give_back(self, taken: Iterable[Taken]) -> None:
        with self._context.outbox, self._context.lock:
            for one in taken:
                self._ranges.give_back(one)

    def called(self) -> None:
        """Notes that somebody still reads. With the Marshal's lock held."""
        self._ranges.called()

    def micro_batches(self, before: MicroBatches | None) -> MicroBatches:
        """Returns the batches of a streaming query, which go on from those of its earlier member in this process."""
        return MicroBatches(self._member, self._ranges, self.incarnation, before)


class QueryPlanner:
    """Plans the micro-batches of a streaming query (ranges.py), which keeps their ends in its checkpoint."""

    batches: MicroBatches

    def __init__(self, planner: Planner, before: MicroBatches | None = None) -> None:
        """`before`: the batches of the query's earlier member in this process."""
        self._planner, self._ranges = planner, planner.ranges
        self._context, self._driver, self._member = planner._context, planner._driver, planner._member
        self.batches = planner.ranges.micro_batches(before)

    def commit(self, end: End) -> None:
        """Moves positions past the committed batch that ends at `end`, and waits for the log. After a lost claim they
        move with the next one (`MicroBatches.settle_proven`). Raises AckNotConfirmed; they are still sent."""
        self._context.complete(self.committing(end))

    def committing(self, end: End) -> Steps[None]:
        """Does what `commit` does, in steps."""
        with self._context.outbox, self._context.lock:
            moved = self.batches.commit(end, self._context.clock.now())
        self._ranges.alive()
        if moved and not self._ranges.at_most_once:
            with contextlib.suppress(ClaimLost):
                yield from self._planner._flushing()

    def commit_reported(self, digest: str) -> None:
        """As `commit`, for a listener's early report of the `digest` of the end; any thread, also twice, without a
        wait."""
        with self._context.outbox, self._context.lock:
            if self.batches.commit_reported(digest, self._context.clock.now()):
                self._ranges.called()
                self._member.urgent = True
                self._driver.kick()

    def plan(self, start: End, available: Sequence[ClaimedRange]) -> End:
        """Returns the end of the batch after `start`, or `start` if nothing is to be read. In at-least-once mode it
        delivers the ranges."""
        self._ranges.alive()
        with self._context.outbox, self._context.lock:
            return self.batches.plan(start, available, self._context.clock.now())

    def take(self, end: End, wanted: Sequence[ClaimedRange] | None) -> list[Taken]:
        """In at-most-once mode: delivers what the log grants of the batch that ends at `end`. `wanted` None: an earlier
        consumer planned it, whose tasks may have read it, so nothing is delivered and the loss is noted."""
        if wanted is None:
            self._ranges.settle()
        taken = self._ranges.take(wanted or [])
        with self._context.outbox, self._context.lock:
            if wanted is None:
                self._note(self.batches.lost_with(end))
            self.batches.deliver(end, taken)
        return taken

    def note_uncommitted(self) -> None:
        """At the end of this process, in at-most-once mode: notes delivered and uncommitted ranges as lost."""
        if self._ranges.at_most_once:
            with self._context.outbox, self._context.lock:
                self._note(self.batches.uncommitted())

    def _note(self, lost: Sequence[tuple[TopicPartition, int, int]]) -> None:
        for tp, start, to in lost:
            self._member.note(UNCOMMITTED, tp, start, to)

    def replay(self, end: End) -> list[Taken]:
        """Delivers what this consumer must read of an earlier one's batch, when that is known; in a pause it waits
        without limit. Raises PartitionsUnread after four heartbeat intervals."""
        return self._context.complete(self.replaying(end))

    def replaying(self, end: End) -> Steps[list[Taken]]:
        """Does what `replay` does, in steps."""
        wait_s = self._driver.options.heartbeat_interval_s * SETTLE_INTERVALS
        deadline, said = self._context.monotonic() + wait_s, ""
        self._ranges.plan(None)  # skips what retention has deleted since (D6)
        while True:
            self._ranges.alive()
            with self._context.outbox, self._context.lock:
                replay = self.batches.replay(end, self._context.clock.now())
                if not replay.waits:
                    break
                if self._member.paused:
                    deadline = self._context.monotonic() + wait_s
                elif self._context.monotonic() >= deadline:
                    raise PartitionsUnread(self._planner.group, _named(replay.waits), planned=True)
                seen = self._context.changes
            if _in_words(replay.waits) != said:
                said = _in_words(replay.waits)
                group = self._planner.group
                self._context.logger.info("group %s: a batch that was planned before waits: %s", group, said)
            yield Change(WAIT_SLICE_S, seen)
        if replay.left_out:
            self._context.logger.warning(
                "group %s: of a batch that was planned before, %d of %d ranges are not read here: %s",
                self._planner.group,
                len(replay.left_out),
                len(replay.left_out) + len(replay.taken),
                _in_words(replay.left_out),
            )
        return replay.taken


def _named(reasons: Mapping[TopicPartition, str]) -> dict[str, str]:
    return {str(tp): reason for tp, reason in sorted(reasons.items())}


def _in_words(reasons: Mapping[TopicPartition, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in _named(reasons).items())
