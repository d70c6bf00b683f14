"""Updates one consumer's state from each record of its group: claims and grants won or lost, what others do.

It runs after the fold. It is the only place where a client learns what became of its own records (PROTOCOL.md T17) and
notices that a clone, a copy of its process, writes for its session (T18). It never sends.
"""

from __future__ import annotations

from typing import Final

from marshal_py.errors import DuplicateClientId, GroupDeleted, GroupOpaque, InvalidRecord, ModeMismatch, SessionCloned
from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.claims.poison_guard import careful, suspicion
from marshal_py.protocol.fold.verdict import Outcome, Verdict
from marshal_py.protocol.fold.world import Group, Partition, Session, Span
from marshal_py.protocol.member import advisory, candidacy, refusals
from marshal_py.protocol.member.advisory import Advisory, GroupEvents, silence, unpinned_by
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.covers import Covers
from marshal_py.protocol.member.divergence import DivergenceCheck
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.rebalance import Rebalancer
from marshal_py.protocol.member.refusals import Refusals
from marshal_py.protocol.member.shared_client_ids import both_live
from marshal_py.protocol.member.topics import Topics
from marshal_py.protocol.wire import parking
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.last_will import died
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    MODE_NAMES,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Note,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from marshal_py.protocol.wire.subscription import consumes

ACCEPTED: Final = Outcome.ACCEPTED  # an enum looks its members up at every use
# Frequent types, which seldom change anything that a tick looks at.
FREQUENT: Final = (Heartbeat, ClaimingMessages)
EVICTED_KEPT: Final = 1_000  # their partitions are claimed long before so many more sessions are evicted


