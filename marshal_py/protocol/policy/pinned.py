"""Policy `pinned`: one consumer has everything, the others wait until it is gone (PROTOCOL.md A11).

The claim of the whole group is the pin, and the cover of every partition: only its owner is in line for them. So the
epoch of the pin names who is pinned, and a consumer that lost the pin delivers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy import covering
from marshal_py.protocol.policy.partitioned import Line
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition
from marshal_py.protocol.wire.subscription import consumed

TIMEOUT_MS: Final = 120_000  # without a request of the pinned consumer, where the group does not say: the design's
UNPINNED: Final = "admin"  # why a pin ended, as the design calls it
TIMED_OUT: Final = "timeout"


def lines(group: Group, order: Sequence[int]) -> Mapping[TopicPartition, Line]:
    """Returns who may claim the pin, and each partition. An owner that gives the pin back is not in `order`."""
    owner, pin = covering.owner_of(group, PIN), group.partitions.get(PIN)
    line = [sid for sid in order if sid != owner and not idle(group, sid)]
    if owner in order and not lost_by(group):
        line.insert(0, owner)
    elif owner == NONE and pin is not None:
        line.sort(key=lambda sid: sid != pin.successor)  # whom the last owner has named is the first
    if not line:
        return {}
    first, found = line[0], {PIN: line}
    topics = consumed(group.sessions[first].join.topics, group.topics)
    for name in topics if covering.owns(group, PIN, first) else ():
        for number in range(group.topics[name].count if name in group.topics else 0):
            tp = TopicPartition(name, number)
            if not group.parked(tp):
                found[tp] = [first]
    return found


def lost_by(group: Group) -> str:
    """Returns why the owner of the pin must give it back: UNPINNED, TIMED_OUT, or "" if it keeps it.

    An admin unpins it by a StepDown that comes after its claim of the pin.
    """
    known = group.partitions.get(PIN)
    session = None if known is None else group.sessions.get(known.owner)
    if known is None or session is None:
        return ""
    return UNPINNED if session.mark > known.epoch else TIMED_OUT if idle(group, session.id) else ""


def idle(group: Group, session: int) -> bool:
    """Returns whether the user of a session has asked for no message for the group's priority timeout."""
    return group.sessions[session].idle_ms >= timeout_ms(group)


def timeout_ms(group: Group) -> int:
    """Returns the group's priority timeout."""
    return (group.config.priority_timeout_ms if group.config is not None else 0) or TIMEOUT_MS
