"""Why a partition is parked, in sentences that name the way out (PROTOCOL.md F6.4, F6.5).

The one place that knows what stands behind the text `parked` of a Release; errors.py holds the sentences. Pure.
"""

from __future__ import annotations

from typing import Final

from marshal_py.errors import DataTopicRecreated, PartitionParked
from marshal_py.protocol.identity import TopicPartition

RECREATED: Final = DataTopicRecreated.__name__  # the topic has another id than the log knows (D10)


def error_of(group: str, tp: TopicPartition, reason: str, known: str = "", found: str = "") -> PartitionParked:
    """The error of a parked partition. `known`, `found`: ids of its topic, in the log and in the cluster, if known."""
    if reason == RECREATED:
        return DataTopicRecreated(group, *tp, known, found)
    return PartitionParked(group, *tp, reason)  # also what a newer library parks for


def words(group: str, tp: TopicPartition, reason: str) -> str:
    """The reason and what to do, for people."""
    return f"{reason}: {error_of(group, tp, reason)}"
