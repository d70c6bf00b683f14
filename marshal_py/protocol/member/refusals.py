"""Handles partitions that Kafka does not serve to their owner, for example for lack of a permission (PROTOCOL.md D13).

The owner gives such a partition up: it releases it, so that another member tries, and writes a Note. All members
remember the Note while its sender's session lives and the position is the same. If all members have tried in vain, the
owner parks the partition: nobody may claim it until its position is set.
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.wire import parking
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.protocol.wire.records import Note, SetPosition
from marshal_py.protocol.wire.subscription import consumes

UNREADABLE: Final = "unreadable"  # kind of the Note, and reason of the Release
LEFT_INTERVALS: Final = 5  # for so long a member does not claim a partition again that it could not read


class Refusals:
    """Is the part of a member that knows which members could not read which partitions."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self._noted: dict[TopicPartition, dict[int, int]] = {}  # partition -> session -> position at which it gave up

    def read(self, record: Note) -> None:
        """Takes the Note of a member that has given a partition up."""
        self._noted.setdefault(TopicPartition(record.topic, record.partition), {})[record.session] = record.from_

    def forget(self, record: SetPosition) -> None:
        """Forgets the Notes on partitions whose positions an admin has moved, so that all members try again."""
        for move in record.moves:
            self._noted.pop(TopicPartition(move.topic, move.partition), None)

    def give_up(self, tp: TopicPartition, detail: str, now: Instant) -> bool:
        """Releases a partition of this member, and parks it if all members have tried in vain.

        `detail`: the cluster's error text. Returns True if no claim is left whose messages this member still hands
        over.
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
        """Returns whether every live member that consumes the topic has given the partition up at this position before.

        This member is one of them, so a partition is parked only when its owner fails a second time. A trouble that
        passes then needs no admin, for example a permission that is granted a little later; nor does a single client
        without the permission, because it ends before it would try a second time.
        """
        noted = self._noted.get(tp, {})
        for session in [session for session in noted if session not in group.sessions]:
            del noted[session]
        members = (session.id for session in group.sessions.values() if consumes(session.join.topics, tp.topic))
        return all(noted.get(session) == position for session in members)
