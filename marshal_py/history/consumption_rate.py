"""Computes how fast a group consumes, from the positions that its log accepted. Pure.

Times are the records' timestamps. It keeps the positions of the last minute per partition. When an admin moves a
position, counting starts again, because a move is not consumption. The rate of a partition that stops decreases every
second and is 0 after a minute.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import ClaimingMessages, ClaimingPartition, Heartbeat

WINDOW_MS: Final = 60_000  # long enough to even out batches, short enough to be current
SAMPLE_MS: Final = 250  # samples are this far apart, because in at-most-once mode there are thousands of grants


class ConsumptionRate:
    """Computes the rates of one log's partitions, from samples that are at least `sample_ms` apart."""

    def __init__(self, sample_ms: int = SAMPLE_MS) -> None:
        self._sample_ms = sample_ms
        # Time, position and generation of each sample in turn, the newest one whatever its age: there may be thousands
        # of partitions.
        self._samples: dict[tuple[str, TopicPartition], array[int]] = {}
        self._moved_ms: dict[str, int] = {}  # by group

    def read(self, group: Group | None, verdict: Verdict, time_ms: int) -> None:
        """Notes the positions of a folded record. `time_ms`: its timestamp. `group`: after the record, or None."""
        if group is None or not verdict.accepted:
            return
        match verdict.record:
            case Heartbeat() as record:
                for entry in record.claims:
                    partition = group.claims.get(entry.epoch)
                    if partition is not None and partition.owner == record.session:
                        self._note(group, partition, time_ms)
            case ClaimingPartition():
                self._note(group, group.claims[verdict.offset], time_ms)
            case ClaimingMessages() as record:
                for index in verdict.granted:
                    self._note(group, group.claims[record.ranges[index].epoch], time_ms)

    def _note(self, group: Group, partition: Partition, time_ms: int) -> None:
        if partition.tp.partition < 0:
            return
        key = group.name, partition.tp
        kept = self._samples.get(key)
        if kept is None:
            kept = self._samples[key] = array("q")
        if kept and kept[-1] != partition.generation:
            del kept[:]
        if kept and kept[-2] < partition.position:
            self._moved_ms[group.name] = time_ms
        if len(kept) > 3 and time_ms - kept[-6] < self._sample_ms:
            del kept[-3:]
        kept.extend((time_ms, partition.position, partition.generation))
        while kept[0] < time_ms - WINDOW_MS:
            del kept[:3]

    def forget(self, groups: Collection[str]) -> None:
        """Forgets all groups but these."""
        self._samples = {key: each for key, each in self._samples.items() if key[0] in groups}
        self._moved_ms = {group: at_ms for group, at_ms in self._moved_ms.items() if group in groups}

    def moved_ms(self, group: str) -> int | None:
        """Returns the newest record's time, in ms since 1970, by which consumers moved a position of the group forward;
        None if no such record was read."""
        return self._moved_ms.get(group)

    def per_second(self, group: str, tp: TopicPartition, now_ms: int) -> float:
        """Returns messages per second over the last WINDOW_MS; 0 if the position did not move. `now_ms` never falls."""
        kept = self._samples.get((group, tp), array("q"))
        while len(kept) > 3 and kept[0] < now_ms - WINDOW_MS:
            del kept[:3]
        elapsed_ms = max(now_ms, kept[-3]) - kept[0] if len(kept) > 3 else 0
        return 1000 * (kept[-2] - kept[1]) / elapsed_ms if elapsed_ms > 0 else 0.0
