"""How a partition is begun on which owners died one after the other without a word (PROTOCOL.md D11).

A message that kills its owner at once is never told of: what the log counts is the message at the position, a few
before it. So such a claim hands its messages over one by one for one interval, each when the log has the position
before it: then the message that kills is the one at the position, and is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from marshal_py.protocol.claim import Claim
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.protocol.world import Partition

if TYPE_CHECKING:
    from marshal_py.protocol.member import Member

DELIVERIES: Final = 2  # of the message at the position, by earlier owners: fewer are an ordinary crash


class PoisonGuard:
    """The part of a member that looks after claims with such a past."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._until_ms: dict[int, int] = {}  # by epoch, monotonic
        self._told: dict[int, int] = {}  # by epoch: the newest position that was sent for the sake of this

    def begin(self, claim: Claim, partition: Partition, now: Instant) -> None:
        """An own claim was read accepted; the log counts this owner's delivery already (F4.5)."""
        if partition.attempts > DELIVERIES:
            self._until_ms[claim.epoch] = now.mono_ms + self.member.options.interval_ms

    def holds(self, claim: Claim) -> bool:
        """Whether its messages go one by one."""
        return claim.epoch in self._until_ms

    def opens(self, claim: Claim, partition: Partition, now: Instant) -> bool:
        """Whether the next message may be handed over: nothing is in flight, and the log has the position."""
        if now.mono_ms >= self._until_ms[claim.epoch]:
            self.end(claim)
            return True
        return not claim.tracker.in_flight and claim.position() <= partition.position

    def end(self, claim: Claim) -> None:
        self._until_ms.pop(claim.epoch, None)
        self._told.pop(claim.epoch, None)

    def tell(self) -> bool:
        """Something was finished, and the next message waits until the log is told: a heartbeat is due. True if so."""
        member, group = self.member, self.member.group
        if group is None:
            return False
        for epoch in self._until_ms:
            claim = member.claims[epoch]
            position = claim.position()
            if not claim.sealed and position > max(self._told.get(epoch, NONE), group.partitions[claim.tp].position):
                self._told[epoch] = position
                member.urgent = True
                member.request_tick()
                return True
        return False
