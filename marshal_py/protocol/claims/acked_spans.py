"""Which acks of a claim the log has: spans of finished offsets, compared with what the log says of the partition.

An ack counts once the log has it: below the position, or in the ranges that are finished above it (progress.py). A span
is the offsets [start, to). All of it is about at-least-once mode; in the other mode the grants have moved the position.
"""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire import progress

Spans = Sequence[tuple[int, int]]


def spans_of(offsets: Sequence[int]) -> Spans:
    """Returns these offsets, which are ascending, as spans."""
    if isinstance(offsets, range) and offsets.step == 1:
        return [(offsets.start, offsets.stop)] if offsets else []
    return progress.union((offset, offset + 1) for offset in offsets)


def finished_spans(tracker: AtLeastOnce) -> Spans:
    """Returns all that the claim has finished, as far as its acks were noted (`Claim.settle`)."""
    position = tracker.position()
    # All below the position: the log may have the last of it as finished above a lower position.
    spans = [(-1, position)]
    for run in tracker.runs:
        spans += [(start, to) for start, to in spans_of(run.offsets[: run.low]) if to > position]
        spans += [(run.offsets[index], run.offsets[index] + 1) for index in run.finished]
    return progress.union(spans)


def log_has(spans: Spans, claim: Claim, group: Group | None) -> bool:
    """Returns whether the log names all of `spans` as finished: when it ended the claim, or now if it has not."""
    state = claim.final
    if state is None:
        if group is None or claim.epoch not in group.claims:
            return False
        partition = group.claims[claim.epoch]
        state = partition.position, partition.progress
    position, known = state
    if spans and spans[-1][1] <= position:
        return True
    finished = [(start, to) for start, to, times in progress.decode(position, known) if not times]
    above = [(max(start, position), to) for start, to in spans if to > position]
    return all(any(low <= start and to <= high for low, high in finished) for start, to in above)
