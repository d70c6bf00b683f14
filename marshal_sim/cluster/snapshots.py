"""Snapshots in the simulated cluster: when a process takes, audits and confirms them, and deletes records that they
cover.

This is client/driver/log_maintenance.py in virtual time and without threads. The decisions are the snapshotter's
(marshal_py.protocol.duties.snapshotter).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from marshal_py.errors import ClusterError, CoordinationError, HistoryTruncated, SnapshotRefused
from marshal_py.log import replay
from marshal_py.protocol.duties.orphans import Presence
from marshal_py.protocol.duties.snapshotter import Snapshotter
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.snapshot import Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.records import Snapshot
from marshal_sim.cluster.log_reader import bounds_of, log_reader, starting_world
from marshal_sim.cluster.process import Process

TRUNCATE_INTERVALS: Final = 4  # between two deletions: short, so that readers fall behind
EVERY_RECORDS_LEAST: Final = 32  # records between two snapshots, at least
EVERY_RECORDS_MOST: Final = 256


def fold_again(process: Process, at: int, group: str = "") -> World | None:
    """Folds the log again up to `at`, from an earlier confirmed snapshot or the beginning (N6, G6).

    Returns None if that is not possible now.
    """
    broker = process.environment.broker
    try:
        began = starting_world(broker, process.log, process.world.root, at - CHECKPOINT_OFFSETS)
        return replay.refold(log_reader(broker), began, at, group)
    except (ClusterError, HistoryTruncated):
        return None
    except CoordinationError as error:
        process.log_failed(error)  # L8
        return None


class SnapshotMaintenance:
    """Does what one process does to maintain the snapshots of its log."""

    process: Process
    advise: Callable[[str], None]

    def __init__(self, process: Process, advise: Callable[[str], None]) -> None:
        """Prepares a snapshotter with a random distance between snapshots. `advise` is called with the kind of each
        advisory.
        """
        self.process, self.advise = process, advise
        rng = process.environment.rng
        every = EVERY_RECORDS_LEAST + int(rng.random() * (EVERY_RECORDS_MOST - EVERY_RECORDS_LEAST))
        self.snapshotter: Snapshotter = Snapshotter(process.world, every, rng.randbytes)
        self._truncate_due_ms = 0

    def folded(self, verdict: Verdict, now_ms: int) -> None:
        self.snapshotter.folded(verdict, now_ms)

    def tick(self, member: Member, now: Instant) -> None:
        """Carries out the tasks of the snapshotter: sends its records, starts audits, deletes old records."""
        process, snapshotter = self.process, self.snapshotter
        environment, options = process.environment, member.options
        live = {member.session} if member.session != NONE else set()
        tasks = snapshotter.tick(now, Presence(options.client_id, live, options.interval_ms, member.proven(now)))
        self._send(tasks.send)
        for group, record in tasks.evict:
            world = process.world
            assert world.genesis is not None
            process.post(codec.encode(record, group, world.genesis.incarnation, world.writes_version(group)))
        if tasks.audit is not None:
            environment.schedule(environment.network_faults.read_ms(), process, self._audit, tasks.audit)
        if tasks.mismatched is not None:
            self.advise("snapshot_refused")
        if snapshotter.confirmed_at != NONE and now.mono_ms >= self._truncate_due_ms:
            self._truncate_due_ms = now.mono_ms + TRUNCATE_INTERVALS * options.interval_ms
            if snapshotter.leads(live) and process.topic_id == environment.broker.topic_id:  # N12
                log = environment.broker.logs[process.log]
                log.first = max(log.first, snapshotter.deletable())

    def _send(self, records: list[Snapshot]) -> None:
        for record in records:
            self.process.post(codec.encode(record, "", record.genesis.incarnation))

    def _audit(self, stored: Stored) -> None:
        """Folds the log again to check a snapshot (N6)."""
        again = fold_again(self.process, stored.at)
        if not self.process.dead:
            self._send(self.snapshotter.audited(stored, again))

    def copy(self, process: Process, memo: dict[int, Any]) -> SnapshotMaintenance:
        """Returns a copy for a clone of the process. It has the same memory, including the instance id."""
        clone = SnapshotMaintenance.__new__(SnapshotMaintenance)
        clone.process, clone.advise = process, self.advise
        clone.snapshotter, clone._truncate_due_ms = deepcopy(self.snapshotter, memo), self._truncate_due_ms
        return clone

    def check_start(self, began: World) -> None:
        """Checks that the older of the two newest confirmed snapshots folds to the one that this reader began with."""
        process, at = self.process, began.began_at
        broker, number = process.environment.broker, process.log
        if process.world is not began or began.genesis is None or number >= len(broker.logs):
            return
        limits = bounds_of(broker, number)
        store = replay.find(log_reader(broker), number, limits, began.genesis.incarnation, 2)
        kept = store.confirmed(limits.first)
        older = next((stored for stored in kept if stored.at < at), None)
        here = next((stored for stored in kept if stored.at == at), None)
        world = snapshot.load(older, number, began.root) if older is not None else None
        if world is None or older is None or here is None:
            return
        try:
            again = replay.refold(log_reader(broker), world, at)
        except HistoryTruncated:
            return
        except CoordinationError as error:
            process.log_failed(error)
            return
        if (snapshot.digest_of(again), again.chain) != (here.key.state, here.key.chain):
            process.log_failed(SnapshotRefused(number, at, older.at))
