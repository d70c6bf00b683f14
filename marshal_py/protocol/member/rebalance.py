"""Decides which evictions, claims, hand-overs and grants a member tries to get (PROTOCOL.md T4, D2 and A).

Whether an attempt succeeds, the fold decides. A mistake in this file costs progress and never safety: every record
names the version of the state on which its sender decided (`observed`), and the fold rejects the record if that has
changed. The target is the assignment that candidacy.py computes. The start of a partition is the offset at which
reading begins if the log has no position of it. `act` must be called only while the member is healthy (T9), its lease
is valid and the group is not paused.
"""

from __future__ import annotations

from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.fold.rationalizer import EVICT_INTERVALS
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.divergence import DivergenceCheck
from marshal_py.protocol.member.falling_behind import FallingBehind
from marshal_py.protocol.member.grant_requests import GrantRequests
from marshal_py.protocol.member.head_starts import HeadStarts
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.overflow import Overflow
from marshal_py.protocol.member.ready import SENT_AT_ONCE, Ready, Wanted
from marshal_py.protocol.member.topics import Topics
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE, BY_CHARS_MAX, HEARTBEAT_ENTRIES_MAX, ClaimingPartition, Evict

START_FRESH_INTERVALS = 1  # a looked-up start is not used when it is older than this; "latest" changes all the time


