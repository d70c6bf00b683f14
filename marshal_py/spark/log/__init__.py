"""The coordination log as tables: verdicts, states, reports."""

from typing import Final

DOORS: Final = ("reports",)
