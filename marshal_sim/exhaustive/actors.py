"""One process of a small model: the shipped Member or admin operation, with its fetches and handlers, driven by hand.

The search calls an actor's events (`read`, `tick`, `deliver`, ...). The actor notes in an `Effects` what it sent, what
its handlers did, and which promise about its own records it broke. `Member.may_deliver` alone decides whether a message
may go to a handler. An actor holds its world by reference and never changes it, so one world serves every actor that
has read the same prefix of a log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct, field

from marshal_py.admin.plans.operation import Author, GroupContext, Operation, Terms
from marshal_py.admin.plans.position import PositionPlan
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.protocol.claims import AtLeastOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import Evict, Heartbeat, Record, ReleasingPartition
from marshal_sim.exhaustive.deterministic_bytes import DeterministicBytes
from marshal_sim.oracle.rules import EVICT_INTERVALS

GROUP: Final = "g"
TOPIC: Final = "t"
INTERVAL_MS: Final = 3_000
QUANTUM_MS: Final = INTERVAL_MS // 3  # time passes in thirds of an interval, the unit of heartbeats and ranks
ORIGIN_MS: Final = 1_000_000
OFFER: Final = 1  # messages that are asked for at a time: few, so that grants follow one another
ROUNDS_MAX: Final = 9  # ticks at one time: each answers what the last one asked for


def instant(now_ms: int) -> Instant:
    return Instant(now_ms, now_ms, now_ms)


class Effects(Struct):
    """Says what one event of an actor did to the actor's surroundings."""

    sent: list[tuple[Record, int]] = field(default_factory=list)  # record, when
    handed: tuple[int, int, bool] | None = None  # epoch, offset, whether it is the claim's first
    ended: tuple[int, int] | None = None  # epoch, offset whose handler is done
    broken: str = ""


class FetchedMessages:
    """The messages of one claim, all fetched at once, and what its handlers did, as the actor itself counts
    it.
    """

    __slots__ = ("claim", "first", "handed_to", "low", "run")

    def __init__(self, claim: Claim, messages: int) -> None:
        self.claim: Claim = claim
        self.first: bool = True
        self.low: int = -1  # at least once: every offset below it that was handed over is finished
        self.handed_to: int = (
            -1
        )  # at most once: the offset after the highest that was handed over, else the claim's first
        self.run: OffsetRun | None = None
        tracker = claim.tracker
        if isinstance(tracker, AtLeastOnce):
            self.low = tracker.position()
            if self.low < messages:
                _, self.run = tracker.admit(range(self.low, messages))
        else:
            self.handed_to = tracker.delivered_to
        claim.saw_end(messages)

    def offer(self, messages: int) -> None:
        """Sets on the claim the range to ask a grant for, in at-most-once mode: the next OFFER messages without a
        grant.
        """
        tracker = self.claim.tracker
        if not isinstance(tracker, AtLeastOnce) and tracker.granted_to() < messages:
            self.claim.offer = (tracker.granted_to(), min(tracker.granted_to() + OFFER, messages))

    def next_offset(self) -> int:
        """Returns the offset of the message that could be handed over next, or -1."""
        tracker = self.claim.tracker
        if isinstance(tracker, AtLeastOnce):
            run = self.run
            return -1 if run is None or run.delivered >= len(run.offsets) else run.offsets[run.delivered]
        for grant in tracker.grants:
            offset = max(grant.start, tracker.delivered_to)
            if offset < grant.to:
                return offset
        return -1


