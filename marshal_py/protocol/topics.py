"""What the cluster says about a member's topics, beside what the log says: partition counts and ids (F9.1, F9.10, D10).

Writes Topology records, parks the partitions of topics that were made anew. Asks nobody: the driver tells.
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol import parking
from marshal_py.protocol.candidacy import Candidacy
from marshal_py.protocol.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.member_state import MemberState
from marshal_py.protocol.ready import Ready
from marshal_py.protocol.records import Topology
from marshal_py.protocol.world import Group

GONE_KEPT: Final = 100  # no broker is so far behind that it tells of a topic that was replaced so often


class Topics:
    """The part of a member that knows Kafka's metadata."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.counts: dict[str, int] = {}  # topic -> partition count
        self.ids: dict[str, str] = {}  # topic -> id, where the cluster tells one
        self._held: dict[str, str] = {}  # topic -> id that the log had when this member last read of it
        self._gone: dict[str, None] = {}  # ids of topics that the log has replaced: no id is ever given twice
        self._sent: dict[str, tuple[int, str, int]] = {}  # topic -> (count, id, sent ms) of the newest Topology

    def learn(self, topic: str, count: int, topic_id: str = "") -> bool:
        """What the cluster's metadata says. True if that is new.

        A broker that is behind the others may tell of a topic that is gone already: that is no news.
        """
        if topic_id in self._gone:
            return False
        group = self.member.group
        if group is not None and topic in group.topics:
            self._held[topic] = group.topics[topic].id
        known = self.counts.get(topic), self.ids.get(topic, "")
        self.counts[topic] = count
        if topic_id:
            self.ids[topic] = topic_id
        changed = known != (count, self.ids.get(topic, ""))
        if changed:
            self.member.request_tick()
        return changed

    def recreated(self, group: Group, topic: str) -> bool:
        """Whether the topic is not the one whose positions the log holds (D10)."""
        known, found = group.topics.get(topic), self.ids.get(topic, "")
        return known is not None and "" not in (known.id, found) and known.id != found

    def unfit(self, group: Group, tp: TopicPartition) -> str:
        """Why this partition is to be parked by whoever owns it; "" if it is fit to be consumed."""
        return parking.RECREATED if self.recreated(group, tp.topic) else ""

    def park(self, group: Group, now: Instant) -> None:
        """D10: lets the partitions of topics that were made anew go, parked."""
        if not any(self.recreated(group, topic) for topic in self.ids):
            return
        for claim in self.member.claims.values():
            reason = self.unfit(group, claim.tp)
            if reason and not claim.sealed:
                claim.park(reason, parking.WHY, now.mono_ms + self.member.options.interval_ms)

    def read(self, record: Topology) -> None:
        """Somebody knows better: what this member was told before that record is old, until it is told again."""
        before = self._held.get(record.topic, "")
        if record.topic_id:
            self._held[record.topic] = record.topic_id
            if before not in ("", record.topic_id):
                self._gone[before] = None
                if len(self._gone) > GONE_KEPT:
                    del self._gone[next(iter(self._gone))]
        if record.topic_id and self.ids.get(record.topic) not in (None, record.topic_id):
            del self.ids[record.topic]
            self.counts.pop(record.topic, None)

    def write(self, group: Group, candidacy: Candidacy, now: Instant, out: Ready) -> None:
        """Tells the log what Kafka says; the first in rank does it, the rest in case it does not."""
        member = self.member
        for topic, count in self.counts.items():
            known, found = group.topics.get(topic), self.ids.get(topic, "")
            if known is not None:
                if self.recreated(group, topic):
                    if not self._may_accept(group, topic):
                        continue
                else:
                    count = max(count, known.count)  # fewer partitions are an admin's affair (F9.2)
                    if count == known.count and found in ("", known.id):
                        continue
            sent = self._sent.get(topic)
            if sent is None or sent[:2] != (count, found):
                later_ms = (candidacy.rank(group) - 1) * member.third_ms
                sent = self._sent[topic] = (count, found, now.mono_ms + later_ms)
            if member.retry_due(sent[2], now):
                self._sent[topic] = (count, found, now.mono_ms)
                observed, by = group.topology_offset(topic), member.options.client_id[:60]
                out.send.append(Topology(topic, count, observed, NONE, by, found))

    def _may_accept(self, group: Group, topic: str) -> bool:
        """D10: whether the group goes on with the new topic by itself, and nobody holds a partition of it any more."""
        held = any(part.owner != NONE for tp, part in group.partitions.items() if tp.topic == topic)
        return self.member.continues_recreated_topics and not held
