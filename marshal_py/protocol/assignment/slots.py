"""How many partitions of a pool each candidate gets: the slots of all, filled from the lowest on (PROTOCOL.md A1).

The k-th partition of a candidate with capacity w fills its slot of height k / w; claims_max bounds their number. A
candidate that has partitions of other pools begins above these. No policy lives here.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from marshal_py.protocol.assignment.candidates import Pool


def fill(pool: Pool, *, moves: bool) -> bool:
    """Sets the counts of a pool; whether they changed. With `moves` all slots count, else only those above what each
    has. Of slots of one height those first that are filled already: nothing moves that need not."""
    candidates, before = pool.candidates, pool.counts
    others = [candidate.count - count for candidate, count in zip(candidates, before, strict=True)]
    counts = [0] * len(before) if moves else before.copy()
    left = len(pool.tps) - sum(counts)
    # (height of the next slot, whether it is not filled yet, order, index): the same candidate never twice.
    heap = [
        ((others[at] + counts[at] + 1) / candidate.weight, counts[at] >= before[at], at)
        for at, candidate in enumerate(candidates)
        if others[at] + counts[at] < candidate.claims_max
    ]
    heapify(heap)
    while left > 0 and heap:
        at = heap[0][2]
        candidate = candidates[at]
        counts[at] += 1
        left -= 1
        count = others[at] + counts[at]
        if count < candidate.claims_max:
            heapreplace(heap, ((count + 1) / candidate.weight, counts[at] >= before[at], at))
        else:
            heappop(heap)
    if counts == before:
        return False
    pool.counts = counts
    for candidate, now, was in zip(candidates, counts, before, strict=True):
        candidate.count += now - was
    return True
