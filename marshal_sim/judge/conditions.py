"""The judge of conditions: V12. When all is read, consumers with conditions have given their partitions back (A12).

Like auditor.py it knows only the oracle and the run's own account of its course. A run with the policy `overflow` ends
with so many intervals without a new message that each condition must have ended.
"""

from __future__ import annotations

from typing import Final

from marshal_sim.judge.evidence import Violation
from marshal_sim.judge.history import History
from marshal_sim.judge.liveness import Demands, overflows
from marshal_sim.oracle.state import Session

# Without messages, at the end of a run: the looks that must find little, one of them begun too early; a heartbeat that
# reports what handlers have finished; an interval for a successor that never comes (A7); two to release and claim.
IDLE_INTERVALS: Final = 10


def judge_conditions(demands: Demands, history: History) -> list[Violation]:
    """Returns a violation for each session with conditions that owns a partition at the end although another lives."""
    found = []
    for name in demands.topics:
        group = history.oracle.groups.get(name)
        if group is None or not overflows(group) or all(map(_conditioned, group.sessions.values())):
            continue
        for (topic, number), partition in group.partitions.items():
            owner = group.sessions.get(partition.owner)
            if owner is not None and _conditioned(owner):
                what = f"session {owner.id} of {name} has {topic}:{number} although nothing is pending"
                found.append(Violation("V12", round(demands.end_ms), partition.epoch, what))
    return found


def _conditioned(session: Session) -> bool:
    return bool(session.join["min_pending"] or session.join["min_ack_pending"])
