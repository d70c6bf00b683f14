"""Policy `prioritized`: consumers with a lower priority number come first (PROTOCOL.md A10).

The candidates of one priority share, as under `balanced`, what those of lower numbers cannot take. Without `max_claims`
the lowest number takes all, and the others stand by.
"""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import balanced
from marshal_py.protocol.policy.candidates import Candidate, candidates_by_session
from marshal_py.protocol.wire.identity import TopicPartition


def target(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Returns which session should own each partition: each priority in turn shares what is left, the lowest first.

    Sessions that stepped down share what no other candidate can take (F9.9), unless all did.
    """
    candidates = candidates_by_session(group, order)
    levels: dict[tuple[bool, int], dict[int, Candidate]] = {}
    for sid, candidate in candidates.items():
        stands_by, candidate.standby = candidate.standby, False  # it stands by for other levels, not within its own
        key = (stands_by, 0 if stands_by else group.sessions[sid].join.priority)
        levels.setdefault(key, {})[sid] = candidate
    found: dict[TopicPartition, int] = {}
    later = set(candidates)
    for key in sorted(levels):
        later -= levels[key].keys()
        found.update(balanced.share(group, levels[key], found, later))
    return found
