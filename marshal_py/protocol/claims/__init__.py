"""What one owner knows of one partition: finished messages, redeliveries, grants, delivery counts."""

from typing import Final

DOORS: Final = (
    "acked_spans",
    "at_most_once",
    "claim",
    "claim_records",
    "delivery",
    "offset_run",
    "poison_guard",
    "redelivery",
)
