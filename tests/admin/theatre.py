"""Admin tools on the stage of tests/support/stage.py: real plans in virtual time, beside real members, over one log.

A Tool can be cut off like any client, can crash after its n-th record, and remembers every value that it ever sent, so
that a test can play late copies of all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from marshal_py.admin.author import Author
from marshal_py.admin.errand import Errand, Progress, Scene
from marshal_py.admin.ledger import Ledger
from marshal_py.errors import AdminGaveUp
from marshal_py.protocol import codec
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.rationalizer import apply
from marshal_py.protocol.records import Note, Record
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import World
from tests.support.stage import GROUP, INCARNATION, READ_MS, WRITE_MS, Client, Stage

NEVER = 10**9


class Tool(Client):
    """One run of an admin tool. It is a client of the stage without a member."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        make: Callable[[Scene], Errand],
        who: str,
        aims: Mapping[TopicPartition, int] | Callable[[], Mapping[TopicPartition, int]],
        crash_after: int,
    ) -> None:
        self.stage, self.name = stage, name
        self.rng = random.Random(f"tool {name}")
        self.alive = True
        self.suspended_at: int | None = None
        self.slept_ms = self.wall_skew_ms = 0
        self.write_ms, self.read_ms = WRITE_MS, READ_MS
        self.writes_held = self.reads_held = False
        self.held_back: list[bytes] = []
        self.sent: list[tuple[int, Record]] = []
        self.events: list[Progress] = []
        self.crash_after = crash_after
        self.aims = aims
        self.world = World()
        self.ledger = Ledger(GROUP)
        self.member: Any = SimpleNamespace(claims={}, session=NONE, receive=lambda verdict, now: None)
        for value in stage.values:
            self._fold(value)
        user, _, host = who.partition("@")
        author = Author.of(user, host, "test 1", self.rng.randbytes(4))
        self.errand = make(Scene(self.world, GROUP, self.ledger, author, self.rng.randbytes))
        self.member.receive = self.errand.receive
        self.due_ms = stage.now_ms

    def _fold(self, value: bytes) -> Verdict:
        verdict = apply(self.world, self.world.next_offset, value)
        self.ledger.read(verdict)
        return verdict

    def tick(self) -> Any:
        step = self.errand.tick(self.now)
        self.events += step.events
        for record in step.send:
            if self.alive:
                self.sent.append((self.stage.now_ms, record))
                self.stage.send(self, codec.encode(record, GROUP, INCARNATION))
                self.alive = len(self.records) < self.crash_after
        if step.aim and self.alive:
            self.errand.aimed(self.aims() if callable(self.aims) else self.aims)
        at = self.stage.now_ms
        self.due_ms = at + 1 if step.aim else max(self.errand.deadline_ms + self.slept_ms, at + 1)
        if step.ended:
            self.alive = False
        return step

    def give_up(self) -> None:
        """Its user has had enough."""
        self.errand.give_up(AdminGaveUp(GROUP, "the test's wish", 0.0))
        self.due_ms = self.stage.now_ms

    @property
    def records(self) -> list[Record]:
        """What it sent that was no probe."""
        return [record for _, record in self.sent if not isinstance(record, Note)]

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def hire(
    stage: Stage,
    make: Callable[[Scene], Errand],
    name: str = "tool",
    who: str = "alice@desk",
    aims: Mapping[TopicPartition, int] | Callable[[], Mapping[TopicPartition, int]] | None = None,
    crash_after: int = NEVER,
) -> Tool:
    """Puts a tool on the stage."""
    tool = Tool(stage, name, make, who, aims or {}, crash_after)
    stage.clients.append(tool)
    return tool


def finish(stage: Stage, tool: Tool, at_most_ms: int = 200_000) -> Tool:
    """Runs until the tool's errand is over."""
    stage.run_until(lambda: tool.errand.ended, at_most_ms)
    return tool


def play_copies(stage: Stage, tool: Tool) -> list[str]:
    """Late copies of all that it ever sent, forwards and backwards, twice; what was accepted of them."""
    accepted = []
    for record in [*tool.records, *reversed(tool.records)] * 2:
        if stage.inject(record).accepted:
            accepted.append(type(record).__name__)
    return accepted
