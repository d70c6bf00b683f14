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
    seats, before = pool.seats, pool.counts
    others = [seat.count - count for seat, count in zip(seats, before, strict=True)]
    counts = [0] * len(before) if moves else before.copy()
    left = len(pool.tps) - sum(counts)
    # (height of the next slot, whether it is not filled yet, order, index): the same seat never twice.
    heap = [
        ((others[at] + counts[at] + 1) / seat.weight, counts[at] >= before[at], at)
        for at, seat in enumerate(seats)
        if others[at] + counts[at] < seat.claims_max
    ]
    heapify(heap)
    while left > 0 and heap:
        at = heap[0][2]
        seat = seats[at]
        counts[at] += 1
        left -= 1
        count = others[at] + counts[at]
        if count < seat.claims_max:
            heapreplace(heap, ((count + 1) / seat.weight, counts[at] >= before[at], at))
        else:
            heappop(heap)
    if counts == before:
        return False
    pool.counts = counts
    for seat, now, was in zip(seats, counts, before, strict=True):
        seat.count += now - was
    return True
