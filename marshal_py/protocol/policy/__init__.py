"""Policies: which session should own which partition (PROTOCOL.md, rules A), as pure functions of the world.

A policy is guidance, and the fold alone decides who owns a partition: a policy can be unfair for a moment, never
unsafe. Under an open policy (OPEN) everybody may claim what nobody owns, and the target only comes first. Under a
restricted one (RESTRICTED) only the sessions in line for a partition may claim it, and an owner that is not in line
releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import restricted, shares
from marshal_py.protocol.policy.restricted import Line
from marshal_py.protocol.policy.shares import candidate_order, has_room
from marshal_py.protocol.wire.identity import TopicPartition

Target = Mapping[TopicPartition, int]  # partition -> session that should own it

OPEN: Final[Mapping[str, Callable[[Group, Sequence[int]], Target]]] = {
    "balanced": shares.balanced,
    "greedy": shares.greedy,
    "prioritized": shares.prioritized,
}
RESTRICTED: Final[Mapping[str, Callable[[Group, Sequence[int]], Mapping[TopicPartition, Line]]]] = {
    "members": restricted.of_members,
    "blocks": restricted.of_members,
    "topic": restricted.of_topics,
    "pinned": restricted.of_pin,
    "overflow": restricted.of_conditions,
}

DOORS: Final = ("restricted",)

__all__ = ["OPEN", "RESTRICTED", "Line", "Target", "candidate_order", "has_room"]
