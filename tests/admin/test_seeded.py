"""Several admins at once, slow, cut off, killed, given up, with late copies of their records: seeded, in virtual time.

Judged by the log alone: an accepted SetPosition carries the run's own `by`.
"""

from __future__ import annotations

import random

import pytest

from marshal_py.admin.plans.operation import GroupContext, Terms
from marshal_py.admin.plans.position import MOVED, NOT_MOVED, UNKNOWN, PositionPlan
from marshal_py.errors import AdminFailed
from marshal_py.protocol.wire.records import SetPosition
from tests.admin.virtual_admin import Tool, play_copies, start_tool
from tests.support.virtual_cluster import INTERVAL_MS, VirtualCluster, tp

PEOPLE = ("alice@desk", "alice@desk", "bob@office")
PAUSE_MS = 9_000
SEEDS = 40
SLICE_MS = 20
OUTCOMES: set[str] = set()


def start(cluster: VirtualCluster, number: int, chance: random.Random) -> Tool:
    def make(context: GroupContext) -> PositionPlan:
        return PositionPlan(
            context,
            [tp(0), tp(1)],
            Terms(
                duration_ms=PAUSE_MS,
                take_over=chance.random() < 0.4,
                adopt=chance.random() < 0.3,
                patience_ms=chance.choice([3_000, 20_000]),
            ),
            stay_paused=chance.random() < 0.2,
        )

    positions = {tp(0): 1_000 + number, tp(1): 2_000 + number}
    tool = start_tool(
        cluster,
        make,
        f"tool {number}",
        chance.choice(PEOPLE),
        positions,
        crash_after=chance.choice([1, 2, 3, 4, 10**9, 10**9, 10**9]),
    )
    tool.write_ms, tool.read_ms = chance.choice([1, 4, 40, 700]), chance.choice([1, 3, 30, 500])
    return tool


def disturb(cluster: VirtualCluster, tools: list[Tool], chance: random.Random) -> None:
    tool = chance.choice(tools)
    match chance.choice(["give up", "hold writes", "cut", "heal", "copy", "nothing", "nothing"]):
        case "give up" if tool.alive and chance.random() < 0.4:
            tool.give_up()
        case "hold writes" if tool.alive:
            tool.hold_writes()
        case "cut" if tool.alive:
            tool.cut()
        case "heal":
            tool.reads_held = False
            tool.release_writes(lose=chance.random() < 0.5)
        case "copy" if tool.records:
            cluster.inject(chance.choice(tool.records))
        case _:
            pass


def advance(cluster: VirtualCluster, tools: list[Tool], for_ms: int) -> None:
    """Advances time. Every third tool gives up while its move is on its way, which is the worst moment."""
    until_ms = cluster.now_ms + for_ms
    while cluster.now_ms < until_ms:
        cluster.run(min(SLICE_MS, until_ms - cluster.now_ms))
        for tool in tools[::3]:
            if tool.alive and any(isinstance(record, SetPosition) for record in tool.records):
                tool.give_up()


def said(tool: Tool) -> str:
    """Its last word when it ended."""
    match tool.operation.error:
        case None:
            return MOVED
        case AdminFailed(outcome=AdminFailed.UNKNOWN):
            return UNKNOWN
        case _:
            return NOT_MOVED


def moves_by(cluster: VirtualCluster, tool: Tool) -> int:
    by = tool.operation.context.author.by
    return sum(verdict.accepted and record.by == by for verdict, record in cluster.records(SetPosition))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_admin_tells_the_truth(seed: int) -> None:
    """M6, M7, M8: whatever it said is what the log says, also after late copies of everything that anybody sent."""
    chance = random.Random(seed)
    cluster = VirtualCluster(partitions=3)
    team = cluster.team("a", "b")
    for client in team:
        for claim in client.member.claims.values():
            if chance.random() < 0.5:
                client.deliver(claim, 0)
    tools: list[Tool] = []
    for number in range(chance.choice([1, 2, 3])):
        tools.append(start(cluster, number, chance))
        for _ in range(chance.randint(1, 12)):
            advance(cluster, tools, chance.choice([1, 5, 30, 400, 2_500]))
            disturb(cluster, tools, chance)
    for tool in tools:
        tool.reads_held = False
        tool.release_writes()
    advance(cluster, tools, 60_000)
    for tool in tools:
        play_copies(cluster, tool)
        cluster.run(PAUSE_MS + 4 * INTERVAL_MS)
    for tool in tools:
        assert tool.operation.ended or not tool.alive, "it ends in bounded time"
        landed = moves_by(cluster, tool)
        assert landed <= 1, "one move, once"
        if tool.operation.ended:
            outcome = said(tool)
            OUTCOMES.add(outcome)
            assert outcome != MOVED or landed == 1
            assert outcome != NOT_MOVED or landed == 0
    assert not cluster.group.paused, "whoever died, the members end its pause"
    assert len(cluster.owners()) == 3
    pairs = {(1_000 + n, 2_000 + n) for n in range(3)} | {(0, 0)}
    assert (cluster.partition(0).position, cluster.partition(1).position) in pairs, "all or nothing"


def test_the_seeds_reach_the_outcomes() -> None:
    """A run in which nobody moves and nobody gives up would prove nothing."""
    for seed in range(12):
        test_every_admin_tells_the_truth(seed)
    assert {MOVED, NOT_MOVED} <= OUTCOMES <= {MOVED, NOT_MOVED, UNKNOWN}
