"""What is read of a group, from a world: rows, diagnoses, pins."""

from typing import Final

DOORS: Final = (
    "diagnosis", "exposition", "group_info", "health", "overview", "pause_history", "recreated_topics", "suggestions",
    "trends",
)  # fmt: skip
