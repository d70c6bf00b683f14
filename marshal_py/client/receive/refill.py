"""Decides when `consume` asks for more, and for how much (ADR-37, section "Buffering messages"). It does nothing else.

It has no clock. It counts messages or bytes; a unit below is one of them. What is pending was asked for and has not
been delivered: it is still to come, or buffered. What is buffered is not counted here a second time: it is passed in,
so that buffers which are dropped with a lost claim need no correction.
"""

from __future__ import annotations


class Refill:
    """Keeps the units that were asked for and have not come, for one limit and its threshold."""

    limit: int
    threshold: int

    def __init__(self, limit: int, threshold: int, expires_ms: int) -> None:
        """Asks for what is missing to `limit` pending when `threshold` are left; what has not come `expires_ms` after
        the last request is given up."""
        self.limit, self.threshold = limit, threshold
        self._expires_ms = expires_ms
        self._until_ms = 0
        self.to_come: int = 0

    def pending(self, buffered: int) -> int:
        """Returns how many units are pending: at most `limit`, though a look (prefetch.py) may buffer more."""
        return min(self.limit, self.to_come + buffered)

    def request(self, buffered: int, now_ms: int) -> int:
        """Returns how many units to ask for now, which then count as pending; 0 if none."""
        if self.to_come and now_ms >= self._until_ms:
            self.to_come = 0
        pending = self.pending(buffered)
        if pending > self.threshold or pending >= self.limit:
            return 0
        asked = self.limit - buffered - self.to_come
        if asked <= 0:
            return 0
        self.to_come += asked
        self._until_ms = now_ms + self._expires_ms
        return asked

    def came(self, units: int) -> None:
        self.to_come = max(0, self.to_come - units)

    def give_up(self) -> None:
        """Gives up what has not come, for example because the next message is larger than what is left."""
        self.to_come = 0

    def before_threshold(self, buffered: int) -> int:
        """Returns how many units may be delivered until the next request is due; at least 1."""
        return max(1, self.pending(buffered) - self.threshold)
