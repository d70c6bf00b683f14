"""Which topics are later than their group, so that reading of them begins at their beginning (D5)."""

from __future__ import annotations

import pytest
from msgspec import structs

from marshal_py.protocol.member.rebalance import found_later, new_topics
from marshal_py.protocol.wire.records import ClaimingPartition, GroupConfig, Heartbeat, Join, Leave, Record, Topology
from tests.support.virtual_cluster import VirtualCluster

PATTERN = "orders-*"
A, B = "orders-a", "orders-b"
JOIN = Join("c", bytes(16), 1, 1_000, (PATTERN,))


def claim(topic: str, partition: int) -> ClaimingPartition:
    return ClaimingPartition(1, topic, partition, -1, 3)


@pytest.mark.parametrize(
    ("records", "later"),
    [
        ([], set()),
        ([Heartbeat(1, 1)], {A, B}),
        ([Leave(1)], {A, B}),
        ([Topology(A, 2, -1), Topology(B, 2, -1)], set()),
        ([Topology(A, 2, -1), Topology(B, 2, -1), claim(A, 0)], set()),
        ([Topology(A, 2, -1), claim(A, 0)], {B}),
        ([Topology(A, 2, -1), claim(A, 0), Topology(B, 2, -1)], {B}),
        ([Topology(A, 2, -1), claim(A, 0), Topology(B, 2, -1), claim(B, 1)], {B}),
        ([Topology("other", 2, -1)], set()),
        ([GroupConfig(-1, mode=1)], set()),
        ([GroupConfig(-1, mode=1), JOIN], set()),
        ([GroupConfig(-1, mode=1), JOIN, Heartbeat(2, 1)], {A, B}),
    ],
)
def test_which_topics_are_later(records: list[Record], later: set[str]) -> None:
    """D5: wherever between the discovery of a topic and its claims all members of the group died."""
    cluster = VirtualCluster()
    for record in ([] if isinstance(next(iter(records), None), GroupConfig) else [JOIN]) + records:
        cluster.must(structs.replace(record, session=1) if isinstance(record, ClaimingPartition) else record)
    assert found_later(cluster.group, (PATTERN,), (A, B)) == later
    assert found_later(cluster.group, (A, B), (A, B)) == frozenset(), "these have options of their own"
    assert found_later(None, (PATTERN,), (A, B)) == frozenset()


def test_which_topics_are_new_to_a_group() -> None:
    """D5: those that it does not know while it knows another one of the consumer."""
    cluster = VirtualCluster()
    assert new_topics(None, (A, B)) == frozenset(), "the group has not begun"
    cluster.must(JOIN)
    cluster.must(Topology("other", 2, -1))
    assert new_topics(cluster.group, (A, B)) == frozenset(), "it knows none of them"
    cluster.must(Topology(A, 2, -1))
    assert new_topics(cluster.group, (A, B)) == {B}
