"""Notices messages whose handlers are silent for long, before the handler timeout ends their claims (PROTOCOL.md D4).

Such a message is easily forgotten: others are acked and the partition seems to move, but its position does not. Called
with the Marshal's lock held, every third of a heartbeat interval.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from marshal_py.client.values.bounds import BOUNDS
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, Instant

QUARTERS: Final = 4  # an event at each quarter of the handler timeout: early enough to look, and only three of them


class UnackedWatch:
    """Reports the oldest unacked message of each claim while it grows old, and a claim that tracks too many."""

    def __init__(self, member: Member, options: ConsumerOptions) -> None:
        self._member = member
        self._timeout_ms = round(1000 * options.handler_timeout_s)
        self._reported: dict[int, int] = {}  # epoch -> quarters of the timeout that were reported of its oldest message
        self._full: set[int] = set()  # epochs of which it was reported that nothing more is fetched

    def look(self, claims: Iterable[Claim], now: Instant) -> None:
        """Reports what has changed since the last look."""
        reported, self._reported = self._reported, {}
        full, self._full = self._full, set()
        for claim in claims:
            if claim.sealed:
                continue
            quarters, offset, age_ms = self._age(claim, now)
            if quarters:
                self._reported[claim.epoch] = quarters
            if quarters > reported.get(claim.epoch, 0):
                text = (
                    f"the oldest unacked message is {age_ms / 1000:.0f} s old; at {self._timeout_ms / 1000:g} s "
                    f"(handler_timeout_s) its partition is released"
                )
                self._advise(claim, offset, text)
            if isinstance(claim.tracker, AtLeastOnce) and claim.tracker.tracked >= BOUNDS.unacked:
                self._full.add(claim.epoch)
                if claim.epoch not in full:
                    text = f"{claim.tracker.tracked} messages are tracked above it: no more are fetched"
                    self._advise(claim, claim.position(), text)

    def _age(self, claim: Claim, now: Instant) -> tuple[int, int, int]:
        """Returns how many quarters of the timeout the longest silent handler was silent, its message, and its age.

        In at-most-once mode the message is not known: NONE.
        """
        oldest = claim.tracker.oldest() if isinstance(claim.tracker, AtLeastOnce) else None
        since_ms = claim.handler_since_ms() if oldest is None else oldest[0]
        if since_ms is None:
            return 0, NONE, 0
        age_ms = max(0, now.mono_ms - since_ms)
        return min(QUARTERS - 1, age_ms * QUARTERS // self._timeout_ms), NONE if oldest is None else oldest[1], age_ms

    def _advise(self, claim: Claim, offset: int, text: str) -> None:
        self._member.advise("unacked", claim.tp, epoch=claim.epoch, offset=offset, text=text)
        self._member.request_tick()
