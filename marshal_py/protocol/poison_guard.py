"""Finds a message that kills each process that handles it, by handing messages over one at a time (PROTOCOL.md D11).

The log counts deliveries of the message at the position. An owner that dies at once reports nothing, so the count goes
to a message a few before the one that killed it. When several owners have died like this, the next claim hands its
messages over one by one for one interval, each only when the log shows that all before it are finished. Then the
message that kills is the one at the position, and its deliveries are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from marshal_py.protocol.claim import Claim
from marshal_py.protocol.identity import NONE, Instant
from marshal_py.protocol.world import Group, Partition

DELIVERIES: Final = 2  # of the message at the position by earlier owners; fewer may be ordinary crashes


class PoisonGuard:
    """Knows which claims of one member hand their messages over one by one."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._until_ms: dict[int, int] = {}  # epoch of a claim -> the monotonic ms until which it hands over one by one
        self._reported: dict[int, int] = {}  # epoch -> the newest position for which a heartbeat was requested

    def begin(self, claim: Claim, partition: Partition, now: Instant) -> None:
        """Makes a claim hand its messages over one by one if earlier owners may have died of a message.

        The claim was just accepted. `partition.attempts` already counts one delivery by this owner (F4.5).
        """
        if partition.attempts > DELIVERIES:
            claim.one_by_one = True
            self._until_ms[claim.epoch] = now.mono_ms + self.interval_ms

    def opens(self, claim: Claim, partition: Partition, now: Instant) -> bool:
        """Returns whether a claim that hands its messages over one by one may hand over the next one at `now`.

        It may when no message of it is in flight and the log shows that all messages so far are finished: the position
        in the folded log, `partition.position`, has then reached the claim's own. It may also when its interval is
        over, and then it hands messages over as usual from now on.
        """
        if now.mono_ms >= self._until_ms[claim.epoch]:
            self.end(claim)
            return True
        return not claim.tracker.in_flight and claim.position() <= partition.position

    def end(self, claim: Claim) -> None:
        claim.one_by_one = False
        self._until_ms.pop(claim.epoch, None)
        self._reported.pop(claim.epoch, None)

    def report_due(self, claims: Mapping[int, Claim], group: Group) -> bool:
        """Returns whether to send a heartbeat at once, because a claim's next message waits for it.

        The message before is finished, and only a heartbeat tells the log so. Returns True only once for each position
        of a claim.
        """
        for epoch in self._until_ms:
            claim = claims[epoch]
            position = claim.position()
            reported = max(self._reported.get(epoch, NONE), group.partitions[claim.tp].position)
            if not claim.sealed and position > reported:
                self._reported[epoch] = position
                return True
        return False
