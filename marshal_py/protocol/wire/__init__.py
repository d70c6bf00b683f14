"""Bytes and records: what stands in the log, and nothing that judges it."""

from typing import Final

DOORS: Final = ("codec", "identity", "progress", "records")
