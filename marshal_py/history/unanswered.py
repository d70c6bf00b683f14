"""Finds partitions whose owner has messages in handlers and finishes none, by the heartbeats that say so. Pure.

An owner reports the position and what its handlers have whenever that changes. If handlers have messages and the
position stands still, the message at the position has had no answer since the first heartbeat that told of it. If no
position of an owner moves, it finishes nothing.
"""

from __future__ import annotations

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import ClaimingPartition, Heartbeat


class Unanswered:
    """Keeps, for the partitions of one log, since when their positions stand still while handlers have messages."""

    def __init__(self) -> None:
        self._first_ms = 0  # timestamp of the first record that was read
        self._since: dict[tuple[str, TopicPartition], tuple[int, int, int]] = {}  # (epoch, position, ms since 1970)
        self._finished: dict[tuple[str, TopicPartition], tuple[int, int, bytes, int]] = {}  # with the progress above it

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> None:
        """Notes what a folded record says. `group`: its group after the record. `time_ms`: its timestamp."""
        self._first_ms = self._first_ms or time_ms
        record = verdict.record
        if group is None or not verdict.accepted or not isinstance(record, Heartbeat | ClaimingPartition):
            return
        epochs = [entry.epoch for entry in record.claims] if isinstance(record, Heartbeat) else [verdict.offset]
        for epoch in epochs:
            partition = group.claims.get(epoch)
            if partition is None:
                continue
            key = group.name, partition.tp
            now = epoch, partition.position, partition.progress
            if self._finished.get(key, (0, 0, b"", 0))[:3] != now:
                self._finished[key] = *now, time_ms
            if not partition.in_flight:
                self._since.pop(key, None)
            elif self._since.get(key, (0, 0, 0))[:2] != (epoch, partition.position):
                self._since[key] = epoch, partition.position, time_ms

    def since(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when no message of a partition was finished, in ms since 1970, where handlers have some. If it
        was so before the first record that was read, that record's time stands for it."""
        found = {}
        for partition in group.claims.values():
            if partition.tp.partition >= 0 and partition.in_flight:
                kept = self._since.get((group.name, partition.tp))
                same = kept is not None and kept[:2] == (partition.epoch, partition.position)
                found[partition.tp] = kept[2] if kept is not None and same else self._first_ms
        return {tp: since_ms for tp, since_ms in found.items() if since_ms}

    def blocked(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the owner of a partition has finished nothing in any of its partitions, in ms since 1970.
        A claim counts as finishing something: before it, there was nothing to finish."""
        last: dict[int, int] = {}
        for epoch, partition in group.claims.items():
            kept = self._finished.get((group.name, partition.tp))
            same = kept is not None and kept[:3] == (epoch, partition.position, partition.progress)
            time_ms = kept[3] if kept is not None and same else self._first_ms
            last[partition.owner] = max(time_ms, last.get(partition.owner, 0))
        return {each.tp: last[each.owner] for each in group.claims.values() if each.tp.partition >= 0}
