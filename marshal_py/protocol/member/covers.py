"""Releases the covers of a member: the pin, and claims of whole topics (PROTOCOL.md A9, A11).

A cover is claimed before the partitions beneath it and released after them. The fold knows no covers; it frees all
claims of a session that ends at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member.candidacy import Candidacy
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.ready import Ready
from marshal_py.protocol.member.rebalance import Rebalancer
from marshal_py.protocol.member.topics import Topics
from marshal_py.protocol.wire.identity import NONE, PIN, Instant
from marshal_py.protocol.wire.records import ReleasingPartition


class Covers:
    """Is the part of a member that releases covers."""

    def __init__(self, member: MemberState, candidacy: Candidacy, topics: Topics, rebalancer: Rebalancer) -> None:
        self.member = member
        self.candidacy = candidacy
        self.topics = topics
        self.rebalancer = rebalancer
        self._sent: dict[int, int] = {}  # epoch of a cover -> when its Release was sent, in ms

    def sent(self, epoch: int) -> bool:
        """Returns whether this client sent a Release of the cover. If none was sent, a clone did it (T18)."""
        return epoch in self._sent

    def act(self, group: Group, now: Instant, out: Ready) -> None:
        """Releases each cover that should go, once nothing beneath it is owned and no claim beneath is in flight."""
        me = self.member.session
        for cover in list(self._own(group)):
            topic, to = cover.tp.topic, self.candidacy.goes_to(cover.tp)
            goes = group.paused or to != me or self.topics.recreated(group, topic)
            if not goes or self._used(topic) or not self.member.retry_due(self._sent.get(cover.epoch), now):
                continue
            self._sent[cover.epoch] = now.mono_ms
            if len(self._sent) > len(group.topics) + 1:
                del self._sent[next(iter(self._sent))]
            moves = to not in (NONE, me) and not group.paused
            reason = "hand-over" if moves else "paused" if group.paused else "unassigned"
            if cover.tp == PIN:
                reason = self.candidacy.pin_lost or reason
            out.send.append(ReleasingPartition(me, cover.epoch, NONE, to if moves else NONE, reason))

    def _own(self, group: Group) -> Iterator[Partition]:
        session = group.sessions[self.member.session]
        if len(session.epochs) > session.held:  # nearly never: else it has no cover
            for epoch in session.epochs:
                if group.claims[epoch].tp.partition < 0:
                    yield group.claims[epoch]

    def _used(self, topic: str) -> bool:
        claims = self.member.claims.values()
        return self.rebalancer.claims_topic(topic) or any(topic in (claim.tp.topic, PIN.topic) for claim in claims)
