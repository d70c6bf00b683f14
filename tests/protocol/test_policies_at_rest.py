"""Every policy under a steady load: once partitions are shared, nothing moves, whoever is slow (rules A)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.fold.policies import PARTITIONED
from marshal_py.protocol.wire.records import ClaimingPartition, GroupConfig, Heartbeat, ReleasingPartition, StepDown
from tests.support.virtual_cluster import INTERVAL_MS, TOPIC, Client, VirtualCluster

OTHER = "bills"
MEMBERS = {"max_members": 8, "members": ("m1", "m2")}
SETTINGS = {
    "balanced": GroupConfig(-1, policy="balanced"),
    "greedy": GroupConfig(-1, policy="greedy"),
    "members": GroupConfig(-1, policy="members", **MEMBERS),
    "blocks": GroupConfig(-1, policy="blocks", **MEMBERS),
    "topic": GroupConfig(-1, policy="topic"),
}


def work(client: Client, messages: int) -> None:
    """Handles the next `messages` of each of its partitions, of which 50 are behind them."""
    for claim in client.member.claims.values():
        first = claim.position()
        run = client.deliver(claim, *range(first, first + messages))
        run.finish_range(0, messages)
        claim.end_offset = first + messages + 50


@pytest.mark.parametrize("policy", SETTINGS)
def test_nothing_moves_under_a_steady_load(policy: str) -> None:
    """A1, A3, A4, A7, A9: a slow member, and one that stepped down, change the target once and never again."""
    cluster = VirtualCluster(partitions=8)
    cluster.must(SETTINGS[policy])
    topics = (TOPIC, OTHER)
    clients = [
        cluster.add(name, topics=topics, member=name[:2] if policy in PARTITIONED else "")
        for name in ("m1", "m2", "m1 again")
    ]
    cluster.run(6 * INTERVAL_MS)
    cluster.must(StepDown(clients[1].session, -1))
    cluster.run(6 * INTERVAL_MS)
    assert sum(len(client.member.claims) for client in clients) == 16
    begun = len(cluster.values)
    for round_ in range(40):
        for speed, client in enumerate(clients):
            work(client, 1 + speed + round_ % 3)
        cluster.run(INTERVAL_MS // 4)
    assert len(list(cluster.records(Heartbeat, begun))) > 40, "they report what they handle"
    assert max(p.position for p in cluster.group.partitions.values()) > 100
    assert not list(cluster.records(ClaimingPartition, begun))
    assert not list(cluster.records(ReleasingPartition, begun))
