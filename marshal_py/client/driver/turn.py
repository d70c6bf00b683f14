"""One turn of a Marshal's loop: fold what was read of the logs, step the consumers that are due, keep the logs short.

It has no thread, reads no log and waits for nothing. The background thread (loop.py) takes a turn after each poll, the
simulator whenever records have come or a member is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from marshal_py.client.connection import Context
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.errors import ClusterError, CoordinationError, HistoryTruncated, MarshalError, SnapshotRefused
from marshal_py.log import replay
from marshal_py.protocol.duties import Presence, Snapshotter
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.snapshot import Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.member.advisory import Advisory, AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import Evict, Snapshot
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
        self.snapshotters[world.log] = Snapshotter(
            world, self._context.retention.snapshot_every_records, self._context.draw
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
            self._context.logger.info(
                "group %s: %s has been silent for %.1f s; its session is evicted",
                group,
                world.groups[group].sessions[record.session].join.client_id,
                record.waited_ms / 1000,
                extra={"marshal_group": group, "marshal_session": record.session},
            )

    def _warn(self, number: int, error: MarshalError) -> None:
        self._context.logger.warning("coordination partition %d: %s", number, error, extra={"marshal_log": number})

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
        except (ClusterError, HistoryTruncated) as error:
            self._context.logger.warning(
                "coordination partition %d could not be folded again: %s",
                world.log,
                error,
                extra={"marshal_log": world.log},
            )
        except CoordinationError as error:  # a gap stops the reader, wherever it is reading (L8)
            self._logs.break_log(world.log, error)
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
        try:
            again = replay.refold(context.coordination, base, at)
        except HistoryTruncated:
            return  # the older one has just been deleted
        except CoordinationError as error:
            self._logs.break_log(world.log, error)  # L8
            return
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


# --- The turn


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
        self._drivers: list[ConsumerDriver] = []
        self.folded: int = 0  # records

    @property
    def drivers(self) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers that have not ended."""
        return [driver for driver in self._drivers if not driver.ended]

    def of(self, log: int) -> list[ConsumerDriver]:
        """Returns the drivers of the consumers whose groups are in this log."""
        return [driver for driver in self.drivers if driver.log == log]

    @property
    def prefetching(self) -> bool:
        """Returns whether a partition is fetched ahead and nothing of it has come: its driver looks at each turn."""
        return any([driver.prefetching for driver in self._drivers])

    def deadline_ms(self) -> int | None:
        """Returns the monotonic ms at which the next consumer must be stepped; None if there is no consumer."""
        return min([driver.member.deadline_ms for driver in self.drivers], default=None)

    def due(self, now: Instant) -> bool:
        """Returns whether a consumer is to be stepped."""
        return any([driver.due(now) for driver in self.drivers])

    def add(self, driver: ConsumerDriver) -> None:
        """Adds a consumer and steps it."""
        with self._context.outbox, self._context.lock:
            self._drivers = [*self.drivers, driver]
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
                self._context.logger.exception("group %s: the data client failed", driver.member.name)
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
                self._context.logger.error(
                    "coordination partition %d: %s", number, error, extra={"marshal_log": number}
                )
            for driver in ending:
                driver.member.fail(error)
                driver.advance()
            self._context.changed.notify_all()

    def lose_history(self, number: int) -> None:
        """Takes their claims from the consumers of log `number`, whose records were deleted before they were read."""
        with self._context.outbox, self._context.lock:
            for driver in self.of(number):
                driver.lose_history()

    def regain_history(self, world: World) -> None:
        """Has the consumers of a log continue in `world`, which was read again (N11)."""
        with self._context.outbox, self._context.lock:
            for driver in self.of(world.log):
                driver.regain_history(world)

    def clear(self) -> None:
        """Forgets the consumers: nobody drives them any more."""
        self._drivers = []
