"""Reports single messages in the group's log and to the consumer's user, in a bounded number of records.

Handlers may terminate thousands of messages per second, and each Note is a record that every member of the group reads.
So only the first few of a period get a Note each; the rest of the period shares one per partition and kind. Called with
the Marshal's lock held.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.member.advisory import AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import TopicPartition

NOTES_EACH_MAX: Final = 16  # Notes of single messages per period, a third of a heartbeat interval


class _More(NamedTuple):
    """Sums up the messages of a period that got no Note of their own."""

    epoch: int
    low: int
    high: int
    messages: int
    text: str


class Reports:
    """Reports the messages of one consumer."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._left = NOTES_EACH_MAX
        self._more: dict[tuple[AdvisoryKind, TopicPartition], _More] = {}

    def note(self, kind: AdvisoryKind, claim: Claim, offset: int, text: str) -> None:
        """Reports that `kind` happened to the message at `offset`; `text` says why."""
        if self._left:
            self._left -= 1
            self._member.note(kind, claim.tp, offset, offset + 1, text, claim.epoch)
            self._member.request_tick()
            return
        key = kind, claim.tp
        known = self._more.get(key)
        if known is None or known.epoch != claim.epoch:
            self._send(key)
            known = _More(claim.epoch, offset, offset, 0, "")
        low, high = min(known.low, offset), max(known.high, offset)
        self._more[key] = _More(claim.epoch, low, high, known.messages + 1, text)

    def end_period(self) -> None:
        """Reports what was summed up. Called every third of a heartbeat interval."""
        self._left = NOTES_EACH_MAX
        for key in [*self._more]:
            self._send(key)

    def _send(self, key: tuple[AdvisoryKind, TopicPartition]) -> None:
        more = self._more.pop(key, None)
        if more is not None:
            text = f"{more.messages} messages of this range; the last one: {more.text}"
            self._member.note(key[0], key[1], more.low, more.high + 1, text, more.epoch)
            self._member.request_tick()
