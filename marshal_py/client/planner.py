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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

from marshal_py.client import membership
from marshal_py.client.connection import Change, Context, Repeats, Steps
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.membership import LEAVE_TIMEOUT_S, WAIT_SLICE_S, Ending, Membership
from marshal_py.client.messages.answers import Acked
from marshal_py.client.ranges import ClaimedRange, Ranges, Taken, share
from marshal_py.client.values import position_text
from marshal_py.client.values.requests import check_count, check_wait
from marshal_py.errors import BatchRefused, ClaimLost, ClusterUnreachable
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import Token, TopicPartition

# Heartbeat intervals: two until a dead owner's lease has ended; the rest for claims and a slow broker.
SETTLE_INTERVALS: Final = 4.0
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
        if taken:
            planner.ranges.batch = self

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

    def __exit__(self, *_: object) -> None:
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
        self.ranges: RangePlanner = RangePlanner(self, context, driver, ending)

    @property
    def group(self) -> str:
        return self._member.name

    def _confirm(self, ack: Callable[[], list[Acked]]) -> None:
        """Calls `ack`, and returns once the log has accepted the positions."""
        self._pass("flush")
        self._context.complete(self._confirmed(self._confirmations.accepted(ack, LEAVE_TIMEOUT_S)))

    def _flushing(self) -> Steps[None]:
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
        batch was neither committed nor given back, InvalidOption, and what `plan` raises.
        """
        check_count("rows_max", rows_max)
        wait_s = check_wait(wait_s, option="wait_s")
        return ClaimedBatch(self, self.ranges.await_batch(rows_max, wait_s, up_to))


class RangePlanner:
    """Looks what a planner's claims could deliver, delivers it, and acks it. Its calls are the planner's calls.

    `queue`: the claims and their ranges in flight. They are those of `member`, which `driver` drives.
    """

    def __init__(self, planner: Planner, context: Context, driver: ConsumerDriver, ending: Ending) -> None:
        assert isinstance(driver.queue, Ranges)
        self._planner, self.context, self.driver = planner, context, driver
        self.member, self._ending = driver.member, ending
        self.queue, self._source = driver.queue, driver.queue.source
        self._repeats = Repeats()
        self.batch: ClaimedBatch | None = None  # the newest
        stable = planner.connection.get("isolation.level", "read_committed")
        self._committed_ends = stable == "read_committed"

    @property
    def stopping(self) -> bool:
        """Returns whether the consumer has ended, is draining, or was asked to stop."""
        return self._ending.stopping

    @property
    def at_most_once(self) -> bool:
        return self.driver.options.delivery == "at_most_once"

    @property
    def incarnation(self) -> bytes:
        return self.driver.incarnation

    def alive(self) -> None:
        """Notes that the user has called, so somebody still reads (D9). Raises the error that ended the consumer."""
        self.context.check_call("Consumer", "plan", waits=True)
        self._ending.raise_if_ended()
        self.queue.called()

    # --- looking

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until no further partitions are to be expected soon (`Ranges.settled`); False after `timeout_s` (four
        heartbeat intervals), or at a stop."""
        return self.context.complete(self.settling(timeout_s))

    def settling(self, timeout_s: float | None = None) -> Steps[bool]:
        """Does what `settle` does, in steps."""
        intervals_s = self.driver.options.heartbeat_interval_s * SETTLE_INTERVALS
        deadline = self.context.monotonic() + (intervals_s if timeout_s is None else timeout_s)
        while True:
            self.alive()
            with self.context.outbox, self.context.lock:
                if self.queue.settled():
                    return True
                left_s = deadline - self.context.monotonic()
                if left_s <= 0 or self.stopping:
                    return False
                seen = self.context.changes
            yield Change(min(WAIT_SLICE_S, left_s), seen)

    def check_read(self, ends: Mapping[TopicPartition, int]) -> None:
        """Raises PartitionsParked or PartitionsUnread if nobody reads something that lies before `ends`."""
        with self.context.lock:
            membership.check_read(self.driver, ends)

    def _partitions(self) -> list[TopicPartition]:
        """Returns all partitions of this consumer's topics, claimed or not."""
        counts = {topic: self.context.admin.partition_count(topic) or 0 for topic in self.member.options.topics}
        return [TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)]

    def ends_at(self, until: str) -> dict[TopicPartition, int]:
        """Returns the offset of `until` (a `start`, not `committed`) in each partition. Raises as `offsets` does."""
        return position_text.offsets(
            until, "until", self._partitions(), self.context.admin, committed=self._committed_ends
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
        with self.context.lock:
            absent = self.driver.topic_watch.absent
            tps = [tp for tp in self.queue.claims if tp.topic not in absent]
        if not tps:
            return []
        bounds = self.context.admin.bounds(tps, committed=self._committed_ends)
        with self.context.lock:
            beyond = self.queue.beyond(bounds)
        if beyond:
            self._park_beyond([tp for tp, _, _ in beyond])
        with self.context.outbox, self.context.lock:
            self._source.ends.update((tp, bounds[tp].end) for tp in tps)
            found = self.queue.available(bounds)
            if up_to is not None:
                found = {tp: (start, min(end, up_to.get(tp, 0))) for tp, (start, end) in found.items()}
            counts = {tp: end - start for tp, (start, end) in found.items() if start < end}
            shares = counts if rows_max is None else share(counts, rows_max)
            return [self.queue.range_of(tp, found[tp][0], found[tp][0] + count) for tp, count in shares.items()]

    def note_unanswered(self, error: ClusterUnreachable) -> None:
        """Logs that `plan` failed and is tried again, once a minute per cause; looks whether a topic is gone."""
        self.driver.look_at_topics()
        if self._repeats.due(str(error)):
            self.context.logger.warning("%s; trying again", error)

    def _park_beyond(self, tps: list[TopicPartition]) -> None:
        """Parks those of `tps` beyond the partition's real end (D6), after open transactions. `plan` sees the committed
        end, and a group that began at the real one must not be parked."""
        bounds = self.context.admin.bounds(tps)
        with self.context.outbox, self.context.lock:
            beyond = self.queue.beyond(bounds)
            for tp, position, end in beyond:
                self.driver.park(tp, records.BEYOND_END, records.beyond_end(position, end))

    # --- delivering

    def await_batch(
        self, rows_max: int, wait_s: float | None = None, up_to: Mapping[TopicPartition, int] | None = None
    ) -> list[Taken]:
        """Delivers the ranges of a ClaimedBatch, as `Planner.batch` says."""
        if self.batch is not None and self.batch.open:
            raise BatchRefused(f"the last batch of {self.batch.offsets} offsets")
        deadline = None if wait_s is None else self.context.monotonic() + wait_s
        while not self._ending.stopping:
            try:
                taken = self.take(self.plan(rows_max, up_to))
            except ClusterUnreachable as error:
                if deadline is not None and self.context.monotonic() >= deadline:
                    raise
                self.note_unanswered(error)
                taken = []
            if taken:
                return taken
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - self.context.monotonic())
            if left_s <= 0:
                break
            with self.context.outbox, self.context.lock:
                self.context.changed.wait(left_s)
        if self._ending.over:
            self._ending.raise_if_ended()
        return []

    def take(self, wanted: Sequence[ClaimedRange]) -> list[Taken]:
        """Delivers and returns those of the ranges that may be delivered now; `plan` finds the others again."""
        self.alive()
        if self.at_most_once:
            self._await_grants(wanted)
        with self.context.outbox, self.context.lock:
            now = self.context.clock.now()
            try:
                return [taken for one in wanted if (taken := self.queue.take(one, now)) is not None]
            finally:
                self.queue.clear_requests()

    def _await_grants(self, wanted: Sequence[ClaimedRange]) -> None:
        deadline = self.context.monotonic() + self.driver.options.heartbeat_interval_s * GRANT_INTERVALS
        with self.context.outbox, self.context.lock:
            for one in wanted:
                self.queue.request_grant(one)
            while self.queue.waits_for_grant() and self.context.monotonic() < deadline and not self.driver.ended:
                self.driver.ask_grants(self.context.clock.now())
                self.context.changed.wait(WAIT_SLICE_S)

    # --- finishing

    def check(self, taken: Iterable[Taken]) -> None:
        """Raises ClaimLost if a claim of these ranges was released or lost, or if the lease has ended."""
        self.alive()
        with self.context.lock:
            now, member = self.context.clock.now(), self.member
            valid = member.lease_left_ms(now) >= 0
            lost = [one.range.tp for one in taken if one.claim.sealed or not valid]
        if lost:
            raise ClaimLost(self._planner.group, tuple(map(str, lost)))

    def touch(self, taken: Iterable[Taken]) -> None:
        self.alive()
        with self.context.lock:
            now = self.context.clock.now()
            for one in taken:
                self.queue.touch(one, now)

    def finish(self, taken: Iterable[Taken]) -> None:
        """Acks the ranges and waits for the log, except in at-most-once mode, where grants have moved the positions.
        Raises ClaimLost, AckNotConfirmed."""

        def ack() -> list[Acked]:
            with self.context.outbox, self.context.lock:
                return [
                    Acked(one.claim, [(one.range.start, one.range.to)], late=not self.queue.finish(one))
                    for one in taken
                ]

        self.alive()
        self._planner._confirm(ack)

    def flushing(self) -> Steps[None]:
        """Does what `Planner.flush` does, in steps."""
        return self._planner._flushing()

    def give_back(self, taken: Iterable[Taken]) -> None:
        with self.context.outbox, self.context.lock:
            for one in taken:
                self.queue.give_back(one)

    def called(self) -> None:
        """Notes that somebody still reads. With the Marshal's lock held."""
        self.queue.called()
