"""The background thread of a Marshal: it polls and folds the coordination logs, steps the members and sends records.

The thread executes what members return and makes no protocol decision. A user's thread may step its own consumer under
the lock (`ConsumerDriver.kick`), so that nothing waits for this thread's poll. Nothing that the cluster does ends the
thread. An error that makes a log untrustworthy ends the consumers of that log, with that error (S14). The thread runs
no code of the user's (`Callbacks` does). If it ends all the same, every consumer ends with BackgroundThreadEnded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from marshal_py.client.connection import POLL_S_MAX, Context, Repeats, Tasks
from marshal_py.client.driver.consumer_driver import PREFETCH_POLL_S, ConsumerDriver
from marshal_py.errors import (
    AccessDenied,
    BackgroundThreadEnded,
    ClusterError,
    ClusterUnreachable,
    CoordinationError,
    HistoryTruncated,
    MarshalError,
    SnapshotRefused,
    TopicRecreated,
    WrongTopicSetting,
)
from marshal_py.log import replay
from marshal_py.protocol.duties import Presence, Snapshotter
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.snapshot import Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.member.advisory import Advisory, AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.time import heartbeats_per_s
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import Evict, Genesis, Snapshot
from marshal_py.transport.clock import mono_ms
from marshal_py.transport.ports import LogRecord

# --- Keeps coordination logs short and verified: snapshots, their audits, truncation, second folds (PROTOCOL.md 15)
#
# It carries out what Snapshotter (protocol/duties.py) and Member ask for, and decides nothing. Tasks that
# read history run on the history worker, a thread of its own, without the lock. An audit folds the log again from its
# bytes to check a snapshot. A snapshot is confirmed once another process, or an audit by its writer, has vouched for it
# (N5).


CHECK_AFTER_MS: Final = 5_000  # after a log was opened, since opening it is work enough
TRUNCATE_EVERY_MS: Final = 300_000  # between two look-ups by time, per log, in the client that truncates it
TRUNCATE_RECORDS_MIN: Final = 1_024  # a request for fewer records costs more than it frees
BOUNDS_TIMEOUT_S: Final = 10.0


class Logs(Protocol):
    """Declares what LogMaintenance needs of the Loop: the followed logs, and the consumers whose groups are in them."""

    @property
    def worlds(self) -> dict[int, World]: ...

    @property
    def drivers(self) -> list[ConsumerDriver]: ...

    def break_log(self, number: int, error: CoordinationError) -> None: ...

    def check_topic(self) -> bool: ...


class Truncation(NamedTuple):
    """Says how often the client that truncates a log looks what it may delete, and how many records are worth it."""

    every_ms: int
    records_min: int


class LogMaintenance:
    """Maintains all logs of one Marshal. The lock is held, but for what runs on the history worker."""

    def __init__(self, context: Context, logs: Logs, truncation: Truncation | None = None) -> None:
        """`truncation`: None for TRUNCATE_EVERY_MS and TRUNCATE_RECORDS_MIN."""
        self._context, self._logs = context, logs
        self._truncation = truncation or Truncation(TRUNCATE_EVERY_MS, TRUNCATE_RECORDS_MIN)
        self.snapshotters: dict[int, Snapshotter] = {}
        self._truncate_due_ms: dict[int, int] = {}
        self._check_due_ms: dict[int, int] = {}  # logs that began at a snapshot which is not checked yet
        self._refused = False  # the cluster does not let this client delete records: an admin must (N12)

    def begin(self, world: World) -> None:
        retention = self._context.retention
        self.snapshotters[world.log] = Snapshotter(
            world, retention.snapshot_every_records, self._context.draw, retention.snapshot_records_min
        )
        if world.began_at:
            self._check_due_ms[world.log] = self._context.clock.now().mono_ms + CHECK_AFTER_MS

    def folded(self, number: int, verdict: Verdict, now_ms: int) -> None:
        self.snapshotters[number].folded(verdict, now_ms)

    def tick(self, now: Instant) -> None:
        if not self._logs.drivers:
            return
        for number in [number for number, due_ms in self._check_due_ms.items() if now.mono_ms >= due_ms]:
            del self._check_due_ms[number]
            world = self._logs.worlds[number]
            self._context.history_worker.submit(
                f"check of the start of log {number}", partial(self._check_start, world)
            )
        here: dict[int, list[Member]] = {}
        for driver in self._logs.drivers:
            if driver.member.session != NONE and not driver.away:
                here.setdefault(driver.log, []).append(driver.member)
        for number, members in here.items():
            snapshotter, live = self.snapshotters[number], {member.session for member in members}
            tasks = snapshotter.tick(
                now,
                Presence(
                    members[0].options.client_id,
                    live,
                    max(member.options.interval_ms for member in members),
                    any(member.proven(now) for member in members),
                ),
            )
            self._send(number, tasks.send)
            self._evict(snapshotter.world, tasks.evict)
            if tasks.audit is not None:
                self._submit_audit(snapshotter, tasks.audit)
            if tasks.mismatched is not None:
                self._publish(number, "snapshot_refused", tasks.mismatched.at, "it is not what this process folded")
            if snapshotter.confirmed_at != NONE and now.mono_ms >= self._truncate_due_ms.get(number, 0):
                self._truncate_due_ms[number] = now.mono_ms + self._truncation.every_ms
                if snapshotter.leads(live):
                    self._context.history_worker.submit(
                        f"truncation of log {number}", partial(self._truncate, snapshotter)
                    )

    def _send(self, number: int, records: list[Snapshot]) -> None:
        if not records:
            return
        values = [codec.encode(record, "", record.genesis.incarnation) for record in records]

        def refused(
            error: MarshalError,
        ) -> None:  # too large for this cluster: the history stays, and consumers continue
            with self._context.lock:
                self._publish(number, "snapshot_refused", records[0].at, str(error))

        self._context.outbox.put(number, b"", values, refused)

    def _evict(self, world: World, records: list[tuple[str, Evict]]) -> None:
        """Evicts silent sessions of groups without a member here, which may have no other to do it (N14)."""
        for group, record in records:
            assert world.genesis is not None  # it has sessions
            value = codec.encode(record, group, world.genesis.incarnation, world.writes_version(group))
            self._context.outbox.put(world.log, group.encode(), (value,), partial(self._warn, world.log))
            self._context.lines.write(
                logging.INFO,
                "group %s: %s has been silent for %.1f s; its session is evicted",
                group,
                world.groups[group].sessions[record.session].join.client_id,
                record.waited_ms / 1000,
                extra={"marshal_group": group, "marshal_session": record.session},
            )

    def _warn(self, number: int, error: MarshalError) -> None:
        self._context.lines.write(
            logging.WARNING, "coordination partition %d: %s", number, error, extra={"marshal_log": number}
        )

    def _publish(self, number: int, kind: AdvisoryKind, offset: int, text: str) -> None:
        for driver in self._logs.drivers:
            if driver.log == number:
                member = driver.member
                driver.publish(
                    Advisory(kind, member.name, member.options.client_id, text=text, log=number, log_offset=offset)
                )

    # --- on the history worker

    def _submit_audit(self, snapshotter: Snapshotter, stored: Stored) -> None:
        self._context.history_worker.submit(
            f"audit of the snapshot of log {snapshotter.world.log}", lambda: self._audit(snapshotter, stored)
        )

    def _audit(self, snapshotter: Snapshotter, stored: Stored) -> None:
        """Checks a snapshot by folding the log again from its bytes, because no other process can check it (N6)."""
        again = self._again(snapshotter.world, stored.at)
        with self._context.outbox, self._context.lock:
            self._send(snapshotter.world.log, snapshotter.audited(stored, again))

    def _again(self, world: World, at: int, group: str = "") -> World | None:
        """Returns the world at `at`, folded again from the confirmed snapshot below, with digests of `group` (or "");
        None if that fails."""
        context = self._context
        try:
            bounds = context.coordination.bounds(world.log, BOUNDS_TIMEOUT_S)
            base = replay.base_of(context.coordination, world.log, world.root, bounds, at - CHECKPOINT_OFFSETS)
            return replay.refold(context.coordination, base, at, group)
        except ClusterError as error:
            if isinstance(error, CoordinationError) and not isinstance(error, HistoryTruncated):
                self._logs.break_log(world.log, error)  # a gap stops the reader, wherever it is reading (L8)
                return None
            self._context.logger.warning(
                "coordination partition %d could not be folded again: %s",
                world.log,
                error,
                extra={"marshal_log": world.log},
            )
        return None

    def refold(self, driver: ConsumerDriver, at: int) -> None:
        """Has the log folded once more up to offset `at`, and the member compare its state with the result (G6)."""
        member, world = driver.member, driver.member.world

        def work() -> None:
            again = self._again(world, at, member.name)
            with self._context.lock:
                if member.world is world:
                    member.refolded(at, again, self._context.clock.now())
            driver.kick()

        self._context.history_worker.submit(f"group {member.name}: the second fold", work, driver)

    def _check_start(self, world: World) -> None:
        """Does what `_compare_start` does; again later if the cluster does not answer, or deletes records meanwhile."""
        try:
            self._compare_start(world)
        except (AccessDenied, ClusterUnreachable, HistoryTruncated) as error:
            with self._context.lock:
                if self._logs.worlds.get(world.log) is world:
                    self._check_due_ms[world.log] = self._context.clock.now().mono_ms + CHECK_AFTER_MS
            if not isinstance(error, HistoryTruncated):
                raise
        except CoordinationError as error:
            self._logs.break_log(world.log, error)  # L8

    def _compare_start(self, world: World) -> None:
        """Folds the older confirmed snapshot on to the one at which this process began (N9); if they differ, the log is
        broken."""
        context, at = self._context, world.began_at
        bounds = context.coordination.bounds(world.log, BOUNDS_TIMEOUT_S)
        assert world.genesis is not None  # a snapshot names it
        store = replay.find(context.coordination, world.log, bounds, world.genesis.incarnation, 2)
        older = [stored for stored in store.confirmed(bounds.first) if stored.at < at]
        began = [stored for stored in store.confirmed(bounds.first) if stored.at == at]
        base = snapshot.load(older[0], world.log, world.root) if older else None
        if base is None or not began:
            return
        again = replay.refold(context.coordination, base, at)
        if any(group.opaque_at != NONE for group in again.groups.values()):
            return  # N7: this process cannot read the whole state
        key = began[0].key
        if (snapshot.digest_of(again), again.chain) != (key.state, key.chain) and self._logs.worlds.get(
            world.log
        ) is world:
            self._logs.break_log(world.log, SnapshotRefused(world.log, at, older[0].at))

    def _truncate(self, snapshotter: Snapshotter) -> None:
        """Deletes what is below two confirmed snapshots and older than `history_kept_s` (N12): at a snapshot, as what
        lies before the next could not be read."""
        context, number = self._context, snapshotter.world.log
        with context.lock:
            before = snapshotter.deletable()
        if not before or self._refused or not {"truncate", "time_lookup"} <= context.admin.capabilities:
            return
        tp = TopicPartition(context.topic, number)
        bounds = context.coordination.bounds(number, BOUNDS_TIMEOUT_S)
        kept_from_ms = context.clock.now().wall_ms - round(self._context.retention.history_kept_s * 1000)
        before = min(before, context.admin.offsets_at([tp], kept_from_ms).get(tp, before))
        if before - bounds.first < context.retention.snapshot_every_records:
            return  # the next snapshot that could be cut at is not so old yet
        before = replay.cut_of(context.coordination, number, snapshotter.world.root, bounds, before)
        if before - bounds.first < self._truncation.records_min or not self._logs.check_topic():
            return  # not worth a request; or the topic was recreated and has other records at these offsets
        refused = context.admin.delete_records(tp, before)
        if refused:
            self._refused = True
            with context.lock:
                self._publish(number, "truncation_refused", before, refused)
        else:
            self._context.logger.info(
                "coordination partition %d: records below %d were deleted",
                number,
                before,
                extra={"marshal_log": number},
            )


# --- One turn: fold what was read of the logs, step the consumers that are due, keep the logs short
#
# It has no thread, reads no log and waits for nothing. The background thread takes a turn after each poll, the
# simulator whenever records have come or a member is due.


class Maintenance(Protocol):
    """Keeps coordination logs short: LogMaintenance, or a simulated one. It is called with the lock held."""

    def folded(self, number: int, verdict: Verdict, now_ms: int) -> None:
        """Takes the verdict on a record of log `number` that was just folded, before a member hears of it."""

    def tick(self, now: Instant) -> None: ...


class Turn:
    """Drives all consumers of one Marshal. `worlds`: by coordination partition, the folded state."""

    def __init__(self, context: Context, maintenance: Maintenance) -> None:
        self._context, self._maintenance = context, maintenance
        self.worlds: dict[int, World] = {}
        self.lost: set[int] = set()  # logs that lost unread records, until their state is read again (N11)
        self._drivers: list[ConsumerDriver] = []
        self.folded: int = 0  # records

    @property
    def drivers(self) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers that have not ended."""
        return [driver for driver in self._drivers if not driver.ended]

    def of(self, log: int) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers whose groups are in this log."""
        return [driver for driver in self.drivers if driver.log == log]

    def awaits_prefetch(self, now: Instant) -> bool:
        """Returns whether the first bytes of a partition that is fetched ahead may come any moment: its driver looks at
        each turn."""
        return any([driver.awaits_prefetch(now) for driver in self._drivers])

    def deadline_ms(self) -> int | None:
        """Returns the monotonic ms at which the next consumer must be stepped; None if there is no consumer."""
        return min([driver.member.deadline_ms for driver in self.drivers if not driver.away], default=None)

    def due(self, now: Instant) -> bool:
        """Returns whether a consumer is to be stepped."""
        return any([driver.due(now) for driver in self.drivers])

    def add(self, driver: ConsumerDriver) -> None:
        """Adds a consumer and steps it."""
        with self._context.outbox, self._context.lock:
            self._drivers = [*self.drivers, driver]
            if driver.log in self.lost:
                driver.lose_history()
            elif not driver.away and driver.member.world is not self.worlds[driver.log]:
                driver.regain_history(self.worlds[driver.log])  # it was read again while the consumer was made
            driver.advance()

    # --- a turn

    def run(self, records: Sequence[LogRecord]) -> None:
        """Folds these records, then steps each consumer that has something to do."""
        with self._context.outbox, self._context.lock:
            self.fold(records)
            self.step(heard=bool(records))

    def fold(self, records: Sequence[LogRecord]) -> None:
        """Folds each record into the world of its log, and passes the verdict to the members of that log."""
        context = self._context
        with context.outbox, context.lock:
            now, drivers = context.clock.now(), self.drivers
            if records:
                context.heard_ms = now.mono_ms
            for number, offset, value, _, _ in records:
                if number in context.broken:
                    continue
                world = self.worlds[number]
                try:
                    verdict = rationalizer.apply(world, offset, value)
                except CoordinationError as error:
                    self.break_log(number, error)
                    continue
                self.folded += 1
                self._maintenance.folded(number, verdict, now.mono_ms)
                if verdict.group:
                    for driver in drivers:
                        if driver.log == number:
                            driver.member.receive(verdict, now)

    def step(self, *, heard: bool) -> None:
        """Steps each consumer that has something to do. `heard`: records were folded since the last step."""
        context = self._context
        with context.outbox, context.lock:
            self._drivers = self.drivers
            now = context.clock.now()
            refused = context.coordination.refused()
            for driver in self._drivers:
                if refused is not None:
                    driver.member.fail(refused)
                if refused is not None or driver.due(now):
                    driver.advance()
            self._maintenance.tick(now)
            if heard or refused is not None:
                context.changed.notify_all()

    def carry_out(self) -> None:
        """Tells data clients, without the lock, what to fetch and pause, which was noted under it. A client that fails
        ends its consumer with ClusterError."""
        for driver in self.drivers:
            try:
                driver.source.carry_out()
            except Exception as error:
                self._context.lines.write(
                    logging.ERROR, "group %s: the data client failed", driver.member.name, error=error
                )
                with self._context.outbox, self._context.lock:
                    driver.member.fail(ClusterError(f"the data client failed: {error!r}"))
                    driver.advance()

    # --- ends

    def break_log(self, number: int, error: CoordinationError) -> None:
        """Ends the consumers of log `number` with `error`, because the log cannot be trusted any more."""
        with self._context.outbox, self._context.lock:
            if number in self._context.broken:
                return
            self._context.broken[number] = error
            ending = self.of(number)
            if ending:  # otherwise the error reaches whoever opens the log, and nobody else is concerned
                self._context.lines.write(
                    logging.ERROR, "coordination partition %d: %s", number, error, extra={"marshal_log": number}
                )
            for driver in ending:
                driver.member.fail(error)
                driver.advance()
            self._context.changed.notify_all()

    def lose_history(self, number: int) -> None:
        """Takes their claims from the consumers of log `number`, whose records were deleted before they were read."""
        with self._context.outbox, self._context.lock:
            self.lost.add(number)
            for driver in self.of(number):
                driver.lose_history()

    def regain_history(self, world: World) -> None:
        """Has the consumers of a log continue in `world`, which was read again (N11)."""
        with self._context.outbox, self._context.lock:
            self.lost.discard(world.log)
            for driver in self.of(world.log):
                driver.regain_history(world)

    def clear(self) -> None:
        """Forgets the consumers: nobody drives them any more."""
        self._drivers = []


# --- The thread


IDLE_POLL_S: Final = 0.25  # the longest poll, unless a log is being opened
REOPEN_S: Final = 60.0  # the longest that one attempt to read a truncated log's state again may take
GENESIS_S: Final = 5.0  # if a Genesis was not read back within this time, it is written once more
METADATA_S: Final = 10.0  # between two look-ups of topics: their growth is seen within 30 s
PACE_S: Final = 1.0  # between two looks at how many heartbeats the followed logs bring
# Heartbeats per second from which on a reader gathers records, and below which it no longer does. With the default
# interval 60 come from 40 sessions: N readers that each heartbeat wakes cost N * N turns, of 0.3 ms of CPU.
GATHER_FROM: Final = 60.0
GATHER_BELOW: Final = 30.0
CALLBACKS_S_MIN: Final = 1.0  # a close without the cluster leaves this much for the user's callbacks
# Folded at once, in about 5 ms: an event loop may wait for the lock. Then the lock is free for others for a moment.
FOLD_RECORDS_LOCKED: Final = 500


class Loop:
    """The background thread of one Marshal, which drives all its consumers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._workers: list[Tasks] = []  # one per consumer
        self.maintenance: LogMaintenance = LogMaintenance(context, self)
        self.turn: Turn = Turn(context, self.maintenance)
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # per log: each is opened once
        self._topic_id = ""
        self._unseen = False  # the last look did not find the topic
        self._metadata_due = 0.0
        self._pace_due = 0.0
        self._gathers = False
        self._closing = False
        self._repeats = Repeats()  # of the history worker
        self._thread = context.thread = threading.Thread(target=self._run, name="marshal-loop", daemon=True)

    @property
    def drivers(self) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers that have not ended."""
        return self.turn.drivers

    @property
    def worlds(self) -> dict[int, World]:
        """Returns the folded state of each log that this process follows, by number of the coordination partition."""
        return self.turn.worlds

    def sessions_of(self, log: int) -> set[int]:
        """Returns the sessions of this Marshal's consumers in a log."""
        return {driver.member.session for driver in self.turn.of(log)}

    def start(self) -> None:
        self._thread.start()

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._round()
        except BaseException as error:  # SystemExit too: whatever it is, the heartbeats have ended
            self._die(error)

    def _round(self) -> None:
        records: list[LogRecord] = []
        try:
            records = self._poll()
        except HistoryTruncated as error:
            self._start_over(error)
        except CoordinationError as error:
            self.break_log(getattr(error, "log", 0), error)
        except Exception as error:
            if self._closing:
                return
            self._context.lines.write(
                logging.ERROR, "the coordination log could not be read; trying again", error=error
            )
            time.sleep(POLL_S_MAX)
        try:
            for at in range(0, len(records), FOLD_RECORDS_LOCKED) or (0,):
                if at:
                    time.sleep(0)  # else this thread has the lock again before one that waits for it has woken up
                self.turn.run(records[at : at + FOLD_RECORDS_LOCKED])
        except Exception as error:  # a bug of ours: worlds may be half folded, so nobody may continue with them
            self._context.lines.write(logging.ERROR, "the records could not be folded", error=error)
            for number in list(self.worlds):
                self.break_log(number, CoordinationError(f"this process cannot fold the log: {error!r}"))
        self.turn.carry_out()
        self._refresh_metadata()
        self._set_pace()

    def _poll(self) -> list[LogRecord]:
        timeout_s = self._timeout_s()
        self._context.stalls.waits(mono_ms() + round(timeout_s * 1000))
        try:
            return self._context.coordination.poll(timeout_s)
        finally:
            self._context.stalls.woke(mono_ms())

    def _die(self, cause: BaseException) -> None:
        """Ends every consumer as the thread ends, because none may wait for the thread or deliver without it."""
        self._context.lines.write(logging.ERROR, "the background thread has ended", error=cause)
        error = BackgroundThreadEnded(repr(cause))
        with self._context.outbox, self._context.lock:
            self._context.ended = error
            for driver in self.drivers:
                with contextlib.suppress(Exception):  # the step may be what failed; the consumer ends all the same
                    driver.give_up(error)
                driver.ended, driver.error = True, error
            self.turn.clear()
            self._context.changed.notify_all()

    def _timeout_s(self) -> float:
        with self._context.lock:
            due_ms = self.turn.deadline_ms()
            if due_ms is None:
                return POLL_S_MAX if self.worlds else IDLE_POLL_S
            now = self._context.clock.now()
            if self.turn.awaits_prefetch(now):
                return PREFETCH_POLL_S
            return min(max((due_ms - now.mono_ms) / 1000, 0.0), IDLE_POLL_S)

    def busy(self) -> bool:
        """Returns whether something is to be done now: a step, a record to send, a question to the cluster."""
        workers = (self._context.worker, *self._workers)
        with self._context.lock:
            due = self.turn.due(self._context.clock.now())
            return due or bool(self._context.outbox) or any(worker.busy for worker in workers)

    def break_log(self, number: int, error: CoordinationError) -> None:
        """Ends the consumers of log `number` with `error`, because the log cannot be trusted any more."""
        self.turn.break_log(number, error)

    def _refresh_metadata(self) -> None:
        if time.monotonic() < self._metadata_due:
            return
        self._metadata_due = time.monotonic() + METADATA_S
        for driver in self.drivers:
            driver.look_at_topics()
        if self.drivers:
            self._context.worker.submit("coordination topic", self.check_topic)

    def _set_pace(self) -> None:
        """Has a log that brings many heartbeats read in pieces, so that each of them does not wake this thread."""
        if time.monotonic() < self._pace_due:
            return
        self._pace_due = time.monotonic() + PACE_S
        with self._context.lock:
            per_s = sum(heartbeats_per_s(world) for world in self.worlds.values())
        self._gathers = per_s >= (GATHER_BELOW if self._gathers else GATHER_FROM)
        self._context.coordination.gather(self._gathers)

    def check_topic(self) -> bool:
        """Returns whether the coordination topic is the one that was opened; if not, ends the consumers of all its
        logs, even where offsets fit (L8). That there is none must be said twice: a broker that has just started may not
        know it yet. Raises ClusterError."""
        info = self._context.admin.describe_topic(self._context.topic)
        if not self._topic_id and info is not None:
            self._topic_id = info.topic_id
        unseen, self._unseen = self._unseen, info is None
        if not self._topic_id or (info is not None and info.topic_id == self._topic_id):
            return True
        if info is None and not unseen:
            return False
        found = "no topic" if info is None else info.topic_id
        for number in list(self.worlds):
            self.break_log(number, TopicRecreated(number, f"topic id {self._topic_id}", found))
        return False

    # --- opening logs, from the user's thread

    def open_root(self, partitions: int, timeout_s: float) -> Genesis:
        """Returns the root (L3), written with `partitions` if the topic is new. Raises CoordinationError,
        ClusterUnreachable."""
        context, deadline = self._context, time.monotonic() + timeout_s
        asked = context.admin, context.coordination, context.topic
        try:
            count = context.admin.prepare_coordination(context.topic, partitions)
        except WrongTopicSetting:  # whose command would change somebody else's topic
            replay.refuse_foreign(*asked)
            raise
        if not replay.is_short(context.coordination.bounds(0, timeout_s)):  # else it is folded just as fast
            replay.refuse_foreign(*asked)
        info = context.admin.describe_topic(context.topic)
        self._topic_id = (
            "" if info is None else info.topic_id
        )  # None: just created, and the broker that answered does not know it yet
        world = self.open_world(0, None, deadline)
        if world.genesis is None:
            replay.refuse_foreign(*asked)
            self._write_genesis(world, lambda: self._new_root(count), deadline)
        assert world.genesis is not None
        if world.genesis.partitions > count:
            raise TopicRecreated(0, f"{world.genesis.partitions} partitions", str(count))
        return world.genesis

    def open_world(self, number: int, root: Genesis | None, deadline: float) -> World:
        """Returns the world of log `number`, folded to its end now; writes `root` to a log without Genesis. `deadline`:
        monotonic seconds. Raises CoordinationError, ClusterUnreachable."""
        with self._context.lock:
            opening = self._opening[number]
        if not opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ClusterUnreachable(
                self._context.servers, f"coordination partition {number}", "another thread opens it"
            )
        try:
            if number not in self.worlds:
                self._begin(number, root, deadline)
        finally:
            opening.release()
        world = self._catch_up(number, deadline)
        if root is not None and world.genesis is None:
            self._write_genesis(world, lambda: root, deadline)
        return world

    def _begin(self, number: int, root: Genesis | None, deadline: float) -> None:
        """Begins to follow a log, at its first record or at a confirmed snapshot (N9)."""
        bounds = self._context.coordination.bounds(number, max(1.0, deadline - time.monotonic()))
        world = replay.open_world(self._context.coordination, number, root, bounds)
        with self._context.outbox, self._context.lock:
            self.worlds[number] = world
            self.maintenance.begin(world)
        self._context.coordination.follow(number, world.next_offset)

    def _catch_up(self, number: int, deadline: float) -> World:
        """Returns the world of a log, folded to its end now; another one if its state is read again meanwhile."""
        bounds = self._context.coordination.bounds(number, max(1.0, deadline - time.monotonic()))
        what, worlds = f"coordination partition {number}", self.worlds
        self._context.wait_for(lambda: worlds[number].next_offset >= bounds.end, what, deadline, number)
        return worlds[number]

    def _start_over(self, error: HistoryTruncated) -> None:
        """A log lost unread records (N11): its consumers lose their claims until the state is read again, from a
        snapshot."""
        with self._context.outbox, self._context.lock:
            world = self.worlds[error.log]
            self._context.lines.write(logging.WARNING, "%s", error, extra={"marshal_log": error.log})
            self.turn.lose_history(error.log)
        self._context.history_worker.submit(
            f"coordination partition {error.log} again", lambda: self._reopen(error.log, world.root)
        )

    def _reopen(self, number: int, root: Genesis | None) -> None:
        while number in self.turn.lost and not self._closing and self._context.ended is None:
            try:
                deadline = time.monotonic() + REOPEN_S
                self._begin(number, root, deadline)
                self.turn.regain_history(self._catch_up(number, deadline))
            except CoordinationError as error:
                self.break_log(number, error)
                return
            except Exception as error:  # whatever it was: without the state no consumer of the log goes on
                if not self._closing and self._repeats.due(f"{number}: {error}"):
                    self._context.lines.write(
                        logging.WARNING,
                        "coordination partition %d: %s; trying again",
                        number,
                        str(error) or repr(error),
                    )
                time.sleep(POLL_S_MAX)

    def _new_root(self, partitions: int) -> Genesis:
        """Returns a root with an incarnation that nobody else has (L3)."""
        created_ms = self._context.clock.now().wall_ms
        incarnation = created_ms.to_bytes(6, "big") + self._context.draw(10)
        return Genesis(incarnation, partitions, HASH_NAME, rationalizer.PROTOCOL_VERSION)

    def _write_genesis(self, world: World, make: Callable[[], Genesis], deadline: float) -> None:
        """Writes what `make` returns, again and again, until the log has accepted a Genesis of whatever client (L5)."""
        while world.genesis is None:
            genesis = make()
            self._context.coordination.append(world.log, b"", codec.encode(genesis, "", genesis.incarnation))
            attempt = min(deadline, time.monotonic() + GENESIS_S)
            try:
                self._context.wait_for(lambda: world.genesis is not None, "the Genesis record", attempt, world.log)
            except ClusterUnreachable:
                if time.monotonic() >= deadline:
                    raise

    # --- consumers

    def add(self, driver: ConsumerDriver) -> None:
        """Adds a consumer, which the thread steps from now on."""
        with self._context.outbox, self._context.lock:
            self._workers = [*(worker for worker in self._workers if worker.alive), driver.worker]
        self.turn.add(driver)
        driver.look_at_topics()

    def close(self, flush_s: float) -> None:
        """Ends the thread, closes connections, runs waiting callbacks, within `flush_s`. The consumers have ended
        before."""
        self._closing = True
        with self._context.lock:
            self._context.closed = True
            self._context.changed.notify_all()
        deadline = time.monotonic() + flush_s
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(max(CALLBACKS_S_MIN, flush_s))
        for worker in (*self._workers, self._context.worker):
            worker.close(max(0.0, deadline - time.monotonic()))
        self._context.history_worker.close(0.0)  # a daemon: nobody needs what it reads
        self._context.outbox.send()
        self._context.coordination.close(max(0.0, deadline - time.monotonic()))
        self._context.admin.close()
        self._context.callbacks.close(max(CALLBACKS_S_MIN, deadline - time.monotonic()))
        self._context.lines.close(max(CALLBACKS_S_MIN, deadline - time.monotonic()))
