"""Finds partitions whose owner has messages in handlers and finishes none, by the heartbeats that say so. Pure.

An owner reports how far its handlers are, what they have finished above that, and how many messages they have, whenever
that changes. If handlers have messages and finish none, that is so since the first heartbeat that told of it. If an
owner finishes none in any partition, it finishes nothing.

How far handlers are is the position; in at-most-once mode, where grants move the position, it is the floor (F2.3).
"""

from __future__ import annotations

from collections.abc import Collection

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE, ClaimingPartition, Heartbeat, SeekingPartition


def handled_to(group: Group, partition: Partition) -> int:
    """Returns the offset up to which the handlers of a partition's owner are done, as far as the log says."""
    return partition.floor if group.mode == AT_MOST_ONCE else partition.position


class Unanswered:
    """Keeps, for the partitions of one log, since when handlers have messages and get no further."""

    def __init__(self) -> None:
        self._first_ms = 0  # timestamp of the first record that was read
        # (epoch, how far, progress above it, since when in ms since 1970)
        self._since: dict[tuple[str, TopicPartition], tuple[int, int, bytes, int]] = {}  # with messages in handlers
        self._finished: dict[tuple[str, TopicPartition], tuple[int, int, bytes, int]] = {}
        self._stood: dict[tuple[str, TopicPartition], tuple[int, int, int]] = {}  # epoch, position, since when

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> None:
        """Notes what a folded record says. `group`: its group after the record. `time_ms`: its timestamp."""
        self._first_ms = self._first_ms or time_ms
        record = verdict.record
        if (
            group is None
            or not verdict.accepted
            or not isinstance(record, Heartbeat | ClaimingPartition | SeekingPartition)
        ):
            return
        epochs = [entry.epoch for entry in record.claims] if isinstance(record, Heartbeat) else [verdict.offset]
        for epoch in epochs:
            partition = group.claims.get(epoch)
            if partition is None:
                continue
            key = group.name, partition.tp
            done = handled_to(group, partition)
            now = epoch, done, partition.progress
            stands = epoch, partition.position
            if self._stood.get(key, (0, 0, 0))[:2] != stands:
                self._stood[key] = *stands, time_ms
            if self._finished.get(key, (0, 0, b"", 0))[:3] != now:
                self._finished[key] = *now, time_ms
            if not partition.in_flight:
                self._since.pop(key, None)
            elif self._since.get(key, (0, 0, b"", 0))[:3] != now:
                self._since[key] = *now, time_ms

    def forget(self, groups: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._since = {key: each for key, each in self._since.items() if key[0] in groups}
        self._finished = {key: each for key, each in self._finished.items() if key[0] in groups}
        self._stood = {key: each for key, each in self._stood.items() if key[0] in groups}

    def stands(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the position of a partition has not moved, in ms since 1970, though its owner has finished
        messages above it. The same holds for the first record that was read."""
        found = {}
        for epoch, partition in group.claims.items():
            if partition.tp.partition >= 0 and partition.progress:
                kept = self._stood.get((group.name, partition.tp))
                same = kept is not None and kept[:2] == (epoch, partition.position)
                found[partition.tp] = kept[2] if kept is not None and same else self._first_ms
        return {tp: since_ms for tp, since_ms in found.items() if since_ms}

    def since(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when no message of a partition was finished, in ms since 1970, where handlers have some. If it
        was so before the first record that was read, that record's time stands for it."""
        found = {}
        for partition in group.claims.values():
            if partition.tp.partition >= 0 and partition.in_flight:
                kept = self._since.get((group.name, partition.tp))
                now = partition.epoch, handled_to(group, partition), partition.progress
                found[partition.tp] = kept[3] if kept is not None and kept[:3] == now else self._first_ms
        return {tp: since_ms for tp, since_ms in found.items() if since_ms}

    def blocked(self, group: Group) -> dict[TopicPartition, int]:
        """Returns since when the owner of a partition has finished nothing in any of its partitions, in ms since 1970.
        A claim counts as finishing something: before it, there was nothing to finish."""
        last: dict[int, int] = {}
        for epoch, partition in group.claims.items():
            kept = self._finished.get((group.name, partition.tp))
            same = kept is not None and kept[:3] == (epoch, handled_to(group, partition), partition.progress)
            time_ms = kept[3] if kept is not None and same else self._first_ms
            last[partition.owner] = max(time_ms, last.get(partition.owner, 0))
        return {each.tp: last[each.owner] for each in group.claims.values() if each.tp.partition >= 0}
