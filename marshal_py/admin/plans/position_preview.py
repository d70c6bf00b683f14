"""Computes what a move of positions would do, as a table (PROTOCOL.md M12). It folds the move's records onto a clone of
the world, and writes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import NamedTuple

from marshal_py.admin.plans.operation import GroupContext
from marshal_py.admin.views.recreated_topics import RecreatedTopic
from marshal_py.errors import AdminFailed
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import PAUSE_MS_MAX, Move, Record, ReleaseGroup, ReleasingPartition, SetPosition


class Row(NamedTuple):
    """Describes one partition of a move. `skipped`: how many messages will not be read. `repeated`: how many will be
    read again.
    """

    topic: str
    partition: int
    owner: str  # client id, "" if nobody owns it
    position: int
    target: int
    skipped: int
    repeated: int


def owners_of(group: Group) -> dict[TopicPartition, str]:
    """Returns the owned partitions, each with its owner's client id."""
    return {p.tp: group.sessions[p.owner].join.client_id for p in group.claims.values()}


def rows_of(
    owners: Mapping[TopicPartition, str],
    before: Mapping[TopicPartition, int],
    after: Mapping[TopicPartition, int],
    parked: Collection[TopicPartition] = (),
) -> list[Row]:
    """Returns a row for each partition of `after`.

    `owners`: client id of each partition's owner. `before`, `after`: positions before and after the move; NONE in
    `before` if there was none. `parked`: partitions that nobody may claim before the move. For a parked partition, and
    for one that had no position, the numbers of skipped and repeated messages are unknown and given as 0.
    """
    rows = []
    for tp, target in sorted(after.items()):
        position = before.get(tp, NONE)
        moved = target - position if position != NONE and tp not in parked else 0
        rows.append(Row(*tp, owners.get(tp, ""), position, target, max(0, moved), max(0, -moved)))
    return rows


def parked_of(group: Group) -> set[TopicPartition]:
    """Returns the partitions that nobody may claim before their position is moved (F6.4)."""
    return {tp for tp in group.partitions if group.parked(tp)}


def preview(
    context: GroupContext, targets: Mapping[TopicPartition, int], recreated: Mapping[str, RecreatedTopic] | None = None
) -> list[Row]:
    """Returns a row for each partition of `targets`, computed by folding the records of the move.

    Raises AdminFailed if the fold rejects a record.
    """
    world = clone(context.world, context.name)
    group = context.group
    assert group is not None  # recreated_topics.check_topology raises an error if it is
    there = drained(context, world)
    for one in (recreated or {}).values():
        verdict = rehearse(world, context.name, one.accepting(there, there.pause_change, context.author.by))
        if not verdict.accepted:
            raise AdminFailed(
                context.name,
                AdminFailed.NOT_MOVED,
                f"the fold would reject the new topic {one.topic!r}: {verdict.reason}",
            )
    before = {tp: p.position for tp, p in there.partitions.items()}
    versions = {tp: p.version for tp, p in there.partitions.items()}
    moves = tuple(Move(*tp, versions.get(tp, NONE), position) for tp, position in sorted(targets.items()))
    verdict = rehearse(world, context.name, SetPosition(there.pause_change, moves, True, context.author.by))
    if not verdict.accepted:
        raise AdminFailed(context.name, AdminFailed.NOT_MOVED, f"the fold would reject it: {verdict.reason}")
    after = {tp: there.partitions[tp].position for tp in targets}
    return rows_of(owners_of(group), before, after, parked_of(group))


def clone(world: World, name: str) -> World:
    """Returns a world at the same offset that contains a copy of the group `name` alone, if that group exists."""
    found = World(world.log, world.root)
    found.genesis, found.crc_seed = world.genesis, world.crc_seed
    if name in world.groups:
        found.groups[name] = copy.deepcopy(world.groups[name])
    found.next_offset = world.next_offset
    found.pending = list(world.pending)
    found.chain, found.chain_at, found.began_at = world.chain, world.chain_at, world.began_at
    return found


def drained(context: GroupContext, world: World) -> Group:
    """Pauses the group in `world`, which must be a clone, releases all its partitions there, and returns the group."""
    there = world.groups[context.name]
    rehearse(
        world, context.name, ReleaseGroup(there.pause_change, there.pause_change, PAUSE_MS_MAX, by=context.author.by)
    )
    for partition in list(there.claims.values()):
        rehearse(world, context.name, ReleasingPartition(partition.owner, partition.epoch, partition.position))
    return there


def rehearse(world: World, group: str, record: Record) -> Verdict:
    """Folds a record onto `world`, which must be a clone, and returns the fold's verdict on it."""
    assert world.genesis is not None  # a group exists, so its log has begun
    value = codec.encode(record, group, world.genesis.incarnation, world.writes_version(group))
    return rationalizer.apply(world, world.next_offset, value)
