"""Finds a message that kills its owners: such a partition is begun one message at a time (PROTOCOL.md D11).

The log counts deliveries of the message at the position. An owner that dies at once reports nothing, so the count goes
to a message a few before the one that killed it. When several owners have died like this, the next claim hands its
messages over one by one for one interval, each after the log has the position before it. Then the message that kills is
the one at the position, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from marshal_py.protocol.claim import Claim
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.protocol.world import Group, Partition

DELIVERIES: Final = 2  # of the message at the position by earlier owners; fewer may be ordinary crashes


class PoisonGuard:
    """The claims of one member that hand over one by one."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._until_ms: dict[int, int] = {}  # by epoch, monotonic
        self._reported: dict[int, int] = {}  # by epoch: the newest position for which a heartbeat was requested

    def begin(self, claim: Claim, partition: Partition, now: Instant) -> None:
        """An own claim was accepted; the log's count includes this owner's delivery already (F4.5)."""
        if partition.attempts > DELIVERIES:
            claim.one_by_one = True
            self._until_ms[claim.epoch] = now.mono_ms + self.interval_ms

    def opens(self, claim: Claim, partition: Partition, now: Instant) -> bool:
        """Whether the next message may be handed over: nothing is in flight, and the log has the position."""
        if now.mono_ms >= self._until_ms[claim.epoch]:
            self.end(claim)
            return True
        return not claim.tracker.in_flight and claim.position() <= partition.position

    def end(self, claim: Claim) -> None:
        claim.one_by_one = False
        self._until_ms.pop(claim.epoch, None)
        self._reported.pop(claim.epoch, None)

    def report_due(self, claims: Mapping[int, Claim], group: Group) -> bool:
        """Whether the next message of a claim waits for a heartbeat that was not requested yet."""
        for epoch in self._until_ms:
            claim = claims[epoch]
            position = claim.position()
            reported = max(self._reported.get(epoch, NONE), group.partitions[claim.tp].position)
            if not claim.sealed and position > reported:
                self._reported[epoch] = position
                return True
        return False
