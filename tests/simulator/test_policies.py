"""Every promise under the policies that restrict who may claim, while an admin changes the members."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from marshal_py.cli.app import app
from marshal_py.protocol.assignment.whole_topics import cover_owner
from marshal_py.protocol.group_settings import PARTITIONED, PRIORITY
from marshal_py.simulator.auditor_evidence import Delivery
from marshal_py.simulator.cluster import Cluster
from marshal_py.simulator.run import simulate
from marshal_py.simulator.scenario import Options
from marshal_py.simulator.schedule import Schedule, parse, text_of


@pytest.mark.parametrize("policy", sorted(PARTITIONED | PRIORITY))
def test_every_promise_holds(policy: str) -> None:
    results = [simulate(seed, Options(policy=policy)) for seed in range(20, 23)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.deliveries for result in results) > 100
    assert sum(result.takeovers + result.handovers for result in results) > 5


class Watched(Cluster):
    """A cluster that checks the cover rule at each delivery."""

    def delivered(self, delivery: Delivery) -> None:
        super().delivered(delivery)
        world = next(client for client in self.clients if client.number == delivery.client).world
        group = world.groups[delivery.group]
        claim = group.claims.get(delivery.epoch)
        if claim is not None:
            assert cover_owner(group, delivery.topic) == claim.owner, f"no cover for {delivery.key}"


def test_whole_topics_are_never_split() -> None:
    """A9: a delivery needs the partition and its cover, in what its client has read."""
    results = [simulate(seed, Options(policy="topic"), Watched) for seed in range(30, 36)]
    assert [(result.seed, result.violations) for result in results if result.violations] == []
    assert sum(result.takeovers + result.handovers for result in results) > 20


def test_a_seed_with_a_policy_can_be_kept_and_run_again() -> None:
    schedule = Schedule(4, Options(policy="blocks"))
    assert "policy blocks" in text_of(schedule)
    assert parse(text_of(schedule)) == schedule
    done = CliRunner().invoke(app, ["simulate", "--seeds", "20:22", "--policy", "members", "--json"])
    assert done.exit_code in (0, 1), done.output
    assert json.loads(done.stdout.splitlines()[-1])["violations"] == 0
    assert CliRunner().invoke(app, ["simulate", "--policy", "dice"]).exit_code == 2
