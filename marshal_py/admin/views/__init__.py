"""What is read of a group, from a world: rows, diagnoses, pins."""

from typing import Final

DOORS: Final = (
    "diagnosis",
    "group_info",
    "group_state",
    "looking",
    "overview",
    "pause_history",
    "pins",
    "recreated_topics",
    "suggestions",
)
