"""One background thread per Marshal: poll the coordination log, fold, step the members, send.

It executes what members say and makes no protocol decision. A user's thread may step its own station under the lock
(`kick`), so that nothing waits for this thread's poll. The thread survives everything that the cluster can do; what
makes the log untrustworthy ends the members of that log with the error that names it (S14). No code of the user's runs
on it (callbacks.py). If something ends it all the same, every consumer ends with BackgroundThreadEnded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from marshal_py.client import replay_start
from marshal_py.client.background_worker import Worker
from marshal_py.client.callbacks import Callbacks
from marshal_py.client.consumer_driver import COOL_POLL_S, ConsumerDriver
from marshal_py.client.forks import ForkedLock, watch
from marshal_py.client.info import ClaimInfo
from marshal_py.client.log_maintenance import LogMaintenance
from marshal_py.client.outbox import Changes, Outbox
from marshal_py.client.retention import RetentionPolicy
from marshal_py.client.stalls import Stalls
from marshal_py.errors import (
    BackgroundThreadEnded,
    ClusterError,
    ClusterUnreachable,
    CoordinationError,
    HistoryTruncated,
    MarshalError,
    ReentrantCall,
    TopicRecreated,
    UsedAfterFork,
)
from marshal_py.protocol import codec, rationalizer
from marshal_py.protocol.claim import Claim
from marshal_py.protocol.identity import Token, TopicPartition
from marshal_py.protocol.records import Genesis
from marshal_py.protocol.routing import HASH_NAME
from marshal_py.protocol.world import World
from marshal_py.transport.ports import Clock, ClusterAdmin, CoordinationLog, LogRecord

log = logging.getLogger("marshal_py")

POLL_S_MAX: Final = 0.1  # the thread looks up at least so often: for steps that other threads brought forward
REOPEN_S: Final = 60.0  # one attempt to read a truncated log's state anew
IDLE_POLL_S: Final = 0.25  # without members
METADATA_S: Final = 10.0  # growth of topics is seen within 30 s (two looks and a log round trip)
CALLBACKS_S_MIN: Final = 1.0  # what a close without the cluster leaves for the user's callbacks
FOLD_RECORDS_LOCKED: Final = 2_000  # then the lock is offered to the user's threads


class Loop:
    """The driver of all members of one Marshal."""

    def __init__(
        self,
        coordination: CoordinationLog,
        admin: ClusterAdmin,
        clock: Clock,
        servers: str,
        topic: str,
        draw: Callable[[int], bytes],
        policy: RetentionPolicy,
        callbacks: Callbacks,
    ) -> None:
        self.log, self.admin, self.clock = coordination, admin, clock
        self.servers, self.topic, self.draw = servers, topic, draw
        lock = threading.RLock()
        self.lock: AbstractContextManager[object] = lock
        self._held: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # as threading.Condition asks it
        self.outbox = Outbox(coordination, self._held)
        self.changed: threading.Condition = Changes(lock, self.outbox)
        self.worlds: dict[int, World] = {}
        self.broken: dict[int, CoordinationError] = {}
        self.drivers: list[ConsumerDriver] = []
        self.ended: BackgroundThreadEnded | None = None  # what every verb raises once the thread is gone
        self.callbacks = callbacks
        self.stalls = Stalls()
        self.worker = Worker("marshal-worker")
        self._workers: list[Worker] = []  # of the stations, one each
        self.clerk = Worker("marshal-clerk")  # reads history: seconds, in which nobody's start may have to wait
        self.maintenance = LogMaintenance(self, policy)
        self.pid = os.getpid()
        watch(self)
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # per log: each is opened once
        self.folded = 0  # records
        self._topic_id = ""
        self._metadata_due = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="marshal-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def forked(self) -> None:
        """In a child nothing behind the lock works (forks.py)."""
        self.lock = self.changed = ForkedLock("Marshal", self.pid)
        self.outbox = Outbox(self.log, self._held)  # what waits is the parent's to send

    def check_call(self, what: str, verb: str, *, waits: bool = False) -> None:
        """Before everything else that a verb does. Raises UsedAfterFork, ReentrantCall.

        `waits`: for this thread's work, so the verb cannot be called on it, as it can on that of the user's callbacks.
        """
        if os.getpid() != self.pid:
            raise UsedAfterFork(what, self.pid, os.getpid())
        if self._held():
            raise ReentrantCall(verb, "a call of the same thread that holds the Marshal's lock")
        if waits and threading.current_thread() is self._thread:
            raise ReentrantCall(verb, "the background thread of the Marshal, which sends the heartbeats")

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._round()
        except BaseException as error:  # SystemExit too: whatever it is, nobody heartbeats any more
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
            log.exception("the coordination log could not be read; trying again")
            time.sleep(POLL_S_MAX)
        try:
            for at in range(0, len(records), FOLD_RECORDS_LOCKED) or (0,):
                self._turn(records[at : at + FOLD_RECORDS_LOCKED])
        except Exception as error:  # a bug of ours: worlds may be half folded, so nobody may go on with them
            log.exception("the records could not be folded")
            for number in list(self.worlds):
                self.break_log(number, CoordinationError(f"this process cannot fold the log: {error!r}"))
        self._carry_out()
        self._refresh_metadata()

    def _carry_out(self) -> None:
        """Without the lock: sources do what was decided under it, also while their users do not poll."""
        for driver in list(self.drivers):
            try:
                driver.source.carry_out()
            except Exception as error:
                log.exception("group %s: the data client failed", driver.member.name)
                with self.outbox, self.lock:
                    driver.member.fail(ClusterError(f"the data client failed: {error!r}"))
                    self._step(driver, None)

    def _poll(self) -> list[LogRecord]:
        timeout_s = self._timeout_s()
        self.stalls.waits(self.clock.now().mono_ms + round(timeout_s * 1000))
        try:
            return self.log.poll(timeout_s)
        finally:
            self.stalls.woke(self.clock.now().mono_ms)

    def _die(self, cause: BaseException) -> None:
        """The thread is about to end: ends every consumer, so that nobody waits for it or delivers without it."""
        log.error("the background thread has ended", exc_info=cause)
        error = BackgroundThreadEnded(repr(cause))
        with self.outbox, self.lock:
            self.ended = error
            for driver in list(self.drivers):
                with contextlib.suppress(Exception):  # it may be what failed; the consumer ends all the same
                    driver.give_up(error)
                driver.ended, driver.error = True, error
            self.drivers.clear()
            self.changed.notify_all()

    def check_alive(self) -> None:
        """Raises BackgroundThreadEnded."""
        if self.ended is not None:
            raise self.ended

    def _timeout_s(self) -> float:
        with self.lock:
            if not self.drivers:
                return IDLE_POLL_S if not self.worlds else POLL_S_MAX
            if any(driver.cold for driver in self.drivers):
                return COOL_POLL_S
            now_ms = self.clock.now().mono_ms
            nearest_ms = min(driver.member.deadline_ms for driver in self.drivers) - now_ms
            return min(max(nearest_ms / 1000, 0.0), POLL_S_MAX)

    def _turn(self, records: list[LogRecord]) -> None:
        """Folds, then steps whoever has something to do."""
        with self.outbox, self.lock:
            self._fold(records)
            now = self.clock.now()
            refused = self.log.refused()
            for driver in list(self.drivers):
                if refused is not None:
                    driver.member.fail(refused)
                if refused is not None or driver.due(now):
                    self._step(driver, now)
            self.maintenance.tick(now)
            if records or refused is not None:
                self.changed.notify_all()

    def _fold(self, records: list[LogRecord]) -> None:
        """Applies records to their worlds and shows the verdicts to the members of the group."""
        now = self.clock.now()
        for number, offset, value, _, _ in records:
            if number in self.broken:
                continue
            world = self.worlds[number]
            try:
                verdict = rationalizer.apply(world, offset, value)
            except CoordinationError as error:
                self.break_log(number, error)
                continue
            self.folded += 1
            self.maintenance.folded(number, verdict, now.mono_ms)
            if verdict.group:
                for driver in self.drivers:
                    if driver.log == number:
                        driver.member.receive(verdict, now)

    def _step(self, driver: ConsumerDriver, now: object) -> None:
        try:
            driver.member.stalled_ms = self.stalls.recent_ms(self.clock.now().mono_ms)
            driver.step(self.clock.now())
        except Exception as error:  # one consumer must not take the thread, and with it the others, along
            if not isinstance(error, MarshalError):
                log.exception("group %s: a step failed", driver.member.name)
            known = error if isinstance(error, MarshalError) else ClusterError(f"a step failed: {error!r}")
            driver.give_up(known)
        if driver.ended:
            self.drivers.remove(driver)
            self.changed.notify_all()

    def kick(self, driver: ConsumerDriver) -> None:
        """Steps a station now, from the calling thread."""
        with self.outbox, self.lock:
            if not driver.ended:
                self._step(driver, None)

    def break_log(self, number: int, error: CoordinationError) -> None:
        """A log cannot be trusted any more: its members fence and end with the error that names it."""
        with self.outbox, self.lock:
            if number in self.broken:
                return
            self.broken[number] = error
            ending = [driver for driver in self.drivers if driver.log == number]
            if ending:  # otherwise whoever opens the log gets the error, and nobody else is concerned
                log.error("coordination partition %d: %s", number, error, extra={"marshal_log": number})
            for driver in ending:
                driver.member.fail(error)
                self._step(driver, None)
            self.changed.notify_all()

    def _refresh_metadata(self) -> None:
        if time.monotonic() < self._metadata_due:
            return
        self._metadata_due = time.monotonic() + METADATA_S
        for driver in list(self.drivers):
            driver.look_at_topics()
        if self.drivers:
            self.worker.submit("coordination topic", self.check_topic)

    def check_topic(self) -> bool:
        """L8: a deleted or recreated topic, or one that shrank, is noticed even where offsets still fit.

        Returns whether the topic is the one that was opened.
        """
        info = self.admin.describe_topic(self.topic)
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
        """The root Genesis (L3), written if the topic is new. Raises CoordinationError, ClusterUnreachable."""
        deadline = time.monotonic() + timeout_s
        count = self.admin.prepare_coordination(self.topic, partitions)
        info = self.admin.describe_topic(self.topic)
        self._topic_id = "" if info is None else info.topic_id  # just created, and the broker that answered is behind
        world = self.open_world(0, None, deadline)
        if world.genesis is None:
            created_ms = self.clock.now().wall_ms
            root = Genesis(
                created_ms.to_bytes(6, "big") + self.draw(10), count, HASH_NAME, rationalizer.PROTOCOL_VERSION
            )
            self._write_genesis(world, root, deadline)
        assert world.genesis is not None
        if world.genesis.partitions > count:
            raise TopicRecreated(0, f"{world.genesis.partitions} partitions", str(count))
        return world.genesis

    def open_world(self, number: int, root: Genesis | None, deadline: float) -> World:
        """The world of a log, folded to the log's end as of now."""
        with self.lock:
            opening_one = self._opening[number]
        if not opening_one.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ClusterUnreachable(self.servers, f"coordination partition {number}", "another thread opens it")
        try:
            world = self.worlds.get(number)
            if world is None:
                world = self._begin(number, root, deadline)
        finally:
            opening_one.release()
        self._catch_up(world, deadline)
        if root is not None and world.genesis is None:
            self._write_genesis(world, root, deadline)
        return world

    def _begin(self, number: int, root: Genesis | None, deadline: float) -> World:
        """Follows a log from where reading has to begin (N9)."""
        bounds = self.log.bounds(number, max(1.0, deadline - time.monotonic()))
        world = replay_start.open_world(self.log, number, root, bounds)
        with self.outbox, self.lock:
            self.worlds[number] = world
            self.maintenance.begin(world)
        self.log.follow(number, world.next_offset)
        return world

    def _catch_up(self, world: World, deadline: float) -> None:
        bounds = self.log.bounds(world.log, max(1.0, deadline - time.monotonic()))
        what = f"coordination partition {world.log}"
        self.wait_for(lambda: world.next_offset >= bounds.end, what, deadline, world.log)

    def _start_over(self, error: HistoryTruncated) -> None:
        """N11: the log was truncated above what was read. Fences; the state comes anew from a snapshot."""
        with self.outbox, self.lock:
            world = self.worlds[error.log]
            log.warning("%s", error, extra={"marshal_log": error.log})
            for driver in [s for s in self.drivers if s.log == error.log]:
                driver.lose_history()
        self.clerk.submit(f"coordination partition {error.log} anew", lambda: self._reopen(error.log, world.root))

    def _reopen(self, number: int, root: Genesis | None) -> None:
        while not self._closing:
            with self.lock:
                if not any(driver.away for driver in self.drivers if driver.log == number):
                    return  # an earlier attempt has done it, or nobody is left
            try:
                deadline = time.monotonic() + REOPEN_S
                world = self._begin(number, root, deadline)
                self._catch_up(world, deadline)
            except CoordinationError as error:
                self.break_log(number, error)
                return
            except ClusterError as error:
                log.warning("coordination partition %d: %s; trying again", number, error)
                time.sleep(POLL_S_MAX)
                continue
            with self.outbox, self.lock:
                for driver in [s for s in self.drivers if s.log == number]:
                    driver.regain_history(world)
            return

    def _write_genesis(self, world: World, genesis: Genesis, deadline: float) -> None:
        """Until one counts: another client's will do (L5)."""
        value = codec.encode(genesis, "", genesis.incarnation)
        while world.genesis is None:
            self.log.append(world.log, b"", value)
            attempt = min(deadline, time.monotonic() + 5.0)
            try:
                self.wait_for(lambda: world.genesis is not None, "the Genesis record", attempt, world.log)
            except ClusterUnreachable:
                if time.monotonic() >= deadline:
                    raise

    def wait_for(self, condition: Callable[[], bool], what: str, deadline: float, number: int) -> None:
        """Waits until `condition` holds, under the lock.

        Raises the log's own error, ClusterUnreachable, BackgroundThreadEnded.
        """
        with self.outbox, self.lock:
            self.check_alive()  # who waits for a read to the end must not get what was read before the thread ended
            while not condition():
                self.check_alive()
                if number in self.broken:
                    raise self.broken[number]
                if (refused := self.log.refused()) is not None:
                    raise refused
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ClusterUnreachable(self.servers, what, self.log.waiting_for() or "no answer in time")
                self.changed.wait(min(left_s, POLL_S_MAX))

    # --- stations

    def add(self, driver: ConsumerDriver) -> None:
        with self.outbox, self.lock:
            self.drivers.append(driver)
            self._workers = [*(worker for worker in self._workers if worker.alive), driver.worker]
            self._step(driver, None)
        driver.look_at_topics()

    def claim_info(self, driver: ConsumerDriver, claim: Claim) -> ClaimInfo:
        token = Token(driver.incarnation, claim.epoch)
        return ClaimInfo(*claim.tp, token, driver.position(claim), driver.lag(claim), *driver.draining(claim))

    def waiting_for(self) -> str:
        """What the connection is waiting for, in words for people; "" when all is well."""
        return self.log.waiting_for() if self.ended is None else str(self.ended)

    def close(self, flush_s: float) -> None:
        """Ends the thread, then runs the callbacks that wait. Stations must have ended before."""
        self._closing = True
        deadline = time.monotonic() + flush_s
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(flush_s + 1.0)
        for worker in (*self._workers, self.worker):
            worker.close(max(0.0, deadline - time.monotonic()))
        self.clerk.close(0.0)  # a daemon: what it reads is of no use any more
        self.outbox.send()
        self.log.close(flush_s)
        self.admin.close()
        self.callbacks.close(max(CALLBACKS_S_MIN, deadline - time.monotonic()))


__all__ = ["Loop", "MarshalError", "TopicPartition"]
