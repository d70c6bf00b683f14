"""Lag weights of `balanced`: members share the backlog, too, and not only the number of partitions (PROTOCOL.md A14).

The target keeps the counts that `balanced` gives. Once nothing moves, and if that pays, it exchanges a partition of a
member with much backlog for a lighter one of a member with little. So the owners are the memory of what was decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from marshal_py.protocol.fold.policies import policy_of
from marshal_py.protocol.fold.world import Group, lag_weight
from marshal_py.protocol.policy.candidates import Candidate, Pool
from marshal_py.protocol.wire.identity import TopicPartition

RATIO: Final = 3  # between two loads or weights that differ for sure: lags that vary by 2 seem to vary by up to 4
FALLS_TO: Final = 2 / 3  # of the greater load, if the member with more has less afterwards
Weights = Mapping[TopicPartition, int]


def weighted(group: Group) -> bool:
    """Returns whether the group's settings ask for lag weights."""
    return group.config is not None and group.config.lag_weighted and "lag_weighted" in policy_of(group.config).settings


def share(group: Group, pools: Collection[Pool], found: dict[TopicPartition, int]) -> None:
    """Changes the target so that it shares the backlog, by one exchange at a time.

    `found`: the target without lag weights, which keeps its counts. If one candidate lacks a partition and another one
    has one more than it should, which is so in the middle of an exchange, the one that evens their loads best moves.
    """
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
    """Returns the exchange that helps the candidate with the greatest load that one can help; nothing if none pays.

    Its partner is the candidate with the smallest load that has a partition of the same pool.
    """
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
