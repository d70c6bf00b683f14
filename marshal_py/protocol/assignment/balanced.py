"""Policy `balanced`, the default: sticky, minimal moves, weighted by capacity (PROTOCOL.md A1, A3, A4).

Start from who has what, give free partitions to the least loaded, then move one partition at a time from the most to
the least loaded while that makes the greater of the two loads smaller. Each move is needed: with equal capacities and
the same topics the number of moves is the least possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.assignment.seats import Seat, as_target, seat_free, seat_holders, seats_of
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.world import Group


def target(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """The same for every member that holds the same world and has waited out the same sessions."""
    seats = seats_of(group, order)
    seat_free(group, seat_holders(group, seats), seats)
    while _move_one(group, [seat for seat in seats.values() if not seat.standby]):
        pass
    return as_target(seats)


def _move_one(group: Group, seats: list[Seat]) -> bool:
    """Moves one partition downhill; False when no move helps. Each move lowers a load, so this ends."""
    givers = sorted(seats, key=lambda seat: (-seat.load_after(0), seat.order))
    takers = sorted((s for s in seats if s.has_room), key=lambda seat: (seat.load_after(1), seat.order))
    for giver in givers:
        for taker in takers:
            if taker.load_after(1) >= giver.load_after(0):
                break  # the takers that follow are no less loaded
            tp = _movable(group, giver, taker)
            if tp is not None:
                giver.taken.remove(tp)
                taker.taken.append(tp)
                return True
    return False


def _movable(group: Group, giver: Seat, taker: Seat) -> TopicPartition | None:
    """What the giver misses least: a partition that it does not own yet, else the last one."""
    wanted = [tp for tp in giver.taken if tp.topic in taker.topics]
    if not wanted:
        return None
    for tp in reversed(wanted):
        known = group.partitions.get(tp)
        if known is None or known.owner == NONE:
            return tp
    return max(wanted)
