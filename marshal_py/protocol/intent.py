"""What a member tries for: evictions, claims, hand-overs, grants (PROTOCOL.md T4, 8, 9). Called only while it may act.

Everything here is guidance: the fold decides. So nothing here needs to be right for safety, only for progress, and
every attempt names what it saw (`observed`), so that a stale one is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marshal_py.protocol.assignment import DEFAULT_POLICY, MOVES, POLICIES, Target, candidates
from marshal_py.protocol.delivery import AtMostOnce
from marshal_py.protocol.holdings import Claim, Stage
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.lease import EVICT_INTERVALS
from marshal_py.protocol.pulse import SENT_KEPT
from marshal_py.protocol.ready import Ready, Wanted
from marshal_py.protocol.records import (
    AT_MOST_ONCE,
    GRANT_OFFSETS_MAX,
    HEARTBEAT_ENTRIES_MAX,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    MessageRange,
)
from marshal_py.protocol.world import Group, Session

if TYPE_CHECKING:
    from marshal_py.protocol.member import Member

GRANTS_AHEAD = 2  # D2: one range is handled while the next is claimed
START_FRESH_INTERVALS = 1  # a looked-up start ("latest" above all) is not used when older than this


class Intent:
    """The part of a member that wants things."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._claiming: dict[TopicPartition, tuple[int, int]] = {}  # in flight: (observed, sent ms)
        self._claimed_observed: dict[TopicPartition, int] = {}  # greatest `observed` ever sent, to know copies (T18)
        self._grants: dict[int, tuple[MessageRange, ...]] = {}  # by nonce: the newest sent, to know copies (T18)
        self._asking: tuple[int, int] | None = None  # nonce of the one in flight, and when it was sent
        self._evicting: dict[tuple[int, int], int] = {}  # (session, extended) -> sent ms
        self._starts: dict[TopicPartition, tuple[int, int]] = {}  # looked-up start -> (offset, when ms)
        self._resolving: dict[TopicPartition, int] = {}  # asked for, and when ms
        self._warming: dict[TopicPartition, bool] = {}  # fetched ahead -> whether data or its end is there
        self._shunned: dict[TopicPartition, int] = {}  # not to be tried before this ms
        self._now_ms = 0
        self._target: Target = {}
        self._taking: list[TopicPartition] = []  # what the target takes from a live owner for this member
        self._giving = False  # whether the target gives something of this member's to another
        self._order: list[int] = []
        self._key: tuple[int, frozenset[int], str] = (-1, frozenset(), "")

    # --- what the member and its driver tell

    def start_resolved(self, tp: TopicPartition, offset: int, now: Instant) -> None:
        """The start of a partition that has no position in the log (D5)."""
        self._resolving.pop(tp, None)
        self._starts[tp] = (offset, now.mono_ms)

    def forget_starts(self, topic: str) -> None:
        """What was looked up may be of a topic that is gone (D10)."""
        for tp in [tp for tp in self._starts if tp.topic == topic]:
            del self._starts[tp]

    def warmed(self, tp: TopicPartition) -> None:
        """The first data of a partition that is fetched ahead, or the knowledge that there is none, has come (A3)."""
        if self._warming.get(tp) is False:
            self._warming[tp] = True
            self.member.urgent = True

    def claim_read(self, tp: TopicPartition, observed: int) -> bool:
        """An own claim was read; False if this client never sent it (T18)."""
        flying = self._claiming.get(tp)
        if flying is not None and flying[0] == observed:
            del self._claiming[tp]
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

    def shun(self, tp: TopicPartition, until_ms: int) -> None:
        """Do not try `tp` before `until_ms`: its handler hangs here, another process may do better (D4)."""
        self._shunned[tp] = until_ms

    def shuns(self, tp: TopicPartition) -> bool:
        return self._shunned.get(tp, self._now_ms) > self._now_ms

    def forget(self) -> None:
        """The session has ended: nothing that was under way belongs to the next one."""
        self._claiming.clear()
        self._claimed_observed.clear()
        self._grants.clear()
        self._asking = None
        self._evicting.clear()
        self._resolving.clear()

    # --- what the world makes of it

    def _look(self, group: Group) -> None:
        """Order of candidates and target, computed anew only when they may have changed."""
        waited_out = self.member.watch.waited_out(group)
        waited_out.discard(self.member.session)
        if group.shape == self._key[0] and waited_out == self._key[1]:
            return  # nearly always; a config is part of the shape
        policy = self.member.options.policy
        if group.config is not None and group.config.policy in POLICIES:
            policy = group.config.policy
        self._key = (group.shape, frozenset(waited_out), policy)
        self._order = candidates(group, waited_out)
        self._target = POLICIES.get(policy, POLICIES[DEFAULT_POLICY])(group, self._order)
        me, owned = self.member.session, {p.tp: p.owner for p in group.claims.values()}
        self._taking = [tp for tp, sid in self._target.items() if sid == me and owned.get(tp, me) != me]
        self._giving = any(owner == me != self._target.get(tp, me) for tp, owner in owned.items())

    def rank(self, group: Group) -> int:
        """This member's place among those that may act now."""
        self._look(group)
        return self._order.index(self.member.session)

    def expects(self, group: Group) -> bool:
        """Whether the target takes partitions from live owners for this member (A3)."""
        self._look(group)
        return bool(self._taking)

    def heir(self, group: Group, tp: TopicPartition) -> int:
        """Who should have `tp` once this member is gone."""
        order = [sid for sid in self._order if sid != self.member.session and sid in group.sessions]
        takers = [s for s in (group.sessions[sid] for sid in order) if tp.topic in s.join.topics]
        takers = [s for s in takers if not s.join.claims_max or s.held < s.join.claims_max]
        if not takers:
            return NONE
        return min(takers, key=lambda s: (s.mark != NONE, s.held, order.index(s.id))).id

    def relieved(self, group: Group) -> bool:
        """Whether others take over what this member has while it is still here (A6)."""
        self._look(group)
        me = self.member.session
        if self._key[2] not in MOVES:
            return False
        if group.sessions[me].mark == NONE:  # it has not read its own StepDown yet
            return any(sid != me and group.sessions[sid].mark == NONE for sid in self._order)
        return any(self._target.get(claim.tp, me) != me for claim in self.member.claims.values())

    def ready(self, group: Group) -> tuple[int, ...]:
        """Epochs whose partition this member has fetched ahead (A3), as many as a heartbeat holds: the lowest."""
        epochs = []
        for tp, warm in self._warming.items():
            known = group.partitions.get(tp)
            if warm and known is not None and known.epoch != NONE:
                epochs.append(known.epoch)
        return tuple(sorted(epochs)[:HEARTBEAT_ENTRIES_MAX])

    def cool(self, out: Ready) -> None:
        """Nothing may be tried now: stop fetching ahead."""
        out.cool.extend(self._warming)
        self._warming.clear()

    def act(self, group: Group, now: Instant, out: Ready) -> None:
        """One round of attempts. Who is in doubt evicts, or nobody might, and claims nothing (G6)."""
        self._now_ms = now.mono_ms
        self._look(group)
        self.member.topics.write(group, now, out)
        evicted = self._evict(group, now, out)
        if self.member.doubt.active:
            return
        self._claim(group, evicted, now, out)
        if self._key[2] in MOVES:
            self._give(group, now)
            self._warm(group, out)
        self.ask_grants(group, now, out)

    def settled(self) -> bool:
        """Whether, as of the last round, nothing is under way or wanted from anybody, and nobody is waited out."""
        return not (self._claiming or self._warming or self._taking or self._giving or self._key[1])

    def idle(self, group: Group, now: Instant, out: Ready) -> None:
        """What is left of a round for a member that is settled, while no wait is over."""
        self._now_ms = now.mono_ms
        self.member.topics.write(group, now, out)
        if group.mode == AT_MOST_ONCE:
            self.ask_grants(group, now, out)

    def again(self, sent_ms: int | None, now: Instant) -> bool:
        """T17: one attempt until its fate is read or a third of an interval has passed."""
        return sent_ms is None or now.mono_ms - sent_ms >= self.member.third_ms

    def _evict(self, group: Group, now: Instant, out: Ready) -> set[int]:
        """T4: sessions that this member evicts now, in rank order."""
        evicted: set[int] = set()
        for sid in sorted(self._key[1]):
            session = group.sessions[sid]
            waited_ms = self.member.watch.session_waited_ms(sid)
            if waited_ms < EVICT_INTERVALS * session.join.interval_ms + self._rank_over(session) * self.member.third_ms:
                continue
            evicted.add(sid)
            if self.again(self._evicting.get((sid, session.extended)), now):
                self._evicting[sid, session.extended] = now.mono_ms
                out.send.append(Evict(sid, session.extended, waited_ms, self.member.options.client_id[:60]))
        return evicted

    def _rank_over(self, silent: Session) -> int:
        """T4: who joined after the last sign of the silent one cannot have waited as long, and comes last."""
        return sorted(self._order, key=lambda sid: sid > silent.extended).index(self.member.session)

    def _claim(self, group: Group, evicted: set[int], now: Instant, out: Ready) -> None:
        """Claims what is free, or becomes free by an Evict of this very tick, when its head start allows (A2, A5)."""
        me, watch = self.member.session, self.member.watch
        claims_max = self.member.options.claims_max
        for tp, (observed, _) in list(self._claiming.items()):
            known = group.partitions.get(tp)
            if known is not None and known.version != observed:
                del self._claiming[tp]  # dead for ever (T17): it must not count against claims_max
        for tp, (observed, _) in watch.free().items():
            rank = self._rank_for(group, tp)
            if rank >= 0 and watch.free_waited_ms(tp) >= rank * self.member.third_ms:
                self._try(group, tp, observed, claims_max, now, out)
        if evicted:
            for tp, sid in self._target.items():
                known = group.partitions.get(tp)
                if sid == me and known is not None and known.owner in evicted and not self.shuns(tp):
                    self._try(group, tp, known.version, claims_max, now, out)

    def _rank_for(self, group: Group, tp: TopicPartition) -> int:
        """A2: 0 the named successor or the target, 1 the former owner, then the rest; -1 for who does not take part."""
        me = self.member.session
        known = group.partitions.get(tp)
        if tp.topic not in group.sessions[me].join.topics or self.shuns(tp):
            return -1
        if (known is None or known.position == NONE) and self.member.topics.unfit(group, tp):
            return -1  # nothing is lost there
        first = self._target.get(tp, NONE)
        former = NONE
        if known is not None:
            former = known.last_owner
            if known.successor in self._order:
                first = known.successor
        line = [sid for sid in (first, former) if sid in self._order]
        line += [sid for sid in self._order if sid not in line]
        return list(dict.fromkeys(line)).index(me)

    def _try(self, group: Group, tp: TopicPartition, observed: int, claims_max: int, now: Instant, out: Ready) -> None:
        """Sends one claim, after looking up the start if the log has no position."""
        flying = self._claiming.get(tp)
        if flying is not None and flying[0] == observed and not self.again(flying[1], now):
            return
        if claims_max and len(self.member.claims) + len(self._claiming.keys() - {tp}) >= claims_max:
            return
        known = group.partitions.get(tp)
        start = NONE
        if known is None or known.position == NONE:
            found = self._starts.get(tp)
            fresh_ms = START_FRESH_INTERVALS * self.member.options.interval_ms
            if found is None or now.mono_ms - found[1] > fresh_ms:
                if self.again(self._resolving.get(tp), now):
                    self._resolving[tp] = now.mono_ms
                    out.resolve.append(Wanted(tp, tp.partition >= group.topics[tp.topic].first_count))
                return
            start = found[0]
        self._claiming[tp] = (observed, now.mono_ms)
        self._claimed_observed[tp] = max(observed, self._claimed_observed.get(tp, NONE))
        out.send.append(ClaimingPartition(self.member.session, tp.topic, tp.partition, observed, start))

    def _give(self, group: Group, now: Instant) -> None:
        """A3, the owner's side: hands over what the target gives to a live member that has fetched ahead.

        Handlers may finish, for as long as a successor may have to wait.
        """
        me = self.member.session
        for claim in self.member.claims.values():
            to = self._target.get(claim.tp, me)
            session = group.sessions.get(to)
            fresh = session is not None and to != me and claim.epoch in session.ready and (
                self.member.watch.session_waited_ms(to) < session.join.interval_ms)  # fmt: skip
            if claim.stage is Stage.OPEN and fresh:
                claim.stop("hand-over", now.mono_ms + self.member.options.hand_over_timeout_ms, to)
            elif claim.stage is Stage.DRAINING and claim.reason == "hand-over" and claim.successor not in self._order:
                claim.reopen()

    def _warm(self, group: Group, out: Ready) -> None:
        """A3, the successor's side: fetches ahead what the target takes from a live owner for this member."""
        if not self._taking and not self._warming:
            return
        me = self.member.session
        wanted = {tp: group.partitions[tp].position for tp in self._taking if not self.shuns(tp)}
        for tp in [tp for tp in self._warming if tp not in wanted]:
            known = group.partitions.get(tp)
            if known is None or known.owner == NONE:
                continue  # released for us: keep the buffer, the claim is on its way
            del self._warming[tp]
            if known.owner != me:
                out.cool.append(tp)
        for tp, position in wanted.items():
            if tp not in self._warming:
                self._warming[tp] = False
                out.warm.append((tp, position))

    def ask_grants(self, group: Group, now: Instant, out: Ready) -> None:
        """D2: asks for the ranges that are fetched and not granted: one record for all claims, one at a time (T17)."""
        if self._asking is not None:
            if not self.again(self._asking[1], now):
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
            nonce = self.member.pulse.new_nonce()
            self._asking, self._grants[nonce] = (nonce, now.mono_ms), tuple(ranges)
            if len(self._grants) > SENT_KEPT:
                del self._grants[next(iter(self._grants))]
            out.send.append(ClaimingMessages(self.member.session, tuple(ranges), nonce))

    def _range_of(self, group: Group, claim: Claim) -> MessageRange | None:
        """What is to be asked for in one claim; None nearly always, for all of its offer is granted."""
        offer, tracker = claim.offer, claim.tracker
        if offer is None or claim.stage is not Stage.OPEN or not isinstance(tracker, AtMostOnce):
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
