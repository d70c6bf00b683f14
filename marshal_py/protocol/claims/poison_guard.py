"""Finds a message that kills each process that handles it, by handing messages over one at a time (PROTOCOL.md D11).

The log counts deliveries of the message at the position, also those that may not have happened, because an owner that
dies at once reports nothing. So the count may go to a message a few before the one that killed it, or to one of another
partition. When two owners have died like this, the next one is careful for one interval: of all such claims it hands
over one message at a time, and each only when the log shows that all before it are finished and that this one counts as
delivered, and no other. Then the deliveries of the message that kills are counted, and those of no other.
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.records import AT_LEAST_ONCE

DELIVERIES: Final = 2  # of the message at the position by earlier owners; fewer may be ordinary crashes


def careful(group: Group, partition: Partition) -> bool:
    """Returns whether the owner of a claim that was just accepted must hand its messages over one by one.

    `partition.attempts` already counts one delivery by this owner (F4.5).
    """
    return group.mode == AT_LEAST_ONCE and partition.attempts > DELIVERIES


def suspicion(group: Group, partition: Partition) -> str:
    """Returns why the message at the position of a claim that was just accepted is reported; "" if it is not.

    A careful owner has delivered it and did not finish it, because only deliveries by careful ones go beyond DELIVERIES
    (or by owners that ended before they could report anything).
    """
    if group.mode != AT_LEAST_ONCE or partition.attempts <= DELIVERIES + 1:
        return ""
    return f"{partition.attempts - 1} deliveries by earlier owners, and none finished it: it may end their processes"


class PoisonGuard:
    """Knows which claims of one member hand their messages over one by one, and which of them may do so now."""

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._claims: dict[int, tuple[Claim, int]] = {}  # epoch -> the claim; monotonic ms until which it is careful
        self._reported: dict[int, tuple[int, int]] = {}  # epoch -> newest position and attempts that a heartbeat has
        self._chosen: int = NONE  # epoch of the claim whose message counts as delivered
        self._begun_at: int = NONE  # what that claim had handed over when it was chosen: the offset after it
        self._ended: bool = False

    def begin(self, claim: Claim, now: Instant) -> bool:
        """Makes a claim that was just accepted careful for one interval. Returns whether it is.

        The next heartbeat must then be sent at once.
        """
        if self._ended:
            return False
        assert isinstance(claim.tracker, AtLeastOnce)
        claim.one_by_one = claim.tracker.counts_exactly = True
        self._claims[claim.epoch] = claim, now.mono_ms + self.interval_ms
        self._reported[claim.epoch] = _figures(claim)
        return True

    def end_all(self) -> None:
        """Has no claim be careful from now on, because ranges are delivered and not messages."""
        self._ended = True
        for claim, _ in [*self._claims.values()]:
            self.end(claim)

    def opens(self, claim: Claim, group: Group, now: Instant, awaits_echo: bool) -> bool:
        """Returns whether a careful claim may hand over its next message at `now`.

        `awaits_echo`: whether a heartbeat of this member is still on its way, which may change what the log has.

        It may if no message of a careful claim is with a handler and the log, as folded, has what must be known if the
        process dies of the message: all messages before it are finished, it counts as delivered, and the messages of
        other careful claims do not. When its interval is over it hands messages over as usual.
        """
        tracker, partition = claim.tracker, group.partitions[claim.tp]
        assert isinstance(tracker, AtLeastOnce)
        if now.mono_ms >= self._claims[claim.epoch][1]:
            tracker.counts_exactly = False
            if partition.attempts < tracker.attempts():
                return False
            self.end(claim)
            return True
        if self._chosen != claim.epoch and not self._choose(claim):
            return False
        if awaits_echo or tracker.in_flight or claim.position() > partition.position:
            return False
        return all(group.partitions[one.tp].attempts == _figures(one)[1] for one, _ in self._claims.values())

    def _choose(self, claim: Claim) -> bool:
        """Has the next message of a claim count as delivered, unless that of another one may still be handed over."""
        before = self._claims.get(self._chosen)
        if before is not None:
            tracker = before[0].tracker
            assert isinstance(tracker, AtLeastOnce)
            if tracker.held or tracker.handed_to() == self._begun_at:
                return False
            tracker.counts_exactly = True
        assert isinstance(claim.tracker, AtLeastOnce)
        claim.tracker.counts_exactly = False
        self._chosen, self._begun_at = claim.epoch, claim.tracker.handed_to()
        return True

    def end(self, claim: Claim) -> None:
        claim.one_by_one = False
        if isinstance(claim.tracker, AtLeastOnce):
            claim.tracker.counts_exactly = False
        self._claims.pop(claim.epoch, None)
        self._reported.pop(claim.epoch, None)

    def report_due(self, group: Group) -> bool:
        """Returns whether to send a heartbeat at once, because a careful claim waits for the log to have its figures.

        Only a heartbeat tells the log. Returns True only once for the same figures of a claim.
        """
        due = False
        for epoch, (claim, _) in self._claims.items():
            figures, partition = _figures(claim), group.partitions[claim.tp]
            if claim.sealed or figures in ((partition.position, partition.attempts), self._reported.get(epoch)):
                continue
            self._reported[epoch] = figures
            due = True
        return due


def _figures(claim: Claim) -> tuple[int, int]:
    """Returns the position of a claim in at-least-once mode, and how often the message there counts as delivered."""
    assert isinstance(claim.tracker, AtLeastOnce)
    return claim.tracker.position(), claim.tracker.attempts()
