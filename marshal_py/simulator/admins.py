"""An admin that pauses a group, moves its position and resumes it, as a small script by PROTOCOL.md rules 7 and 8.

A simulated stand-in for the product's admin tool: it may crash after each of its steps, and two of them may meet. It
says `moved` or `not moved` only when the log it read lets it; else `unknown`.
"""

from __future__ import annotations

from typing import Protocol

from marshal_py.errors import CoordinationError
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.lease import EVICT_INTERVALS
from marshal_py.protocol.pulse import Pulse
from marshal_py.protocol.records import Evict, Move, Note, ReleaseGroup, SetPosition
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.watch import Watch
from marshal_py.protocol.world import Group
from marshal_py.simulator.auditor import Report
from marshal_py.simulator.clock import MachineClock
from marshal_py.simulator.process import Process, Stage

TICKS_PER_INTERVAL = 10
PATIENCE_INTERVALS = 12  # then it gives up, ends its pause and says what it knows


class AdminStage(Stage, Protocol):
    def reported(self, report: Report) -> None: ...


class Plan:
    """What this admin wants."""

    def __init__(self, moves: dict[TopicPartition, int], duration_ms: int, interval_ms: int, crash_after: int) -> None:
        self.moves = moves
        self.duration_ms = duration_ms
        self.interval_ms = interval_ms
        self.crash_after = crash_after  # records sent before the crash; a great number: none


class Admin(Process):
    """One run of the tool."""

    def __init__(self, stage: AdminStage, number: int, name: str, group: str, clock: MachineClock, plan: Plan) -> None:
        super().__init__(stage, number, name, group, clock)
        self.scene = stage
        self.plan = plan
        self.watch = Watch(plan.interval_ms)
        self.pulse = Pulse(plan.interval_ms, stage.rng.randbytes)
        self.token = NONE  # of the running pause, if it is ours
        self.said = ""
        self.attempts: dict[tuple[int, tuple[int, ...]], bool] = {}  # (token, observed) -> may a copy still land?
        self._began_ms = stage.now_ms
        self._sent_ms: dict[str, int] = {}
        self._pausing = False
        self._count = 0
        self._ticking = False

    def read(self, verdict: Verdict, now: Instant) -> None:
        record = verdict.record
        if verdict.group != self.group or record is None:
            return
        if isinstance(record, Note):
            self.pulse.read_probe(record.text)
        elif isinstance(record, ReleaseGroup) and verdict.accepted:
            self.token = verdict.offset if record.by == self.name and record.duration_ms else NONE
        elif isinstance(record, SetPosition) and record.by == self.name:
            key = (record.token, tuple(move.observed for move in record.moves))
            if verdict.accepted:
                self.said, self.token = "moved", NONE
            elif verdict.reason in ("token", "observed"):
                self.attempts[key] = False
        elif isinstance(record, SetPosition) and verdict.accepted:
            if record.resume:
                self.token = NONE

    def log_failed(self, error: CoordinationError) -> None:
        self.dead = True

    def _write(self, kind: str, record: ReleaseGroup | SetPosition | Evict | Note) -> None:
        """Sends, once per half an interval and kind; crashes when its time has come."""
        now_ms = self.now().mono_ms
        if now_ms - self._sent_ms.get(kind, -self.plan.interval_ms) < self.plan.interval_ms // 2:
            return
        self._sent_ms[kind] = now_ms
        if isinstance(record, SetPosition):
            self.attempts[record.token, tuple(move.observed for move in record.moves)] = True
        self.send(record)
        self._count += not isinstance(record, Note)
        if self._count >= self.plan.crash_after:
            self.dead = True

    def act(self, _: None) -> None:
        group = self.world.groups.get(self.group)
        if not self._ticking:
            self._ticking = True
            self.stage.at(self.plan.interval_ms // TICKS_PER_INTERVAL, self, self._tick)
        if self.dead or group is None:
            return
        now = self.now()
        self.watch.refresh(group, now, self.pulse.proven(now))
        self._write("probe", Note(NONE, "probe", text=self.pulse.new_probe(now)))
        if self.said or self.stage.now_ms - self._began_ms > PATIENCE_INTERVALS * self.plan.interval_ms:
            self._finish(group)
        elif self.token == NONE or self.token != group.pause_change:
            self._pause(group)
        else:
            self._move(group, now)

    def _tick(self, _: None) -> None:
        self._ticking = False
        self.act(None)

    def _pause(self, group: Group) -> None:
        """Asks for the pause, or waits for another admin's to end."""
        if not group.paused:
            self._pausing = True
            self._write("pause", ReleaseGroup(group.pause_change, NONE, self.plan.duration_ms, by=self.name))

    def _move(self, group: Group, now: Instant) -> None:
        """Waits until all is free, evicting who does not let go; then moves."""
        holders = self.holders(group)
        if not holders:
            moves = []
            for tp, position in self.plan.moves.items():
                known = group.partitions.get(tp)
                moves.append(Move(tp.topic, tp.partition, NONE if known is None else known.version, position))
            self._write("move", SetPosition(self.token, tuple(moves), True, self.name))
            return
        for sid in holders:
            waited_ms = self.watch.session_waited_ms(sid)
            if waited_ms >= EVICT_INTERVALS * group.sessions[sid].join.interval_ms:
                self._write(f"evict {sid}", Evict(sid, group.sessions[sid].extended, waited_ms, self.name))
        if self.watch.pause_waited_ms() > self.plan.duration_ms // 3:
            self._write("renew", ReleaseGroup(self.token, self.token, self.plan.duration_ms, by=self.name))

    def holders(self, group: Group) -> list[int]:
        """Sessions that still own what is to be moved."""
        return sorted({p.owner for p in group.partitions.values() if p.owner != NONE and p.tp in self.plan.moves})

    def _finish(self, group: Group) -> None:
        """Ends its own pause; says what it knows once the pause is read over."""
        if group.paused and self.token == group.pause_change:
            self._write("end", ReleaseGroup(self.token, self.token, 0, by=self.name))
            return
        said = self.said
        if not said:
            # A copy can land only while its token is the running pause's; every token of ours is dead now (F7.3).
            alive = [key for key, open_ in self.attempts.items() if open_ and key[0] == group.pause_change]
            said = "unknown" if alive else "not moved"
        moves = tuple((tp.topic, tp.partition, position) for tp, position in self.plan.moves.items())
        self.scene.reported(Report(self.group, self.name, said, moves))
        self.dead = True
