"""Policies under which everybody may claim what is free: `balanced`, `greedy`, `prioritized` (PROTOCOL.md 9).

A candidate is a session that may be given partitions. Topics that the same candidates consume form one **pool**. A
policy first decides how many partitions of a pool each candidate gets, by filling slots; `distribute` then decides
which ones. A candidate that stepped down stands by: it gets only what no other candidate can take (F9.9).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final

from marshal_py.protocol.fold.policies import policy_of
from marshal_py.protocol.fold.world import Group, Session, lag_weight
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.subscription import consumed

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


class Candidate:
    """What one candidate may take, and how much it has in all pools, while a target is being computed."""

    __slots__ = ("claims_max", "conditioned", "count", "id", "order", "standby", "topics", "weight")

    def __init__(
        self, candidate_id: int, order: int, topics: frozenset[str], weight: int = 1, claims_max: int = UNLIMITED
    ) -> None:
        self.id: int = candidate_id
        self.order: int = order
        self.standby: bool = False  # stepped down: gets only what no other candidate can take (F9.9)
        self.conditioned: bool = False  # comes after the others for a place of the same height (A12)
        self.topics: frozenset[str] = topics
        self.weight: int = weight
        self.claims_max: int = claims_max
        self.count: int = 0


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
# The target keeps the counts that `balanced` gives. Once nothing moves, and if that pays, it exchanges a partition of
# a member with much backlog for a lighter one of a member with little. So the owners are the memory of what was
# decided.


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
# A pool (shares.py) is topics that the same candidates consume; a slot (shares.py) is a candidate's place for one
# partition. The policy fills the lowest slots of each pool. If candidates consume different topics, what one pool
# gives to a candidate raises its slots in the others, so pools are filled again until nothing changes.


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
