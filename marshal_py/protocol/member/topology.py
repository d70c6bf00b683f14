"""Compares partition counts and ids of a member's topics in the cluster and in the log (PROTOCOL.md F9.1, F9.10, D10).

Where they differ, it writes a Topology record. A topic with another id was recreated, that is deleted and created
again; the owners park its partitions, so that nobody may claim them until their positions are set. The driver reports
the cluster's metadata; this file does not ask for it.

A member with patterns takes a partition only after the driver has reported its topic (A13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member_state import MemberState, Ready
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import BY_CHARS_MAX, OFFSET_MAX, Topology
from marshal_py.protocol.wire.subscription import consumes, has_patterns, names_of

GONE: Final = "topic deleted"  # reason of a Release
REPLACED_IDS_KEPT: Final = 100  # no broker lags so far behind that it still reports a topic which was replaced so often


class Topics:
    """Knows the cluster's metadata of its topics."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.patterns: bool = has_patterns(member.options.topics)
        self._named = frozenset((*names_of(member.options.topics), PIN.topic))
        self.own: frozenset[str] = self._named  # topics of which this member may claim partitions, and the pin's
        self.counts: dict[str, int] = {}  # topic -> partition count
        self.ids: dict[str, str] = {}  # topic -> its id in the cluster, for the topics whose id is known
        self._log_ids: dict[str, str] = {}  # topic -> id in the log as this member last read it
        self._replaced_ids: dict[str, None] = {}  # ids that the log has replaced; Kafka never gives an id twice
        # topic -> (count, id, when sent, in ms) of the newest own Topology
        self._sent: dict[str, tuple[int, str, int]] = {}

    def learn(self, topic: str, count: int, topic_id: str = "") -> bool:
        """Takes a topic's count and id ("" if unknown) in the cluster; returns whether one is new. An id that the log
        has replaced is ignored: some brokers lag behind."""
        if topic_id in self._replaced_ids:
            return False
        group = self.member.group
        if group is not None and topic in group.topics:
            self._log_ids[topic] = group.topics[topic].id
        known = self.counts.get(topic), self.ids.get(topic, "")
        self.counts[topic] = count
        if topic_id:
            self.ids[topic] = topic_id
        changed = known != (count, self.ids.get(topic, ""))
        if changed:
            self._look_again()
        return changed

    def forget(self, topic: str) -> None:
        """Gives up a topic that the patterns match and that the cluster does not have any more (A13)."""
        self.member.gone_topics |= {topic}
        self.counts.pop(topic, None)
        self.ids.pop(topic, None)
        self._look_again()

    def _leave_gone(self, now: Instant) -> None:
        """Stops claims of topics that are gone. Handlers may finish for an interval."""
        for claim in self.member.claims.values() if self.patterns else ():
            if claim.tp.topic not in self.own and claim.phase is ClaimPhase.OPEN:
                claim.stop(GONE, now.mono_ms + self.member.options.interval_ms)

    def _look_again(self) -> None:
        if self.patterns:
            topics = self.member.options.topics
            self.own = self._named.union(topic for topic in self.counts if consumes(topics, topic))
            self.member.gone_topics -= self.own
        self.member.request_tick()

    def recreated(self, group: Group, topic: str) -> bool:
        """Returns whether the topic was recreated, so that the log's positions are those of the deleted topic (D10)."""
        known, found = group.topics.get(topic), self.ids.get(topic, "")
        return known is not None and "" not in (known.id, found) and known.id != found

    def unfit(self, group: Group, tp: TopicPartition) -> str:
        """Returns why the owner of this partition must park it, as the name of an error; "" if it can be consumed."""
        return records.RECREATED if self.recreated(group, tp.topic) else ""

    def park(self, group: Group, now: Instant) -> None:
        """Stops delivery of topics that were recreated (D10) or are gone (A13); releases.py parks them when handlers
        are done, or after an interval."""
        self._leave_gone(now)
        if not any(self.recreated(group, topic) for topic in self.ids):
            return
        for claim in self.member.claims.values():
            reason = self.unfit(group, claim.tp)
            if reason and not claim.sealed:
                claim.park(reason, records.PARKED_REASON, now.mono_ms + self.member.options.interval_ms)

    def read(self, record: Topology) -> None:
        """Takes an accepted Topology. If it changes the topic's id, forgets what this member knew of the old topic."""
        before = self._log_ids.get(record.topic, "")
        if record.topic_id:
            self._log_ids[record.topic] = record.topic_id
            if before not in ("", record.topic_id):
                self._replaced_ids[before] = None
                if len(self._replaced_ids) > REPLACED_IDS_KEPT:
                    del self._replaced_ids[next(iter(self._replaced_ids))]
        if record.topic_id and self.ids.get(record.topic) not in (None, record.topic_id):
            del self.ids[record.topic]
            self.counts.pop(record.topic, None)
            self._look_again()
        if self.patterns and record.topic not in self.counts and consumes(self.member.options.topics, record.topic):
            self.member.out.look_at_topics = True

    def write(self, group: Group, candidacy: Candidacy, now: Instant, out: Ready) -> None:
        """Writes a Topology for each topic that differs from the log. Rank k waits k thirds, so that usually one member
        does."""
        member = self.member
        for topic, count in self.counts.items():
            known, found = group.topics.get(topic), self.ids.get(topic, "")
            if known is not None:
                if self.recreated(group, topic):
                    if not self._may_accept(group, topic):
                        continue
                else:
                    count = max(count, known.count)  # only an admin may reduce partitions (F9.2)
                    if count == known.count and found in ("", known.id):
                        continue
            sent = self._sent.get(topic)
            if sent is None or sent[:2] != (count, found):
                later_ms = (candidacy.rank(group) - 1) * member.third_ms
                sent = self._sent[topic] = (count, found, now.mono_ms + later_ms)
            if member.retry_due(sent[2], now):
                self._sent[topic] = (count, found, now.mono_ms)
                observed, by = group.topology_offset(topic), member.options.client_id[:BY_CHARS_MAX]
                out.send.append(Topology(topic, count, observed, NONE, by, found))

    def _may_accept(self, group: Group, topic: str) -> bool:
        """Returns whether this member may write a recreated topic's new id (D10): the group continues by itself, and
        nobody owns a partition of the old one."""
        held = any(part.owner != NONE for tp, part in group.partitions.items() if tp.topic == topic)
        return self.member.continues_recreated_topics and not held


# --- Which topics of a consumer its group did not have when it began: they may begin at their beginning (PROTOCOL.md
# D5).
#
# A consumer asks when it joins, with the group as the log shows it then.


def new_topics(group: Group | None, topics: Sequence[str]) -> frozenset[str]:
    """Returns the consumer's topics that its group does not have yet; none if it has none of them, as a new group."""
    unknown = frozenset(topics) - (group.topics.keys() if group is not None else set())
    return unknown if len(unknown) < len(topics) else frozenset()


def found_later(group: Group | None, topics: tuple[str, ...], found: Sequence[str]) -> frozenset[str]:
    """Returns which of the topics that a joining consumer's patterns match came after the group began (D5): those
    unknown to the log while it knows others of the consumer, or members that found none; and those that became known
    after another one was claimed, as their finder may have died. `topics`: as in the Join; `found`: all."""
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
