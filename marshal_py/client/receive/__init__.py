"""The calls that receive, confirm and end, as generators that yield what they wait for."""

from typing import Final

DOORS: Final = ("consume", "consuming", "membership", "receiving")
