"""The cost of one tick and one record in a large group, counted and not timed (PROTOCOL.md A2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from marshal_py.protocol.claims import Claim, ClaimPhase
from marshal_py.protocol.member import candidacy, rebalance
from marshal_py.protocol.wire.records import ClaimingPartition, Heartbeat, Join, Leave, ReleasingPartition
from tests.support.virtual_cluster import INTERVAL_MS, READ_MS, THIRD_MS, TOPIC, WRITE_MS, VirtualCluster

STEP_MS = INTERVAL_MS // 10
AT_ONCE = 3


@pytest.mark.parametrize("resolves", [True, False])
def test_a_burst_of_records_is_looked_at_once_in_a_step(monkeypatch: pytest.MonkeyPatch, resolves: bool) -> None:
    """A2: in a large group, claimed or not yet, order and target are looked at once in a tenth of an interval.

    What changes after a quiet time is looked at immediately.
    """
    monkeypatch.setattr(candidacy, "REFRESH_AT_ONCE_MAX", 12)
    cluster = VirtualCluster()
    a = cluster.add("a")
    a.resolves = resolves
    cluster.run(3 * INTERVAL_MS)
    assert bool(a.owned) is resolves
    revision, seen = a.member.candidacy.revision, a.member.candidacy
    cluster.run(STEP_MS)
    for number in range(STEP_MS):
        cluster.must(Join(f"guest {number}", number.to_bytes(16, "big"), 1, INTERVAL_MS, (TOPIC,)))
        cluster.run(1)
        if number == READ_MS + 1:
            assert seen.revision == revision + 1, "the first change after a quiet time"
            assert seen.outdated
    assert seen.revision <= revision + 2
    cluster.run(STEP_MS)
    assert not seen.outdated
    assert len(seen.order) == 1 + STEP_MS


def test_a_large_group_comes_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A2, A3: members that look seldom share out evenly, take over from the dead and hand over to newcomers."""
    monkeypatch.setattr(candidacy, "REFRESH_AT_ONCE_MAX", 0)
    cluster = VirtualCluster()
    a, b, c = cluster.team("a", "b", "c")
    assert [len(client.owned) for client in (a, b, c)] == [4, 4, 4]
    cluster.kill(b)
    cluster.run(4 * INTERVAL_MS)
    assert [len(client.owned) for client in (a, c)] == [6, 6]
    d = cluster.add("d")
    cluster.run(3 * INTERVAL_MS)
    assert [len(client.owned) for client in (a, c, d)] == [4, 4, 4]
    assert not [claim for client in (a, c) for _, claim, reason in client.lost if reason != "hand-over"]


def test_many_claims_and_releases_are_spread_over_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A2: a tick sends but so many; the next one follows at once, and a heartbeat goes out with each that is due."""
    monkeypatch.setattr(rebalance, "SENT_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(rebalance, "SENT_AT_ONCE", AT_ONCE)
    cluster = VirtualCluster()
    a = cluster.add("a")
    cluster.run_until(lambda: len(a.owned) == 12, INTERVAL_MS)
    times = [at for at, _ in a.sends(ClaimingPartition)]
    assert len(times) == 12
    assert max(times.count(at) for at in times) == AT_ONCE
    assert times[-1] - times[0] <= 12 // AT_ONCE
    cluster.run(INTERVAL_MS)
    a.member.leave(a.now, "stopped", 0)
    a.due_ms = cluster.now_ms
    cluster.run(10 + WRITE_MS + READ_MS)
    times = [at for at, _ in a.sends(ReleasingPartition)]
    assert len(times) == 12
    assert max(times.count(at) for at in times) == AT_ONCE
    assert a.member.ended
    assert [verdict.outcome for verdict, _ in cluster.records(ReleasingPartition)] == [0] * 12
    (left,) = [verdict.offset for verdict, _ in cluster.records(Leave)]
    assert left > max(verdict.offset for verdict, _ in cluster.records(ReleasingPartition)), "the Leave follows them"
    beats = [at for at, _ in a.sends(Heartbeat)]
    assert max(after - before for before, after in pairwise(beats)) <= THIRD_MS


def test_reading_what_is_not_its_own_walks_through_no_claims() -> None:
    """T17: a record that changes the shape of the world costs the same however many partitions the reader owns."""
    walked = 0

    class Counted(dict[int, Claim]):
        def values(self) -> Iterator[Claim]:  # type: ignore[override]
            nonlocal walked
            walked += 1
            return iter(super().values())

    cluster = VirtualCluster()
    a, b = cluster.team("a", "b")
    a.member.claims = Counted(a.member.claims)
    claim = next(iter(b.member.claims.values()))
    cluster.must(ReleasingPartition(b.session, claim.epoch, 0))
    own = a.member.claims[next(iter(a.member.claims))]
    own.seal(ClaimPhase.RELEASING)
    cluster.must(ReleasingPartition(a.session, own.epoch, 0))
    cluster.must(Join("guest", bytes(16), 1, INTERVAL_MS, (TOPIC,)))
    cluster.now_ms += READ_MS
    assert a.read()
    assert walked == 0
    assert own.phase is ClaimPhase.GONE
    assert len(a.member.claims) == 5
