"""V10, no busy loop: ends a run in which a client asks to be woken again and again, and names the client.

Without this check such a run would go on with one tick per ms of virtual time, slowly, and pass. Only the wakes that a
member's deadline asks for count. Reading, fetching and handlers wake a client as well, but only as often as there is
work to do.
"""

from __future__ import annotations

from typing import Final

# T2's ten steps, three heartbeats (T9) and what falls due between them: in runs of sixty seeds 15 were the most.
WAKES_PER_INTERVAL_MAX: Final = 100


class BusyLoop(Exception):
    """Raised when a client asks to be woken more often than any wait can need."""


class WakeCounter:
    """Counts the wakes of one client in each of its intervals of true time."""

    def __init__(self, number: int, interval_ms: int) -> None:
        self._number, self._interval_ms = number, interval_ms
        self._since_ms, self._count = 0, 0

    def excuse(self) -> None:
        """Counts one wake less: something has happened for which the member asked for it."""
        self._count -= 1

    def count(self, now_ms: int) -> None:
        """Counts one wake. Raises BusyLoop if there are more than WAKES_PER_INTERVAL_MAX in an interval."""
        if now_ms - self._since_ms >= self._interval_ms:
            self._since_ms, self._count = now_ms, 0
        self._count += 1
        if self._count > WAKES_PER_INTERVAL_MAX:
            raise BusyLoop(
                f"client {self._number} asked to be woken {self._count} times within "
                f"{now_ms - self._since_ms + 1} ms, {WAKES_PER_INTERVAL_MAX} times in its interval of "
                f"{self._interval_ms} ms are allowed"
            )
