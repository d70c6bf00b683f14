"""The messages that a simulated consumer has fetched for one claim, and those that are in handlers."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any, NamedTuple

from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.claims.offset_run import OffsetRun
from marshal_sim.judge.evidence import Delivery


class HandlerCall(NamedTuple):
    """Describes one message that a handler works on."""

    delivery: Delivery
    run: OffsetRun | None
    place: int  # its index in the run


class Feed:
    """Holds the messages of one claim that are fetched, and those that handlers have."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.runs: deque[OffsetRun] = deque()  # in at-least-once mode
        self.buffer: deque[int] = deque()  # in at-most-once mode
        self.running: dict[int, HandlerCall] = {}
        self.blocked = False

    def copy(self, memo: dict[int, Any]) -> Feed:
        """Returns a copy for a cloned process: it has the fetched messages, but not those in handlers."""
        clone = Feed.__new__(Feed)
        clone.claim = deepcopy(self.claim, memo)
        clone.runs = deepcopy(self.runs, memo)
        clone.buffer, clone.running = deque(self.buffer), {}
        clone.blocked = self.blocked
        return clone

    def begins_at(self) -> int:
        """Returns the offset where fetching begins."""
        tracker = self.claim.tracker
        return tracker.position() if isinstance(tracker, AtLeastOnce) else tracker.delivered_to

    def waiting(self) -> int:
        """Returns how many messages are fetched and not handed over."""
        return sum(len(run.offsets) - run.delivered for run in self.runs) + len(self.buffer)
