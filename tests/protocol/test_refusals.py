"""Partitions that Kafka does not serve to their owner: left to others, and parked if no member can read them (D13)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.claims import ClaimPhase
from marshal_py.protocol.wire.records import UNREADABLE, Move, Note, ReleaseGroup, ReleasingPartition, SetPosition
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, TOPIC, WRITE_MS, Client, VirtualCluster, tp

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
TRIP = WRITE_MS + READ_MS
SAID = "Broker: Topic authorization failed"


def refuse(client: Client, number: int = 0) -> bool:
    nothing_left = client.member.give_up(tp(number), SAID, client.now)
    client.due_ms = client.cluster.now_ms
    return nothing_left


def parked(cluster: VirtualCluster) -> dict[int, str]:
    return {p.tp.partition: p.parked for p in cluster.group.partitions.values() if p.parked}


def owner(cluster: VirtualCluster, clients: list[Client]) -> Client:
    """Runs until a member delivers the first partition; returns it."""

    def found() -> list[Client]:
        return [
            client
            for client in clients
            for claim in client.member.claims.values()
            if claim.tp == tp(0) and claim.phase is ClaimPhase.OPEN
        ]

    cluster.run_until(found)
    return found()[0]


def test_a_single_member_tries_twice_parks_the_partition_and_continues_with_the_rest() -> None:
    """D13, F6.4: a right that is granted meanwhile asks for no admin. The way out is named."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    assert not refuse(a)
    cluster.run(2 * TRIP)
    assert parked(cluster) == {}
    assert cluster.owners() == {1: "a"}
    assert owner(cluster, [a]) is a, "it comes back"
    assert not refuse(a)
    cluster.run(2 * TRIP)
    assert parked(cluster) == {0: UNREADABLE}
    (text,) = [advisory.text for _, advisory in a.advised("parked")]
    assert f"({SAID})" in text
    assert f"marshal set-position {cluster.group.name} {TOPIC}:0 --shift-by 0" in text
    assert a.may(a.claim(1))
    assert refuse(a, 1), "a user with nothing left learns it"


def test_a_partition_that_one_may_not_read_is_anothers() -> None:
    """D13: it is parked when all have tried, by the first that tries again; each of them said so in the log."""
    cluster = VirtualCluster(partitions=3)
    clients = cluster.team("a", "b", "c")
    tried = []
    for _ in range(4):
        assert parked(cluster) == {}
        tried.append(owner(cluster, clients))
        refuse(tried[-1])
    cluster.run(2 * TRIP)
    assert parked(cluster) == {0: UNREADABLE}
    assert len(set(tried[:3])) == 3
    assert [(r.from_, r.text) for _, r in cluster.records(Note) if r.kind == "unreadable"] == [(0, SAID)] * 3
    reasons = [r.reason for _, r in cluster.records(ReleasingPartition) if r.reason != "hand-over"]
    assert reasons == ["unreadable"] * 3 + [SAID]
    assert all(client.may(claim) for client in clients for claim in client.member.claims.values())


def test_one_that_can_read_it_keeps_it() -> None:
    """D13: and what was noted at another position says nothing."""
    cluster = VirtualCluster(partitions=1)
    clients = cluster.team("a", "b")
    first = owner(cluster, clients)
    refuse(first)
    second = owner(cluster, clients)
    assert second is not first
    second.deliver(second.claim(0), 0, 1).finish_range(0, 2)
    refuse(second)
    cluster.run(2 * TRIP)
    assert parked(cluster) == {}
    assert cluster.partition(0).position == 2


@pytest.mark.parametrize("moved", [True, False])
def test_once_an_admin_has_looked_everybody_may_try_again(moved: bool) -> None:
    """D13, F6.5: notes of before count no more."""
    cluster = VirtualCluster(partitions=1)
    clients = cluster.team("a", "b")
    for _ in clients:
        refuse(owner(cluster, clients))
    owner(cluster, clients)
    if moved:
        token = cluster.must(ReleaseGroup(-1, -1, 60_000))
        cluster.run_until(lambda: 0 not in cluster.owners())
        part = cluster.partition(0)
        cluster.must(SetPosition(token, (Move(TOPIC, 0, part.version, part.position),), True))
    refuse(owner(cluster, clients))
    cluster.run(2 * TRIP)
    assert parked(cluster) == ({} if moved else {0: UNREADABLE})
