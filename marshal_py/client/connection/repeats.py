"""Keeps the log of a process short while something goes on failing: a cause is written once a minute, not per attempt.

It decides nothing but that. One thread at a time may use an object of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

REPEAT_S: Final = 60.0  # a log that begins later, or is cut, shows within a minute what is still wrong
CAUSES_MAX: Final = 100  # causes that are remembered; the oldest is forgotten
DURATION: Final = re.compile(r"\d+(\.\d+)?\s?(ms|s)\b")  # librdkafka's texts have some: each attempt has another one


class Repeats:
    """Remembers which causes were written, and when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._written: dict[str, float] = {}

    def due(self, text: str) -> bool:
        """Tells whether the cause `text` should be written now, and then counts it as written.

        Texts that differ only in durations are one cause.
        """
        cause, now_s = DURATION.sub("", text), self._clock()
        written_s = self._written.get(cause)
        if written_s is not None and now_s - written_s < REPEAT_S:
            return False
        self._written.pop(cause, None)
        self._written[cause] = now_s
        if len(self._written) > CAUSES_MAX:
            del self._written[next(iter(self._written))]
        return True
