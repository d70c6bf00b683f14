"""From fetched messages to deliveries: buffers, prefetch, grants, redeliveries."""

from typing import Final

DOORS: Final = ("buffers", "delivery_queue", "fetched_claims", "grants", "prefetch", "redelivery")
