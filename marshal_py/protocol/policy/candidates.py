"""Computes what every policy starts from: the candidates in order, and the partitions that each already has.

A candidate is a session that may be given partitions. Topics that the same candidates consume form one **pool**. A
policy first decides how many partitions of a pool each candidate gets (slots.py); `distribute` then decides which ones.
A candidate that stepped down stands by: it gets only what no other candidate can take (F9.9).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from marshal_py.protocol.fold.world import Group, Session
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.subscription import consumed

UNLIMITED = 2**31  # claims_max 0 means no limit


def candidate_order(group: Group, waited_out: Container[int]) -> list[int]:
    """Returns the live sessions in the order in which partitions are given to them (F9.9, A2).

    Sessions that stepped down come last; priority, rank and id order the others. Those in `waited_out` are left out:
    they were silent for so long that the caller may evict them.
    """
    rest = [s for s in group.sessions.values() if s.id not in waited_out]
    rest.sort(key=lambda s: (s.mark != NONE, s.mark, s.join.priority, s.join.rank, s.id))
    return [s.id for s in rest]


def has_room(session: Session) -> bool:
    """Returns whether a session owns fewer partitions than its claims_max."""
    return not session.join.claims_max or session.held < session.join.claims_max


class Candidate:
    """Holds what one candidate may take, and how much it has in all pools, while a target is being computed."""

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
    """Holds topics that the same candidates consume: their partitions, and who has which of them."""

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
    """Returns the pools. They hold all partitions that the log knows, a candidate consumes and that are not parked,
    except those in `taken`.

    `by_session`: the candidate for which each session holds partitions.
    """
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
        _fill(group, pool, topic, taken)
    counts = {topic: group.topics[topic].count for topic in consumers}
    for pool in pools.values():
        if pool.tps and pool.tps[0].topic != pool.tps[-1].topic:
            pool.tps.sort(key=lambda tp: (tp.partition / counts[tp.topic], tp.topic))
    _keep_holders(group, by_session, pools.values())
    return list(pools.values())


def _fill(group: Group, pool: Pool, topic: str, taken: Container[TopicPartition]) -> None:
    known, add = group.partitions, pool.tps.append
    for number in range(group.topics[topic].count):
        tp = TopicPartition(topic, number)
        partition = known.get(tp)
        if (partition is None or not partition.parked) and tp not in taken:
            add(tp)


def _keep_holders(group: Group, candidates: dict[int, Candidate], pools: Collection[Pool]) -> None:
    """Gives each partition to the candidate that has it, or had it last.

    That is the owner, else the successor that a Release named, else the last owner. A candidate with more than its
    claims_max keeps as many: first the lowest that it owns, then the lowest of the others.
    """
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
    """Returns which session gets each partition, after a policy has set how many each candidate gets.

    Each candidate keeps the lowest of the partitions that it has, up to its count. The other partitions go, in order,
    to the candidates that have fewer than their count. The result stays the same when it was carried out in part: a
    candidate that got one of its partitions keeps it, and all others still get the same ones. What candidates that
    stand by own, or sessions of `later`, is given away last.
    """
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
    """Adds to `found` who gets the partitions of `rest`, which no other candidate can take (F9.9).

    Candidates that stand by keep what they own of it. What nobody owns goes to the least loaded of them.
    """
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
