"""V10, nobody spins: a client that asks to be woken again and again is named, and the run ends there.

Otherwise such a run crawls, one tick per ms of virtual time, and passes. Counted are the wakes that a member asked for
by its deadline; what it reads, fetches and handles wakes it as well, and is bounded by what there is to do.
"""

from __future__ import annotations

from typing import Final

# T2's ten steps, three heartbeats (T9) and what falls due between them: in runs of sixty seeds 15 were the most.
WAKES_PER_INTERVAL_MAX: Final = 100


class BusyLoop(Exception):
    """A client asked to be woken more often than anything that it waits for can need."""


class Wakes:
    """Of one client, by true time."""

    def __init__(self, number: int, interval_ms: int) -> None:
        self._number, self._interval_ms = number, interval_ms
        self._since_ms, self._count = 0, 0

    def count(self, now_ms: int) -> None:
        """One wake. Raises BusyLoop behind the limit."""
        if now_ms - self._since_ms >= self._interval_ms:
            self._since_ms, self._count = now_ms, 0
        self._count += 1
        if self._count > WAKES_PER_INTERVAL_MAX:
            raise BusyLoop(
                f"client {self._number} asked to be woken {self._count} times within "
                f"{now_ms - self._since_ms + 1} ms, {WAKES_PER_INTERVAL_MAX} times in its interval of "
                f"{self._interval_ms} ms are allowed"
            )
