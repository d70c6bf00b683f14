"""A clean stop moves each partition once, however many stop at one time: PROTOCOL.md T16, A6."""

from __future__ import annotations

from collections import Counter

import pytest

from marshal_py.protocol.wire.records import ClaimingPartition, Leave, ReleasingPartition, StepDown
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, THIRD_MS, WRITE_MS, Client, VirtualCluster

NAMES = ("a", "b", "c", "d", "e")


def accepted(cluster: VirtualCluster, since: int) -> Counter[int]:
    """Claims since then, by partition."""
    return Counter(r.partition for v, r in cluster.records(ClaimingPartition, since) if v.accepted)


def refused(cluster: VirtualCluster, since: int) -> list[str]:
    return [v.reason for v, _ in cluster.records(ReleasingPartition, since) if not v.accepted]


def prepare_stop(*clients: Client) -> None:
    for client in clients:
        client.member.prepare_stop()
        client.due_ms = client.cluster.now_ms


def stop(*clients: Client) -> None:
    """All at one moment, as `stop()` does it."""
    for client in clients:
        client.member.leave(client.now, "stopped", 0)
        client.due_ms = client.cluster.now_ms


@pytest.mark.parametrize("policy", ["balanced", "greedy"])
def test_the_partitions_of_one_that_stops_move_once(policy: str) -> None:
    """A6: twelve partitions, five members, one stops: its partitions are claimed, each once, and no others."""
    cluster = VirtualCluster()
    team = cluster.team(*NAMES, policy=policy)
    had, begun = set(team[0].owned), len(cluster.values)
    stop(team[0])
    cluster.run(4 * INTERVAL_MS)
    assert accepted(cluster, begun) == Counter(had)
    assert not refused(cluster, begun)
    assert max(len(client.owned) for client in team[1:]) == 3


@pytest.mark.parametrize("retiring", [True, False])
@pytest.mark.parametrize("staying", [1, 2])
def test_several_that_stop_at_once_hand_over_to_those_that_stay(retiring: bool, staying: int) -> None:
    """A6: each partition of theirs is claimed once, where their marks have been read before they leave."""
    cluster = VirtualCluster()
    team = cluster.team(*NAMES)
    leavers, begun = team[staying:], len(cluster.values)
    had = Counter(number for client in leavers for number in client.owned)
    if retiring:
        prepare_stop(*leavers)
        cluster.run(THIRD_MS)
    stop(*leavers)
    cluster.run(4 * INTERVAL_MS)
    moved = accepted(cluster, begun)
    assert moved.keys() == had.keys()
    assert not refused(cluster, begun)
    assert not retiring or moved == had
    assert Counter(cluster.owners().values()).keys() == {client.name for client in team[:staying]}


@pytest.mark.parametrize("retiring", [True, False])
def test_if_all_stop_the_last_partitions_have_no_successor(retiring: bool) -> None:
    """A6, T16: nothing is claimed any more, no claim is lost, no Release refused; no Release names a marked session."""
    cluster = VirtualCluster()
    team = cluster.team(*NAMES)
    begun = len(cluster.values)
    if retiring:
        prepare_stop(*team)
        cluster.run(2 * (WRITE_MS + READ_MS))
    stop(*team)
    cluster.run(2 * INTERVAL_MS)
    assert not any(client.alive for client in team)
    assert not accepted(cluster, begun)
    assert not refused(cluster, begun)
    assert not [reason for client in team for _, _, reason in client.lost if reason != "stopped"]
    successors = {r.successor for _, r in cluster.records(ReleasingPartition, begun)}
    assert not retiring or successors == {-1}
    assert len([r for _, r in cluster.records(StepDown, begun)]) == (5 if retiring else 0)


def test_a_leave_waits_for_the_claims_that_were_sent() -> None:
    """T16: a member that is stopped with a claim under way reads its fate, releases what it won, and leaves then."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b")
    cluster.must(ReleasingPartition(b.session, b.member.claims[min(b.member.claims)].epoch, 0, a.session))
    cluster.run_until(lambda: len(a.sends(ClaimingPartition)) == 2)
    begun = len(cluster.values)
    stop(a)
    cluster.run(INTERVAL_MS)
    assert not a.alive
    assert not refused(cluster, begun)
    assert {reason for _, _, reason in a.lost} == {"stopped", "unwanted"}
    (left,) = [v.offset for v, _ in cluster.records(Leave, begun)]
    assert left > max(v.offset for v, _ in cluster.records(ReleasingPartition, begun))


def test_a_leave_waits_no_longer_than_an_interval() -> None:
    """T16: a claim that was lost is never read, so the Leave stops waiting for it."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b")
    cluster.must(ReleasingPartition(b.session, b.member.claims[min(b.member.claims)].epoch, 0, a.session))
    a.hold_writes()
    cluster.run_until(lambda: len(a.sends(ClaimingPartition)) == 2)
    cluster.run(WRITE_MS)
    a.release_writes(lose=True)
    stop(a)
    stopped_ms = cluster.now_ms
    cluster.run_until(lambda: not a.alive)
    assert INTERVAL_MS <= cluster.now_ms - stopped_ms <= INTERVAL_MS + THIRD_MS


def test_a_member_that_is_about_to_stop_claims_nothing() -> None:
    """A6: neither what is free nor what a target would take for it; and others do not wait for it."""
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    prepare_stop(b)
    c.prefetch_succeeds = a.prefetch_succeeds = False  # so that nothing is handed over meanwhile
    cluster.run(20)
    begun = len(cluster.values)
    claim = next(iter(c.member.claims.values()))
    cluster.kill(c)
    cluster.must(ReleasingPartition(c.session, claim.epoch, 0, b.session))
    cluster.run(THIRD_MS // 2)
    claims = [(v.accepted, r.session) for v, r in cluster.records(ClaimingPartition, begun)]
    assert claims == [(True, a.session)], "by the one that stays, at once"
