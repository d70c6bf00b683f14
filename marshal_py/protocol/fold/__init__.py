"""Records in, world out: the rationalizer, the rules that it applies, and snapshots of a world."""

from typing import Final

DOORS: Final = ("policies", "rationalizer", "snapshot", "world")
