"""What a member tries for: evictions, claims, hand-overs, grants (PROTOCOL.md T4, 8, 9). Called only while it may act.

Everything here is guidance: the fold decides. So nothing here needs to be right for safety, only for progress, and
every attempt names what it saw (`observed`), so that a stale one is refused.
"""

from __future__ import annotations

from marshal_py.protocol.candidacy import Candidacy
from marshal_py.protocol.claim import Claim, ClaimPhase
from marshal_py.protocol.delivery import AtMostOnce
from marshal_py.protocol.divergence import DivergenceCheck
from marshal_py.protocol.head_starts import HeadStarts
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.lease import EVICT_INTERVALS
from marshal_py.protocol.liveness import SENT_KEPT
from marshal_py.protocol.member_state import MemberState
from marshal_py.protocol.ready import SENT_AT_ONCE, Ready, Wanted
from marshal_py.protocol.records import (
    AT_MOST_ONCE,
    GRANT_OFFSETS_MAX,
    HEARTBEAT_ENTRIES_MAX,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    MessageRange,
)
from marshal_py.protocol.topics import Topics
from marshal_py.protocol.world import Group

GRANTS_AHEAD = 2  # D2: one range is handled while the next is claimed
START_FRESH_INTERVALS = 1  # a looked-up start ("latest" above all) is not used when older than this


