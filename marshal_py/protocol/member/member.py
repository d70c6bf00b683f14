"""One consumer as a state machine: what it sends, when it delivers, what it claims (PROTOCOL.md, rules T, D and A).

A driver folds each record into the world, then calls `receive`. It calls `tick` when `deadline_ms` comes, after it has
received a record and after the user has acted, and carries out the Ready that `tick` returns. Before it hands over a
message it asks `may_deliver`, and nothing else (D8). Drivers use this class alone. What its parts share is in
member_state.py; they decide who is a candidate (candidacy.py), and what is claimed and released
(rebalance.py).

To park a partition is to release it so that nobody may claim it until its position is set anew (F6.4, F6.5).

The member never changes the world. It ignores acknowledgements of the broker and learns what became of its records by
reading them (T17); there it also notices that a clone, a copy of its process, writes for its session (T18).

Most ticks only count waited time, ten times per interval; heartbeats are due three times per interval. A member is
quiescent while all that it does waits for a known moment or for a record that requests a tick. Until that moment its
ticks are short: they handle waits, topology reports, grants and offset mirroring alone. A short tick comes to the same
result as a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from marshal_py.errors import (
    DuplicateClientId,
    GroupDeleted,
    GroupOpaque,
    InvalidOption,
    InvalidRecord,
    MarshalError,
    ModeMismatch,
    SessionCloned,
)
from marshal_py.protocol.claims import (
    MARK_MS,
    AtLeastOnce,
    AtMostOnce,
    Claim,
    ClaimPhase,
    careful,
    claim_state,
    suspicion,
)
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.fold.world import Group, Partition, Session, Span, World
from marshal_py.protocol.member import advisory, candidacy, rebalance
from marshal_py.protocol.member.advisory import PROBE, Advisory, GroupEvents, silence, unpinned_by
from marshal_py.protocol.member.candidacy import STOPPING, Candidacy
from marshal_py.protocol.member.group_settings import check_consumer, check_declared, check_readers
from marshal_py.protocol.member.member_state import DivergenceCheck, MemberOptions, MemberState, Ready
from marshal_py.protocol.member.rebalance import LEFT_INTERVALS, Rebalancer, Refusals, Releases, Topics
from marshal_py.protocol.time import Due, FailureDetector, both_live
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition, consumes
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    BY_CHARS_MAX,
    HEARTBEAT_ENTRIES_MAX,
    MODE_NAMES,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Note,
    PauseWaited,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
    died,
)

ACCEPTED: Final = Outcome.ACCEPTED  # an enum looks its members up at every use
# Frequent types, which seldom change anything that a tick looks at.
FREQUENT: Final = (Heartbeat, ClaimingMessages)
EVICTED_KEPT: Final = 1_000  # their partitions are claimed long before so many more sessions are evicted
ENTRY_BYTES = 50  # a ClaimState takes at most so many, without its progress
HEARTBEAT_BYTES = 800_000  # T11: of all entries together; codec.VALUE_BYTES_MAX leaves room for 10,000 ready epochs


class Member(MemberState):
    """One client in one group, as a state machine without clock and without I/O."""

    candidacy: Candidacy
    divergence: DivergenceCheck
    join_sent: Instant | None
    rebalancer: Rebalancer
    releases: Releases
    urgent: bool
    session: int
    out: Ready
    detector: FailureDetector
    leaving: str
    join_unread: bytes
    fenced: bool
    orphaned_sessions: dict[int, int]
    leave_sent_ms: int | None
    tick_requested: bool
    quiescent_until_ms: int
    round_trip_ms: int
    grants_lost: int

    def __init__(self, world: World, group: str, options: MemberOptions, draw: Callable[[int], bytes]) -> None:
        """Begins without a session. `world`: the group's log, folded to its end (L7). `draw(n)` returns n random
        bytes."""
        super().__init__(world, group, options, draw)
        self.deadline_ms: int = 0  # monotonic: when to call `tick` at the latest
        self.stalled_ms = 0  # how long the driver's thread did not run lately, as far as it knows
        self.topics: Topics = Topics(self)
        self.refusals: Refusals = Refusals(self)
        self._compose()
        self._fence_is_news = False  # a session begins fenced, which is none
        self._fence_reported = False  # whether the user knows of a fence that has not ended
        self._step_down_sent_ms: int | None = None
        self._pause_end_sent_ms: int | None = None
        self._created_ms: int | None = None  # when the newest GroupConfig was sent
        self._entries_first = 0  # index of the claim that the next heartbeat begins with

    def _compose(self) -> None:
        """Creates the parts of the member that refer to its world: at first, and when `attach` gets another world."""
        self.candidacy = Candidacy(self)
        self.divergence = DivergenceCheck(self)
        self.rebalancer = Rebalancer(self, self.candidacy, self.topics, self.divergence)
        self.releases = Releases(self, self.candidacy, self.topics, self.rebalancer)
        self._shape = -1  # the group's `shape` after the last record
        self._pin_read = NONE  # epoch of the own pin after the last record
        self._events = GroupEvents(self.group)
        self._evicted: dict[int, None] = {}  # the newest sessions that died, to count take-overs
        self._sharers: set[int] = set()  # live sessions of others with this client_id: each is told once

    # --- before a handler

    def may_deliver(self, epoch: int, now: Instant) -> bool:
        """Returns whether a message of the claim may be handed over (D8): the session lives, the claim is this member's
        and OPEN, the lease is valid, the group is not paused. Drivers ask before each one."""
        return self.open_ms(epoch, now) > 0

    def open_ms(self, epoch: int, now: Instant) -> int:
        """Returns for how many ms of the boot clock `may_deliver` stays true if no record is read and the claim stays
        OPEN, so that a driver may hand many over; 0 if it is false now."""
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
        """The driver calls this when it has folded a record into the world; ignores records of other groups."""
        if not self.ended and verdict.group == self.name:
            self._read(verdict, now)

    # --- what the driver reports

    def learn_topic(self, topic: str, count: int, topic_id: str = "") -> bool:
        """Takes a topic's partition count and id ("" if unknown) from the metadata. Returns whether one is new."""
        return self.topics.learn(topic, count, topic_id)

    def forget_topic(self, topic: str) -> None:
        """The driver calls this when the cluster does not have a topic that the patterns match (A13)."""
        self.topics.forget(topic)

    def start_resolved(self, tp: TopicPartition, offset: int, end: int, now: Instant) -> None:
        """The driver has looked up what `Ready.resolve` asked for (D5, A12): reading begins at `offset` (NONE if the
        log has a position), `tp` ends at `end`."""
        self.rebalancer.start_resolved(tp, offset, end, now)

    def prefetched(self, tp: TopicPartition) -> None:
        """The first data of `tp`, fetched ahead, has come, or there is none (A3). The next heartbeat tells the
        owner."""
        self.rebalancer.prefetched(tp)

    def finished(self) -> bool:
        """Handlers have finished messages, or `may_deliver` was False. Returns True if `tick` must be called at once: a
        careful claim waits for a heartbeat that tells the log what is finished (D11)."""
        if not self.poison_guard.watches:
            return False
        group = self.group
        if group is None or not self.poison_guard.report_due(group):
            return False
        self.urgent = True
        self.request_tick()
        return True

    def give_up(self, tp: TopicPartition, detail: str, now: Instant) -> bool:
        """Releases `tp`, which Kafka does not serve here (D13), and parks it if every member has tried in vain.
        `detail`: Kafka's error text. Returns True if nothing is left to deliver."""
        self.rebalancer.back_off(tp, now.mono_ms + LEFT_INTERVALS * self.options.interval_ms)
        return self.refusals.give_up(tp, detail, now)

    def ack_is_late(self, claim: Claim) -> bool:
        """Returns, and counts in `late_acks`, whether an ack comes after the claim's Release or loss."""
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
        Otherwise it delivers and claims nothing (T10)."""
        return self.liveness.healthy(now)

    def proven(self, now: Instant) -> bool:
        """Returns whether an own record sent at most one interval ago was read back: only then do waits count (T2)."""
        return self.liveness.proven(now)

    def backs_off(self, tp: TopicPartition) -> bool:
        """Returns whether this member leaves `tp` to others for a while: its handler hung (D4), or Kafka refused to
        serve it (D13)."""
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
        """Ends the session and loses all claims, because the log begins above what this client has read (N11); returns
        the duties. The driver folds again and calls `attach`, which has a Leave sent if the old session is still
        there."""
        for claim in list(self.claims.values()):
            self.lose(claim, "history truncated")
        self.rebalancer.stop_prefetch(self.out)
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
        """The driver has folded the log once more, as `Ready.refold` asked (G6): `again` is the world at offset `at`,
        None if it failed."""
        if not self.ended:
            self.divergence.refolded(at, again, now)

    # --- entering: the group's settings if it has none, then a Join (A8, T14, T15). Neither is sent if the fold would
    # reject it

    def _enter(self, group: Group | None, now: Instant) -> None:
        """Creates the settings that the user brings if the group has none, then sends a Join with a fresh instance id
        once per interval until one is accepted (T14). If the user stops, it sends nothing, and ends the member when no
        Join on its way may still begin a session."""
        options = self.options
        recent = self.join_sent is not None and now.mono_ms - self.join_sent.mono_ms < options.interval_ms
        if self.leaving:
            if not self.orphaned_sessions and not (recent and self.join_unread):
                self.end(None)
            return
        if recent:
            return
        try:
            self._check_fit(group)
        except InvalidOption as error:
            self.end(error)
            return
        if options.group_config is not None and (group is None or group.config is None):
            if self.retry_due(self._created_ms, now):
                self._created_ms = now.mono_ms
                self.out.send.append(replace(options.group_config, by=options.client_id[:BY_CHARS_MAX]))
            return
        predecessor = NONE
        if options.fast_reclaim and self.join_sent is None and not self.liveness.instances and group is not None:
            mine = [s.id for s in group.sessions.values() if s.join.client_id == options.client_id]
            predecessor = max(mine, default=NONE)  # the user vouches that the process of that session is dead (T15)
        self.join_sent, self.join_unread = now, self.liveness.new_instance(now)
        self.out.send.append(options.join(self.join_unread, predecessor))

    def _check_fit(self, group: Group | None) -> None:
        """Raises InvalidOption if the group is, or has begun to be, what this member may not join."""
        options = self.options
        config = None if group is None else group.config
        if options.group_config is not None:
            check_declared(self.name, config, 0 if group is None else group.mode, options.group_config)
            if group is not None and config is None:
                check_readers(group, options.group_config)
        check_consumer(self.name, options.group_config if config is None else config, options)

    # --- quiescence

    def _begin_quiescence(self, group: Group | None, now: Instant) -> None:
        """After a whole tick: sets `quiescent_until_ms`, until when ticks may be short; 0 if the next must be whole."""
        self.quiescent_until_ms = 0
        if group is None or group.paused or self.session == NONE or self.ended or self.orphaned_sessions or self.fenced:
            return
        if not self.rebalancer.settled() or not self.liveness.healthy(now):
            return
        until_ms = self.liveness.deadline_ms(now)
        hangs_from_ms = self.hangs_from(now.mono_ms)
        if hangs_from_ms is not None:
            until_ms = min(until_ms, hangs_from_ms)
        for claim in self.claims.values():
            if claim.phase is not ClaimPhase.OPEN:
                return
            since_ms = claim.handler_since_ms()
            since_ms = now.mono_ms if since_ms is None else since_ms - MARK_MS  # the grain of delivery times (D4)
            until_ms = min(until_ms, since_ms + self.options.handler_timeout_ms)
        self.quiescent_until_ms = until_ms

    def _quiescent(self, now: Instant) -> bool:
        """Returns whether a short tick is enough: no wait is over, no heartbeat urgent, no stop, all digests agree, the
        lease is valid."""
        if (
            now.mono_ms >= self.quiescent_until_ms
            or self.detector.over()
            or self.urgent
            or self.leaving
            or self.stop_prepared
        ):
            return False
        return not self.divergence.accusations and self.liveness.lease.valid(now) and self.liveness.healthy(now)

    def _tick_quiescent(self, group: Group, now: Instant, out: Ready) -> int:
        """Does a short tick; returns the monotonic ms at which the next tick is due."""
        self.rebalancer.tick_quiescent(group, now, out)
        self.mirror_positions(group, now)
        due_ms = self.rebalancer.grant_requests.due_ms
        wanted = (self.liveness.deadline_ms(now), self.detector.deadline_ms(now), due_ms)
        return min(ms for ms in wanted if ms is not None)

    # --- acting

    def leave(self, now: Instant, reason: str, wait_ms: int) -> None:
        """Begins to leave: delivery stops now, handlers finish within `wait_ms`, all claims are released. `reason`: for
        the Leave."""
        if not self.leaving:
            self.leaving = reason or "stopped"
        for claim in self.claims.values():
            claim.stop(self.leaving, now.mono_ms + wait_ms)

    def prepare_stop(self) -> None:
        """Begins a clean stop: delivery continues while other members take over, partition by partition (A6)."""
        self.stop_prepared = True
        self.request_tick()

    def ready_to_stop(self) -> bool:
        """Returns whether, after `prepare_stop`, waiting longer gains nothing: no claim is left, nobody can take over,
        or this member may not deliver."""
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
                if self._quiescent(now):
                    self.deadline_ms = self._tick_quiescent(group, now, out)
                    self.out = Ready()
                    return out
                if self.divergence.active:
                    self.divergence.settle(group, now)
            self._leave_orphaned_sessions(now)
            if self.session == NONE:
                self._enter(group, now)
            else:
                assert group is not None  # a live session has its group
                self._tick_session(group, now)
                self.releases.report_revoking()
        self.out = Ready()
        out.ended = out.ended or self.ended
        out.error = self.error
        self.deadline_ms = min(self.liveness.deadline_ms(now), self._next_ms(group, now))
        self._begin_quiescence(group, now)
        return out

    def _next_ms(self, group: Group | None, now: Instant) -> int:
        if group is None:
            return now.mono_ms + self.third_ms
        wanted = (self.releases.next_ms(now), self.rebalancer.next_ms(now))
        return min([self.detector.deadline_ms(now), *(ms for ms in wanted if ms is not None)])

    def _leave_orphaned_sessions(self, now: Instant) -> None:
        """Sends a Leave for each session that an older Join of this client began, read late (T14)."""
        for session, sent_ms in self.orphaned_sessions.items():
            if now.mono_ms - sent_ms >= self.third_ms:
                self.orphaned_sessions[session] = now.mono_ms
                self.out.send.append(Leave(session, "superseded"))

    def _tick_session(self, group: Group, now: Instant) -> None:
        """Does what is due in a live session. Sends Releases before heartbeats, because other members wait for them."""
        valid = self.liveness.lease.valid(now)
        if self.fenced == valid:
            self.fenced = not valid
            if self.fenced:
                for claim in self.claims.values():
                    self.drop_grants(claim)
        self._report_fence(now)
        due = self.liveness.due(now)
        if group.paused:
            self._end_pause(group, now)
        self.releases.act(group, now)
        self.releases.release_covers(group, now, self.out)
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
        """Advises that nothing is delivered because no own sign of life comes back, and of the end of that. A lease
        over while healthy is no news: no heartbeat extends it while an owner drains in a pause (F2.2)."""
        if self.fenced and self._fence_is_news and not self.liveness.healthy(now):
            self._fence_is_news, self._fence_reported = False, True
            stalled = self.stalled_ms >= self.third_ms
            text = f"the thread that heartbeats did not run for {self.stalled_ms / 1000:.1f} s"
            text = text if stalled else f"no heartbeat came back for {self.options.interval_ms / 1000:g} s"
            self.advise("fenced", text=text)
        elif not self.fenced:
            if self._fence_reported:
                self.advise("unfenced")
            self._fence_is_news, self._fence_reported = True, False

    def _leave(self, group: Group, now: Instant) -> None:
        """Sends the Leave after the Releases, which the fold rejects of an ended session; after those that give back
        grants and claims on their way were read, or an interval (T16)."""
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
        """Ends a pause after its duration and a time that grows with the rank, so that usually one member does
        (T13)."""
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
        """Sends a heartbeat with the newest digest (G4), and an entry for each claim that differs from the world
        (T11)."""
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

    # --- reading: what became of own records, what others do. Nothing is sent here

    def _read(self, verdict: Verdict, now: Instant) -> None:
        """Takes a record of the group that the driver has just folded into the world."""
        record = verdict.record
        if not isinstance(record, FREQUENT) or verdict.outcome is not ACCEPTED:
            self.request_tick()
        match record:
            case Heartbeat():
                self._read_heartbeat(record, verdict, now)
            case Join():
                self._read_join(record, verdict)
            case Note(kind=advisory.PROBE):
                self.liveness.read_probe(record.text)
            case Note(kind=rebalance.UNREADABLE):
                self.refusals.read(record)
            case ClaimingPartition() if record.session == self.session:
                self._read_claim(record, verdict, now)
            case ReleasingPartition() if record.session == self.session:
                claim = self.claims.get(record.epoch)
                if claim is not None and claim.phase is not ClaimPhase.RELEASING:
                    self._end_as_clone(verdict.offset)
                elif claim is not None and not verdict.accepted:
                    claim.release_sent_ms = None  # rejected, as a grant was read meanwhile: send it again (T16)
                elif verdict.accepted and claim is None and not self.releases.released_cover(record.epoch):
                    self._end_as_clone(verdict.offset)
            case SeekingPartition() if record.session == self.session:
                self._read_seek(record, verdict, now)
            case ClaimingMessages() if record.session == self.session:
                self._read_grant(record, verdict, now)
            case Leave() if record.session == self.session and self.leave_sent_ms is None:
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
        group = self.world.groups.get(self.name)
        if group is not None and self._shape != group.shape:
            self._shape = group.shape
            self._shape_changed(group, verdict, now)
            self._report_pin(verdict)

    def _read_admin_record(self, record: Record, at: int) -> None:
        """Takes an accepted record of an admin or about a topic; queues the advisories on this client's topics."""
        if isinstance(record, Topology):
            self.topics.read(record)
            if record.topic_id:
                self.rebalancer.forget_starts(record.topic)
        if isinstance(record, SetPosition):
            self.refusals.forget(record)
        for kind, tp, to, text in self._events.read(record):
            if tp is None or consumes(self.options.topics, tp.topic):
                topic, partition = tp if tp is not None else ("", NONE)
                self.out.advisories.append(
                    Advisory(kind, self.name, "", topic, partition, to=to, text=text, log=self.world.log, log_offset=at)
                )

    def _read_heartbeat(self, record: Heartbeat, verdict: Verdict, now: Instant) -> None:
        group = self.world.groups.get(self.name)
        session = None if group is None else group.sessions.get(record.session)
        extended = session is not None and session.extended == verdict.offset
        if record.session == self.session:
            self.tick_requested = True  # the lease or a revival (T10) may begin anew: a short tick is enough
            if not self.liveness.read_heartbeat(record.sequence, verdict.accepted, extended):
                self._end_as_clone(verdict.offset)
            elif self.liveness.last_proof is not None:
                self.round_trip_ms = max(0, now.mono_ms - self.liveness.last_proof.mono_ms)
            return
        if extended:
            self.detector.extended(record.session, verdict.offset, now)
            assert group is not None
            assert session is not None
            if session.join.client_id == self.options.client_id:
                self._report_shared(group, session, verdict.offset)
        if not verdict.accepted:
            return
        if record.digest is not None:
            self.divergence.compare(record.session, record.digest, now)
        if record.pause is not None:
            self.detector.credit_pause(record.pause.pause_change, record.pause.waited_ms, now)
        # Another member waits for a partition of this one, the pause may be over, or the digests differ.
        if record.ready or record.pause is not None or self.divergence.accusations:
            self.request_tick()

    def _report_shared(self, group: Group, other: Session, at: int) -> None:
        """Advises the user, once per session, that another live consumer uses the own client_id."""
        own = group.sessions.get(self.session)
        if own is None or other.id in self._sharers or not both_live(own, other):
            return
        self._sharers = {sid for sid in self._sharers if sid in group.sessions} | {other.id}
        text = f"session {other.id} has it, too: give each live process a client_id of its own, or none"
        self.advise("client_id_shared", text=text, at=at, session=other.id)

    def _read_join(self, record: Join, verdict: Verdict) -> None:
        """Makes the session of the newest own Join the member's. Those of older ones are left later (T14)."""
        sent = self.liveness.read_join(record.instance_id)
        if sent is None:
            return
        newest = record.instance_id == self.liveness.newest_instance
        if newest:
            self.join_unread = b""
        if verdict.accepted and newest and self.session == NONE and not self.leaving:
            self.session = verdict.offset
            self.join_sent = None
            self.liveness.begin_session(sent)
            self.advise("joined", at=verdict.offset)
        elif verdict.accepted and verdict.offset != self.session:
            self.orphaned_sessions[verdict.offset] = -self.options.interval_ms
        elif newest and self.session == NONE:
            self._join_refused(verdict.reason)

    def _join_refused(self, reason: str) -> None:
        group = self.group
        if reason == "mode" and group is not None:
            self.end(ModeMismatch(self.name, MODE_NAMES[group.mode], MODE_NAMES[self.options.mode]))
        elif reason == "deleted":
            self.end(GroupDeleted(self.name))
        elif reason == "config":
            self.join_sent = None  # the settings are other ones than those it was judged by: judge again (F1.7)
        elif reason == "malformed":
            self.end(InvalidRecord("Join", "the fold rejected it as malformed"))

    def _note_death(self, session: int) -> None:
        """Remembers a session that did not end itself: others evicted it, or a witness saw its process die."""
        self._evicted[session] = None
        if len(self._evicted) > EVICTED_KEPT:
            del self._evicted[next(iter(self._evicted))]

    def _read_claim(self, record: ClaimingPartition, verdict: Verdict, now: Instant) -> None:
        tp = TopicPartition(record.topic, record.partition)
        if not self.rebalancer.claim_read(tp, record.observed):
            self._end_as_clone(verdict.offset)
            return
        group = self.group
        if not verdict.accepted or group is None:
            return
        self.take_overs += group.partitions[tp].last_owner in self._evicted
        if verdict.unsettled is not None:
            self._report_lost(group.partitions[tp], verdict.unsettled, verdict.offset)
        if tp.partition < 0:
            if tp != PIN:
                self.advise("claimed", tp, epoch=verdict.offset, at=verdict.offset)  # Releases.act releases it
        elif self._begin_claim(group, tp, verdict, now):
            position = group.partitions[tp].position
            self.advise("claimed", tp, epoch=verdict.offset, offset=position, at=verdict.offset)
            if text := suspicion(group, group.partitions[tp]):
                self.advise("poison_message", tp, epoch=verdict.offset, offset=position, text=text, at=verdict.offset)

    def _report_lost(self, partition: Partition, lost: Span, at: int) -> None:
        """Advises the user of what the last owner of a partition, which ended without a Release, may have lost."""
        count = lost.to - lost.start
        self.grants_lost += count
        text = f"at most {count} messages, which were granted to session {partition.last_owner} before it ended"
        self.advise("amo_lost", partition.tp, epoch=at, offset=lost.start, to=lost.to, text=text, at=at)

    def _read_seek(self, record: SeekingPartition, verdict: Verdict, now: Instant) -> None:
        """Replaces the own claim that the record moved. If it was rejected, the claim is released instead (T20)."""
        group = self.group
        claim = self.claims.get(record.epoch)
        if claim is None:
            return  # a copy, of which another was accepted; or the claim has ended since
        if not claim.seek_sent:
            self._end_as_clone(verdict.offset)
        elif not verdict.accepted or group is None:
            claim.give_up_seek()
        else:
            self.replace(claim)
            self._begin_claim(group, claim.tp, verdict, now)
            self.advise(
                "moved",
                claim.tp,
                epoch=verdict.offset,
                offset=claim.released_position,
                to=record.position,
                text="by its owner",
                at=verdict.offset,
            )

    def _begin_claim(self, group: Group, tp: TopicPartition, verdict: Verdict, now: Instant) -> bool:
        """Begins a claim that the record gave to this member. Returns whether it is wanted; only then the user learns
        of it."""
        partition = group.partitions[tp]
        tracker: AtLeastOnce | AtMostOnce
        if group.mode == AT_LEAST_ONCE:
            tracker = AtLeastOnce(partition.position, partition.attempts - 1, partition.in_flight, partition.progress)
        else:
            tracker = AtMostOnce(partition.position)
        topic = group.topics.get(tp.topic)
        claim = Claim(tp, verdict.offset, partition.generation, tracker, "" if topic is None else topic.id)
        claim.pin = self.pin
        if group.config is not None and group.config.lag_weighted:
            claim.end_before = partition.position + partition.lag
        self.claims[verdict.offset] = claim
        self._mirrored.pop(tp, None)  # others have committed since
        unfit = self.topics.unfit(group, tp)
        covered = self.candidacy.owns_cover(group, tp)
        if unfit or self.leaving or self.rebalancer.backs_off(tp) or not covered:
            claim.revoking_reported = True  # the user never learns of this claim
            if unfit:
                claim.park(unfit, records.PARKED_REASON, 0)
            else:
                claim.stop("unwanted", 0)  # a late copy of an older claim was accepted (T17)
            return False
        if careful(group, partition) and self.poison_guard.begin(claim, now):
            self.urgent = True
            self.request_tick()
        claim.told = True
        self.out.claimed.append(claim)
        return True

    def _read_grant(self, record: ClaimingMessages, verdict: Verdict, now: Instant) -> None:
        if not self.rebalancer.grant_requests.read(record, verdict.accepted):
            self._end_as_clone(verdict.offset)
            return
        for index, wanted in enumerate(record.ranges):
            claim = self.claims.get(wanted.epoch)
            if claim is None:
                continue  # the claim has ended, and its grants were dropped and counted, or given back
            assert isinstance(claim.tracker, AtMostOnce)
            if index in verdict.granted:
                claim.tracker.granted(wanted.start, wanted.to)
                if not claim.sealed and not self.liveness.lease.valid(now):
                    self.drop_grants(claim)
            elif claim.tracker.asked == (wanted.from_, wanted.start, wanted.to):
                claim.tracker.asked = None

    def _shape_changed(self, group: Group, verdict: Verdict, now: Instant) -> None:
        """After a change of `Group.shape`: ends own claims and the own session if the world no longer has them."""
        if group.opaque_at != NONE:
            self.end(GroupOpaque(self.name, group.opaque_at))
            return
        session_gone = self.session != NONE and self.session not in group.sessions
        for claim in self._ended_claims(group, verdict):
            reason = claim.reason if claim.phase is ClaimPhase.RELEASING else "session ended"
            released = isinstance(verdict.record, ReleasingPartition) and verdict.record.epoch == claim.epoch
            self.lose(claim, reason, "released" if released else "lost", verdict.offset)
        for session in [sid for sid in self.orphaned_sessions if sid not in group.sessions]:
            del self.orphaned_sessions[session]
        if session_gone:
            self._session_gone(group, verdict, now)
        if group.deleted:
            self.end(GroupDeleted(self.name))

    def _report_pin(self, verdict: Verdict) -> None:
        """Tells the user that this consumer has become the pinned one, or is it no longer (A11)."""
        was, self._pin_read = self._pin_read, self.pin
        if was not in (NONE, self._pin_read):
            self.advise("unpinned", epoch=was, text=unpinned_by(verdict.record), at=verdict.offset)
        if self._pin_read not in (NONE, was):
            self.advise("pinned", epoch=self._pin_read, at=verdict.offset)

    def _ended_claims(self, group: Group, verdict: Verdict) -> list[Claim]:
        """Returns the own claims that the world no longer has; nearly always none, or one that was released."""
        record = verdict.record
        session = group.sessions.get(self.session)
        if session is not None and session.held == len(self.claims):
            return []
        if isinstance(record, ReleasingPartition) and verdict.accepted and record.epoch in self.claims:
            return [self.claims[record.epoch]]
        return [claim for claim in self.claims.values() if claim.epoch not in group.claims]

    def _session_gone(self, group: Group, verdict: Verdict, now: Instant) -> None:
        """Handles the end of the own session: reports why; ends the member if it must not join again (T18, F9.6)."""
        session, self.session = self.session, NONE
        self.liveness.end_session()
        self.rebalancer.forget()
        match verdict.record:
            case Join(instance_id=instance) if instance not in self.liveness.instances:
                self.end(DuplicateClientId(self.name, self.options.client_id, session, verdict.offset))
            case Evict():
                self.advise("evicted", text=silence(verdict.record), at=verdict.offset, session=session)
            case _:
                pass
        if self.leaving:
            self.end(None)
        elif group.mode not in (0, self.options.mode):
            self.end(ModeMismatch(self.name, MODE_NAMES[group.mode], MODE_NAMES[self.options.mode]))

    def _end_as_clone(self, offset: int) -> None:
        self.end(SessionCloned(self.name, self.options.client_id, self.session, offset))
