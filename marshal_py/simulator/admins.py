"""The product's own admin tool in the simulated cluster: a desk that drives one errand, and may crash at every step.

What admin/desk.py does on a real log, done here in virtual time: read, fold, step, send, look positions up. The
decisions are those of marshal_py.admin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from marshal_py.admin.author import Author
from marshal_py.admin.errand import GRACE_INTERVALS, INTERVAL_MS, Errand, Scene
from marshal_py.admin.ledger import Ledger
from marshal_py.admin.position import PositionPlan
from marshal_py.errors import AdminGaveUp, CoordinationError, MarshalError
from marshal_py.protocol.identity import Instant, TopicPartition
from marshal_py.protocol.records import Note
from marshal_py.protocol.verdict import Verdict
from marshal_py.simulator.auditor_evidence import Report
from marshal_py.simulator.clock import MachineClock
from marshal_py.simulator.process import GENESIS_MS, Process, Stage


class DeskStage(Stage, Protocol):
    def reported(self, report: Report) -> None: ...


class Fate(NamedTuple):
    """After how many records, probes not counted, a run of the tool dies, or its user presses ctrl-C."""

    crash_after: int
    interrupt_after: int


class Desk(Process):
    """One run of the tool."""

    def __init__(
        self,
        stage: DeskStage,
        number: int,
        name: str,
        group: str,
        clock: MachineClock,
        errand: Callable[[Scene], Errand],
        moves: Mapping[TopicPartition, int],
        fate: Fate,
    ) -> None:
        super().__init__(stage, number, name, group, clock)
        self.scene = stage
        self.author = Author(name, name)
        self.ledger = Ledger(group)
        self.errand: Errand | None = None
        self._errand = errand
        self._moves = moves
        self._fate = fate
        self._count = 0
        self._armed_ms = -1
        self._giving_up_ms: int | None = None

    # --- reading

    def read(self, verdict: Verdict, now: Instant) -> None:
        self.ledger.read(verdict)
        if self.errand is not None:
            self.errand.receive(verdict, now)

    def refuse(self, error: CoordinationError) -> None:
        if self.errand is not None and not self.errand.ended:
            self.errand.end(error)
            self._go_home(-1)
        self.dead = True

    def _write_genesis(self) -> None:
        """A tool creates nothing: it looks again."""
        self.stage.at(GENESIS_MS, self, self.act)

    # --- acting

    def act(self, _: None) -> None:
        if self.dead:
            return
        if self.errand is None:
            if not self.opened():
                return
            scene = Scene(self.world, self.group, self.ledger, self.author, self.stage.rng.randbytes)
            try:
                self.errand = self._errand(scene)
            except MarshalError:
                self.dead = True  # refused, before anything was sent
                return
        errand, now = self.errand, self.now()
        step = errand.tick(now)
        for record in step.send:
            self.send(record)
            self._count += not isinstance(record, Note)
            if self._count >= self._fate.crash_after:
                self.dead = True
                return
        if self._count >= self._fate.interrupt_after:
            errand.give_up(AdminGaveUp(self.group, "the operation", 0.0))
        if errand.giving_up is not None and self._giving_up_ms is None:
            self._giving_up_ms = now.mono_ms
        if step.ended:
            gave_up_ms = now.mono_ms if self._giving_up_ms is None else self._giving_up_ms
            in_order = now.mono_ms - gave_up_ms < GRACE_INTERVALS * INTERVAL_MS  # M9: it has read its own end
            self._go_home(self.world.next_offset if in_order else -1)
            return
        if step.aim:
            self.stage.at(1 + self.stage.weather.read_ms(self.stage.rng), self, self._aimed)
        self._arm()

    def _aimed(self, _: None) -> None:
        if self.errand is not None:
            self.errand.aimed(self._moves)
            self.act(None)

    def _arm(self) -> None:
        assert self.errand is not None
        due_ms = max(self.clock.true_ms(self.errand.deadline_ms), self.stage.now_ms + 1)
        if self._armed_ms <= self.stage.now_ms or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self.stage.at(due_ms - self.stage.now_ms, self, self._rang, due_ms)

    def _rang(self, due_ms: int) -> None:
        if due_ms == self._armed_ms:
            self._armed_ms = -1
            self.act(None)

    def _go_home(self, read_to: int) -> None:
        """Says what it knows."""
        self.dead = True
        said, errand = "done", self.errand
        if isinstance(errand, PositionPlan):
            said = errand.outcome.replace("_", " ")
        moves = tuple((*tp, position) for tp, position in self._moves.items())
        self.scene.reported(Report(self.group, self.name, said, moves, read_to))
