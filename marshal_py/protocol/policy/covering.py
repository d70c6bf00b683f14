"""Covers: claims without which nobody may own the partitions beneath them (PROTOCOL.md A9, A11).

The cover of a partition is the claim of its whole topic under policy `topic`, and the pin under `pinned`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition

# By policy: the cover of a partition.
COVERS: Final[Mapping[str, Callable[[TopicPartition], TopicPartition]]] = {
    "topic": lambda tp: TopicPartition(tp.topic, NONE),
    "pinned": lambda tp: PIN,
}


def owner_of(group: Group, cover: TopicPartition) -> int:
    """Returns the session that owns a cover, NONE if nobody does."""
    known = group.partitions.get(cover)
    return NONE if known is None else known.owner


def owns(group: Group, cover: TopicPartition, session: int) -> bool:
    """Returns whether a session owns a cover, so that it may own what is beneath."""
    return owner_of(group, cover) == session
