"""Lag weights: members of a balanced group share the backlog, and nothing moves to and fro (PROTOCOL.md A14)."""

from __future__ import annotations

import random
from collections import Counter
from graphlib import TopologicalSorter
from itertools import chain, combinations_with_replacement, product

import pytest
from msgspec.structs import replace

from marshal_py.client.values.options import check_settings, settings_named
from marshal_py.errors import InvalidOption
from marshal_py.protocol import policy
from marshal_py.protocol.fold.world import Group, lag_weight
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import ClaimingPartition, GroupConfig, Heartbeat, ReleasingPartition
from tests.protocol.test_assignment import group_of, owners_of, target
from tests.support.virtual_cluster import INTERVAL_MS, Client, VirtualCluster

CONFIG = GroupConfig(NONE, policy="balanced", lag_weighted=True)
HEAVY = 100_000


def owned(lags: dict[int, list[int]], **fields: object) -> Group:
    """A group with lag weights. `lags`: session -> the lags of its partitions of the topic t, in order."""
    numbers, owners = iter(range(10_000)), {}
    for sid, values in lags.items():
        owners |= {("t", next(numbers)): sid for _ in values}
    group = group_of({"t": len(owners)}, [{**fields} for _ in lags], owners)
    for partition, lag in zip(group.partitions.values(), chain(*lags.values()), strict=True):
        partition.lag = lag
    group.config = CONFIG
    return group


def moved(group: Group) -> dict[int, int]:
    """Partition -> the session to which it should move."""
    return {tp.partition: sid for tp, sid in target(group).items() if group.partitions[tp].owner != sid}


def move(group: Group, number: int, sid: int) -> None:
    partition = group.partitions[TopicPartition("t", number)]
    group.sessions[partition.owner].held -= 1
    group.sessions[sid].held += 1
    partition.owner = sid


def loads(group: Group) -> Counter[int]:
    found: Counter[int] = Counter()
    for partition in group.partitions.values():
        found[partition.owner] += lag_weight(partition.lag)
    return found


def settle(group: Group, rng: random.Random) -> int:
    """Carries the target out, one partition at a time and in any order, until nothing moves; returns the moves."""
    for count in range(200):
        todo = moved(group)
        if not todo:
            return count
        number = rng.choice(sorted(todo))
        move(group, number, todo[number])
    raise AssertionError("it moves for ever")


def test_weights_are_powers_of_two() -> None:
    """A14: an idle partition counts 1, and so does one up to a lag of 2,047."""
    assert [lag_weight(lag) for lag in (0, 1_024, 2_047, 2_048, 4_095, 4_096, 2**53)] == [1, 1, 1, 2, 2, 4, 2**43]


def test_a_heavy_partition_is_exchanged_for_a_light_one() -> None:
    """A14: both heavy ones are with one member; the lowest heavy one and the lowest light one change places."""
    group = owned({1: [HEAVY, HEAVY, 0], 2: [0, 0, 0]})
    assert moved(group) == {0: 2, 3: 1}
    group.config = replace(CONFIG, lag_weighted=False)
    assert moved(group) == {}
    group.config = replace(CONFIG, policy="")
    assert moved(group) == {}, "members follow policies of their own"


@pytest.mark.parametrize("first", [0, 3])
def test_half_an_exchange_is_finished(first: int) -> None:
    """A14: whichever half is done first, the target asks for the other half, and then for nothing."""
    group = owned({1: [HEAVY, HEAVY, 0], 2: [0, 0, 0]})
    todo = moved(group)
    move(group, first, todo.pop(first))
    assert moved(group) == todo
    for number, sid in todo.items():
        move(group, number, sid)
    assert moved(group) == {}


def test_what_a_release_leaves_to_a_successor_counts_as_its_own() -> None:
    group = owned({1: [HEAVY, HEAVY, 0], 2: [0, 0, 0]})
    partition = group.partitions[TopicPartition("t", 0)]
    partition.owner, partition.successor, partition.last_owner = NONE, 2, 1
    group.sessions[1].held -= 1
    assert moved(group) == {0: 2, 3: 1}


