"""Snapshots in the simulated cluster: where a reader begins, one client's keeper, its audits, truncation behind two.

What client/replay_start.py and client/log_maintenance.py do on a real log, in virtual time and without threads. The
decisions are the keeper's (marshal_py.protocol.snapshotter).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, cast

from marshal_py.client import replay_start
from marshal_py.errors import CoordinationError, HistoryTruncated, SnapshotRefused
from marshal_py.protocol import codec, snapshot
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.protocol.orphans import Presence
from marshal_py.protocol.records import Genesis, Snapshot
from marshal_py.protocol.snapshot import Stored
from marshal_py.protocol.snapshotter import Snapshotter
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import CHECKPOINT_OFFSETS, World
from marshal_py.simulator.broker import MISSING, Broker
from marshal_py.transport.ports import Bounds, CoordinationLog, LogRecord

if TYPE_CHECKING:
    from marshal_py.simulator.client import Client
    from marshal_py.simulator.process import Process

TRUNCATE_INTERVALS: Final = 4  # between two deletions; the product keeps a day, here readers shall fall behind
EVERY_RECORDS_LEAST: Final = 32  # between two snapshots
EVERY_RECORDS_MOST: Final = 256


class _Reading:
    """The log as replay_start.py reads it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def read(self, log: int, start: int, end: int, timeout_s: float) -> Iterator[list[LogRecord]]:
        values = self.broker.logs[log].values
        yield [LogRecord(log, at, values[at], 0) for at in range(start, end) if values[at] is not MISSING]


def reading(broker: Broker) -> CoordinationLog:
    return cast(CoordinationLog, _Reading(broker))  # replay_start.py only reads


def bounds(broker: Broker, number: int) -> Bounds:
    log = broker.logs[number]
    return Bounds(log.first, len(log.values))


def base(broker: Broker, number: int, root: Genesis | None, at: int) -> World:
    """Where a reader begins that would begin at or below `at` (N9, N10). Raises CoordinationError."""
    return replay_start.base_of(reading(broker), number, root, bounds(broker, number), at)


def fold_again(process: Process, at: int, group: str = "") -> World | None:
    """N6, G6: the log folded once more up to `at`, from the newest confirmed point; None if that cannot be done now."""
    broker = process.environment.broker
    try:
        began = base(broker, process.log, process.world.root, at - CHECKPOINT_OFFSETS)
        return replay_start.refold(reading(broker), began, at, group)
    except HistoryTruncated:
        return None
    except CoordinationError as error:
        process.log_failed(error)  # L8
        return None


class Upkeep:
    """What one client does for its log."""

    def __init__(self, client: Client) -> None:
        self.client = client
        rng = client.environment.rng
        every = EVERY_RECORDS_LEAST + int(rng.random() * (EVERY_RECORDS_MOST - EVERY_RECORDS_LEAST))
        self.snapshotter = Snapshotter(client.world, every, rng.randbytes)
        self._truncate_due_ms = 0

    def folded(self, verdict: Verdict, now_ms: int) -> None:
        self.snapshotter.folded(verdict, now_ms)

    def tick(self, now: Instant) -> None:
        """Carries out what the keeper wants."""
        client, snapshotter, now_ms = self.client, self.snapshotter, now.mono_ms
        member = client.member
        assert member is not None
        live = {member.session} if member.session != NONE else set()
        options = member.options
        tasks = snapshotter.tick(now, Presence(options.client_id, live, options.interval_ms, member.proven(now)))
        self._send(tasks.send)
        for group, record in tasks.evict:
            world = client.world
            assert world.genesis is not None
            client.post(codec.encode(record, group, world.genesis.incarnation, world.writes_version(group)))
        if tasks.audit is not None:
            client.environment.at(
                client.environment.network_faults.read_ms(client.environment.rng), client, self._audit, tasks.audit
            )
        if tasks.mismatched is not None:
            client.context.advised("snapshot_refused")
        if snapshotter.confirmed_at != NONE and now_ms >= self._truncate_due_ms:
            self._truncate_due_ms = now_ms + TRUNCATE_INTERVALS * member.options.interval_ms
            if snapshotter.leads(live) and client.topic_id == client.environment.broker.topic_id:  # N12
                log = client.environment.broker.logs[client.log]
                log.first = max(log.first, snapshotter.deletable())

    def _send(self, records: list[Snapshot]) -> None:
        for record in records:
            self.client.post(codec.encode(record, "", record.genesis.incarnation))

    def _audit(self, stored: Stored) -> None:
        """N6."""
        again = fold_again(self.client, stored.at)
        if not self.client.dead:
            self._send(self.snapshotter.audited(stored, again))

    def copy(self, client: Client, memo: dict[int, Any]) -> Upkeep:
        """For a twin: the same memory, its instance id too."""
        twin = Upkeep.__new__(Upkeep)
        twin.client, twin.snapshotter = client, deepcopy(self.snapshotter, memo)
        twin._truncate_due_ms = self._truncate_due_ms
        return twin

    def check_start(self, began: World) -> None:
        """N9: the older of the two newest confirmed snapshots folds to the one that this reader began with."""
        client, at = self.client, began.began_at
        broker, number = client.environment.broker, client.log
        if client.world is not began or began.genesis is None or number >= len(broker.logs):
            return
        limits = bounds(broker, number)
        store = replay_start.find(reading(broker), number, limits, began.genesis.incarnation, 2)
        kept = store.confirmed(limits.first)
        older = next((stored for stored in kept if stored.at < at), None)
        here = next((stored for stored in kept if stored.at == at), None)
        world = snapshot.load(older, number, began.root) if older is not None else None
        if world is None or older is None or here is None:
            return
        try:
            again = replay_start.refold(reading(broker), world, at)
        except HistoryTruncated:
            return
        except CoordinationError as error:
            client.log_failed(error)
            return
        if (snapshot.digest_of(again), again.chain) != (here.key.state, here.key.chain):
            client.log_failed(SnapshotRefused(number, at, older.at))
