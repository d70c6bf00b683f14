"""Policy `greedy`: assigns free partitions and never takes one from its owner (PROTOCOL.md A1)."""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy.candidates import candidates_by_session, distribute, pools_of
from marshal_py.protocol.policy.slots import fill
from marshal_py.protocol.wire.identity import TopicPartition


def target(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Returns which session should own each partition: owners keep theirs, the least loaded get the free ones."""
    candidates = candidates_by_session(group, order)
    pools = pools_of(group, candidates.values(), candidates)
    for pool in pools:
        fill(pool, moves=False)
    return distribute(group, pools)
