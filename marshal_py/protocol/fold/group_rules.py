"""Decides what a group may be: which Joins fit its settings, and which settings stay for its whole life (PROTOCOL.md
F1.7, F9.11).

The fold asks here, and so does whoever is about to send a Join or a GroupConfig: it then learns the same beforehand,
with the words for its user (group_settings.py).
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol.wire.records import AT_LEAST_ONCE, GroupConfig, Join

PARTITIONED: Final = frozenset({"members", "blocks"})  # an admin says which members share the partitions
PRIORITY: Final = frozenset({"prioritized", "pinned", "overflow"})  # policies of priority groups
EXPLICIT: Final = frozenset({"pinned", "overflow"})  # policies that need explicit acks
CHANGEABLE: Final = frozenset({"", "balanced", "greedy"})  # policies that replace each other at any time

LIFELONG: Final = ("policy", "max_members", "priority_groups")


def misfit(config: GroupConfig | None, join: Join) -> str:
    """Returns the first field of the Join that the group's settings do not allow; "" if the Join fits them (F1.7).

    `config`: None if the group has no settings.
    """
    policy = "" if config is None else config.policy
    names = config.priority_groups if config is not None and policy in PRIORITY else ()
    faults = {
        "priority": join.priority and policy != "prioritized",
        "min_pending": join.min_pending and policy != "overflow",
        "min_ack_pending": join.min_ack_pending and policy != "overflow",
        "priority_group": join.priority_group not in (names or ("",)),
        "mode": join.mode != AT_LEAST_ONCE and policy in EXPLICIT,
        "member": bool(join.member) != (policy in PARTITIONED),
        "claims_max": join.claims_max and policy == "pinned",
    }
    return next((field for field, wrong in faults.items() if wrong), "")


def lifelong(config: GroupConfig | None, mode: int, after: GroupConfig) -> str:
    """Returns the field that `after` would change although it is for the group's whole life; "" if none (F9.11).

    `config`: the settings before, None if there are none. `mode`: 0 if nobody has joined; a group with neither has not
    begun, and takes any settings.
    """
    if config is None or config.deleted:
        if not mode:
            return ""
        config = GroupConfig(-1)
    if config.policy != after.policy and not {config.policy, after.policy} <= CHANGEABLE:
        return "policy"
    if config.policy in PARTITIONED and config.max_members != after.max_members:
        return "max_members"
    if config.policy in PRIORITY and config.priority_groups != after.priority_groups:
        return "priority_groups"
    return ""
