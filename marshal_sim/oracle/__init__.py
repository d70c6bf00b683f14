"""A second fold, written from PROTOCOL.md alone: it exists to disagree."""

from typing import Final

DOORS: Final = ("oracle", "rules", "snapshot", "state", "wire")
