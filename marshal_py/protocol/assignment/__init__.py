"""Policies: which session should own which partition (PROTOCOL.md 9), as pure functions of the world.

There is one file per policy. A policy is guidance, and the fold alone decides who owns a partition: a policy can be
unfair for a moment, never unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from marshal_py.protocol.assignment import balanced, greedy
from marshal_py.protocol.assignment.candidates import candidate_order
from marshal_py.protocol.identity import TopicPartition
from marshal_py.protocol.world import Group

Target = Mapping[TopicPartition, int]  # partition -> session that should own it

POLICIES: Final[Mapping[str, Callable[[Group, Sequence[int]], Target]]] = {
    "balanced": balanced.target,
    "greedy": greedy.target,
}
DEFAULT_POLICY: Final = "balanced"
MOVING_POLICIES: Final = frozenset({"balanced"})  # policies that take partitions from live owners (A3)

__all__ = ["DEFAULT_POLICY", "MOVING_POLICIES", "POLICIES", "Target", "candidate_order"]
