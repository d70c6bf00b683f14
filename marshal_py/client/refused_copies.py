"""Tells refusals of the copy of positions in Kafka (D7) that last from those that pass.

A coordinator that moves or starts refuses for some seconds; the next copy then succeeds, and nobody needs to know.
Pure.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from marshal_py.protocol.identity import Instant

LASTS_MS: Final = 30_000  # six copies in a row; a coordinator that moves is there again within some seconds


class RefusedCopies:
    """Collects the answers of Kafka to the copies of one consumer."""

    def __init__(self) -> None:
        self._since: Instant | None = None  # of the first refusal after which no copy has succeeded
        self._told = ""

    def answered(self, refused: str, now: Instant) -> str:
        """Takes the answer to a copy: why Kafka refused it, or "". Returns what to report of a refusal, "" if nothing.

        Once per reason, when Kafka has refused every copy for LASTS_MS.
        """
        if not refused:
            self._since, self._told = None, ""
            return ""
        if self._since is None:
            self._since = now
        if refused == self._told or now.mono_ms - self._since.mono_ms < LASTS_MS:
            return ""
        self._told = refused
        since = datetime.fromtimestamp(self._since.wall_ms / 1000, UTC).isoformat(timespec="seconds")
        return f"{refused}; no copy has succeeded since {since}"
