"""Decides when a member releases its claims, and until when handlers may finish (PROTOCOL.md T12, T16, D4, D6, D10).

A claim is stopped first, so that no more messages of it are handed over. Its Release follows when its handlers are
done, or when their time is over. This file sends Releases, and Notes about stuck handlers.
"""

from __future__ import annotations

from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.claim_records import release
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.ready import SENT_AT_ONCE
from marshal_py.protocol.member.rebalance import Rebalancer
from marshal_py.protocol.member.topics import Topics
from marshal_py.protocol.policy import Target
from marshal_py.protocol.wire.identity import NONE, Instant


class Releases:
    """Is the part of a member that releases claims."""

    def __init__(self, member: MemberState, candidacy: Candidacy, topics: Topics, rebalancer: Rebalancer) -> None:
        self.member = member
        self.candidacy = candidacy
        self.topics = topics
        self.rebalancer = rebalancer
        self._more = False  # whether the last `act` left releases for the next one, which follows at once

    def act(self, group: Group, now: Instant) -> None:
        """Stops the claims that must be released, and sends the Releases of stopped claims whose handlers are done."""
        member, claims = self.member, self.member.claims.values()
        if group.paused:
            for claim in claims:
                # every claim is released in a pause (T12)
                claim.stop("paused", now.mono_ms + member.options.interval_ms)
        for claim in claims:
            since_ms = claim.handler_since_ms()
            if since_ms is not None and now.mono_ms - since_ms >= member.options.handler_timeout_ms:
                self._stop_stuck(claim, now)
        self.topics.park(group, now)
        self._release_drained(group, now)

    def _stop_stuck(self, claim: Claim, now: Instant) -> None:
        """Stops a claim whose handler hangs, and leaves its partition to other members for a while (D4).

        Without this, heartbeats alone would keep the partition in this process.
        """
        if claim.phase in (ClaimPhase.OPEN, ClaimPhase.DRAINING):
            claim.stop("handler stuck", now.mono_ms)
            self.rebalancer.back_off(claim.tp, now.mono_ms + self.member.options.handler_timeout_ms)
            oldest = None if isinstance(claim.tracker, AtMostOnce) else claim.tracker.oldest()
            self.member.note("handler_stuck", claim.tp, NONE if oldest is None else oldest[1], epoch=claim.epoch)

    def _release_drained(self, group: Group, now: Instant) -> None:
        member, self._more = self.member, False
        last = len(member.out.send) + SENT_AT_ONCE
        successors: Target | None = None
        for claim in member.claims.values():
            if claim.phase is ClaimPhase.OPEN:
                continue
            if len(member.out.send) >= last:
                self._more = True
                break
            if claim.phase is ClaimPhase.DRAINING and claim.drained(now.mono_ms):
                claim.seal(ClaimPhase.RELEASING)
                claim.sealed_ms = now.mono_ms
                claim.released_position = claim.position()
                if claim.successor == NONE and member.leaving:
                    successors = self.candidacy.successors(group) if successors is None else successors
                    claim.successor = successors.get(claim.tp, NONE)
            if claim.seek_to != NONE and (member.leaving or group.paused):
                claim.give_up_seek()
            if claim.phase is ClaimPhase.RELEASING and member.retry_due(claim.release_sent_ms, now):
                claim.release_sent_ms = now.mono_ms
                claim.seek_sent = claim.seek_sent or claim.seek_to != NONE
                member.out.send.append(release(member.session, group.partitions[claim.tp], claim))

    def report_revoking(self) -> None:
        """Tells the user of each claim that will be released, once, so that handlers can end early and ack."""
        for claim in self.member.claims.values():
            if claim.phase is not ClaimPhase.OPEN and not claim.revoking_reported:
                claim.revoking_reported = True
                self.member.out.revoking.append(claim)
                self.member.advise("revoking", claim.tp, epoch=claim.epoch, text=claim.reason)

    def next_ms(self, now: Instant) -> int | None:
        """Returns the monotonic ms at which `act` must be called again; None if no claim waits for a known moment."""
        if self._more and self.member.claims:
            return now.mono_ms + 1
        nearest: int | None = None
        for claim in self.member.claims.values():
            if claim.phase is ClaimPhase.DRAINING:
                # its handlers were done after this tick had sent its Releases
                at_ms = now.mono_ms + 1 if claim.drained(now.mono_ms) else claim.drain_until_ms
                if at_ms is not None:
                    nearest = at_ms if nearest is None else min(nearest, at_ms)
        return nearest
