"""A group of 1,000 members and 10,000 partitions, in virtual time, folded by both folds.

Five members are this library's, the others are records that a script writes: they join, send heartbeats, and claim what
the assignment gives them. bench/scale.py measures what such a group costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from bench.fold import GROUP
from bench.scale import INTERVAL_MS, Fleet, target
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import Heartbeat
from marshal_sim.oracle.oracle import Oracle

THIRD_MS = INTERVAL_MS // 3
MEMBERS = 5
DEAD = 20
THIRDS_MAX = 60


def a_third(fleet: Fleet) -> None:
    """A third of an interval: heartbeats and claims of the scripted sessions, and every tick of the members."""
    fleet.beat += 1
    ready: defaultdict[int, list[int]] = defaultdict(list)  # what each has fetched ahead, and its owner may hand over
    for tp, session in target(fleet.group).items():
        known = fleet.group.partitions.get(tp)
        if known is not None and known.owner not in (NONE, session):
            ready[session].append(known.epoch)
    for session in fleet.scripted:
        fleet.append(Heartbeat(session, fleet.beat, ready=tuple(ready[session])))
    fleet.hand_out()
    end_ms = fleet.now_ms + THIRD_MS
    while fleet.now_ms < end_ms:
        fleet.now_ms = min([end_ms, *(max(float(one.deadline_ms), fleet.now_ms + 1) for one in fleet.members)])
        for member in fleet.members:
            if member.tick_due(fleet.now()):
                fleet.turn(member)


def thirds_until_shared(fleet: Fleet, partitions: int, sessions: int) -> int:
    """Returns after how many thirds so many sessions live, and each of them owns its part of the partitions."""
    part = partitions // sessions
    for third in range(THIRDS_MAX):
        owned = Counter(partition.owner for partition in fleet.group.claims.values())
        if len(owned) == len(fleet.group.sessions) == sessions and sum(owned.values()) == partitions:
            if part <= min(owned.values()) and max(owned.values()) <= part + 1:
                return third
        a_third(fleet)
    raise AssertionError(f"not shared out: {owned.most_common(3)} ... {owned.most_common()[-3:]}")


@pytest.mark.parametrize(("sessions", "partitions"), [(60, 600), pytest.param(1_000, 10_000, marks=pytest.mark.proof)])
def test_a_large_group_is_shared_out_and_survives_deaths(sessions: int, partitions: int) -> None:
    """A2, A3, T4: newcomers get their part of what five members owned, and of the dead."""
    fleet = Fleet(partitions, 0, cpu_s=lambda: 0.0)
    members: list[Member] = [fleet.member(partitions) for _ in range(MEMBERS)]
    thirds_until_shared(fleet, partitions, MEMBERS)
    fleet.scripted = [fleet.join(number) for number in range(sessions - MEMBERS)]
    thirds_until_shared(fleet, partitions, sessions)
    for _ in range(DEAD):
        fleet.scripted.pop()
    assert thirds_until_shared(fleet, partitions, sessions - DEAD) >= 6, "nobody is evicted before two intervals"
    assert all(member.session in fleet.group.sessions and not member.fenced for member in members)
    fleet.world.check()
    oracle = Oracle()
    for offset, value in enumerate(fleet.values):
        oracle.apply(offset, value)
    assert oracle.state_digest(GROUP) == fleet.group.digest()
