"""Bytes and records: what stands in the log, and nothing that judges it."""

from typing import Final

DOORS: Final = ("codec", "identity", "last_will", "parking", "progress", "records", "routing", "subscription")
