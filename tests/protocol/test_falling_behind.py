"""A partition whose messages come faster than its owner handles them goes to a member that has time for it (D16)."""

from __future__ import annotations

from typing import Any

import pytest

from marshal_py.client.values.options import ConsumerOptions
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig, ReleasingPartition, StepDown
from tests.support.virtual_cluster import INTERVAL_MS, Client, VirtualCluster

WINDOW_MS = 10_000
LOAD = {0: (100, 10), 1: (80, 10), 2: (10, 10), 3: (0, 0)}  # partition -> messages that come, and are handled


def group_of(policy: str = "greedy", **options: Any) -> tuple[VirtualCluster, Client, Client]:
    """A owns four partitions and B none."""
    cluster = VirtualCluster(partitions=4)
    cluster.must(GroupConfig(NONE, policy=policy))
    options.setdefault("release_behind_ms", WINDOW_MS)
    (a,) = cluster.team("a", **options)
    (b,) = cluster.team("b", **options)
    return cluster, a, b


def work(cluster: VirtualCluster, load: dict[int, tuple[int, int]], for_ms: int = 2 * WINDOW_MS) -> None:
    """Once in an interval, messages come and the owners handle some."""
    ends = dict.fromkeys(load, 0)
    for claim in [claim for client in cluster.clients for claim in client.member.claims.values()]:
        ends[claim.tp.partition] = max(claim.end_offset, 0)
    for _ in range(for_ms // INTERVAL_MS):
        for client in cluster.clients:
            for claim in client.member.claims.values():
                came, handled = load[claim.tp.partition]
                first = claim.position()
                ends[claim.tp.partition] += came
                claim.end_offset = ends[claim.tp.partition]
                if handled and client.may(claim):
                    client.deliver(claim, *range(first, first + handled)).finish_range(0, handled)
        cluster.run(INTERVAL_MS)
        for client in cluster.clients:  # who has just claimed a partition sees its end
            for claim in client.member.claims.values():
                claim.end_offset = ends[claim.tp.partition]


def releases(cluster: VirtualCluster) -> list[tuple[int, str, int]]:
    """(session, reason, successor) of each Release."""
    return [(r.session, r.reason, r.successor) for _, r in cluster.records(ReleasingPartition)]


def test_the_partition_with_the_greatest_lag_goes_to_who_has_time() -> None:
    """D16: one per window, named to its taker; and its old owner leaves it alone."""
    cluster, a, b = group_of()
    work(cluster, LOAD, WINDOW_MS // 2)
    assert a.owned == {0, 1, 2, 3}
    work(cluster, LOAD, 3 * WINDOW_MS // 2)
    assert (a.owned, b.owned) == ({1, 2, 3}, {0})
    assert releases(cluster) == [(a.session, "falls behind", b.session)]
    assert [advisory.text for _, advisory in a.advised("revoking")] == ["falls behind"]
    work(cluster, LOAD, 4 * WINDOW_MS)
    assert releases(cluster) == [(a.session, "falls behind", b.session)], "B has much lag itself now, and one partition"


def test_two_windows_release_two_partitions_to_a_fast_member() -> None:
    """D16: B keeps up with what it gets, so it can have the next one, too."""
    cluster, a, b = group_of()
    for _ in range(12):
        work(cluster, LOAD, INTERVAL_MS)
        for claim in b.member.claims.values():
            first, left = claim.position(), claim.end_offset - claim.position()
            if left > 0:
                b.deliver(claim, *range(first, first + left)).finish_range(0, left)
    assert b.owned == {0, 1}
    assert {successor for _, _, successor in releases(cluster)} == {b.session}
    assert a.owned == {2, 3}


@pytest.mark.parametrize(
    ("load", "options"),
    [
        ({**LOAD, 0: (10, 9), 1: (10, 10)}, {}),  # more is left in the end, but less than a window's work
        ({**LOAD, 0: (100, 0), 1: (100, 0)}, {}),  # nothing is finished: stuck or paused, not slow
        (LOAD, {"release_behind_ms": 0}),
        (LOAD, {"policy": "balanced"}),
        (LOAD, {"release_behind_ms": 10 * WINDOW_MS}),
    ],
)
def test_who_keeps_up_or_was_not_told_keeps_its_partitions(
    load: dict[int, tuple[int, int]], options: dict[str, Any]
) -> None:
    """D16"""
    cluster, _, _ = group_of(**options)
    before = releases(cluster)
    work(cluster, load)
    assert releases(cluster) == before


def test_a_partition_that_nobody_can_take_stays() -> None:
    """D16, F9.9: B stepped down."""
    cluster, a, b = group_of()
    cluster.must(StepDown(b.session, NONE))
    work(cluster, LOAD)
    assert a.owned == {0, 1, 2, 3}


def test_the_option_of_a_consumer_is_in_its_member() -> None:
    """D16: W in seconds there, in ms here; not given, nothing is released."""
    told = [ConsumerOptions(release_behind_s=s).member_options("c", ("t",), "").release_behind_ms for s in (None, 7.5)]
    assert told == [0, 7_500]
    with pytest.raises(InvalidOption, match="release_behind_s"):
        ConsumerOptions(release_behind_s=30, heartbeat_interval_s=20)


def test_the_last_partition_stays() -> None:
    """D16: nothing else takes its owner's time."""
    cluster, a, b = group_of(claims_max=1)
    work(cluster, {number: (100, 10) for number in range(4)})
    assert (len(a.owned), len(b.owned)) == (1, 1)
    assert releases(cluster) == []


def test_a_window_begins_anew_when_the_end_is_unknown_or_lower() -> None:
    """D16: a position or an end that moves back is no speed. In the last look the window is still shorter than W."""
    cluster, a, _ = group_of()
    for end in (NONE, NONE, 50):
        work(cluster, LOAD, 2 * INTERVAL_MS)
        for claim in a.member.claims.values():
            claim.end_offset = end
        cluster.run(INTERVAL_MS)
    work(cluster, LOAD, 2 * INTERVAL_MS)
    assert a.owned == {0, 1, 2, 3}


def test_an_end_that_is_learned_seldom_is_no_jump() -> None:
    """D16: while buffers are full nothing is fetched; speeds are those between two new ends. This member catches up."""
    cluster, a, _ = group_of()
    for number in range(1, 41):
        claim = a.claim(0)
        first = claim.position()
        a.deliver(claim, *range(first, first + 50)).finish_range(0, 50)
        if number % 10 == 0:
            claim.end_offset = 10_000 + 40 * number
        cluster.run(INTERVAL_MS)
    assert a.owned == {0, 1, 2, 3}
