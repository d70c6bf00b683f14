"""When a tick has nothing to do but to end a step of a wait, and what is left of it then (PROTOCOL.md T2, T11, D2).

Most ticks are such: waits are counted in tenths of an interval, heartbeats in thirds. A member is idle while all that
it does waits for a moment that it knows, or for a record that stirs it; where that is not plain, ticks are whole ones.
An idle tick comes to what a whole one would come to; nothing is decided here.
"""

from __future__ import annotations

from marshal_py.protocol.claim import ClaimPhase
from marshal_py.protocol.delivery import MARK_MS
from marshal_py.protocol.divergence import DivergenceCheck
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.protocol.member_state import MemberState
from marshal_py.protocol.ready import Ready
from marshal_py.protocol.rebalance import Rebalancer
from marshal_py.protocol.world import Group


class Quiescence:
    """The part of a member that knows how little there is to do."""

    def __init__(self, member: MemberState, rebalancer: Rebalancer, divergence: DivergenceCheck) -> None:
        self.member = member
        self.rebalancer = rebalancer
        self.divergence = divergence

    def begin(self, group: Group | None, now: Instant) -> None:
        """A whole tick is done: what it left under way, or may want at a moment of its own, asks for another one."""
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
            since_ms = now.mono_ms if since_ms is None else since_ms - MARK_MS  # it is kept to this grain (D4)
            until_ms = min(until_ms, since_ms + member.options.handler_timeout_ms)
        member.quiescent_until_ms = until_ms

    def holds(self, now: Instant) -> bool:
        """Whether it is still so: no wait is over, the user wants nothing, and by every clock the lease holds."""
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
        """What is left to do at `now`; returns when to look again (monotonic ms)."""
        member = self.member
        self.rebalancer.idle(group, now, out)
        member.mirror_positions(group, now)
        return min(member.liveness.deadline_ms(now), member.detector.deadline_ms(now))
