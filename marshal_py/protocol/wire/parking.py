"""Says why a partition is parked, in sentences that name the way out (PROTOCOL.md F6.4, F6.5).

Nobody may claim a parked partition until a new generation begins, for example because an admin sets its position. The
field `parked` of a Release holds the name of an error; this file alone turns it into that error. The sentences are
in errors.py.
"""

from __future__ import annotations

from typing import Final

from marshal_py.errors import (
    DataTopicRecreated,
    PartitionParked,
    PartitionTruncated,
    PartitionUnreadable,
    PositionBeyondEnd,
)
from marshal_py.protocol.wire.identity import TopicPartition

RECREATED: Final = DataTopicRecreated.__name__  # the topic has another id than in the log (D10)
BEYOND_END: Final = PositionBeyondEnd.__name__  # the position is beyond the end of the partition (D6)
TRUNCATED: Final = PartitionTruncated.__name__  # the partition has lost records that were read (D6)
UNREADABLE: Final = PartitionUnreadable.__name__  # Kafka did not serve the partition to any member (D13)
LAG_UNKNOWN: Final = frozenset(
    {RECREATED, BEYOND_END, TRUNCATED}
)  # the position is no offset of the partition's present messages
PARKED_REASON: Final = "parked"  # reason of a Release that parks without a detail


def error_of(
    group: str, tp: TopicPartition, reason: str, known: str = "", found: str = "", detail: str = ""
) -> PartitionParked:
    """Returns the error that says why a partition is parked. `reason`: the name of that error, as in the log.

    `known`, `found`: the ids of its topic in the log and in the cluster, "" if unknown. `detail`: what the owner saw,
    from the field `reason` of its Release.
    """
    match reason:
        case DataTopicRecreated.__name__:
            return DataTopicRecreated(group, *tp, known, found)
        case PositionBeyondEnd.__name__:
            return PositionBeyondEnd(group, *tp, _detail(detail))
        case PartitionTruncated.__name__:
            return PartitionTruncated(group, *tp, _detail(detail))
        case PartitionUnreadable.__name__:
            return PartitionUnreadable(group, *tp, _detail(detail))
    return PartitionParked(group, *tp, reason)  # a reason of a newer library


def _detail(said: str) -> str:
    return "" if said == PARKED_REASON else said


def beyond_end(position: int, end: int) -> str:
    """Returns the `detail` for a partition whose position is beyond its end."""
    return f"position {position}, end {end}"


def describe(group: str, tp: TopicPartition, reason: str, detail: str = "") -> str:
    """Returns, for people, why a partition is parked and what to do.

    `reason` and `detail` are those of `error_of`.
    """
    return f"{reason}: {error_of(group, tp, reason, detail=detail)}"
