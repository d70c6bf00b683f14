"""The judge of clean stops: V11. In a group at rest each partition of a consumer that stops is claimed once.

Like auditor.py it knows the oracle only, and what the run says of its own course. A group is at rest when nobody joins,
ends or claims for an interval before, and nobody but the leaver ends until the next departure.
"""

from __future__ import annotations

from marshal_py.simulator.auditor_evidence import Violation
from marshal_py.simulator.auditor_history import History
from marshal_py.simulator.auditor_liveness import Demands, Departure


def judge_stops(demands: Demands, history: History) -> list[Violation]:
    """Every partition that moved twice because somebody stopped."""
    found: list[Violation] = []
    for at, gone in enumerate(demands.departures, 1):
        end_ms = demands.departures[at].ms if at < len(demands.departures) else demands.end_ms
        if gone.how == "left" and gone.group in demands.topics and _at_rest(history, gone, end_ms):
            found += _moved_twice(history, gone, end_ms)
    return found


def _at_rest(history: History, gone: Departure, end_ms: float) -> bool:
    appended_ms, since_ms = history.evidence.appended_ms, gone.ms - gone.interval_ms
    for key, tenures in history.by_key.items():
        for tenure in tenures if key[0] == gone.group else ():
            if appended_ms[tenure.session] >= since_ms or since_ms <= tenure.ms < gone.ms:
                return False
            ended_ms = appended_ms[tenure.end] if tenure.end < len(appended_ms) else end_ms + 1
            moved = tenure.ended_by == "ReleasingPartition" and ended_ms >= gone.ms
            if since_ms <= ended_ms <= end_ms and tenure.session != gone.session and not moved:
                return False
    return True


def _moved_twice(history: History, gone: Departure, end_ms: float) -> list[Violation]:
    found = []
    for key, tenures in history.by_key.items():
        had = [t for t in tenures if t.session == gone.session and t.ms < gone.ms] if key[0] == gone.group else []
        after = [t for t in tenures if had and t.epoch > had[-1].epoch and t.ms < end_ms]
        if len(after) > 1 and history.evidence.appended_ms[had[-1].end] >= gone.ms:
            found.append(
                Violation(
                    "V11",
                    round(after[1].ms),
                    after[1].epoch,
                    f"{key} is claimed {len(after)} times: session {gone.session} of {gone.group} had stopped",
                )
            )
    return found
