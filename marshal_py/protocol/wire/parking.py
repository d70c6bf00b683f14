"""Says why a partition is parked, in sentences that name the way out (PROTOCOL.md F6.4, F6.5).

Nobody may claim a parked partition until a new generation begins, for example because an admin sets its position. The
field `parked` of a Release holds the reason; this file alone turns it into an error. The sentences are in errors.py.
"""

from __future__ import annotations

from typing import Final

from marshal_py.errors import BEYOND_END as BEYOND_END
from marshal_py.errors import RECREATED as RECREATED
from marshal_py.errors import TRUNCATED as TRUNCATED
from marshal_py.errors import UNREADABLE as UNREADABLE
from marshal_py.errors import PartitionParked
from marshal_py.protocol.wire.identity import TopicPartition

# With these reasons the position is no offset of the partition's present messages.
LAG_UNKNOWN: Final = frozenset({RECREATED, BEYOND_END, TRUNCATED})
PARKED_REASON: Final = "parked"  # reason of a Release that parks without a detail


def error_of(
    group: str, tp: TopicPartition, reason: str, known: str = "", found: str = "", detail: str = ""
) -> PartitionParked:
    """Returns the error that says why a partition is parked. `reason`: as in the log.

    `known`, `found`: the ids of its topic in the log and in the cluster, "" if unknown. `detail`: what the owner saw,
    from the field `reason` of its Release.
    """
    if reason == RECREATED:
        seen = f"its id was {known}, now it is {found}" if known and found else ""
    else:
        seen = "" if detail == PARKED_REASON else detail
    return PartitionParked(group, *tp, reason, seen)


def beyond_end(position: int, end: int) -> str:
    """Returns the `detail` for a partition whose position is beyond its end."""
    return f"position {position}, end {end}"


def describe(group: str, tp: TopicPartition, reason: str, detail: str = "") -> str:
    """Returns, for people, why a partition is parked and what to do.

    `reason` and `detail` are those of `error_of`.
    """
    return f"{reason}: {error_of(group, tp, reason, detail=detail)}"
