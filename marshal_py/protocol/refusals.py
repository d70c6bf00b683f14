"""Partitions that Kafka does not serve to their owner (PROTOCOL.md D13): another member tries, else they are parked.

A member that gives a partition up writes a Note. All members remember these Notes while the session lives and the
position is the same.
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
LEFT_INTERVALS: Final = 5  # for so long a member leaves a partition that it could not read to others


class Refusals:
    """The part of a member that knows which members could not read which partitions."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self._noted: dict[TopicPartition, dict[int, int]] = {}  # by session: the position at which it gave up

    def read(self, record: Note) -> None:
        """A member gave a partition up."""
        self._noted.setdefault(TopicPartition(record.topic, record.partition), {})[record.session] = record.from_

    def forget(self, record: SetPosition) -> None:
        """An admin has moved these positions: all members may try again."""
        for move in record.moves:
            self._noted.pop(TopicPartition(move.topic, move.partition), None)

    def give_up(self, tp: TopicPartition, detail: str, now: Instant) -> bool:
        """Releases an own partition, parked if all members have tried in vain. `detail`: the cluster's words.

        True if this member has nothing left to deliver.
        """
        member, group = self.member, self.member.group
        for claim in member.claims.values():
            if claim.tp != tp or claim.phase is not ClaimPhase.OPEN or group is None:
                continue
            position = claim.position()
            if self._all_tried(group, tp, position):
                member.park(claim.epoch, parking.UNREADABLE, detail, now)
            else:
                claim.stop(UNREADABLE, now.mono_ms + member.options.interval_ms)
                member.note(UNREADABLE, tp, position, text=detail, epoch=claim.epoch)
        member.request_tick()
        return not any(claim.phase is ClaimPhase.OPEN for claim in member.claims.values())

    def _all_tried(self, group: Group, tp: TopicPartition, position: int) -> bool:
        """Whether every live member with this topic, this one included, gave it up at this position before.

        A trouble that passes needs no admin, for example a permission that is granted a little later. Nor does a single
        client without the permission: it ends before it would try a second time.
        """
        noted = self._noted.get(tp, {})
        for session in [session for session in noted if session not in group.sessions]:
            del noted[session]
        members = (session.id for session in group.sessions.values() if tp.topic in session.join.topics)
        return all(noted.get(session) == position for session in members)
