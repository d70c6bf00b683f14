"""One consumer as a state machine: what it sends, when it delivers, what it claims (PROTOCOL.md, rules T, D and A).

A driver folds each record into the world, then calls `receive`. It calls `tick` when `deadline_ms` comes, after it has
received a record and after the user has acted, and carries out the Ready that `tick` returns. Before it hands over a
message it asks `may_deliver`, and nothing else (D8). Drivers use this class alone; its state is in member_state.py, and
each part has a file of its own.

To park a partition is to release it so that nobody may claim it until its position is set anew (F6.4, F6.5).

The member never changes the world. It ignores acknowledgements of the broker and learns what became of its records by
reading them (T17).
"""

from __future__ import annotations

from collections.abc import Callable

from marshal_py.errors import GroupDeleted, GroupOpaque, MarshalError
from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.claim_records import claim_state
from marshal_py.protocol.fold.verdict import Verdict
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.member.advisory import PROBE
from marshal_py.protocol.member.candidacy import STOPPING, Candidacy
from marshal_py.protocol.member.covers import Covers
from marshal_py.protocol.member.divergence import DivergenceCheck
from marshal_py.protocol.member.entry import Entry
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.quiescence import Quiescence
from marshal_py.protocol.member.ready import MemberOptions, Ready
from marshal_py.protocol.member.rebalance import Rebalancer
from marshal_py.protocol.member.record_handler import RecordHandler
from marshal_py.protocol.member.refusals import LEFT_INTERVALS, Refusals
from marshal_py.protocol.member.releases import Releases
from marshal_py.protocol.member.topics import Topics
from marshal_py.protocol.time.failure_detector import FailureDetector
from marshal_py.protocol.time.liveness import Due
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import (
    BY_CHARS_MAX,
    HEARTBEAT_ENTRIES_MAX,
    ClaimState,
    Heartbeat,
    Leave,
    Note,
    PauseWaited,
    ReleaseGroup,
    StepDown,
)

ENTRY_BYTES = 50  # a ClaimState takes at most so many, without its progress
HEARTBEAT_BYTES = 800_000  # T11: of all entries together; codec.VALUE_BYTES_MAX leaves room for 10,000 ready epochs


