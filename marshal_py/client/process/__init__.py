"""`process`: handlers in parallel, in the order of each key."""

from typing import Final

DOORS: Final = ("async_process", "lanes", "process", "processing", "worker_processes")
