"""Checks the settings of a group: which ones its policy takes, what they may be, and what may change later.

The fold accepts any GroupConfig; whoever writes one checks it here first, so that every way to create or change a group
refuses the same. The reasons are those of the designs of partitioned consumer groups and of priority groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from marshal_py.errors import InvalidOption
from marshal_py.protocol.assignment import OWN_POLICIES, POLICIES, RESTRICTED
from marshal_py.protocol.identity import check_id
from marshal_py.protocol.ready import MemberOptions
from marshal_py.protocol.records import AT_MOST_ONCE, MODE_NAMES, PARTITION_MAX, GroupConfig
from marshal_py.protocol.records import Mapping as MemberMapping

OWN_POLICY: Final = "own"  # the group names none: every consumer follows its own policy
PARTITIONED: Final = frozenset({"members", "blocks"})  # an admin says which members share the partitions
ONLY_PARTITIONED: Final = f"only the policies {' and '.join(sorted(PARTITIONED))}"
PRIORITY: Final = frozenset({"prioritized", "pinned", "overflow"})  # policies of priority groups
TIMEOUT_MS_MIN: Final = 1_000  # of a priority timeout: shorter than the shortest heartbeat interval says nothing
TIMEOUT_MS_MAX: Final = 86_400_000
EXPLICIT: Final = frozenset({"pinned", "overflow"})  # policies that need explicit acks
EXPLICIT_RULE: Final = "the policy {} needs explicit acks, which an at-most-once group does not have"
FAILOVER_MS_MIN: Final = 5_000  # the bounds of the design
FAILOVER_MS_MAX: Final = 3_600_000
GROUP_NAME: Final = re.compile(r"[A-Za-z0-9_/=-]{1,16}")  # of a priority group: the design's limited-term


def check(config: GroupConfig, named: Collection[str]) -> None:
    """Raises InvalidOption, which names the setting and the rule, if these settings do not belong together.

    `named`: the settings that somebody chose now. Others may have been set by a library that knows more than this one.
    """
    policy = config.policy
    if policy and policy not in POLICIES and policy not in RESTRICTED:
        raise InvalidOption("policy", policy, f"one of {', '.join(known_policies())}")
    if policy not in PARTITIONED:
        for name in ("max_members", "members", "mappings"):
            if name in named:
                raise InvalidOption(name, getattr(config, name), f"{ONLY_PARTITIONED} have it")
    else:
        _check_partitioned(config)
    if policy in PRIORITY:
        _check_priority_groups(config)
    if "priority_timeout_s" in named:
        _check_timeout(config)
    if "failover_s" in named:
        _check_failover(config)
    if "lag_weighted" in named and config.lag_weighted and policy != "balanced":
        raise InvalidOption("lag_weighted", True, "only the policy balanced has lag weights: name it, too")
    if policy not in PRIORITY and "priority_groups" in named:
        raise InvalidOption(
            "priority_groups",
            list(config.priority_groups),
            f"only the policies of priority groups have it: {', '.join(sorted(PRIORITY))}",
        )


def _check_timeout(config: GroupConfig) -> None:
    seconds = config.priority_timeout_ms / 1000
    if config.policy != "pinned":
        raise InvalidOption("priority_timeout_s", seconds, "only the policy pinned has it")
    if not TIMEOUT_MS_MIN <= config.priority_timeout_ms <= TIMEOUT_MS_MAX:
        raise InvalidOption(
            "priority_timeout_s", seconds, f"{TIMEOUT_MS_MIN // 1000} to {TIMEOUT_MS_MAX // 1000} seconds"
        )


def _check_failover(config: GroupConfig) -> None:
    seconds = config.failover_ms / 1000
    if config.policy != "overflow":
        raise InvalidOption("failover_s", seconds, "only the policy overflow has it")
    if seconds and not FAILOVER_MS_MIN <= config.failover_ms <= FAILOVER_MS_MAX:
        raise InvalidOption(
            "failover_s", seconds, f"{FAILOVER_MS_MIN // 1000} to {FAILOVER_MS_MAX // 1000} seconds, or 0 for never"
        )


def _check_priority_groups(config: GroupConfig) -> None:
    names = list(config.priority_groups)
    if len(names) != 1:
        raise InvalidOption(
            "priority_groups",
            names,
            f"the policy {config.policy} needs exactly one: name {'one alone' if names else 'it'}",
        )
    if not isinstance(names[0], str) or not GROUP_NAME.fullmatch(names[0]):
        raise InvalidOption("priority_groups", names[0], "1 to 16 of the characters A-Z a-z 0-9 - _ / =")
    _check_acks(config.policy, config.mode)


def _check_acks(policy: str, mode: int) -> None:
    if policy in EXPLICIT and mode == AT_MOST_ONCE:
        raise InvalidOption("delivery", MODE_NAMES[mode], EXPLICIT_RULE.format(policy))


def _check_partitioned(config: GroupConfig) -> None:
    if not 1 <= config.max_members <= PARTITION_MAX + 1:
        raise InvalidOption(
            "max_members",
            config.max_members,
            f"1 to {PARTITION_MAX + 1}: a partitioned group says to how many members its messages go at most",
        )
    if config.members and config.mappings:
        raise InvalidOption("mappings", _names(config), "a group has a list of members or mappings, never both")
    for each in config.members:
        check_id("member", each)
    if config.mappings:
        _check_mappings(config)


def _check_mappings(config: GroupConfig) -> None:
    """Checks that the mappings name each member once and each partition below max_members exactly once."""
    owner: dict[int, str] = {}
    seen: set[str] = set()
    for each in config.mappings:
        check_id("member", each.member)
        if each.member in seen:
            raise InvalidOption("mappings", each.member, "each member has one mapping")
        seen.add(each.member)
        for partition in each.partitions:
            if partition >= config.max_members:
                raise InvalidOption(
                    "mappings", partition, f"partitions are 0 to {config.max_members - 1}, as max_members says"
                )
            if partition in owner:
                both = f"{owner[partition]!r} and {each.member!r} both have it: only one may"
                twice = f"{each.member!r} has it twice"
                raise InvalidOption("mappings", partition, both if owner[partition] != each.member else twice)
            owner[partition] = each.member
    missing = next((number for number in range(config.max_members) if number not in owner), None)
    if missing is not None:
        raise InvalidOption("mappings", missing, "nobody has this partition: mappings name every one below max_members")


def check_change(before: GroupConfig, after: GroupConfig) -> None:
    """Raises InvalidOption if settings that were fixed when the group was created would change.

    `balanced`, `greedy` and "each consumer its own" replace each other at any time. Every other policy stays, and of a
    partitioned group everything but its members and mappings; priority groups are neither added nor removed, and of
    a pinned group the timeout alone can change, of an overflow group the failover time.
    """
    free = ("", *OWN_POLICIES)
    if before.policy != after.policy and not (before.policy in free and after.policy in free):
        raise InvalidOption(
            "policy",
            after.policy or OWN_POLICY,
            f"the policy of a group that is {before.policy or OWN_POLICY} cannot become this one: delete the group and "
            "create it again",
        )
    if before.policy in PARTITIONED and before.max_members != after.max_members:
        raise InvalidOption(
            "max_members",
            after.max_members,
            f"it is {before.max_members}, and only the members and the mappings of a partitioned group can change",
        )

    if before.policy in PRIORITY and before.priority_groups != after.priority_groups:
        raise InvalidOption(
            "priority_groups",
            list(after.priority_groups),
            f"it is {', '.join(before.priority_groups)}, and priority groups are not added to a group or removed",
        )


def check_consumer(group: str, config: GroupConfig, options: MemberOptions) -> None:
    """Raises InvalidOption if a consumer of this group does not say what its policy needs, or says what it lacks.

    In a partitioned group it names a member; in one with priority groups it names one of these.
    """
    _check_priority(group, config, options)
    _check_acks(config.policy, options.mode)
    if options.member and config.policy not in PARTITIONED:
        raise InvalidOption(
            "member", options.member, f"group {group!r} has {_chosen(config)}: {ONLY_PARTITIONED} obey it"
        )
    if config.policy == "pinned" and options.claims_max:
        raise InvalidOption("max_claims", options.claims_max, "under the policy pinned one consumer has everything")
    if config.policy in PARTITIONED and not options.member:
        names = config.members or tuple(each.member for each in config.mappings)
        raise InvalidOption(
            "member",
            None,
            f"group {group!r} has the policy {config.policy}, so each consumer works for a member: name one of "
            f"{', '.join(names) or 'those that `marshal members add` adds'}",
        )


def _check_priority(group: str, config: GroupConfig, options: MemberOptions) -> None:
    chosen = _chosen(config)
    for name, policy in (("priority", "prioritized"), ("min_pending", "overflow"), ("min_ack_pending", "overflow")):
        if getattr(options, name) and config.policy != policy:
            raise InvalidOption(name, getattr(options, name), f"group {group!r} has {chosen}: only {policy} obeys it")
    if config.policy in PRIORITY and options.priority_group not in config.priority_groups:
        raise InvalidOption(
            "priority_group",
            options.priority_group or None,
            f"group {group!r} has the policy {config.policy}, so each consumer names the priority group "
            f"{' or '.join(config.priority_groups)}",
        )
    if options.priority_group and config.policy not in PRIORITY:
        raise InvalidOption("priority_group", options.priority_group, f"group {group!r} has no priority groups")


def _chosen(config: GroupConfig) -> str:
    return f"the policy {config.policy}" if config.policy else "no policy in its settings"


def known_policies() -> tuple[str, ...]:
    """Returns the names of all policies that a group can have, and "own"."""
    return (*POLICIES, *RESTRICTED, OWN_POLICY)


def mappings_of(given: Mapping[str, object]) -> tuple[MemberMapping, ...]:
    """Returns the mappings of a record, sorted by member. `given`: member name -> partition numbers.

    Raises InvalidOption if a partition is no number that Kafka can have.
    """
    return tuple(MemberMapping(name, tuple(sorted(_partitions(given[name])))) for name in sorted(given))


def _partitions(given: object) -> Iterator[int]:
    for number in given if isinstance(given, list | tuple | set | frozenset | range) else [given]:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= PARTITION_MAX:
            raise InvalidOption("mappings", number, f"partitions are whole numbers from 0 to {PARTITION_MAX}")
        yield number


def _names(config: GroupConfig) -> list[str]:
    return [each.member for each in config.mappings]
