"""Measures how fast the user handles messages. How much is fetched and granted depends on it.

A grant is the log's permission to deliver a range of offsets, in at-most-once mode (PROTOCOL.md D2).

Time counts while the user has messages, not while he waits for some. Callers pass the time in and hold the lock.
"""

from __future__ import annotations

from typing import Final

FIRST_MESSAGES: Final = 1  # per second, until measured: a handler may take seconds, and a crash loses what was granted
BUSY_MS_MIN: Final = 20  # a rate over less time is too inexact, as the clock counts whole ms
BUSY_MS_MAX: Final = 2_000  # time that counts; what was measured before fades


class HandlingRate:
    """Measures how many messages per second one user handles."""

    __slots__ = ("_busy_ms", "_handled", "_since", "_total")

    def __init__(self) -> None:
        self._handled = 0.0
        self._total = 0
        self._busy_ms = 0.0
        self._since: tuple[int, int] | None = None  # (messages before, ms) of those that the user has now

    def delivered(self, messages_before: int, mono_ms: int) -> None:
        """Notes that the user gets messages now. `messages_before`: how many he had got before these, in all."""
        if self._since is None:
            self._since = messages_before, mono_ms

    def returned(self, messages: int, mono_ms: int) -> None:
        """Notes that the user asks for more messages. `messages`: how many he has got so far, in all."""
        if self._since is None:
            return
        before, since_ms = self._since
        self._since = None
        self._handled += messages - before
        self._total += messages - before
        self._busy_ms += mono_ms - since_ms
        if self._busy_ms > BUSY_MS_MAX:
            part = BUSY_MS_MAX / self._busy_ms
            self._handled, self._busy_ms = self._handled * part, self._busy_ms * part

    def slower_than(self, per_second: int) -> bool:
        """Tells whether the user handles fewer than `per_second` messages a second; False until measured."""
        return self._busy_ms >= BUSY_MS_MIN and 1000 * self._handled < per_second * self._busy_ms

    def per_second(self) -> int:
        """Returns about how many messages the user handles per second: at least 1, FIRST_MESSAGES until measured."""
        if not self._handled:
            return FIRST_MESSAGES
        return max(1, round(1000 * self._handled / max(BUSY_MS_MIN, self._busy_ms)))

    def within(self, ms: int) -> int:
        """Returns how many messages the user handles within `ms` at this rate: at least 1, and 1 until measured.

        It is never more than twice what he has handled so far: few fast messages do not prove that the next are fast.
        """
        if not self._handled:
            return 1
        return max(1, min(int(ms * self._handled / max(BUSY_MS_MIN, self._busy_ms)), 2 * self._total))
