"""Rows of groups and partitions, made by hand, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from marshal_py.admin.views.group_info import GroupHealth, MemberInfo, PartitionHealth


def health(group: str, **figures: Any) -> GroupHealth:
    """A group in which nothing is wrong."""
    well: dict[str, Any] = dict.fromkeys(GroupHealth.__struct_fields__, 0)
    well |= {"level": "ok", "findings": (), "notices": (), "causes": {}, "advisories": {}, "partitions": ()}
    well |= {"delivery": "at_least_once", "deleted": False, "pause": None, "oldest_s": None, "retention_s": None}
    return GroupHealth(**{**well, "group": group, **figures})


def partition(topic: str, number: int, session: int | None, **figures: Any) -> PartitionHealth:
    """A partition that `session` has read to its end."""
    well: dict[str, Any] = dict.fromkeys(PartitionHealth.__struct_fields__, 0)
    well |= {"topic": topic, "partition": number, "session": session, "parked": None, "oldest_s": None}
    well |= {
        "owner": None if session is None else f"worker-{session}",
        "retention_s": None,
        "position": 100,
        "end": 100,
    }
    return PartitionHealth(**{**well, **figures})


def member(session: int, **figures: Any) -> MemberInfo:
    """A consumer whose last sign of life was a moment ago."""
    well: dict[str, Any] = dict.fromkeys(MemberInfo.__struct_fields__)
    well |= {"session": session, "client_id": f"worker-{session}", "claims": (), "topics": (), "interval_s": 2.0}
    well |= {"state": "fresh", "last_sign_s": 0.4, "stepped_down": False}
    return MemberInfo(**{**well, **figures})
