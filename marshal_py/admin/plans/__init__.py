"""What is changed in a group: each operation is a plan that a runner carries out."""

from typing import Final

DOORS: Final = ("change", "impact", "operation", "pause", "position", "sessions")
