"""Says who is pinned in a group with the policy `pinned` (PROTOCOL.md A11), and since when. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from marshal_py.admin.views.group_info import PinInfo, PriorityGroupState
from marshal_py.errors import GroupMissing
from marshal_py.protocol.fold.policies import KNOWN, policy_of
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import candidate_order, restricted
from marshal_py.protocol.wire.fencing_token import Token
from marshal_py.protocol.wire.identity import NONE, PIN


def entries(group: Group, incarnation: bytes, pinned_ms: int | None) -> tuple[PriorityGroupState, ...]:
    """Returns the priority groups. `incarnation`: part of the pin's id. `pinned_ms`: of the claim of the pin, or
    None."""
    names = () if group.config is None else group.config.priority_groups
    known = group.partitions.get(PIN)
    if known is None or known.owner == NONE:
        return tuple(map(PriorityGroupState, names))
    pinned_id, pinned_ts = str(Token(incarnation, known.epoch)), _time(pinned_ms)
    return tuple(PriorityGroupState(name, pinned_id, pinned_ts) for name in names)


def _time(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def info(group: Group, incarnation: bytes, pinned_ms: int | None) -> PinInfo:
    """Returns who is pinned and who stands by, as `entries`. Raises GroupMissing for another policy."""
    check(group)
    owner = restricted.owner_of(group, PIN)
    (entry,) = entries(group, incarnation, pinned_ms)
    joins = {sid: group.sessions[sid].join for sid in candidate_order(group, ())}
    return PinInfo(
        group=group.name,
        priority_group=entry.name,
        pinned_id=entry.pinned_id,
        pinned_ts=entry.pinned_ts,
        session=owner if owner != NONE else None,
        client_id=joins[owner].client_id if owner != NONE else None,
        standbys=tuple(join.client_id for sid, join in joins.items() if sid != owner),
    )


def check(group: Group) -> None:
    """Raises GroupMissing if nobody can be pinned in the group, because it has another policy."""
    policy = policy_of(group.config)
    if not policy.pins:
        has = f"its policy is {policy.name}" if policy.name else "it has no policy in its settings"
        pinning = " and ".join(name for name, each in KNOWN.items() if each.pins)
        raise GroupMissing(group.name, f"pins nobody: {has}, and only {pinning} does")


def owner(group: Group) -> int:
    """Returns the session that is pinned. Raises GroupMissing if nobody is pinned, or the group has another policy."""
    check(group)
    found = restricted.owner_of(group, PIN)
    if found == NONE:
        raise GroupMissing(group.name, "has no pinned consumer")
    return found
