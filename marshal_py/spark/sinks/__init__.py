"""Tables in which each message has its rows once."""

from typing import Final

DOORS: Final = ("database", "delta", "guards", "iceberg")
