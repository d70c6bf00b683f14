"""Planted bugs of a streaming query (spark/stream/micro_batches.py): what its positions may move over.

mutants.py alone calls this file. The docstring of a bug says what holds with the bug.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from marshal_py.client.ranges import ClaimedRange, Ranges, Taken
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.spark.stream.micro_batches import End, MicroBatches, Planned, Replay, key_of, planned_in

Patch = tuple[Any, str, Any]


def _by_arithmetic(self: MicroBatches, now: Instant) -> bool:
    """Plants a bug: a committed batch moves each position that lies in one of its ranges.

    It moves even positions in ranges that others were to read.
    """
    moved = False
    for tp, proven in list(self._proven.items()):
        part, own = self._partition(tp), self.ranges.claims.get(tp)
        if part is None or part.generation != proven.generation or part.position >= proven.to:
            del self._proven[tp]
        elif own is not None and own.taken is None and proven.start <= own.next_offset < proven.to:
            taken = self.ranges.take(self.ranges.range_of(tp, own.next_offset, proven.to), now)
            if taken is not None:
                moved = self.ranges.finish(taken) or moved
                del self._proven[tp]
    return moved


def _left_to_partitions() -> list[Patch]:
    """Plants a bug: planning a batch hands nothing over to the query.

    Messages that `may_deliver` refuses later are left out of the tasks, and acked all the same.
    """

    def plan(self: MicroBatches, start: End, available: Sequence[ClaimedRange], now: Instant) -> End:
        return self.end_of(start, available) if available else start

    def replay(self: MicroBatches, end: End, now: Instant) -> Replay:
        taken: list[Taken] = []
        for tp, planned in planned_in(end, self.incarnation).items():
            own = self.ranges.claims.get(tp)
            found = None
            if own is not None and planned.start <= own.next_offset < planned.to:
                found = self.ranges.take(self.ranges.range_of(tp, own.next_offset, planned.to), now)
            taken += [found] if found is not None else []
        self.deliver(end, taken)
        return Replay(taken, {}, {})

    def commit(self: MicroBatches, end: End, now: Instant) -> bool:
        key = key_of(end)
        if key != self._committed:
            self._committed = key
            batch = self.delivered.pop(key, None)
            if batch is not None:
                self._finish(batch)
            self._proven |= planned_in(end, self.incarnation)
        return self.settle_proven(now)

    return [
        (MicroBatches, "plan", plan),
        (MicroBatches, "replay", replay),
        (MicroBatches, "commit", commit),
        (MicroBatches, "settle_proven", _by_arithmetic),
    ]


def q1() -> list[Patch]:
    def settled(self: Ranges) -> bool:
        return True

    return [*_left_to_partitions(), (Ranges, "settled", settled)]


def q2() -> list[Patch]:
    return _left_to_partitions()


def q3() -> list[Patch]:
    replay_one = MicroBatches._replay_one

    def leaves_out(
        self: MicroBatches, tp: TopicPartition, planned: Planned, now: Instant, result: Replay
    ) -> Taken | None:
        taken = replay_one(self, tp, planned, now, result)
        result.left_out.update(result.waits)
        result.waits.clear()
        return taken

    return [(MicroBatches, "_replay_one", leaves_out)]


def q4() -> list[Patch]:
    def commit_reported(self: MicroBatches, digest: str, now: Instant) -> bool:
        return any([self.commit(json.loads(key), now) for key in list(self.delivered)])

    return [(MicroBatches, "commit_reported", commit_reported)]


def q5() -> list[Patch]:
    init = MicroBatches.__init__

    def carries_over(
        self: MicroBatches, member: Member, ranges: Ranges, incarnation: bytes, before: MicroBatches | None = None
    ) -> None:
        if before is not None:
            before.incarnation = incarnation
        init(self, member, ranges, incarnation, before)

    return [(MicroBatches, "__init__", carries_over)]
