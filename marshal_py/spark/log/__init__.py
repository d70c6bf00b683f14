"""The coordination log as tables: verdicts, states, archives, replays, reports."""

from typing import Final

DOORS: Final = ("archives", "replays", "reports")
