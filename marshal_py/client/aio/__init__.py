"""How the same calls run on an event loop."""

from typing import Final

DOORS: Final = ("async_consume", "async_process", "event_loop")
