"""F1.7, F9.5, F9.11: what a group may be is what the log accepts. Every log here is folded by the oracle, too."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingPartition,
    GroupConfig,
    Heartbeat,
    Leave,
    ReleaseGroup,
    ReleasingPartition,
    Topology,
)
from tests.support.differential_log import DifferentialLog

SETTINGS: dict[str, GroupConfig] = {
    "": GroupConfig(-1),
    "greedy": GroupConfig(-1, policy="greedy"),
    "balanced": GroupConfig(-1, policy="balanced"),
    "topic": GroupConfig(-1, policy="topic"),
    "members": GroupConfig(-1, policy="members", max_members=4, members=("m1",)),
    "blocks": GroupConfig(-1, policy="blocks", max_members=4, members=("m1",)),
    "prioritized": GroupConfig(-1, policy="prioritized", priority_groups=("jobs",)),
    "pinned": GroupConfig(-1, policy="pinned", priority_groups=("jobs",)),
    "overflow": GroupConfig(-1, policy="overflow", priority_groups=("jobs",)),
}
PLAIN = ("", "greedy", "balanced", "topic")
PARTITIONED, PRIORITY = ("members", "blocks"), ("prioritized", "pinned", "overflow")
# the fields of a Join -> the policies that it fits
FITS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, PLAIN),
    ({"claims_max": 3, "mode": AT_MOST_ONCE}, PLAIN),
    ({"member": "m1"}, PARTITIONED),
    ({"member": "somebody", "mode": AT_MOST_ONCE, "claims_max": 1}, PARTITIONED),
    ({"priority_group": "jobs"}, PRIORITY),
    ({"priority_group": "other"}, ()),
    ({"priority_group": "jobs", "member": "m1"}, ()),
    ({"priority_group": "jobs", "priority": 1}, ("prioritized",)),
    ({"priority_group": "jobs", "mode": AT_MOST_ONCE}, ("prioritized",)),
    ({"priority_group": "jobs", "claims_max": 1}, ("prioritized", "overflow")),
    ({"priority_group": "jobs", "min_pending": 1}, ("overflow",)),
    ({"priority_group": "jobs", "min_ack_pending": 1}, ("overflow",)),
    ({"priority": 1}, ()),
    ({"min_pending": 1}, ()),
]


@pytest.mark.parametrize("policy", SETTINGS)
@pytest.mark.parametrize(("fields", "fitting"), FITS)
def test_a_join_that_fits(policy: str, fields: dict[str, Any], fitting: tuple[str, ...]) -> None:
    """F1.7: what each policy asks for and what it does not obey; `config`, and nothing has changed."""
    log = DifferentialLog()
    log.must(SETTINGS[policy])
    join = log.new_join(**fields)
    if policy in fitting:
        log.must(join)
    else:
        log.refuses(join, "config")
        assert not log.group.sessions


def test_a_join_without_settings_and_the_order_of_reasons() -> None:
    """F1.7: a group without a config has the policy ""; `config` comes after the other reasons."""
    log = DifferentialLog()
    log.refuses(log.new_join(member="m1"), "config")
    first = log.join("c")
    log.refuses(replace(log.new_join("d", member="m1"), instance_id=log.session(first).join.instance_id), "instance")
    log.refuses(log.new_join("d", mode=AT_MOST_ONCE, member="m1"), "mode")
    log.refuses(log.new_join("d", member="m1", predecessor=first), "predecessor")
    log.refuses(log.new_join("c", member="m1", predecessor=first), "config")
    assert list(log.group.sessions) == [first]


@pytest.mark.parametrize("policy", SETTINGS)
def test_whichever_comes_first_excludes_the_other(policy: str) -> None:
    """F9.11, F1.7: a Join of a consumer without settings and a first GroupConfig, in both orders."""
    created, joined = DifferentialLog(), DifferentialLog()
    created.must(SETTINGS[policy])
    plain = created.new_join()
    joined.join()
    if policy in PLAIN:
        created.must(plain)
    else:
        created.refuses(plain, "config")
    if policy in ("", "greedy", "balanced"):
        joined.must(SETTINGS[policy])
    else:
        joined.refuses(SETTINGS[policy], "lifelong")
    for log in (created, joined):
        log.world.check()


@pytest.mark.parametrize(("before", "after"), list(permutations(SETTINGS, 2)))
def test_the_policy_of_a_group(before: str, after: str) -> None:
    """F9.11: "", balanced and greedy replace each other, with or without members; any other policy stays."""
    log = DifferentialLog()
    config = log.must(SETTINGS[before])
    wanted = replace(SETTINGS[after], observed=config)
    if {before, after} <= {"", "balanced", "greedy"}:
        log.must(wanted)
    else:
        log.refuses(wanted, "lifelong")


def test_what_else_stays() -> None:
    """F9.11: max_members under members and blocks, priority_groups under the policies that have them; nothing else."""
    for policy, stays, changes in (
        ("members", {"max_members": 5}, {"members": ("m2",)}),
        ("blocks", {"max_members": 5}, {"priority_groups": ("jobs",)}),
        ("pinned", {"priority_groups": ("other",)}, {"priority_timeout_ms": 9_000}),
        ("overflow", {"priority_groups": ("jobs", "other")}, {"failover_ms": 9_000, "max_members": 7}),
        ("prioritized", {"priority_groups": ()}, {"max_batch": 9}),
    ):
        log = DifferentialLog()
        config = log.must(SETTINGS[policy])
        log.refuses(replace(SETTINGS[policy], observed=config, **stays), "lifelong")
        log.must(replace(SETTINGS[policy], observed=config, **changes))  # type: ignore[arg-type]


def test_when_a_group_has_begun() -> None:
    """F9.11: with a mode, even if nobody is left, or a config; a pause and a Topology begin nothing. Before F9.6."""
    log = DifferentialLog()
    log.topology()
    log.pause()
    used = log.must(SETTINGS["members"])
    log.refuses(replace(SETTINGS["pinned"], observed=used, mode=AT_MOST_ONCE), "lifelong")
    log = DifferentialLog()
    log.must(Leave(log.join()))
    log.refuses(SETTINGS["topic"], "lifelong")
    log.refuses(replace(SETTINGS["topic"], mode=AT_MOST_ONCE), "lifelong")
    log.refuses(replace(SETTINGS["greedy"], mode=AT_MOST_ONCE), "token")
    # A deletion asks for nothing, and what comes after it is a new group.
    deleted = log.must(GroupConfig(-1, deleted=True, policy="topic"))
    log.refuses(SETTINGS["pinned"], "observed")
    log.must(replace(SETTINGS["pinned"], observed=deleted))


def test_a_deletion_in_a_pause() -> None:
    """F9.5: `sessions`, `held`; then every session ends, the pause is over, and nothing of the group is left."""
    log = DifferentialLog()
    session, epoch = log.owner()
    other = log.join("d")
    log.claim(other, -1)
    log.refuses(GroupConfig(-1, -1, deleted=True), "sessions")
    log.refuses(GroupConfig(-1, log.group.pause_change, deleted=True), "sessions")
    token = log.pause()
    log.refuses(GroupConfig(-1, token - 1, deleted=True), "sessions")
    log.refuses(GroupConfig(-1, token, deleted=True), "held")
    log.release(session, epoch, 110)
    deletion = log.must(GroupConfig(-1, token, 2, deleted=True, policy="members"))
    group = log.group
    assert (group.sessions, group.topics, group.partitions, group.claims) == ({}, {}, {}, {})
    assert (group.mode, group.paused, group.pause_change, group.deleted_at) == (0, False, deletion, deletion)
    for late in (
        Heartbeat(session, 1),
        log.new_join(),
        ClaimingPartition(other, "t", 0, epoch, 0),
        Topology("t", 4, -1),
    ):
        log.refuses(late, "deleted")
    # Revived, the group takes neither copies of the deletion nor anything of the sessions that it ended.
    log.must(GroupConfig(deletion))
    log.refuses(GroupConfig(-1, token, deleted=True), "observed")
    log.refuses(ReleasingPartition(session, epoch, 120), "session")
    log.refuses(ReleaseGroup(token, token, 1_000), "observed")
    log.join()
    assert log.group.mode == 1
