"""Decides when a member releases its claims, and until when handlers may finish (PROTOCOL.md T12, T16, D4, D6, D10).

A claim is stopped first, so that no more messages of it are handed over. Its Release follows when its handlers are
done, or when their time is over. This file sends Releases, and Notes about stuck handlers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from marshal_py.protocol.claims.claim import Claim, ClaimPhase, release
from marshal_py.protocol.claims.delivery import AtMostOnce
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member_state import SENT_AT_ONCE, MemberState, Ready
from marshal_py.protocol.member.rebalance import Rebalancer
from marshal_py.protocol.member.topology import Topics
from marshal_py.protocol.policy import Target
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import Note, ReleasingPartition, SetPosition
from marshal_py.protocol.wire.subscription import consumes

# --- Handles partitions that Kafka does not serve to their owner, for example for lack of a permission (PROTOCOL.md
# D13).
#
# The owner gives such a partition up: it releases it, so that another member tries, and writes a Note. All members
# remember the Note while its sender's session lives and the position is the same. If all members have tried in vain,
# the owner parks the partition: nobody may claim it until its position is set.

STUCK: Final = "handler stuck"  # reason of the Release
UNREADABLE: Final = "unreadable"  # kind of the Note, and reason of the Release
LEFT_INTERVALS: Final = 5  # for so long a member does not claim a partition again that it could not read


class Refusals:
    """Knows which members could not read which partitions."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self._noted: dict[TopicPartition, dict[int, int]] = {}  # partition -> session -> position at which it gave up

    def read(self, record: Note) -> None:
        """Takes the Note of a member that has given a partition up."""
        self._noted.setdefault(TopicPartition(record.topic, record.partition), {})[record.session] = record.from_

    def forget(self, record: SetPosition) -> None:
        """Forgets the Notes on partitions whose positions an admin has moved, so that all members try again."""
        for move in record.moves:
            self._noted.pop(TopicPartition(move.topic, move.partition), None)

    def give_up(self, tp: TopicPartition, detail: str, now: Instant) -> bool:
        """Releases a partition, and parks it if all members have tried in vain. `detail`: Kafka's error text. Returns
        True if no claim is left to hand messages over."""
        member, group = self.member, self.member.group
        for claim in member.claims.values():
            if claim.tp != tp or claim.phase is not ClaimPhase.OPEN or group is None:
                continue
            position = claim.position()
            if self._all_tried(group, tp, position):
                member.park(claim.epoch, records.UNREADABLE, detail, now)
            else:
                claim.stop(UNREADABLE, now.mono_ms + member.options.interval_ms)
                member.note(UNREADABLE, tp, position, text=detail, epoch=claim.epoch)
        member.request_tick()
        return not any(claim.phase is ClaimPhase.OPEN for claim in member.claims.values())

    def _all_tried(self, group: Group, tp: TopicPartition, position: int) -> bool:
        """Returns whether every live consumer of the topic has given it up at this position before. This member counts,
        so the owner must fail twice: a trouble that passes needs no admin, and a single client without the right ends
        before."""
        noted = self._noted.get(tp, {})
        for session in [session for session in noted if session not in group.sessions]:
            del noted[session]
        members = (session.id for session in group.sessions.values() if consumes(session.join.topics, tp.topic))
        return all(noted.get(session) == position for session in members)


class Releases:
    """Releases claims."""

    def __init__(self, member: MemberState, candidacy: Candidacy, topics: Topics, rebalancer: Rebalancer) -> None:
        self.member = member
        self.candidacy = candidacy
        self.topics = topics
        self.rebalancer = rebalancer
        self._more = False  # whether the last `act` left releases for the next one, which follows at once
        self._covers_sent: dict[int, int] = {}  # epoch of a cover -> when its Release was sent, in ms

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
        if member.hangs(now.mono_ms):
            for claim in claims:
                if claim.handler_since_ms() is None:  # others are served until their own time is over
                    claim.stop(STUCK, now.mono_ms + member.options.interval_ms)
        self.topics.park(group, now)
        self._release_drained(group, now)

    def _stop_stuck(self, claim: Claim, now: Instant) -> None:
        """Stops a claim whose handler hangs, and leaves its partition to others for a while (D4): heartbeats alone
        would keep it here."""
        if claim.phase in (ClaimPhase.OPEN, ClaimPhase.DRAINING):
            claim.stop(STUCK, now.mono_ms)
            self.member.handler_stuck = True
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

    # --- covers: the pin, and claims of whole topics

    def released_cover(self, epoch: int) -> bool:
        """Returns whether this client sent a Release of the cover. If none was sent, a clone did it (T18)."""
        return epoch in self._covers_sent

    def release_covers(self, group: Group, now: Instant, out: Ready) -> None:
        """Releases each cover that should go once nothing beneath it is owned or in flight (A9, A11). The fold knows no
        covers."""
        me = self.member.session
        for cover in list(self._own_covers(group)):
            topic, to = cover.tp.topic, self.candidacy.goes_to(cover.tp)
            goes = group.paused or to != me or self.topics.recreated(group, topic)
            if not goes or not self.member.retry_due(self._covers_sent.get(cover.epoch), now):
                continue
            if self._is_used(group, topic, now):
                continue
            self._covers_sent[cover.epoch] = now.mono_ms
            if len(self._covers_sent) > len(group.topics) + 1:
                del self._covers_sent[next(iter(self._covers_sent))]
            moves = to not in (NONE, me) and not group.paused
            reason = "hand-over" if moves else "paused" if group.paused else "unassigned"
            if cover.tp == PIN:
                reason = self.candidacy.pin_lost or reason
            out.send.append(ReleasingPartition(me, cover.epoch, NONE, to if moves else NONE, reason))

    def _own_covers(self, group: Group) -> Iterator[Partition]:
        session = group.sessions[self.member.session]
        if len(session.epochs) > session.held:  # nearly never: else it has no cover
            for epoch in session.epochs:
                if group.claims[epoch].tp.partition < 0:
                    yield group.claims[epoch]

    def _is_used(self, group: Group, topic: str, now: Instant) -> bool:
        if self.rebalancer.claims_topic(group, topic, now):
            return True
        return any(topic in (claim.tp.topic, PIN.topic) for claim in self.member.claims.values())
