"""Policies: which session should own which partition (PROTOCOL.md, rules A), as pure functions of the world.

A policy is guidance, and the fold alone decides who owns a partition: a policy can be unfair for a moment, never
unsafe. Under an open policy (OPEN) everybody may claim what nobody owns, and the target only comes first. Under a
restricted one (RESTRICTED) only the sessions in line for a partition may claim it, and an owner that is not in line
releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final

from marshal_py.protocol.fold.policies import Policy, policy_of
from marshal_py.protocol.fold.world import Group, Session, lag_weight
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition, consumed, consumes
from marshal_py.protocol.wire.records import GroupConfig

# --- Open policies: everybody may claim what is free
#
# A candidate is a session that may be given partitions. Topics that the same candidates consume form one **pool**. A
# policy first decides how many partitions of a pool each candidate gets, by filling slots; `distribute` then decides
# which ones. A candidate that stepped down stands by: it gets only what no other candidate can take (F9.9).

UNLIMITED = 2**31  # claims_max 0 means no limit


def candidate_order(group: Group, waited_out: Container[int]) -> list[int]:
    """Returns the live sessions, without `waited_out`, in the order in which they are given partitions (F9.9, A2): by
    priority, rank and id; those that stepped down last."""
    rest = [s for s in group.sessions.values() if s.id not in waited_out]
    rest.sort(key=lambda s: (s.mark != NONE, s.mark, s.join.priority, s.join.rank, s.id))
    return [s.id for s in rest]


def has_room(session: Session) -> bool:
    """Returns whether a session owns fewer partitions than its claims_max."""
    return not session.join.claims_max or session.held < session.join.claims_max


@dataclass(slots=True, eq=False)
class Candidate:
    """What one candidate may take, and how much it has in all pools, while a target is being computed."""

    id: int
    order: int
    topics: frozenset[str]
    weight: int = 1
    claims_max: int = UNLIMITED
    standby: bool = False  # stepped down: gets only what no other candidate can take (F9.9)
    conditioned: bool = False  # comes after the others for a place of the same height (A12)
    count: int = 0


class Pool:
    """Topics that the same candidates consume: their partitions, and who has which of them."""

    __slots__ = ("candidates", "counts", "held", "standby", "tps")

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        in_order = sorted(candidates, key=lambda candidate: candidate.order)
        self.candidates: list[Candidate] = [candidate for candidate in in_order if not candidate.standby]
        self.standby: list[Candidate] = [candidate for candidate in in_order if candidate.standby]
        self.tps: list[TopicPartition] = []  # by place in their topic, so that each candidate has a share of each
        self.held: dict[int, list[TopicPartition]] = {candidate.id: [] for candidate in self.candidates}
        self.counts: list[int] = [0] * len(self.candidates)  # how many each has, then how many a policy gives it


def candidates_by_session(group: Group, order: Sequence[int]) -> dict[int, Candidate]:
    """Returns a Candidate for each session of `order`. Those that stepped down stand by, unless all did (F9.9)."""
    candidates = {}
    found: dict[tuple[str, ...], frozenset[str]] = {}
    for at, sid in enumerate(order):
        join = group.sessions[sid].join
        topics = found.get(join.topics)
        if topics is None:
            topics = found[join.topics] = frozenset(consumed(join.topics, group.topics))
        candidates[sid] = Candidate(sid, at, topics, join.capacity, join.claims_max or UNLIMITED)
    if any(group.sessions[sid].mark == NONE for sid in order):
        for candidate in candidates.values():
            candidate.standby = group.sessions[candidate.id].mark != NONE
    return candidates


def pools_of(
    group: Group,
    candidates: Iterable[Candidate],
    by_session: dict[int, Candidate],
    taken: Container[TopicPartition] = (),
) -> list[Pool]:
    """Returns the pools of all known partitions that are consumed, not parked and not in `taken`. `by_session`: the
    candidate for which each session holds partitions."""
    alike: dict[frozenset[str], list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(candidate.topics, []).append(candidate)
    consumers: dict[str, list[int]] = {}  # topic -> numbers of the sets of candidates that consume it
    for number, topics in enumerate(alike):
        for topic in topics:
            if topic in group.topics:
                consumers.setdefault(topic, []).append(number)
    sets, pools = list(alike.values()), dict[tuple[int, ...], Pool]()
    for topic in sorted(consumers):
        key = tuple(consumers[topic])
        pool = pools.get(key)
        if pool is None:
            pool = pools[key] = Pool(candidate for number in key for candidate in sets[number])
        _add_topic(group, pool, topic, taken)
    counts = {topic: group.topics[topic].count for topic in consumers}
    for pool in pools.values():
        if pool.tps and pool.tps[0].topic != pool.tps[-1].topic:
            pool.tps.sort(key=lambda tp: (tp.partition / counts[tp.topic], tp.topic))
    _keep_holders(group, by_session, pools.values())
    return list(pools.values())


def _add_topic(group: Group, pool: Pool, topic: str, taken: Container[TopicPartition]) -> None:
    known, add = group.partitions, pool.tps.append
    for number in range(group.topics[topic].count):
        tp = TopicPartition(topic, number)
        partition = known.get(tp)
        if (partition is None or not partition.parked) and tp not in taken:
            add(tp)


def _keep_holders(group: Group, candidates: dict[int, Candidate], pools: Collection[Pool]) -> None:
    """Gives each partition to its owner, else the successor that a Release named, else the last owner. Above
    claims_max: first the lowest that it owns, then the lowest of the others."""
    freed: list[tuple[TopicPartition, list[TopicPartition], Candidate]] = []
    for pool in pools:
        known, held = group.partitions, pool.held
        for tp in pool.tps:
            partition = known.get(tp)
            if partition is None:
                continue
            owned = partition.owner != NONE
            candidate = candidates.get(partition.owner if owned else partition.successor)
            if candidate is None and not owned:
                candidate = candidates.get(partition.last_owner)
            having = held.get(candidate.id) if candidate is not None else None
            if candidate is None or having is None:
                continue  # nobody, a candidate that stands by, or one that does not consume the topic
            if not owned:
                freed.append((tp, having, candidate))
            elif candidate.count < candidate.claims_max:
                having.append(tp)
                candidate.count += 1
    for tp, having, candidate in freed:
        if candidate.count < candidate.claims_max:
            having.append(tp)
            candidate.count += 1
    for pool in pools:
        pool.counts = [len(pool.held[candidate.id]) for candidate in pool.candidates]


def distribute(group: Group, pools: Iterable[Pool], later: Container[int] = ()) -> dict[TopicPartition, int]:
    """Returns the session of each partition, given counts: candidates keep the lowest that they have, the rest goes in
    order to those below their count. A result carried out in part stays the same. What standbys or `later` own is given
    away last."""
    found: dict[TopicPartition, int] = {}
    for pool in pools:
        for candidate, count in zip(pool.candidates, pool.counts, strict=True):
            for tp in pool.held[candidate.id][:count]:
                found[tp] = candidate.id
        rest = [tp for tp in pool.tps if tp not in found]
        standing = later or {candidate.id for candidate in pool.standby}
        if standing and rest:  # these get the end of the rest: what they own comes last
            owned = [(known := group.partitions.get(tp)) is not None and known.owner in standing for tp in rest]
            rest = [tp for own in (False, True) for tp, is_own in zip(rest, owned, strict=True) if is_own is own]
        at = 0
        for candidate, count in zip(pool.candidates, pool.counts, strict=True):
            lacks = count - min(count, len(pool.held[candidate.id]))
            for tp in rest[at : at + lacks]:
                found[tp] = candidate.id
            at += lacks
        if pool.standby and at < len(rest):
            _distribute_to_standby(group, pool.standby, rest[at:], found)
    return found


def _distribute_to_standby(
    group: Group, standby: list[Candidate], rest: list[TopicPartition], found: dict[TopicPartition, int]
) -> None:
    """Adds to `found` who gets `rest`, which nobody else can take (F9.9): standbys keep theirs, the least loaded gets
    what is free."""
    by_id, free = {candidate.id: candidate for candidate in standby}, []
    for tp in rest:
        known = group.partitions.get(tp)
        candidate = by_id.get(known.owner) if known is not None else None
        if candidate is not None and candidate.count < candidate.claims_max:
            found[tp] = candidate.id
            candidate.count += 1
        else:
            free.append(tp)
    heap = [((candidate.count + 1) / candidate.weight, candidate.order, candidate) for candidate in standby]
    heapify(heap)
    for tp in free:
        while heap and heap[0][2].count >= heap[0][2].claims_max:
            heappop(heap)
        if not heap:
            return
        candidate = heap[0][2]
        found[tp] = candidate.id
        candidate.count += 1
        heapreplace(heap, ((candidate.count + 1) / candidate.weight, candidate.order, candidate))


# --- Computes how many partitions of a pool each candidate gets: slots are filled, the lowest first (PROTOCOL.md A1).
#
# A slot is a candidate's place for one partition: its k-th partition, at capacity w, fills its slot of height k / w.
# A candidate has at most claims_max slots. What it has in other pools fills its lowest slots, so a pool gives it
# higher ones.


def fill(pool: Pool, *, moves: bool) -> bool:
    """Sets how many partitions of a pool each candidate gets; returns whether that changed. `moves`: fill from the
    lowest slot on; else everybody keeps as many, and only free ones are added. At one height filled slots come first,
    conditioned candidates last (A12)."""
    candidates, before = pool.candidates, pool.counts
    others = [candidate.count - count for candidate, count in zip(candidates, before, strict=True)]
    counts = [0] * len(before) if moves else before.copy()
    left = len(pool.tps) - sum(counts)
    # (height of the next slot, whether conditioned, whether it is not filled yet, index): each candidate once.
    heap = [
        ((others[at] + counts[at] + 1) / candidate.weight, candidate.conditioned, counts[at] >= before[at], at)
        for at, candidate in enumerate(candidates)
        if others[at] + counts[at] < candidate.claims_max
    ]
    heapify(heap)
    while left > 0 and heap:
        at = heap[0][3]
        candidate = candidates[at]
        counts[at] += 1
        left -= 1
        count = others[at] + counts[at]
        if count < candidate.claims_max:
            heapreplace(heap, ((count + 1) / candidate.weight, candidate.conditioned, counts[at] >= before[at], at))
        else:
            heappop(heap)
    if counts == before:
        return False
    pool.counts = counts
    for candidate, now, was in zip(candidates, counts, before, strict=True):
        candidate.count += now - was
    return True


# --- Lag weights of `balanced`: members share the backlog, too, and not only the number of partitions (PROTOCOL.md
# A14).
#
# The target keeps the counts that `balanced` gives. Once nothing moves, and if that pays, it exchanges a partition of a
# member with much backlog for a lighter one of a member with little. So the owners are the memory of what was decided.


RATIO: Final = 3  # between two loads or weights that differ for sure: lags that vary by 2 seem to vary by up to 4
FALLS_TO: Final = 2 / 3  # of the greater load, if the member with more has less afterwards
Weights = Mapping[TopicPartition, int]


def lag_weighted(group: Group) -> bool:
    """Returns whether the group's settings ask for lag weights."""
    return group.config is not None and group.config.lag_weighted and "lag_weighted" in policy_of(group.config).settings