class Member(MemberState):
    """Is one client in one group, as a state machine without clock and without I/O."""

    candidacy: Candidacy
    divergence: DivergenceCheck
    join_sent: Instant | None
    rebalancer: Rebalancer
    releases: Releases
    quiescence: Quiescence
    record_handler: RecordHandler
    urgent: bool
    session: int
    out: Ready
    detector: FailureDetector
    leaving: str
    join_unread: bytes
    fenced: bool
    orphaned_sessions: dict[int, int]
    leave_sent_ms: int | None

    def __init__(self, world: World, group: str, options: MemberOptions, draw: Callable[[int], bytes]) -> None:
        """Begins without a session. `world` is the group's log, folded to its end (L7).

        `draw(n)` returns n random bytes.
        """
        super().__init__(world, group, options, draw)
        self.deadline_ms: int = 0  # monotonic: when to call `tick` at the latest
        self.stalled_ms = 0  # how long the driver's thread did not run lately, as far as it knows
        self.topics: Topics = Topics(self)
        self.refusals: Refusals = Refusals(self)
        self.entry: Entry = Entry(self)
        self._compose()
        self._fence_is_news = False  # a session begins fenced, which is none
        self._fence_reported = False  # whether the user knows of a fence that has not ended
        self._step_down_sent_ms: int | None = None
        self._pause_end_sent_ms: int | None = None
        self._entries_first = 0  # index of the claim that the next heartbeat begins with

    def _compose(self) -> None:
        """Creates the parts of the member that refer to its world: at first, and when `attach` gets another world."""
        self.candidacy = Candidacy(self)
        self.divergence = DivergenceCheck(self)
        self.rebalancer = Rebalancer(self, self.candidacy, self.topics, self.divergence)
        self.releases = Releases(self, self.candidacy, self.topics, self.rebalancer)
        self.quiescence = Quiescence(self, self.rebalancer, self.divergence)
        self.covers: Covers = Covers(self, self.candidacy, self.topics, self.rebalancer)
        self.record_handler = RecordHandler(
            self, self.candidacy, self.topics, self.rebalancer, self.divergence, self.refusals, self.covers
        )

    # --- before a handler

    def may_deliver(self, epoch: int, now: Instant) -> bool:
        """Returns whether a message of the claim may be handed over; a driver asks this before each one (D8).

        It may if the session is live, the claim is this member's and OPEN (claim.py), the lease is valid and the group
        is not paused.
        """
        return self.open_ms(epoch, now) > 0

    def open_ms(self, epoch: int, now: Instant) -> int:
        """Returns for how many ms from `now` `may_deliver` stays true, if no record is read and the claim stays OPEN.

        Returns 0 if it is false at `now`. A driver that hands over many messages asks again before so many ms have
        passed on the boot clock.
        """
        claim = self.claims.get(epoch)
        if claim is None or claim.phase is not ClaimPhase.OPEN or self.session == NONE or self.ended:
            return 0
        group = self.world.groups.get(self.name)
        if group is None or group.pause_duration_ms > 0:
            return 0
        if claim.one_by_one and not self.poison_guard.opens(claim, group, now, self.liveness.awaits_echo()):
            return 0
        return self.liveness.lease.left_ms(now) + 1

    # --- reading

    def receive(self, verdict: Verdict, now: Instant) -> None:
        """Is called by the driver when it has folded a record into the world; ignores records of other groups."""
        if not self.ended and verdict.group == self.name:
            self.record_handler.receive(verdict, now)

    # --- what the driver reports

    def learn_topic(self, topic: str, count: int, topic_id: str = "") -> bool:
        """Takes a topic's partition count and id from the cluster's metadata; `topic_id` is "" if it is not known.

        Returns True if the count or the id is new to this member.
        """
        return self.topics.learn(topic, count, topic_id)

    def forget_topic(self, topic: str) -> None:
        """Is called by the driver when the cluster does not have a topic that the patterns match (A13)."""
        self.topics.forget(topic)

    def start_resolved(self, tp: TopicPartition, offset: int, end: int, now: Instant) -> None:
        """Is called by the driver when it has looked up what `Ready.resolve` asked for (D5, A12).

        Reading begins at `offset`, NONE if the log has a position of `tp`; the partition ends at `end`.
        """
        self.rebalancer.start_resolved(tp, offset, end, now)

    def prefetched(self, tp: TopicPartition) -> None:
        """Is called by the driver when the first data of `tp`, which it fetches ahead, has come, or there is none (A3).

        The next heartbeat tells the owner, which may then hand the partition over.
        """
        self.rebalancer.prefetched(tp)

    def finished(self) -> bool:
        """Is called by the driver when handlers have finished messages, and when `may_deliver` was False.

        Returns True if it must call `tick` at once: a careful claim hands a message over only when the log shows what
        is finished and what counts as delivered (D11), and the tick sends a heartbeat that says so.
        """
        group = self.group
        if group is None or not self.poison_guard.report_due(group):
            return False
        self.urgent = True
        self.request_tick()
        return True

    def give_up(self, tp: TopicPartition, detail: str, now: Instant) -> bool:
        """Releases `tp`, which Kafka does not serve to this client (D13). `detail`: the cluster's error text.

        The Release parks the partition if every member has tried in vain. Returns True if this member has nothing left
        to deliver.
        """
        self.rebalancer.back_off(tp, now.mono_ms + LEFT_INTERVALS * self.options.interval_ms)
        return self.refusals.give_up(tp, detail, now)

    def ack_is_late(self, claim: Claim) -> bool:
        """Returns whether an ack comes too late to count, because the claim's Release was sent or the claim is lost.

        Counts such acks in `late_acks`.
        """
        if claim.sealed:
            self.late_acks += 1
            return True
        return False

    # --- what the driver may ask

    def tick_due(self, now: Instant) -> bool:
        return self.tick_requested or now.mono_ms >= self.deadline_ms

    def lease_left_ms(self, now: Instant) -> int:
        """Returns for how many ms from `now` the lease lets deliveries begin; negative if the lease is over."""
        return self.liveness.lease.left_ms(now)

    def healthy(self, now: Instant) -> bool:
        """Returns whether an own Join or heartbeat sent at most one interval ago was read back as accepted (T9).

        A member that is not healthy delivers and claims nothing (T10).
        """
        return self.liveness.healthy(now)

    def proven(self, now: Instant) -> bool:
        """Returns whether an own record that was sent at most one interval ago was read back.

        Only then does the time that this member waits on others count (T2).
        """
        return self.liveness.proven(now)

    def backs_off(self, tp: TopicPartition) -> bool:
        """Returns whether this member leaves `tp` to others for a while.

        It does after one of its handlers hung (D4) and after Kafka has refused to serve the partition (D13).
        """
        return self.rebalancer.backs_off(tp)

    @property
    def found_topics(self) -> frozenset[str]:
        """Returns the topics that this member consumes, those included that its patterns have found."""
        return self.topics.own - {PIN.topic}

    def unfit(self, group: Group, tp: TopicPartition) -> str:
        """Returns why `tp` cannot be consumed, so that its owner must park it: the name of an error; "" if it can."""
        return self.topics.unfit(group, tp)

    def awaits_hand_overs(self, group: Group) -> bool:
        """Returns whether the target assignment gives this member partitions that live members still own (A3)."""
        return self.candidacy.awaits_hand_overs(group)

    @property
    def newest_instance(self) -> bytes:
        """Returns the instance id of the newest Join that this client has sent; b"" before the first."""
        return self.liveness.newest_instance

    # --- endings

    def fail(self, error: MarshalError) -> None:
        """Ends the member with `error` and fences it, because the log cannot be trusted any more (S14)."""
        self.end(error)

    def detach(self) -> Ready:
        """Ends the session and loses all claims, because the log now begins above what this client has read (N11).

        The driver then folds the log anew and calls `attach`. If the new world still has the old session, the member
        sends a Leave for it. Returns the driver's duties.
        """
        for claim in list(self.claims.values()):
            self.lose(claim, "history truncated")
        if self.session != NONE:
            self.orphaned_sessions[self.session] = -self.options.interval_ms
        self.session, self.join_sent = NONE, None
        self.quiescent_until_ms = 0
        self.liveness.end_session()
        out, self.out = self.out, Ready()
        return out

    def attach(self, world: World) -> None:
        """Continues in another world, which the driver has folded to the log's end, and joins again (N11)."""
        self.world = world
        world.watched.add(self.name)
        self._compose()
        self.detector = FailureDetector(self.options.interval_ms)
        live = self.group.sessions if self.group is not None else {}
        self.orphaned_sessions = {sid: sent_ms for sid, sent_ms in self.orphaned_sessions.items() if sid in live}
        self.request_tick()

    def refolded(self, at: int, again: World | None, now: Instant) -> None:
        """Is called by the driver when it has folded the log once more, as `Ready.refold` asked (G6).

        `again`: the world that the second fold gave at offset `at`; None if folding failed.
        """
        if not self.ended:
            self.divergence.refolded(at, again, now)

    # --- acting

    def leave(self, now: Instant, reason: str, wait_ms: int) -> None:
        """Begins to leave the group: delivery stops now, handlers finish within `wait_ms`, all claims are released.

        `reason`: a text for the Leave, "stopped" if it is "".
        """
        if not self.leaving:
            self.leaving = reason or "stopped"
        for claim in self.claims.values():
            claim.stop(self.leaving, now.mono_ms + wait_ms)

    def prepare_stop(self) -> None:
        """Begins a clean stop: delivery continues while other members take over, partition by partition (A6)."""
        self.stop_prepared = True
        self.request_tick()

    def ready_to_stop(self) -> bool:
        """Returns whether it is time to call `leave`: after `prepare_stop`, waiting longer would gain nothing.

        That is so when no claim is left, when no other member can take over, or when this member may not deliver.
        """
        group = self.group
        if group is None or self.session == NONE or self.ended or group.paused or self.fenced:
            return True
        return not self.claims or not self.candidacy.can_hand_over(group)

    def ask_grants(self, now: Instant) -> Ready:
        """Does only that part of a tick that asks for grants, because a user waits for messages (D2)."""
        out, group = Ready(), self.group
        able = self.session != NONE and not self.ended and not self.leaving and not self.divergence.active
        able = able and self.liveness.healthy(now)
        if able and group is not None and not group.paused and self.liveness.lease.valid(now):
            due_ms = self.rebalancer.grant_requests.ask(group, now, out)
            if due_ms is not None:
                self.deadline_ms = min(self.deadline_ms, due_ms)
        return out

    def tick(self, now: Instant) -> Ready:
        """Does all that is due at `now`; returns the driver's duties. Call it again at `deadline_ms` at the latest."""
        out = self.out
        group = self.group
        self.tick_requested = False
        if not self.ended and group is not None and (group.deleted or group.opaque_at != NONE):
            self.end(GroupDeleted(self.name) if group.deleted else GroupOpaque(self.name, group.opaque_at))
        if not self.ended:
            if group is not None:
                self.detector.refresh(group, now, self.liveness.proven(now))
                if self.quiescence.holds(now):
                    self.deadline_ms = self.quiescence.tick(group, now, out)
                    self.out = Ready()
                    return out
                if self.divergence.active:
                    self.divergence.settle(group, now)
            self._leave_orphaned_sessions(now)
            if self.session == NONE:
                self.entry.act(group, now)
            else:
                assert group is not None  # a live session has its group
                self._tick_session(group, now)
                self.releases.report_revoking()
        self.out = Ready()
        out.ended = out.ended or self.ended
        out.error = self.error
        self.deadline_ms = min(self.liveness.deadline_ms(now), self._next_ms(group, now))
        self.quiescence.begin(group, now)
        return out

    def _next_ms(self, group: Group | None, now: Instant) -> int:
        if group is None:
            return now.mono_ms + self.third_ms
        wanted = (self.releases.next_ms(now), self.rebalancer.next_ms(now))
        return min([self.detector.deadline_ms(now), *(ms for ms in wanted if ms is not None)])

    def _leave_orphaned_sessions(self, now: Instant) -> None:
        """Sends a Leave for each session of this client that it does not use (T14).

        An older Join of this client began such a session, and was read late.
        """
        for session, sent_ms in self.orphaned_sessions.items():
            if now.mono_ms - sent_ms >= self.third_ms:
                self.orphaned_sessions[session] = now.mono_ms
                self.out.send.append(Leave(session, "superseded"))

    def _tick_session(self, group: Group, now: Instant) -> None:
        """Does what is due in a live session. Sends Releases before heartbeats, because other members wait for them."""
        valid = self.liveness.lease.valid(now)
        if self.fenced == valid:
            self.fenced = not valid
            if self.fenced and not self.options.deliver_late:
                for claim in self.claims.values():
                    self.drop_grants(claim)
        self._report_fence(now)
        due = self.liveness.due(now)
        if group.paused:
            self._end_pause(group, now)
        self.releases.act(group, now)
        self.covers.act(group, now, self.out)
        if self.stop_prepared and not self.leaving:
            self._step_down(group, now)
        if self.leaving:
            self._leave(group, now)
        elif self.liveness.healthy(now) and valid and not group.paused:
            self.rebalancer.act(group, now, self.out)
        else:
            self.rebalancer.stop_prefetch(self.out)
        if due is Due.PROBE:
            self.out.send.append(Note(self.session, PROBE, text=self.liveness.new_probe(now)))
        elif due is Due.HEARTBEAT or (self.urgent and self.liveness.healthy(now)):
            self._heartbeat(group, now)
        self.mirror_positions(group, now)

    def _report_fence(self, now: Instant) -> None:
        """Advises the user that nothing is delivered because no own sign of life comes back, and of the end of that.

        A lease that is over while the member is healthy is no news: no heartbeat extends it while an owner drains in a
        pause (F2.2), and nothing is delivered then anyway.
        """
        if self.fenced and self._fence_is_news and not self.liveness.healthy(now):
            self._fence_is_news, self._fence_reported = False, True
            stalled = self.stalled_ms >= self.third_ms
            text = f"the thread that heartbeats did not run for {self.stalled_ms / 1000:.1f} s" if stalled else ""
            self.advise("fenced", text=text)
        elif not self.fenced:
            if self._fence_reported:
                self.advise("unfenced")
            self._fence_is_news, self._fence_reported = True, False

    def _leave(self, group: Group, now: Instant) -> None:
        """Sends the Leave after the Releases, because the fold rejects Releases of a session that has ended.

        A Release that gives back grants may be rejected, and a claim that was sent may still be accepted. So the Leave
        waits until this client has read what became of both, for an interval at most (T16).
        """
        if self.rebalancer.awaits_claims(group, now):
            return
        for claim in self.claims.values():
            waits = isinstance(claim.tracker, AtMostOnce) and now.mono_ms - claim.sealed_ms < self.options.interval_ms
            if claim.phase is not ClaimPhase.RELEASING or waits:
                return
        if self.retry_due(self.leave_sent_ms, now):
            self.leave_sent_ms = now.mono_ms
            self.out.send.append(Leave(self.session, self.leaving))

    def _step_down(self, group: Group, now: Instant) -> None:
        """Sends a StepDown, after which the others' target assignments leave this member out (A6)."""
        if group.sessions[self.session].mark != NONE or not self.candidacy.can_hand_over(group):
            return
        if self.retry_due(self._step_down_sent_ms, now):
            self._step_down_sent_ms = now.mono_ms
            self.out.send.append(StepDown(self.session, NONE, STOPPING, self.options.client_id[:BY_CHARS_MAX]))

    def _end_pause(self, group: Group, now: Instant) -> None:
        """Ends a pause when this client has waited for its duration, and a time that grows with its rank (T13).

        So usually only one member sends this record.
        """
        need_ms = group.pause_duration_ms + self.candidacy.rank(group) * self.third_ms
        if self.detector.pause_waited_ms() < need_ms:
            return
        if self.retry_due(self._pause_end_sent_ms, now):
            self._pause_end_sent_ms = now.mono_ms
            self.out.send.append(
                ReleaseGroup(
                    group.pause_change,
                    NONE,
                    0,
                    self.detector.pause_waited_ms(),
                    reason="waited out",
                    by=self.options.client_id[:BY_CHARS_MAX],
                )
            )

    def _heartbeat(self, group: Group, now: Instant) -> None:
        """Sends a heartbeat with the newest digest (G4).

        It has an entry for each claim whose state differs from the world (T11).
        """
        self.urgent = False
        entries: list[ClaimState] = []
        size_bytes = 0
        claims = list(self.claims.values())
        first, self._entries_first = self._entries_first, 0
        for at, claim in enumerate(claims[first:] + claims[:first], first):
            # A claim whose Release was sent gets an entry like any other, because the Release may be lost.
            entry = claim_state(group.partitions[claim.tp], claim)
            if entry is None:
                continue
            size_bytes += ENTRY_BYTES + len(entry.progress)
            if len(entries) == HEARTBEAT_ENTRIES_MAX or size_bytes > HEARTBEAT_BYTES:
                self._entries_first = at % len(claims)  # the next heartbeat begins with the rest
                break
            entries.append(entry)
        pause = PauseWaited(group.pause_change, self.detector.pause_waited_ms()) if group.paused else None
        ready, digest = self.rebalancer.ready(group), self.world.checkpoints.get(self.name)
        sequence = self.liveness.new_sequence(now)
        self.out.send.append(Heartbeat(self.session, sequence, tuple(entries), ready, pause, digest, self.idle_ms(now)))
