"""Feeds many hostile records through the codec and both folds: the loop that a test and `make soak` share."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.support import hostile
from tests.support.differential_log import DifferentialLog

LOG_RECORDS = 400  # records per log: worlds stay small, and each log begins from nothing
AUDIT_RECORDS = 50


def flood(seed: int, records: int) -> Counter[str]:
    """How often each outcome was seen: accepted, a reason, or stop. Raises where the two folds differ."""
    seen: Counter[str] = Counter()
    for done in range(0, records, LOG_RECORDS):
        rng = Random(seed + done)
        log = DifferentialLog(2 if rng.random() < 0.1 else 1, exhaustive=False)
        try:
            for step in range(min(LOG_RECORDS, records - done)):
                verdict, error = log.fold(hostile.hostile(rng, log.world, log.values))
                seen["stop" if error else (verdict.reason if verdict else "") or "accepted"] += 1
                if step % AUDIT_RECORDS == AUDIT_RECORDS - 1:
                    log.audit()
            log.audit()
        except Exception as error:
            error.add_note(f"seed {seed}, log that began after {done} records, offset {log.world.next_offset}")
            raise
    return seen