def share_backlog(group: Group, pools: Collection[Pool], found: dict[TopicPartition, int]) -> None:
    """Changes the target by one exchange, so that it shares the backlog with the counts of `found`, the target without
    weights. In the middle of one (somebody has one too few, another one too many), the one that evens the loads best
    moves."""
    known = group.partitions
    weights = {tp: lag_weight(partition.lag) for tp in found if (partition := known.get(tp)) is not None}
    if max(weights.values(), default=1) == 1:
        return
    loads: dict[int, int] = {}
    odd: list[tuple[int, Pool, Candidate]] = []  # candidates that have more or fewer than they should, and how many
    for pool in pools:
        for candidate, count in zip(pool.candidates, pool.counts, strict=True):
            held = pool.held[candidate.id]
            loads[candidate.id] = loads.get(candidate.id, 0) + sum(weights.get(tp, 1) for tp in held)
            if len(held) != count:
                odd.append((len(held) - count, pool, candidate))
    if not odd:
        if all((partition := known.get(tp)) is not None and partition.owner == sid for tp, sid in found.items()):
            found.update(_exchange(pools, weights, loads))
    elif len(odd) == 2 and odd[0][1] is odd[1][1] and {odd[0][0], odd[1][0]} == {-1, 1}:
        (_, pool, taker), (_, _, giver) = sorted(odd, key=lambda one: one[0])
        given = [tp for tp in pool.held[giver.id] if known[tp].owner == giver.id]
        if given:
            best = min(given, key=lambda tp: (_level(giver, taker, loads, weights[tp]), tp))
            found.update((tp, giver.id) for tp in pool.held[giver.id])
            found[best] = taker.id


