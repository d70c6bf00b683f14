"""The second driver of the shipped Member: one simulated consumer process, with its fetches and its handlers.

It carries out what Member.tick returns and decides nothing about the protocol. As in client/driver/loop.py,
`Member.may_deliver` alone decides whether a message may go to a handler. Everything that a handler sees goes into the
journal, which the auditor reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol

from marshal_py.errors import CoordinationError, MarshalError
from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.claims.offset_run import OffsetRun
from marshal_py.protocol.fold.verdict import Verdict
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.ready import MemberOptions, Ready, Wanted
from marshal_py.protocol.wire import parking
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.last_will import LastWill
from marshal_py.protocol.wire.records import AT_LEAST_ONCE
from marshal_py.transport.ports import Broken
from marshal_sim.cluster.busy_loops import WakeCounter
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.data import DataClient
from marshal_sim.cluster.feed import Feed, HandlerCall
from marshal_sim.cluster.process import Environment, Process
from marshal_sim.cluster.snapshots import SnapshotMaintenance, fold_again
from marshal_sim.judge.evidence import Delivery

BUFFERED_MIN = 4  # a fetch begins when fewer fetched messages wait


class ClientEnvironment(Environment, Protocol):
    """Declares what a client needs of the cluster around it, beyond what every process needs."""

    def handler_ms(self, place: TopicPartition) -> int: ...
    def delivered(self, delivery: Delivery) -> None: ...
    def start_of(self, place: TopicPartition, earliest: bool) -> int: ...
    def client_ended(self, client: Client, error: MarshalError | None) -> None: ...
    def advised(self, kind: str) -> None: ...
    def handing_over(self, client: Client, epoch: int) -> None: ...
    def fenced(self, client: Client) -> None: ...
    def restarted(self, client: Client, read_to: int) -> None: ...
    def kept(self, client: Client) -> None: ...

    keeps_snapshots: bool


class Client(Process):
    """Simulates a consumer process, with one Member in one group."""

    dead: bool
    environment: ClientEnvironment

    def __init__(
        self,
        environment: ClientEnvironment,
        number: int,
        group: str,
        options: MemberOptions,
        clock: MachineClock,
        concurrency: int,
    ) -> None:
        super().__init__(environment, number, options.client_id, group, clock)
        self.options = options
        # In at-most-once mode a call for more means that the last one is finished (AtMostOnce.returned): one at a time.
        self.concurrency: int = concurrency if options.mode == AT_LEAST_ONCE else 1
        self.member: Member | None = None
        self.feeds: dict[int, Feed] = {}
        self.data: DataClient = DataClient(environment, self, self)
        self.counts: dict[str, int] = dict(environment.broker.counts)
        self.maintenance: SnapshotMaintenance | None = None  # in a run that has snapshots
        self.detached: bool = False  # while the log's history is read again (N11)
        self.clone_of = NONE
        self.kept: LastWill | None = None  # for its witness (T19)
        self._ended_at = NONE  # the record at which its member ended
        self._calls = 0
        self._armed_ms = NONE  # true time of the pending timer
        self._timer = 0
        self._wakes = WakeCounter(number, options.interval_ms)

    # --- reading and acting

    def read(self, verdict: Verdict, now: Instant) -> None:
        if self.maintenance is not None:
            self.maintenance.folded(verdict, now.mono_ms)
        if self.member is not None and not self.detached:
            self.member.receive(verdict, now)
            if self.member.ended and self._ended_at == NONE:
                self._ended_at = verdict.offset

    def begin(self, world: World) -> None:
        """Starts from this world (N9). A member that was at work first gives up its claims, because records that it
        had not read are deleted (N11).
        """
        read_to = self.world.next_offset
        super().begin(world)
        if self.member is not None and not self.detached:
            self.detached = True
            self.environment.restarted(self, read_to)
            ready = self.member.detach()
            self._drop_lost(ready)
            self._execute((ready, 0))

    def acted_to(self) -> int:
        """Returns the offset up to which this client has read and acted, or NONE while it is stopped."""
        if self.frozen:
            return NONE
        return self.world.next_offset if self._ended_at == NONE else self._ended_at

    def fold_to(self, upto: int) -> None:
        world = self.world
        if self.environment.keeps_snapshots and (
            self.maintenance is None or self.maintenance.snapshotter.world is not world
        ):
            self.maintenance = SnapshotMaintenance(
                self, self.environment.advised
            )  # before the first record of this world
            if world.began_at:
                self.environment.schedule(self.options.interval_ms, self, self.maintenance.check_start, world)
        super().fold_to(upto)

    def end_with(self, error: CoordinationError) -> None:
        if self.member is None:
            self.dead = True
            self.environment.client_ended(self, error)
            return
        self.member.fail(error)
        self.act(None)

    def look(self, _: None) -> None:
        """Ticks if a record that was read asks for it, as client/driver/loop.py does. Otherwise hands waiting messages
        to handlers or, in at-most-once mode, asks for grants.
        """
        member = self.member
        now = self.clock.read(self.environment.now_ms)
        if member is None or member.tick_due(now):
            self.act(None)
        elif not self.dead:
            if self.options.mode == AT_LEAST_ONCE:
                self._pump_blocked()
                return
            self.environment.events += 1
            ready = member.ask_grants(now)
            if not self.stall(self._execute, (ready, 0)):
                self._execute((ready, 0))

    def act(self, _: None) -> None:
        """Ticks the member and carries out what it returns."""
        if self.dead:
            return
        if self.member is None:
            if not self.opened():
                return
            self.member = Member(self.world, self.group, self.options, self.environment.rng.randbytes)
            for topic, count in self.counts.items():
                self.member.learn_topic(topic, count)
        if self.detached:
            if not self.opened():
                return
            self.member.attach(self.world)
            self.detached = False
        self.environment.events += 1
        now = self.clock.read(self.environment.now_ms)
        self.member.settle_acks()
        before = self.member.fenced
        ready = self.member.tick(now)
        if not self.options.deliver_late and self.member.fenced and not before:
            self.environment.fenced(self)
        if self.maintenance is not None:
            self.maintenance.tick(self.member, now)
        self._drop_lost(ready)
        for claim in ready.revoking:
            if claim.reason in ("hand-over", "falls behind"):
                self.environment.handing_over(self, claim.epoch)
        if ready.send or ready.ended:
            if not self.stall(self._execute, (ready, 0)):
                self._execute((ready, 0))
        else:
            self._after_sends(ready)

    def _drop_lost(self, ready: Ready) -> None:
        for claim, _reason in ready.lost:
            if self.feeds.pop(claim.epoch, None) is not None:
                self.data.drop(claim.tp)

    def _execute(self, state: tuple[Ready, int]) -> None:
        """Sends the records of `Ready` one by one, from the given index on. The process may be stopped before each."""
        ready, at = state
        while at < len(ready.send):
            if at and self.stall(self._execute, (ready, at)):
                return
            self.send(ready.send[at])
            at += 1
        self._after_sends(ready)

    def _after_sends(self, ready: Ready) -> None:
        environment, member = self.environment, self.member
        assert member is not None
        for advisory in ready.advisories:
            environment.advised(advisory.kind)
        if ready.ended:
            self.dead = True
            environment.client_ended(self, member.error)
            return
        for claim in ready.claimed:
            if claim.phase is not ClaimPhase.GONE:
                self._open(claim)
        for tp, _position in ready.start_prefetch:
            environment.schedule(2 + environment.network_faults.read_ms(), self, self._prefetched, tp)
        if ready.refold != NONE:
            environment.schedule(environment.network_faults.read_ms(), self, self._fold_again, ready.refold)
        for wanted in ready.resolve:
            environment.schedule(1 + environment.network_faults.read_ms(), self, self._resolved, wanted)
        self._pump_blocked()
        self._arm()

    def _pump_blocked(self) -> None:
        for feed in [feed for feed in self.feeds.values() if feed.blocked]:
            self._pump(feed)

    def _arm(self) -> None:
        """Sets the client's only timer to the member's deadline. It may fire too early, but never too late."""
        assert self.member is not None
        due_ms = max(self.clock.true_ms(self.member.deadline_ms), self.environment.now_ms + 1)
        if self._armed_ms == NONE or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self._timer += 1
            self.environment.schedule(due_ms - self.environment.now_ms, self, self._timer_fired, self._timer)

    def _timer_fired(self, timer: int) -> None:
        if timer != self._timer or self.member is None:
            return
        self._armed_ms = NONE
        if self.now().mono_ms < self.member.deadline_ms:
            self._arm()
        else:
            self._wakes.count(self.environment.now_ms)
            if not self.stall(self.act, None):
                self.act(None)

    def start(self, _: None = None) -> None:
        """Starts to read the log."""
        self.wake_reader()

    def prepare_stop(self) -> None:
        """Plays the user, who announces that the consumer will be stopped soon (A6)."""
        if self.member is not None:
            self.member.prepare_stop()
            self.act(None)

    def leave(self, wait_ms: int) -> None:
        """Plays the user, who stops the consumer. Handlers may still run for `wait_ms`."""
        if self.member is None:
            self.dead = True
            return
        self.member.leave(self.now(), "stopped", wait_ms)
        self.act(None)

    def topic_grew(self, topic: str) -> None:
        """Tells the member the new partition count of a topic that has grown, as metadata would."""
        self.counts[topic] = self.environment.broker.counts[topic]
        if self.member is not None:
            self.member.learn_topic(topic, self.counts[topic])
            self.act(None)

    def _prefetched(self, tp: TopicPartition) -> None:
        if self.member is not None:
            self.member.prefetched(tp)
            self.act(None)

    def _resolved(self, wanted: Wanted) -> None:
        if self.member is not None:
            start = NONE if wanted.end_only else self.environment.start_of(wanted.tp, wanted.earliest)
            self.member.start_resolved(wanted.tp, start, self.environment.broker.ends[wanted.tp], self.now())
            self.act(None)

    def _fold_again(self, at: int) -> None:
        """Folds the log again up to offset `at`, so that the member can check its own state (G6)."""
        if self.member is None:
            return
        again = fold_again(self, at, self.group)
        if not self.dead:
            self.member.refolded(at, again, self.now())
            self.act(None)

    def keep_will(self, every_ms: int) -> None:
        """Keeps the last will, again and again, for a witness to read when this process is dead (T19)."""
        if self.member is not None:
            self.kept = self.member.last_will()
            self.environment.kept(self)
        self.environment.schedule(every_ms, self, self.keep_will, every_ms)

    # --- fetching and delivering

    def _open(self, claim: Claim) -> None:
        """Starts fetching for an accepted claim."""
        self.feeds[claim.epoch] = feed = Feed(claim)
        self.data.assign(claim.tp, feed.begins_at())

    def fetched(self, tp: TopicPartition, round_: int, offsets: Sequence[int]) -> None:
        """Takes the messages of a fetch, unless the fetch belongs to an older assignment (an older `round_`)."""
        feed = next((feed for feed in self.feeds.values() if feed.claim.tp == tp), None)
        if feed is None or not self.data.assignments.current(tp, round_):
            return
        claim = feed.claim
        claim.saw_end(self.environment.broker.ends[tp])
        if isinstance(claim.tracker, AtLeastOnce):
            _, run = claim.tracker.admit(offsets)
            if run is not None:
                feed.runs.append(run)
            self._pump(feed)
        else:
            feed.buffer.extend(offsets)
            claim.offer = (feed.buffer[0], offsets[-1] + 1)
            feed.blocked = True  # the next tick tries again
            self.act(None)

    def restart(self, tp: TopicPartition, position: int) -> None:
        """Fetches an owned partition again from `position`."""
        if any(feed.claim.tp == tp for feed in self.feeds.values()):
            self.data.assign(tp, position)

    def beyond(self, tp: TopicPartition, position: int, end: int) -> None:
        """Parks a partition whose position lies beyond its end, so that nobody may claim it (D6)."""
        for feed in self.feeds.values():
            if feed.claim.tp == tp and self.member is not None:
                detail = parking.beyond_end(position, end)
                self.member.park(feed.claim.epoch, parking.BEYOND_END, detail, self.now())
        self.act(None)

    def unreadable(self, broken: Broken) -> None:
        """Gives up a partition that could not be read, as ConsumerDriver in client/driver/consumer_driver.py does."""
        if self.member is not None:
            self.member.give_up(broken.tp, broken.reason, self.now())
            self.act(None)

    def _pump(self, feed: Feed) -> None:
        """Hands messages to handlers while `may_deliver` and the concurrency allow it."""
        claim, environment, member = feed.claim, self.environment, self.member
        assert member is not None
        feed.blocked = False
        while len(feed.running) < self.concurrency:
            offset = self._next_offset(feed)
            if offset == NONE:
                break
            if not member.may_deliver(claim.epoch, self.clock.read(environment.now_ms)):
                feed.blocked = True
                return
            held_ms = environment.network_faults.gate_ms()
            if held_ms:
                self.held_steps.appendleft((self._call_late, (feed, offset, environment.now_ms)))
                self.freeze(held_ms)
                return
            self._call(feed, offset, environment.now_ms)
        if feed.waiting() < BUFFERED_MIN:
            self.data.poll(claim.tp)

    def _next_offset(self, feed: Feed) -> int:
        """Returns the offset of the message that could be handed over next, or NONE."""
        tracker = feed.claim.tracker
        if isinstance(tracker, AtLeastOnce):
            while feed.runs and feed.runs[0].delivered >= len(feed.runs[0].offsets):
                feed.runs.popleft()
            return feed.runs[0].offsets[feed.runs[0].delivered] if feed.runs else NONE
        while feed.buffer and feed.buffer[0] < tracker.delivered_to:
            feed.buffer.popleft()  # granted, and dropped past the fence
        if not feed.buffer:
            return NONE
        if not tracker.holds(feed.buffer[0]):
            feed.blocked = True
            return NONE
        return feed.buffer[0]

    def _call_late(self, state: tuple[Feed, int, int]) -> None:
        self._call(*state)
        self._pump(state[0])

    def _call(self, feed: Feed, offset: int, gate_ms: int) -> None:
        """Begins a handler for one message. From this moment the message counts as delivered."""
        claim, environment, member = feed.claim, self.environment, self.member
        assert member is not None
        mono_ms = self.now().mono_ms
        run, index = None, 0
        if isinstance(claim.tracker, AtLeastOnce):
            run, index = self._take(feed, offset, mono_ms)
        else:
            feed.buffer.popleft()
            claim.tracker.deliver(offset, mono_ms)
        delivery = Delivery(
            self.group,
            self.number,
            member.newest_instance,
            claim.epoch,
            claim.tp.topic,
            claim.tp.partition,
            offset,
            self.world.next_offset,
            gate_ms,
            environment.now_ms,
        )
        environment.delivered(delivery)
        self._run_handler(feed, HandlerCall(delivery, run, index), environment.handler_ms(claim.tp))

    def _take(self, feed: Feed, offset: int, mono_ms: int) -> tuple[OffsetRun, int]:
        """Notes that the message which `_next_offset` returned is delivered; returns its run and its index there."""
        run = feed.runs[0]
        return run, run.deliver(1, mono_ms)

    def _run_handler(self, feed: Feed, call: HandlerCall, duration_ms: int) -> None:
        self._calls += 1
        feed.running[self._calls] = call
        self.environment.schedule(duration_ms, self, self._finished, (feed, self._calls))

    def _finished(self, state: tuple[Feed, int]) -> None:
        """Ends a handler, which answers."""
        feed, number = state
        call = feed.running.pop(number)
        claim, member = feed.claim, self.member
        assert member is not None
        self.environment.events += 1
        self._answer(claim, call, member)
        if call.run is None:
            assert isinstance(claim.tracker, AtMostOnce)
            if not feed.running:
                claim.tracker.returned()
        if claim.phase is not ClaimPhase.GONE:
            self._pump(feed)  # `may_deliver` alone decides whether a handler may begin
        if claim.phase is ClaimPhase.DRAINING and not self.frozen:
            self.act(None)

    def _answer(self, claim: Claim, call: HandlerCall, member: Member) -> None:
        """Lets the handler acknowledge its message."""
        call.delivery.finish(self.environment.now_ms)
        if call.run is not None and not member.ack_is_late(claim):
            call.run.acks.append(call.place)  # as `Message.ack` does, which takes no lock

    # --- a cloned machine

    def clone(self, number: int, clock: MachineClock) -> Client:
        """Returns a copy of this process on a cloned machine. It has the same memory and will draw other random bits
        (T18).
        """
        memo: dict[int, Any] = {id(self.environment.rng): self.environment.rng}
        clone = self._blank(number, clock, memo)
        clone.detached, clone.forked = self.detached, self.forked
        clone.world, clone.log, clone.topic_id = deepcopy(self.world, memo), self.log, self.topic_id
        clone.member = deepcopy(self.member, memo)
        clone.data = self.data.copy(clone, clone, memo)
        clone.maintenance = self.maintenance.copy(clone, memo) if self.maintenance is not None else None
        clone.counts, clone.clone_of = dict(self.counts), self.number
        for epoch, feed in self.feeds.items():
            copied = feed.copy(memo)
            clone.feeds[epoch] = copied
            for call in feed.running.values():
                born = call.delivery.inherited_by(number)
                self.environment.delivered(born)
                run = deepcopy(call.run, memo)
                clone._run_handler(
                    copied, HandlerCall(born, run, call.place), self.environment.handler_ms(feed.claim.tp)
                )
            self.environment.schedule(0, clone, clone._pump, copied)
        return clone

    def _blank(self, number: int, clock: MachineClock, memo: dict[int, Any]) -> Client:
        """Returns a client that will become a clone of this one. `memo` is that of `deepcopy`."""
        return Client(self.environment, number, self.group, self.options, clock, self.concurrency)
