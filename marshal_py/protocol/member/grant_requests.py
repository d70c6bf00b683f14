"""Decides when one member asks for grants, in at-most-once mode, and remembers what it asked for (PROTOCOL.md D2, T17).

A grant is the log's permission to deliver a range of offsets. The driver says which ranges it wants (`Claim.offer`).
One record asks for all of them, and the next one follows GRANT_PACE_MS later at the earliest: so a sparse message gets
its grant at once, and a stream does not fill the log. Times are monotonic ms.
"""

from __future__ import annotations

from typing import Final

from marshal_py.protocol.claims.at_most_once import AtMostOnce
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.member.ready import Ready
from marshal_py.protocol.time.liveness import SENT_KEPT
from marshal_py.protocol.wire.identity import Instant
from marshal_py.protocol.wire.records import GRANT_OFFSETS_MAX, HEARTBEAT_ENTRIES_MAX, ClaimingMessages, MessageRange

GRANTS_AHEAD: Final = 2  # D2: one range is handled while the next one is asked for
GRANT_PACE_MS: Final = 34  # so that a session sends at most 30 ClaimingMessages in any second


class GrantRequests:
    """Is the part of a member that asks for grants."""

    def __init__(self, member: MemberState) -> None:
        self.member = member
        # nonce -> ranges, of the newest ClaimingMessages that were sent (T18)
        self._sent: dict[int, tuple[MessageRange, ...]] = {}
        self._asking: tuple[int, int] | None = None  # (nonce, when sent) of the ClaimingMessages in flight
        self._sent_ms: int | None = None  # when the last one was sent
        self.due_ms: int | None = None  # when to call `ask` again, because it was too early; None if nothing waits

    def awaited(self, now: Instant) -> bool:
        """Returns whether no grant can be asked for now, because the last record that asked was not read yet."""
        return self._asking is not None and not self.member.retry_due(self._asking[1], now)

    def read(self, record: ClaimingMessages, accepted: bool) -> bool:
        """Takes a ClaimingMessages that was read and names the own session.

        Returns False if this client never sent it, so that a clone of its process did (T18): its nonce or its ranges
        are then not those of a record that was sent. What is granted to the clone must not be delivered by this
        process, too (D2).
        """
        if self._asking is not None and self._asking[0] == record.nonce:
            self._asking = None
        sent = self._sent.get(record.nonce)
        if sent is None:
            oldest = next(iter(self._sent), None)
            # a late copy of a record that is no longer kept
            return not accepted and oldest is not None and record.nonce < oldest
        return sent == record.ranges

    def forget(self) -> None:
        """Forgets what is in flight, because the session has ended and the next one has sent none of it."""
        self._sent.clear()
        self._asking = self._sent_ms = self.due_ms = None

    def ask(self, group: Group, now: Instant, out: Ready) -> int | None:
        """Asks for grants of the ranges that the claims offer (D2).

        One record asks for all claims. The next one is sent only when this one was read or is overdue (T17), and not
        before GRANT_PACE_MS have passed. If it must wait for that, it returns until when, which `due_ms` keeps.
        """
        self.due_ms = None
        if self.awaited(now):
            return None
        if self._asking is not None:
            self._asking = None
            for claim in self.member.claims.values():
                if isinstance(claim.tracker, AtMostOnce):
                    claim.tracker.asked = None
        early = self._sent_ms is not None and now.mono_ms - self._sent_ms < GRANT_PACE_MS
        asked: list[tuple[AtMostOnce, MessageRange]] = []
        for claim in self.member.claims.values():
            wanted = self._range_of(group, claim)
            if wanted is not None:
                asked.append(wanted)
                if early or len(asked) == HEARTBEAT_ENTRIES_MAX:
                    break
        if not asked:
            return None
        if early and self._sent_ms is not None:
            self.due_ms = self._sent_ms + GRANT_PACE_MS
            return self.due_ms
        for tracker, wanted_range in asked:
            tracker.asked = (wanted_range.from_, wanted_range.start, wanted_range.to)
        ranges = tuple(wanted_range for _, wanted_range in asked)
        nonce = self.member.liveness.new_nonce()
        self._asking, self._sent[nonce], self._sent_ms = (nonce, now.mono_ms), ranges, now.mono_ms
        if len(self._sent) > SENT_KEPT:
            del self._sent[next(iter(self._sent))]
        out.send.append(ClaimingMessages(self.member.session, ranges, nonce))
        return None

    def _range_of(self, group: Group, claim: Claim) -> tuple[AtMostOnce, MessageRange] | None:
        """Returns the range of offsets to ask for in one claim; None if there is nothing to ask for now.

        The range begins in what the driver wants and has no grant yet (`Claim.offer`).
        """
        offer, tracker = claim.offer, claim.tracker
        if offer is None or claim.phase is not ClaimPhase.OPEN or not isinstance(tracker, AtMostOnce):
            return None
        from_ = group.partitions[claim.tp].position
        start = max(offer[0], from_)
        to = min(offer[1], start + GRANT_OFFSETS_MAX)
        if start >= to:
            return None
        tracker.holds(tracker.delivered_to)  # drops grants that are used up
        if len(tracker.grants) >= GRANTS_AHEAD:
            return None
        return tracker, MessageRange(claim.epoch, from_, start, to)
