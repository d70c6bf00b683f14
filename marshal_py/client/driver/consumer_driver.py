"""Drives one member: ticks it and executes the Ready that the tick returns, a list of what to send, fetch and report.

A tick and the execution of its Ready are a step. loop.py calls the driver with the Marshal's lock held. Questions to
the cluster run on a worker thread, and the user's callbacks on a thread of their own, both without the lock. The driver
makes no protocol decision: the member does. A parked partition is one that nobody claims until an admin has looked at
it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from msgspec import structs

from marshal_py.client.connection import Ask, Context, LogLines, Repeats, Tasks, TaskSteps
from marshal_py.client.delivery.delivery_queue import ENDS_TIMEOUT_S, DeliveryQueue
from marshal_py.client.ranges import Ranges, UnfetchedSource
from marshal_py.client.values import position_text
from marshal_py.client.values.info import ClaimInfo, Counters
from marshal_py.client.values.options import TOPICS_MAX, ConsumerOptions
from marshal_py.errors import (
    AccessDenied,
    BatchOverdue,
    CallerError,
    ClusterError,
    ClusterUnreachable,
    Diverged,
    InvalidOption,
    MarshalError,
    PartitionError,
)
from marshal_py.history.advisories import PARKED, TOGETHER, to_lines
from marshal_py.history.explain import save_state
from marshal_py.protocol.claims import Claim, ClaimPhase
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.advisory import ALARMING, Advisory, AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import Ready, Wanted
from marshal_py.protocol.member.waiting import lasting, may_be_unserved
from marshal_py.protocol.wire import codec, records
from marshal_py.protocol.wire.identity import (
    NONE,
    Instant,
    Token,
    TopicPartition,
    consumed,
    has_patterns,
    is_pattern,
    names_of,
)
from marshal_py.transport.ports import Bounds, ClusterAdmin, DataSource, OutOfRange

# --- Writes a consumer's advisories to `logging`, in few lines, for people (docs/monitoring.md).
#
# Advisories of kinds that often come by the dozen (TOGETHER) are held back, so that those that are alike make one line.
# They are written when an advisory of any other kind comes, when a step of the consumer brings none, or when the next
# one comes after HELD_MS. Partitions that are parked are found out about one by one: a step that brings none writes
# them after HELD_MS. The order stays. Called with the Marshal's lock held.


HELD_MS: Final = 1_000  # the records of one decision are read within a few round trips; a second does not bother people


class EventLog:
    """Collects the advisories of one consumer and writes their lines to the log of this process."""

    def __init__(self, lines: LogLines) -> None:
        self._lines = lines
        self._held: list[Advisory] = []

    def add(self, advisories: Sequence[Advisory]) -> None:
        """Takes the advisories of one step of the consumer. Their `time_ms` must be set."""
        for one in advisories:
            if one.kind == "handler_failed" or not self._lines.enabled(_level(one)):
                continue  # the former are logged with their traceback (consuming.py)
            if one.kind not in TOGETHER or (self._held and one.time_ms - self._held[0].time_ms >= HELD_MS):
                self.flush()
            self._held.append(one)
            if one.kind not in TOGETHER:
                self.flush()

    def settle(self, now_ms: int) -> None:
        """Takes note of a step that has brought no advisory. `now_ms`: ms since 1970."""
        if not any(one.kind == PARKED for one in self._held) or now_ms - self._held[0].time_ms >= HELD_MS:
            self.flush()

    def flush(self) -> None:
        """Writes the advisories that were held back."""
        if not self._held:
            return
        held, self._held = self._held, []
        for alike, words in to_lines(held):
            one = alike[0]
            partitions = [advisory.partition for advisory in alike if advisory.partition != NONE]
            fields = {
                "marshal_kind": one.kind,
                "marshal_group": one.group,
                "marshal_topic": one.topic,
                "marshal_partition": one.partition if len(alike) == 1 else NONE,
                "marshal_partitions": partitions,
                "marshal_session": one.session,
                "marshal_client_id": one.client_id,
            }
            self._lines.write(_level(one), "group %s: %s", one.group, words, extra=fields)


def _level(advisory: Advisory) -> int:
    return logging.WARNING if advisory.kind in ALARMING else logging.INFO


# --- Watches the topics of a consumer in the cluster: growth, deletion, another id, names that its patterns match
#
# It runs on the consumer's worker thread, and reports to the member, which decides what follows.


def find_topics(admin: ClusterAdmin, topics: tuple[str, ...], coordination_topic: str) -> tuple[str, ...]:
    """Returns the topics of a Join's `topics`: named ones, and the cluster's that patterns match. Raises
    ClusterUnreachable."""
    return consumed(topics, admin.topics() - {coordination_topic} if has_patterns(topics) else ())


def check_count(topics: tuple[str, ...], found: int) -> None:
    """Raises InvalidOption if a consumer reads more topics than it can."""
    if found > TOPICS_MAX:
        rule = f"they name or match {found} topics, and a consumer reads at most {TOPICS_MAX}: use narrower patterns"
        raise InvalidOption("topics", topics, rule)


class TopicWatch:
    """Keeps what the cluster last said of a consumer's topics."""

    def __init__(self, driver: ConsumerDriver, later: frozenset[str]) -> None:
        """`later`: topics that came after the group began (D5)."""
        self.later: set[str] = set(later)
        self.missing: set[str] = set()  # named topics that the cluster said not to have, as of the last look
        self._ids: dict[str, str] = dict(driver.member.topics.ids)  # as of the last look, also of topics that are gone
        self._driver, self._context, self._member = driver, driver.context, driver.member

    @property
    def absent(self) -> frozenset[str]:
        return self._member.gone_topics | self.missing

    def waiting_for(self) -> str:
        """Returns which topic this consumer lacks, for people to read; "" if none."""
        if self.missing:
            return f"topic {', '.join(sorted(self.missing))}, which the cluster does not have"
        if self._member.found_topics:
            return ""
        return f"a topic that matches {' or '.join(filter(is_pattern, self._member.options.topics))}; there is none yet"

    def look(self) -> None:
        """Asks Kafka about the topics. The member reports added partitions (F9.1) and parks recreated topics (D10)."""
        failed: ClusterError | None = None
        member, context = self._member, self._context
        topics = member.options.topics
        found = find_topics(context.admin, topics, context.topic)
        self._give_up(frozenset(found))
        for topic in self._first(found):
            try:
                self.look_at(topic)
            except ClusterError as error:  # a topic that may not be described must not hide the others
                failed = error
        if failed is not None:
            raise failed
        check_count(topics, len(found))

    def _first(self, found: tuple[str, ...]) -> list[str]:
        """Returns the topics to ask about: those that the member reads already, then as many new ones as it may."""
        known = self._member.found_topics
        return sorted(found, key=lambda topic: topic not in known)[:TOPICS_MAX]

    def _give_up(self, found: frozenset[str]) -> None:
        """Tells the member which topics its patterns matched that the cluster does not have any more (A13)."""
        member = self._member
        with self._context.lock:
            group = member.group
            logged = group.topics if group is not None else ()
            known = frozenset(consumed(member.options.topics, logged)) | member.found_topics
            gone = known - found - member.gone_topics
            for topic in sorted(gone):
                if topic in member.found_topics:
                    self._driver.advise("topic_missing", topic, text="it was deleted; its partitions are released")
                member.forget_topic(topic)
        if gone:
            self._driver.kick()

    def look_at(self, topic: str) -> None:
        """Asks Kafka about one topic. Raises ClusterError."""
        info, member = self._context.admin.describe_topic(topic), self._member
        named = topic in names_of(member.options.topics)
        with self._context.lock:
            if info is None:
                if named and topic not in self.missing:
                    self.missing.add(topic)
                    self._driver.advise("topic_missing", topic, text="it was deleted; its partitions wait")
                return
            if topic in self.missing:
                self.missing.discard(topic)
                self._driver.advise("topic_found", topic)
            if not named and topic not in member.found_topics:
                self.later.add(topic)
                self._driver.advise("topic_found", topic, text="a pattern matches it")
            changed = member.learn_topic(topic, info.partitions, info.topic_id)
            known = self._ids.get(topic, "")
            anew = known != "" and info.topic_id not in ("", known)
            if not anew:
                self._ids[topic] = info.topic_id or known
        if anew:
            self._driver.kick()  # what it owns of the old topic is parked at once
        if changed or anew:
            self._driver.source.learn_leaders([topic], anew)
            self._ids[topic] = info.topic_id or known  # not before: the next look tries again what failed
            self._driver.kick()


