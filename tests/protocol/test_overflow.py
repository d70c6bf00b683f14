"""Policy `overflow`: consumers with conditions take part while much is pending (PROTOCOL.md A12)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from marshal_py.errors import InvalidOption
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.member.candidacy import LOOKS_LOW
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.member.waiting import unserved, why_idle
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    ClaimingPartition,
    GroupConfig,
    ReleasingPartition,
)
from tests.support.virtual_cluster import INTERVAL_MS, Client, VirtualCluster, tp

CONFIG = GroupConfig(NONE, policy="overflow", priority_groups=("jobs",))
FAILOVER_MS = 4 * INTERVAL_MS


class Overflow(VirtualCluster):
    """A group with the policy, and its producers and handlers."""

    def __init__(self, partitions: int = 4, failover_ms: int = 0) -> None:
        super().__init__(partitions=partitions)
        self.must(replace(CONFIG, failover_ms=failover_ms))

    def join(self, name: str, **options: Any) -> Client:
        client = self.add(name, priority_group="jobs", **options)
        self.run(2 * INTERVAL_MS)
        return client

    def pend(self, messages: int) -> None:
        """Has so many messages in each partition that nobody has handled."""
        for number in range(self.partitions):
            position = self.partition(number).position if tp(number) in self.group.partitions else 0
            self.ends[tp(number)] = max(0, position) + messages

    def moves(self) -> int:
        kinds = ClaimingPartition | ReleasingPartition
        return sum(verdict.accepted and isinstance(verdict.record, kinds) for verdict in self.verdicts)


def owned(*clients: Client) -> list[int]:
    return [len(client.member.claims) for client in clients]


def test_who_has_conditions_waits_until_one_is_met() -> None:
    """A12: only while `num_pending` is at least `min_pending`; until then it sits idle. The hand-over is as in A3.

    ADR-42: "only deliver messages when num_pending for the consumer is >= 1000" "otherwise those Pull requests will
    sit idle in the same way that they would if no messages were available"
    """
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    cluster.pend(249)
    cluster.run(6 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]
    assert remote.advisories == [] or not remote.prefetched
    cluster.pend(250)
    cluster.run(3 * INTERVAL_MS)
    assert owned(local, remote) == [2, 2]
    assert [record.reason for _, record in local.sends(ReleasingPartition)] == ["hand-over"] * 2


def test_it_hands_back_when_little_is_left() -> None:
    """A12: several looks in a row must find less than half."""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    cluster.pend(250)
    cluster.run(3 * INTERVAL_MS)
    cluster.pend(125)
    cluster.run(3 * LOOKS_LOW * INTERVAL_MS)
    assert owned(local, remote) == [2, 2], "half is enough to stay"
    cluster.pend(124)
    cluster.run((LOOKS_LOW - 2) * INTERVAL_MS)
    assert owned(local, remote) == [2, 2]
    cluster.run(6 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]
    before = cluster.moves()
    cluster.run(20 * INTERVAL_MS)
    assert cluster.moves() == before


def test_what_an_idle_consumer_waits_for() -> None:
    """Its conditions, with what the last look found; and that nobody else is given anything."""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    cluster.pend(15)
    cluster.run(2 * INTERVAL_MS)
    conditions = "its conditions, min_pending 1000 (the last look found 60 pending, 0 in flight)"
    assert (why_idle(local.member), why_idle(remote.member)) == ("", conditions)
    assert unserved(cluster.group) == {}
    cluster.kill(local)
    cluster.run_until(lambda: not cluster.owners())
    cluster.run(INTERVAL_MS)
    assert why_idle(remote.member).startswith(f"{conditions}; nobody else is given partitions: start a consumer")
    assert list(unserved(cluster.group)) == [tp(0).topic]
    cluster.pend(250)
    cluster.run(6 * INTERVAL_MS)
    assert (why_idle(remote.member), unserved(cluster.group)) == ("", {})


def test_figures_that_go_up_and_down_move_nothing() -> None:
    """A12: what is pending varies with every heartbeat under a steady load."""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    cluster.pend(300)
    cluster.run(3 * INTERVAL_MS)
    before = cluster.moves()
    for number in range(40):
        cluster.pend(0 if number % LOOKS_LOW else 300)
        cluster.run(INTERVAL_MS)
    assert owned(local, remote) == [2, 2]
    assert cluster.moves() == before


@pytest.mark.parametrize("min_pending", [0, 10_000])
def test_either_condition_suffices(min_pending: int) -> None:
    """A12: `min_pending` or `min_ack_pending`. What is delivered is not pending.

    ADR-42: "only deliver messages when ack_pending for the consumer is >= 1000" "If min_pending and min_ack_pending
    are both given either being satisfied will result in delivery (boolean OR)."
    """
    cluster = Overflow()
    local = cluster.join("local")
    remote = cluster.join("remote", min_ack_pending=3, min_pending=min_pending)
    cluster.pend(100)
    cluster.run(3 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]
    local.deliver(local.claim(0), 0, 1)
    local.deliver(local.claim(1), 0)
    cluster.run(4 * INTERVAL_MS)
    assert owned(local, remote) == [2, 2]


def test_delivered_messages_are_not_pending() -> None:
    """A12"""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=4)
    local.deliver(local.claim(0), 0)
    cluster.run(INTERVAL_MS)
    cluster.pend(1)
    cluster.run(5 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]


def test_the_unconditioned_come_first() -> None:
    """A12: with one partition, `min_pending` 1 is served only when no other pull waits.

    ADR-42: "this should only be served when there are no other pulls waiting." "we have to give priority to pulls
    without conditions over those with when considering the next pull that will receive a message."
    """
    cluster = Overflow(partitions=1)
    remote = cluster.add("remote", priority_group="jobs", min_pending=1)
    cluster.pend(5)
    cluster.run(4 * INTERVAL_MS)
    assert owned(remote) == [1], "nobody else is there"
    local = cluster.join("local")
    cluster.run(2 * INTERVAL_MS)
    assert owned(local, remote) == [1, 0]
    cluster.run(10 * INTERVAL_MS)
    assert owned(local, remote) == [1, 0]


def test_without_the_unconditioned_the_conditions_still_hold() -> None:
    """A12: nobody says how much is left where nobody owns anything, so the member looks it up."""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=100)
    cluster.kill(local)
    cluster.run(10 * INTERVAL_MS)
    assert owned(remote) == [0]
    assert cluster.owners() == {}
    cluster.pend(25)
    cluster.run(2 * INTERVAL_MS)
    assert owned(remote) == [4]
    cluster.pend(0)
    cluster.run((LOOKS_LOW + 2) * INTERVAL_MS)
    assert owned(remote) == [0]
    assert {record.reason for _, record in remote.sends(ReleasingPartition)} == {"unassigned"}


def test_partitions_that_nobody_without_conditions_can_take() -> None:
    """A12: who has its max_claims leaves the rest to those whose conditions are met."""
    cluster = Overflow()
    local, remote = cluster.join("local", claims_max=1), cluster.join("remote", min_pending=100)
    assert owned(local, remote) == [1, 0]
    cluster.pend(25)
    cluster.run(2 * INTERVAL_MS)
    assert owned(local, remote) == [1, 3]


def test_several_with_conditions_share() -> None:
    """A12"""
    cluster = Overflow(partitions=6)
    local = cluster.join("local")
    remote, far = cluster.join("remote", min_pending=60), cluster.join("far", min_pending=600)
    cluster.pend(10)
    cluster.run(4 * INTERVAL_MS)
    assert owned(local, remote, far) == [3, 3, 0]
    cluster.pend(100)
    cluster.run(4 * INTERVAL_MS)
    assert owned(local, remote, far) == [2, 2, 2]
    cluster.kill(local)
    cluster.run(6 * INTERVAL_MS)
    assert owned(remote, far) == [3, 3]


def test_failover_when_the_unconditioned_are_gone() -> None:
    """A12: after so many seconds without a request of them, conditions count no longer. They come first again."""
    cluster = Overflow(failover_ms=FAILOVER_MS)
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    cluster.kill(local)
    cluster.run(FAILOVER_MS)
    assert owned(remote) == [0], "from the eviction on"
    cluster.run(4 * INTERVAL_MS)
    assert owned(remote) == [4]
    cluster.run(20 * INTERVAL_MS)
    assert owned(remote) == [4], "as long as they are gone"
    local = cluster.join("local again")
    cluster.run(4 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]


def test_failover_when_the_unconditioned_do_not_ask() -> None:
    """A12: alive, but its user asks for no message."""
    cluster = Overflow(failover_ms=FAILOVER_MS)
    local = cluster.add("local", priority_group="jobs")
    local.member.asked = True
    remote = cluster.join("remote", min_pending=1000)
    assert owned(local, remote) == [4, 0]
    cluster.run(FAILOVER_MS)
    assert owned(local, remote) == [0, 4]
    cluster.run(10 * INTERVAL_MS)
    assert owned(local, remote) == [0, 4]
    local.member.asked = True
    cluster.run(4 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]


def test_without_failover_nobody_is_idle() -> None:
    """A12"""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    local.member.asked = True
    cluster.run(FAILOVER_MS + 10 * INTERVAL_MS)
    assert owned(local, remote) == [4, 0]
    assert cluster.group.sessions[local.session].idle_ms == 0


def test_an_unanswered_look_decides_nothing() -> None:
    """A12: while the cluster does not answer, everybody keeps what it has."""
    cluster = Overflow()
    local, remote = cluster.join("local"), cluster.join("remote", min_pending=1000)
    cluster.pend(250)
    cluster.run(3 * INTERVAL_MS)
    remote.resolves = False
    cluster.pend(0)
    cluster.run(4 * LOOKS_LOW * INTERVAL_MS)
    assert owned(local, remote) == [2, 2]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"priority_groups": ()}, "exactly one: name it"),
        ({"priority_groups": ("a", "b")}, "exactly one: name one alone"),
        ({"priority_groups": ("a b",)}, "1 to 16"),
        ({"mode": AT_MOST_ONCE}, "explicit acks"),
        ({"failover_ms": 4_999}, "5 to 3600"),
        ({"failover_ms": 3_600_001}, "5 to 3600"),
        ({"policy": "pinned", "failover_ms": 9_000}, "only the policy overflow has it"),
        ({"priority_timeout_ms": 9_000}, "only the policy pinned has it"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], reason: str) -> None:
    """A12"""
    named = (
        ["failover_s"] if "failover_ms" in settings else ["priority_timeout_s"] * ("priority_timeout_ms" in settings)
    )
    with pytest.raises(InvalidOption, match=reason):
        group_settings.check(replace(CONFIG, **settings), named)


def test_the_failover_time_alone_can_change() -> None:
    """A12

    ADR-42: "Today only the PriorityTimeout setting supports being updated."
    """
    group_settings.check_change("billing", CONFIG, 0, replace(CONFIG, failover_ms=5_000))
    for after in (replace(CONFIG, priority_groups=("b",)), replace(CONFIG, policy="prioritized")):
        with pytest.raises(InvalidOption):
            group_settings.check_change("billing", CONFIG, 0, after)


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (CONFIG, {"priority_group": "other"}, "names the priority group jobs"),
        (CONFIG, {"priority_group": ""}, "names the priority group jobs"),
        (CONFIG, {"mode": AT_MOST_ONCE}, "explicit acks"),
        (CONFIG, {"priority": 1}, "only prioritized obeys it"),
        (replace(CONFIG, policy="prioritized"), {"min_pending": 1}, "only overflow obeys it"),
        (
            GroupConfig(NONE),
            {"priority_group": "", "min_ack_pending": 1},
            "has no policy in its settings: only overflow obeys it",
        ),
    ],
)
def test_consumers_that_are_refused(config: GroupConfig, options: dict[str, Any], reason: str) -> None:
    """A12"""
    chosen: dict[str, Any] = {"client_id": "c", "mode": AT_LEAST_ONCE, "priority_group": "jobs", **options}
    with pytest.raises(InvalidOption, match=reason):
        group_settings.check_consumer("billing", config, MemberOptions(**chosen))
