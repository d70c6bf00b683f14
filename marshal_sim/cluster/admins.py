"""The package's own admin tool in the simulated cluster. It drives one operation and may crash at every step.

It does in virtual time what admin/plans/operation.py does on a real log: read, fold, step, send, look positions up. It
decides nothing; marshal_py.admin does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from marshal_py.admin.plans.operation import GRACE_INTERVALS, INTERVAL_MS, Author, GroupContext, Operation, sealed
from marshal_py.admin.plans.position import PositionPlan
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.errors import AdminFailed, AdminGaveUp, CoordinationError, KeyNeeded, MarshalError
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.protocol.wire.records import Note, Record
from marshal_sim.cluster.clock import MachineClock
from marshal_sim.cluster.hostile import key_for
from marshal_sim.cluster.process import GENESIS_MS, Environment, Process
from marshal_sim.judge.evidence import ToolReport


class AdminEnvironment(Environment, Protocol):
    def reported(self, report: ToolReport) -> None: ...


class CrashPoint(NamedTuple):
    """Says after how many sent records a run of the tool dies, and after how many its user hits Ctrl-C.

    Probes are not counted.
    """

    crash_after: int
    interrupt_after: int


class AdminProcess(Process):
    """Simulates a process that carries out one operation of the admin tool."""

    dead: bool
    environment: AdminEnvironment

    def __init__(
        self,
        environment: AdminEnvironment,
        number: int,
        name: str,
        group: str,
        clock: MachineClock,
        operation: Callable[[GroupContext], Operation],
        moves: Mapping[TopicPartition, int],
        crash_point: CrashPoint,
    ) -> None:
        super().__init__(environment, number, name, group, clock)
        self.author: Author = Author(name, name)
        self.pause_history: PauseHistory = PauseHistory(group)
        self.operation: Operation | None = None
        self._make_operation = operation
        self._moves = moves
        self._ids = self._topic_ids()
        self._crash_point = crash_point
        self._count = 0
        self._armed_ms = -1
        self._giving_up_ms: int | None = None

    # --- reading

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.pause_history.read(verdict)
        if self.operation is not None:
            self.operation.receive(verdict, now)

    def end_with(self, error: CoordinationError) -> None:
        if self.operation is not None and not self.operation.ended:
            self.operation.end(error)
            self._finish(-1)
        self.dead = True

    def _write_genesis(self) -> None:
        """Writes nothing, because a tool never writes a Genesis, and acts again later."""
        self.environment.schedule(GENESIS_MS, self, self.act)

    def send(self, record: Record) -> None:
        """Writes a record of the group, with a signature if the group has keys."""
        self.post(sealed(self.world, self.group, record, key_for(self.world, self.group)))

    # --- acting

    def act(self, _: None) -> None:
        if self.dead:
            return
        if self.operation is None:
            if not self.opened():
                return
            context = GroupContext(
                self.world, self.group, self.pause_history, self.author, self.environment.rng.randbytes
            )
            try:
                self.operation = self._make_operation(context)
            except MarshalError:
                self.dead = True  # refused, before anything was sent
                return
        operation, now = self.operation, self.now()
        step = operation.tick(now)
        for record in step.send:
            try:
                self.send(record)
            except KeyNeeded as error:  # somebody else has taken the group: only with a planted bug
                self.dead = True
                operation.end(error)
                return
            self._count += not isinstance(record, Note)
            if self._count >= self._crash_point.crash_after:
                self.dead = True
                return
        if self._count >= self._crash_point.interrupt_after:
            operation.give_up(AdminGaveUp(self.group, "the operation", 0.0))
        if operation.giving_up is not None and self._giving_up_ms is None:
            self._giving_up_ms = now.mono_ms
        if step.ended:
            gave_up_ms = now.mono_ms if self._giving_up_ms is None else self._giving_up_ms
            in_order = now.mono_ms - gave_up_ms < GRACE_INTERVALS * INTERVAL_MS  # M9: it has read its own end
            self._finish(self.world.next_offset if in_order else -1)
            return
        if step.resolve_positions:
            self.environment.schedule(1 + self.environment.network_faults.read_ms(), self, self._positions_found)
        self._arm()

    def _positions_found(self, _: None) -> None:
        if self.operation is not None and self._ids == self._topic_ids():
            self.operation.positions_resolved(self._moves)
            self.act(None)
        elif self.operation is not None:
            self.operation.give_up(AdminFailed(self.group, AdminFailed.NOT_MOVED, "a topic was created again"))
            self.act(None)

    def _topic_ids(self) -> dict[str, str]:
        """Returns the ids of the topics whose positions it moves, as `PositionPlan` has them looked up."""
        ids = self.environment.broker.ids
        return {topic: ids[topic][-1] for topic in {tp.topic for tp in self._moves} & ids.keys()}

    def _arm(self) -> None:
        assert self.operation is not None
        due_ms = max(self.clock.true_ms(self.operation.deadline_ms), self.environment.now_ms + 1)
        if self._armed_ms <= self.environment.now_ms or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self.environment.schedule(due_ms - self.environment.now_ms, self, self._timer_fired, due_ms)

    def _timer_fired(self, due_ms: int) -> None:
        if due_ms == self._armed_ms:
            self._armed_ms = -1
            self.act(None)

    def _finish(self, read_to: int) -> None:
        """Reports what the tool knows about its moves, and ends it."""
        self.dead = True
        said, operation = "done", self.operation
        if isinstance(operation, PositionPlan):
            said = operation.outcome.replace("_", " ")
        moves = tuple((*tp, position) for tp, position in self._moves.items())
        self.environment.reported(ToolReport(self.group, self.name, said, moves, read_to))
