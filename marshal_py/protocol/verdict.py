"""The verdict: what the fold decided about one record (PROTOCOL.md F10.2). Values only."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from marshal_py.protocol.records import Record


class Outcome(IntEnum):
    """What the fold did with a record (F10.2): a rejected one breaks a rule, an ignored one is judged by no rule."""

    ACCEPTED = 0
    REJECTED = 1
    IGNORED = 2


class Verdict(Struct, frozen=True, gc=False):
    """What the fold decided about one record (F10.2). `reason` is "" if accepted.

    `group`: "" if the record belongs to none. `granted`: for an accepted ClaimingMessages, the indexes of
    the ranges that were granted (F5.2).
    """

    offset: int
    outcome: Outcome
    reason: str
    group: str
    record: Record | None
    granted: tuple[int, ...] = ()

    @property
    def accepted(self) -> bool:
        return self.outcome is Outcome.ACCEPTED
