"""From fetched messages to deliveries: buffers, prefetch, grants, redeliveries."""

from typing import Final

DOORS: Final = ("buffers", "delivery_queue", "prefetch")
