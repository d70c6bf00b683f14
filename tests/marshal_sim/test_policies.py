"""Every promise under the policies that restrict who may claim, while an admin changes the members."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from marshal_py.protocol.fold import world
from marshal_py.protocol.fold.policies import PARTITIONED, PRIORITY
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig
from marshal_sim.cluster.cluster import Cluster
from marshal_sim.cluster.run import simulate
from marshal_sim.cluster.scenario import GroupPlan, Options
from marshal_sim.tools.schedule import Schedule, parse, text_of
from tests.support.command_line import invoke
from tests.support.partly import PARTLY

KINDS_BEHIND = frozenset({"slow_handler", "crash", "arrive", "lag", "drop"})


@PARTLY
@pytest.mark.parametrize("policy", sorted(PARTITIONED | PRIORITY))
def test_every_promise_holds(policy: str, part: int) -> None:
    results = [simulate(seed, Options(policy=policy)) for seed in range(21, 21 + 4 // part)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.deliveries for result in results) > 100
    assert sum(result.takeovers + result.handovers for result in results) > 5


@PARTLY
def test_members_with_patterns_keep_every_promise(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A13: each pattern matches one topic, so all that is promised of members that name it is promised of these."""
    named = Cluster.new_options

    def with_patterns(cluster: Cluster, group: GroupPlan, name: str) -> MemberOptions:
        options = named(cluster, group, name)
        return structs.replace(options, topics=tuple(f"{topic}*" for topic in options.topics))

    monkeypatch.setattr(Cluster, "new_options", with_patterns)
    results = [simulate(seed) for seed in range(6 // part)] + [simulate(30, Options(policy="topic"))]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.takeovers + result.handovers for result in results) > 20 // part


@PARTLY
def test_lag_weights_break_no_promise(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A14: the runs have few messages, so here a lag of one counts already."""
    named = Cluster.new_options

    def weighted(cluster: Cluster, group: GroupPlan, name: str) -> MemberOptions:
        settings = GroupConfig(NONE, policy="balanced", lag_weighted=True)
        return structs.replace(named(cluster, group, name), policy="balanced", group_config=settings)

    monkeypatch.setattr(Cluster, "new_options", weighted)
    monkeypatch.setattr(world, "LAG_BITS", 0)
    options = Options(clients=3, partitions=8, kinds=KINDS_BEHIND, intervals=8)
    results = [simulate(seed, options) for seed in range(12 // part)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    weighted_moves = [result.handovers for result in results]
    monkeypatch.setattr(world, "LAG_BITS", 64)
    assert weighted_moves != [simulate(seed, options).handovers for seed in range(12 // part)], (
        "the weights move something"
    )


@PARTLY
def test_whole_topics_are_never_split(part: int) -> None:
    """A9: a delivery needs the partition and its cover, in what its client has read (S2)."""
    results = [simulate(seed, Options(policy="topic")) for seed in range(30, 30 + 6 // part)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.takeovers + result.handovers for result in results) > 20 // part


def test_who_falls_behind_gives_up_partitions_and_breaks_no_promise() -> None:
    """D16: safety, progress, and one partition per window (V13)."""
    results = [simulate(seed, Options(behind=1, kinds=KINDS_BEHIND, partitions=6, clients=3)) for seed in range(4)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.advisories.get("revoking", 0) for result in results) > 3
    done = invoke(["simulate", "--seed", "3", "--behind", "--json"])
    assert json.loads(done.stdout.splitlines()[-1])["violations"] == [], done.output


def test_a_seed_with_a_policy_can_be_kept_and_run_again() -> None:
    schedule = Schedule(4, Options(policy="blocks"))
    assert "policy blocks" in text_of(schedule)
    assert parse(text_of(schedule)) == schedule
    done = invoke(["simulate", "--seeds", "21:23", "--policy", "members", "--json"])
    assert done.exit_code in (0, 1), done.output
    assert json.loads(done.stdout.splitlines()[-1])["violations"] == 0
    assert invoke(["simulate", "--policy", "dice"]).exit_code == 2