def _level(giver: Candidate, taker: Candidate, loads: Mapping[int, int], moved: int) -> float:
    """Returns the greater load of two candidates, in proportion to their capacities, after `moved` has moved."""
    return max((loads[giver.id] - moved) / giver.weight, (loads[taker.id] + moved) / taker.weight)


def _exchange(pools: Collection[Pool], weights: Weights, loads: Mapping[int, int]) -> dict[TopicPartition, int]:
    """Returns the exchange that helps the most loaded candidate that can be helped, with the least loaded one of the
    same pool; nothing if none pays."""
    places = [(pool, candidate) for pool in pools for candidate in pool.candidates if pool.held[candidate.id]]
    by_load = sorted(
        {candidate.id: candidate for _, candidate in places}.values(),
        key=lambda candidate: (-loads[candidate.id] / candidate.weight, candidate.order),
    )
    for giver in by_load:
        found: list[tuple[float, TopicPartition, TopicPartition, int]] = []
        for pool in (pool for pool, candidate in places if candidate is giver):
            partner = next(one for one in reversed(by_load) if pool.held.get(one.id))
            most, least = loads[giver.id] / giver.weight, loads[partner.id] / partner.weight
            if most < RATIO * least:
                continue
            for heavy, high in _lowest_of_each(pool.held[giver.id], weights):
                for light, low in _lowest_of_each(pool.held[partner.id], weights):
                    if high < RATIO * low or high - low < loads[giver.id] / giver.count / 2:
                        continue
                    level = _level(giver, partner, loads, high - low)
                    overtakes = level > (loads[giver.id] - high + low) / giver.weight
                    if level < most and (not overtakes or level <= FALLS_TO * most):
                        found.append((level, heavy, light, partner.id))
        if found:
            _, heavy, light, partner_id = min(found)
            return {heavy: partner_id, light: giver.id}
    return {}


