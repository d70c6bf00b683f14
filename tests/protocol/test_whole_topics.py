"""Policy `topic`: a topic has one consumer, for all of its partitions (PROTOCOL.md A9)."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.policy import candidate_order, of_topics
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import ClaimingPartition, GroupConfig, ReleasingPartition, StepDown
from tests.protocol.test_assignment import group_of
from tests.support.virtual_cluster import INTERVAL_MS, Client, VirtualCluster

COUNTS = {"a": 8, "b": 4, "c": 3, "d": 1}


def target(group: Group) -> dict[str, int]:
    """The session that should have each topic."""
    return {tp.topic: line[0] for tp, line in of_topics(group, candidate_order(group, ())).items() if tp.partition < 0}


def cover(group: Group, topic: str, owner: int) -> None:
    tp = TopicPartition(topic, -1)
    group.partitions[tp] = Partition(tp, 0, owner)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "topics": st.lists(st.sampled_from(sorted(COUNTS)), unique=True).map(tuple),
                "capacity": st.integers(1, 3),
                "claims_max": st.sampled_from([0, 0, 1, 2]),
            }
        ),
        max_size=5,
    ),
    st.dictionaries(st.sampled_from(sorted(COUNTS)), st.integers(1, 5)),
)
@example(  # c finds no place until a has moved
    [{"topics": ("a", "b", "c"), "capacity": 1, "claims_max": 2}, {"topics": ("a",), "capacity": 1, "claims_max": 0}],
    {},
)
def test_a_target_is_whole_stays_and_respects_limits(sessions: list[dict[str, Any]], owners: dict[str, int]) -> None:
    """A9, A5: what came true is the target again; only the owner of a topic is in line for its partitions."""
    group = group_of(COUNTS, sessions)
    for topic, owner in owners.items():
        if owner in group.sessions:
            cover(group, topic, owner)
    found = target(group)
    for topic, owner in found.items():
        join = group.sessions[owner].join
        assert topic in join.topics
        assert not join.claims_max or list(found.values()).count(owner) <= join.claims_max
        cover(group, topic, owner)
    assert target(group) == found
    for tp, line in of_topics(group, candidate_order(group, ())).items():
        assert tp.partition < 0 or list(line) == [found[tp.topic]]


def test_topics_are_shared_by_partitions_and_capacity_and_nothing_moves_without_gain() -> None:
    """A9"""
    group = group_of(COUNTS, [{}, {}])
    assert target(group) == {"a": 1, "b": 2, "c": 2, "d": 2}
    for topic in COUNTS:
        cover(group, topic, 1)
    assert target(group) == {"a": 1, "d": 2, "c": 2, "b": 2}
    group = group_of(COUNTS, [{"capacity": 3}, {}])
    assert set(target(group).values()) == {1, 2}


# --- running members


def cluster_of() -> VirtualCluster:
    cluster = VirtualCluster()
    cluster.must(GroupConfig(NONE, policy="topic"))
    return cluster


def add(cluster: VirtualCluster, name: str, counts: dict[str, int], **options: Any) -> Client:
    return cluster.add(name, counts=counts, topics=tuple(counts), **options)


def topics_of(client: Client) -> set[str]:
    return {claim.tp.topic for claim in client.member.claims.values()}


def never_split(cluster: VirtualCluster) -> None:
    """Replays the log: at no offset two sessions own partitions of one topic, and who owns one owns the topic."""
    owners: dict[int, tuple[str, int, int]] = {}  # epoch -> (topic, partition, session)
    for verdict in cluster.verdicts:
        record = verdict.record
        if verdict.accepted and isinstance(record, ClaimingPartition):
            owners[verdict.offset] = record.topic, record.partition, record.session
        elif verdict.accepted and isinstance(record, ReleasingPartition):
            owners.pop(record.epoch, None)
        _drop_ended(owners, verdict)
        for topic in {topic for topic, partition, _ in owners.values() if partition >= 0}:
            holders = {session for name, _, session in owners.values() if name == topic}
            covers = {session for name, partition, session in owners.values() if name == topic and partition < 0}
            assert holders == covers, f"{topic} at {verdict.offset}"


def _drop_ended(owners: dict[int, tuple[str, int, int]], verdict: Verdict) -> None:
    record = verdict.record
    ended = record.session if verdict.accepted and type(record).__name__ in ("Evict", "Leave") else NONE  # type: ignore[union-attr]
    for epoch in [epoch for epoch, (_, _, session) in owners.items() if session == ended]:
        del owners[epoch]


def test_a_lost_claim_holds_up_no_topic() -> None:
    """A9, T17: a topic moves although claims of its partitions are lost that its owner does not repeat."""
    cluster, counts = cluster_of(), {"a": 2, "b": 2}
    one = add(cluster, "one", counts)
    cluster.run_until(lambda: len(cluster.group.claims) == len(counts), INTERVAL_MS)
    one.hold_writes()  # the claims of the partitions, which are under way
    two = add(cluster, "two", counts)
    cluster.run_until(lambda: len(cluster.group.sessions) == 2, INTERVAL_MS)
    cluster.run(INTERVAL_MS // 3)
    assert {tp.partition for tp in one.member.rebalancer._claiming} == {0, 1}
    one.release_writes(lose=True)
    cluster.run(4 * INTERVAL_MS)
    assert len(topics_of(one)) == len(topics_of(two)) == 1
    never_split(cluster)


def test_topics_move_whole_on_a_join_a_crash_a_step_down_and_a_pause() -> None:
    """A9: a hand-over drains all, then releases the topic itself, last."""
    cluster, counts = cluster_of(), {"a": 4, "b": 4}
    one = add(cluster, "one", counts)
    cluster.run(2 * INTERVAL_MS)
    assert len(one.member.claims) == 8
    two = add(cluster, "two", counts)
    cluster.run(3 * INTERVAL_MS)
    assert sorted([topics_of(one), topics_of(two)], key=sorted) == [{"a"}, {"b"}]
    kept = {claim.epoch for claim in two.member.claims.values()}
    three = add(cluster, "three", counts)
    cluster.run(2 * INTERVAL_MS)
    assert topics_of(three) == set(), "there are two topics"
    cluster.kill(one)
    cluster.run(4 * INTERVAL_MS)
    assert (len(topics_of(three)), len(three.member.claims)) == (1, 4)
    assert {claim.epoch for claim in two.member.claims.values()} == kept, "A4"
    cluster.must(StepDown(two.session, NONE))
    cluster.run(2 * INTERVAL_MS)
    assert (topics_of(two), topics_of(three)) == (set(), {"a", "b"})
    three.member.leave(three.now, "", 0)
    cluster.run(2 * INTERVAL_MS)
    assert topics_of(two) == {"a", "b"}
    never_split(cluster)


def test_the_only_consumer_of_a_group_takes_all_again_when_it_is_restarted() -> None:
    """A9, A2: nothing in the group changes after its Join, and it must not need a change to see free topics."""
    cluster, counts = cluster_of(), {"a": 2, "b": 1}
    one = add(cluster, "one", counts)
    cluster.run(2 * INTERVAL_MS)
    assert topics_of(one) == {"a", "b"}
    one.member.leave(one.now, "", 0)
    cluster.run(2 * INTERVAL_MS)
    again = add(cluster, "one again", counts)
    cluster.run(INTERVAL_MS)
    assert topics_of(again) == {"a", "b"}
    never_split(cluster)


def test_a_busy_handler_holds_the_whole_topic_until_its_time_is_over() -> None:
    """A9, A3"""
    cluster, counts = cluster_of(), {"a": 2, "b": 2}
    one = add(cluster, "one", counts, hand_over_timeout_ms=2 * INTERVAL_MS)
    cluster.run(2 * INTERVAL_MS)
    for claim in list(one.member.claims.values()):
        one.deliver(claim, 0)
    two = add(cluster, "two", counts)
    cluster.run(INTERVAL_MS)
    assert topics_of(two) == set()
    cluster.run(3 * INTERVAL_MS)
    assert len(topics_of(two)) == 1
    never_split(cluster)


def test_a_late_copy_of_a_claim_is_released_and_delivers_nothing() -> None:
    """A9, T17: its topic belongs to another session by then."""
    cluster, counts = cluster_of(), {"a": 2}
    one = add(cluster, "one", counts)
    cluster.run(2 * INTERVAL_MS)
    two = add(cluster, "two", counts)
    cluster.run(INTERVAL_MS)
    cluster.must(StepDown(one.session, NONE))
    cluster.run(2 * INTERVAL_MS)
    assert (topics_of(one), len(two.member.claims)) == (set(), 2)
    copies = [v.offset for v, r in cluster.records(ClaimingPartition) if v.accepted and r.session == one.session]
    claimed = len(one.claimed)
    for offset in copies:
        cluster.replay(offset)
    cluster.run(INTERVAL_MS)
    assert (topics_of(one), len(two.member.claims), len(one.claimed)) == (set(), 2, claimed)


def test_claims_max_counts_topics_and_a_growing_topic_stays_whole() -> None:
    """A9, A5"""
    cluster, counts = cluster_of(), {"a": 2, "b": 2, "c": 2}
    one = add(cluster, "one", counts, claims_max=2)
    cluster.run(3 * INTERVAL_MS)
    assert (len(topics_of(one)), len(one.member.claims)) == (2, 4)
    topic = min(topics_of(one))
    assert one.member.learn_topic(topic, 5)
    one.due_ms = cluster.now_ms
    cluster.run(3 * INTERVAL_MS)
    assert len(one.member.claims) == 7
    never_split(cluster)
