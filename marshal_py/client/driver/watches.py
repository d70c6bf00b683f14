"""Watches the topics of one consumer in the cluster: growth, deletion, another id, and names that its patterns match.

It runs on the consumer's worker thread, and reports to the member, which decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

from marshal_py.client.connection.context import Context
from marshal_py.client.connection.threads import Ask, TaskSteps
from marshal_py.client.values.options import TOPICS_MAX
from marshal_py.errors import ClusterError, InvalidOption
from marshal_py.protocol.member.advisory import Advisory, AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.waiting import lasting, may_be_unserved
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.subscription import consumed, has_patterns, is_pattern, names_of
from marshal_py.transport.ports import ClusterAdmin


def find_topics(admin: ClusterAdmin, topics: tuple[str, ...], coordination_topic: str) -> tuple[str, ...]:
    """Returns the topics of a Join's `topics`: named ones, and the cluster's that patterns match. Raises
    ClusterUnreachable."""
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
        """`later`: topics that came after the group began (D5). `publish(kind, topic, text)`: tells the user. `kick`:
        steps the member."""
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


# --- Notices when a group's settings leave a consumer, or partitions of its topics, without the other (`unserved`).
#
# A consumer that waits for nothing but an admin would else be silent. It looks again when the log has changed who is
# in the group, its topics or its settings, which is when `marshal advisories` looks, too. Called with the Marshal's
# lock held.


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


# --- Copies positions to Kafka's committed offsets, so that the usual tools show the lag (D7). That may fail.
#
# It tells refusals that last from those that pass: a coordinator that moves or starts refuses for some seconds; the
# next copy then succeeds, and nobody needs to know.


COMMITS_MAX: Final = 10  # of one copy; an owner that moves on faster copies its position again by itself
LASTS_MS: Final = 30_000  # six copies in a row; a coordinator that moves is there again within some seconds


class PositionCopies:
    """Copies the positions of one consumer."""

    def __init__(self, context: Context, member: Member, report: Callable[[str], None]) -> None:
        """`report`: is called with the lock held, with why Kafka has refused all copies for LASTS_MS."""
        self._context, self._member, self._report = context, member, report
        self._wanted: dict[TopicPartition, int] = {}
        self._refusals = CommitRefusals()

    def add(self, positions: Mapping[TopicPartition, int]) -> None:
        """Takes what the next `copy` will copy. Called with the lock held."""
        self._wanted |= positions

    def copy(self, absent: Collection[str]) -> TaskSteps:
        """Copies what was added, on the worker thread. A new owner may have committed meanwhile: then the newer
        position is copied again. Refusals because of `absent` topics are none."""
        context = self._context
        with context.lock:
            positions, self._wanted = self._wanted, {}
        for _ in range(COMMITS_MAX):
            if not positions:
                return
            refused: str = yield Ask(partial(context.admin.commit, self._member.name, positions))
            told = ""
            if not refused or not {tp.topic for tp in positions} & set(absent):
                told = self._refusals.answered(refused, context.clock.now())
            with context.outbox, context.lock:
                if told:
                    self._report(told)
                if refused:
                    self._member.not_mirrored(positions)
                    return
                positions = self._member.overtaken(positions)


class CommitRefusals:
    """Collects the answers of Kafka to copies. Pure."""

    def __init__(self) -> None:
        self._since: Instant | None = None  # of the first refusal after which no copy has succeeded
        self._told = ""

    def answered(self, refused: str, now: Instant) -> str:
        """Takes Kafka's refusal of a copy, or "". Returns what to report: once per reason, after LASTS_MS without a
        success."""
        if not refused:
            self._since, self._told = None, ""
            return ""
        if self._since is None:
            self._since = now
        if refused == self._told or now.mono_ms - self._since.mono_ms < LASTS_MS:
            return ""
        self._told = refused
        since = datetime.fromtimestamp(self._since.wall_ms / 1000, UTC).isoformat(timespec="seconds")
        return f"{refused}; no copy has succeeded since {since}"
