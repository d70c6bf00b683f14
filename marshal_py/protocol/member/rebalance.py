"""What one member does with partitions: the topics that it knows, and what it evicts, claims, asks for and releases.

Whether an attempt succeeds, the fold decides. A mistake in this file costs progress and never safety: every record
names the version of the state on which its sender decided (`observed`), and the fold rejects the record if that has
changed. The target is the assignment that candidacy.py computes. The start of a partition is the offset at which
reading begins if the log has no position of it. `Rebalancer.act` must be called only while the member is healthy (T9),
its lease is valid and the group is not paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from marshal_py.protocol.claims import AtMostOnce, Claim, ClaimPhase, release
from marshal_py.protocol.fold.world import Group, Partition, Topic
from marshal_py.protocol.member.candidacy import Candidacy, Overflow
from marshal_py.protocol.member.member_state import SENT_AT_ONCE, DivergenceCheck, MemberState, Ready, Wanted
from marshal_py.protocol.policy import Target
from marshal_py.protocol.time import SENT_KEPT, FailureDetector
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition, consumes, has_patterns, names_of
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    BY_CHARS_MAX,
    EVICT_INTERVALS,
    GRANT_OFFSETS_MAX,
    HEARTBEAT_ENTRIES_MAX,
    OFFSET_MAX,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    MessageRange,
    Note,
    ReleasingPartition,
    SetPosition,
    Topology,
)

# --- Compares partition counts and ids of a member's topics in the cluster and in the log (F9.1, F9.10, D10)
#
# Where they differ, it writes a Topology record. A topic with another id was recreated, that is deleted and created
# again; the owners park its partitions, so that nobody may claim them until their positions are set. The driver reports
# the cluster's metadata.
#
# A member with patterns takes a partition only after the driver has reported its topic (A13).


GONE: Final = "topic deleted"  # reason of a Release
BELIEVED_MS: Final = 10_000  # a broker that lags for longer has lost its controller (broker.session.timeout.ms: 9 s)
REPLACED_IDS_KEPT: Final = 100  # no broker lags so far behind that it still reports a topic which was replaced so often


class Topics:
    """Knows the cluster's metadata of its topics."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.patterns: bool = has_patterns(member.options.topics)
        self._named = frozenset((*names_of(member.options.topics), PIN.topic))
        self.own: frozenset[str] = self._named  # topics of which this member may claim partitions, and the pin's
        self.counts: dict[str, int] = {}  # topic -> partition count
        self.ids: dict[str, str] = {}  # topic -> its id in the cluster, for the topics whose id is known
        self._log_ids: dict[str, str] = {}  # topic -> id in the log as this member last read it
        self._replaced_ids: dict[str, None] = {}  # ids that the log has replaced; Kafka never gives an id twice
        # topic -> (id that the log has replaced, since when the cluster tells nothing else, in ms)
        self._denied: dict[str, tuple[str, int | None]] = {}
        # topic -> (count, id, when sent, in ms) of the newest own Topology
        self._sent: dict[str, tuple[int, str, int]] = {}
        # topic -> when the cluster was asked (ms), for those of which the log has another id than this member knew
        self._asked: dict[str, int | None] = {}

    def learn(self, topic: str, count: int, topic_id: str = "") -> bool:
        """Takes a topic's count and id ("" if unknown) in the cluster; returns whether one is new. An id that the log
        has replaced is ignored, as some brokers lag behind, until the cluster has told no other for BELIEVED_MS: then
        the member that replaced it had asked such a broker."""
        if topic_id in self._replaced_ids:
            if self._denied.get(topic, ("", None))[0] != topic_id:
                self._denied[topic] = topic_id, None
            return False
        self._denied.pop(topic, None)
        group = self.member.group
        if group is not None and topic in group.topics:
            self._log_ids[topic] = group.topics[topic].id
        known = self.counts.get(topic), self.ids.get(topic, "")
        self.counts[topic] = count
        self._asked.pop(topic, None)
        if topic_id:
            self.ids[topic] = topic_id
        changed = known != (count, self.ids.get(topic, ""))
        if changed:
            self._look_again()
        return changed

    def forget(self, topic: str) -> None:
        """Gives up a topic that the patterns match and that the cluster does not have any more (A13)."""
        self.member.gone_topics |= {topic}
        self.counts.pop(topic, None)
        self.ids.pop(topic, None)
        self._asked.pop(topic, None)  # else it would be asked for without end
        self._denied.pop(topic, None)
        self._look_again()

    def _leave_gone(self, now: Instant) -> None:
        """Stops claims of topics that are gone. Handlers may finish for an interval."""
        for claim in self.member.claims.values() if self.patterns else ():
            if claim.tp.topic not in self.own and claim.phase is ClaimPhase.OPEN:
                claim.stop(GONE, now.mono_ms + self.member.options.interval_ms)

    def _look_again(self) -> None:
        if self.patterns:
            topics = self.member.options.topics
            self.own = self._named.union(topic for topic in self.counts if consumes(topics, topic))
            self.member.gone_topics -= self.own
        self.member.request_tick()

    def recreated(self, group: Group, topic: str) -> bool:
        """Returns whether the topic was recreated, so that the log's positions are those of the deleted topic (D10)."""
        known, found = group.topics.get(topic), self.ids.get(topic, "")
        return known is not None and "" not in (known.id, found) and known.id != found

    def unfit(self, group: Group, tp: TopicPartition) -> str:
        """Returns why the owner of this partition must park it, as the name of an error; "" if it can be consumed."""
        return records.RECREATED if self.recreated(group, tp.topic) else ""

    def park(self, group: Group, now: Instant) -> None:
        """Stops delivery of topics that were recreated (D10) or are gone (A13); Releases parks them when handlers
        are done, or after an interval."""
        self._leave_gone(now)
        if not any(self.recreated(group, topic) for topic in self.ids):
            return
        for claim in self.member.claims.values():
            reason = self.unfit(group, claim.tp)
            if reason and not claim.sealed:
                claim.park(reason, records.PARKED_REASON, now.mono_ms + self.member.options.interval_ms)

    def is_unknown(self, topic: str) -> bool:
        """Returns whether this member claims nothing of a topic yet, because it has to ask for its id again (D10)."""
        return topic in self._asked

    def read(self, record: Topology) -> None:
        """Takes an accepted Topology. If this member knows another id, it forgets it and asks the cluster again: the
        one or the other is of a topic that is gone, and its sender may have heard it from a broker that lags behind.
        """
        before = self._log_ids.get(record.topic, "")
        if record.topic_id:
            self._log_ids[record.topic] = record.topic_id
            self._replaced_ids.pop(record.topic_id, None)
            self._denied.pop(record.topic, None)
            if before not in ("", record.topic_id):
                self._replaced_ids[before] = None
                if len(self._replaced_ids) > REPLACED_IDS_KEPT:
                    del self._replaced_ids[next(iter(self._replaced_ids))]
        if record.topic_id and self.ids.get(record.topic) not in (None, record.topic_id):
            del self.ids[record.topic]
            self.counts.pop(record.topic, None)
            self._asked[record.topic] = None
            self._look_again()
        if self.patterns and record.topic not in self.counts and consumes(self.member.options.topics, record.topic):
            self.member.out.look_at_topics = True

    def write(self, group: Group, candidacy: Candidacy, now: Instant, out: Ready) -> None:
        """Writes a Topology for each topic that differs from the log. Rank k waits k thirds, so that usually one member
        does."""
        member = self.member
        for topic, asked_ms in self._asked.items():
            if member.retry_due(asked_ms, now):
                self._asked[topic], out.look_at_topics = now.mono_ms, True
        for topic, (denied, since_ms) in list(self._denied.items()):
            if since_ms is None:
                self._denied[topic] = denied, now.mono_ms
            elif now.mono_ms - since_ms >= BELIEVED_MS:
                del self._denied[topic]
                self._replaced_ids.pop(denied, None)
                out.look_at_topics = True
        for topic, count in self.counts.items():
            known, found = group.topics.get(topic), self.ids.get(topic, "")
            if known is not None:
                if self.recreated(group, topic):
                    if not self._may_accept(group, topic):
                        continue
                else:
                    count = max(count, known.count)  # only an admin may reduce partitions (F9.2)
                    if count == known.count and found in ("", known.id):
                        continue
            sent = self._sent.get(topic)
            if sent is None or sent[:2] != (count, found):
                later_ms = (candidacy.rank(group) - 1) * member.third_ms
                sent = self._sent[topic] = (count, found, now.mono_ms + later_ms)
            if member.retry_due(sent[2], now):
                self._sent[topic] = (count, found, now.mono_ms)
                observed, by = group.topology_offset(topic), member.options.client_id[:BY_CHARS_MAX]
                out.send.append(Topology(topic, count, observed, NONE, by, found))

    def _may_accept(self, group: Group, topic: str) -> bool:
        """Returns whether this member may write a recreated topic's new id (D10): the group continues by itself, and
        nobody owns a partition of the old one."""
        held = any(part.owner != NONE for tp, part in group.partitions.items() if tp.topic == topic)
        return self.member.continues_recreated_topics and not held


