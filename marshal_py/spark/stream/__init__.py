"""The source: claims, batches and the messages that executors read."""

from typing import Final

DOORS: Final = ("aliases", "batches", "listener", "messages", "micro_batches", "options", "session")
