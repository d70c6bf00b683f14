"""What the consumers of one Marshal share: its lock, threads, outbox and callbacks."""

from typing import Final

DOORS: Final = ("context", "threads")
