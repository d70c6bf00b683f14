"""Restricted policies: only the sessions in line for a partition may claim it (PROTOCOL.md 9).

A cover is a claim without which nobody may own the partitions beneath it (A9, A11): the claim of a whole topic under
policy `topic`, and the pin under `pinned`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from marshal_py.protocol.fold.policies import Policy
from marshal_py.protocol.fold.world import Group, Session
from marshal_py.protocol.policy import shares
from marshal_py.protocol.policy.shares import (
    UNLIMITED,
    Candidate,
    candidates_by_session,
    distribute,
    fill,
    has_room,
    pools_of,
)
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition
from marshal_py.protocol.wire.records import GroupConfig
from marshal_py.protocol.wire.subscription import consumed, consumes


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


# --- Policies `members` and `blocks`: an admin says which members share the partitions (PROTOCOL.md A7).
#
# A group has a list of member names, or mappings of names to partitions. Each partition belongs to one name, whether
# or not a consumer of this name is there. The consumers of one name stand in line for its partitions: the first is
# active, the others are its standbys. `members` moves as few partitions as possible when the list changes; `blocks`
# gives each name the partitions that GetPartitionFilters of the seed gives it, whoever has them now.


Line = Sequence[int]  # sessions that may claim a partition, the one that should own it first


def listed(config: GroupConfig) -> list[str]:
    """Returns the member names that count: each once, sorted by their bytes, at most max_members of them."""
    return sorted(set(config.members))[: config.max_members]


def block_owners(members: Iterable[str], max_members: int) -> list[str]:
    """Returns the member of each partition 0 to max_members - 1, as the seed's GetPartitionFilters does; empty without
    members."""
    names = sorted(set(members))[:max_members]
    if not names:
        return []
    size = max_members // len(names)
    whole = size * len(names)
    return [names[at // size] if at < whole else names[(at - whole) % len(names)] for at in range(max_members)]


def names(group: Group, order: Sequence[int]) -> dict[TopicPartition, str]:
    """Returns the member name of each partition; parked ones, and those that nobody's mapping or block names, are
    missing."""
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


def of_members(group: Group, order: Sequence[int]) -> dict[TopicPartition, Line]:
    """Returns the sessions that may claim each partition: those of its member name that consume the topic. The first is
    active, the next one if that has claims_max partitions."""
    owners = names(group, order)
    of_members: dict[tuple[str, str], tuple[int, ...]] = {}
    for sid in order:
        join = group.sessions[sid].join
        for topic in consumed(join.topics, group.topics):
            of_members[join.member, topic] = (*of_members.get((join.member, topic), ()), sid)
    found: dict[TopicPartition, Line] = {}
    room = {sid: group.sessions[sid].join.claims_max or UNLIMITED for sid in order}
    for tp in sorted(owners, key=lambda tp: (_owner(group, tp) == NONE, tp)):  # what has an owner keeps it
        line = of_members.get((owners[tp], tp.topic), ())
        first = next((sid for sid in line if room[sid]), None)
        if first is not None:
            room[first] -= 1
            found[tp] = line if line[0] == first else (first, *(sid for sid in line if sid != first))
    return found


def _owner(group: Group, tp: TopicPartition) -> int:
    known = group.partitions.get(tp)
    return NONE if known is None else known.owner


# --- Policy `topic`: each topic has one consumer, which has all of its partitions or none (PROTOCOL.md A9).
#
# The claim of a whole topic (partition -1) is the cover of its partitions. Only the owner of the cover is in line for
# a partition, and only while the cover stays with it. So the partitions of a topic never have two owners.


MOVES_MAX = 1_000  # of topics in one target; each makes the shares more even, so there are few


def of_topics(group: Group, order: Sequence[int]) -> dict[TopicPartition, Line]:
    """Returns who may claim each topic as a whole, and each partition."""
    owners = _owners(group, order)
    found: dict[TopicPartition, Line] = {}
    for name, topic in group.topics.items():
        first, cover = owners.get(name, NONE), TopicPartition(name, -1)
        if first == NONE:
            continue
        rest = (sid for sid in order if sid != first and consumes(group.sessions[sid].join.topics, name))
        found[cover] = (first, *rest)
        if owns(group, cover, first):
            for number in range(topic.count):
                tp = TopicPartition(name, number)
                if not group.parked(tp):
                    found[tp] = (first,)
    return found


def _owners(group: Group, order: Sequence[int]) -> dict[str, int]:
    """Returns the session of each topic: owners keep theirs up to claims_max, free ones go to the least loaded
    candidate, largest first; then topics move while that makes the greater of two loads smaller. Who stepped down gets
    what no other can take (F9.9)."""
    candidates = candidates_by_session(group, order)
    has: dict[int, list[str]] = {sid: [] for sid in order}
    topics = sorted(group.topics, key=lambda name: (-group.topics[name].count, name))
    free = []
    for name in topics:
        owner = candidates.get(owner_of(group, TopicPartition(name, NONE)))
        if owner is not None and not owner.standby and _takes(owner, name):
            _give(group, has, owner, name)
        else:
            free.append(name)
    active = [one for one in candidates.values() if not one.standby]
    for _ in range(MOVES_MAX):
        for name in free.copy():  # after a move, too: it may have made room for a topic that nobody could take
            able = [one for one in candidates.values() if _takes(one, name)]
            takers = [one for one in able if not one.standby] or able
            if takers:
                _give(group, has, min(takers, key=lambda one: (_load(group, has, one, name), one.order)), name)
                free.remove(name)
        if not _move_one(group, has, active):
            break
    return {name: sid for sid, names in has.items() for name in names}


def _takes(candidate: Candidate, topic: str) -> bool:
    return topic in candidate.topics and candidate.count < candidate.claims_max


def _give(group: Group, has: dict[int, list[str]], candidate: Candidate, topic: str) -> None:
    has[candidate.id].append(topic)
    candidate.count += 1


def _load(group: Group, has: dict[int, list[str]], candidate: Candidate, more: str = "") -> float:
    names = [*has[candidate.id], more] if more else has[candidate.id]
    return sum(group.topics[name].count for name in names) / candidate.weight


def _move_one(group: Group, has: dict[int, list[str]], active: list[Candidate]) -> bool:
    """Moves one topic from the candidate with the greatest load to one that ends below that load."""
    if len(active) < 2:
        return False
    giver = max(active, key=lambda one: (_load(group, has, one), one.order))
    load = _load(group, has, giver)
    for taker in sorted(active, key=lambda one: (_load(group, has, one), one.order)):
        for name in reversed(has[giver.id]):  # the smallest first
            if taker is not giver and _takes(taker, name) and _load(group, has, taker, name) < load:
                has[giver.id].remove(name)
                giver.count -= 1
                _give(group, has, taker, name)
                return True
    return False


# --- Policy `pinned`: one consumer has everything, the others wait until it is gone (PROTOCOL.md A11).
#
# The claim of the whole group is the pin, and the cover of every partition: only its owner is in line for them. So
# the epoch of the pin names who is pinned, and a consumer that lost the pin delivers nothing.


TIMEOUT_MS: Final = 120_000  # without a request of the pinned consumer, where the group does not say: the design's
UNPINNED: Final = "admin"  # why a pin ended, as the design calls it
TIMED_OUT: Final = "timeout"


def of_pin(group: Group, order: Sequence[int]) -> Mapping[TopicPartition, Line]:
    """Returns who may claim the pin, and each partition. An owner that gives the pin back is not in `order`."""
    owner, pin = owner_of(group, PIN), group.partitions.get(PIN)
    line = [sid for sid in order if sid != owner and not idle(group, sid)]
    if owner in order and not pin_lost_by(group):
        line.insert(0, owner)
    elif owner == NONE and pin is not None:
        line.sort(key=lambda sid: sid != pin.successor)  # whom the last owner has named is the first
    if not line:
        return {}
    first, found = line[0], {PIN: line}
    topics = consumed(group.sessions[first].join.topics, group.topics)
    for name in topics if owns(group, PIN, first) else ():
        for number in range(group.topics[name].count if name in group.topics else 0):
            tp = TopicPartition(name, number)
            if not group.parked(tp):
                found[tp] = [first]
    return found


def pin_lost_by(group: Group) -> str:
    """Returns why the owner must give the pin back: UNPINNED (a StepDown after its claim), TIMED_OUT, or ""."""
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


# --- Policy `overflow`: consumers with conditions get a share while much is pending (PROTOCOL.md A12).
#
# A session is conditioned if its Join names a `min_pending` or a `min_ack_pending`. Each judges its own conditions
# (protocol/member/candidacy.py). The others learn of it from the log: the session has fetched a partition ahead, or
# owns one.


def conditioned(session: Session) -> bool:
    return session.join.min_pending > 0 or session.join.min_ack_pending > 0


def helps(session: Session) -> bool:
    """Returns whether the log shows that the conditions of a session are met."""
    return session.held > 0 or bool(session.ready)


def served(group: Group, order: Sequence[int], helping: frozenset[int]) -> list[int]:
    """Returns which sessions are given partitions: those without conditions, and `helping`. While anybody helps, none
    that is idle for the failover time and has no conditions."""
    failover_ms = group.config.failover_ms if group.config is not None else 0
    found = []
    for sid in order:
        session = group.sessions[sid]
        away = bool(helping) and 0 < failover_ms <= session.idle_ms
        if sid in helping or not (away or conditioned(session)):
            found.append(sid)
    return found


def of_conditions(group: Group, order: Sequence[int]) -> dict[TopicPartition, Line]:
    """Returns who may claim each partition: who should own it, then the topic's other consumers. `order`, those given
    partitions, share as under `balanced`, those without conditions last among equal places. What nobody owns is first
    left to those that the log shows and that have room: they do not know of others."""
    candidates = candidates_by_session(group, order)
    for sid, candidate in candidates.items():
        candidate.conditioned = conditioned(group.sessions[sid])
    shown = [sid for sid in order if not conditioned(group.sessions[sid]) or helps(group.sessions[sid])]
    others = [sid for sid in order if sid not in shown]
    able = [*(sid for sid in shown if has_room(group.sessions[sid])), *others]
    found: dict[tuple[str, int, bool], Line] = {}
    of_conditions: dict[TopicPartition, Line] = {}
    for tp, first in shares.share(group, candidates).items():
        known = group.partitions.get(tp)
        free = known is None or known.owner == NONE
        key = tp.topic, first, free
        if key not in found:
            rest = [sid for sid in (able if free else order) if sid != first and tp.topic in candidates[sid].topics]
            at = sum(sid not in others for sid in rest) if free and first in others else 0
            found[key] = [*rest[:at], first, *rest[at:]]
        of_conditions[tp] = found[key]
    return of_conditions
