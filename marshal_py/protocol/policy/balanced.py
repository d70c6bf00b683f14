"""The default policy `balanced`: shares partitions by capacity, with as few moves as possible (PROTOCOL.md A1, A3, A4).

A pool (candidates.py) is topics that the same candidates consume; a slot (slots.py) is a candidate's place for one
partition. The policy fills the lowest slots of each pool. If candidates consume different topics, what one pool gives
to a candidate raises its slots in the others, so pools are filled again until nothing changes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import backlog
from marshal_py.protocol.policy.candidates import Candidate, Pool, candidates_by_session, distribute, pools_of
from marshal_py.protocol.policy.slots import fill
from marshal_py.protocol.wire.identity import TopicPartition

SWEEPS_MAX: Final = 100  # over all pools; the first few change nearly everything


def target(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Returns which session should own each partition. `order`: the ids of the candidates.

    Members compute the same target if they hold the same world and have the same candidates.
    """
    candidates = candidates_by_session(group, order)
    pools = pools_of(group, candidates.values(), candidates)
    found = _share(group, pools)
    if backlog.weighted(group):
        backlog.share(group, pools, found)
    return found


def share(
    group: Group, candidates: dict[int, Candidate], taken: Container[TopicPartition] = (), later: Container[int] = ()
) -> dict[TopicPartition, int]:
    """Returns which of the candidates, by session, should own each partition that is not in `taken`.

    Partitions that sessions of `later` own are given away last.
    """
    return _share(group, pools_of(group, candidates.values(), candidates, taken), later)


def _share(group: Group, pools: Sequence[Pool], later: Container[int] = ()) -> dict[TopicPartition, int]:
    """Fills the pools, which then know how many partitions each candidate gets; returns who gets which."""
    looked: dict[int, list[int]] = {}  # by pool, when last filled: how many of other pools its candidates had
    for _ in range(SWEEPS_MAX):
        changed = False
        for at, pool in enumerate(pools):
            elsewhere = [candidate.count - count for candidate, count in zip(pool.candidates, pool.counts, strict=True)]
            if looked.get(at) != elsewhere:
                looked[at] = elsewhere
                changed |= fill(pool, moves=True)
        if not changed:
            break
    return distribute(group, pools, later)
