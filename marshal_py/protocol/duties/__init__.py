"""What one process does for everybody: snapshots, and the sessions that nobody else would end."""

from typing import Final

DOORS: Final = ("orphans", "snapshotter")
