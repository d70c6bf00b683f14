"""Defines the verdict: what the fold decided about one record (PROTOCOL.md F10.2). Holds values only."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from marshal_py.protocol.fold.world import Span
from marshal_py.protocol.wire.records import Record


class Outcome(IntEnum):
    """Says what the fold did with a record (F10.2). A rejected record breaks a rule; no rule judges an ignored one."""

    ACCEPTED = 0
    REJECTED = 1
    IGNORED = 2


class Verdict(Struct, frozen=True, gc=False):
    """Says what the fold decided about one record (F10.2). `reason` is "" if it was accepted, else a word for why not.

    `group`: "" if the record belongs to none. `granted`: for an accepted ClaimingMessages, the indexes of the ranges
    that were granted (F5.2). `unsettled`: for an accepted ClaimingPartition, the grants of the last owner of which
    nobody knows what became (F4.5); None if there are none.
    """

    offset: int
    outcome: Outcome
    reason: str
    group: str
    record: Record | None
    granted: tuple[int, ...] = ()
    unsettled: Span | None = None

    @property
    def accepted(self) -> bool:
        return self.outcome is Outcome.ACCEPTED