# --- Which topics of a consumer its group did not have when it began: they may begin at their beginning (PROTOCOL.md
# D5).
#
# A consumer asks when it joins, with the group as the log shows it then.


def new_topics(group: Group | None, topics: Sequence[str]) -> frozenset[str]:
    """Returns the consumer's topics that its group does not have yet; none if it has none of them, as a new group."""
    unknown = frozenset(topics) - (group.topics.keys() if group is not None else set())
    return unknown if len(unknown) < len(topics) else frozenset()


def found_later(group: Group | None, topics: tuple[str, ...], found: Sequence[str]) -> frozenset[str]:
    """Returns which of the topics that a joining consumer's patterns match came after the group began (D5): those
    unknown to the log while it knows others of the consumer, or members that found none; and those that became known
    after another one was claimed, as their finder may have died. `topics`: as in the Join; `found`: all."""
    if group is None:
        return frozenset()
    named, known = names_of(topics), group.topics
    # A Join gives the group its mode, unless its settings name one: then only live sessions show that somebody joined.
    joined = bool(group.sessions) or (bool(group.mode) and not (group.config is not None and group.config.mode))
    # A member reports what it has found before its first heartbeat.
    waited = (
        joined
        and group.pause_change == NONE
        and not known
        and all(session.extended > session.id for session in group.sessions.values())
    )
    began = waited or any(topic in known for topic in found)
    claimed = sorted((p.version, tp.topic) for tp, p in group.partitions.items() if p.version != NONE)

    def is_later(topic: str) -> bool:
        if topic not in known:
            return began
        first = next((version for version, other in claimed if other != topic and other in found), OFFSET_MAX)
        return first < known[topic].offset

    return frozenset(topic for topic in found if topic not in named and is_later(topic))


