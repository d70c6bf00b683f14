"""What a move of positions names, and the offsets that it means. Pure.

A target is a place (client/values/position_text.py) or a shift of the positions by N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from marshal_py.client.values.position_text import COMMITTED, Facts, Point, Where, offset, parse, points_of
from marshal_py.errors import InvalidOption, PositionOutOfRange
from marshal_py.protocol.wire.identity import NONE, TopicPartition


class Target(NamedTuple):
    """What the caller gave as the target: a place, or None and how far to shift, which may be negative."""

    where: Where | None
    shift_by: int = 0

    @property
    def named(self) -> Mapping[TopicPartition, Point]:
        """Returns the points of a table, by partition; empty if the target is no table."""
        return {} if self.where is None else self.where.named

    @property
    def of_the_past(self) -> bool:
        """Returns whether the target refers to the topic as it was: a shift, or committed offsets of some partition."""
        if self.where is None:
            return True
        return any(point is not None and point.kind == COMMITTED for point in (self.where.rest, *self.named.values()))

    def points(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, Point]:
        """Returns the point of each partition; none for a shift. Raises InvalidOption if a table lacks one."""
        return {} if self.where is None else points_of(self.where, tps, "to", "the table")


def target_of(to: str | int | Target | None, shift_by: int | None, group: str) -> Target:
    """Returns the target, named in one of two ways. `group`: whose lines may be in a table. Raises InvalidOption for
    none or both."""
    if (to is None) == (shift_by is None):
        raise InvalidOption("to", to, "give either `to` or `shift_by`")
    if shift_by is not None:
        return Target(None, shift_by)
    return to if isinstance(to, Target) else Target(parse(str(to), "to", group=group))


def resolve(
    target: Target, tps: Iterable[TopicPartition], positions: Mapping[TopicPartition, int], facts: Facts
) -> dict[TopicPartition, int]:
    """Returns the target's offset in each partition. `positions`: the world's, or NONE. Raises PositionOutOfRange, or
    InvalidOption if a fact is missing."""
    tps = list(tps)
    points = target.points(tps)
    found = {tp: _shifted(tp, target.shift_by, positions) if not points else _at(tp, points[tp], facts) for tp in tps}
    for tp, position in found.items():
        first, end = facts.bounds[tp]
        if not first <= position <= end:
            raise PositionOutOfRange(*tp, position, first, end)
    return found


def _shifted(tp: TopicPartition, by: int, positions: Mapping[TopicPartition, int]) -> int:
    if positions.get(tp, NONE) == NONE:
        raise InvalidOption("shift_by", by, f"{tp} has no position yet")
    return positions[tp] + by


def _at(tp: TopicPartition, point: Point, facts: Facts) -> int:
    found = offset(tp, point, facts)
    if found is None:
        named = f"{COMMITTED}:{point.group}" if point.group else COMMITTED
        of = f"group {point.group!r}" if point.group else "the group"
        raise InvalidOption(
            "to", named, f"Kafka has no committed offset of {of} for {tp}; {named}|earliest says what then"
        )
    return found
