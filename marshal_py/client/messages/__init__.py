"""A message in the user's hand and what is answered: acks, naks, terms, dead letters."""

from typing import Final

DOORS: Final = ("answers", "message")
