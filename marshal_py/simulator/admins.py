"""The product's own admin tool in the simulated cluster: a desk that drives one errand, and may crash at every step.

What admin/runner.py does on a real log, done here in virtual time: read, fold, step, send, look positions up. The
decisions are those of marshal_py.admin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from marshal_py.admin.author import Author
from marshal_py.admin.operation import GRACE_INTERVALS, INTERVAL_MS, GroupContext, Operation
from marshal_py.admin.pause_history import PauseHistory
from marshal_py.admin.position import PositionPlan
from marshal_py.errors import AdminGaveUp, CoordinationError, MarshalError
from marshal_py.protocol.identity import Instant, TopicPartition
from marshal_py.protocol.records import Note
from marshal_py.protocol.verdict import Verdict
from marshal_py.simulator.auditor_evidence import Report
from marshal_py.simulator.clock import MachineClock
from marshal_py.simulator.process import GENESIS_MS, Environment, Process


class AdminEnvironment(Environment, Protocol):
    def reported(self, report: Report) -> None: ...


class CrashPoint(NamedTuple):
    """After how many records, probes not counted, a run of the tool dies, or its user presses ctrl-C."""

    crash_after: int
    interrupt_after: int


class AdminProcess(Process):
    """One run of the tool."""

    def __init__(
        self,
        environment: AdminEnvironment,
        number: int,
        name: str,
        group: str,
        clock: MachineClock,
        operation: Callable[[GroupContext], Operation],
        moves: Mapping[TopicPartition, int],
        fate: CrashPoint,
    ) -> None:
        super().__init__(environment, number, name, group, clock)
        self.context = environment
        self.author = Author(name, name)
        self.ledger = PauseHistory(group)
        self.operation: Operation | None = None
        self._errand = operation
        self._moves = moves
        self._fate = fate
        self._count = 0
        self._armed_ms = -1
        self._giving_up_ms: int | None = None

    # --- reading

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.ledger.read(verdict)
        if self.operation is not None:
            self.operation.receive(verdict, now)

    def refuse(self, error: CoordinationError) -> None:
        if self.operation is not None and not self.operation.ended:
            self.operation.end(error)
            self._go_home(-1)
        self.dead = True

    def _write_genesis(self) -> None:
        """A tool creates nothing: it looks again."""
        self.environment.at(GENESIS_MS, self, self.act)

    # --- acting

    def act(self, _: None) -> None:
        if self.dead:
            return
        if self.operation is None:
            if not self.opened():
                return
            context = GroupContext(self.world, self.group, self.ledger, self.author, self.environment.rng.randbytes)
            try:
                self.operation = self._errand(context)
            except MarshalError:
                self.dead = True  # refused, before anything was sent
                return
        operation, now = self.operation, self.now()
        step = operation.tick(now)
        for record in step.send:
            self.send(record)
            self._count += not isinstance(record, Note)
            if self._count >= self._fate.crash_after:
                self.dead = True
                return
        if self._count >= self._fate.interrupt_after:
            operation.give_up(AdminGaveUp(self.group, "the operation", 0.0))
        if operation.giving_up is not None and self._giving_up_ms is None:
            self._giving_up_ms = now.mono_ms
        if step.ended:
            gave_up_ms = now.mono_ms if self._giving_up_ms is None else self._giving_up_ms
            in_order = now.mono_ms - gave_up_ms < GRACE_INTERVALS * INTERVAL_MS  # M9: it has read its own end
            self._go_home(self.world.next_offset if in_order else -1)
            return
        if step.resolve_positions:
            self.environment.at(1 + self.environment.network_faults.read_ms(self.environment.rng), self, self._aimed)
        self._arm()

    def _aimed(self, _: None) -> None:
        if self.operation is not None:
            self.operation.positions_resolved(self._moves)
            self.act(None)

    def _arm(self) -> None:
        assert self.operation is not None
        due_ms = max(self.clock.true_ms(self.operation.deadline_ms), self.environment.now_ms + 1)
        if self._armed_ms <= self.environment.now_ms or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self.environment.at(due_ms - self.environment.now_ms, self, self._rang, due_ms)

    def _rang(self, due_ms: int) -> None:
        if due_ms == self._armed_ms:
            self._armed_ms = -1
            self.act(None)

    def _go_home(self, read_to: int) -> None:
        """Says what it knows."""
        self.dead = True
        said, operation = "done", self.operation
        if isinstance(operation, PositionPlan):
            said = operation.outcome.replace("_", " ")
        moves = tuple((*tp, position) for tp, position in self._moves.items())
        self.context.reported(Report(self.group, self.name, said, moves, read_to))
