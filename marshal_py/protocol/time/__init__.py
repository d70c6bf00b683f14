"""Leases, heartbeats and silence: when a member may deliver, and when it is taken for dead."""

from typing import Final

DOORS: Final = ("failure_detector", "liveness")
