"""A member whose fold is broken, among others: which ones notice, stop and continue (PROTOCOL.md G5 to G8)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from marshal_py.errors import Diverged
from marshal_py.protocol.claims import AtMostOnce
from marshal_py.protocol.fold.rationalizer import Verdict, apply
from marshal_py.protocol.fold.world import FOLD_VERSION, World
from marshal_py.protocol.member.member_state import first_difference
from marshal_py.protocol.wire.records import Checkpoint, ClaimingPartition, GroupConfig, Heartbeat, Note
from tests.support.virtual_cluster import GROUP, INTERVAL_MS, READ_MS, THIRD_MS, WRITE_MS, Client, VirtualCluster, tp

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
TRIP = WRITE_MS + READ_MS


def forgets(world: World, verdict: Verdict) -> None:
    """A broken rule: an accepted GroupConfig makes partition 0 lose its generation."""
    if verdict.accepted and isinstance(verdict.record, GroupConfig):
        group = world.groups[GROUP]
        partition = group.partitions[tp(0)]
        partition.generation += 1
        group.dirty.add(partition)


def plant(cluster: VirtualCluster, client: Client, always: bool) -> tuple[int, int]:
    """Breaks a client's fold, and lets the log show it: the first differing checkpoint, and when it was reached."""
    client.warp, client.warps_again = forgets, always
    cluster.broken.add(client.name)
    offset = cluster.must(GroupConfig(cluster.group.config_offset))
    checkpoint = offset // 16 * 16 + 16
    while len(cluster.values) < checkpoint:
        cluster.inject(Note(-1, "filler"))
    return checkpoint, cluster.now_ms


def release_one(cluster: VirtualCluster, client: Client) -> int:
    """One partition of a client becomes free, for any member that still claims."""
    claim = next(iter(client.member.claims.values()))
    claim.stop("test", cluster.now_ms)
    return claim.tp.partition


@pytest.mark.parametrize("always", [False, True])
def test_only_the_broken_one_of_three_stops(always: bool) -> None:
    """G7, G8: noticed within a checkpoint and a heartbeat, named with the first differing offset; others continue."""
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    checkpoint, planted_ms = plant(cluster, b, always)
    cluster.run_until(lambda: b.member.ended, 3 * I)
    for other in (a, c):
        first_ms, advised = other.advised("diverged")[0]
        assert (advised.offset, advised.text.split()[0]) == (checkpoint, "b")
        assert first_ms - planted_ms <= THIRD_MS + I // 10 + TRIP, "one heartbeat"
    assert isinstance(b.member.error, Diverged)
    assert (b.member.error.offset, b.member.error.group) == (checkpoint, GROUP)
    assert b.member.error.held != b.member.error.again
    assert ("nobody to its own" in str(b.member.error)) == always
    assert not b.member.claims
    cluster.run(6 * I)
    assert set(cluster.owners().values()) == {"a", "c"}
    assert len(cluster.owners()) == 12, "what the broken one held is claimed by the others"
    for other in (a, c):
        assert not other.member.ended
        assert not other.member.divergence.active
    kinds = [record.kind for _, record in cluster.records(Note) if record.kind == "diverged"]
    assert len(kinds) >= 2, "the log has it"


