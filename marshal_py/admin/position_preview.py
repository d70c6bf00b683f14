"""What a move would do, as a table: folds the record onto a clone of the world (PROTOCOL.md M12). Writes nothing."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import NamedTuple

from marshal_py.admin.operation import GroupContext
from marshal_py.admin.recreated_topics import RecreatedTopic
from marshal_py.errors import PositionNotMoved
from marshal_py.protocol import codec, rationalizer
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.records import PAUSE_MS_MAX, Move, Record, ReleaseGroup, ReleasingPartition, SetPosition
from marshal_py.protocol.verdict import Verdict
from marshal_py.protocol.world import Group, World


class Row(NamedTuple):
    """One partition of a move. `skipped` messages will not be read, `repeated` ones will be read again."""

    topic: str
    partition: int
    owner: str  # client id, "" if nobody owns it
    position: int
    target: int
    skipped: int
    repeated: int


def owners_of(group: Group) -> dict[TopicPartition, str]:
    """Client id of every partition's owner."""
    return {p.tp: group.sessions[p.owner].join.client_id for p in group.claims.values()}


def rows_of(
    owners: Mapping[TopicPartition, str],
    before: Mapping[TopicPartition, int],
    after: Mapping[TopicPartition, int],
    parked: Collection[TopicPartition] = (),
) -> list[Row]:
    """`before` is NONE where the partition had no position. Then skipped and repeated messages are unknown and counted
    as 0, as for parked partitions: the messages around such a position may not exist.
    """
    rows = []
    for tp, target in sorted(after.items()):
        position = before.get(tp, NONE)
        moved = target - position if position != NONE and tp not in parked else 0
        rows.append(Row(*tp, owners.get(tp, ""), position, target, max(0, moved), max(0, -moved)))
    return rows


def parked_of(group: Group) -> set[TopicPartition]:
    """The partitions that nobody may claim before their position is moved (F6.4)."""
    return {tp for tp in group.partitions if group.parked(tp)}


def preview(
    context: GroupContext, targets: Mapping[TopicPartition, int], recreated: Mapping[str, RecreatedTopic] | None = None
) -> list[Row]:
    """The rows as the fold itself makes them. Raises PositionNotMoved with the fold's reason."""
    world = clone(context.world, context.name)
    group = context.group
    assert group is not None  # position.check_topology has looked
    there = drained(context, world)
    for one in (recreated or {}).values():
        verdict = rehearse(world, context.name, one.accepting(there, there.pause_change, context.author.by))
        if not verdict.accepted:
            raise PositionNotMoved(context.name, f"the fold would reject the new topic {one.topic!r}: {verdict.reason}")
    before = {tp: p.position for tp, p in there.partitions.items()}
    versions = {tp: p.version for tp, p in there.partitions.items()}
    moves = tuple(Move(*tp, versions.get(tp, NONE), position) for tp, position in sorted(targets.items()))
    verdict = rehearse(world, context.name, SetPosition(there.pause_change, moves, True, context.author.by))
    if not verdict.accepted:
        raise PositionNotMoved(context.name, f"the fold would reject it: {verdict.reason}")
    after = {tp: there.partitions[tp].position for tp in targets}
    return rows_of(owners_of(group), before, after, parked_of(group))


def clone(world: World, name: str) -> World:
    """A world at the same offset with a copy of one group, if that exists."""
    found = World(world.log, world.root)
    found.genesis, found.crc_seed = world.genesis, world.crc_seed
    if name in world.groups:
        found.groups[name] = copy.deepcopy(world.groups[name])
    found.next_offset = world.next_offset
    found.pending = list(world.pending)
    found.chain, found.chain_at, found.began_at = world.chain, world.chain_at, world.began_at
    return found


def drained(context: GroupContext, world: World) -> Group:
    """The group in a clone of the world, paused by this author, with every partition released."""
    there = world.groups[context.name]
    rehearse(
        world, context.name, ReleaseGroup(there.pause_change, there.pause_change, PAUSE_MS_MAX, by=context.author.by)
    )
    for partition in list(there.claims.values()):
        rehearse(world, context.name, ReleasingPartition(partition.owner, partition.epoch, partition.position))
    return there


def rehearse(world: World, group: str, record: Record) -> Verdict:
    """The fold's verdict on a record, on a clone of the world."""
    assert world.genesis is not None  # a group exists, so its log has begun
    value = codec.encode(record, group, world.genesis.incarnation, world.writes_version(group))
    return rationalizer.apply(world, world.next_offset, value)