# --- Decides when it is this member's turn to try each partition that nobody owns (PROTOCOL.md A2).
#
# A member of rank k waits k thirds of an interval from when it first saw the partition free. A heap keeps these
# waits, so that a tick looks only at partitions whose wait is over: in a large group thousands may be free that
# others will take.


class HeadStarts:
    """Keeps the free partitions of one member's topics: those that it may try now, and those whose turn is later."""

    def __init__(self, third_ms: int) -> None:
        self._third_ms = third_ms
        self._later: list[tuple[int, TopicPartition, int]] = []  # (end of the wait, partition, version), a heap
        self._due: dict[TopicPartition, int] = {}  # partition -> version
        # (revision, floor_ms of the clock, topics) as of the last call
        self._seen: tuple[int, int, frozenset[str]] = (-1, -1, frozenset())
        self._shape = -1

    def due(
        self,
        group: Group,
        detector: FailureDetector,
        revision: int,
        rank: Callable[[TopicPartition], int | None],
        topics: frozenset[str],
    ) -> dict[TopicPartition, int]:
        """Returns the partitions of `topics` that this member may try to claim now, with their versions. `rank`: for a
        partition, None if it may not. `revision` grows when ranks may have changed."""
        free, seen = detector.free(), (revision, detector.clock.floor_ms, topics)
        changed = group.changed_since(self._shape) if seen == self._seen else None
        self._seen, self._shape = seen, group.shape
        if changed is None or any(isinstance(entry, Topic | Group) for entry in changed):
            self._due.clear()
            self._later.clear()
            looked_at: Iterable[TopicPartition] = free
        else:
            looked_at = [entry.tp for entry in changed if isinstance(entry, Partition)]
        for tp in looked_at:
            self._due.pop(tp, None)
            if tp in free and tp.topic in topics:
                turn = rank(tp)
                if turn is not None:
                    self._wait(tp, detector, turn * self._third_ms)
        while self._later and self._later[0][0] <= detector.clock.counted_ms:
            _, tp, version = heappop(self._later)
            if tp in free and free[tp][0] == version:
                self._due[tp] = version
        return self._due

    def _wait(self, tp: TopicPartition, detector: FailureDetector, wait_ms: int) -> None:
        version, began = detector.free()[tp]
        if wait_ms:
            heappush(self._later, (detector.clock.over_at(began, wait_ms), tp, version))
        else:
            self._due[tp] = version


