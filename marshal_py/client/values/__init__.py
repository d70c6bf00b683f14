"""What users pass in and get back: options, positions to start at, information, requests."""

from typing import Final

DOORS: Final = (
    "bounds",
    "finished",
    "group_config",
    "info",
    "keywords",
    "options",
    "position_text",
    "reports",
    "requests",
    "retry",
    "waits",
)
