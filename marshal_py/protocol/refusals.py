"""Partitions that Kafka does not serve to their owner: another member may do better; where nobody can, they are parked.

Who could not read what is in the log, as Notes; each member remembers them for as long as they say something about now:
while the session lives and the position is the same. PROTOCOL.md D13.
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol import parking
from marshal_py.protocol.claim import ClaimPhase
from marshal_py.protocol.identity import Instant, TopicPartition
from marshal_py.protocol.member_state import MemberState
from marshal_py.protocol.records import Note, SetPosition
from marshal_py.protocol.world import Group

UNREADABLE: Final = "unreadable"  # kind of the Note, and reason of the Release
LEFT_INTERVALS: Final = 5  # who could not read a partition leaves it to others for so long


class Refusals:
    """The part of a member that knows who could not read what."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self._noted: dict[TopicPartition, dict[int, int]] = {}  # session -> position at which it gave up

    def read(self, record: Note) -> None:
        """Somebody gave a partition up."""
        self._noted.setdefault(TopicPartition(record.topic, record.partition), {})[record.session] = record.from_

    def forget(self, record: SetPosition) -> None:
        """An admin has looked at these: everybody may try again."""
        for move in record.moves:
            self._noted.pop(TopicPartition(move.topic, move.partition), None)

    def give_up(self, tp: TopicPartition, said: str, now: Instant) -> bool:
        """Releases an own partition: parked if everybody has tried in vain. `said`: the cluster's words.

        True if this member has nothing left to deliver.
        """
        member, group = self.member, self.member.group
        for claim in member.claims.values():
            if claim.tp != tp or claim.phase is not ClaimPhase.OPEN or group is None:
                continue
            position = claim.position()
            if self._all_tried(group, tp, position):
                member.park(claim.epoch, parking.UNREADABLE, said, now)
            else:
                claim.stop(UNREADABLE, now.mono_ms + member.options.interval_ms)
                member.note(UNREADABLE, tp, position, text=said, epoch=claim.epoch)
        member.request_tick()
        return not any(claim.phase is ClaimPhase.OPEN for claim in member.claims.values())

    def _all_tried(self, group: Group, tp: TopicPartition, position: int) -> bool:
        """Whether every live member with this topic, this one included, gave it up at this position before.

        So what passes within a while, as a right that is granted, asks for no admin; nor does one client without the
        right, as long as it is alone and ends by it.
        """
        noted = self._noted.get(tp, {})
        for session in [session for session in noted if session not in group.sessions]:
            del noted[session]
        members = (session.id for session in group.sessions.values() if tp.topic in session.join.topics)
        return all(noted.get(session) == position for session in members)
