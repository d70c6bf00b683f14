"""How fast the user handles messages: what the size of grants (PROTOCOL.md D2) and fetching ahead follow.

Counts while the user has messages, not while he waits for some. Reads no clock; callers hold the Marshal's lock.
"""

from __future__ import annotations

from typing import Final

FIRST_MESSAGES: Final = 1  # while nothing is known: a handler may take seconds, and what is granted is lost by a crash
BUSY_MS_MIN: Final = 20  # shorter is not measured: the clock counts whole ms
BUSY_MS_MAX: Final = 2_000  # of the past that counts: what was before fades


class HandlingRate:
    """Messages per second of one user."""

    __slots__ = ("_busy_ms", "_handed_over", "_handled")

    def __init__(self) -> None:
        self._handled = 0.0
        self._busy_ms = 0.0
        self._handed_over: tuple[int, int] | None = None  # (messages before, when) of what the user has now

    def handed_over(self, messages_before: int, mono_ms: int) -> None:
        """The user gets messages. `messages_before`: how many he had got in all before these."""
        if self._handed_over is None:
            self._handed_over = messages_before, mono_ms

    def waits(self) -> bool:
        """Whether the user has what was handed over and has not asked for more."""
        return self._handed_over is not None

    def returned(self, messages: int, mono_ms: int) -> None:
        """The user asks for more; he has got `messages` in all by now."""
        if self._handed_over is None:
            return
        before, since_ms = self._handed_over
        self._handed_over = None
        self._handled += messages - before
        self._busy_ms += mono_ms - since_ms
        if self._busy_ms > BUSY_MS_MAX:
            part = BUSY_MS_MAX / self._busy_ms
            self._handled, self._busy_ms = self._handled * part, self._busy_ms * part

    def slower_than(self, per_second: int) -> bool:
        """Whether it is known that the user handles fewer messages than that."""
        return self._busy_ms >= BUSY_MS_MIN and 1000 * self._handled < per_second * self._busy_ms

    def per_second(self) -> int:
        """About a second's work, at least 1."""
        if not self._handled:
            return FIRST_MESSAGES
        return max(1, round(1000 * self._handled / max(BUSY_MS_MIN, self._busy_ms)))
