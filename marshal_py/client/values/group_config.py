"""The settings of a group by name, as programs and the command line give and read them, and their GroupConfig record.

A setting that is not named stays. Whether settings belong together is decided by protocol/member/group_settings.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.policies import OWN_POLICY
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import MODE_NAMES, MODES, ON_TOPIC_RECREATED
from marshal_py.protocol.wire.records import GroupConfig as ConfigRecord
from marshal_py.transport.option_names import constructor_checks_names, nearest

Wanted = Mapping[str, Any]  # setting -> its new value; check_settings says which there are

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "delivery": tuple(MODES),
    "policy": group_settings.known_policies(),
    "on_topic_recreated": ON_TOPIC_RECREATED,
}
SECONDS_MAX: Final = 10**9  # some 30 years
SECONDS_MIN: Final = 0.001  # less would become 0, which means something else
LISTS: Final = ("members", "priority_groups")  # of names
TIMES: Final = ("priority_timeout_s", "failover_s")
NAMES: Final = (*WORDS, "lag_weighted", "max_members", "mappings", *LISTS, *TIMES)


def check_settings(wanted: Wanted) -> dict[str, Any]:
    """Returns a copy of `wanted`.

    It may name `delivery`, `policy`, `on_topic_recreated`, `lag_weighted` (bool), `max_members` (int), `members` and
    `priority_groups` (lists of names), `mappings` (name -> list of partitions) and TIMES.
    Raises InvalidOption for any other name, and for a value that its setting cannot have.
    """
    for name, value in wanted.items():
        if name not in NAMES:
            advice = f"{nearest(name, NAMES)} ".lstrip()
            raise InvalidOption(name, value, f"{advice}settings of a group are {', '.join(NAMES)}")
        if name in WORDS and value not in WORDS[name]:
            raise InvalidOption(name, value, "one of " + ", ".join(WORDS[name]))
        if name == "lag_weighted" and not isinstance(value, bool):
            raise InvalidOption(name, value, "True or False")
        if name == "max_members" and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidOption(name, value, "a whole number")
        if name in LISTS and (isinstance(value, str) or not _has_names(value)):
            raise InvalidOption(name, value, "a list of names")
        if name == "mappings" and not (isinstance(value, Mapping) and _has_names(value)):
            raise InvalidOption(name, value, "a dict that has the partitions of each member by its name")
        if name in TIMES:
            _check_time(name, value)
    return dict(wanted)


def _has_names(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(one, str) for one in value)


def _check_time(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= SECONDS_MAX:
        raise InvalidOption(name, value, "a number of seconds")
    if 0 < value < SECONDS_MIN:
        raise InvalidOption(name, value, f"0, or at least {SECONDS_MIN:g} seconds: the log has whole milliseconds")


def base_of(group: Group | None) -> ConfigRecord:
    """Returns the settings that a change starts from: the group's own, or an empty record if the group is new or
    deleted.
    """
    if group is None or group.config is None or group.deleted:
        return ConfigRecord(NONE)
    return group.config


def settle(base: ConfigRecord, wanted: Wanted, observed: int, token: int, by: str) -> ConfigRecord:
    """Returns the record that sets what `wanted` names. Every other setting stays as in `base`, and so do fields that
    this release does not know.

    Raises InvalidOption if the settings do not belong together.
    """
    changed = _changed(base, wanted, observed, token, by)
    group_settings.check(changed, wanted)
    return changed


def _changed(base: ConfigRecord, wanted: Wanted, observed: int, token: int, by: str) -> ConfigRecord:
    policy = wanted.get("policy", base.policy)
    mode = MODES[wanted["delivery"]] if "delivery" in wanted else base.mode
    members, mappings = base.members, base.mappings
    if "members" in wanted:
        members = tuple(sorted(set(wanted["members"])))
    if "mappings" in wanted:
        mappings = group_settings.mappings_of(wanted["mappings"])
    return replace(
        base,
        observed=observed,
        token=token,
        deleted=False,
        mode=mode,
        by=by,
        policy="" if policy == OWN_POLICY else policy,
        on_topic_recreated=wanted.get("on_topic_recreated", base.on_topic_recreated),
        max_members=wanted.get("max_members", base.max_members),
        members=members,
        mappings=mappings,
        priority_groups=tuple(wanted.get("priority_groups", base.priority_groups)),
        priority_timeout_ms=round(1000 * wanted.get("priority_timeout_s", base.priority_timeout_ms / 1000)),
        failover_ms=round(1000 * wanted.get("failover_s", base.failover_ms / 1000)),
        lag_weighted=wanted.get("lag_weighted", base.lag_weighted),
    )


def check_wanted(group: Group | None, wanted: Wanted) -> None:
    """Raises InvalidOption if the group cannot have these settings, or cannot have them any more."""
    changed = _changed(base_of(group), wanted, NONE, NONE, "")
    if group is not None:  # first: what a policy needs is no way out where the group cannot have it
        group_settings.check_change(group.name, group.config, group.mode, changed)
    group_settings.check(changed, wanted)


def changes_mode(group: Group | None, wanted: Wanted) -> bool:
    """Returns whether `wanted` names a delivery and the group already has another one (F9.6)."""
    return group is not None and "delivery" in wanted and group.mode not in (0, MODES[wanted["delivery"]])


def settings_of(group: Group | None) -> dict[str, Any]:
    """Returns the group's settings by name; None for a setting that is not set.

    `max_members`, `members` and `mappings` are there for a partitioned group alone, and `lag_weighted` and
    `priority_groups` only where the policy has them.
    """
    if group is None or group.deleted:
        return {"delivery": None, "policy": None, "on_topic_recreated": None}
    return {"delivery": MODE_NAMES[group.mode] if group.mode else None, **_in_config(base_of(group))}


def differences(group: Group, wanted: Wanted) -> dict[str, tuple[Any, Any]]:
    """Returns (what the group has, what was asked for) by name, for each setting in which the group differs from one
    that is created with `wanted`. Raises InvalidOption if `wanted` cannot be.
    """
    has, asked = settings_of(group), settings_named(ConfigRecord(NONE), wanted)
    if "delivery" not in wanted and not base_of(group).mode:
        del has["delivery"]  # its first consumer has decided, and so it would be again
    pairs = {name: (has.get(name) or None, asked.get(name) or None) for name in {**asked, **has}}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def settings_named(base: ConfigRecord, wanted: Wanted) -> dict[str, Any]:
    """Returns the settings by name as `settings_of` would return them if `wanted` were set. Raises InvalidOption."""
    given = {"delivery": wanted["delivery"]} if "delivery" in wanted else {}
    return {**given, **_in_config(settle(base, wanted, NONE, NONE, ""))}


def _in_config(config: ConfigRecord) -> dict[str, Any]:
    return {
        "policy": config.policy or None,
        "on_topic_recreated": config.on_topic_recreated or None,
        **group_settings.settings_of(config),
    }


@constructor_checks_names()
@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Says how the consumers of a group share partitions. None leaves a setting as it is.

    `delivery`: "at_least_once" or "at_most_once"; if nobody sets it, the first consumer decides. `policy`: "balanced",
    "greedy", or "own", so that each consumer follows its own; "topic", so that each topic has one consumer; or
    "members" or "blocks", which go with `max_members` and either `members` (names) or `mappings` (name -> partitions);
    or "prioritized", "pinned" or "overflow", which go with `priority_groups` (a list of one name). All but the first
    three are for the group's whole life.
    `priority_timeout_s`: after how many seconds without a request of the pinned consumer another one is pinned; 120 if
    it is not set. `failover_s`: after how many seconds without a request of a consumer without conditions those with
    conditions get partitions under the policy overflow; 0, the default, is never. `lag_weighted`: whether the policy
    balanced shares the backlog, too, and not only the number of partitions.
    `on_topic_recreated`: what happens to the partitions of a topic that was deleted and created again; with "fail"
    nobody consumes them until somebody moves their positions, with "earliest" they are consumed from their beginnings.

    Raises InvalidOption.
    """

    delivery: str | None = None
    policy: str | None = None
    on_topic_recreated: str | None = None
    max_members: int | None = None
    members: Sequence[str] | None = None
    mappings: Mapping[str, Sequence[int]] | None = None
    priority_groups: Sequence[str] | None = None
    priority_timeout_s: float | None = None
    failover_s: float | None = None
    lag_weighted: bool | None = None

    def __post_init__(self) -> None:
        check_settings(self.named())

    def named(self) -> dict[str, Any]:
        """Returns the settings that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def record(self) -> ConfigRecord:
        """Returns the record that creates a group with these settings. Raises InvalidOption."""
        return settle(ConfigRecord(NONE), self.named(), NONE, NONE, "")

    def is_part_of(self, group: Group) -> bool:
        """Returns whether the group has these settings already."""
        named = self.named()
        known = settings_of(group)
        wanted = {**known, **settings_named(base_of(group), named)}
        return all(known.get(name) == wanted[name] for name in named)


EMPTY: Final = GroupConfig()
