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
from marshal_py.protocol.policy import balanced, greedy, overflow, partitioned, pinned, prioritized, whole_topics
from marshal_py.protocol.policy.candidates import candidate_order, has_room
from marshal_py.protocol.policy.partitioned import Line
from marshal_py.protocol.wire.identity import TopicPartition

Target = Mapping[TopicPartition, int]  # partition -> session that should own it

OPEN: Final[Mapping[str, Callable[[Group, Sequence[int]], Target]]] = {
    "balanced": balanced.target,
    "greedy": greedy.target,
    "prioritized": prioritized.target,
}
RESTRICTED: Final[Mapping[str, Callable[[Group, Sequence[int]], Mapping[TopicPartition, Line]]]] = {
    "members": partitioned.lines,
    "blocks": partitioned.lines,
    "topic": whole_topics.lines,
    "pinned": pinned.lines,
    "overflow": overflow.lines,
}

DOORS: Final = ("covering", "overflow", "partitioned", "pinned")

__all__ = ["OPEN", "RESTRICTED", "Line", "Target", "candidate_order", "has_room"]
