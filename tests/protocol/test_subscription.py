"""Patterns of topics: what they match, what a session consumes, and how members share what is found (A13)."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase

import pytest

from marshal_py.protocol.wire.identity import consumed, consumes, matches
from marshal_py.protocol.wire.records import ReleaseGroup, ReleasingPartition, Topology
from tests.protocol.test_member_topics import asked
from tests.support.virtual_cluster import INTERVAL_MS, THIRD_MS, Client, VirtualCluster

A, B, C = "orders-a", "orders-b", "orders-c"
PATTERN = ("orders-*",)


def found(client: Client, **counts: int) -> None:
    """Its driver looks at the cluster's topics."""
    for topic, count in counts.items():
        client.member.learn_topic(topic.replace("_", "-"), count, f"id of {topic}")
    client.due_ms = client.cluster.now_ms


def owned(client: Client) -> dict[str, int]:
    """How many partitions it has of each topic."""
    topics = [claim.tp.topic for claim in client.member.claims.values()]
    return {topic: topics.count(topic) for topic in sorted(set(topics))}


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("orders-*", "orders- orders-a orders-a.b", "orders my-orders-a Orders-a"),
        ("*orders", "orders my-orders", "orders-a"),
        ("*-orders-*", "my-orders-a -orders-", "my-orders orders-a"),
        ("a*a", "aa aba aaa", "a ab"),
        ("a*b*b", "abb a-b-b abbb", "ab abba"),
        ("ab*ab*", "abab ab-ab-c", "ab aba"),
        ("tenant.*", "tenant.a tenant.", "tenants tenant"),
        ("*", "a a.b", "__consumer_offsets"),
    ],
)
def test_what_a_pattern_matches(pattern: str, yes: str, no: str) -> None:
    """A13: whole names; never a name that begins with two underscores."""
    assert [name for name in yes.split() if not consumes((pattern,), name)] == []
    assert [name for name in no.split() if consumes((pattern,), name)] == []


def test_it_agrees_with_the_standard_library() -> None:
    """A13: on 20,000 pairs of random patterns and names."""
    rng = random.Random(7)
    for _ in range(20_000):
        pattern = "".join(rng.choice("ab*-") for _ in range(rng.randrange(1, 8)))
        name = "".join(rng.choice("ab-") for _ in range(rng.randrange(10)))
        assert matches(pattern, name) is fnmatchcase(name, pattern), (pattern, name)


def test_a_pattern_looks_at_each_character_a_few_times() -> None:
    """A13: members evaluate it while they heartbeat. One that went back would do so 120 times in each of 120 places."""
    assert not matches("*a" * 120 + "*b", "a" * 248 + "-")


def test_what_a_session_consumes() -> None:
    """A13: names, whether the log knows them or not; matches of the log's topics; nothing that is excepted."""
    topics = ("zeta", "orders-*", "!orders-dead")
    assert consumed(topics, [B, "orders-dead", "other", A, "zeta"]) == ("zeta", A, B)
    assert not consumes(topics, "orders-dead")
    assert consumed(("zeta", "alpha"), [A]) == ("zeta", "alpha")


def test_a_topic_that_appears_is_shared_and_nothing_else_moves() -> None:
    """A13, A4: one member finds it, the others learn of it by its Topology and ask the cluster at once."""
    cluster = VirtualCluster()
    first, second = (cluster.add(name, topics=PATTERN, counts={}) for name in ("a", "b"))
    cluster.run(3 * INTERVAL_MS)
    assert owned(first) == owned(second) == {}, "nothing matches, which is no error"
    for client in (first, second):
        found(client, orders_a=4)
    cluster.run(3 * INTERVAL_MS)
    assert owned(first) == owned(second) == {A: 2}
    assert first.member.candidacy.others(first.group, A) == [second.session], "A2: they count in ranks"
    kept = {**first.member.claims, **second.member.claims}
    found(first, orders_b=2)
    cluster.run(3 * INTERVAL_MS)
    assert owned(first)[B], "it has found it"
    assert B not in owned(second), "D10: it has not compared the topic's id"
    found(second, orders_b=2)
    cluster.run(6 * INTERVAL_MS)
    assert owned(first) == owned(second) == {A: 2, B: 1}
    assert kept.items() <= {**first.member.claims, **second.member.claims}.items()
    assert len(list(cluster.records(Topology))) == 2


def test_who_has_not_found_a_topic_is_handed_none_of_it() -> None:
    """A13, A3: its owner would release what nobody may claim, and take it back, again and again."""
    cluster = VirtualCluster()
    (first,) = cluster.team("a", topics=PATTERN, counts={A: 4})
    second = cluster.add("b", topics=PATTERN, counts={})
    cluster.run(3 * INTERVAL_MS)
    assert (owned(first), second.prefetched) == ({A: 4}, [])
    assert [*cluster.records(ReleasingPartition)] == []
    cluster.kill(first)
    cluster.run(4 * INTERVAL_MS)
    assert owned(second) == {}, "nor what an evicted one had"
    found(second, orders_a=4)
    cluster.run(3 * INTERVAL_MS)
    assert owned(second) == {A: 4}


