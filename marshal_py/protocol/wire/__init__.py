"""Bytes and records: what stands in the log, and nothing that judges it."""

from typing import Final

DOORS: Final = ("codec", "fencing_token", "identity", "progress", "records", "signatures", "subscription", "wills")
