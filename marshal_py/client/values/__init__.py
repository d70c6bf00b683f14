"""What users pass in and get back: options, positions to start at, information, requests."""

from typing import Final

DOORS: Final = (
    "counters",
    "event_log",
    "finished",
    "group_config",
    "info",
    "keywords",
    "options",
    "reports",
    "requests",
    "retention",
    "retry",
    "sizes",
    "start_positions",
    "waits",
)
