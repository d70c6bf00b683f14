"""Which topics of a consumer its group did not have when it began: they may begin at their beginning (PROTOCOL.md D5).

A consumer asks when it joins, with the group as the log shows it then.
"""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import OFFSET_MAX
from marshal_py.protocol.wire.subscription import names_of


def new_topics(group: Group | None, topics: Sequence[str]) -> frozenset[str]:
    """Returns the consumer's topics that its group does not have yet; none if it has none of them, as a new group."""
    unknown = frozenset(topics) - (group.topics.keys() if group is not None else set())
    return unknown if len(unknown) < len(topics) else frozenset()


def found_later(group: Group | None, topics: tuple[str, ...], found: Sequence[str]) -> frozenset[str]:
    """Returns which topics came after the group began, of those that a consumer's patterns match when it joins (D5).

    They are those that the log does not know, while it knows other topics of the consumer, or members that found none;
    and those that became known after another topic of the consumer was claimed, as their finder may have died before it
    claimed them. `topics`: as in the Join. `found`: all topics that the consumer reads.
    """
    if group is None:
        return frozenset()
    named, known = names_of(topics), group.topics
    joined = bool(group.mode) and (group.config is None or not group.config.mode) and group.pause_change == NONE
    # A member reports what it has found before its first heartbeat.
    waited = joined and not known and all(session.extended > session.id for session in group.sessions.values())
    began = waited or any(topic in known for topic in found)
    claimed = sorted((p.version, tp.topic) for tp, p in group.partitions.items() if p.version != NONE)

    def is_later(topic: str) -> bool:
        if topic not in known:
            return began
        first = next((version for version, other in claimed if other != topic and other in found), OFFSET_MAX)
        return first < known[topic].offset

    return frozenset(topic for topic in found if topic not in named and is_later(topic))
