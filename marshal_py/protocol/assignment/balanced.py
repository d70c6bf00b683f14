"""Policy `balanced`, the default: sticky, minimal moves, weighted by capacity (PROTOCOL.md A1, A3, A4).

Fills the lowest slots of each pool. If candidates consume different topics, what one pool gives to a candidate raises
its slots in the others, so pools are filled again until nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from marshal_py.protocol.assignment.candidates import candidates_by_session, distribute, pools_of
from marshal_py.protocol.assignment.slots import fill
from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.world import Group

SWEEPS_MAX: Final = 100  # over all pools; the first few change nearly everything


def target(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """The same for all members that have the same world and have waited out the same sessions."""
    candidates = candidates_by_session(group, order)
    pools = pools_of(group, candidates)
    looked: dict[int, list[int]] = {}  # by pool: how many partitions of other pools its candidates had then
    for _ in range(SWEEPS_MAX):
        changed = False
        for at, pool in enumerate(pools):
            elsewhere = [candidate.count - count for candidate, count in zip(pool.candidates, pool.counts, strict=True)]
            if looked.get(at) != elsewhere:
                looked[at] = elsewhere
                changed |= fill(pool, moves=True)
        if not changed:
            break
    return distribute(group, pools)