@pytest.mark.parametrize(
    "lags",
    [
        {1: [HEAVY, 0], 2: [0, 0]},  # the only one: it would be just as heavy elsewhere
        {1: [HEAVY, HEAVY], 2: [HEAVY, 0]},  # twice as much
        {1: [2_047, 2_047], 2: [0, 0]},  # little
        {1: [HEAVY, HEAVY]},
        {1: [HEAVY, HEAVY], 2: [60_000, 60_000], 3: [70_000, 130_000]},  # within a factor of two or three
    ],
)
def test_what_does_not_pay_does_not_move(lags: dict[int, list[int]]) -> None:
    """A14: one must have three times the load of the other, and less afterwards."""
    assert moved(owned(lags)) == {}


def test_loads_are_in_proportion_to_capacities() -> None:
    group = owned({1: [HEAVY, HEAVY, HEAVY, 0], 2: [0]})
    group.sessions[1].join = replace(group.sessions[1].join, capacity=4)
    assert moved(group) == {}, "a third of the backlog at a capacity of one is more than all of it at four"
    even = owned({1: [HEAVY] * 4, 2: [0] * 4}, capacity=2)
    assert len(moved(even)) == 2


@pytest.mark.parametrize("seed", range(60))
def test_exchanges_end_and_never_raise_the_greatest_load(seed: int) -> None:
    """A14: from any lags, in any order of hand-overs; each exchange lowers the greatest load that it touches."""
    rng = random.Random(seed)
    lags = {
        sid: [rng.choice((0, 500, 5_000, HEAVY, 10**6)) for _ in range(rng.choice((4, 5)))]
        for sid in range(1, rng.randint(2, 6) + 1)
    }
    group = owned(lags)
    settle(group, rng)  # the counts may have been uneven
    counts = Counter(owners_of(group).values())
    for partition in group.partitions.values():
        partition.lag = rng.choice((0, 500, 5_000, HEAVY, 10**6))
    before = max(loads(group).values())
    steps = settle(group, rng)
    assert steps <= 2 * len(group.partitions)
    assert max(loads(group).values()) <= before
    after = Counter(owners_of(group).values())
    assert max(after.values()) - min(after.values()) <= 1
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(("members", "partitions"), [(2, 5), (3, 4)])
def test_no_order_of_hand_overs_moves_in_a_circle(members: int, partitions: int) -> None:
    """A14, exhaustive: from any owners and lags, whichever of the wanted moves comes next, they rest in the end."""
    group = owned({1: [0] * partitions, **{sid: [] for sid in range(2, members + 1)}})
    known = list(group.partitions.values())
    for lags in combinations_with_replacement((0, 3_000, 10_000, HEAVY), partitions):
        for partition, lag in zip(known, lags, strict=True):
            partition.lag = lag
        after: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for owners in product(range(1, members + 1), repeat=partitions):
            for partition, sid in zip(known, owners, strict=True):
                partition.owner = sid
            after[owners] = [(*owners[:at], sid, *owners[at + 1 :]) for at, sid in moved(group).items()]
        TopologicalSorter(after).prepare()  # CycleError names the circle


