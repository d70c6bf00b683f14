"""One simulated consumer process: the shipped client with one Member in one group, in virtual time.

The process holds what a Marshal holds: a Context, the turn of its loop, and a ConsumerDriver with its queue. What
the cluster, the clock, threads and librdkafka are for it is in ports.py and source.py; front.py carries out the calls
of the user (user.py). This file decides nothing about the protocol: it reads the log, lets the turn step the member
when it is due, and notes for the auditor what can be seen from outside.
"""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any, Final

from marshal_py.client.connection import Context
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.loop import LogMaintenance, Truncation, Turn
from marshal_py.client.membership import LEAVE_TIMEOUT_S, Ending
from marshal_py.client.messages.answers import Delivered, Letter, LetterWriter
from marshal_py.client.messages.message import Message
from marshal_py.client.values.options import PREFETCH_BYTES, ConsumerOptions, RetentionPolicy
from marshal_py.errors import ClusterUnreachable, CoordinationError, MarshalError
from marshal_py.protocol.claims import AtLeastOnce, ClaimPhase
from marshal_py.protocol.duties import SNAPSHOT_EVERY_RECORDS
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, LastWill
from marshal_py.transport.ports import LogRecord, TopicInfo
from marshal_sim.cluster.aio_user import AsyncUser
from marshal_sim.cluster.broker import MISSING
from marshal_sim.cluster.busy_loops import WakeCounter
from marshal_sim.cluster.callbacks import CallbackUser, SimulatedCallbacks
from marshal_sim.cluster.calls import HandlerCall
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.environment import ClientEnvironment
from marshal_sim.cluster.front import Front
from marshal_sim.cluster.locks import Known, Locks
from marshal_sim.cluster.ports import (
    SERVERS,
    SILENT,
    ClientLogger,
    SimulatedAdmin,
    SimulatedLog,
    SimulatedLogs,
    SimulatedWorker,
    SimulatedWriter,
)
from marshal_sim.cluster.process import Process
from marshal_sim.cluster.source import MESSAGE_BYTES, SimulatedSource, message_at
from marshal_sim.cluster.user import User
from marshal_sim.judge.evidence import Delivery, Heard, Span

AIO_USERS: Final = 0.75  # the share of AsyncConsumers in a run that has some
DELIVERIES_MAX: Final = 3  # of one message: low, so that a run sees dead letters
LETTERS_FAIL: Final = 0.2  # the share of attempts to write letters that fail
DEAD_LETTERS: Final = "dead"
ACKS_PENDING_MAX: Final = 3  # of every second consumer: fewer than a handler would take
PREFETCH_MESSAGES: Final = 8  # so many fit into the `prefetch_bytes` of such a consumer: one partition can fill them
TRUNCATE_INTERVALS: Final = 4  # between two deletions: short, so that readers fall behind
METADATA_MS: Final = 10_000  # METADATA_S of client/driver/loop.py
MISSING_MS: Final = 100  # between two looks for a topic that is missing
KEPT_INTERVALS: Final = 2  # how long history is kept, at least: short, too
EVERY_RECORDS_LEAST: Final = 32  # records between two snapshots, at least
EVERY_RECORDS_MOST: Final = 256


