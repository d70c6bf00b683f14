"""Covers: claims without which nobody may own the partitions beneath them (PROTOCOL.md A9, A11).

The cover of a partition is the claim of its whole topic under policy `topic`, and the pin under `pinned`.
"""

from __future__ import annotations

from marshal_py.protocol.fold.policies import Policy
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition


def cover_of(policy: Policy, tp: TopicPartition) -> TopicPartition | None:
    """Returns the cover of a partition, None if the policy has no covers."""
    return PIN if policy.pins else TopicPartition(tp.topic, NONE) if policy.whole_topics else None


def owner_of(group: Group, cover: TopicPartition) -> int:
    """Returns the session that owns a cover, NONE if nobody does."""
    known = group.partitions.get(cover)
    return NONE if known is None else known.owner


def owns(group: Group, cover: TopicPartition, session: int) -> bool:
    """Returns whether a session owns a cover, so that it may own what is beneath."""
    return owner_of(group, cover) == session
