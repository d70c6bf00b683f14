"""The judgement on one record: what the fold says about it (PROTOCOL.md F10.2). A value; decides nothing."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from marshal_py.protocol.records import Record


class Outcome(IntEnum):
    """What became of a record (F10.2)."""

    ACCEPTED = 0
    REJECTED = 1
    IGNORED = 2


class Verdict(Struct, frozen=True, gc=False):
    """The one judgement on one record (F10.2). `reason` is "" when accepted; `group` "" where none is known.

    `granted`: of an accepted ClaimingMessages, the indexes of the ranges that were granted (F5.2).
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
