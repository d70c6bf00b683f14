"""Policies: which session should own which partition (PROTOCOL.md, rules A), as pure functions of the world.

A policy is guidance, and the fold alone decides who owns a partition: a policy can be unfair for a moment, never
unsafe. Under an open policy (POLICIES) everybody may claim what nobody owns, and the target only comes first. Under a
restricted one (RESTRICTED) only the sessions in line for a partition may claim it, and an owner that is not in line
releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import balanced, greedy, overflow, partitioned, pinned, prioritized, whole_topics
from marshal_py.protocol.policy.candidates import candidate_order, has_room
from marshal_py.protocol.policy.covering import COVERS
from marshal_py.protocol.policy.partitioned import Line
from marshal_py.protocol.wire.identity import TopicPartition

Target = Mapping[TopicPartition, int]  # partition -> session that should own it

POLICIES: Final[Mapping[str, Callable[[Group, Sequence[int]], Target]]] = {
    "balanced": balanced.target,
    "greedy": greedy.target,
    "prioritized": prioritized.target,
}
RESTRICTED: Final[Mapping[str, Callable[[Group, Sequence[int]], Mapping[TopicPartition, Line]]]] = {
    "members": partitioned.members,
    "blocks": partitioned.blocks,
    "topic": whole_topics.lines,
    "pinned": pinned.lines,
    "overflow": overflow.lines,
}
DEFAULT_POLICY: Final = "balanced"
MOVING_POLICIES: Final = frozenset({"balanced", "prioritized"})  # policies that take partitions from live owners (A3)
OWN_POLICIES: Final = ("balanced", "greedy")  # those that one consumer may choose for itself, and that may change

DOORS: Final = ("covering", "overflow", "partitioned", "pinned")

__all__ = [
    "COVERS",
    "DEFAULT_POLICY",
    "MOVING_POLICIES",
    "OWN_POLICIES",
    "POLICIES",
    "RESTRICTED",
    "Line",
    "Target",
    "candidate_order",
    "has_room",
]
