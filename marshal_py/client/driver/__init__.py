"""Carries out what members decide: the background thread's turns, the log's upkeep, last wills."""

from typing import Final

DOORS: Final = ("consumer_driver", "last_wills", "loop")
