"""`process`: handlers in parallel, in the order of each key."""

from typing import Final

DOORS: Final = ("lanes", "process", "processing", "worker_processes")
