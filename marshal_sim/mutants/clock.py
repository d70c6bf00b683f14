"""Planted bugs that trust a clock which is not the waiter's own: a broker's timestamp, a clamped one, the wall clock.

The shipped fold reads no time. These bugs give it one: while a process reads, `_Times` has a time for each record.
mutants.py alone calls this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import reshape
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.time import FailureDetector
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import EVICT_INTERVALS, ClaimingPartition, ReleaseGroup
from marshal_sim.cluster.process import Process

Patch = tuple[Any, str, Any]
Rule = Callable[[Group, int, Any, bytes], str | tuple[int, ...]]
CLAIM: Final = 5


class _Times:
    """The time of each record, as a fold that had a clock would know it, and of each session's last extension."""

    def __init__(self, time_of: Callable[[Process, int], int], step_ms_max: int | None = None) -> None:
        self.time_of = time_of
        self.step_ms_max = step_ms_max  # a clamped clock: never back, and no further than this per record
        self.newest: dict[int, int] = {}
        self.extended: dict[tuple[int, int], int] = {}
        self.paused: dict[int, int] = {}
        self.reader: list[Process] = []

    def reading(self) -> Patch:
        fold_to = Process.fold_to

        def watched(process: Process, upto: int) -> None:
            self.reader[:] = [process]
            fold_to(process, upto)

        return Process, "fold_to", watched

    def rules(self, before: Callable[[Group, int, Any], Any]) -> Patch:
        return rationalizer, "_RULES", tuple(rule and self._timed(rule, before) for rule in rationalizer._RULES)

    def _timed(self, rule: Rule, before: Callable[[Group, int, Any], Any]) -> Rule:
        def timed(group: Group, offset: int, record: Any, body: bytes) -> str | tuple[int, ...]:
            known, time_ms = self.newest.get(id(group)), self.time_of(self.reader[0], offset)
            if known is not None and self.step_ms_max is not None:
                time_ms = min(max(time_ms, known), known + self.step_ms_max)
            self.newest[id(group)] = time_ms
            reason = rule(group, offset, before(group, time_ms, record), body)
            for session in group.sessions.values():
                if session.extended == offset:
                    self.extended[id(group), session.id] = time_ms
            if isinstance(record, ReleaseGroup) and not reason:
                self.paused[id(group)] = time_ms
            return reason

        return timed

    def stale(self, group: Group, session: int) -> bool:
        """Returns True if the session is dead by the times that this object holds."""
        newest = self.newest.get(id(group), 0)
        silent_ms = newest - self.extended.get((id(group), session), newest)
        return silent_ms >= EVICT_INTERVALS * group.sessions[session].join.interval_ms


def _claims_by_time(times: _Times) -> list[Patch]:
    """Plants a bug: a claim is accepted although another session owns the partition, if that owner is dead by this
    clock.

    Members claim such partitions as if they were free.
    """
    refresh = FailureDetector.refresh

    def before(group: Group, time_ms: int, record: Any) -> Any:
        if isinstance(record, ClaimingPartition):
            held = group.partitions.get(TopicPartition(record.topic, record.partition))
            if held is not None and held.owner != NONE and times.stale(group, held.owner):
                rationalizer.free(group, held, NONE)
                return replace(record, observed=held.version)
        return record

    def refreshed(self: FailureDetector, group: Group, now: Instant, proven: bool) -> None:
        self._shape = -1
        refresh(self, group, now, proven)
        for held in group.claims.values():
            if times.stale(group, held.owner):
                self._free[held.tp] = (held.version, self.clock.counted_ms)

    return [times.reading(), times.rules(before), (FailureDetector, "refresh", refreshed)]


def _stamp_ms(process: Process, offset: int) -> int:
    return process.environment.broker.logs[process.log].stamps_ms[offset]


def x1() -> list[Patch]:
    return _claims_by_time(_Times(_stamp_ms))


def x14() -> list[Patch]:
    return _claims_by_time(_Times(_stamp_ms, step_ms_max=2_000))  # the interval of the runs that search for it


def g3() -> list[Patch]:
    return _claims_by_time(_Times(lambda process, offset: process.now().wall_ms))


def x35() -> list[Patch]:
    times = _Times(_stamp_ms)

    def before(group: Group, time_ms: int, record: Any) -> Any:
        if group.paused and time_ms - times.paused.get(id(group), time_ms) >= group.pause_duration_ms:
            group.pause_duration_ms = 0
            reshape(group, group)
        return record

    return [times.reading(), times.rules(before)]
