"""The verdict: what the fold decided about one record (PROTOCOL.md F10.2). Values only."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from marshal_py.protocol.records import Record


class Outcome(IntEnum):
    """Whether a record changed the world (F10.2): rejected ones break a rule, ignored ones are not judged by any."""

    ACCEPTED = 0
    REJECTED = 1
    IGNORED = 2


class Verdict(Struct, frozen=True, gc=False):
    """What the fold decided about one record (F10.2). `reason` is "" if accepted; `group` is "" if there is none.

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