def _lowest_of_each(held: Sequence[TopicPartition], weights: Weights) -> list[tuple[TopicPartition, int]]:
    """Returns the lowest partition of each weight."""
    lowest: dict[int, TopicPartition] = {}
    for tp in held:
        if tp < lowest.setdefault(weights[tp], tp):
            lowest[weights[tp]] = tp
    return [(tp, weight) for weight, tp in lowest.items()]


# --- The default policy `balanced`: shares partitions by capacity, with as few moves as possible (PROTOCOL.md A1, A3,
# A4).
#
# The policy fills the lowest slots of each pool. If candidates consume different topics, what one pool gives to a
# candidate raises its slots in the others, so pools are filled again until nothing changes.


SWEEPS_MAX: Final = 100  # over all pools; the first few change nearly everything


def balanced(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Returns the session of each partition. Members with the same world and candidates (`order`) compute the same."""
    candidates = candidates_by_session(group, order)
    pools = pools_of(group, candidates.values(), candidates)
    found = _share_out(group, pools)
    if lag_weighted(group):
        share_backlog(group, pools, found)
    return found


def share(
    group: Group, candidates: dict[int, Candidate], taken: Container[TopicPartition] = (), later: Container[int] = ()
) -> dict[TopicPartition, int]:
    """Returns the candidate of each partition that is not in `taken`. What sessions of `later` own is given away
    last."""
    return _share_out(group, pools_of(group, candidates.values(), candidates, taken), later)


def _share_out(group: Group, pools: Sequence[Pool], later: Container[int] = ()) -> dict[TopicPartition, int]:
    """Fills the pools, which then know how many partitions each candidate gets; returns who gets which."""
    looked: dict[int, list[int]] = {}  # by pool, when last filled: how many of other pools its candidates had
    for _ in range(SWEEPS_MAX):
        changed = False
        for at, pool in enumerate(pools):
            elsewhere = [candidate.count - count for candidate, count in zip(pool.candidates, pool.counts, strict=True)]
            if looked.get(at) != elsewhere:
                looked[at] = elsewhere
                changed |= fill(pool, moves=True)
        if not changed:
            break
    return distribute(group, pools, later)


# --- Policy `greedy`: assigns free partitions and never takes one from its owner (PROTOCOL.md A1).


def greedy(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Returns which session should own each partition: owners keep theirs, the least loaded get the free ones."""
    candidates = candidates_by_session(group, order)
    pools = pools_of(group, candidates.values(), candidates)
    for pool in pools:
        fill(pool, moves=False)
    return distribute(group, pools)


# --- Policy `prioritized`: consumers with a lower priority number come first (PROTOCOL.md A10).
#
# The candidates of one priority share, as under `balanced`, what those of lower numbers cannot take. Without
# `max_claims` the lowest number takes all, and the others stand by.


def prioritized(group: Group, order: Sequence[int]) -> dict[TopicPartition, int]:
    """Returns the session of each partition: each priority shares what is left. Who stepped down shares what no other
    can take (F9.9), unless all did."""
    candidates = candidates_by_session(group, order)
    levels: dict[tuple[bool, int], dict[int, Candidate]] = {}
    for sid, candidate in candidates.items():
        stands_by, candidate.standby = candidate.standby, False  # it stands by for other levels, not within its own
        key = (stands_by, 0 if stands_by else group.sessions[sid].join.priority)
        levels.setdefault(key, {})[sid] = candidate
    found: dict[TopicPartition, int] = {}
    later = set(candidates)
    for key in sorted(levels):
        later -= levels[key].keys()
        found.update(share(group, levels[key], found, later))
    return found


# --- Restricted policies: only the sessions in line for a partition may claim it (PROTOCOL.md 9).
#
# A cover is a claim without which nobody may own the partitions beneath it (A9, A11): the claim of a whole topic under
# policy `topic`, and the pin under `pinned`.


def cover_of(policy: Policy, tp: TopicPartition) -> TopicPartition | None:
    """Returns the cover of a partition, None if the policy has no covers."""
    return PIN if policy.pins else TopicPartition(tp.topic, NONE) if policy.whole_topics else None


def owner_of(group: Group, tp: TopicPartition) -> int:
    """Returns the session that owns a partition or a cover, NONE if nobody does."""
    known = group.partitions.get(tp)
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
    of_name: dict[str, list[TopicPartition]] = {}
    for tp, name in names(group, order).items():
        of_name.setdefault(name, []).append(tp)
    sessions: dict[str, dict[int, tuple[str, ...]]] = {}  # by name, in their order, with the topics that they consume
    for sid in order:
        join = group.sessions[sid].join
        sessions.setdefault(join.member, {})[sid] = consumed(join.topics, group.topics)
    found: dict[TopicPartition, Line] = {}
    for name, left in of_name.items():
        lines: dict[str, Line] = {}
        for sid, topics in sessions.get(name, {}).items():
            for topic in topics:
                lines[topic] = (*lines.get(topic, ()), sid)
        later = set(sessions.get(name, ()))
        for sid, topics in sessions.get(name, {}).items():
            later.discard(sid)
            fit = [(_rank_of(group, tp, sid, later), tp) for tp in left if tp.topic in topics]
            first = {tp for _, tp in sorted(fit)[: group.sessions[sid].join.claims_max or UNLIMITED]}
            for tp in first:
                found[tp] = (sid, *(other for other in lines[tp.topic] if other != sid))
            left = [tp for tp in left if tp not in first]
    return found


def _rank_of(group: Group, tp: TopicPartition, session: int, later: Container[int]) -> int:
    """Returns 0 for a partition that the session has (it owns it, or it is free and was released for it), 1 for one
    that none of the `later` ones has, 2 for theirs."""
    known = group.partitions.get(tp)
    has = NONE if known is None else known.owner if known.owner != NONE else known.successor
    return 0 if has == session else 1 if has not in later else 2


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
            _give(has, owner, name)
        else:
            free.append(name)
    active = [one for one in candidates.values() if not one.standby]
    for _ in range(MOVES_MAX):
        for name in free.copy():  # after a move, too: it may have made room for a topic that nobody could take
            able = [one for one in candidates.values() if _takes(one, name)]
            takers = [one for one in able if not one.standby] or able
            if takers:
                _give(has, min(takers, key=lambda one: (_load(group, has, one, name), one.order)), name)
                free.remove(name)
        if not _move_one(group, has, active):
            break
    return {name: sid for sid, names in has.items() for name in names}


def _takes(candidate: Candidate, topic: str) -> bool:
    return topic in candidate.topics and candidate.count < candidate.claims_max


def _give(has: dict[int, list[str]], candidate: Candidate, topic: str) -> None:
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
                _give(has, taker, name)
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
    for tp, first in share(group, candidates).items():
        known = group.partitions.get(tp)
        free = known is None or known.owner == NONE
        key = tp.topic, first, free
        if key not in found:
            rest = [sid for sid in (able if free else order) if sid != first and tp.topic in candidates[sid].topics]
            at = sum(sid not in others for sid in rest) if free and first in others else 0
            found[key] = [*rest[:at], first, *rest[at:]]
        of_conditions[tp] = found[key]
    return of_conditions


# --- All policies


Target = Mapping[TopicPartition, int]  # partition -> session that should own it

OPEN: Final[Mapping[str, Callable[[Group, Sequence[int]], Target]]] = {
    "balanced": balanced,
    "greedy": greedy,
    "prioritized": prioritized,
}
RESTRICTED: Final[Mapping[str, Callable[[Group, Sequence[int]], Mapping[TopicPartition, Line]]]] = {
    "members": of_members,
    "blocks": of_members,
    "topic": of_topics,
    "pinned": of_pin,
    "overflow": of_conditions,
}
