"""The judge of clean stops: V11. In a group at rest, each partition of a consumer that stops is claimed once.

Like auditor.py it knows only the oracle and the run's own account of its course. A group is at rest if no session
joins, ends or claims in the interval before the stop, and no session but the leaver's ends until the next departure.
A group with conditions (A12) is never at rest: what is pending moves partitions, too.
"""

from __future__ import annotations

from marshal_sim.judge.evidence import Violation
from marshal_sim.judge.history import History
from marshal_sim.judge.liveness import Demands, Departure, overflows


def judge_stops(demands: Demands, history: History) -> list[Violation]:
    """Returns a violation for every partition that moved twice because a member stopped."""
    found: list[Violation] = []
    for at, gone in enumerate(demands.departures, 1):
        end_ms = demands.departures[at].ms if at < len(demands.departures) else demands.end_ms
        group = history.oracle.groups.get(gone.group)
        if gone.how != "left" or gone.group not in demands.topics or group is None or overflows(group):
            continue
        if _at_rest(history, gone, end_ms):
            found += _moved_twice(history, gone, end_ms)
    return found


def _at_rest(history: History, gone: Departure, end_ms: float) -> bool:
    appended_ms, since_ms = history.evidence.appended_ms, gone.ms - gone.interval_ms
    for key, claims in history.by_key.items():
        for claim in claims if key[0] == gone.group else ():
            if appended_ms[claim.session] >= since_ms or since_ms <= claim.ms < gone.ms:
                return False
            ended_ms = appended_ms[claim.end] if claim.end < len(appended_ms) else end_ms + 1
            moved = claim.ended_by == "ReleasingPartition" and ended_ms >= gone.ms
            if since_ms <= ended_ms <= end_ms and claim.session != gone.session and not moved:
                return False
    return True


def _moved_twice(history: History, gone: Departure, end_ms: float) -> list[Violation]:
    found = []
    for key, claims in history.by_key.items():
        had = [t for t in claims if t.session == gone.session and t.ms < gone.ms] if key[0] == gone.group else []
        after = [t for t in claims if had and t.epoch > had[-1].epoch and t.ms < end_ms]
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
