"""Tells a coordination topic from a topic with the messages of somebody else, whose name was given by mistake.

Who writes to a log, or advises to change its topic, asks here first. A coordination topic is known by its first
records. A topic without records may become one.
"""

from __future__ import annotations

from typing import Final

from marshal_py.errors import ClusterUnreachable, ForeignTopic, HistoryTruncated
from marshal_py.log import replay
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.transport.ports import Bounds, ClusterAdmin, CoordinationLog

SAMPLE_RECORDS: Final = 1_000  # garbage in front of the first record (E1) is seldom that much
SAMPLE_SILENCE_S: Final = 5.0  # between two of them: offsets at the end may hold no record, and nothing comes for them


def check(admin: ClusterAdmin, log: CoordinationLog, topic: str) -> None:
    """Raises ForeignTopic if none of the first records of `topic` is ours. `log`: reads it; log 0 unless its records
    are gone."""
    tps = [TopicPartition(topic, number) for number in range(admin.partition_count(topic) or 0)]
    for left in reversed(range(replay.ATTEMPTS)):
        found = {tp: bounds for tp, bounds in admin.bounds(tps).items() if bounds.first < bounds.end} if tps else {}
        try:
            if found and not _begins_with_ours(log, (first := min(found)).partition, found[first]):
                raise ForeignTopic(topic, str(first))
            return
        except HistoryTruncated:  # records were deleted between the two requests: others are the first now
            if not left:
                raise


def _begins_with_ours(log: CoordinationLog, number: int, bounds: Bounds) -> bool:
    read, end = 0, min(bounds.end, bounds.first + SAMPLE_RECORDS)
    try:
        for records in log.read(number, bounds.first, end, SAMPLE_SILENCE_S):
            if any(codec.is_ours(record.value) for record in records):
                return True
            read += len(records)
    except ClusterUnreachable:
        if not read:
            raise
    return False
