"""Policies `members` and `blocks`: an admin says which members share the partitions (PROTOCOL.md A7).

A group has a list of member names, or mappings of names to partitions. Each partition belongs to one name, whether or
not a consumer of this name is there. The consumers of one name stand in line for its partitions: the first is active,
the others are its standbys. `members` moves as few partitions as possible when the list changes; `blocks` gives each
name the partitions that GetPartitionFilters of the seed gives it, whoever has them now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.policy.candidates import UNLIMITED, Candidate, distribute, pools_of
from marshal_py.protocol.policy.slots import fill
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import GroupConfig
from marshal_py.protocol.wire.subscription import consumed

Line = Sequence[int]  # sessions that may claim a partition, the one that should own it first


def listed(config: GroupConfig) -> list[str]:
    """Returns the member names that count: each once, sorted by their bytes, at most max_members of them."""
    return sorted(set(config.members))[: config.max_members]


def block_owners(members: Iterable[str], max_members: int) -> list[str]:
    """Returns which member gets each of the partitions 0 to max_members - 1, as GetPartitionFilters of the seed does.

    Returns an empty list without members.
    """
    names = sorted(set(members))[:max_members]
    if not names:
        return []
    size = max_members // len(names)
    whole = size * len(names)
    return [names[at // size] if at < whole else names[(at - whole) % len(names)] for at in range(max_members)]


def names(group: Group, order: Sequence[int]) -> dict[TopicPartition, str]:
    """Returns the member name to which each partition belongs.

    A partition that no mapping and no block names belongs to nobody and is missing. So is a parked one.
    """
    config = group.config
    if config is None:
        return {}
    if config.mappings:
        return _numbered(group, {number: each.member for each in config.mappings for number in each.partitions})
    if config.policy == "blocks":
        return _numbered(group, dict(enumerate(block_owners(config.members, config.max_members))))
    return _sticky(group, listed(config), order)


def _numbered(group: Group, owners: Mapping[int, str]) -> dict[TopicPartition, str]:
    found = {}
    for name, topic in group.topics.items():
        for number in range(topic.count):
            tp = TopicPartition(name, number)
            if number in owners and not group.parked(tp):
                found[tp] = owners[number]
    return found


def _sticky(group: Group, members: Sequence[str], order: Sequence[int]) -> dict[TopicPartition, str]:
    """Returns an even share of each topic for each name; a name keeps what its consumers have (A1)."""
    topics = frozenset(group.topics)
    by_name = {name: Candidate(at, at, topics) for at, name in enumerate(members)}
    by_session = {sid: by_name[name] for sid in order if (name := group.sessions[sid].join.member) in by_name}
    pools = pools_of(group, by_name.values(), by_session)
    for pool in pools:
        fill(pool, moves=True)
    return {tp: members[at] for tp, at in distribute(group, pools).items()}


def lines(group: Group, order: Sequence[int]) -> dict[TopicPartition, Line]:
    """Returns the sessions that may claim each partition: those of its member name that consume the topic.

    The first in the order of candidates is active. If it has claims_max partitions, the next one comes first.
    """
    owners = names(group, order)
    lines: dict[tuple[str, str], tuple[int, ...]] = {}
    for sid in order:
        join = group.sessions[sid].join
        for topic in consumed(join.topics, group.topics):
            lines[join.member, topic] = (*lines.get((join.member, topic), ()), sid)
    found: dict[TopicPartition, Line] = {}
    room = {sid: group.sessions[sid].join.claims_max or UNLIMITED for sid in order}
    for tp in sorted(owners, key=lambda tp: (_owner(group, tp) == NONE, tp)):  # what has an owner keeps it
        line = lines.get((owners[tp], tp.topic), ())
        first = next((sid for sid in line if room[sid]), None)
        if first is not None:
            room[first] -= 1
            found[tp] = line if line[0] == first else (first, *(sid for sid in line if sid != first))
    return found


def _owner(group: Group, tp: TopicPartition) -> int:
    known = group.partitions.get(tp)
    return NONE if known is None else known.owner
