"""Reports single messages in the group's log and to the consumer's user, in a bounded number of records.

Handlers may terminate thousands of messages per second, and each Note is a record that every member of the group reads.
So only the first few of a period get a Note each; the rest of the period shares one per partition and kind. Called with
the Marshal's lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from marshal_py.history.advisories import PARKED, TOGETHER, to_lines
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.member.advisory import ALARMING, Advisory, AdvisoryKind
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, TopicPartition

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


# --- Writes a consumer's advisories to `logging`, in few lines, for people (docs/monitoring.md).
#
# Advisories of kinds that often come by the dozen (TOGETHER) are held back, so that those that are alike make one
# line. They are written when an advisory of any other kind comes, when a step of the consumer brings none, or when
# the next one comes after HELD_MS. Partitions that are parked are found out about one by one: a step that brings none
# writes them after HELD_MS. The order stays. Called with the Marshal's lock held.


HELD_MS: Final = 1_000  # the records of one decision are read within a few round trips; a second does not bother people


class EventLog:
    """Collects the advisories of one consumer and writes their lines to the log of this process."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._held: list[Advisory] = []

    def add(self, advisories: Sequence[Advisory]) -> None:
        """Takes the advisories of one step of the consumer. Their `time_ms` must be set."""
        for one in advisories:
            if one.kind == "handler_failed" or not self._logger.isEnabledFor(_level(one)):
                continue  # the former are logged with their traceback (consuming.py)
            if one.kind not in TOGETHER or (self._held and one.time_ms - self._held[0].time_ms >= HELD_MS):
                self.flush()
            self._held.append(one)
            if one.kind not in TOGETHER:
                self.flush()

    def settle(self, now_ms: int) -> None:
        """Takes note of a step that has brought no advisory. `now_ms`: ms since 1970."""
        if not any(one.kind == PARKED for one in self._held) or now_ms - self._held[0].time_ms >= HELD_MS:
            self.flush()

    def flush(self) -> None:
        """Writes the advisories that were held back."""
        if not self._held:
            return
        held, self._held = self._held, []
        for alike, words in to_lines(held):
            one = alike[0]
            partitions = [advisory.partition for advisory in alike if advisory.partition != NONE]
            fields = {
                "marshal_kind": one.kind,
                "marshal_group": one.group,
                "marshal_topic": one.topic,
                "marshal_partition": one.partition if len(alike) == 1 else NONE,
                "marshal_partitions": partitions,
                "marshal_session": one.session,
                "marshal_client_id": one.client_id,
            }
            self._logger.log(_level(one), "group %s: %s", one.group, words, extra=fields)


def _level(advisory: Advisory) -> int:
    return logging.WARNING if advisory.kind in ALARMING else logging.INFO
