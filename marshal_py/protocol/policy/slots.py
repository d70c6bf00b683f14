"""Computes how many partitions of a pool each candidate gets: slots are filled, the lowest first (PROTOCOL.md A1).

A slot is a candidate's place for one partition: its k-th partition, at capacity w, fills its slot of height k / w. A
candidate has at most claims_max slots. What it has in other pools fills its lowest slots, so a pool gives it higher
ones.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from marshal_py.protocol.policy.candidates import Pool


def fill(pool: Pool, *, moves: bool) -> bool:
    """Sets how many partitions of a pool each candidate gets; returns whether that has changed.

    If `moves` is true, all slots are filled from the lowest on, so an owner may get fewer than it has. If it is false,
    each candidate keeps as many as it has, and only free partitions are added. Among slots of the same height, those
    of conditioned candidates come last (A12), and those that are filled already come before others, so that nothing
    moves without need.
    """
    candidates, before = pool.candidates, pool.counts
    others = [candidate.count - count for candidate, count in zip(candidates, before, strict=True)]
    counts = [0] * len(before) if moves else before.copy()
    left = len(pool.tps) - sum(counts)
    # (height of the next slot, whether conditioned, whether it is not filled yet, index): each candidate once.
    heap = [
        ((others[at] + counts[at] + 1) / candidate.weight, candidate.conditioned, counts[at] >= before[at], at)
        for at, candidate in enumerate(candidates)
        if others[at] + counts[at] < candidate.claims_max
    ]
    heapify(heap)
    while left > 0 and heap:
        at = heap[0][3]
        candidate = candidates[at]
        counts[at] += 1
        left -= 1
        count = others[at] + counts[at]
        if count < candidate.claims_max:
            heapreplace(heap, ((count + 1) / candidate.weight, candidate.conditioned, counts[at] >= before[at], at))
        else:
            heappop(heap)
    if counts == before:
        return False
    pool.counts = counts
    for candidate, now, was in zip(candidates, counts, before, strict=True):
        candidate.count += now - was
    return True
