"""Policy `greedy`: takes what is free, takes nothing from anybody (PROTOCOL.md A1)."""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.assignment.seats import as_target, seat_free, seat_holders, seats_of
from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.world import Group


def target(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Owners keep what they have; free partitions go to the least loaded."""
    seats = seats_of(group, order)
    seat_free(group, seat_holders(group, seats), seats)
    return as_target(seats)