def test_two_members_that_differ_keep_their_partitions_and_claim_nothing() -> None:
    """G6, G8: neither knows which one is broken; when the accuser's session ends, the other claims again."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    plant(cluster, b, always=True)
    cluster.run(2 * I)
    assert a.member.divergence.active
    assert b.member.divergence.active
    owned = {name: set(client.owned) for name, client in (("a", a), ("b", b))}
    assert all(client.may(claim) for client in (a, b) for claim in client.member.claims.values())
    joined = cluster.now_ms
    release_one(cluster, a)
    cluster.run(4 * I)
    assert not a.sends(ClaimingPartition, joined)
    assert not b.sends(ClaimingPartition, joined)
    assert len(a.owned) == len(owned["a"]) - 1
    assert b.owned == owned["b"]
    for client in (a, b):
        times = [at for at, _ in client.refolds]
        assert len(times) >= 2
        assert all(later - earlier >= I for earlier, later in pairwise(times)), "once an interval"
    cluster.kill(b)
    cluster.run(4 * I)
    assert not a.member.divergence.active
    assert len(a.owned) == 12


def test_another_member_that_agrees_settles_it() -> None:
    """G8: and the odd one is not listened to again."""
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    plant(cluster, b, always=True)
    cluster.run_until(lambda: a.member.divergence.active, I)
    cluster.run_until(lambda: not a.member.divergence.active, I)
    advised = len(a.advised("diverged"))
    cluster.run(I // 2)
    assert len(a.advised("diverged")) == advised
    assert not c.member.ended


def test_the_longest_names_fit() -> None:
    """G6: a Note that names another client keeps its bounds with the longest client id."""
    cluster = VirtualCluster()
    long = "\U0001f600" * 63 + "abc"  # 255 bytes
    a, b = cluster.team("a", long)
    plant(cluster, b, always=True)
    cluster.run_until(lambda: a.advised("diverged"), I)
    cluster.run(I)
    assert not a.member.ended
    assert any(record.text.startswith("\U0001f600") for _, record in cluster.records(Note) if record.kind == "diverged")


def test_nothing_is_claimed_and_nothing_granted_meanwhile() -> None:
    """G6: neither partitions nor messages, while the second fold is awaited."""
    cluster = VirtualCluster(mode=2)
    a, b = cluster.team("a", "b")
    claim = next(iter(a.member.claims.values()))
    plant(cluster, b, always=True)
    a.fold_again = lambda at: None  # type: ignore[method-assign]  # the bytes cannot be read now
    cluster.run_until(lambda: a.member.divergence.active, I)
    assert isinstance(claim.tracker, AtMostOnce)
    claim.offer = (claim.tracker.delivered_to, claim.tracker.delivered_to + 5)
    assert not a.member.ask_grants(a.now).send
    cluster.run(2 * I)
    assert not a.member.divergence.confirmed
    assert len(a.refolds) >= 2, "asked again"
    assert not a.member.ended


def test_a_request_that_was_due_wakes_nobody_meanwhile() -> None:
    """G6: with a grant due, a tick that may not ask for it must not ask for another tick at once."""
    cluster = VirtualCluster(mode=2)
    a, b = cluster.team("a", "b")
    plant(cluster, b, always=True)
    a.fold_again = lambda at: None  # type: ignore[method-assign]  # the bytes cannot be read now
    cluster.run_until(lambda: a.member.divergence.active, I)
    a.member.rebalancer.grant_requests.due_ms = a.now.mono_ms
    for _ in range(3):
        a.member.request_tick()
        a.tick()
        assert a.member.deadline_ms > a.now.mono_ms
        cluster.run(THIRD_MS)


def test_what_is_compared() -> None:
    """G5: digests of this fold version, of checkpoints that are still known, of other client ids."""
    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    world, divergence = a.member.world, a.member.divergence
    at = world.chain_at
    held = world.digests_at(GROUP, at)
    assert held is not None
    state, chain = held
    for digest in (
        Checkpoint(at, state, chain, FOLD_VERSION),
        Checkpoint(at, state ^ 1, chain, FOLD_VERSION + 1),
        Checkpoint(at + 1, state ^ 1, chain, FOLD_VERSION),
        Checkpoint(at + 16, state ^ 1, chain, FOLD_VERSION),
        Checkpoint(0, state ^ 1, chain, FOLD_VERSION),
    ):
        divergence.compare(b.session, digest, a.now)
        assert not divergence.active
    divergence.compare(a.session, Checkpoint(at, state ^ 1, chain, FOLD_VERSION), a.now)
    assert not divergence.active, "of this very process"
    divergence.compare(b.session, Checkpoint(at, state, chain ^ 1, FOLD_VERSION), a.now)
    assert divergence.active, "the bytes themselves differ"


def test_only_so_many_checkpoints_are_kept() -> None:
    """G5: the last 4,096."""
    cluster = VirtualCluster()
    a, _ = cluster.team("a", "b")
    first = a.world.chain_at
    session = a.session
    while cluster.world.next_offset < first + 16 * 4_096 + 16:
        cluster.inject(Heartbeat(session, 1))
    world = World()
    world.watched.add(GROUP)
    for offset, value in enumerate(cluster.values):
        apply(world, offset, value)
    assert world.digests_at(GROUP, first) is None
    known = world.digests_at(GROUP, world.chain_at - 16 * 4_095)
    assert known is not None
    newest = world.digests_at(GROUP, world.chain_at)
    assert newest is not None
    assert world.checkpoints[GROUP] == Checkpoint(world.chain_at, *newest, FOLD_VERSION)
    assert first_difference(world, world, GROUP, world.chain_at) == -1


def test_one_broken_client_does_not_make_all_fold_again() -> None:
    """G6: a member that two others agree with neither stops nor folds again; the broken one ends.

    Its heartbeat comes last here, so everybody has.
    """
    cluster = VirtualCluster()
    *others, f = cluster.team("a", "b", "c", "d", "e", "f")
    assert f.session == 6
    plant(cluster, f, False)
    cluster.run_until(lambda: f.member.ended, 3 * I)
    assert isinstance(f.member.error, Diverged)
    assert f.refolds
    assert not [client.name for client in others if client.refolds or client.advised("diverged")]
    cluster.run(4 * I)
    assert {record.session for _, record in cluster.records(Note) if record.kind == "diverged"} == {6}, "its own word"
    assert all(len(client.owned) >= 2 for client in others), "they took over what it had"


def test_two_must_have_agreed_at_that_checkpoint() -> None:
    """G6: agreement before it, of one client alone, or of the accuser's own client id, settles nothing."""
    for digests in ([("b", 0), ("c", 0)], [("b", 16)], [("b", 16), ("d", 16)]):
        cluster = VirtualCluster()
        a, *_ = team = cluster.team("a", "b", "c", "d")
        names = {client.name: client.session for client in team}
        at = (
            cluster.world.checkpoints[GROUP].at if GROUP in cluster.world.checkpoints else a.world.checkpoints[GROUP].at
        )
        divergence, digest = a.member.divergence, a.world.checkpoints[GROUP]
        divergence._agreed.clear()
        for name, ahead in digests:
            divergence._agreed[name] = at - 16 + ahead
        divergence.compare(names["d"], Checkpoint(at, digest.state ^ 1, digest.chain, FOLD_VERSION), a.now)
        assert divergence.active
