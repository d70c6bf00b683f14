"""A member's memory is bounded: a long life among others that come, go, die and differ leaks nothing."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from marshal_py.protocol import time
from marshal_py.protocol.fold.world import FOLD_VERSION, World
from marshal_py.protocol.member import member as member_module
from marshal_py.protocol.member import rebalance
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.records import Checkpoint, Evict, Heartbeat, Topology
from tests.support.virtual_cluster import GROUP, INTERVAL_MS, THIRD_MS, TOPIC, VirtualCluster

KEPT = 4  # of what is kept by number alone
ROUNDS = 8
PARTITIONS = 13  # what is known of each of them may be kept


def sizes(value: Any, path: str = "", seen: set[int] | None = None) -> dict[str, int]:
    """How much each dict, set, list and deque holds that can be reached from here, but for the world."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, World):
        return {}
    seen.add(id(value))
    found: dict[str, int] = {}
    if isinstance(value, dict | set | list | deque | frozenset):
        found[path] = len(value)
    elif type(value).__module__.startswith("marshal_py.protocol"):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in names:
            found |= sizes(getattr(value, name, None), f"{path}.{name}", seen)
    return found


def live(cluster: VirtualCluster, member: Member, number: int) -> None:
    """One round: a guest joins, is handed partitions, accuses, dies and is evicted; the member is evicted, too."""
    guest = cluster.add(f"guest {number}")
    cluster.run(2 * INTERVAL_MS)
    digest = guest.world.checkpoints[GROUP]
    cluster.must(
        Heartbeat(
            guest.session, 2**62 + number, digest=Checkpoint(digest.at, digest.state ^ 1, digest.chain, FOLD_VERSION)
        )
    )
    cluster.kill(guest)
    cluster.must(Topology("gone", 1, cluster.group.topology_offset("gone"), topic_id=f"id {number}"))
    member.learn_topic("gone", 1, f"id {number}")
    cluster.run(4 * INTERVAL_MS)
    extended = cluster.group.sessions[member.session].extended
    cluster.must(Evict(member.session, extended, 2 * INTERVAL_MS))
    cluster.clients[:] = [client for client in cluster.clients if client.runs]
    cluster.run(3 * INTERVAL_MS)


def test_a_long_life_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T14, T18, G6: after three times as many sessions, evictions, accusations and topics it holds no more."""
    monkeypatch.setattr(time, "INSTANCES_KEPT", KEPT)
    monkeypatch.setattr(time, "SENT_KEPT", KEPT)
    monkeypatch.setattr("marshal_py.protocol.member.rebalance.SENT_KEPT", KEPT)
    monkeypatch.setattr(member_module, "EVICTED_KEPT", KEPT)
    monkeypatch.setattr(rebalance, "REPLACED_IDS_KEPT", KEPT)
    cluster = VirtualCluster()
    a, _b = cluster.team("a", "b")
    measured: list[dict[str, int]] = []
    for number in range(3 * ROUNDS):
        live(cluster, a.member, number)
        if number + 1 in (ROUNDS, 3 * ROUNDS):
            cluster.run(THIRD_MS)
            measured.append(sizes(a.member))
    early, late = measured
    assert early.keys() == late.keys()
    grown = {path: (early[path], held) for path, held in late.items() if held > max(early[path], PARTITIONS)}
    assert not grown
    assert a.owned
    assert TOPIC in a.member.topics.counts