class Rebalancer:
    """The part of a member that wants things."""

    def __init__(self, member: MemberState, candidacy: Candidacy, topics: Topics, divergence: DivergenceCheck) -> None:
        self.member = member
        self.candidacy = candidacy
        self.topics = topics
        self.divergence = divergence
        self._more = False  # whether the last round left claims for the next one, which is to come at once
        self._head_starts = HeadStarts(member.third_ms)
        self._claiming: dict[TopicPartition, tuple[int, int]] = {}  # in flight: (observed, sent ms)
        self._claimed_observed: dict[TopicPartition, int] = {}  # greatest `observed` ever sent, to know copies (T18)
        self._grants: dict[int, tuple[MessageRange, ...]] = {}  # by nonce: the newest sent, to know copies (T18)
        self._asking: tuple[int, int] | None = None  # nonce of the one in flight, and when it was sent
        self._evicting: dict[tuple[int, int], int] = {}  # (session, extended) -> sent ms
        self._starts: dict[TopicPartition, tuple[int, int]] = {}  # looked-up start -> (offset, when ms)
        self._resolving: dict[TopicPartition, int] = {}  # asked for, and when ms
        self._prefetching: dict[TopicPartition, bool] = {}  # fetched ahead -> whether data or its end is there
        self._backed_off: dict[TopicPartition, int] = {}  # not to be tried before this ms
        self._now_ms = 0

    # --- what the member and its driver tell

    def start_resolved(self, tp: TopicPartition, offset: int, now: Instant) -> None:
        """The start of a partition that has no position in the log (D5)."""
        self._resolving.pop(tp, None)
        self._starts[tp] = (offset, now.mono_ms)

    def forget_starts(self, topic: str) -> None:
        """What was looked up may be of a topic that is gone (D10)."""
        for tp in [tp for tp in self._starts if tp.topic == topic]:
            del self._starts[tp]

    def prefetched(self, tp: TopicPartition) -> None:
        """The first data of a partition that is fetched ahead, or the knowledge that there is none, has come (A3)."""
        if self._prefetching.get(tp) is False:
            self._prefetching[tp] = True
            self.member.urgent = True

    def claim_read(self, tp: TopicPartition, observed: int) -> bool:
        """An own claim was read; False if this client never sent it (T18)."""
        flying = self._claiming.get(tp)
        if flying is not None and flying[0] == observed:
            del self._claiming[tp]
        self._starts.pop(tp, None)
        return observed <= self._claimed_observed.get(tp, NONE - 1)

    def grants_read(self, record: ClaimingMessages, accepted: bool) -> bool:
        """An own ClaimingMessages was read; False if this client never sent it (T18).

        The nonce must fit: a clone's grant must not be delivered here as well (D2).
        """
        if self._asking is not None and self._asking[0] == record.nonce:
            self._asking = None
        sent = self._grants.get(record.nonce)
        if sent is None:
            oldest = next(iter(self._grants), None)
            return not accepted and oldest is not None and record.nonce < oldest  # a late copy of one no longer kept
        return sent == record.ranges

    def back_off(self, tp: TopicPartition, until_ms: int) -> None:
        """Do not try `tp` before `until_ms`: its handler hangs here, another process may do better (D4)."""
        self._backed_off[tp] = until_ms

    def backs_off(self, tp: TopicPartition) -> bool:
        return self._backed_off.get(tp, self._now_ms) > self._now_ms

    def forget(self) -> None:
        """The session has ended: nothing that was under way belongs to the next one."""
        self._claiming.clear()
        self._claimed_observed.clear()
        self._grants.clear()
        self._asking = None
        self._evicting.clear()
        self._resolving.clear()

    # --- what the world makes of it

    def ready(self, group: Group) -> tuple[int, ...]:
        """Epochs whose partition this member has fetched ahead (A3), as many as a heartbeat holds: the lowest."""
        epochs = []
        for tp, start_prefetch in self._prefetching.items():
            known = group.partitions.get(tp)
            if start_prefetch and known is not None and known.epoch != NONE:
                epochs.append(known.epoch)
        return tuple(sorted(epochs)[:HEARTBEAT_ENTRIES_MAX])

    def stop_prefetch(self, out: Ready) -> None:
        """Nothing may be tried now: stop fetching ahead."""
        out.stop_prefetch.extend(self._prefetching)
        self._prefetching.clear()

    def act(self, group: Group, now: Instant, out: Ready) -> None:
        """One round of attempts. Who is in doubt evicts, or nobody might, and claims nothing (G6)."""
        self._now_ms, self._more = now.mono_ms, False
        self.candidacy.look(group)
        self.topics.write(group, self.candidacy, now, out)
        evicted = self._evict(group, now, out)
        if self.divergence.active:
            return
        if not self.member.stop_prepared:
            self._claim(group, evicted, now, out)
        if self.candidacy.moves:
            self._hand_over(group, now)
            self._prefetch(group, out)
        self.ask_grants(group, now, out)

    def settled(self) -> bool:
        """Whether, as of the last round, nothing is under way or wanted from anybody, and nobody is waited out."""
        seen = self.candidacy
        return not (self._claiming or self._prefetching or seen.late or seen.taking or seen.giving or seen.waited_out)

    def next_ms(self, now: Instant) -> int | None:
        """When it wants another round, beside what it waits for; None if it does not, or may not act now."""
        if self._now_ms != now.mono_ms:
            return None
        wait_ms = 1 if self._more else self.candidacy.wait_ms()
        return None if wait_ms is None else now.mono_ms + wait_ms

    def idle(self, group: Group, now: Instant, out: Ready) -> None:
        """What is left of a round for a member that is settled, while no wait is over."""
        self._now_ms = now.mono_ms
        self.topics.write(group, self.candidacy, now, out)
        if group.mode == AT_MOST_ONCE:
            self.ask_grants(group, now, out)

    def _evict(self, group: Group, now: Instant, out: Ready) -> set[int]:
        """T4: sessions that this member evicts now, in rank order."""
        evicted: set[int] = set()
        for known in [key for key in self._evicting if key[0] not in self.candidacy.waited_out]:
            del self._evicting[known]  # it is gone, or has shown a sign of life
        for sid in sorted(self.candidacy.waited_out):
            session = group.sessions[sid]
            waited_ms = self.member.detector.session_waited_ms(sid)
            need_ms = EVICT_INTERVALS * session.join.interval_ms
            if waited_ms < need_ms + self.candidacy.rank_over(session) * self.member.third_ms:
                continue
            evicted.add(sid)
            if self.member.retry_due(self._evicting.get((sid, session.extended)), now):
                self._evicting[sid, session.extended] = now.mono_ms
                out.send.append(Evict(sid, session.extended, waited_ms, self.member.options.client_id[:60]))
        return evicted

    def _drop_dead(self, group: Group) -> None:
        """Forgets claims under way that can never win any more (T17): they must not count against claims_max."""
        for tp, (observed, _) in list(self._claiming.items()):
            known = group.partitions.get(tp)
            if known is not None and known.version != observed:
                del self._claiming[tp]

    def awaits_claims(self, group: Group, now: Instant) -> bool:
        """Whether a claim that was sent within an interval may still win (T16)."""
        self._drop_dead(group)
        return any(now.mono_ms - sent_ms < self.member.options.interval_ms for _, sent_ms in self._claiming.values())

    def _claim(self, group: Group, evicted: set[int], now: Instant, out: Ready) -> None:
        """Claims what is free, or becomes free by an Evict of this very tick, when its head start allows (A2, A5)."""
        seen, topics = self.candidacy, self.member.options.topics
        self._drop_dead(group)
        due = self._head_starts.due(
            group, self.member.detector, seen.looks, lambda tp: seen.rank_for(group, tp), topics
        )
        wanted = list(due.items())
        for tp in seen.mine if evicted else ():
            known = group.partitions.get(tp)
            if known is not None and known.owner in evicted:
                wanted.append((tp, known.version))
        last, claims_max = len(out.send) + SENT_AT_ONCE, self.member.options.claims_max
        for tp, observed in wanted:
            if claims_max and len(self.member.claims) + len(self._claiming) - (tp in self._claiming) >= claims_max:
                continue  # what is under way counts (A5)
            if len(out.send) >= last:
                self._more = True
                break
            self._try(group, tp, observed, now, out)

    def _try(self, group: Group, tp: TopicPartition, observed: int, now: Instant, out: Ready) -> None:
        """Sends one claim, after looking up the start if the log has no position."""
        flying = self._claiming.get(tp)
        if self.backs_off(tp) or (
            flying is not None and flying[0] == observed and not self.member.retry_due(flying[1], now)
        ):
            return
        known = group.partitions.get(tp)
        start = NONE
        if known is None or known.position == NONE:
            if self.topics.unfit(group, tp):
                return  # nothing is lost there
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
        """A3, the owner's side: hands over what the target gives to a live member that has fetched ahead.

        Handlers may finish, for as long as a successor may have to wait.
        """
        me, seen = self.member.session, self.candidacy
        ready: dict[int, frozenset[int]] = {me: frozenset()}  # epochs that each has noted
        until_ms = now.mono_ms + self.member.options.hand_over_timeout_ms
        for claim in self.member.claims.values():
            to = seen.target.get(claim.tp, me)
            if to not in ready:
                ready[to] = self._ready_of(group, to)
            if claim.phase is ClaimPhase.OPEN and claim.epoch in ready[to]:
                claim.stop("hand-over", until_ms, to)
            elif (
                claim.phase is ClaimPhase.DRAINING and claim.reason == "hand-over" and claim.successor not in seen.place
            ):
                claim.reopen()

    def _ready_of(self, group: Group, sid: int) -> frozenset[int]:
        """What a session has noted as fetched ahead; nothing if it has been silent for an interval."""
        session = group.sessions.get(sid)
        if session is None or self.member.detector.session_waited_ms(sid) >= session.join.interval_ms:
            return frozenset()
        return frozenset(session.ready)

    def _prefetch(self, group: Group, out: Ready) -> None:
        """A3, the successor's side: fetches ahead what the target takes from a live owner for this member."""
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
                continue  # released for us: keep the buffer, the claim is on its way
            del self._prefetching[tp]
            if known.owner != me:
                out.stop_prefetch.append(tp)
        for tp, position in wanted.items():
            if tp not in self._prefetching:
                self._prefetching[tp] = False
                out.start_prefetch.append((tp, position))

    def ask_grants(self, group: Group, now: Instant, out: Ready) -> None:
        """D2: asks for the ranges that are fetched and not granted: one record for all claims, one at a time (T17)."""
        if self._asking is not None:
            if not self.member.retry_due(self._asking[1], now):
                return
            self._asking = None
            for claim in self.member.claims.values():
                if isinstance(claim.tracker, AtMostOnce):
                    claim.tracker.asked = None
        ranges = []
        for claim in self.member.claims.values():
            wanted = self._range_of(group, claim)
            if wanted is not None:
                ranges.append(wanted)
                if len(ranges) == HEARTBEAT_ENTRIES_MAX:
                    break
        if ranges:
            nonce = self.member.liveness.new_nonce()
            self._asking, self._grants[nonce] = (nonce, now.mono_ms), tuple(ranges)
            if len(self._grants) > SENT_KEPT:
                del self._grants[next(iter(self._grants))]
            out.send.append(ClaimingMessages(self.member.session, tuple(ranges), nonce))

    def _range_of(self, group: Group, claim: Claim) -> MessageRange | None:
        """What is to be asked for in one claim; None nearly always, for all of its offer is granted."""
        offer, tracker = claim.offer, claim.tracker
        if offer is None or claim.phase is not ClaimPhase.OPEN or not isinstance(tracker, AtMostOnce):
            return None
        from_ = group.partitions[claim.tp].position
        start = max(offer[0], from_)
        to = min(offer[1], start + GRANT_OFFSETS_MAX)
        if start >= to:
            return None
        tracker.holds(tracker.delivered_to)  # drops grants that are used up
        if len(tracker.grants) >= GRANTS_AHEAD:
            return None
        tracker.asked = (from_, start, to)
        return MessageRange(claim.epoch, from_, start, to)
