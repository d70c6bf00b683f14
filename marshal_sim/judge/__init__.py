"""Judges a run by the oracle's fold and a journal of deliveries. It shares no code with what it judges."""

from typing import Final

DOORS: Final = (
    "auditor",
    "checkpoints",
    "conditions",
    "evidence",
    "facts",
    "history",
    "liveness",
    "model",
    "step_checker",
    "stops",
)
