"""Says who is pinned in a group with the policy `pinned` (PROTOCOL.md A11), in JSON's types. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from marshal_py.errors import GroupMissing, InvalidOption
from marshal_py.protocol.assignment import candidate_order, covering
from marshal_py.protocol.group_settings import OWN_POLICY
from marshal_py.protocol.identity import NONE, PIN, Token
from marshal_py.protocol.world import Group


def entries(group: Group, incarnation: bytes, pinned_ms: int | None) -> list[dict[str, Any]]:
    """Returns the priority groups, each as the field PriorityGroups of NATS has it; the pin only if somebody has it.

    `pinned_ms`: the time of the record that claimed the pin, in ms since 1970; None if it is not known.
    """
    names = () if group.config is None else group.config.priority_groups
    known, pin = group.partitions.get(PIN), dict[str, Any]()
    if known is not None and known.owner != NONE:
        pin = {"pinned_id": str(Token(incarnation, known.epoch)), "pinned_ts": _time(pinned_ms)}
    return [{"name": name, **pin} for name in names]


def _time(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def info(group: Group, incarnation: bytes, pinned_ms: int | None) -> dict[str, Any]:
    """Returns who is pinned, under which id and since when, and who stands by, the next one first.

    Raises InvalidOption if the group has another policy.
    """
    check(group)
    owner = covering.owner_of(group, PIN)
    (entry,) = entries(group, incarnation, pinned_ms)
    joins = {sid: group.sessions[sid].join for sid in candidate_order(group, ())}
    return {
        "group": group.name,
        "priority_group": entry["name"],
        "pinned_id": entry.get("pinned_id"),
        "pinned_ts": entry.get("pinned_ts"),
        "session": owner if owner != NONE else None,
        "client_id": joins[owner].client_id if owner != NONE else None,
        "standbys": [join.client_id for sid, join in joins.items() if sid != owner],
    }


def check(group: Group) -> None:
    """Raises InvalidOption if nobody can be pinned in the group, because it has another policy."""
    policy = group.config.policy if group.config is not None else ""
    if policy != "pinned":
        raise InvalidOption("policy", policy or OWN_POLICY, f"group {group.name!r} pins nobody: only pinned does")


def owner(group: Group) -> int:
    """Returns the session that is pinned. Raises InvalidOption if the group has another policy, GroupMissing if nobody
    is pinned.
    """
    check(group)
    found = covering.owner_of(group, PIN)
    if found == NONE:
        raise GroupMissing(group.name, "has no pinned consumer")
    return found
