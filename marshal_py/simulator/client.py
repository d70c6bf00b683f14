"""The second driver of the shipped Member: one simulated consumer process, with its fetches and its handlers.

It executes what Member.tick returns and makes no protocol decision. `Member.may_deliver` is the only gate before a
handler, here as in client/loop.py. Everything a handler sees is written into the journal, which the auditor reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol

from marshal_py.errors import CoordinationError, MarshalError
from marshal_py.protocol import parking
from marshal_py.protocol.claim import Claim, ClaimPhase
from marshal_py.protocol.delivery import AtLeastOnce, AtMostOnce
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.protocol.ready import MemberOptions, Ready, Wanted
from marshal_py.protocol.records import AT_LEAST_ONCE
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import World
from marshal_py.simulator.auditor_evidence import Delivery
from marshal_py.simulator.busy_loops import Wakes
from marshal_py.simulator.clock import MachineClock
from marshal_py.simulator.data import DataClient
from marshal_py.simulator.feed import Feed, Flight
from marshal_py.simulator.process import Environment, Process
from marshal_py.simulator.snapshots import Upkeep, fold_again
from marshal_py.transport.ports import Broken

BUFFERED_MIN = 4  # fetch again when fewer wait


class ClientEnvironment(Environment, Protocol):
    """What a client asks of the cluster beyond what any process does."""

    def handler_ms(self, place: TopicPartition) -> int: ...
    def delivered(self, delivery: Delivery) -> None: ...
    def start_of(self, place: TopicPartition, earliest: bool) -> int: ...
    def client_ended(self, client: Client, error: MarshalError | None) -> None: ...
    def advised(self, kind: str) -> None: ...
    def handing_over(self, client: Client, epoch: int) -> None: ...
    def fenced(self, client: Client) -> None: ...
    def restarted(self, client: Client, read_to: int) -> None: ...

    keeps_snapshots: bool


class Client(Process):
    """A consumer process: one Member, one group."""

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
        self.context = environment
        self.options = options
        # At most once a handler that asks for more is done with what it had (AtMostOnce.returned): one at a time.
        self.concurrency = concurrency if options.mode == AT_LEAST_ONCE else 1
        self.member: Member | None = None
        self.feeds: dict[int, Feed] = {}
        self.data = DataClient(environment, self, self)
        self.counts: dict[str, int] = dict(environment.broker.counts)
        self.maintenance: Upkeep | None = None  # of snapshots, in a run that has them
        self.away = False  # while the log's history is read anew (N11)
        self.twin_of = NONE
        self._ended_at = NONE  # the record at which its member ended
        self._flights = 0
        self._armed_ms = NONE  # true time of the pending timer
        self._timer = 0
        self._wakes = Wakes(number, options.interval_ms)

    # --- reading and acting

    def read(self, verdict: Verdict, now: Instant) -> None:
        if self.maintenance is not None:
            self.maintenance.folded(verdict, now.mono_ms)
        if self.member is not None and not self.away:
            self.member.receive(verdict, now)
            if self.member.ended and self._ended_at == NONE:
                self._ended_at = verdict.offset

    def begin(self, world: World) -> None:
        """N9, and N11 for who has read further than the log now goes back."""
        read_to = self.world.next_offset
        super().begin(world)
        if self.member is not None and not self.away:
            self.away = True
            self.context.restarted(self, read_to)
            ready = self.member.detach()
            self._let_go(ready)
            self._execute((ready, 0))

    def acted_to(self) -> int:
        """Up to where this client has read and done what follows from it; NONE if it is stopped just now."""
        if self.frozen:
            return NONE
        return self.world.next_offset if self._ended_at == NONE else self._ended_at

    def read_to(self, upto: int) -> None:
        world = self.world
        if self.context.keeps_snapshots and (
            self.maintenance is None or self.maintenance.snapshotter.world is not world
        ):
            self.maintenance = Upkeep(self)  # before the first record of this world
            if world.began_at:
                self.environment.at(self.options.interval_ms, self, self.maintenance.check_start, world)
        super().read_to(upto)

    def refuse(self, error: CoordinationError) -> None:
        if self.member is None:
            self.dead = True
            self.context.client_ended(self, error)
            return
        self.member.fail(error)
        self.act(None)

    def look(self, _: None) -> None:
        """As the loop does: a tick only if what was read asks for one; what waits for a grant asks for the next."""
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
        """A tick, and what it asks for."""
        if self.dead:
            return
        if self.member is None:
            if not self.opened():
                return
            self.member = Member(self.world, self.group, self.options, self.environment.rng.randbytes)
            for topic, count in self.counts.items():
                self.member.learn_topic(topic, count)
        if self.away:
            if not self.opened():
                return
            self.member.attach(self.world)
            self.away = False
        self.environment.events += 1
        now = self.clock.read(self.environment.now_ms)
        ready = self.member.tick(now)
        if not self.options.deliver_late and any(advisory.kind == "fenced" for advisory in ready.advisories):
            self.context.fenced(self)
        if self.maintenance is not None:
            self.maintenance.tick(now)
        self._let_go(ready)
        if ready.send or ready.ended:
            if not self.stall(self._execute, (ready, 0)):
                self._execute((ready, 0))
        else:
            self._after_sends(ready)

    def _let_go(self, ready: Ready) -> None:
        for claim, _reason in ready.lost:
            if self.feeds.pop(claim.epoch, None) is not None:
                self.data.drop(claim.tp)

    def _execute(self, state: tuple[Ready, int]) -> None:
        """Sends one record after the other; the process may be stopped before each."""
        ready, at = state
        while at < len(ready.send):
            if at and self.stall(self._execute, (ready, at)):
                return
            self.send(ready.send[at])
            at += 1
        self._after_sends(ready)

    def _after_sends(self, ready: Ready) -> None:
        environment, member = self.context, self.member
        assert member is not None
        for advisory in ready.advisories:
            environment.advised(advisory.kind)
        for claim in ready.revoking:
            if claim.reason == "hand-over":
                environment.handing_over(self, claim.epoch)
        if ready.ended:
            self.dead = True
            environment.client_ended(self, member.error)
            return
        for claim in ready.claimed:
            if claim.phase is not ClaimPhase.GONE:
                self._open(claim)
        for tp, _position in ready.start_prefetch:
            environment.at(2 + environment.network_faults.read_ms(environment.rng), self, self._warmed, tp)
        if ready.refold != NONE:
            environment.at(environment.network_faults.read_ms(environment.rng), self, self._fold_again, ready.refold)
        for wanted in ready.resolve:
            environment.at(1 + environment.network_faults.read_ms(environment.rng), self, self._resolved, wanted)
        self._pump_blocked()
        self._arm()

    def _pump_blocked(self) -> None:
        for feed in [feed for feed in self.feeds.values() if feed.blocked]:
            self._pump(feed)

    def _arm(self) -> None:
        """One timer, moved lazily: it fires early at worst."""
        assert self.member is not None
        due_ms = max(self.clock.true_ms(self.member.deadline_ms), self.environment.now_ms + 1)
        if self._armed_ms == NONE or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self._timer += 1
            self.environment.at(due_ms - self.environment.now_ms, self, self._rang, self._timer)

    def _rang(self, timer: int) -> None:
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
        """Reads the log for the first time."""
        self.wake_reader()

    def prepare_stop(self) -> None:
        """The user will stop the consumer soon (A6)."""
        if self.member is not None:
            self.member.prepare_stop()
            self.act(None)

    def leave(self, wait_ms: int) -> None:
        """The user stops the consumer."""
        if self.member is None:
            self.dead = True
            return
        self.member.leave(self.now(), "stopped", wait_ms)
        self.act(None)

    def topic_grew(self, topic: str) -> None:
        """Metadata says so."""
        self.counts[topic] = self.environment.broker.counts[topic]
        if self.member is not None:
            self.member.learn_topic(topic, self.counts[topic])
            self.act(None)

    def _warmed(self, tp: TopicPartition) -> None:
        if self.member is not None:
            self.member.prefetched(tp)
            self.act(None)

    def _resolved(self, wanted: Wanted) -> None:
        if self.member is not None:
            start = self.context.start_of(wanted.tp, wanted.earliest)
            self.member.start_resolved(wanted.tp, start, self.now())
            self.act(None)

    def _fold_again(self, at: int) -> None:
        """G6: from the log's beginning; the bytes are as good as re-read."""
        if self.member is None:
            return
        again = fold_again(self, at, self.group)
        if not self.dead:
            self.member.refolded(at, again, self.now())
            self.act(None)

    # --- fetching and delivering

    def _open(self, claim: Claim) -> None:
        """A claim was read accepted."""
        self.feeds[claim.epoch] = feed = Feed(claim)
        self.data.assign(claim.tp, feed.begins_at())

    def fetched(self, tp: TopicPartition, round_: int, offsets: Sequence[int]) -> None:
        """As Flow.add: what an older assignment fetched is not taken."""
        feed = next((feed for feed in self.feeds.values() if feed.claim.tp == tp), None)
        if feed is None or not self.data.assignments.current(tp, round_):
            return
        claim = feed.claim
        claim.end_offset = self.environment.broker.ends[tp]
        if isinstance(claim.tracker, AtLeastOnce):
            _, run = claim.tracker.admit(offsets)
            if run is not None:
                feed.runs.append(run)
            self._pump(feed)
        else:
            feed.buffer.extend(offsets)
            claim.offer = (feed.buffer[0], offsets[-1] + 1)
            feed.blocked = True  # the tick looks again
            self.act(None)

    def restart(self, tp: TopicPartition, position: int) -> None:
        """As Flow.restart."""
        if any(feed.claim.tp == tp for feed in self.feeds.values()):
            self.data.assign(tp, position)

    def beyond(self, tp: TopicPartition, position: int, end: int) -> None:
        """D6: the broker does not have the position."""
        for feed in self.feeds.values():
            if feed.claim.tp == tp and self.member is not None:
                detail = parking.beyond_end(position, end)
                self.member.park(feed.claim.epoch, parking.BEYOND_END, detail, self.now())
        self.act(None)

    def unreadable(self, broken: Broken) -> None:
        """As Station does with a partition that could not be read."""
        if self.member is not None:
            self.member.give_up(broken.tp, broken.reason, self.now())
            self.act(None)

    def _pump(self, feed: Feed) -> None:
        """Hands over what may be handed over."""
        claim, environment, member = feed.claim, self.context, self.member
        assert member is not None
        feed.blocked = False
        while len(feed.flying) < self.concurrency:
            offset = self._next_offset(feed)
            if offset == NONE:
                break
            if not member.may_deliver(claim.epoch, self.clock.read(environment.now_ms)):
                feed.blocked = True
                return
            held_ms = environment.network_faults.gate_ms(environment.rng)
            if held_ms:
                self.backlog.appendleft((self._call_late, (feed, offset, environment.now_ms)))
                self.freeze(held_ms)
                return
            self._call(feed, offset, environment.now_ms)
        if feed.waiting() < BUFFERED_MIN:
            self.data.poll(claim.tp)

    def _next_offset(self, feed: Feed) -> int:
        """The next message that could be handed over, or NONE."""
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
        """The handler begins: from here on it is the user's."""
        claim, environment, member = feed.claim, self.context, self.member
        assert member is not None
        mono_ms = self.now().mono_ms
        run, index = None, 0
        if isinstance(claim.tracker, AtLeastOnce):
            run = feed.runs[0]
            index = run.deliver(1, mono_ms)
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
        self._fly(feed, Flight(delivery, run, index), environment.handler_ms(claim.tp))

    def _fly(self, feed: Feed, flight: Flight, duration_ms: int) -> None:
        self._flights += 1
        feed.flying[self._flights] = flight
        self.environment.at(duration_ms, self, self._finished, (feed, self._flights))

    def _finished(self, state: tuple[Feed, int]) -> None:
        """The handler is done, and acknowledges."""
        feed, number = state
        flight = feed.flying.pop(number)
        claim, member, now_ms = feed.claim, self.member, self.environment.now_ms
        assert member is not None
        flight.delivery.finish(now_ms)
        self.environment.events += 1
        if flight.run is None:
            assert isinstance(claim.tracker, AtMostOnce)
            if not feed.flying:
                claim.tracker.returned()
        elif not member.ack_is_late(claim):
            flight.run.finish(flight.place)
        if claim.phase is not ClaimPhase.GONE:
            self._pump(feed)  # the gate alone decides
        if claim.phase is ClaimPhase.DRAINING and not self.frozen:
            self.act(None)

    # --- a cloned machine

    def clone(self, number: int, clock: MachineClock) -> Client:
        """The twin of this process: the same memory, other random bits (T18)."""
        twin = Client(self.context, number, self.group, self.options, clock, self.concurrency)
        memo: dict[int, Any] = {id(self.environment.rng): self.environment.rng}
        twin.away, twin.forked = self.away, self.forked
        twin.world, twin.log, twin.topic_id = deepcopy(self.world, memo), self.log, self.topic_id
        twin.member = deepcopy(self.member, memo)
        twin.data = self.data.copy(twin, twin, memo)
        twin.maintenance = self.maintenance.copy(twin, memo) if self.maintenance is not None else None
        twin.counts, twin.twin_of = dict(self.counts), self.number
        for epoch, feed in self.feeds.items():
            copied = feed.copy(memo)
            twin.feeds[epoch] = copied
            for flight in feed.flying.values():
                born = flight.delivery.inherited_by(number)
                self.context.delivered(born)
                run = deepcopy(flight.run, memo)
                twin._fly(copied, Flight(born, run, flight.place), self.context.handler_ms(feed.claim.tp))
            self.environment.at(0, twin, twin._pump, copied)
        return twin
