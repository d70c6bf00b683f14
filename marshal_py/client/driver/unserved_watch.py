"""Notices when a group's settings leave a consumer, or partitions of its topics, without the other (`unserved`).

A consumer that waits for nothing but an admin would else be silent. It looks again when the log has changed who is in
the group, its topics or its settings, which is when `marshal advisories` looks, too. Called with the Marshal's lock
held.
"""

from __future__ import annotations

from collections.abc import Iterator

from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.waiting import lasting, may_be_unserved
from marshal_py.protocol.wire.identity import NONE


class UnservedWatch:
    """Watches the group of one member."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._known: dict[tuple[str, str, tuple[int, ...]], str] = {}

    def look(self, member: Member) -> Iterator[Advisory]:
        """Yields an advisory for each cause that has begun since the last call, or has become another one."""
        group = member.group
        if group is None or not may_be_unserved(group) or member.session not in group.sessions:
            return
        topics = tuple((topic.offset, topic.count) for topic in group.topics.values())
        seen = (group.config_offset, topics, len(group.sessions), max(group.sessions))
        if seen == self._seen:
            return
        self._seen = seen
        before, self._known = self._known, lasting(group)
        for (cause, topic, sessions), text in self._known.items():
            mine = member.session in sessions if sessions else topic in member.found_topics
            if mine and before.get((cause, topic, sessions)) != text:
                session = member.session if sessions else NONE
                yield Advisory(
                    "unserved",
                    group.name,
                    member.options.client_id,
                    topic,
                    text=text,
                    session=session,
                    log=member.world.log,
                )