# --- Decides when one member asks for grants, in at-most-once mode, and remembers what it asked for (PROTOCOL.md D2,
# T17).
#
# A grant is the log's permission to deliver a range of offsets. The driver says which ranges it wants (`Claim.offer`).
# One record asks for all of them, and the next one follows GRANT_PACE_MS later at the earliest: so a sparse message
# gets its grant at once, and a stream does not fill the log. Times are monotonic ms.


GRANTS_AHEAD: Final = 2  # D2: one range is handled while the next one is asked for
GRANT_PACE_MS: Final = 34  # so that a session sends at most 30 ClaimingMessages in any second


class GrantRequests:
    """Asks for grants, in at-most-once mode."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        # nonce -> ranges, of the newest ClaimingMessages that were sent (T18)
        self._sent: dict[int, tuple[MessageRange, ...]] = {}
        self._asking: tuple[int, int] | None = None  # (nonce, when sent) of the ClaimingMessages in flight
        self._sent_ms: int | None = None  # when the last one was sent
        self.due_ms: int | None = None  # when to call `ask` again, because it was too early; None if nothing waits

    def awaited(self, now: Instant) -> bool:
        """Returns whether no grant can be asked for now, because the last record that asked was not read yet."""
        return self._asking is not None and not self.member.retry_due(self._asking[1], now)

    def read(self, record: ClaimingMessages, accepted: bool) -> bool:
        """Takes an own session's ClaimingMessages. Returns False if this client never sent it, by nonce or ranges: a
        clone did (T18), and this process must not deliver its grants (D2)."""
        if self._asking is not None and self._asking[0] == record.nonce:
            self._asking = None
        sent = self._sent.get(record.nonce)
        if sent is None:
            oldest = next(iter(self._sent), None)
            # a late copy of a record that is no longer kept
            return not accepted and oldest is not None and record.nonce < oldest
        return sent == record.ranges

    def forget(self) -> None:
        """Forgets what is in flight, because the session has ended and the next one has sent none of it."""
        self._sent.clear()
        self._asking = self._sent_ms = self.due_ms = None

    def ask(self, group: Group, now: Instant, out: Ready) -> int | None:
        """Asks for grants of all claims' ranges in one record (D2), when the last one was read or is overdue (T17) and
        GRANT_PACE_MS have passed; else returns until when to wait."""
        self.due_ms = None
        if self.awaited(now):
            return None
        if self._asking is not None:
            self._asking = None
            for claim in self.member.claims.values():
                if isinstance(claim.tracker, AtMostOnce):
                    claim.tracker.asked = None
        early = self._sent_ms is not None and now.mono_ms - self._sent_ms < GRANT_PACE_MS
        asked: list[tuple[AtMostOnce, MessageRange]] = []
        for claim in self.member.claims.values():
            wanted = self._range_of(group, claim)
            if wanted is not None:
                asked.append(wanted)
                if early or len(asked) == HEARTBEAT_ENTRIES_MAX:
                    break
        if not asked:
            return None
        if early and self._sent_ms is not None:
            self.due_ms = self._sent_ms + GRANT_PACE_MS
            return self.due_ms
        for tracker, wanted_range in asked:
            tracker.asked = (wanted_range.from_, wanted_range.start, wanted_range.to)
        ranges = tuple(wanted_range for _, wanted_range in asked)
        nonce = self.member.liveness.new_nonce()
        self._asking, self._sent[nonce], self._sent_ms = (nonce, now.mono_ms), ranges, now.mono_ms
        if len(self._sent) > SENT_KEPT:
            del self._sent[next(iter(self._sent))]
        out.send.append(ClaimingMessages(self.member.session, ranges, nonce))
        return None

    def _range_of(self, group: Group, claim: Claim) -> tuple[AtMostOnce, MessageRange] | None:
        """Returns the range to ask for in one claim, from what the driver wants and has no grant of (`Claim.offer`); or
        None."""
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
        return tracker, MessageRange(claim.epoch, from_, start, to)


# --- Decides which partition a member releases because it falls behind there (PROTOCOL.md D16).
#
# The speeds of a partition and of its owner are compared over one window, in offsets: by how much the end has grown,
# and by how much the position. Both are looked at together, at the beginning and at the end of the window. A member
# whose buffers are full does not fetch, so it learns of a new end only now and then: at such a moment a window ends.


KEPT = 1  # claims that a member does not release: nothing else takes its owner's time
FASTER = 2  # a taker has less than half of the own lag, so that two members do not pass a partition to and fro


class _Look(NamedTuple):
    """What was seen of a claim when its window began."""

    epoch: int
    mono_ms: int
    position: int
    end: int


class FallingBehind:
    """Releases partitions whose messages come faster than the member handles them."""

    def __init__(
        self, member: MemberState, candidacy: Candidacy, back_off: Callable[[TopicPartition, int], None]
    ) -> None:
        self.member = member
        self.candidacy = candidacy
        self._back_off = back_off
        self._looks: dict[TopicPartition, _Look] = {}
        self._ends: dict[TopicPartition, int] = {}  # of the partitions in `_looks`, at the last look

    @property
    def watches(self) -> bool:
        """Returns whether this member must look at its claims with every tick."""
        return self.member.options.release_behind_ms > 0 and not self.candidacy.moves

    def act(self, group: Group, now: Instant) -> None:
        """Looks at all claims. If it falls behind on some, and somebody can take one, stops the one with most lag."""
        if not self.watches:
            self._looks.clear()
            return
        claims = list(self.member.claims.values())
        behind = [claim for claim in claims if self._behind(claim, now)]
        for gone in self._looks.keys() - {claim.tp for claim in claims}:
            del self._looks[gone]
        self._ends = {claim.tp: claim.end_offset for claim in claims}
        if not behind or len(claims) <= KEPT or any(claim.phase is not ClaimPhase.OPEN for claim in claims):
            return
        worst = max(behind, key=lambda claim: (_lag(claim), -claim.epoch))
        taker = self._taker(group, worst.tp.topic, sum(map(_lag, claims)))
        if taker != NONE:
            until_ms = now.mono_ms + self.member.options.hand_over_timeout_ms
            worst.stop("falls behind", until_ms, taker)
            self._back_off(worst.tp, now.mono_ms + self.member.options.release_behind_ms)
            self._looks.clear()  # one per window

    def _behind(self, claim: Claim, now: Instant) -> bool:
        """Returns whether a window of this claim ends now in which it fell behind; begins a window if none runs."""
        position, end, begun = claim.position(), claim.end_offset, self._looks.get(claim.tp)
        if claim.phase is not ClaimPhase.OPEN or end == NONE:
            self._looks.pop(claim.tp, None)
            return False
        if begun is not None and begun.epoch == claim.epoch and position >= begun.position and end >= begun.end:
            new_end = end != self._ends.get(claim.tp)
            if not new_end or now.mono_ms - begun.mono_ms < self.member.options.release_behind_ms:
                return False
            handled, came = position - begun.position, end - begun.end
            self._looks[claim.tp] = _Look(claim.epoch, now.mono_ms, position, end)
            return 0 < handled < came and _lag(claim) > handled
        self._looks[claim.tp] = _Look(claim.epoch, now.mono_ms, position, end)
        return False

    def _taker(self, group: Group, topic: str, lag: int) -> int:
        """Returns the session with the smallest lag that can take a partition of `topic`, or NONE. `lag`: this
        member's, over all its partitions."""
        able = [sid for sid in self.candidacy.others(group, topic) if group.sessions[sid].mark == NONE]
        lags = {sid: sum(group.claims[epoch].lag for epoch in group.sessions[sid].epochs) for sid in able}
        best = min(able, key=lambda sid: lags[sid], default=NONE)
        return best if best != NONE and FASTER * lags[best] < lag else NONE


