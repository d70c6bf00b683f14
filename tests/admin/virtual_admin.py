"""Admin tools in the virtual cluster of tests/support/virtual_cluster.py: real plans and members in virtual time,
over one log.

A Tool can be cut off like any client, can crash after its n-th record, and remembers every value that it ever sent, so
that a test can play late copies of all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from marshal_py.admin.plans.operation import Author, GroupContext, Operation, Progress
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.errors import AdminGaveUp
from marshal_py.protocol.fold.rationalizer import Verdict, apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Note, Record
from tests.support.virtual_cluster import GROUP, INCARNATION, READ_MS, WRITE_MS, Client, VirtualCluster

NEVER = 10**9


class Tool(Client):
    """One run of an admin tool. It is a client of the virtual cluster without a member."""

    def __init__(
        self,
        cluster: VirtualCluster,
        name: str,
        make: Callable[[GroupContext], Operation],
        who: str,
        positions: Mapping[TopicPartition, int] | Callable[[], Mapping[TopicPartition, int]],
        crash_after: int,
    ) -> None:
        self.cluster, self.name = cluster, name
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
        self.positions = positions
        self.world = World()
        self.pause_history = PauseHistory(GROUP)
        self.member: Any = SimpleNamespace(claims={}, session=NONE, receive=lambda verdict, now: None)
        for value in cluster.values:
            self._fold(value)
        user, _, host = who.partition("@")
        author = Author.of(user, host, "test 1", self.rng.randbytes(4))
        self.operation = make(GroupContext(self.world, GROUP, self.pause_history, author, self.rng.randbytes))
        self.member.receive = self.operation.receive
        self.due_ms = cluster.now_ms

    def _fold(self, value: bytes) -> Verdict:
        verdict = apply(self.world, self.world.next_offset, value)
        self.pause_history.read(verdict)
        return verdict

    def tick(self) -> Any:
        step = self.operation.tick(self.now)
        self.events += step.events
        for record in step.send:
            if self.alive:
                self.sent.append((self.cluster.now_ms, record))
                self.cluster.send(self, codec.encode(record, GROUP, INCARNATION))
                self.alive = len(self.records) < self.crash_after
        if step.resolve_positions and self.alive:
            self.operation.positions_resolved(self.positions() if callable(self.positions) else self.positions)
        at = self.cluster.now_ms
        self.due_ms = at + 1 if step.resolve_positions else max(self.operation.deadline_ms + self.slept_ms, at + 1)
        if step.ended:
            self.alive = False
        return step

    def give_up(self) -> None:
        """Gives up, as after Ctrl-C."""
        self.operation.give_up(AdminGaveUp(GROUP, "the operation", 0.0))
        self.due_ms = self.cluster.now_ms

    @property
    def records(self) -> list[Record]:
        """What it sent that was no probe."""
        return [record for _, record in self.sent if not isinstance(record, Note)]

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def start_tool(
    cluster: VirtualCluster,
    make: Callable[[GroupContext], Operation],
    name: str = "tool",
    who: str = "alice@desk",
    positions: Mapping[TopicPartition, int] | Callable[[], Mapping[TopicPartition, int]] | None = None,
    crash_after: int = NEVER,
) -> Tool:
    """Starts a tool in the virtual cluster."""
    tool = Tool(cluster, name, make, who, positions or {}, crash_after)
    cluster.clients.append(tool)
    return tool


def finish(cluster: VirtualCluster, tool: Tool, at_most_ms: int = 200_000) -> Tool:
    """Runs until the tool's operation has ended."""
    cluster.run_until(lambda: tool.operation.ended, at_most_ms)
    return tool


def play_copies(cluster: VirtualCluster, tool: Tool) -> list[str]:
    """Late copies of all that it ever sent, forwards and backwards, twice; what was accepted of them."""
    accepted = []
    for record in [*tool.records, *reversed(tool.records)] * 2:
        if cluster.inject(record).accepted:
            accepted.append(type(record).__name__)
    return accepted
