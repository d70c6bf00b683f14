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
from collections.abc import Callable
from typing import Final

from marshal_py.client.connection import POLL_S_MAX, Context, Repeats, Tasks
from marshal_py.client.driver.consumer_driver import PREFETCH_POLL_S, ConsumerDriver
from marshal_py.client.driver.turn import LogMaintenance, Turn
from marshal_py.errors import (
    BackgroundThreadEnded,
    ClusterError,
    ClusterUnreachable,
    CoordinationError,
    HistoryTruncated,
    TopicRecreated,
    WrongTopicSetting,
)
from marshal_py.log import replay
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.time import heartbeats_per_s
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME
from marshal_py.protocol.wire.records import Genesis
from marshal_py.transport.clock import mono_ms
from marshal_py.transport.ports import LogRecord

logger: Final = logging.getLogger("marshal_py")

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
        except Exception:
            if self._closing:
                return
            logger.exception("the coordination log could not be read; trying again")
            time.sleep(POLL_S_MAX)
        try:
            for at in range(0, len(records), FOLD_RECORDS_LOCKED) or (0,):
                if at:
                    time.sleep(0)  # else this thread has the lock again before one that waits for it has woken up
                self.turn.run(records[at : at + FOLD_RECORDS_LOCKED])
        except Exception as error:  # a bug of ours: worlds may be half folded, so nobody may continue with them
            logger.exception("the records could not be folded")
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
        logger.error("the background thread has ended", exc_info=cause)
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
            if self.turn.prefetching:
                return PREFETCH_POLL_S
            return min(max((due_ms - self._context.clock.now().mono_ms) / 1000, 0.0), IDLE_POLL_S)

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
        logs, even where offsets fit (L8). Raises ClusterError."""
        info = self._context.admin.describe_topic(self._context.topic)
        if not self._topic_id and info is not None:
            self._topic_id = info.topic_id
        if not self._topic_id or (info is not None and info.topic_id == self._topic_id):
            return True
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
            world = self.worlds.get(number)
            if world is None:
                world = self._begin(number, root, deadline)
        finally:
            opening.release()
        self._catch_up(world, deadline)
        if root is not None and world.genesis is None:
            self._write_genesis(world, lambda: root, deadline)
        return world

    def _begin(self, number: int, root: Genesis | None, deadline: float) -> World:
        """Begins to follow a log, at its first record or at a confirmed snapshot (N9). Returns its world so far."""
        bounds = self._context.coordination.bounds(number, max(1.0, deadline - time.monotonic()))
        world = replay.open_world(self._context.coordination, number, root, bounds)
        with self._context.outbox, self._context.lock:
            self.worlds[number] = world
            self.maintenance.begin(world)
        self._context.coordination.follow(number, world.next_offset)
        return world

    def _catch_up(self, world: World, deadline: float) -> None:
        bounds = self._context.coordination.bounds(world.log, max(1.0, deadline - time.monotonic()))
        what = f"coordination partition {world.log}"
        self._context.wait_for(lambda: world.next_offset >= bounds.end, what, deadline, world.log)

    def _start_over(self, error: HistoryTruncated) -> None:
        """A log lost unread records (N11): its consumers lose their claims until the state is read again, from a
        snapshot."""
        with self._context.outbox, self._context.lock:
            world = self.worlds[error.log]
            logger.warning("%s", error, extra={"marshal_log": error.log})
            self.turn.lose_history(error.log)
        self._context.history_worker.submit(
            f"coordination partition {error.log} again", lambda: self._reopen(error.log, world.root)
        )

    def _reopen(self, number: int, root: Genesis | None) -> None:
        while not self._closing:
            with self._context.lock:
                if not any(driver.away for driver in self.turn.of(number)):
                    return  # an earlier attempt has done it, or no consumer is left
            try:
                deadline = time.monotonic() + REOPEN_S
                world = self._begin(number, root, deadline)
                self._catch_up(world, deadline)
            except CoordinationError as error:
                self.break_log(number, error)
                return
            except ClusterError as error:
                if self._repeats.due(f"{number}: {error}"):
                    logger.warning("coordination partition %d: %s; trying again", number, error)
                time.sleep(POLL_S_MAX)
                continue
            self.turn.regain_history(world)
            return

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