class Rebalancer:
    """Is the part of a member that evicts, claims, hands partitions over and asks for grants."""

    def __init__(self, member: MemberState, candidacy: Candidacy, topics: Topics, divergence: DivergenceCheck) -> None:
        self.member = member
        self.candidacy = candidacy
        self.overflow: Overflow = candidacy.overflow
        self.topics = topics
        self.divergence = divergence
        self.grant_requests: GrantRequests = GrantRequests(member)
        self.falling_behind: FallingBehind = FallingBehind(member, candidacy, self.back_off)
        self._more = False  # whether the last `act` left claims for the next one, which follows at once
        self._head_starts = HeadStarts(member.third_ms)
        self._claiming: dict[TopicPartition, tuple[int, int]] = {}  # claims in flight -> (observed, when sent, in ms)
        self._claimed_observed: dict[TopicPartition, int] = {}  # greatest `observed` ever sent (T18)
        self._evicting: dict[tuple[int, int], int] = {}  # (session, extended) -> when its Evict was sent, in ms
        self._starts: dict[TopicPartition, tuple[int, int]] = {}  # partition -> (its looked-up start, when, in ms)
        self._resolving: dict[TopicPartition, int] = {}  # partition -> when its start was asked for, in ms
        # partition that is fetched ahead -> whether its first data or its end came
        self._prefetching: dict[TopicPartition, bool] = {}
        self._backed_off: dict[TopicPartition, int] = {}  # partition -> monotonic ms before which it is not claimed
        self._now_ms = 0

    # --- what the member and its driver report

    def start_resolved(self, tp: TopicPartition, offset: int, end: int, now: Instant) -> None:
        """Takes what the driver has looked up: where reading starts (D5), or NONE if only the end was asked for."""
        self._resolving.pop(tp, None)
        if offset != NONE:
            self._starts[tp] = (offset, now.mono_ms)
        if self.member.group is not None:
            self.overflow.looked_up(self.member.group, tp, offset, end)

    def forget_starts(self, topic: str) -> None:
        """Forgets the looked-up starts of a topic, because it may have been deleted and created again (D10)."""
        for tp in [tp for tp in self._starts if tp.topic == topic]:
            del self._starts[tp]

    def prefetched(self, tp: TopicPartition) -> None:
        """Learns that the first data of `tp`, which the driver fetches ahead, has come, or that there is none (A3)."""
        if self._prefetching.get(tp) is False:
            self._prefetching[tp] = True
            self.member.urgent = True

    def claim_read(self, tp: TopicPartition, observed: int) -> bool:
        """Takes a ClaimingPartition that was read and names the own session. `observed`: the version that it names.

        Returns False if this client never sent it, so that a clone of its process did (T18).
        """
        pending = self._claiming.get(tp)
        if pending is not None and pending[0] == observed:
            del self._claiming[tp]
        self._starts.pop(tp, None)
        return observed <= self._claimed_observed.get(tp, NONE - 1)

    def back_off(self, tp: TopicPartition, until_ms: int) -> None:
        """Makes no claim of `tp` before `until_ms` (monotonic): another process may do better (D4, D13, D16)."""
        self._backed_off[tp] = until_ms

    def backs_off(self, tp: TopicPartition) -> bool:
        return self._backed_off.get(tp, self._now_ms) > self._now_ms

    def forget(self) -> None:
        """Forgets what is in flight, because the session has ended and the next one has sent none of it."""
        self._claiming.clear()
        self._claimed_observed.clear()
        self.grant_requests.forget()
        self._evicting.clear()
        self._resolving.clear()

    # --- acting

    def ready(self, group: Group) -> tuple[int, ...]:
        """Returns which partitions of other owners this member has fetched ahead, each by the epoch of its claim (A3).

        Returns only the lowest epochs if there are more than a heartbeat holds.
        """
        epochs = []
        for tp, start_prefetch in self._prefetching.items():
            known = group.partitions.get(tp)
            if start_prefetch and known is not None and known.epoch != NONE:
                epochs.append(known.epoch)
        return tuple(sorted(epochs)[:HEARTBEAT_ENTRIES_MAX])

    def stop_prefetch(self, out: Ready) -> None:
        """Stops all fetching ahead, because the member may claim nothing at the moment."""
        out.stop_prefetch.extend(self._prefetching)
        self._prefetching.clear()

    def act(self, group: Group, now: Instant, out: Ready) -> None:
        """Sends all evictions, claims and requests for grants that are due, and hands partitions over.

        While another member's digest differs from the own one, it evicts but claims nothing (G6).
        """
        self._now_ms, self._more = now.mono_ms, False
        self.candidacy.refresh(group)
        self.candidacy.look(group, now, out)
        self.topics.write(group, self.candidacy, now, out)
        evicted = self._evict(group, now, out)
        if self.divergence.active:
            return
        if not self.member.stop_prepared:
            self._claim(group, evicted, now, out)
        if self.candidacy.moves:
            self._hand_over(group, now)
            self._prefetch(group, out)
        self.falling_behind.act(group, now)
        self.grant_requests.ask(group, now, out)

    def settled(self) -> bool:
        """Returns whether `act` has nothing to do until the world changes or a wait is over, as of its last call.

        So it is if no claim is in flight, no session may be evicted, and the target moves no partition to or from this
        member.
        """
        seen = self.candidacy
        return not (
            self.falling_behind.watches
            or seen.looks
            or self._claiming
            or self._prefetching
            or seen.outdated
            or seen.taking
            or seen.giving
            or seen.waited_out
        )

    def next_ms(self, now: Instant) -> int | None:
        """Returns the monotonic ms at which `act` must be called again because it has put work off.

        Returns None if it has put nothing off, or if it was not called at `now`. The ends of waits are not considered.
        """
        if self._now_ms != now.mono_ms:
            return None
        wait_ms = 1 if self._more else self.candidacy.wait_ms()
        due = self.grant_requests.due_ms
        return due if wait_ms is None else min(now.mono_ms + wait_ms, now.mono_ms + wait_ms if due is None else due)

    def tick_quiescent(self, group: Group, now: Instant, out: Ready) -> None:
        """Does what a short tick needs (quiescence.py): writes topology and, in at-most-once mode, asks for grants."""
        self._now_ms = now.mono_ms
        self.topics.write(group, self.candidacy, now, out)
        if group.mode == AT_MOST_ONCE:
            self.grant_requests.ask(group, now, out)

    def _evict(self, group: Group, now: Instant, out: Ready) -> set[int]:
        """Evicts the sessions that were silent for long enough; returns their ids (T4).

        A member of rank k waits k thirds of an interval longer, so that usually only one member sends an Evict.
        """
        evicted: set[int] = set()
        for known in [key for key in self._evicting if key[0] not in self.candidacy.waited_out]:
            del self._evicting[known]  # the session is gone, or has shown a sign of life
        for sid in sorted(self.candidacy.waited_out):
            session = group.sessions[sid]
            waited_ms = self.member.detector.session_waited_ms(sid)
            need_ms = EVICT_INTERVALS * session.join.interval_ms
            if waited_ms < need_ms + self.candidacy.rank_over(session) * self.member.third_ms:
                continue
            evicted.add(sid)
            if self.member.retry_due(self._evicting.get((sid, session.extended)), now):
                self._evicting[sid, session.extended] = now.mono_ms
                out.send.append(Evict(sid, session.extended, waited_ms, self.member.options.client_id[:BY_CHARS_MAX]))
        return evicted

    def _forget_stale_claims(self, group: Group) -> None:
        """Forgets claims in flight that can no longer be accepted, because the partition has another version now (T17).

        So claims_max does not count them.
        """
        for tp, (observed, _) in list(self._claiming.items()):
            known = group.partitions.get(tp)
            if known is not None and known.version != observed:
                del self._claiming[tp]

    def awaits_claims(self, group: Group, now: Instant) -> bool:
        """Returns whether a claim that was sent less than an interval ago may still be accepted (T16)."""
        self._forget_stale_claims(group)
        return any(now.mono_ms - sent_ms < self.member.options.interval_ms for _, sent_ms in self._claiming.values())

    def _claim(self, group: Group, evicted: set[int], now: Instant, out: Ready) -> None:
        """Claims free partitions whose turn it is for this member (head_starts.py), up to claims_max (A2, A5).

        Also claims the partitions that the target gives to this member and whose owners this tick evicts. `evicted`:
        the ids of these sessions.
        """
        seen = self.candidacy
        self._forget_stale_claims(group)
        due = self._head_starts.due(
            group, self.member.detector, seen.revision, lambda tp: seen.rank_for(group, tp), self.topics.own
        )
        wanted = list(due.items())
        for tp in seen.mine if evicted else ():
            known = group.partitions.get(tp)
            if known is not None and known.owner in evicted:
                wanted.append((tp, known.version))
        last, claims_max = len(out.send) + SENT_AT_ONCE, self.member.options.claims_max
        for tp, observed in wanted:
            if claims_max and self._claims_beside(group, tp) >= claims_max:
                continue
            if len(out.send) >= last:
                self._more = True
                break
            self._try(group, tp, observed, now, out)

    def _claims_beside(self, group: Group, tp: TopicPartition) -> int:
        """Returns how many claims count against claims_max if `tp` is claimed; those in flight count (A5).

        Under a policy of whole topics they are topics, and their partitions do not count.
        """
        if not self.candidacy.covered:
            return len(self.member.claims) + len(self._claiming) - (tp in self._claiming)
        if tp.partition >= 0:
            return 0
        session = group.sessions[self.member.session]
        return len(session.epochs) - session.held + sum(one.partition < 0 and one != tp for one in self._claiming)

    def claims_topic(self, topic: str) -> bool:
        """Returns whether a claim of a partition of the topic, or of the whole topic, is in flight.

        The topic of the pin ("") stands for every topic.
        """
        return any(topic in (tp.topic, PIN.topic) for tp in self._claiming)

    def _try(self, group: Group, tp: TopicPartition, observed: int, now: Instant, out: Ready) -> None:
        """Sends one claim. If the log has no position of the partition, first asks the driver for the start (D5)."""
        pending = self._claiming.get(tp)
        if self.backs_off(tp) or (
            pending is not None and pending[0] == observed and not self.member.retry_due(pending[1], now)
        ):
            return
        known = group.partitions.get(tp)
        start = NONE
        if tp.partition < 0:
            if self.topics.recreated(group, tp.topic):
                return  # nobody may own it until the log has the new id (F9.10)
        elif known is None or known.position == NONE:
            if self.topics.unfit(group, tp):
                return  # the partition has no position yet, so there is nothing to park
            found = self._starts.get(tp)
            fresh_ms = START_FRESH_INTERVALS * self.member.options.interval_ms
            if found is None or now.mono_ms - found[1] > fresh_ms:
                if self.member.retry_due(self._resolving.get(tp), now):
                    self._resolving[tp] = now.mono_ms
                    out.resolve.append(Wanted(tp, tp.partition >= group.topics[tp.topic].first_count))
                return
            start = found[0]
        self._claiming[tp] = (observed, now.mono_ms)
        self._claimed_observed[tp] = max(observed, self._claimed_observed.get(tp, NONE))
        out.send.append(ClaimingPartition(self.member.session, tp.topic, tp.partition, observed, start))

    def _hand_over(self, group: Group, now: Instant) -> None:
        """Stops own claims whose partitions the target gives to a member that has fetched them ahead (A3).

        Handlers may finish for hand_over_timeout_ms, then releases.py releases the claim. If that member is gone
        before, delivery continues.
        """
        me, seen = self.member.session, self.candidacy
        ready: dict[int, frozenset[int]] = {me: frozenset()}  # session -> epochs that it has fetched ahead
        until_ms = now.mono_ms + self.member.options.hand_over_timeout_ms
        for claim in self.member.claims.values():
            to = seen.goes_to(claim.tp)
            if to not in ready:
                ready[to] = self._ready_of(group, to)
            if claim.phase is ClaimPhase.OPEN and (claim.epoch in ready[to] or self._must_release(claim, to, now)):
                claim.stop("hand-over" if to != NONE else "unassigned", until_ms, to)
            elif (
                claim.phase is ClaimPhase.DRAINING
                and claim.reason == "hand-over"
                and claim.successor not in seen.place
                and seen.in_line(claim.tp)
            ):
                claim.reopen()

    def _must_release(self, claim: Claim, to: int, now: Instant) -> bool:
        """Returns whether to release a claim although no successor has fetched it ahead (A7).

        Under a restricted policy a member keeps no partition for which it is not in line: it releases it at once if
        nobody there is in line, else when it has waited for the successor for an interval.
        """
        if self.candidacy.in_line(claim.tp):
            claim.out_of_line_ms = None
            return False
        if claim.out_of_line_ms is None:
            claim.out_of_line_ms = now.mono_ms
        return to == NONE or now.mono_ms - claim.out_of_line_ms >= self.member.options.interval_ms

    def _ready_of(self, group: Group, sid: int) -> frozenset[int]:
        """Returns the epochs of the claims whose partitions a session has reported as fetched ahead.

        Returns none if the session has been silent for an interval.
        """
        session = group.sessions.get(sid)
        if session is None or self.member.detector.session_waited_ms(sid) >= session.join.interval_ms:
            return frozenset()
        return frozenset(session.ready)

    def _prefetch(self, group: Group, out: Ready) -> None:
        """Asks the driver to fetch ahead the partitions that the target gives to this member and others own (A3).

        Stops fetching ahead what is no longer among these partitions.
        """
        taking, me = [] if self.member.stop_prepared else self.candidacy.taking, self.member.session
        if not taking and not self._prefetching:
            return
        wanted = {
            tp: owned.position
            for tp in taking
            if (owned := group.partitions[tp]).owner not in (NONE, me) and not self.backs_off(tp)
        }
        for tp in [tp for tp in self._prefetching if tp not in wanted]:
            known = group.partitions.get(tp)
            if known is None or known.owner == NONE:
                continue  # released for this member: keep what was fetched, because the claim is in flight
            del self._prefetching[tp]
            if known.owner != me:
                out.stop_prefetch.append(tp)
        for tp, position in wanted.items():
            if tp not in self._prefetching:
                self._prefetching[tp] = False
                out.start_prefetch.append((tp, position))