def flaps(seed: int) -> tuple[int, int]:
    """How many partitions move in the first and in the second 100 rounds of a steady load that varies by 2."""
    rng = random.Random(seed)
    sizes = (0, 500, 5_000, HEAVY, 10**6)
    group = owned({sid: [rng.choice(sizes) for _ in range(rng.choice((4, 5)))] for sid in range(1, 5)})
    settle(group, rng)
    steady = {tp: partition.lag for tp, partition in group.partitions.items()}
    found = [0, 0]
    for round_ in range(200):
        for tp, lag in steady.items():
            group.partitions[tp].lag = int(lag * rng.uniform(0.75, 1.5))
        for number, sid in sorted(moved(group).items())[:1]:
            move(group, number, sid)
            found[round_ // 100] += 1
    return found[0], found[1]


def test_a_steady_load_moves_nothing_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    """A14: whatever the loads are when the members rest, a few exchanges end it; without the ratio nothing does."""
    found = [flaps(seed) for seed in range(20)]
    assert max(found) <= (10, 0), found
    assert sum(later for _, later in found) == 0, found
    monkeypatch.setattr(policy, "RATIO", 1)
    assert sum(flaps(seed)[1] for seed in range(20)) > 200


@pytest.mark.parametrize("seed", range(20))
def test_lags_that_vary_by_a_factor_of_two_move_nothing(seed: int) -> None:
    """A14: no flapping under a steady load, wherever the lags lie between two powers of two."""
    rng = random.Random(seed)
    level = rng.randrange(1, 10**6)
    group = owned({sid: [level] * 5 for sid in range(1, 5)})
    for _ in range(50):
        for partition in group.partitions.values():
            partition.lag = rng.randint(level, 2 * level)
        assert moved(group) == {}


def test_the_backlog_of_a_member_is_shared() -> None:
    """A14: the members learn the lags from the heartbeats, exchange one pair after the other, and rest."""
    cluster = VirtualCluster(partitions=12)
    cluster.must(CONFIG)
    clients = cluster.team("a", "b", "c")
    assert sorted(Counter(cluster.owners().values()).values()) == [4, 4, 4]
    heavy = [number for number, owner in cluster.owners().items() if owner == "a"]
    begun = len(cluster.values)
    rng = random.Random(1)

    def work(rounds: int) -> None:
        for _ in range(rounds):
            for client in clients:
                report(client, heavy, rng)
            cluster.run(INTERVAL_MS // 4)

    work(80)
    counts = Counter(cluster.owners()[number] for number in heavy)
    assert max(counts.values()) == 2, counts
    assert sorted(Counter(cluster.owners().values()).values()) == [4, 4, 4]
    assert len(list(cluster.records(ReleasingPartition, begun))) == 4, "two pairs"
    rested = len(cluster.values)
    work(80)
    assert len(list(cluster.records(Heartbeat, rested))) > 40
    assert not list(cluster.records(ReleasingPartition, rested))
    assert not list(cluster.records(ClaimingPartition, rested))


def report(client: Client, heavy: list[int], rng: random.Random) -> None:
    """Handles some messages of each partition. Of those in `heavy` 100,000 to 150,000 are left, else up to 500."""
    for claim in client.member.claims.values():
        first = claim.position()
        client.deliver(claim, first, first + 1).finish_range(0, 2)
        left = rng.randint(100_000, 150_000) if claim.tp.partition in heavy else rng.randrange(500)
        claim.end_offset = first + 2 + left


def test_a_new_owner_does_not_report_that_nothing_is_left() -> None:
    """A14: until it knows the end it goes on from the log's; without lag weights it says 0."""
    for config, lag in ((CONFIG, HEAVY - 10), (replace(CONFIG, lag_weighted=False), 0)):
        cluster = VirtualCluster(partitions=1)
        cluster.must(config)
        (first,) = cluster.team("a")
        first.claim(0).end_offset = HEAVY
        cluster.run(INTERVAL_MS)
        assert cluster.partition(0).lag == HEAVY
        cluster.kill(first)
        second = cluster.add("b")
        cluster.run_until(lambda member=second.member: member.claims)
        second.deliver(second.claim(0), *range(10)).finish_range(0, 10)
        cluster.run(INTERVAL_MS)
        assert (cluster.partition(0).position, cluster.partition(0).lag) == (10, lag)


def test_only_balanced_has_lag_weights() -> None:
    group_settings.check(CONFIG, ["lag_weighted", "policy"])
    for other in ("", "greedy", "topic"):
        with pytest.raises(InvalidOption, match="only the policy balanced has it"):
            group_settings.check(replace(CONFIG, policy=other), ["lag_weighted"])
    group_settings.check(replace(CONFIG, policy="greedy"), ["policy"])  # stays, and counts when it is balanced again
    group_settings.check(replace(CONFIG, policy="greedy", lag_weighted=False), ["lag_weighted"])
    group_settings.check_change("billing", CONFIG, 0, replace(CONFIG, lag_weighted=False))
    with pytest.raises(InvalidOption, match="lag_weighted=1 is not allowed: True or False"):
        check_settings({"lag_weighted": 1})
    for name, named in (("balanced", {"lag_weighted": True}), ("greedy", {})):
        assert settings_named(CONFIG, {"policy": name}).get("lag_weighted") == named.get("lag_weighted")


def test_a_thousand_partitions_are_exchanged_in_one_pass() -> None:
    """A14: the search looks at each weight once, not at each pair of partitions."""
    group = owned({sid: [HEAVY if sid <= 50 else 0] * 10 for sid in range(1, 101)})
    assert len(policy._lowest_of_each(list(group.partitions), {tp: 1 for tp in group.partitions})) == 1
    assert len(moved(group)) == 2