def _lag(claim: Claim) -> int:
    return claim.lag(claim.position())


START_FRESH_INTERVALS = 1  # a looked-up start is not used when it is older than this; "latest" changes all the time


# --- Decides which evictions, claims, hand-overs and grants a member tries to get (PROTOCOL.md T4, D2 and A)


class Rebalancer:
    """Evicts, claims, hands partitions over and asks for grants."""

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
        """Takes an own session's ClaimingPartition. Returns False if this client never sent it with `observed`: a clone
        did (T18)."""
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
        """Returns the epochs of others' claims that this member has fetched ahead (A3), the lowest that fit a
        heartbeat."""
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
        """Sends due evictions, claims and requests, and hands partitions over. While a digest differs it only evicts
        (G6)."""
        self._now_ms, self._more = now.mono_ms, False
        self.candidacy.refresh(group)
        self.candidacy.look(group, now, out)
        self.topics.write(group, self.candidacy, now, out)
        evicted = self._evict(group, now, out)
        if self.divergence.active:
            return
        if self._may_claim():
            self._claim(group, evicted, now, out)
        if self.candidacy.moves:
            self._hand_over(group, now)
            self._prefetch(group, out)
        self.falling_behind.act(group, now)
        self.grant_requests.ask(group, now, out)

    def _may_claim(self) -> bool:
        """Returns whether this member claims and fetches ahead: it neither is about to stop (A6) nor hangs (D4)."""
        return not (self.member.stop_prepared or self.member.hangs(self._now_ms))

    def settled(self) -> bool:
        """Returns whether `act` has nothing to do until the world changes or a wait ends: no claim in flight, nobody to
        evict, and the target moves nothing to or from this member."""
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
        """Returns when `act` must be called again for work that it put off, waits aside; None without any, or if not
        called at `now`."""
        if self._now_ms != now.mono_ms:
            return None
        wait_ms = 1 if self._more else self.candidacy.wait_ms()
        # While a digest differs nobody asks for grants, and the time at which one was due may be over.
        due = None if self.divergence.active else self.grant_requests.due_ms
        return due if wait_ms is None else min(now.mono_ms + wait_ms, now.mono_ms + wait_ms if due is None else due)

    def tick_quiescent(self, group: Group, now: Instant, out: Ready) -> None:
        """Does what a short tick needs (member.py): writes topology and, in at-most-once mode, asks for grants."""
        self._now_ms = now.mono_ms
        self.topics.write(group, self.candidacy, now, out)
        if group.mode == AT_MOST_ONCE:
            self.grant_requests.ask(group, now, out)

    def _evict(self, group: Group, now: Instant, out: Ready) -> set[int]:
        """Evicts sessions that were silent for long enough; returns their ids. Rank k waits k thirds longer (T4)."""
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

    def _forget_stale_claims(self, group: Group, now: Instant) -> None:
        """Forgets claims in flight whose partition has another version now, and those sent an interval ago, which are
        lost: neither counts for claims_max, nor holds up a cover (T17)."""
        for tp, (observed, sent_ms) in list(self._claiming.items()):
            known = group.partitions.get(tp)
            changed = known is not None and known.version != observed
            if changed or now.mono_ms - sent_ms >= self.member.options.interval_ms:
                del self._claiming[tp]

    def awaits_claims(self, group: Group, now: Instant) -> bool:
        """Returns whether a claim that was sent less than an interval ago may still be accepted (T16)."""
        self._forget_stale_claims(group, now)
        return bool(self._claiming)

    def _claim(self, group: Group, evicted: set[int], now: Instant, out: Ready) -> None:
        """Claims free partitions whose turn it is, up to claims_max (A2, A5), and what the target gives here of the
        sessions `evicted` by this tick."""
        seen = self.candidacy
        self._forget_stale_claims(group, now)
        due = self._head_starts.due(
            group, self.member.detector, seen.revision, lambda tp: seen.rank_for(group, tp), self.topics.own
        )
        wanted = list(due.items())
        for tp in seen.mine if evicted else ():
            known = group.partitions.get(tp)
            if known is not None and known.owner in evicted and tp.topic in self.topics.own:
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
        """Returns how many claims, those in flight included, count against claims_max beside `tp` (A5): topics under a
        policy of whole topics."""
        if not self.candidacy.covered:
            return len(self.member.claims) + len(self._claiming) - (tp in self._claiming)
        if tp.partition >= 0:
            return 0
        session = group.sessions[self.member.session]
        return len(session.epochs) - session.held + sum(one.partition < 0 and one != tp for one in self._claiming)

    def claims_topic(self, group: Group, topic: str, now: Instant) -> bool:
        """Returns whether a claim of the topic or in it is in flight. The pin's topic ("") stands for all."""
        self._forget_stale_claims(group, now)
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
        if self.topics.is_unknown(tp.topic):
            return
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
        """Stops own claims that the target gives to a member that has fetched them ahead (A3); handlers have
        hand_over_timeout_ms. If that member goes before, delivery continues."""
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
        """Returns whether a claim goes though nobody has fetched it ahead (A7): under a restricted policy this member
        is not in line, and nobody there is, or it has waited for the successor for an interval."""
        if self.candidacy.in_line(claim.tp):
            claim.out_of_line_ms = None
            return False
        if claim.out_of_line_ms is None:
            claim.out_of_line_ms = now.mono_ms
        return to == NONE or now.mono_ms - claim.out_of_line_ms >= self.member.options.interval_ms

    def _ready_of(self, group: Group, sid: int) -> frozenset[int]:
        """Returns the epochs that a session has reported as fetched ahead; none if it was silent for an interval."""
        session = group.sessions.get(sid)
        if session is None or self.member.detector.session_waited_ms(sid) >= session.join.interval_ms:
            return frozenset()
        return frozenset(session.ready)

    def _prefetch(self, group: Group, out: Ready) -> None:
        """Has the driver fetch ahead what the target gives here and others own (A3), and nothing else: of a topic that
        this member may claim (A13, D10), or its owner hands over what then lies idle."""
        taking, me = self.candidacy.taking if self._may_claim() else [], self.member.session
        if not taking and not self._prefetching:
            return
        wanted = {
            tp: owned.position
            for tp in taking
            if (owned := group.partitions[tp]).owner not in (NONE, me)
            and not self.backs_off(tp)
            and tp.topic in self.topics.own
            and not self.topics.is_unknown(tp.topic)
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


# --- Decides when a member releases its claims, and until when handlers may finish (PROTOCOL.md T12, T16, D4, D6, D10)
#
# A claim is stopped first, so that no more messages of it are handed over. Its Release follows when its handlers are
# done, or when their time is over.


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
                claim.seal_for_release(now.mono_ms)
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