class Actor:
    """Stands for a process that reads the log and writes to it."""

    def __init__(self, number: int) -> None:
        self.number: int = number
        self.random_bytes: DeterministicBytes = DeterministicBytes(number)
        self.read_ms: dict[int, int] = {}  # offset of an extension of a live session -> when it was read (S15)
        self.woken: bool = True  # something happened since the last tick
        self.over = False
        self.loaded = 0  # the checkpoint at which it began from a snapshot; 0: at the log's beginning
        self.said = ""  # at its end: what an admin reports of its move, or the name of a consumer's error

    @property
    def deadline_ms(self) -> int:
        raise NotImplementedError

    def attach(self, world: World | None) -> None:
        """Sets the world, which holds the prefix of the log that the actor has read. None is set before the actor is
        stored.
        """
        raise NotImplementedError

    def receive(self, verdict: Verdict, now_ms: int) -> None:
        raise NotImplementedError

    def act(self, now_ms: int, effects: Effects) -> bool:
        """Does one tick; returns True if another tick must follow at once."""
        raise NotImplementedError

    def read(self, world: World, verdict: Verdict, now_ms: int) -> None:
        """Takes one more record that was folded. `world` is the world after it, `verdict` the fold's verdict on it."""
        self.attach(world)
        self.receive(verdict, now_ms)
        self.woken = True
        self.note_extensions(world, now_ms)

    def note_extensions(self, world: World, now_ms: int) -> None:
        """Notes the offset of each live session's newest extension, and when the actor read it."""
        group = world.groups.get(GROUP)
        held = sorted(session.extended for session in group.sessions.values()) if group is not None else ()
        self.read_ms = {offset: self.read_ms.get(offset, now_ms) for offset in held}

    def tick(self, now_ms: int, effects: Effects) -> None:
        for _ in range(ROUNDS_MAX):
            if self.over or not self.act(now_ms, effects):
                break
        self.woken = False
        for record, sent_ms in effects.sent:
            if isinstance(record, Evict):
                self._check_evict(record, sent_ms, effects)

    def run(self, now_ms: int, end_ms: int, effects: Effects) -> None:
        """Lets time pass until `end_ms` without reading: the actor ticks at each of its deadlines."""
        while not self.over:
            now_ms = max(now_ms + 1, self.deadline_ms)
            if now_ms > end_ms:
                break
            self.tick(now_ms, effects)

    def _check_evict(self, record: Evict, sent_ms: int, effects: Effects) -> None:
        """Notes a breach of S15 at the sender of an Evict.

        Before it sends the record, it must have waited two intervals since it read the extension that the record names.
        """
        read_ms = self.read_ms.get(record.observed)
        if read_ms is None or sent_ms - read_ms < EVICT_INTERVALS * INTERVAL_MS:
            effects.broken = f"S15: Evict of session {record.session}, whose newest sign was read at {read_ms}"

    def become_clone(self, number: int) -> None:
        """Makes this actor the copy of a cloned machine: from now on it draws other random bytes."""
        self.number = self.random_bytes.number = number

    def next_epochs(self) -> tuple[int, ...]:
        """Returns the epochs of claims with a message that could be handed over, if `may_deliver` allows it."""
        return ()

    def handler_messages(self) -> tuple[tuple[int, int], ...]:
        """Returns epoch and offset of each message that a handler holds."""
        return ()


