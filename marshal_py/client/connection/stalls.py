"""Measures how long the background thread did not run although it should have. It decides nothing.

The thread says until when it waits, and when it woke. The time between is a stall: another thread kept the
interpreter's lock inside a call into C, the process was stopped, or the machine had no processor for it.
"""

from __future__ import annotations

from typing import Final

STALL_MS_MIN: Final = 200  # a busy machine is late by less than this
RECENT_MS: Final = 2_000  # a lease that ends longer after a stall has ended for another reason


class Stalls:
    """Counts the stalls of one thread; any thread may read the counts. Times are of this machine's monotonic clock."""

    def __init__(self) -> None:
        self.total_ms: int = 0
        self.longest_ms: int = 0
        self._due_ms: int | None = None  # until when it waits; None while it runs
        self._last_ms = 0
        self._ended_ms = -RECENT_MS

    def waits(self, until_ms: int) -> None:
        self._due_ms = until_ms

    def woke(self, now_ms: int) -> None:
        assert self._due_ms is not None
        late_ms, self._due_ms = now_ms - self._due_ms, None
        if late_ms >= STALL_MS_MIN:
            self.total_ms += late_ms
            self.longest_ms = max(self.longest_ms, late_ms)
            self._last_ms, self._ended_ms = late_ms, now_ms

    def recent_ms(self, now_ms: int) -> int:
        """Returns how many ms the newest stall has lasted, if it goes on or ended less than RECENT_MS ago; else 0."""
        due_ms = self._due_ms
        if due_ms is not None and now_ms - due_ms >= STALL_MS_MIN:
            return now_ms - due_ms
        return self._last_ms if now_ms - self._ended_ms < RECENT_MS else 0
