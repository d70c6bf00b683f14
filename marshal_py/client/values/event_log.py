"""Writes a consumer's advisories to `logging`, in few lines, for people (docs/monitoring.md).

Advisories of kinds that often come by the dozen (TOGETHER) are held back, so that those that are alike make one line.
They are written when an advisory of any other kind comes, when a step of the consumer brings none, or when the next
one comes after HELD_MS. Partitions that are parked are found out about one by one: a step that brings none writes them
after HELD_MS. The order stays. Called with the Marshal's lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from marshal_py.history.advisories import PARKED, TOGETHER, to_lines
from marshal_py.protocol.member.advisory import ALARMING, Advisory
from marshal_py.protocol.wire.identity import NONE

HELD_MS: Final = 1_000  # the records of one decision are read within a few round trips; a second does not bother people


class EventLog:
    """Collects the advisories of one consumer and writes their lines to the log of this process."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._held: list[Advisory] = []

    def add(self, advisories: Sequence[Advisory]) -> None:
        """Takes the advisories of one step of the consumer. Their `time_ms` must be set."""
        for one in advisories:
            if not self._logger.isEnabledFor(_level(one)):
                continue
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