def test_a_topology_of_another_member_asks_for_a_look() -> None:
    """A13: so that a topic is not found later by each member."""
    cluster = VirtualCluster()
    (client,) = cluster.team("a", topics=PATTERN, counts={})
    looks = []
    tick = client.tick

    def watched() -> object:
        out = tick()
        looks.append(out.look_at_topics)
        return out

    client.tick = watched  # type: ignore[method-assign,assignment]
    cluster.must(Topology("other", 1, -1))
    cluster.run(INTERVAL_MS)
    assert True not in looks
    cluster.must(Topology(A, 1, -1))
    cluster.run(INTERVAL_MS)
    assert looks.count(True) == 1
    assert owned(client) == {}, "it takes nothing before the driver has answered"


def test_members_with_different_patterns() -> None:
    """A13, A5: each gets of what it consumes, by a pattern or by name."""
    cluster = VirtualCluster()
    every = cluster.add("every", topics=PATTERN, counts={A: 2, B: 2, C: 2})
    some = cluster.add("some", topics=("orders-a*", "orders-b*"), counts={A: 2, B: 2})
    named = cluster.add("named", topics=(C,), counts={C: 2})
    cluster.run(8 * INTERVAL_MS)
    assert sum(map(len, map(owned, (every, some, named)))) >= 3
    assert C not in owned(some)
    assert set(owned(named)) == {C}
    totals = {topic: sum(owned(c).get(topic, 0) for c in (every, some, named)) for topic in (A, B, C)}
    assert totals == {A: 2, B: 2, C: 2}
    assert sorted(sum(owned(c).values()) for c in (every, some, named)) == [2, 2, 2]


@pytest.mark.parametrize("policy", ["balanced", "greedy"])
def test_a_topic_that_is_deleted_leaves(policy: str) -> None:
    """A13: it is released at its position, counts in no target, and is claimed again if it was only hidden."""
    cluster = VirtualCluster()
    first, second = (cluster.add(name, topics=PATTERN, counts={A: 2, B: 2}, policy=policy) for name in ("a", "b"))
    cluster.run(4 * INTERVAL_MS)
    assert sum(owned(c).get(B, 0) for c in (first, second)) == 2
    for client in (first, second):
        client.member.forget_topic(B)
        client.due_ms = cluster.now_ms
    cluster.run(6 * INTERVAL_MS)
    assert [set(owned(client)) - {A} for client in (first, second)] == [set(), set()]
    assert {record.reason for _, record in cluster.records(ReleasingPartition)} >= {"topic deleted"}
    assert {tp.topic for tp in first.member.candidacy.target} == {A}
    for client in (first, second):
        found(client, orders_b=2)
    cluster.run(6 * INTERVAL_MS)
    assert sum(owned(c).get(B, 0) for c in (first, second)) == 2


def test_a_topic_that_is_gone_is_asked_for_no_more() -> None:
    """A13, D10: it was created again, which asks for its id, and deleted before the answer."""
    cluster = VirtualCluster()
    (client,) = cluster.team("a", topics=PATTERN, counts={A: 1, B: 1})
    found(client, orders_a=1)
    cluster.run(INTERVAL_MS)
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * INTERVAL_MS))
    cluster.run(INTERVAL_MS)
    cluster.must(Topology(A, 1, cluster.group.topics[A].offset, token, "another", "a newer id"))
    cluster.must(ReleaseGroup(token, token, 0))
    cluster.run(THIRD_MS)
    assert client.member.topics.is_unknown(A)
    client.member.forget_topic(A)
    looks = asked(client)
    cluster.run(4 * INTERVAL_MS)
    assert len(looks) <= 1


def test_the_position_of_a_deleted_topic_is_released_and_not_committed() -> None:
    """A13, D7: Kafka would refuse the commit, and say so to the user."""
    cluster = VirtualCluster(partitions=1)
    (client,) = cluster.team("a", topics=PATTERN, counts={A: 1})
    client.deliver(client.claim(0, A), 0, 1, 2).finish_range(0, 3)
    client.member.forget_topic(A)
    count = len(client.mirrored)
    client.due_ms = cluster.now_ms
    cluster.run(10 * INTERVAL_MS)
    (released,) = (record for _, record in cluster.records(ReleasingPartition))
    assert (released.position, released.reason) == (3, "topic deleted")
    assert client.mirrored[count:] == []


def test_a_member_that_joins_counts_no_deleted_topic() -> None:
    """A13: else a new member would get its share in partitions that nobody can read."""
    cluster = VirtualCluster()
    old = cluster.add("old", topics=PATTERN, counts={A: 4, B: 4})
    cluster.run(4 * INTERVAL_MS)
    old.member.forget_topic(B)
    cluster.run(4 * INTERVAL_MS)
    new = cluster.add("new", topics=PATTERN, counts={A: 4})
    new.member.forget_topic(B)
    cluster.run(8 * INTERVAL_MS)
    assert owned(old) == owned(new) == {A: 2}
