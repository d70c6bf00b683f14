"""The settings of a group by name, as programs and the command line give and read them, and their GroupConfig record.

A setting that is not named stays. Whether settings belong together is decided by protocol/group_settings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.errors import InvalidOption
from marshal_py.protocol import group_settings
from marshal_py.protocol.group_settings import OWN_POLICY, PARTITIONED
from marshal_py.protocol.identity import NONE
from marshal_py.protocol.records import MODE_NAMES, MODES, ON_TOPIC_RECREATED, GroupConfig
from marshal_py.protocol.world import Group

Wanted = Mapping[str, Any]  # setting -> its new value; check_settings says which there are

WORDS: Final = {
    "delivery": tuple(MODES),
    "policy": group_settings.known_policies(),
    "on_topic_recreated": ON_TOPIC_RECREATED,
}
LIMIT_MAX: Final = 10**9  # far above what a request can use
# Limits of what one `fetch`, or one request of a `consume`, may ask for; 0 is no limit (client/group_limits.py).
LIMITS: Final = ("max_request_batch", "max_request_expires_s", "max_request_max_bytes")
NAMES: Final = (*WORDS, "max_members", "members", "mappings", *LIMITS)


def check_settings(wanted: Wanted) -> dict[str, Any]:
    """Returns a copy of `wanted`.

    It may name `delivery`, `policy`, `on_topic_recreated`, `max_members` (int), `members` (list of names), `mappings`
    (name -> list of partitions) and LIMITS. Raises InvalidOption for any other name, and for a value that its setting
    cannot have.
    """
    for name, value in wanted.items():
        if name not in NAMES:
            raise InvalidOption(name, value, "settings of a group are " + ", ".join(NAMES))
        if name in WORDS and value not in WORDS[name]:
            raise InvalidOption(name, value, "one of " + ", ".join(WORDS[name]))
        if name == "max_members" and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidOption(name, value, "a whole number")
        if name == "members" and isinstance(value, str):
            raise InvalidOption(name, value, "a list of names, not one string")
        if name in LIMITS:
            _check_limit(name, value)
    return dict(wanted)


def _check_limit(name: str, value: object) -> None:
    seconds = name == "max_request_expires_s"
    kinds = int | float if seconds else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= LIMIT_MAX:
        kind = "a number of seconds" if seconds else "a whole number"
        raise InvalidOption(name, value, f"{kind} from 0 (no limit) to {LIMIT_MAX}")


def limits_of(config: GroupConfig | None) -> dict[str, Any]:
    """Returns the limits of a group by name; None where there is no limit."""
    if config is None:
        return dict.fromkeys(LIMITS)
    values = (config.max_batch, config.max_expires_ms / 1000, config.max_bytes)
    return {name: value or None for name, value in zip(LIMITS, values, strict=True)}


def base_of(group: Group | None) -> GroupConfig:
    """Returns the settings that a change starts from: the group's own, or an empty GroupConfig if the group is new or
    deleted.
    """
    if group is None or group.config is None or group.deleted:
        return GroupConfig(NONE)
    return group.config


def settle(base: GroupConfig, wanted: Wanted, observed: int, token: int, by: str) -> GroupConfig:
    """Returns the record that sets what `wanted` names. Every other setting stays as in `base`, and so do fields that
    this release does not know.

    Raises InvalidOption if the settings do not belong together.
    """
    policy = wanted.get("policy", base.policy)
    mode = MODES[wanted["delivery"]] if "delivery" in wanted else base.mode
    members, mappings = base.members, base.mappings
    if "members" in wanted:
        members = tuple(sorted(set(wanted["members"])))
    if "mappings" in wanted:
        mappings = group_settings.mappings_of(wanted["mappings"])
    settled = replace(
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
        max_batch=wanted.get("max_request_batch", base.max_batch),
        max_expires_ms=round(1000 * wanted.get("max_request_expires_s", base.max_expires_ms / 1000)),
        max_bytes=wanted.get("max_request_max_bytes", base.max_bytes),
    )
    group_settings.check(settled, wanted)
    return settled


def check_wanted(group: Group | None, wanted: Wanted) -> None:
    """Raises InvalidOption if the group cannot have these settings, or cannot have them any more."""
    base = base_of(group)
    settled = settle(base, wanted, NONE, NONE, "")
    if group is not None and not group.deleted:
        group_settings.check_change(base, settled)


def changes_mode(group: Group | None, wanted: Wanted) -> bool:
    """Returns whether `wanted` names a delivery and the group already has another one (F9.6)."""
    return group is not None and "delivery" in wanted and group.mode not in (0, MODES[wanted["delivery"]])


def settings_of(group: Group | None) -> dict[str, Any]:
    """Returns the group's settings by name; None for a setting that is not set.

    `max_members`, `members` and `mappings` are there for a partitioned group alone.
    """
    if group is None or group.deleted:
        return {"delivery": None, "policy": None, "on_topic_recreated": None, **limits_of(None)}
    return {"delivery": MODE_NAMES[group.mode] if group.mode else None, **_in_config(base_of(group))}


def settings_named(base: GroupConfig, wanted: Wanted) -> dict[str, Any]:
    """Returns the settings by name as `settings_of` would return them if `wanted` were set. Raises InvalidOption."""
    given = {"delivery": wanted["delivery"]} if "delivery" in wanted else {}
    return {**given, **_in_config(settle(base, wanted, NONE, NONE, ""))}


def _in_config(config: GroupConfig) -> dict[str, Any]:
    return {
        "policy": config.policy or None,
        "on_topic_recreated": config.on_topic_recreated or None,
        **limits_of(config),
        **partitioned_of(config),
    }


def partitioned_of(config: GroupConfig) -> dict[str, Any]:
    """Returns the settings that only a partitioned group has, by name; nothing for another group."""
    if config.policy not in PARTITIONED:
        return {}
    return {
        "max_members": config.max_members,
        "members": list(config.members) or None,
        "mappings": {each.member: list(each.partitions) for each in config.mappings} or None,
    }


def origin_of(group: Group) -> dict[str, str | int] | None:
    """Returns the offset and the author of the record that set the settings; None if nobody set any."""
    return None if group.config is None else {"offset": group.config_offset, "by": group.config.by}


# --- changes of a partitioned group's members, each from the settings as they are

Edit = Callable[[GroupConfig], Wanted]


def with_members(added: Iterable[str]) -> Edit:
    """Adds members to the list. Raises InvalidOption for a group with mappings, or if the list has them all."""
    names = list(added)

    def edit(config: GroupConfig) -> Wanted:
        _check_list(config, names)
        new = [name for name in names if name not in config.members]
        if not new:
            raise InvalidOption("members", names, "the group has them already")
        return {"members": [*config.members, *new]}

    return edit


def without_members(dropped: Iterable[str]) -> Edit:
    """Drops members from the list. Raises InvalidOption for a group with mappings, or if one is not in the list."""
    names = list(dropped)

    def edit(config: GroupConfig) -> Wanted:
        _check_list(config, names)
        for name in names:
            if name not in config.members:
                raise InvalidOption("members", name, f"the members are {', '.join(config.members) or 'none'}")
        return {"members": [name for name in config.members if name not in names]}

    return edit


def with_mappings(mappings: Mapping[str, Iterable[int]]) -> Edit:
    """Sets the mappings, which take the place of the mappings or the list of members that the group has."""
    given = {name: list(partitions) for name, partitions in mappings.items()}

    def edit(config: GroupConfig) -> Wanted:
        _check_partitioned(config)
        if not given:
            raise InvalidOption("mappings", given, "name every partition; to have none, delete the mappings")
        return {"members": [], "mappings": given}

    return edit


def without_mappings(config: GroupConfig) -> Wanted:
    """Deletes the mappings: nobody consumes until there are members or mappings again. Raises InvalidOption if there
    are none.
    """
    _check_partitioned(config)
    if not config.mappings:
        raise InvalidOption("mappings", None, "the group has none")
    return {"mappings": {}}


def _check_partitioned(config: GroupConfig) -> None:
    if config.policy not in PARTITIONED:
        raise InvalidOption(
            "policy",
            config.policy or OWN_POLICY,
            f"only a group with policy {' or '.join(sorted(PARTITIONED))} has members; it gets that policy when it is "
            "created",
        )


def _check_list(config: GroupConfig, names: list[str]) -> None:
    _check_partitioned(config)
    if config.mappings:
        raise InvalidOption("members", names, "the group has mappings: change these, or delete them first")
    if not names:
        raise InvalidOption("members", names, "name at least one member")
