"""What every policy starts from: the candidates in order, and what each already has. No policy lives here."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.world import Group

UNLIMITED = 2**31  # claims_max 0 means no limit


def candidates(group: Group, waited_out: Container[int]) -> list[int]:
    """Live sessions in the order of F9.9, without those that the caller has waited out itself (A2)."""
    rest = [s for s in group.sessions.values() if s.id not in waited_out]
    rest.sort(key=lambda s: (s.mark != NONE, s.mark, s.join.priority, s.join.rank, s.id))
    return [s.id for s in rest]


class Seat:
    """One candidate while a target is being computed: what it may take and what it has."""

    __slots__ = ("claims_max", "id", "order", "standby", "taken", "topics", "weight")

    def __init__(self, group: Group, session_id: int, order: int) -> None:
        join = group.sessions[session_id].join
        self.id = session_id
        self.order = order
        self.standby = False  # a marked session: gets only what nobody else can take (F9.9)
        self.topics = frozenset(join.topics)
        self.weight = join.capacity
        self.claims_max = join.claims_max or UNLIMITED
        self.taken: list[TopicPartition] = []

    @property
    def has_room(self) -> bool:
        return len(self.taken) < self.claims_max

    def load_after(self, more: int) -> float:
        """Weighted load if it had `more` partitions than now."""
        return (len(self.taken) + more) / self.weight


def seats_of(group: Group, order: Sequence[int]) -> dict[int, Seat]:
    """A seat per candidate; a marked session stands by while another is not (F9.9)."""
    seats = {sid: Seat(group, sid, at) for at, sid in enumerate(order)}
    if any(group.sessions[sid].mark == NONE for sid in order):
        for seat in seats.values():
            seat.standby = group.sessions[seat.id].mark != NONE
    return seats


def topic_partitions(group: Group) -> Iterator[TopicPartition]:
    """Every partition of the folded topology that is not parked, in order."""
    for name in sorted(group.topics):
        for number in range(group.topics[name].count):
            tp = TopicPartition(name, number)
            if not group.parked(tp):
                yield tp


def seat_holders(group: Group, seats: dict[int, Seat]) -> list[TopicPartition]:
    """Gives each partition to who has it or had it last; returns what is left over.

    Stickiness: the owner, else the successor that a release named, else the last owner. Who has more than its
    claims_max keeps the lowest.
    """
    left_over: list[TopicPartition] = []
    for tp in topic_partitions(group):
        known = group.partitions.get(tp)
        holder: Seat | None = None
        if known is not None:
            if known.owner != NONE:
                holder = seats.get(known.owner)
            else:
                holder = seats.get(known.successor) or seats.get(known.last_owner)
        if holder is not None and not holder.standby and tp.topic in holder.topics and holder.has_room:
            holder.taken.append(tp)
        else:
            left_over.append(tp)
    return left_over


def seat_free(group: Group, left_over: list[TopicPartition], seats: dict[int, Seat]) -> None:
    """Gives what nobody has to the least loaded candidate that wants the topic and has room."""
    for tp in left_over:
        takers = [seat for seat in seats.values() if tp.topic in seat.topics and seat.has_room]
        if takers:
            known = group.partitions.get(tp)
            owner = NONE if known is None else known.owner
            best = min(takers, key=lambda s: (s.standby, s.standby and s.id != owner, s.load_after(1), s.order))
            best.taken.append(tp)


def as_target(seats: dict[int, Seat]) -> dict[TopicPartition, int]:
    return {tp: seat.id for seat in seats.values() for tp in seat.taken}
