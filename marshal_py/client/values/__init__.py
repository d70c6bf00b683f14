"""What users pass in and get back: options, positions to start at, information, requests."""

from typing import Final

DOORS: Final = ("finished", "group_config", "info", "options", "position_text", "reports", "requests", "retry", "waits")
