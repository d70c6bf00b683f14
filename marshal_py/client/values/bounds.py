"""How much of a consumer is in flight inside the library: bounds that are no options, because no user needs others.

What users bound is memory (`prefetch_bytes`) and messages in work (`max_acks_pending`). Tests set lower values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class Bounds:
    """The bounds, in messages.

    `unacked`: offsets tracked per partition; while there are so many, it is not fetched (D1). `prefetch`: taken from
    librdkafka at once, which amortises the call, and delivered by a drain at most. `grant`: of a partition in one
    grant, in at-most-once mode, however fast the handler is; with half of it a consumer of a million messages per
    second waits for its grants for a sixth of the time.
    """

    unacked: int = 100_000
    prefetch: int = 1_000
    grant: int = 8_000


BOUNDS: Final = Bounds()