class Consumer(Actor):
    """Stands for a consumer: one Member, and handlers that take one message per claim at a time."""

    said: str

    def __init__(
        self, number: int, options: MemberOptions, world: World, counts: dict[str, int], messages: int
    ) -> None:
        super().__init__(number)
        self.member: Member = Member(world, GROUP, options, self.random_bytes)
        for topic, count in counts.items():
            self.member.learn_topic(topic, count)
        self.messages = messages
        self.feeds: dict[int, FetchedMessages] = {}
        self.busy: list[tuple[int, int, FetchedMessages | None]] = []  # epoch, offset, feed that takes the ack

    @property
    def deadline_ms(self) -> int:
        return self.member.deadline_ms

    def attach(self, world: World | None) -> None:
        self.member.world = world  # type: ignore[assignment]  # None only while it is stored

    def receive(self, verdict: Verdict, now_ms: int) -> None:
        self.member.receive(verdict, instant(now_ms))

    def act(self, now_ms: int, effects: Effects) -> bool:
        now, member = instant(now_ms), self.member
        for feed in self.feeds.values():
            feed.offer(self.messages)
        ready = member.tick(now)
        for claim, _ in ready.lost:
            self.feeds.pop(claim.epoch, None)
        for record in ready.send:
            effects.sent.append((record, now_ms))
            if isinstance(record, Heartbeat):
                self._check_heartbeat(record, effects)
            elif isinstance(record, ReleasingPartition):
                self._check_position(record.epoch, record.position, effects)
                self._check_give(record, effects)
        if ready.refold != NONE:
            effects.broken = "S1: a member reads of another state than its own"
        if ready.ended:
            self.over = True
            self.said = "" if ready.error is None else type(ready.error).__name__
            return False
        for claim in ready.claimed:
            if claim.phase is not ClaimPhase.GONE:
                self.feeds[claim.epoch] = FetchedMessages(claim, self.messages)
        for tp, _ in ready.start_prefetch:
            member.prefetched(tp)
        for wanted in ready.resolve:
            member.start_resolved(wanted.tp, NONE if wanted.end_only else 0, self.messages, now)
        return bool(ready.claimed or ready.start_prefetch or ready.resolve) or member.deadline_ms <= now_ms + 1

    def _check_heartbeat(self, record: Heartbeat, effects: Effects) -> None:
        """Notes a breach of S8 or S9: a position that a heartbeat reports, or leaves as it was, must be how far
        handlers finished.
        """
        group = self.member.group
        if group is None:
            return
        named = {entry.epoch: entry.position for entry in record.claims}
        for epoch, feed in self.feeds.items():
            if isinstance(feed.claim.tracker, AtLeastOnce):
                self._check_position(epoch, named.get(epoch, group.partitions[feed.claim.tp].position), effects)

    def _check_position(self, epoch: int, position: int, effects: Effects) -> None:
        feed = self.feeds.get(epoch)
        if feed is not None and feed.low >= 0 and position != feed.low:
            invariant = "S8" if position > feed.low else "S9"
            effects.broken = f"{invariant}: epoch {epoch} is reported at {position} with all below {feed.low} finished"

    def _check_give(self, record: ReleasingPartition, effects: Effects) -> None:
        """Notes a breach of S6: a ReleasingPartition gives back every granted message that was not handed over, and no
        other.
        """
        feed = self.feeds.get(record.epoch)
        if feed is not None and feed.handed_to >= 0 and record.give != feed.handed_to:
            effects.broken = f"S6: epoch {record.epoch} is given back to {record.give}, handed over to {feed.handed_to}"

    # --- handlers

    def next_epochs(self) -> tuple[int, ...]:
        if self.over:
            return ()
        held = {epoch for epoch, _, feed in self.busy if feed is not None}
        return tuple(epoch for epoch, feed in self.feeds.items() if epoch not in held and feed.next_offset() >= 0)

    def handler_messages(self) -> tuple[tuple[int, int], ...]:
        return tuple((epoch, offset) for epoch, offset, _ in self.busy)

    def deliver(self, epoch: int, now_ms: int, effects: Effects) -> None:
        """Hands the claim's next message to a handler, if `may_deliver` allows it."""
        feed = self.feeds[epoch]
        tracker, offset = feed.claim.tracker, feed.next_offset()
        if not isinstance(tracker, AtLeastOnce) and not tracker.holds(offset):
            return
        if not self.member.may_deliver(epoch, instant(now_ms)):
            return
        if isinstance(tracker, AtLeastOnce):
            assert feed.run is not None
            feed.run.deliver(1, now_ms)
        else:
            tracker.deliver(offset, now_ms)
            feed.handed_to = offset + 1
        effects.handed = (epoch, offset, feed.first)
        feed.first = False
        self.busy.append((epoch, offset, feed))

    def finish(self, at: int, now_ms: int, effects: Effects) -> None:
        """Ends the handler number `at`, and acknowledges its message."""
        epoch, offset, feed = self.busy.pop(at)
        effects.ended = (epoch, offset)
        if feed is None:
            return
        tracker = feed.claim.tracker
        if not isinstance(tracker, AtLeastOnce):
            tracker.returned()
        elif not self.member.ack_is_late(feed.claim):
            assert feed.run is not None
            feed.run.finish(feed.run.offsets.index(offset))
            if offset == feed.low:
                feed.low += 1
        if feed.claim.phase is ClaimPhase.DRAINING:
            self.tick(now_ms, effects)

    def leave(self, now_ms: int, effects: Effects) -> None:
        """Plays the user, who stops the consumer and gives its handlers one more interval."""
        self.member.leave(instant(now_ms), "stopped", INTERVAL_MS)
        self.tick(now_ms, effects)


class AdminActor(Actor):
    """Stands for an admin's tool, which carries out one operation."""

    said: str

    def __init__(
        self, number: int, name: str, world: World, plan: type[Operation], position: int, history: Iterable[Verdict]
    ) -> None:
        """Begins the operation `plan`. `position` is the offset that a move sets; `history` has a verdict on each
        record so far.
        """
        super().__init__(number)
        author = Author.of(name, "host", "marshal", self.random_bytes(4))
        self.pause_history: PauseHistory = PauseHistory(GROUP)
        for verdict in history:
            self.pause_history.read(verdict)
        self.position = position
        context = GroupContext(world, GROUP, self.pause_history, author, self.random_bytes)
        # A run that finds the pause of a crashed run of the same admin takes it over (M2).
        pause = self.pause_history.running(world.groups[GROUP]) if GROUP in world.groups else None
        again = pause is not None and author.is_also(pause.by)
        self.plan: Operation = (
            PositionPlan(context, [TopicPartition(TOPIC, 0)], Terms(take_over=again))
            if plan is PositionPlan
            else plan(context)
        )

    @property
    def deadline_ms(self) -> int:
        return self.plan.deadline_ms

    def attach(self, world: World | None) -> None:
        self.plan.context = self.plan.context._replace(world=world)  # type: ignore[arg-type]  # as above

    def receive(self, verdict: Verdict, now_ms: int) -> None:
        self.pause_history.read(verdict)
        self.plan.receive(verdict, instant(now_ms))

    def act(self, now_ms: int, effects: Effects) -> bool:
        step = self.plan.tick(instant(now_ms))
        effects.sent += [(record, now_ms) for record in step.send]
        if step.ended:
            self.over = True
            self.said = self.plan.outcome if isinstance(self.plan, PositionPlan) else ""
        elif step.resolve_positions:
            self.plan.positions_resolved({TopicPartition(TOPIC, 0): self.position})
        return step.resolve_positions
