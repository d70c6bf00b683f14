"""What a simulated consumer has fetched of one claim, and what of it is in handlers."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any, NamedTuple

from marshal_py.protocol.claim import Claim
from marshal_py.protocol.delivery import AtLeastOnce, OffsetRun
from marshal_py.simulator.auditor_evidence import Delivery


class Flight(NamedTuple):
    """One message in a handler."""

    delivery: Delivery
    run: OffsetRun | None
    place: int  # its index in the run


class Feed:
    """What one claim has fetched and handed over."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.runs: deque[OffsetRun] = deque()  # at least once
        self.buffer: deque[int] = deque()  # at most once
        self.flying: dict[int, Flight] = {}
        self.blocked = False

    def copy(self, memo: dict[int, Any]) -> Feed:
        """For a twin: what was fetched, without what is in handlers."""
        twin = Feed.__new__(Feed)
        twin.claim = deepcopy(self.claim, memo)
        twin.runs = deepcopy(self.runs, memo)
        twin.buffer, twin.flying = deque(self.buffer), {}
        twin.blocked = self.blocked
        return twin

    def begins_at(self) -> int:
        """Where fetching begins."""
        tracker = self.claim.tracker
        return tracker.position() if isinstance(tracker, AtLeastOnce) else tracker.delivered_to

    def waiting(self) -> int:
        """Messages fetched and not handed over."""
        return sum(len(run.offsets) - run.delivered for run in self.runs) + len(self.buffer)
