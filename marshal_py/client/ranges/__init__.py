"""Claims whose messages somebody else reads, as Spark's executors do: ranges of offsets and their batches."""

from typing import Final

DOORS: Final = ("microbatches", "ranges")