class RecordHandler:
    """Is the part of a member that reads records."""

    def __init__(
        self,
        member: MemberState,
        candidacy: Candidacy,
        topics: Topics,
        rebalancer: Rebalancer,
        divergence: DivergenceCheck,
        refusals: Refusals,
        covers: Covers,
    ) -> None:
        self.member = member
        self.candidacy = candidacy
        self.topics = topics
        self.rebalancer = rebalancer
        self.divergence = divergence
        self.refusals = refusals
        self.covers = covers
        self._shape = -1  # the group's `shape` after the last record
        self._pin = NONE  # epoch of the own pin after the last record
        self._events = GroupEvents(member.group)
        self._evicted: dict[int, None] = {}  # the newest sessions that died, to count take-overs
        self._sharers: set[int] = set()  # live sessions of others with this client_id: each is told once

    def receive(self, verdict: Verdict, now: Instant) -> None:
        """Takes a record of the group that the driver has just folded into the world."""
        member = self.member
        record = verdict.record
        if not isinstance(record, FREQUENT) or verdict.outcome is not ACCEPTED:
            member.request_tick()
        match record:
            case Heartbeat():
                self._read_heartbeat(record, verdict, now)
            case Join():
                self._read_join(record, verdict)
            case Note(kind=advisory.PROBE):
                member.liveness.read_probe(record.text)
            case Note(kind=refusals.UNREADABLE):
                self.refusals.read(record)
            case ClaimingPartition() if record.session == member.session:
                self._read_claim(record, verdict, now)
            case ReleasingPartition() if record.session == member.session:
                claim = member.claims.get(record.epoch)
                if claim is not None and claim.phase is not ClaimPhase.RELEASING:
                    self._end_as_clone(verdict.offset)
                elif claim is not None and not verdict.accepted:
                    claim.release_sent_ms = None  # rejected, as a grant was read meanwhile: send it again (T16)
                elif verdict.accepted and claim is None and not self.covers.sent(record.epoch):
                    self._end_as_clone(verdict.offset)
            case SeekingPartition() if record.session == member.session:
                self._read_seek(record, verdict, now)
            case ClaimingMessages() if record.session == member.session:
                self._read_grant(record, verdict, now)
            case Leave() if record.session == member.session and member.leave_sent_ms is None:
                self._end_as_clone(verdict.offset)
            case StepDown(reason=candidacy.STOPPING) if verdict.accepted:
                self.candidacy.stopping.add(record.session)
            case Evict() if verdict.accepted:
                self._note_death(record.session)
            case Leave() if verdict.accepted and died(record):
                self._note_death(record.session)
            case ReleaseGroup() | SetPosition() | GroupConfig() | Topology() if verdict.accepted:
                self._read_admin_record(record, verdict.offset)
            case _:
                pass
        group = member.world.groups.get(member.name)
        if group is not None and self._shape != group.shape:
            self._shape = group.shape
            self._shape_changed(group, verdict, now)
            self._report_pin(verdict)

    def _read_admin_record(self, record: Record, at: int) -> None:
        """Takes an accepted record of an admin or about a topic; queues the advisories on this client's topics."""
        member = self.member
        if isinstance(record, Topology):
            self.topics.read(record)
            if record.topic_id:
                self.rebalancer.forget_starts(record.topic)
        if isinstance(record, SetPosition):
            self.refusals.forget(record)
        for kind, tp, to, text in self._events.read(record):
            if tp is None or consumes(member.options.topics, tp.topic):
                topic, partition = tp if tp is not None else ("", NONE)
                member.out.advisories.append(
                    Advisory(
                        kind, member.name, "", topic, partition, to=to, text=text, log=member.world.log, log_offset=at
                    )
                )

    def _read_heartbeat(self, record: Heartbeat, verdict: Verdict, now: Instant) -> None:
        member = self.member
        group = member.world.groups.get(member.name)
        session = None if group is None else group.sessions.get(record.session)
        extended = session is not None and session.extended == verdict.offset
        if record.session == member.session:
            member.tick_requested = True  # the lease or a revival (T10) may begin anew: a short tick is enough
            if not member.liveness.read_heartbeat(record.sequence, verdict.accepted, extended):
                self._end_as_clone(verdict.offset)
            elif member.liveness.last_proof is not None:
                member.round_trip_ms = max(0, now.mono_ms - member.liveness.last_proof.mono_ms)
            return
        if extended:
            member.detector.extended(record.session, verdict.offset, now)
            assert group is not None
            assert session is not None
            if session.join.client_id == member.options.client_id:
                self._report_shared(group, session, verdict.offset)
        if not verdict.accepted:
            return
        if record.digest is not None:
            self.divergence.compare(record.session, record.digest, now)
        if record.pause is not None:
            member.detector.credit_pause(record.pause.pause_change, record.pause.waited_ms)
        # Another member waits for a partition of this one, the pause may be over, or the digests differ.
        if record.ready or record.pause is not None or self.divergence.accusations:
            member.request_tick()

    def _report_shared(self, group: Group, other: Session, at: int) -> None:
        """Advises the user, once per session, that another live consumer uses the own client_id."""
        member, own = self.member, group.sessions.get(self.member.session)
        if own is None or other.id in self._sharers or not both_live(own, other):
            return
        self._sharers = {sid for sid in self._sharers if sid in group.sessions} | {other.id}
        text = f"session {other.id} has it, too: give each live process a client_id of its own, or none"
        member.advise("client_id_shared", text=text, at=at, session=other.id)

    def _read_join(self, record: Join, verdict: Verdict) -> None:
        """Makes the session that the newest own Join begins the member's session.

        Sessions that older Joins of this client begin are kept in `orphaned_sessions`, and ticks leave them (T14).
        """
        member = self.member
        sent = member.liveness.read_join(record.instance_id)
        if sent is None:
            return
        newest = record.instance_id == member.liveness.newest_instance
        if newest:
            member.join_unread = b""
        if verdict.accepted and newest and member.session == NONE and not member.leaving:
            member.session = verdict.offset
            member.join_sent = None
            member.liveness.begin_session(sent)
            member.advise("joined", at=verdict.offset)
        elif verdict.accepted and verdict.offset != member.session:
            member.orphaned_sessions[verdict.offset] = -member.options.interval_ms
        elif newest and member.session == NONE:
            self._join_refused(verdict.reason)

    def _join_refused(self, reason: str) -> None:
        member = self.member
        group = member.group
        if reason == "mode" and group is not None:
            member.end(ModeMismatch(member.name, MODE_NAMES[group.mode], MODE_NAMES[member.options.mode]))
        elif reason == "deleted":
            member.end(GroupDeleted(member.name))
        elif reason == "config":
            member.join_sent = None  # the settings are other ones than those it was judged by: judge again (F1.7)
        elif reason == "malformed":
            member.end(InvalidRecord("Join", "the fold rejected it as malformed"))

    def _note_death(self, session: int) -> None:
        """Remembers a session that did not end itself: others evicted it, or a witness saw its process die."""
        self._evicted[session] = None
        if len(self._evicted) > EVICTED_KEPT:
            del self._evicted[next(iter(self._evicted))]

    def _read_claim(self, record: ClaimingPartition, verdict: Verdict, now: Instant) -> None:
        member = self.member
        tp = TopicPartition(record.topic, record.partition)
        if not self.rebalancer.claim_read(tp, record.observed):
            self._end_as_clone(verdict.offset)
            return
        group = member.group
        if not verdict.accepted or group is None:
            return
        member.take_overs += group.partitions[tp].last_owner in self._evicted
        if verdict.unsettled is not None:
            self._report_lost(group.partitions[tp], verdict.unsettled, verdict.offset)
        if tp.partition < 0:
            if tp != PIN:
                member.advise("claimed", tp, epoch=verdict.offset, at=verdict.offset)  # covers.py releases it
        elif self._begin_claim(group, tp, verdict, now):
            position = group.partitions[tp].position
            member.advise("claimed", tp, epoch=verdict.offset, offset=position, at=verdict.offset)
            if text := suspicion(group, group.partitions[tp]):
                member.advise("poison_message", tp, epoch=verdict.offset, offset=position, text=text, at=verdict.offset)

    def _report_lost(self, partition: Partition, lost: Span, at: int) -> None:
        """Advises the user of what the last owner of a partition, which ended without a Release, may have lost."""
        member, count = self.member, lost.to - lost.start
        member.grants_lost += count
        text = f"at most {count} messages, which were granted to session {partition.last_owner} before it ended"
        member.advise("amo_lost", partition.tp, epoch=at, offset=lost.start, to=lost.to, text=text, at=at)

    def _read_seek(self, record: SeekingPartition, verdict: Verdict, now: Instant) -> None:
        """Replaces the own claim that the record moved. If it was rejected, the claim is released instead (T20)."""
        member, group = self.member, self.member.group
        claim = member.claims.get(record.epoch)
        if claim is None:
            return  # a copy, of which another was accepted; or the claim has ended since
        if not claim.seek_sent:
            self._end_as_clone(verdict.offset)
        elif not verdict.accepted or group is None:
            claim.give_up_seek()
        else:
            member.replace(claim)
            self._begin_claim(group, claim.tp, verdict, now)
            member.advise(
                "moved",
                claim.tp,
                epoch=verdict.offset,
                offset=claim.released_position,
                to=record.position,
                text="by its owner",
                at=verdict.offset,
            )

    def _begin_claim(self, group: Group, tp: TopicPartition, verdict: Verdict, now: Instant) -> bool:
        """Begins a claim that the record at hand gave to this member. Returns whether it is wanted.

        Only then the user learns of it.
        """
        member, partition = self.member, group.partitions[tp]
        tracker: AtLeastOnce | AtMostOnce
        if group.mode == AT_LEAST_ONCE:
            tracker = AtLeastOnce(partition.position, partition.attempts - 1, partition.in_flight, partition.progress)
        else:
            tracker = AtMostOnce(partition.position)
        topic = group.topics.get(tp.topic)
        claim = Claim(tp, verdict.offset, partition.generation, tracker, "" if topic is None else topic.id)
        claim.pin = member.pin
        if group.config is not None and group.config.lag_weighted:
            claim.end_before = partition.position + partition.lag
        member.claims[verdict.offset] = claim
        unfit = self.topics.unfit(group, tp)
        covered = self.candidacy.owns_cover(group, tp)
        if unfit or member.leaving or self.rebalancer.backs_off(tp) or not covered:
            claim.revoking_reported = True  # the user never learns of this claim
            if unfit:
                claim.park(unfit, parking.PARKED_REASON, 0)
            else:
                claim.stop("unwanted", 0)  # a late copy of an older claim was accepted (T17)
            return False
        if careful(group, partition) and member.poison_guard.begin(claim, now):
            member.urgent = True
            member.request_tick()
        claim.told = True
        member.out.claimed.append(claim)
        return True

    def _read_grant(self, record: ClaimingMessages, verdict: Verdict, now: Instant) -> None:
        member = self.member
        if not self.rebalancer.grant_requests.read(record, verdict.accepted):
            self._end_as_clone(verdict.offset)
            return
        for index, wanted in enumerate(record.ranges):
            claim = member.claims.get(wanted.epoch)
            if claim is None:
                continue  # the claim has ended, and its grants were dropped and counted, or given back
            assert isinstance(claim.tracker, AtMostOnce)
            if index in verdict.granted:
                claim.tracker.granted(wanted.start, wanted.to)
                if not claim.sealed and not member.liveness.lease.valid(now) and not member.options.deliver_late:
                    member.drop_grants(claim)
            elif claim.tracker.asked == (wanted.from_, wanted.start, wanted.to):
                claim.tracker.asked = None

    def _shape_changed(self, group: Group, verdict: Verdict, now: Instant) -> None:
        """Ends own claims and the own session if the world no longer has them.

        Is called when a record has changed `Group.shape`, that is, more than positions and counts.
        """
        member = self.member
        if group.opaque_at != NONE:
            member.end(GroupOpaque(member.name, group.opaque_at))
            return
        session_gone = member.session != NONE and member.session not in group.sessions
        for claim in self._ended_claims(group, verdict):
            reason = claim.reason if claim.phase is ClaimPhase.RELEASING else "session ended"
            released = isinstance(verdict.record, ReleasingPartition) and verdict.record.epoch == claim.epoch
            member.lose(claim, reason, "released" if released else "lost", verdict.offset)
        for session in [sid for sid in member.orphaned_sessions if sid not in group.sessions]:
            del member.orphaned_sessions[session]
        if session_gone:
            self._session_gone(group, verdict, now)
        if group.deleted:
            member.end(GroupDeleted(member.name))

    def _report_pin(self, verdict: Verdict) -> None:
        """Tells the user that this consumer has become the pinned one, or is it no longer (A11)."""
        was, self._pin = self._pin, self.member.pin
        if was not in (NONE, self._pin):
            self.member.advise("unpinned", epoch=was, text=unpinned_by(verdict.record), at=verdict.offset)
        if self._pin not in (NONE, was):
            self.member.advise("pinned", epoch=self._pin, at=verdict.offset)

    def _ended_claims(self, group: Group, verdict: Verdict) -> list[Claim]:
        """Returns the own claims that the world no longer has; nearly always none, or one that was released."""
        member, record = self.member, verdict.record
        session = group.sessions.get(member.session)
        if session is not None and session.held == len(member.claims):
            return []
        if isinstance(record, ReleasingPartition) and verdict.accepted and record.epoch in member.claims:
            return [member.claims[record.epoch]]
        return [claim for claim in member.claims.values() if claim.epoch not in group.claims]

    def _session_gone(self, group: Group, verdict: Verdict, now: Instant) -> None:
        """Handles the end of the own session: reports why; ends the member if it must not join again (T18, F9.6)."""
        member = self.member
        session, member.session = member.session, NONE
        member.liveness.end_session()
        self.rebalancer.forget()
        match verdict.record:
            case Join(instance_id=instance) if instance not in member.liveness.instances:
                member.end(DuplicateClientId(member.name, member.options.client_id, session, verdict.offset))
            case Evict():
                member.advise("evicted", text=silence(verdict.record), at=verdict.offset, session=session)
            case _:
                pass
        if member.leaving:
            member.end(None)
        elif group.mode not in (0, member.options.mode):
            member.end(ModeMismatch(member.name, MODE_NAMES[group.mode], MODE_NAMES[member.options.mode]))

    def _end_as_clone(self, offset: int) -> None:
        member = self.member
        member.end(SessionCloned(member.name, member.options.client_id, member.session, offset))
