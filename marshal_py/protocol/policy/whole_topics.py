"""Policy `topic`: each topic has one consumer, which has all of its partitions or none (PROTOCOL.md A9).

The claim of a whole topic (partition -1) is the cover of its partitions. Only the owner of the cover is in line for a
partition, and only while the cover stays with it. So the partitions of a topic never have two owners.
"""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import covering
from marshal_py.protocol.policy.candidates import Candidate, candidates_by_session
from marshal_py.protocol.policy.partitioned import Line
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.subscription import consumes

MOVES_MAX = 1_000  # of topics in one target; each makes the shares more even, so there are few


def lines(group: Group, order: Sequence[int]) -> dict[TopicPartition, Line]:
    """Returns who may claim each topic as a whole, and each partition."""
    owners = _owners(group, order)
    found: dict[TopicPartition, Line] = {}
    for name, topic in group.topics.items():
        first, cover = owners.get(name, NONE), TopicPartition(name, -1)
        if first == NONE:
            continue
        rest = (sid for sid in order if sid != first and consumes(group.sessions[sid].join.topics, name))
        found[cover] = (first, *rest)
        if covering.owns(group, cover, first):
            for number in range(topic.count):
                tp = TopicPartition(name, number)
                if not group.parked(tp):
                    found[tp] = (first,)
    return found


def _owners(group: Group, order: Sequence[int]) -> dict[str, int]:
    """Returns which session should have each topic: as even as whole topics allow, by partitions and capacity.

    An owner keeps its topics, up to claims_max of them. Free topics go to the least loaded candidate, the largest
    first. Then a topic moves from one candidate to another as long as that makes the greater of their two loads
    smaller. Candidates that stepped down get what no other one can take (F9.9).
    """
    candidates = candidates_by_session(group, order)
    has: dict[int, list[str]] = {sid: [] for sid in order}
    topics = sorted(group.topics, key=lambda name: (-group.topics[name].count, name))
    free = []
    for name in topics:
        owner = candidates.get(covering.owner_of(group, TopicPartition(name, NONE)))
        if owner is not None and not owner.standby and _takes(owner, name):
            _give(group, has, owner, name)
        else:
            free.append(name)
    for name in free:
        able = [one for one in candidates.values() if _takes(one, name)]
        takers = [one for one in able if not one.standby] or able
        if takers:
            _give(group, has, min(takers, key=lambda one: (_load(group, has, one, name), one.order)), name)
    active = [one for one in candidates.values() if not one.standby]
    for _ in range(MOVES_MAX):
        if not _move_one(group, has, active):
            break
    return {name: sid for sid, names in has.items() for name in names}


def _takes(candidate: Candidate, topic: str) -> bool:
    return topic in candidate.topics and candidate.count < candidate.claims_max


def _give(group: Group, has: dict[int, list[str]], candidate: Candidate, topic: str) -> None:
    has[candidate.id].append(topic)
    candidate.count += 1


def _load(group: Group, has: dict[int, list[str]], candidate: Candidate, more: str = "") -> float:
    names = [*has[candidate.id], more] if more else has[candidate.id]
    return sum(group.topics[name].count for name in names) / candidate.weight


def _move_one(group: Group, has: dict[int, list[str]], active: list[Candidate]) -> bool:
    """Moves one topic from the candidate with the greatest load to one that ends below that load."""
    if len(active) < 2:
        return False
    giver = max(active, key=lambda one: (_load(group, has, one), one.order))
    load = _load(group, has, giver)
    for taker in sorted(active, key=lambda one: (_load(group, has, one), one.order)):
        for name in reversed(has[giver.id]):  # the smallest first
            if taker is not giver and _takes(taker, name) and _load(group, has, taker, name) < load:
                has[giver.id].remove(name)
                giver.count -= 1
                _give(group, has, taker, name)
                return True
    return False
