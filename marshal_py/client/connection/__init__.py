"""What the consumers of one Marshal share: its lock, threads, outbox and callbacks."""

from typing import Final

DOORS: Final = ("background_worker", "callbacks", "context", "end_budget", "forks", "repeats")
