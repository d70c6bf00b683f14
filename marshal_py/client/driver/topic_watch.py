"""Watches the topics of one consumer in the cluster: growth, deletion, another id, and names that its patterns match.

It runs on the consumer's worker thread, and reports to the member, which decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable

from marshal_py.client.connection.context import Context
from marshal_py.client.values.options import TOPICS_MAX
from marshal_py.errors import ClusterError, InvalidOption
from marshal_py.protocol.member.advisory import AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.subscription import consumed, has_patterns, is_pattern, names_of
from marshal_py.transport.ports import ClusterAdmin


def find_topics(admin: ClusterAdmin, topics: tuple[str, ...], coordination_topic: str) -> tuple[str, ...]:
    """Returns the topics that a consumer reads: those that it names, and those of the cluster that its patterns match.

    `topics`: as in its Join. Raises ClusterUnreachable.
    """
    return consumed(topics, admin.topics() - {coordination_topic} if has_patterns(topics) else ())


def check_count(topics: tuple[str, ...], found: int) -> None:
    """Raises InvalidOption if a consumer reads more topics than it can."""
    if found > TOPICS_MAX:
        rule = f"they name or match {found} topics, and a consumer reads at most {TOPICS_MAX}: use narrower patterns"
        raise InvalidOption("topics", topics, rule)


class TopicWatch:
    """Keeps what the cluster last said of a consumer's topics."""

    def __init__(
        self,
        context: Context,
        member: Member,
        later: frozenset[str],
        learn_leaders: Callable[[str], None],
        publish: Callable[[AdvisoryKind, str, str], None],
        kick: Callable[[], None],
    ) -> None:
        """`later`: the topics that came after the group began, and begin at their beginning (D5).

        `publish(kind, topic, text)` tells the user of an event. `kick` steps the member.
        """
        self.later: set[str] = set(later)
        self.missing: set[str] = set()  # named topics that the cluster said not to have, as of the last look
        self._context, self._member = context, member
        self._learn_leaders, self._publish, self._kick = learn_leaders, publish, kick

    @property
    def absent(self) -> frozenset[str]:
        return self._member.gone_topics | self.missing

    def waiting_for(self) -> str:
        """Returns which topic this consumer lacks, for people to read; "" if none."""
        if self.missing:
            return f"topic {', '.join(sorted(self.missing))}, which the cluster does not have"
        if self._member.found_topics:
            return ""
        return f"a topic that matches {' or '.join(filter(is_pattern, self._member.options.topics))}; there is none yet"

    def look(self) -> None:
        """Asks Kafka about the topics. The member reports added partitions (F9.1) and parks recreated topics (D10)."""
        failed: ClusterError | None = None
        member, context = self._member, self._context
        topics = member.options.topics
        found = find_topics(context.admin, topics, context.topic)
        self._give_up(frozenset(found))
        for topic in self._first(found):
            try:
                self.look_at(topic)
            except ClusterError as error:  # a topic that may not be described must not hide the others
                failed = error
        if failed is not None:
            raise failed
        check_count(topics, len(found))

    def _first(self, found: tuple[str, ...]) -> list[str]:
        """Returns the topics to ask about: those that the member reads already, then as many new ones as it may."""
        known = self._member.found_topics
        return sorted(found, key=lambda topic: topic not in known)[:TOPICS_MAX]

    def _give_up(self, found: frozenset[str]) -> None:
        """Tells the member which topics its patterns matched that the cluster does not have any more (A13)."""
        member = self._member
        with self._context.lock:
            group = member.group
            logged = group.topics if group is not None else ()
            known = frozenset(consumed(member.options.topics, logged)) | member.found_topics
            gone = known - found - member.gone_topics
            for topic in sorted(gone):
                if topic in member.found_topics:
                    self._publish("topic_missing", topic, "it was deleted; its partitions are released")
                member.forget_topic(topic)
        if gone:
            self._kick()

    def look_at(self, topic: str) -> None:
        """Asks Kafka about one topic. Raises ClusterError."""
        info, member = self._context.admin.describe_topic(topic), self._member
        named = topic in names_of(member.options.topics)
        with self._context.lock:
            if info is None:
                if named and topic not in self.missing:
                    self.missing.add(topic)
                    self._publish("topic_missing", topic, "it was deleted; its partitions wait")
                return
            if topic in self.missing:
                self.missing.discard(topic)
                self._publish("topic_found", topic, "")
            if not named and topic not in member.found_topics:
                self.later.add(topic)
                self._publish("topic_found", topic, "a pattern matches it")
            changed = member.learn_topic(topic, info.partitions, info.topic_id)
        if changed:
            self._learn_leaders(topic)
            self._kick()
