"""What each policy is: one value, which says what its groups and their consumers may say. Another policy is a value
here, and a function in protocol/policy.py that says who should own what.

The fold decides by these values which Joins fit a group, and which settings stay for its whole life (PROTOCOL.md F1.7,
F9.11). Whoever is about to send a Join or a GroupConfig asks the same beforehand, with words for its user
(protocol/member/group_settings.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from marshal_py.protocol.wire.records import AT_LEAST_ONCE, GroupConfig, Join

DEFAULT_POLICY: Final = "balanced"  # of a consumer, where neither its group nor itself names one
OWN_POLICY: Final = "own"  # in a setting: the group names none, and every consumer follows its own


class Policy(NamedTuple):
    """One policy of a group. `settings`: those that only its groups have, by their users' names. `options`: the fields
    of a Join that only its consumers may fill."""

    name: str
    own: bool = False  # a consumer may choose it for itself; such policies replace each other at any time (F9.11)
    moves: bool = False  # it takes partitions from live owners, although everybody may claim what is free (A3)
    releases: bool = False  # a consumer may give away what it falls behind on (D16)
    whole_topics: bool = False  # the claim of a whole topic is the cover of its partitions (A9)
    pins: bool = False  # the claim of the whole group is the cover of everything: one consumer has all (A11)
    explicit: bool = False  # it needs explicit acks, which an at-most-once group does not have
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def partitioned(self) -> bool:
        """Whether an admin says which members share the partitions (A7)."""
        return "member" in self.options

    @property
    def priority(self) -> bool:
        """Whether it is a policy of priority groups."""
        return "priority_group" in self.options

    @property
    def conditions(self) -> bool:
        """Whether consumers may name conditions on which they take part (A12)."""
        return "min_pending" in self.options


_MEMBERS: Final = ("max_members", "members", "mappings")

KNOWN: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy("balanced", own=True, moves=True, settings=("lag_weighted",)),
        Policy("greedy", own=True, releases=True),
        Policy("prioritized", moves=True, settings=("priority_groups",), options=("priority_group", "priority")),
        Policy("members", settings=_MEMBERS, options=("member",)),
        Policy("blocks", settings=_MEMBERS, options=("member",)),
        Policy("topic", whole_topics=True),
        Policy(
            "pinned",
            pins=True,
            explicit=True,
            settings=("priority_groups", "priority_timeout_s"),
            options=("priority_group",),
        ),
        Policy(
            "overflow",
            explicit=True,
            settings=("priority_groups", "failover_s"),
            options=("priority_group", "min_pending", "min_ack_pending"),
        ),
    )
}
_NONE: Final = Policy("", own=True)  # the group names none

PARTITIONED: Final = frozenset(name for name, policy in KNOWN.items() if policy.partitioned)
PRIORITY: Final = frozenset(name for name, policy in KNOWN.items() if policy.priority)
EXPLICIT: Final = frozenset(name for name, policy in KNOWN.items() if policy.explicit)
OWN_POLICIES: Final = tuple(name for name, policy in KNOWN.items() if policy.own)
RELEASING: Final = tuple(name for name, policy in KNOWN.items() if policy.releases)

LIFELONG: Final = ("policy", "max_members", "priority_groups")


def policy_named(name: str) -> Policy:
    """Returns the policy of this name. One that this release does not know has nothing but its name."""
    return KNOWN.get(name) or (Policy(name) if name else _NONE)


def policy_of(config: GroupConfig | None) -> Policy:
    """Returns the policy that a group's settings name. `config`: None if the group has no settings."""
    return _NONE if config is None else policy_named(config.policy)


def having(setting: str) -> tuple[str, ...]:
    """Returns the names of the policies that have this setting."""
    return tuple(name for name, policy in KNOWN.items() if setting in policy.settings)


def obeying(option: str) -> tuple[str, ...]:
    """Returns the names of the policies that obey this field of a Join."""
    return tuple(name for name, policy in KNOWN.items() if option in policy.options)


def misfit(config: GroupConfig | None, join: Join) -> str:
    """Returns the first field of the Join that the settings do not allow, or "" (F1.7). `config`: None without
    settings."""
    policy = policy_of(config)
    names = config.priority_groups if config is not None and policy.priority else ()
    faults = {
        "priority": join.priority and "priority" not in policy.options,
        "min_pending": join.min_pending and not policy.conditions,
        "min_ack_pending": join.min_ack_pending and not policy.conditions,
        "priority_group": join.priority_group not in (names or ("",)),
        "mode": join.mode != AT_LEAST_ONCE and policy.explicit,
        "member": bool(join.member) != policy.partitioned,
        "claims_max": join.claims_max and policy.pins,
    }
    return next((field for field, wrong in faults.items() if wrong), "")


def lifelong(config: GroupConfig | None, mode: int, after: GroupConfig) -> str:
    """Returns the field that `after` would change although it is for life, or "" (F9.11). `config`: the settings
    before, or None; `mode`: 0 if nobody has joined. A group with neither has not begun, and takes any settings."""
    if config is None or config.deleted:
        if not mode:
            return ""
        config = GroupConfig(-1)
    before = policy_of(config)
    if config.policy != after.policy and not (before.own and policy_of(after).own):
        return "policy"
    if before.partitioned and config.max_members != after.max_members:
        return "max_members"
    if before.priority and config.priority_groups != after.priority_groups:
        return "priority_groups"
    return ""
