"""What users pass in and get back: options, positions to start at, information, requests."""

from typing import Final

DOORS: Final = ("finished", "info", "options", "position_text", "requests")