class Client(Process):
    """Simulates a consumer process, with one Member in one group."""

    environment: ClientEnvironment
    plans = False  # whether the consumer plans ranges

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
        self.concurrency = concurrency
        self.driver: ConsumerDriver | None = None  # until the log is open
        self.user: User | None = None
        self.infos: dict[str, TopicInfo] = {}
        if not environment.renews_topics:
            self.infos = {topic: TopicInfo(count) for topic, count in environment.broker.counts.items()}
        self.clone_of = NONE
        self.kept: LastWill | None = None  # for its witness (T19)
        self.stops: bool = False  # the user has announced that he will stop it
        self._ended_at = NONE  # the record at which its member ended
        self._newest_verdict = NONE
        self._armed_ms = NONE  # true time of the pending timer
        self._timer = 0
        self._wakes = WakeCounter(number, options.interval_ms)
        self._was_fenced = False
        self._revoking: dict[int, Span] = {}  # by epoch, until its claim delivers again
        self._connect()

    @property
    def member(self) -> Member | None:
        return None if self.driver is None else self.driver.member

    def known_claims(self) -> frozenset[int]:
        """Returns the claims that this consumer has and of which its user was told, or will be."""
        claims = {} if self.member is None else self.member.claims
        return frozenset(epoch for epoch, claim in claims.items() if claim.told)

    # --- making the consumer

    def _connect(self) -> None:
        """Makes what `connect` makes, over this process's ports."""
        self.log_port: SimulatedLog = SimulatedLog(self)
        self.callbacks: SimulatedCallbacks = SimulatedCallbacks(self)
        self.locks: Locks | None = None
        if self.environment.locks and not self.plans:
            self.locks = Locks(
                self.environment, self, lambda: self.driver is not None and self.driver.ended, self._known
            )
        self.context: Context = Context(
            self.log_port,
            SimulatedAdmin(self, self._heard),  # type: ignore[arg-type]  # the part of it that consumers call
            self,
            SERVERS,
            "__marshal",
            self.environment.rng.randbytes,
            self._retention(),
            self.callbacks,
            lambda: self.now().mono_ms / 1000,
            lambda name: SimulatedWorker(self),
            ClientLogger("simulated", SILENT.level),
            threading.RLock if self.locks is None else self.locks.new,
        )
        self.turn: Turn = Turn(self.context, self)
        logs, every_ms = SimulatedLogs(self, self.turn), TRUNCATE_INTERVALS * self.options.interval_ms
        self.maintenance: LogMaintenance = LogMaintenance(self.context, logs, Truncation(every_ms, 1))

    def _known(self) -> Known:
        assert self.member is not None
        return self.environment.now_ms, self.world.next_offset, self.member.newest_instance

    def _retention(self) -> RetentionPolicy:
        if not self.environment.keeps_snapshots:
            return RetentionPolicy(evidence_dir=None, snapshot_records_min=SNAPSHOT_EVERY_RECORDS)
        every = EVERY_RECORDS_LEAST + int(self.environment.rng.random() * (EVERY_RECORDS_MOST - EVERY_RECORDS_LEAST))
        return RetentionPolicy(every, KEPT_INTERVALS * self.options.interval_ms / 1000, None)

    def _join(self, member: Member) -> ConsumerDriver:
        """Makes the consumer of a member and drives it from now on, as client/marshal.py does."""
        self.turn.worlds[self.log] = self.world
        genesis = self.world.root or self.world.genesis
        assert genesis is not None
        self.source: SimulatedSource = SimulatedSource(self.environment, self, self._came)
        driver = self.driver = ConsumerDriver(
            self.context,
            self.log,
            member,
            self.source,
            self._consumer_options(),
            genesis.incarnation,
            frozenset(),
            self.maintenance.refold,
            lambda: {member.session},
            plans=self.plans,
        )
        self.front: Front = Front(self, self.context, self.source, self.options.interval_ms, self.locks)
        self.ending: Ending = Ending(self.context, driver, driver.queue.close)
        self.ending.fronts += 1  # the simulator holds it, so that nobody drops it
        if isinstance(driver.queue, DeliveryQueue):
            asks = self.environment.aio and self.environment.rng.random() < AIO_USERS
            given = self.environment, self, driver, self.ending, self.front, self.concurrency
            self.user = AsyncUser(*given) if asks else User(*given)
            if self.environment.answers and self.options.mode == AT_LEAST_ONCE:
                driver.queue.write_dead_letters(DEAD_LETTERS, self._writer)
                answers = driver.queue.answers
                assert answers.letters is not None
                answers.letters = _Journal(self.user, answers.letters)
        return driver

    def _consumer_options(self) -> ConsumerOptions:
        options, latest = self.options, self.environment.start_latest
        letters = self.environment.answers and options.mode == AT_LEAST_ONCE and not self.plans
        if self.environment.calls and options.mode == AT_LEAST_ONCE and not self.plans and self.number % 2:
            self.environment.evidence.acks_pending_max[self.number] = 1 + self.number // 2 % ACKS_PENDING_MAX
        return ConsumerOptions(
            delivery="at_least_once" if options.mode == AT_LEAST_ONCE else "at_most_once",
            handler_timeout_s=options.handler_timeout_ms / 1000,
            hand_over_timeout_s=options.hand_over_timeout_ms / 1000,
            start="latest" if latest else "earliest",
            max_deliver=DELIVERIES_MAX if letters else None,
            dead_letter_topic=DEAD_LETTERS if letters else None,
            max_acks_pending=(window := self.environment.evidence.acks_pending_max.get(self.number)),
            prefetch_bytes=PREFETCH_BYTES if window is None else PREFETCH_MESSAGES * MESSAGE_BYTES,
            **CallbackUser(self.environment, self, self.callbacks).options(options.interval_ms),
        )

    def _writer(self) -> SimulatedWriter:
        assert self.user is not None
        return SimulatedWriter(self, self._letter_fails, self._letter_written)

    def _letter_written(self, place: TopicPartition, offset: int) -> None:
        assert self.user is not None
        self._wakes.excuse()
        self.user.letter_written(place, offset)

    def _letter_fails(self) -> bool:
        return not self.environment.healed and self.environment.rng.random() < LETTERS_FAIL

    # --- what the turn reports, as Maintenance

    def folded(self, number: int, verdict: Verdict, now_ms: int) -> None:
        if self.world.next_offset % CHECKPOINT_OFFSETS == 0:
            self.environment.digest(self)
        if self.environment.keeps_snapshots:
            self.maintenance.folded(number, verdict, now_ms)
        self._note_end()
        self._newest_verdict = verdict.offset

    def tick(self, now: Instant) -> None:
        if self.environment.keeps_snapshots:
            self.maintenance.tick(now)

    def _note_end(self) -> None:
        if self._ended_at == NONE and self.driver is not None and self.driver.member.ended:
            self._ended_at = self._newest_verdict

    # --- reading and acting

    def read(self, verdict: Verdict, now: Instant) -> None:
        """Takes the verdict on a record of a log that is being opened."""
        if self.environment.keeps_snapshots:
            self.maintenance.folded(self.log, verdict, now.mono_ms)

    def begin(self, world: World) -> None:
        """Starts from this world (N9). A member that was at work first gives up its claims, because records that it
        had not read are deleted (N11).
        """
        read_to = self.world.next_offset
        super().begin(world)
        if self.driver is not None and not self.driver.away:
            self.environment.restarted(self, read_to)
            self.turn.lose_history(self.log)
            self.ran()
        if self.driver is not None:
            self.turn.worlds[self.log] = world

    def acted_to(self) -> int:
        """Returns the offset up to which this client has read and acted, or NONE while it is stopped."""
        if self.frozen:
            return NONE
        return self.world.next_offset if self._ended_at == NONE else self._ended_at

    def fold_to(self, upto: int) -> None:
        world, environment = self.world, self.environment
        snapshotter = self.maintenance.snapshotters.get(self.log)
        if environment.keeps_snapshots and (snapshotter is None or snapshotter.world is not world):
            self.turn.worlds[self.log] = world
            self.maintenance.begin(world)  # before the first record of this world
        if self.driver is None:
            super().fold_to(upto)
            return
        first, values = world.next_offset, environment.broker.logs[self.log].values
        # A missing record shows as a gap when the next one is folded (L8).
        records = [
            LogRecord(self.log, offset, values[offset], 0)
            for offset in range(first, upto)
            if values[offset] is not MISSING
        ]
        self.turn.fold(records)
        self._note_end()
        environment.folded(self, first, world.next_offset - first)
        if (error := self.context.broken.get(self.log)) is not None:
            environment.stopped(self, error)
            self.ran()
        elif not self.stall(self.look, None):
            self.look(None)

    def end_with(self, error: CoordinationError) -> None:
        if self.driver is None:
            self.dead = True
            self.environment.client_ended(self, error)
            return
        self.turn.break_log(self.log, error)
        self.ran()

    def look(self, _: None) -> None:
        """Acts on records that were read: steps the member if it is due, and wakes the user's calls."""
        if self.dead:
            return
        if self.driver is None or self.driver.away:
            self.act(None)
            return
        self.environment.events += 1
        self.turn.step(heard=True)
        self.ran()

    def act(self, _: None) -> None:
        """Opens the log as far as it can; then steps the member if it is due."""
        if self.dead:
            return
        if self.driver is None:
            if not self._topics_found() or not self.opened():
                return
            member = Member(self.world, self.group, self.options, self.environment.rng.randbytes)
            for topic, info in self.infos.items():
                member.learn_topic(topic, info.partitions, info.topic_id)
            self.turn_over(self._join(member))
            return
        if self.driver.away:
            if not self.opened():
                return
            self.turn.regain_history(self.world)
        self.environment.events += 1
        self.turn.step(heard=False)
        self.ran()

    def _topics_found(self) -> bool:
        """Returns whether the cluster has said what all topics are, before anything is read as in client/marshal.py; if
        not, tries again later."""
        if not self.environment.renews_topics:
            return True
        for topic in self.options.topics:
            if topic not in self.infos:
                try:
                    info = self.context.admin.describe_topic(topic)
                except ClusterUnreachable:
                    info = None
                if info is None:
                    self.environment.schedule(MISSING_MS, self, self.act)
                    return False
                self.infos[topic] = info
        return True

    def _heard(self, topic: str, info: TopicInfo) -> None:
        if info.topic_id:
            heard = self.environment.evidence.heard.setdefault((self.number, topic), [])
            heard.append(Heard(self.environment.now_ms, info.topic_id))

    def _look_at_topics(self, _: None) -> None:
        """Looks at the topics every METADATA_MS, as client/driver/loop.py does."""
        if self.driver is not None:
            self.driver.look_at_topics()
            self.environment.schedule(METADATA_MS, self, self._look_at_topics)

    def turn_over(self, driver: ConsumerDriver) -> None:
        """Hands a new driver to the turn, which steps it."""
        self.environment.events += 1
        self.turn.add(driver)
        if self.environment.renews_topics:
            self._look_at_topics(None)
        self.ran()

    def ran(self) -> None:
        """Is called after everything that has run in this process: notes what was seen, and sets the timer."""
        driver = self.driver
        if driver is None or self.dead:
            return
        member, environment = driver.member, self.environment
        if driver.prefetching and not driver.ended and any(self._ends_known(driver)):
            self.turn.step(heard=False)
        while driver.events:
            one = driver.events.popleft()
            environment.advised(one.kind)
            if one.kind == "revoking":
                self._note_revoking(one)
        for epoch in [epoch for epoch in self._revoking if epoch in member.claims]:
            if member.claims[epoch].phase is ClaimPhase.OPEN:  # its successor has gone: it delivers again
                self._revoking.pop(epoch).until_ms = environment.now_ms
        fenced = member.fenced
        if fenced and not self._was_fenced:
            environment.fenced(self)
        self._was_fenced = fenced
        self.turn.carry_out()
        if self.frozen:
            return  # stopped in the midst of what it did; the rest is looked at when it continues
        self._note_end()
        if self.user is not None:
            if self.user.letters:
                self.user.look_at_letters()
            if member.session != NONE:
                self.user.begin()
            self.front.look()
            self.user.go_on()
        if driver.ended:
            if not self.dead:
                if self.user is not None:
                    self.user.consumer_ended()
                self.callbacks.close(0.0)
                environment.evidence.known_claims[self.number] = frozenset()  # it has ended, and so have its claims
                self.dead = True
                environment.client_ended(self, self._reason())
            return
        self._arm()

    def _note_revoking(self, event: Advisory) -> None:
        """Notes that the user was told of a partition that will be released."""
        environment = self.environment
        if event.text in ("hand-over", "falls behind"):
            environment.handing_over(self, event.epoch)
        span = self._revoking[event.epoch] = Span(environment.now_ms)
        environment.evidence.revoking.setdefault((self.number, self.group, event.epoch), []).append(span)

    def _ends_known(self, driver: ConsumerDriver) -> list[bool]:
        return [driver.source.end_offset(tp) >= 0 for tp in driver.prefetching]

    def _reason(self) -> MarshalError | None:
        assert self.driver is not None
        return self.driver.error

    def _came(self) -> None:
        """Is called when a fetch has brought or found something."""
        self.ran()

    def _arm(self) -> None:
        """Sets the client's only timer to the member's deadline. It may fire too early, but never too late."""
        assert self.driver is not None
        member = self.driver.member
        due_ms = max(self.clock.true_ms(member.deadline_ms), self.environment.now_ms + 1)
        if member.tick_requested:
            due_ms = self.environment.now_ms + 1
        if self._armed_ms == NONE or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self._timer += 1
            self.environment.schedule(due_ms - self.environment.now_ms, self, self._timer_fired, self._timer)

    def _timer_fired(self, timer: int) -> None:
        if timer != self._timer or self.driver is None:
            return
        self._armed_ms = NONE
        if not self.driver.member.tick_due(self.now()):
            self._arm()
        else:
            self._wakes.count(self.environment.now_ms)
            if not self.stall(self.act, None):
                self.act(None)

    # --- what people do with it

    def start(self, _: None = None) -> None:
        """Starts to read the log."""
        self.wake_reader()

    def prepare_stop(self) -> None:
        """Plays the user, who announces that the consumer will be stopped soon (A6)."""
        self.stops = True
        if self.driver is not None:
            self.ending.request_stop()
            self.ending.must_stop()  # as the loop around `fetch` asks
            self.ran()

    def leave(self, wait_ms: int) -> None:
        """Plays the user, who stops the consumer. With a `wait_ms` he drains it: handlers may still run so long."""
        self.stops = True
        driver = self.driver
        if driver is None:
            self.dead = True
            return
        if driver.ended or self.ending.reason:
            return
        if self.user is not None:
            self.user.leave(wait_ms / 1000, LEAVE_TIMEOUT_S)
        else:
            self.front.begin(self.ending.stop(LEAVE_TIMEOUT_S), lambda *_: None)
        self.front.poke()
        self.ran()

    def end_tasks(self) -> None:
        """Ends the tasks of its event loop, if it has one."""
        if isinstance(self.user, AsyncUser):
            self.user.end_tasks()

    def topic_grew(self, topic: str) -> None:
        """Lets the client look at its topics, one of which has grown."""
        if not self.environment.renews_topics:
            self.infos[topic] = TopicInfo(self.environment.broker.counts[topic])
        if self.driver is not None:
            self.driver.look_at_topics()

    def keep_will(self, every_ms: int) -> None:
        """Keeps the last will, again and again, for a witness to read when this process is dead (T19)."""
        if self.driver is not None:
            self.kept = self.driver.member.last_will()
            self.environment.kept(self)
        self.environment.schedule(every_ms, self, self.keep_will, every_ms)

    # --- a cloned machine

    def clone(self, number: int, clock: MachineClock) -> Client:
        """Returns a copy of this process on a cloned machine. It has the same memory and will draw other random bits
        (T18).

        The calls of its user are generators, which cannot be copied: they begin again over copied buffers.
        """
        memo: dict[int, Any] = {id(self.environment.rng): self.environment.rng}
        clone = type(self)(self.environment, number, self.group, self.options, clock, self.concurrency)
        clone.forked = self.forked
        clone.world, clone.log, clone.topic_id = deepcopy(self.world, memo), self.log, self.topic_id
        clone.turn.worlds[self.log] = clone.world
        for number, snapshotter in self.maintenance.snapshotters.items():
            clone.maintenance.snapshotters[number] = deepcopy(snapshotter, memo)
        clone.infos, clone.clone_of, clone._was_fenced = dict(self.infos), self.number, self._was_fenced
        if self.driver is not None:
            self._copy_consumer(clone, memo)
        return clone

    def _copy_consumer(self, clone: Client, memo: dict[int, Any]) -> None:
        driver, user = self.driver, self.user
        assert driver is not None
        assert user is not None
        member = deepcopy(driver.member, memo)
        copied, own = clone._join(member), driver.queue
        copied.away, queue = driver.away, copied.queue
        assert isinstance(own, DeliveryQueue)
        assert isinstance(queue, DeliveryQueue)
        assert clone.user is not None
        for tp, buffer in own.buffers.items():
            if buffer.claim is None:
                queue.start_prefetch(tp, buffer.start)
                copied.prefetching.add(tp)
        if member.group is not None:
            claims = [claim for claim in member.claims.values() if own.has(claim.tp)]
            queue.open(claims)
            queue.fetch_again()  # what was fetched and not delivered
            queue.begin_claims([claim for claim in member.claims.values() if not own.has(claim.tp)])
        clone.turn.add(copied)
        for call in user.running.values():
            born = call.delivery.inherited_by(clone.number)
            self.environment.delivered(born)
            clone.user.run_handler(HandlerCall(_copied(call.delivery, member, queue), born))
        if user.held is not None and user.held.delivery.epoch in member.claims:
            clone.user.begin_held(_copied(user.held.delivery, member, queue), user.held.delivery)
        for _, letter in user.letters:
            if letter.is_needed() and queue.answers.letters is not None:
                claim, run = deepcopy(letter.claim, memo), deepcopy(letter.run, memo)
                queue.answers.letters.post(letter._replace(claim=claim, run=run))


def _copied(delivery: Delivery, member: Member, queue: DeliveryQueue) -> Message[Any, Any] | None:
    """Returns the message of a delivery as the clone of its process has it; None if its claim is over."""
    claim = member.claims.get(delivery.epoch)
    if claim is None:
        return None
    raw, place, again = message_at(delivery.offset, delivery.life, delivery.leader_epoch), None, 0
    if isinstance(claim.tracker, AtLeastOnce):
        place, again = claim.tracker.place_of(delivery.offset), claim.tracker.redelivered(delivery.offset)
        if place is None:
            return None
    run, index = place or (None, 0)
    delivered = Delivered(queue.delivery, claim, run, again)
    message: Message[Any, Any] = delivered.make(raw, delivered, index, raw.value())
    return message


class _Journal:
    """Notes each dead letter for the auditor, and passes it on to the shipped DeadLetters."""

    def __init__(self, user: User, letters: LetterWriter) -> None:
        self._user, self._letters = user, letters

    @property
    def written(self) -> int:
        return self._letters.written

    @property
    def held_bytes(self) -> int:
        return self._letters.held_bytes

    def post(self, letter: Letter) -> None:
        self._user.posted(letter)
        self._letters.post(letter)
