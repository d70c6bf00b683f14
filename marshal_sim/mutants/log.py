"""Planted bugs in how a log is opened and read: gaps, missing history, another number of logs, Genesis, tools.

mutants.py alone calls this file. The docstring of a bug says what holds with the bug.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from marshal_py.admin.plans.operation import Operation, Step
from marshal_py.admin.plans.pause import PauseLock, end_of
from marshal_py.errors import CoordinationError, HistoryTruncated, TopicRecreated
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Outcome, Verdict
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, Group, World
from marshal_py.protocol.wire.identity import NONE, Instant, route
from marshal_py.protocol.wire.records import Genesis, ReleaseGroup, Snapshot
from marshal_sim.cluster.process import Process

Patch = tuple[Any, str, Any]


def _skip_to(world: World, offset: int) -> None:
    """Continues at `offset` as if no record had been before it."""
    while world.next_offset < offset:
        world.pending.append(None)
        world.next_offset += 1
        if world.next_offset % CHECKPOINT_OFFSETS == 0:
            world.end_block()


def x16() -> list[Patch]:
    apply = rationalizer.apply

    def over_gaps(world: World, offset: int, value: bytes | None) -> Verdict:
        _skip_to(world, offset)
        return apply(world, offset, value)

    return [(rationalizer, "apply", over_gaps)]


def x17() -> list[Patch]:
    failed, known = Process.log_failed, Process.fold_to
    genesis: dict[int, Genesis] = {}

    def fold_to(self: Process, upto: int) -> None:
        known(self, upto)
        if self.world.genesis is not None:
            genesis.setdefault(self.log, self.world.genesis)

    def log_failed(self: Process, error: CoordinationError) -> None:
        if not isinstance(error, HistoryTruncated) or self.log not in genesis:
            failed(self, error)
            return
        self.world.genesis = genesis[self.log]
        self.world.crc_seed = crc32(self.world.genesis.incarnation)
        _skip_to(self.world, error.first_offset)
        self.world.began_at = error.first_offset
        self.wake_reader()

    return [(Process, "fold_to", fold_to), (Process, "log_failed", log_failed)]


def x18() -> list[Patch]:
    """Plants X18: a starting reader asks Kafka for the number of logs, instead of taking it from the root Genesis."""
    judge = rationalizer._judge
    current: list[int] = []

    def log_of(self: Process, root: Genesis) -> int:
        return route(self.group, len(self.environment.broker.logs))

    def judged(world: World, offset: int, value: bytes | None) -> Verdict:
        current[:] = [world.log]
        return judge(world, offset, value)

    return [
        (Process, "log_of", log_of),
        (rationalizer, "_judge", judged),
        (rationalizer, "route", lambda group, partitions: current[0]),
    ]


def x26() -> list[Patch]:
    judge = rationalizer._judge_unowned

    def judged(world: World, offset: int, record: Genesis | Snapshot, envelope: int, version: int) -> Verdict:
        held = world.genesis
        if isinstance(record, Genesis) and held is not None and record.incarnation != held.incarnation:
            raise TopicRecreated(world.log, held.incarnation.hex(), record.incarnation.hex())
        return judge(world, offset, record, envelope, version)

    return [(rationalizer, "_judge_unowned", judged)]


def x41() -> list[Patch]:
    judge = rationalizer._judge_unowned

    def judged(world: World, offset: int, record: Genesis | Snapshot, envelope: int, version: int) -> Verdict:
        if world.root is not None and route("", world.root.partitions) != world.log:
            return Verdict(offset, Outcome.IGNORED, "misrouted", "", None)
        return judge(world, offset, record, envelope, version)

    return [(rationalizer, "_judge_unowned", judged)]


def x39() -> list[Patch]:
    tick = Operation.tick

    def unproven(self: Operation, now: Instant) -> Step:
        vars(self.liveness)["proven"] = lambda now: True
        return tick(self, now)

    return [(Operation, "tick", unproven)]


def x42() -> list[Patch]:
    def release(self: PauseLock, group: Group, now: Instant) -> bool:
        """Ends the operation as soon as it has sent the end of its pause, without reading it back."""
        if any(record.duration_ms == 0 for record in self.operation.sent(ReleaseGroup)):
            return True
        token = group.pause_change if group.paused else NONE
        self.operation.send(end_of(group, token, self.operation.context.author.by), now)
        return False

    return [(PauseLock, "release", release)]
