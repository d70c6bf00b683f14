"""One budget of time for all ends of a Marshal: the stops and drains of its consumers, and its own `close`.

While the cluster does not answer, each of them waits in vain. Together they must stay well below the 30 s that
Kubernetes gives a container, so what one of them has used up the next ones do not get again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

END_TIMEOUT_S: Final = 20.0  # of all ends together while the cluster does not answer
END_S_MIN: Final = 1.0  # each gets so much: many round trips, if the cluster answers again


class EndBudget:
    """Counts what the ends of one Marshal have used, until one of them is answered. Needs no lock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until: float | None = None  # monotonic

    def deadline(self, timeout_s: float) -> float:
        """Returns until when (monotonic, seconds) an end that may take `timeout_s` seconds may wait for the cluster."""
        now = self._monotonic()
        if self._until is None or now >= self._until + END_TIMEOUT_S:
            self._until = now + max(END_TIMEOUT_S, timeout_s)
        return now + min(timeout_s, max(END_S_MIN, self._until - now))

    def answered(self) -> None:
        """Notes that an end was answered: the next one has all its time."""
        self._until = None
