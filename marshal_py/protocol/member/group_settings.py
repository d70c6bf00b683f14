"""Checks the settings of a group: which ones its policy takes, what they may be, and what may change later.

What two records can contradict each other about, the fold decides by fold/policies.py; here is what it would say, with
the reasons for people. What one GroupConfig says is checked here alone, before it is written. The rules are those of
the designs of partitioned consumer groups and of priority groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.policies import (
    KNOWN,
    LIFELONG,
    OWN_POLICIES,
    OWN_POLICY,
    having,
    lifelong,
    misfit,
    obeying,
    policy_named,
    policy_of,
)
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.policy import TIMEOUT_MS
from marshal_py.protocol.wire.codec import SIGNED_VERSION
from marshal_py.protocol.wire.identity import NONE, check_id
from marshal_py.protocol.wire.records import AT_MOST_ONCE, INSTANCE_BYTES, MODE_NAMES, PARTITION_MAX, GroupConfig
from marshal_py.protocol.wire.records import Mapping as MemberMapping

TIMEOUT_MS_MIN: Final = 1_000  # of a priority timeout: shorter than the shortest heartbeat interval says nothing
TIMEOUT_MS_MAX: Final = 86_400_000
EXPLICIT_RULE: Final = "the policy {} needs explicit acks, which an at-most-once group does not have"
FAILOVER_MS_MIN: Final = 5_000  # the bounds of the design
FAILOVER_MS_MAX: Final = 3_600_000
GROUP_NAME: Final = re.compile(r"[A-Za-z0-9_/=-]{1,16}")  # of a priority group: the design's limited-term


def check(config: GroupConfig, named: Collection[str]) -> None:
    """Raises InvalidOption, naming setting and rule, if settings do not belong together. `named`: those that somebody
    chose now; the others may be of a library that knows more."""
    if config.policy and config.policy not in KNOWN:
        raise InvalidOption("policy", config.policy, f"one of {', '.join(known_policies())}")
    policy = policy_of(config)
    for name, value_of in SETTINGS.items():
        if name in named and name not in policy.settings and (value := value_of(config)) is not False:
            one, several = "has it: name it, too" if policy.own else "has it", "have it"
            raise InvalidOption(name, value, _only(having(name), one, several))
    if policy.partitioned:
        _check_partitioned(config)
    if policy.priority:
        _check_priority_groups(config)
    if "priority_timeout_s" in named:
        _check_timeout(config)
    if "failover_s" in named:
        _check_failover(config)


def _only(policies: Collection[str], one: str, several: str) -> str:
    """Returns "only the policy x has it", or the same of several: `one` and `several` are what they do."""
    *rest, last = sorted(policies)
    return f"only the policies {', '.join(rest)} and {last} {several}" if rest else f"only the policy {last} {one}"


def _check_timeout(config: GroupConfig) -> None:
    seconds = config.priority_timeout_ms / 1000
    if not TIMEOUT_MS_MIN <= config.priority_timeout_ms <= TIMEOUT_MS_MAX:
        raise InvalidOption(
            "priority_timeout_s", seconds, f"{TIMEOUT_MS_MIN // 1000} to {TIMEOUT_MS_MAX // 1000} seconds"
        )


def _check_failover(config: GroupConfig) -> None:
    seconds = config.failover_ms / 1000
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
    if policy_of(config).explicit and config.mode == AT_MOST_ONCE:
        raise InvalidOption("delivery", MODE_NAMES[config.mode], EXPLICIT_RULE.format(config.policy))


def _check_partitioned(config: GroupConfig) -> None:
    if not 1 <= config.max_members <= PARTITION_MAX + 1:
        raise InvalidOption(
            "max_members",
            config.max_members,
            f"1 to {PARTITION_MAX + 1}: a partitioned group says to how many members its messages go at most",
            given=config.max_members != 0,
        )
    if config.members and config.mappings:
        raise InvalidOption(
            "mappings",
            mappings_by_name(config),
            f"a group has a list of members or mappings, never both: its members are {', '.join(config.members)}",
        )
    for each in config.members:
        check_id("member", each)
    if config.mappings:
        _check_mappings(config)


def _check_mappings(config: GroupConfig) -> None:
    """Checks that the mappings name each member once and each partition below max_members exactly once."""
    said, owner, seen = mappings_by_name(config), dict[int, str](), set[str]()
    for each in config.mappings:
        check_id("member", each.member)
        if each.member in seen:
            raise InvalidOption("mappings", said, f"{each.member!r} is named twice: each member has one mapping")
        seen.add(each.member)
        for partition in each.partitions:
            if partition >= config.max_members:
                most = config.max_members - 1
                raise InvalidOption("mappings", said, f"{partition} is above {most}, max_members - 1")
            if partition in owner:
                both = f"{owner[partition]!r} and {each.member!r} both have partition {partition}: only one may"
                twice = f"{each.member!r} has partition {partition} twice"
                raise InvalidOption("mappings", said, both if owner[partition] != each.member else twice)
            owner[partition] = each.member
    missing = next((number for number in range(config.max_members) if number not in owner), None)
    if missing is not None:
        rule = f"nobody has partition {missing}: mappings name every one below max_members, which is "
        raise InvalidOption("mappings", said, f"{rule}{config.max_members}")


def check_change(group: str, config: GroupConfig | None, mode: int, after: GroupConfig) -> None:
    """Raises InvalidOption if settings for the group's life would change (F9.11). `config`: what it has, or None;
    `mode`: 0 if nobody has joined."""
    field = lifelong(config, mode, after)
    if field:
        advice = "use another group, or delete this one with its positions first"
        raise InvalidOption(field, _said(field, after), f"{_for_life(group, config, field)}: {advice}")


def check_readers(group: Group, after: GroupConfig) -> None:
    """Raises InvalidOption if the first keys would end live sessions that cannot verify signatures (F11.5)."""
    if after.admin_keys and not group.keys:
        old = [one.join.client_id for one in group.sessions.values() if one.join.reads_version < SIGNED_VERSION]
        if old:
            rule = f"{', '.join(sorted(old))} would stop: install marshal_py[keys] where they run, and restart them"
            raise InvalidOption("admin_keys", [key.hex() for key in after.admin_keys], rule)


def check_declared(group: str, config: GroupConfig | None, mode: int, declared: GroupConfig) -> None:
    """Raises InvalidOption if settings that a consumer names contradict those that the group has for its life."""
    known = config if config is not None else GroupConfig(NONE)
    named = {name: value for name in LIFELONG if (value := getattr(declared, name))}
    field = lifelong(config, mode, replace(known, **named))
    if field:
        advice = "name the same in group_config or leave it out, or use another group"
        raise InvalidOption(
            f"group_config.{field}", _said(field, declared), f"{_for_life(group, config, field)}: {advice}"
        )


def _said(field: str, config: GroupConfig) -> object:
    value = getattr(config, field)
    return (value or OWN_POLICY) if field == "policy" else list(value) if isinstance(value, tuple) else value


def _for_life(group: str, config: GroupConfig | None, field: str) -> str:
    """Returns what a group has for its whole life, in words. `config`: None if it has no settings."""
    if config is None or (field == "policy" and (not config.policy or policy_of(config).own)):
        has = f"the policy {config.policy}" if config is not None and config.policy else "no policy in its settings"
        return f"group {group!r} exists with {has}, so it can have {' or '.join(OWN_POLICIES)} alone"
    has = getattr(config, field)
    return f"group {group!r} has the {field} {', '.join(has) if isinstance(has, tuple) else has} for its whole life"


def check_consumer(group: str, config: GroupConfig | None, options: MemberOptions) -> None:
    """Raises InvalidOption if a consumer lacks what the group's policy needs, or says what it lacks. `config`: what the
    group has or gets from it, or None (F1.7)."""
    field = misfit(config, options.join(bytes(INSTANCE_BYTES), NONE))
    if not field:
        return
    settings = GroupConfig(NONE) if config is None else config
    value = MODE_NAMES[options.mode] if field == "mode" else getattr(options, field) or None
    option = {"mode": "delivery", "claims_max": "max_claims"}.get(field, field)
    missing = value is None
    raise InvalidOption(option, value, _unfit(group, settings, field, missing), given=not missing)


def _unfit(group: str, config: GroupConfig, field: str, missing: bool) -> str:
    """Returns the rule that a consumer breaks. `missing`: whether it lacks the option, which its policy asks for."""
    policy = config.policy
    chosen = f"the policy {policy}" if policy else "no policy in its settings"
    match field:
        case "priority" | "min_pending" | "min_ack_pending":
            return f"group {group!r} has {chosen}: only {' and '.join(obeying(field))} obeys it"
        case "priority_group" if policy_named(policy).priority:
            names = " or ".join(config.priority_groups)
            return f"group {group!r} has {chosen}, so each consumer names the priority group {names}"
        case "priority_group":
            return f"group {group!r} has {chosen}, so it has no priority groups: leave it out"
        case "mode":
            return f"group {group!r}: {EXPLICIT_RULE.format(policy)}"
        case "member" if missing:
            names = ", ".join(config.members or [each.member for each in config.mappings])
            return (
                f"group {group!r} has {chosen}, so each consumer works for a member: name one of "
                f"{names or 'those that `marshal groups update --add-member` adds'}"
            )
        case "member":
            return f"group {group!r} has {chosen}: {_only(obeying(field), 'obeys it', 'obey it')}"
    return f"group {group!r} has {chosen}, under which one consumer has everything: leave it out"


def known_policies() -> tuple[str, ...]:
    """Returns the names of all policies that a group can have, and "own"."""
    return (*KNOWN, OWN_POLICY)


def settings_of(config: GroupConfig) -> dict[str, Any]:
    """Returns the settings that only groups with this policy have, by the names that users know; None: not set."""
    return {name: SETTINGS[name](config) for name in policy_of(config).settings}


def mappings_of(given: Mapping[str, object]) -> tuple[MemberMapping, ...]:
    """Returns a record's mappings, sorted by member, of member name -> partition numbers. Raises InvalidOption for a
    number that Kafka cannot have."""
    return tuple(MemberMapping(name, tuple(sorted(_partitions(given[name])))) for name in sorted(given))


def _partitions(given: object) -> Iterator[int]:
    for number in given if isinstance(given, list | tuple | set | frozenset | range) else [given]:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= PARTITION_MAX:
            raise InvalidOption("mappings", number, f"partitions are whole numbers from 0 to {PARTITION_MAX}")
        yield number


def mappings_by_name(config: GroupConfig) -> dict[str, list[int]]:
    """Returns the mappings as people write them: member name -> partition numbers."""
    return {each.member: list(each.partitions) for each in config.mappings}


# How each setting that not every policy has is read, in the units that users know.
SETTINGS: Final[Mapping[str, Callable[[GroupConfig], Any]]] = {
    "max_members": lambda config: config.max_members,
    "members": lambda config: list(config.members) or None,
    "mappings": lambda config: mappings_by_name(config) or None,
    "priority_groups": lambda config: list(config.priority_groups),
    "priority_timeout_s": lambda config: (config.priority_timeout_ms or TIMEOUT_MS) / 1000,
    "failover_s": lambda config: config.failover_ms / 1000 or None,
    "lag_weighted": lambda config: config.lag_weighted,
}
