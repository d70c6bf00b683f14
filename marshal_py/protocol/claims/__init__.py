"""What one owner knows of one partition: finished messages, redeliveries, grants, delivery counts."""

from typing import Final

DOORS: Final = ("claim", "delivery")
