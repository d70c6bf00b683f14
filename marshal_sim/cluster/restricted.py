"""Runs under a policy of the group's settings: which member a consumer works for, and how the settings change.

Every consumer brings the group's settings, and the first one creates the group (PROTOCOL.md A8). An admin changes the
list of members during the faults. When all is healed, each member has more consumers than will still depart, so that
every partition must be owned (V1 to V3). Under `prioritized` consumers of the first priority take two partitions each,
and there are as many of the others as of a member. So it is under `overflow`, where every third one has conditions; in
half of the groups these count no longer when the others are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.admin.plans.change import exists
from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.policies import DEFAULT_POLICY, PARTITIONED, PRIORITY, policy_named
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.policy import RESTRICTED
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.scenario import GroupPlan, Scenario

MEMBERS: Final = ("m1", "m2")
PRIORITY_GROUP: Final = "jobs"
INSTANCES: Final = 6  # of each member when all is healed: at most five clients depart afterwards
FAILOVER_INTERVALS: Final = 3
MIN_PENDING: Final = 6  # messages, which a stuck handler or a dead owner soon leaves
MIN_ACK_PENDING: Final = 2
BEHIND_INTERVALS: Final = 2  # over which a consumer must fall behind to release a partition (D16)
CHANGES: Final = 4  # of the list of members, during the faults


def options_of(options: MemberOptions, group: GroupPlan, scenario: Scenario) -> MemberOptions:
    """Returns the options of a new consumer as its group's policy needs them."""
    if group.policy in PRIORITY:
        number = int(options.client_id[1:])
        overflows, ranked = policy_named(group.policy).conditions, "priority" in policy_named(group.policy).options
        settings = GroupConfig(
            NONE,
            policy=group.policy,
            priority_groups=(PRIORITY_GROUP,),
            failover_ms=FAILOVER_INTERVALS * options.interval_ms if overflows and scenario.partitions % 2 else 0,
        )
        return replace(
            options,
            policy=DEFAULT_POLICY,
            group_config=settings,
            priority_group=PRIORITY_GROUP,
            priority=number % 3 if ranked else 0,
            claims_max=0 if number % 3 or not ranked else 2,
            min_pending=MIN_PENDING if overflows and number % 3 == 0 else 0,
            min_ack_pending=MIN_ACK_PENDING if overflows and number % 6 == 0 else 0,
        )
    if group.policy not in RESTRICTED:
        window_ms = BEHIND_INTERVALS * options.interval_ms if "behind" in scenario.kinds else 0
        return replace(options, release_behind_ms=window_ms)
    if group.policy not in PARTITIONED:
        return replace(options, policy=DEFAULT_POLICY, group_config=GroupConfig(NONE, policy=group.policy))
    member = MEMBERS[int(options.client_id[1:]) % len(MEMBERS)]
    settings = GroupConfig(NONE, policy=group.policy, max_members=scenario.partitions, members=MEMBERS)
    return replace(options, policy=DEFAULT_POLICY, member=member, group_config=settings)


def fitting(old: Client, options: MemberOptions, scenario: Scenario) -> MemberOptions:
    """Returns options that fit the group as `old` has last read it. Its operator learns that from the error."""
    if old.member is None or not isinstance(old.member.error, InvalidOption):
        return options
    group = old.world.groups.get(old.group)
    plan = next(plan for plan in scenario.groups if plan.name == old.group)
    if not exists(group):
        return of_policy(options, plan, plan.policy, scenario)
    policy = "" if group is None or group.config is None else group.config.policy
    return of_policy(options, plan, policy or DEFAULT_POLICY, scenario)


def of_policy(options: MemberOptions, group: GroupPlan, policy: str, scenario: Scenario) -> MemberOptions:
    """Returns the options that a consumer needs in a group with this policy."""
    plain = replace(
        options,
        policy=DEFAULT_POLICY,
        group_config=None,
        member="",
        priority_group="",
        priority=0,
        claims_max=0,
        min_pending=0,
        min_ack_pending=0,
    )
    return options_of(plain, group._replace(policy=policy), scenario)


def enough(group: GroupPlan, staying: Iterable[Client]) -> bool:
    """Returns whether a group has the consumers that it needs when all is healed."""
    here = [client.options for client in staying if client.group == group.name]
    if group.policy in PRIORITY:
        free = [one for one in here if not (one.claims_max or one.min_pending or one.min_ack_pending)]
        return len(free) >= INSTANCES
    members = [options.member for options in here]
    if group.policy not in PARTITIONED:
        return bool(members)
    return all(members.count(name) >= INSTANCES for name in MEMBERS)


def changed(config: GroupConfig, dropped: Collection[str]) -> dict[str, Any]:
    """Returns the settings that an admin wants: the list of members without `dropped`."""
    members = [name for name in MEMBERS if name not in dropped]
    return {"members": members} if config.policy in PARTITIONED else {}
