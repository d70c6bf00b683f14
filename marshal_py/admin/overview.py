"""Groups and their members as JSON's types, for programs and people. Pure; the words are those of `marshal state`."""

from __future__ import annotations

from typing import Any

from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.records import MODE_NAMES
from marshal_py.protocol.world import Group, Session


def summary(group: Group) -> dict[str, Any]:
    """One line about a group."""
    return {
        "group": group.name,
        "delivery": MODE_NAMES[group.mode],
        "sessions": len(group.sessions),
        "topics": sorted(group.topics),
        "partitions": sum(topic.count for topic in group.topics.values()),
        "owned": sum(p.tp.partition >= 0 for p in group.claims.values()),
        "paused": group.paused,
        "deleted": group.deleted,
        "opaque": group.opaque_at != NONE,
    }


def info(group: Group) -> dict[str, Any]:
    """All about a group, but what only the cluster knows."""
    config = group.config
    return {
        **summary(group),
        "policy": (config.policy if config is not None else "") or None,
        "pause": {"token": group.pause_change, "duration_s": group.pause_duration_ms / 1000} if group.paused else None,
        "topics": {name: topic.count for name, topic in sorted(group.topics.items())},
        "members": members(group),
        "positions": [
            {
                "topic": p.tp.topic,
                "partition": p.tp.partition,
                "position": p.position if p.position != NONE else None,
                "generation": p.generation,
                "owner": p.owner if p.owner != NONE else None,
            }
            for p in sorted(group.partitions.values(), key=lambda p: p.tp)
            if p.tp.partition >= 0
        ],
    }


def members(group: Group) -> list[dict[str, Any]]:
    """Live sessions, in the order in which they are candidates (F9.9)."""
    return [_member(group, session) for session in sorted(group.sessions.values(), key=_rank)]


def _rank(session: Session) -> tuple[bool, int, int, int, int]:
    return (session.mark != NONE, session.mark, session.join.priority, session.join.rank, session.id)


def _member(group: Group, session: Session) -> dict[str, Any]:
    return {
        "group": group.name,
        "session": session.id,
        "client_id": session.join.client_id,
        "member": session.join.member or None,
        "library": session.join.library,
        "interval_s": session.join.interval_ms / 1000,
        "claims": sorted(str(group.claims[epoch].tp) for epoch in session.epochs),
        "stepped_down": session.mark != NONE,
    }


def positions(group: Group) -> dict[TopicPartition, int]:
    """Every position that the group has."""
    return {tp: p.position for tp, p in group.partitions.items() if tp.partition >= 0 and p.position != NONE}
