"""Quiescence: while nothing is pending, a member skips most of its ticks' work (PROTOCOL.md T2, T11, D2).

Most ticks only count waited time, ten times per interval; heartbeats are due three times per interval. A member is
quiescent while all that it does waits for a known moment or for a record that requests a tick. Until that moment its
ticks are short: they handle waits, topology reports, grants and offset mirroring alone. In doubt a tick is a whole one.
A short tick must come to the same result as a whole one; this file decides nothing else.
"""

from __future__ import annotations

from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.claims.offset_run import MARK_MS
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.divergence import DivergenceCheck
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.ready import Ready
from marshal_py.protocol.member.rebalance import Rebalancer
from marshal_py.protocol.wire.identity import NONE, Instant


class Quiescence:
    """Is the part of a member that knows whether a short tick is enough."""

    def __init__(self, member: MemberState, rebalancer: Rebalancer, divergence: DivergenceCheck) -> None:
        self.member = member
        self.rebalancer = rebalancer
        self.divergence = divergence

    def begin(self, group: Group | None, now: Instant) -> None:
        """Is called after a whole tick: sets `quiescent_until_ms`, until when ticks may be short (monotonic ms).

        Sets it to 0 if the next tick must be whole.
        """
        member = self.member
        member.quiescent_until_ms = 0
        if (
            group is None
            or group.paused
            or member.session == NONE
            or member.ended
            or member.orphaned_sessions
            or member.fenced
        ):
            return
        if not self.rebalancer.settled() or not member.liveness.healthy(now):
            return
        until_ms = member.liveness.deadline_ms(now)
        for claim in member.claims.values():
            if claim.phase is not ClaimPhase.OPEN:
                return
            since_ms = claim.handler_since_ms()
            since_ms = now.mono_ms if since_ms is None else since_ms - MARK_MS  # the grain of delivery times (D4)
            until_ms = min(until_ms, since_ms + member.options.handler_timeout_ms)
        member.quiescent_until_ms = until_ms

    def holds(self, now: Instant) -> bool:
        """Returns whether a short tick is enough at `now`.

        It is if no wait is over, no heartbeat is urgent, the user does not stop the consumer, all digests agree and the
        lease is valid.
        """
        member = self.member
        if (
            now.mono_ms >= member.quiescent_until_ms
            or member.detector.over()
            or member.urgent
            or member.leaving
            or member.stop_prepared
        ):
            return False
        return not self.divergence.accusations and member.liveness.lease.valid(now) and member.liveness.healthy(now)

    def tick(self, group: Group, now: Instant, out: Ready) -> int:
        """Does a short tick; returns the monotonic ms at which the next tick is due."""
        member = self.member
        self.rebalancer.tick_quiescent(group, now, out)
        member.mirror_positions(group, now)
        due_ms = self.rebalancer.grant_requests.due_ms
        wanted = (member.liveness.deadline_ms(now), member.detector.deadline_ms(now), due_ms)
        return min(ms for ms in wanted if ms is not None)