# --- Notices when a group's settings leave a consumer, or partitions of its topics, without the other (`unserved`).
#
# A consumer that waits for nothing but an admin would else be silent. It looks again when the log has changed who is
# in the group, its topics or its settings, which is when `marshal advisories` looks, too. Called with the Marshal's
# lock held.


class UnservedWatch:
    """Watches the group of one member."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._known: dict[tuple[str, str, tuple[int, ...]], str] = {}

    def look(self, member: Member) -> Iterator[Advisory]:
        """Yields an advisory for each cause that has begun since the last call, or has become another one."""
        group = member.group
        if group is None or not may_be_unserved(group) or member.session not in group.sessions:
            return
        topics = tuple((topic.offset, topic.count) for topic in group.topics.values())
        seen = (group.config_offset, topics, len(group.sessions), max(group.sessions))
        if seen == self._seen:
            return
        self._seen = seen
        before, self._known = self._known, lasting(group)
        for (cause, topic, sessions), text in self._known.items():
            mine = member.session in sessions if sessions else topic in member.found_topics
            if mine and before.get((cause, topic, sessions)) != text:
                session = member.session if sessions else NONE
                yield Advisory(
                    "unserved",
                    group.name,
                    member.options.client_id,
                    topic,
                    text=text,
                    session=session,
                    log=member.world.log,
                )


# --- Copies positions to Kafka's committed offsets, so that the usual tools show the lag (D7). That may fail.
#
# It tells refusals that last from those that pass: a coordinator that moves or starts refuses for some seconds; the
# next copy then succeeds, and nobody needs to know.


COMMITS_MAX: Final = 10  # of one copy; an owner that moves on faster copies its position again by itself
LASTS_MS: Final = 30_000  # six copies in a row; a coordinator that moves is there again within some seconds


class PositionCopies:
    """Copies the positions of one consumer."""

    def __init__(self, driver: ConsumerDriver) -> None:
        self._driver, self._context, self._member = driver, driver.context, driver.member
        self._wanted: dict[TopicPartition, int] = {}
        self._refusals = CommitRefusals()

    def add(self, positions: Mapping[TopicPartition, int]) -> None:
        """Takes what the next `copy` will copy. Called with the lock held."""
        self._wanted |= positions

    def copy(self, absent: Collection[str]) -> TaskSteps:
        """Copies what was added, on the worker thread. A new owner may have committed meanwhile: then the newer
        position is copied again. Refusals because of `absent` topics are none."""
        context = self._context
        with context.lock:
            positions, self._wanted = self._wanted, {}
        for _ in range(COMMITS_MAX):
            if not positions:
                return
            refused: str = yield Ask(partial(context.admin.commit, self._member.name, positions))
            told = ""
            if not refused or not {tp.topic for tp in positions} & set(absent):
                told = self._refusals.answered(refused, context.clock.now())
            with context.outbox, context.lock:
                if told:
                    self._member.note("mirror_refused", text=told)
                    now = context.clock.now()  # a tick now: it may be the last copy of one that has left
                    if not self._driver.away:
                        self._driver.execute(self._member.tick(now), now)
                if refused:
                    self._member.not_mirrored(positions)
                    return
                positions = self._member.overtaken(positions)


class CommitRefusals:
    """Collects the answers of Kafka to copies. Pure."""

    def __init__(self) -> None:
        self._since: Instant | None = None  # of the first refusal after which no copy has succeeded
        self._told = ""

    def answered(self, refused: str, now: Instant) -> str:
        """Takes Kafka's refusal of a copy, or "". Returns what to report: once per reason, after LASTS_MS without a
        success."""
        if not refused:
            self._since, self._told = None, ""
            return ""
        if self._since is None:
            self._since = now
        if refused == self._told or now.mono_ms - self._since.mono_ms < LASTS_MS:
            return ""
        self._told = refused
        since = datetime.fromtimestamp(self._since.wall_ms / 1000, UTC).isoformat(timespec="seconds")
        return f"{refused}; no copy has succeeded since {since}"


EVENTS_KEPT: Final = 10_000  # advisories that the user has not asked for; the oldest are dropped first
ERRORS_KEPT: Final = 1_000  # that the user has not asked for: what the cluster refuses is asked again and again
PREFETCH_POLL_S: Final = 0.004  # while a partition is fetched ahead: a hand-over waits for its first bytes
PREFETCH_POLLED_MS: Final = 1_000  # for so long: one without a leader gives none, and then each tick looks
BEGAN_AT_END: Final = "nothing is committed: it reads what comes from now on; start='earliest' reads what is there"


# --- Which callbacks of one consumer's options a tick of its member leads to, in which order.
#
# They run on the thread of `Callbacks`. A consumer is active while it owns a partition.


class UserCallbacks:
    """Submits the callbacks of one consumer, and knows whether its user was told that it is active."""

    def __init__(self, driver: ConsumerDriver) -> None:
        self._driver = driver
        self._active = False

    def notify(self, ready: Ready, active: bool) -> None:
        """Submits what a tick led to. `active`: whether the consumer owns a partition after it."""
        options, submit, info = self._driver.options, self._driver.context.callbacks.submit, self._driver.claim_info
        if options.on_lost is not None:
            for claim, reason in ready.lost:
                if claim.told:
                    submit(partial(options.on_lost, info(claim), reason))
        if active != self._active:
            self._active = active
            changed = options.on_activated if active else options.on_deactivated
            if changed is not None:
                submit(changed)
        if options.on_claim is not None:
            for claim in ready.claimed:
                submit(partial(options.on_claim, info(claim)))
        if options.on_revoking is not None:
            for claim in ready.revoking:
                submit(partial(options.on_revoking, info(claim)))


# --- The driver


class ConsumerDriver:
    """Drives one consumer. Only `queue` depends on whether it fetches messages or plans ranges for other readers."""

    context: Context
    log: int
    member: Member
    options: ConsumerOptions
    incarnation: bytes

    def __init__(
        self,
        context: Context,
        log: int,
        member: Member,
        source: DataSource,
        options: ConsumerOptions,
        incarnation: bytes,
        new_topics: frozenset[str],
        refold: Callable[[ConsumerDriver, int], None],
        siblings: Callable[[], Collection[int]],
        *,
        plans: bool,
    ) -> None:
        """`log`: the group's. `new_topics`: added to the group later, read from their first offset (D5). `plans`: it
        plans ranges for others to read. `refold(driver, at)`: folds the log again to `at` (G6). `siblings()`: sessions
        of this Marshal's consumers in this log."""
        self.context, self.log, self.member, self.options = context, log, member, options
        self.incarnation = incarnation
        self.topic_watch: TopicWatch = TopicWatch(self, new_topics)
        self._refold, self._siblings = refold, siblings
        self.group_key: bytes = member.name.encode()
        self.worker: Tasks = context.new_worker(f"marshal-worker-{member.name}")
        parts = context, member, source, options, incarnation, self.submit
        self.queue: DeliveryQueue | Ranges = (
            Ranges(*parts, lambda: self.topic_watch.absent) if plans else DeliveryQueue(*parts)
        )
        self.error: MarshalError | None = None  # why the consumer ended: raised to the user once, then kept
        self.gave_up: bool = False  # it ended without the log's answer to its leave
        self.pending_errors: deque[ClusterError] = deque(maxlen=ERRORS_KEPT)  # raised one by one; it continues
        self.ended: bool = False
        self.away: bool = False  # while the log's history is read again (N11)
        # Set, without the lock, when the program has dropped the consumer: closes it once it has left.
        self.dropped: Callable[[], None] | None = None
        self.events: deque[Advisory] = deque(maxlen=EVENTS_KEPT)
        self._event_log = EventLog(context.lines)
        self.handler_failures: Repeats = Repeats(context.monotonic)  # causes that were logged; with the lock held
        self._unserved = UnservedWatch()
        self._user_callbacks = UserCallbacks(self)
        self.prefetching: set[TopicPartition] = set()  # fetched ahead, and no message has come yet
        self._polled_until_ms = 0
        self.refused_positions: dict[
            TopicPartition, OutOfRange
        ] = {}  # the cluster refused the position; asked until it answers
        self._to_resolve: list[Wanted] = []
        self._ends_due_ms = 0
        self._copies = PositionCopies(self)
        self.counters: Counters = Counters()
        self.began_at_end: set[TopicPartition] = set()  # as in ConsumerInfo

    @property
    def source(self) -> DataSource | UnfetchedSource:
        return self.queue.source

    def close(self) -> None:
        """Closes the data source, and ends the worker after its queued tasks. Called when the consumer has ended."""
        self.source.close()
        self.worker.end()

    def close_dropped(self) -> None:
        """Has the worker close a consumer that has ended and that the program has dropped. Takes no lock."""
        if self.ended and self.dropped is not None:
            self.submit("the end of a consumer that was dropped", self.dropped)

    # --- one step

    def kick(self) -> None:
        """Steps the member now, in the calling thread. Takes the lock."""
        with self.context.outbox, self.context.lock:
            if not self.ended:
                self.advance()

    def advance(self) -> None:
        """Steps the member. An error in the step ends this consumer only, so that the others are still driven."""
        try:
            self.member.stalled_ms = self.context.stalled_ms()
            self.step(self.context.clock.now())
        except Exception as error:
            if not isinstance(error, MarshalError):
                self.context.lines.write(logging.ERROR, "group %s: a step failed", self.member.name, error=error)
            self.give_up(error if isinstance(error, MarshalError) else ClusterError(f"a step failed: {error!r}"))
        if self.ended:
            self.context.changed.notify_all()

    def step(self, now: Instant) -> None:
        """Reports to the member what the data source has noticed, ticks it, and executes its Ready."""
        if self.away and not self.member.ended:
            return
        self.member.settle_acks()
        self._look_at_source(now)
        self.publish(*self._unserved.look(self.member))
        if self.dropped is not None and not self.member.leaving:
            self.member.leave(now, "dropped", self.member.options.handler_timeout_ms)
        if self.queue.overdue(now) and not self.member.leaving:
            self.error = BatchOverdue(self.member.name, self.options.handler_timeout_s)
            self.member.leave(now, "no call within the handler timeout", 0)
        if self.queue.at_most_once:
            self.queue.offer()
        self.execute(self.member.tick(now), now)

    def give_up(self, error: MarshalError | None) -> None:
        """Ends the consumer with `error`, or None if it had no more time to read back that it left. After that it sends
        nothing."""
        self.gave_up = True
        self.member.end(error)
        now = self.context.clock.now()
        self.execute(self.member.tick(now), now)

    def ask_grants(self, now: Instant) -> None:
        """Asks the log for grants (permission to deliver offsets, in at-most-once mode) without a step (D2)."""
        if not self.away and not self.member.rebalancer.grant_requests.awaited(now) and self.queue.offer():
            self.execute(self.member.ask_grants(now), now)

    def report_finished(self) -> None:
        """Sends a heartbeat now if a claim must report finished messages before it may deliver the next one (D11)."""
        if self.member.finished():
            self.kick()

    def lose_history(self) -> None:
        """Takes all claims, because the log lost unread records (N11). No step before `regain_history`."""
        self.away = True
        self.execute(self.member.detach(), self.context.clock.now())

    def regain_history(self, world: World) -> None:
        """Has the member continue in `world`, which was loaded from a snapshot and folded to the log's end."""
        self.member.attach(world)
        self.away = False

    def due(self, now: Instant) -> bool:
        if self.away:
            return False
        left = self.dropped is not None and not self.member.leaving
        return self.member.tick_due(now) or self.awaits_prefetch(now) or left

    def awaits_prefetch(self, now: Instant) -> bool:
        """Returns whether the first bytes of a partition that is fetched ahead may come any moment."""
        return bool(self.prefetching) and now.mono_ms < self._polled_until_ms

    def _look_at_source(self, now: Instant) -> None:
        for tp in [tp for tp in self.prefetching if self.source.end_offset(tp) >= 0]:
            self.prefetching.discard(tp)
            self.member.prefetched(tp)
        if now.mono_ms >= self._ends_due_ms:
            self._ends_due_ms = now.mono_ms + self.member.third_ms
            for claim in self.member.claims.values():
                claim.saw_end(self.end_offset(claim.tp))
            self.queue.look()
            if self.refused_positions:
                self.submit("the bounds of partitions", self._check_refused)
        for refused in self.source.out_of_range():
            self.refused_positions[refused.tp] = refused
            self.submit("the bounds of partitions", self._check_refused)
        for tp, reason, _, permanent in self.source.broken():
            nothing_left = self.member.give_up(tp, reason, now)
            if permanent and nothing_left:  # the user must know
                self.pending_errors.append(PartitionError(tp.topic, tp.partition, reason))

    # --- executing a Ready, in the order of its fields

    def execute(self, ready: Ready, now: Instant) -> None:
        self.counters.count(ready)
        if ready.lost or ready.stop_prefetch:
            self.queue.end_claims([claim for claim, _ in ready.lost])
            gone = [claim.tp for claim, _ in ready.lost] + ready.stop_prefetch
            self.queue.drop(gone)
            self.prefetching.difference_update(gone)
            for tp in gone:
                self.refused_positions.pop(tp, None)  # the answer is not needed any more
        version = self.member.writes_version if ready.send else 0  # reads every session, so only if it is needed
        for record in ready.send:
            value = codec.encode(record, self.member.name, self.incarnation, version)
            self.context.outbox.put(self.log, self.group_key, (value,), self._refused)
        if ready.claimed:
            self.queue.begin_claims(ready.claimed)
            self.prefetching.difference_update(claim.tp for claim in ready.claimed)
        for tp, position in ready.start_prefetch:
            self.queue.start_prefetch(tp, position)
            self.prefetching.add(tp)
            self._polled_until_ms = now.mono_ms + PREFETCH_POLLED_MS
        if ready.resolve:
            self._to_resolve += ready.resolve
            self.submit("where partitions begin", self._resolve)
        if ready.mirror:
            self._copies.add(ready.mirror)
            self.submit("the copy of positions", lambda: self._copies.copy(self.topic_watch.absent))
        if ready.look_at_topics:
            self.look_at_topics()
        if ready.refold != NONE:
            self._refold(self, ready.refold)
        self._notify(ready)
        if ready.ended:
            if isinstance(ready.error, Diverged):
                self._save_divergence(ready.error)
            self.ended = True
            self.error = ready.error or self.error
            self.close_dropped()
        if self.ended:
            self._event_log.flush()
        elif not ready.advisories:
            self._event_log.settle(now.wall_ms)

    def _refused(self, error: MarshalError) -> None:
        """Ends the consumer with `error`, because one of its records can never be written."""
        with self.context.outbox, self.context.lock:
            self.member.fail(error)
            self.kick()

    def _save_divergence(self, error: Diverged) -> None:
        """Writes the member's wrong state to a file, because it would be gone with this process."""
        member, now_ms = self.member, self.context.clock.now().wall_ms
        path = save_state(member, error, self.context.retention.evidence_dir, member.options.library, now_ms)
        if path:
            error.keep(path)
            self.advise("state_kept", text=path, at=error.offset)

    def _notify(self, ready: Ready) -> None:
        if ready.advisories:
            shared = {one.session for one in ready.advisories if one.kind == "client_id_shared"}
            own = shared and shared.intersection(self._siblings())  # those of one Marshal share its client_id by right
            self.publish(*(one for one in ready.advisories if one.kind != "client_id_shared" or one.session not in own))
        self._user_callbacks.notify(ready, bool(self.member.claims))

    def advise(
        self,
        kind: AdvisoryKind,
        topic: str = "",
        partition: int = NONE,
        epoch: int = NONE,
        offset: int = NONE,
        *,
        text: str = "",
        at: int = NONE,
    ) -> None:
        """Publishes an advisory of this consumer alone. `at`: the record behind it."""
        member, of = self.member, (topic, partition, epoch, offset, NONE, text)
        self.publish(Advisory(kind, member.name, member.options.client_id, *of, member.session, self.log, at))

    def publish(self, *advisories: Advisory) -> None:
        """Adds advisories to `Consumer.events`, and to `logging` in as few lines as people need."""
        if not advisories:
            return
        now_ms = self.context.clock.now().wall_ms
        timed = [structs.replace(advisory, time_ms=now_ms) for advisory in advisories]
        self.events += timed
        self._event_log.add(timed)

    # --- on the worker thread, without the lock

    def submit(self, what: str, task: Callable[[], object]) -> None:
        """Runs `task` on the worker. Does nothing if a task with the same name `what` is already waiting there."""
        self.worker.submit(f"group {self.member.name}: {what}", task)

    def _resolve(self) -> TaskSteps:
        """Asks the cluster where partitions without a position in the log begin (D5)."""
        with self.context.lock:
            wanted, self._to_resolve = self._to_resolve, []
            ids = {one.tp.topic: self._log_id(one.tp.topic) for one in wanted}
        if not wanted:
            return
        wanted = [one._replace(earliest=one.earliest or one.tp.topic in self.topic_watch.later) for one in wanted]
        try:
            found: dict[TopicPartition, position_text.Begin] = yield Ask(partial(self._starts_of, wanted))
        except AccessDenied as error:  # waiting would not fix it: the user must know
            with self.context.lock:
                self.pending_errors.append(error)
            return
        except CallerError as error:  # nor would waiting fix an option: other members continue without this one
            with self.context.outbox, self.context.lock:
                self.error = self.error or error
                self.member.leave(self.context.clock.now(), "its start cannot be", 0)
                self.kick()
            return
        with self.context.outbox, self.context.lock:
            now = self.context.clock.now()
            for tp, (first, end, unsaid) in found.items():
                if self._log_id(tp.topic) != ids[tp.topic]:
                    continue  # the answer may be about the topic that was deleted (D10): the member asks again
                self.member.start_resolved(tp, first, end, now)
                if unsaid:
                    self._began_at_end(tp)
            self.step(now)

    def _log_id(self, topic: str) -> str:
        """Returns the id that the log has of a topic; "" without one."""
        group = self.member.group
        return "" if group is None or topic not in group.topics else group.topics[topic].id

    def _starts_of(self, wanted: list[Wanted]) -> dict[TopicPartition, position_text.Begin]:
        """Asks where these partitions begin. One without a leader holds up no other; the member asks for it again."""
        start, name, admin = self.options.start, self.member.name, self.context.admin
        now_ms = self.context.clock.now().wall_ms
        try:
            return position_text.resolve(start, wanted, name, admin, now_ms)
        except ClusterUnreachable:
            told = admin.told_offsets([one.tp for one in wanted], ENDS_TIMEOUT_S)
            there = [one for one in wanted if one.tp in told]
            if not there or len(there) == len(wanted):
                raise
            return position_text.resolve(start, there, name, admin, now_ms)

    def _began_at_end(self, tp: TopicPartition) -> None:
        """Says once that this consumer reads only what comes from now on, which newcomers do not expect."""
        if not self.began_at_end:
            self.member.advise("began_at_end", tp, text=BEGAN_AT_END)
        self.began_at_end.add(tp)

    def _check_refused(self) -> TaskSteps:
        """Asks for the bounds of partitions with a refused position (D6): below, it moves to the beginning; else it is
        or was beyond the end, and the partition is parked. The topic's id comes first: it may be recreated (D10).
        Without an answer it asks later."""
        failed: ClusterError | None = None
        with self.context.lock:
            asked = list(self.refused_positions.values())
        for refused in asked:
            try:
                bounds: Bounds = yield Ask(partial(self._bounds_of, refused.tp))
            except ClusterError as error:
                failed = error
            else:
                self._settle_position(refused, *bounds)
        if failed is not None:
            raise failed

    def _bounds_of(self, tp: TopicPartition) -> Bounds:
        self.topic_watch.look_at(tp.topic)
        return self.context.admin.bounds([tp])[tp]

    def _settle_position(self, refused: OutOfRange, first: int, end: int) -> None:
        tp, position, round_, truncated = refused
        with self.context.outbox, self.context.lock:
            if self.refused_positions.get(tp) is refused:
                del self.refused_positions[tp]
            group = self.member.group
            if not self.queue.has(tp) or (group is not None and self.member.unfit(group, tp)):
                return
            if self.source.round(tp) != round_:
                return  # assigned again since, which the refusal does not concern
            if truncated:
                self.park(tp, records.TRUNCATED, truncated)
            elif position > end:
                self.park(tp, records.BEYOND_END, records.beyond_end(position, end))
            elif position >= first:
                # It was beyond the end, and others have its offsets (D6). Or it was below the beginning, and a new
                # leader has not deleted yet what the old one had: parked, too, as nobody here can tell.
                self.park(tp, records.TRUNCATED, records.grown_over(position, end))
            elif (ended := self.queue.restart(tp, first)) < first:
                self.member.note("offset_lost", tp, ended, first)
                self.step(self.context.clock.now())

    def park(self, tp: TopicPartition, reason: str, detail: str) -> None:
        """Releases and parks a claim; one fetched ahead is its owner's (D6). `reason`: of records.py; `detail`: for
        people."""
        for claim in self.member.claims.values():
            if claim.tp == tp:
                self.member.park(claim.epoch, reason, detail, self.context.clock.now())
        self.kick()

    def look_at_topics(self) -> None:
        """Has the worker ask the cluster which topics there are, for their partition counts and their ids."""
        self.submit("the look at topics", self.topic_watch.look)

    def parked(self) -> dict[TopicPartition, str]:
        """Returns the reason for each partition that is parked, or will be because it cannot be consumed (F6.4)."""
        group, found = self.member.group, {}
        for topic in self.member.found_topics if group is not None else ():
            assert group is not None
            known = group.topics.get(topic)
            for number in range(known.count if known is not None else 0):
                tp = TopicPartition(topic, number)
                reason = group.parked(tp) or self.member.unfit(group, tp)
                if reason:
                    found[tp] = reason
        return found

    def claim_info(self, claim: Claim) -> ClaimInfo:
        token = Token(self.incarnation, claim.epoch)
        return ClaimInfo(*claim.tp, token, self.position(claim), self.lag(claim), *self.draining(claim))

    def end_offset(self, tp: TopicPartition) -> int:
        """Returns the last known end offset of a partition; -1 if it is unknown or the topic is gone."""
        return -1 if tp.topic in self.topic_watch.absent else self.source.end_offset(tp)

    def draining(self, claim: Claim) -> tuple[str, float]:
        """Returns why the claim is ending, and for how many more seconds handlers have; ("", -1) if it is not."""
        if claim.phase is ClaimPhase.OPEN:
            return "", -1.0
        until_ms = claim.drain_until_ms
        now_ms = self.context.clock.now().mono_ms
        return claim.reason, 0.0 if claim.sealed or until_ms is None else max(0.0, (until_ms - now_ms) / 1000)

    def lag(self, claim: Claim) -> int:
        """Returns how many messages lie between the claim's position and the end; -1 if unknown or the end is lower."""
        return max(-1, self.end_offset(claim.tp) - self.position(claim))

    def position(self, claim: Claim) -> int:
        """Returns the next offset to process: the claim's position or the one in the log, whichever is higher."""
        claim.settle()
        own = claim.position()
        group = self.member.group
        folded = group.partitions.get(claim.tp) if group is not None else None  # None: the group was deleted since
        return own if folded is None else max(own, folded.position)
