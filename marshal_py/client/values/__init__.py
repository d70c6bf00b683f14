"""What users pass in and get back: options, positions to start at, information, requests."""

from typing import Final

DOORS: Final = (
    "bounds",
    "finished",
    "group_config",
    "info",
    "keywords",
    "options",
    "reports",
    "requests",
    "retry",
    "waits",
    "where",
)
