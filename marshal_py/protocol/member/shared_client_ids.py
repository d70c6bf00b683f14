"""Finds live consumers of a group that use one client_id.

The log accepts that, because it tells consumers apart by session. But a name in an event, a metric or a command then
means two of them, and `fast_reclaim` would end the wrong one. Two sessions of one client_id alone prove nothing: a
process that died and was started again leaves its former session until others end it. But who is dead extends no
session. Two consumers of one Marshal share its client_id by right; the log does not tell, the Marshal does. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from marshal_py.protocol.fold.world import Session


def both_live(one: Session, other: Session) -> bool:
    """Returns whether both have one client_id, and both were extended after the younger one had joined."""
    return one.join.client_id == other.join.client_id and min(one.extended, other.extended) > max(one.id, other.id)


def shared(sessions: Iterable[Session]) -> dict[str, list[int]]:
    """Returns the client_ids that several of these sessions of a group use at one time, with these sessions."""
    by_name: dict[str, list[Session]] = {}
    for session in sessions:
        by_name.setdefault(session.join.client_id, []).append(session)
    found: dict[str, list[int]] = {}
    for name, each in by_name.items():
        beside = [one.id for one in each if any(one is not other and both_live(one, other) for other in each)]
        if beside:
            found[name] = sorted(beside)
    return found
