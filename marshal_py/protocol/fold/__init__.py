"""Records in, world out: the rationalizer, the rules that it applies, and snapshots of a world."""

from typing import Final

DOORS: Final = ("admin_rules", "policies", "rationalizer", "snapshot", "transitions", "verdict", "world")
