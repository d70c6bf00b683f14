"""One member at work: its source, its buffers, its user's callbacks. Executes a Ready; decides nothing.

Owned by loop.py; everything here is called with the Marshal's lock held, but for the callbacks, which run without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from marshal_py.client.flow import Flow
from marshal_py.client.options import ConsumerOptions
from marshal_py.errors import ClusterError, MarshalError, PartitionError, PositionBeyondEnd
from marshal_py.protocol import codec
from marshal_py.protocol.holdings import Claim
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.protocol.ready import Advisory, Ready, Wanted
from marshal_py.transport.ports import DataSource

if TYPE_CHECKING:
    from marshal_py.client.loop import Loop

EVENTS_KEPT: Final = 10_000  # advisories that nobody has asked for; the oldest go first
COOL_POLL_S: Final = 0.004  # while a partition is being fetched ahead: a hand-over waits for the first bytes


class Station:
    """The place of one Consumer in the loop."""

    def __init__(self, loop: Loop, log: int, member: Member, source: DataSource, options: ConsumerOptions,
                 incarnation: bytes) -> None:  # fmt: skip
        self.loop, self.log, self.member, self.source, self.options = loop, log, member, source, options
        self.flow = Flow(member, source, options, loop.lock, incarnation, loop.clock.now)
        self.incarnation = incarnation
        self.group_key = member.name.encode()
        self.error: MarshalError | None = None  # raised to the user once, then kept as the reason of the end
        self.troubles: deque[ClusterError] = deque()  # raised one by one; the consumer goes on
        self.ended = False
        self.events: deque[Advisory] = deque(maxlen=EVENTS_KEPT)
        self.cold: set[TopicPartition] = set()  # fetched ahead, nothing seen yet
        self._ends_due_ms = 0
        self.mirror_refused = ""

    # --- one step

    def step(self, now: Instant) -> None:
        """Ticks the member and does what it says."""
        self._look_at_source(now)
        if self.flow.at_most_once:
            self.flow.offer()
        self.execute(self.member.tick(now), now)

    def due(self, now: Instant) -> bool:
        return now.mono_ms >= self.member.deadline_ms or bool(self.cold)

    def _look_at_source(self, now: Instant) -> None:
        for tp in [tp for tp in self.cold if self.source.end_offset(tp) >= 0]:
            self.cold.discard(tp)
            self.member.intent.warmed(tp)
        if now.mono_ms >= self._ends_due_ms:
            self._ends_due_ms = now.mono_ms + self.member.third_ms
            for claim in self.member.claims.values():
                claim.end_offset = self.source.end_offset(claim.tp)
        for out in self.source.out_of_range():
            self.loop.worker.submit(f"bounds of {out.tp}", lambda out=out: self._place(out.tp, out.position))  # type: ignore[misc]
        for tp, reason in self.source.broken():
            self.troubles.append(PartitionError(tp.topic, tp.partition, reason))

    # --- the duties, in the order of Ready

    def execute(self, ready: Ready, now: Instant) -> None:
        if ready.lost or ready.cool:
            gone = [claim.tp for claim, _ in ready.lost] + ready.cool
            self.flow.drop(gone)
            self.cold.difference_update(gone)
        for record in ready.send:
            value = codec.encode(record, self.member.name, self.incarnation)
            self.loop.log.append(self.log, self.group_key, value)
        if ready.claimed:
            group = self.member.group
            assert group is not None
            live = [claim for claim in ready.claimed if claim.epoch in self.member.claims]
            self.flow.open(live, {claim.tp: group.partitions[claim.tp].position for claim in live})
            self.cold.difference_update(claim.tp for claim in live)
        for tp, position in ready.warm:
            self.flow.warm(tp, position)
            self.cold.add(tp)
        if ready.resolve:
            self.loop.worker.submit(f"starts of {self.member.name}", lambda: self._resolve(ready.resolve))
        if ready.mirror and self.options.mirror_offsets:
            self.loop.worker.submit(f"mirror of {self.member.name}", lambda: self._mirror(ready.mirror))
        self._tell(ready)
        if ready.ended:
            self.ended = True
            self.error = ready.error

    def _tell(self, ready: Ready) -> None:
        self.events.extend(ready.advisories)
        calls = self.loop.callbacks
        if self.options.on_lost is not None:
            for claim, reason in ready.lost:
                calls.append(self._call_lost(claim, reason))
        if self.options.on_claim is not None:
            for claim in ready.claimed:
                calls.append(self._call_claim(claim))

    def _call_claim(self, claim: Claim) -> Callable[[], None]:
        call, info = self.options.on_claim, self.loop.claim_info(self, claim)
        assert call is not None
        return lambda: call(info)

    def _call_lost(self, claim: Claim, reason: str) -> Callable[[], None]:
        call, info = self.options.on_lost, self.loop.claim_info(self, claim)
        assert call is not None
        return lambda: call(info, reason)

    # --- on the worker thread, without the lock

    def _resolve(self, wanted: list[Wanted]) -> None:
        """D5: where partitions without a position in the log begin."""
        tps = [want.tp for want in wanted]
        bounds = self.loop.admin.bounds(tps)
        committed: dict[TopicPartition, int] = {}
        if self.options.start == "committed":
            committed = self.loop.admin.committed(self.member.name, tps)
        fallback = self.options.start_fallback if self.options.start == "committed" else self.options.start
        with self.loop.lock:
            now = self.loop.clock.now()
            for want in wanted:
                first, end = bounds[want.tp]
                start = first if want.earliest or fallback == "earliest" else end
                if not want.earliest and want.tp in committed:
                    start = committed[want.tp]
                self.member.intent.start_resolved(want.tp, start, now)
            self.step(now)

    def _mirror(self, positions: dict[TopicPartition, int]) -> None:
        """D7, best effort: the usual lag tools see the group."""
        refused = self.loop.admin.commit(self.member.name, positions)
        if refused and refused != self.mirror_refused:
            with self.loop.lock:
                self.events.append(Advisory("mirror_refused", self.member.name, self.member.options.client_id,
                                            text=refused))  # fmt: skip
        self.mirror_refused = refused

    def _place(self, tp: TopicPartition, position: int) -> None:
        """D6: the cluster does not have the position; below the beginning goes on there, beyond the end stops."""
        first, end = self.loop.admin.bounds([tp])[tp]
        with self.loop.lock:
            buffer = self.flow.buffers.get(tp)
            if buffer is None:
                return
            if position < first:
                self.member.note("offset_lost", tp, position, first)
                self.flow.restart(tp, first)
                self.step(self.loop.clock.now())
            elif position > end:
                self.troubles.append(PositionBeyondEnd(tp.topic, tp.partition, position, end))
            else:
                self.flow.restart(tp, position)

    def refresh_topology(self) -> None:
        """How many partitions Kafka has; growth becomes a Topology record (F9.1)."""
        for topic in self.member.options.topics:
            count = self.loop.admin.partition_count(topic)
            if count is not None:
                with self.loop.lock:
                    grown = self.member.intent.counts.get(topic) != count
                    self.member.intent.counts[topic] = count
                if grown:
                    self.source.learn([topic])
                    self.loop.kick(self)

    def position(self, claim: Claim) -> int:
        """The claim's position as this process knows it."""
        own = claim.position()
        group = self.member.group
        folded = group.partitions[claim.tp].position if group is not None else NONE
        return max(own, folded)
