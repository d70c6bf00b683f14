"""Changes of a partitioned group's members, each computed from the settings as they are (PROTOCOL.md M13, A7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from marshal_py.client.values.group_config import Wanted
from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.policies import PARTITIONED
from marshal_py.protocol.wire.records import GroupConfig

Edit = Callable[[GroupConfig], Wanted]


def with_members(added: Iterable[str]) -> Edit:
    """Adds members to the list, unless they are there. Raises InvalidOption for a group with mappings."""
    names = list(added)

    def edit(config: GroupConfig) -> Wanted:
        _check_list(config, names)
        return {"members": [*config.members, *names]}

    return edit


def without_members(dropped: Iterable[str]) -> Edit:
    """Drops members from the list, if they are in it. Raises InvalidOption for a group with mappings."""
    names = list(dropped)

    def edit(config: GroupConfig) -> Wanted:
        _check_list(config, names)
        return {"members": [name for name in config.members if name not in names]}

    return edit


def with_mappings(mappings: Mapping[str, Iterable[int]]) -> Edit:
    """Sets the mappings, which take the place of the mappings or the list of members that the group has."""
    given = {name: list(partitions) for name, partitions in mappings.items()}

    def edit(config: GroupConfig) -> Wanted:
        _check_partitioned(config, "mappings", given)
        if not given:
            raise InvalidOption("mappings", given, "name every partition; to have none, delete the mappings")
        return {"members": [], "mappings": given}

    return edit


def without_mappings(config: GroupConfig) -> Wanted:
    """Deletes the mappings: nobody consumes until there are members or mappings. Raises InvalidOption without any."""
    _check_partitioned(config, "mappings", {})
    if not config.mappings:
        raise InvalidOption("mappings", {}, "the group has none that could be deleted")
    return {"mappings": {}}


def _check_partitioned(config: GroupConfig, option: str, value: object) -> None:
    if config.policy not in PARTITIONED:
        has = f"the policy {config.policy}" if config.policy else "no policy in its settings"
        raise InvalidOption(
            option,
            value,
            f"the group has {has}; only one with policy {' or '.join(sorted(PARTITIONED))} has members, and it gets "
            "that policy when it is created",
        )


def _check_list(config: GroupConfig, names: list[str]) -> None:
    _check_partitioned(config, "members", names)
    if config.mappings:
        raise InvalidOption("members", names, "the group has mappings: change these, or delete them first")
    if not names:
        raise InvalidOption("members", names, "name at least one member")
