"""Simulated clusters whose clients keep their log short although a group of it has died."""

from __future__ import annotations

from random import Random

import pytest

from marshal_py.protocol.duties import Orphans, Presence
from marshal_py.protocol.wire.identity import Instant
from marshal_py.protocol.wire.records import Evict
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import TOPICS, GroupPlan, Options, draw
from marshal_sim.judge.auditor import judge

FEW, MANY = range(10, 18), range(40)  # keepers evict in 10, 13 and 17, and in two more of the many
KINDS = frozenset({"snapshots", "crash", "leave", "arrive", "outage"})


def test_a_dead_group_does_not_stop_truncation() -> None:
    """N14: the only client of a group is killed and never comes back; the others of the log evict it and truncate."""
    plan = draw(Random(1), Options(kinds=frozenset({"snapshots"}), calm=True, interval_ms=2_000, partitions=4))
    plan = plan._replace(groups=tuple(GroupPlan(name, 1, TOPICS[:1], "balanced") for name in ("billing", "audit")))
    cluster = Cluster(plan, Random(1))
    killed = cluster.add_client("audit", cluster.new_options(plan.groups[1], "killed"))
    cluster.run_until(plan.interval_ms)
    for name in ("a", "b"):
        cluster.add_client("billing", cluster.new_options(plan.groups[0], name))
    cluster.run_until(3 * plan.interval_ms)
    assert killed.member is not None
    orphan = killed.member.session
    assert orphan >= 0
    cluster.kill(killed)
    log = cluster.broker.logs[0]
    cluster.run_until(5 * plan.interval_ms)
    for client in cluster.living():
        assert orphan in client.world.groups["audit"].sessions
    cluster.run_until(200 * plan.interval_ms)
    assert log.first > orphan
    for client in cluster.living():
        assert not client.world.groups["audit"].sessions
    for evidence in cluster.close():
        assert judge(evidence).violations == []


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.proof)], ids=["few", "many"])
def test_no_seed_violates_an_invariant_while_groups_die(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """N14: keepers evict in some of these runs, and all promises hold."""
    sent: list[Evict] = []
    tick = Orphans.tick

    def watched(self: Orphans, now: Instant, me: Presence) -> list[tuple[str, Evict]]:
        evicts = tick(self, now, me)
        sent.extend(record for _, record in evicts)
        return evicts

    monkeypatch.setattr(Orphans, "tick", watched)
    results = [simulate(seed, Options(kinds=KINDS, clients=4)) for seed in seeds]
    assert {result.seed: result.violations[:2] for result in results if result.violations} == {}
    assert sent
