"""Members whose data topic was recreated: they park, accept the new one, or continue with it (D10, F9.10)."""

from __future__ import annotations

import pytest

from marshal_py.protocol.member.member_state import Wanted
from marshal_py.protocol.member.rebalance import BELIEVED_MS
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    RECREATED,
    ClaimingPartition,
    GroupConfig,
    Leave,
    Move,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Topology,
)
from tests.support.virtual_cluster import (
    INTERVAL_MS,
    READ_MS,
    THIRD_MS,
    TOPIC,
    WRITE_MS,
    Client,
    VirtualCluster,
    granted,
)

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so
STEP = I // 10
TRIP = WRITE_MS + READ_MS
OTHER = "untouched"


def team(
    *names: str, partitions: int = 4, mode: int = AT_LEAST_ONCE, **options: object
) -> tuple[VirtualCluster, list[Client]]:
    """Members of two topics whose ids the cluster reports."""
    cluster = VirtualCluster(partitions=partitions, mode=mode)
    clients = []
    for name in names:
        client = cluster.add(name, topics=(TOPIC, OTHER), counts={}, **options)
        learn(client, "one")
        client.member.learn_topic(OTHER, 2, "other")
        clients.append(client)
    cluster.run(3 * I)
    return cluster, clients


def learn(client: Client, topic_id: str, count: int = 4) -> None:
    """It refreshes metadata."""
    client.member.learn_topic(TOPIC, count, topic_id)
    client.due_ms = client.cluster.now_ms


def parked(cluster: VirtualCluster) -> dict[int, str]:
    return {p.tp.partition: p.parked for p in cluster.group.partitions.values() if p.parked}


def topic_of(cluster: VirtualCluster) -> tuple[str, int, int]:
    topic = cluster.group.topics[TOPIC]
    return topic.id, topic.count, topic.first_count


def open_of(client: Client, topic: str) -> set[int]:
    return {claim.tp.partition for claim in client.member.claims.values() if claim.tp.topic == topic}


def test_the_log_learns_the_ids() -> None:
    """D10, F9.1: with the first Topology, or later, if the cluster did not report one before."""
    cluster, _ = team("a")
    assert topic_of(cluster) == ("one", 4, 4)
    late = VirtualCluster(partitions=4)
    (b,) = late.team("b")
    assert topic_of(late) == ("", 4, 4)
    learn(b, "one")
    late.run(TRIP)
    assert topic_of(late) == ("one", 4, 4)
    learn(b, "")
    late.run(I)
    assert topic_of(late) == ("one", 4, 4)
    assert len(b.owned) == 4
    assert [record.topic_id for _, record in b.sends(Topology)] == ["", "one"]


def test_an_owner_parks() -> None:
    """D10: it stops delivery at once and releases each partition parked; other topics keep their epochs."""
    cluster, (a, b) = team("a", "b")
    others = {claim.epoch for c in (a, b) for claim in c.member.claims.values() if claim.tp.topic == OTHER}
    positions = {number: cluster.partition(number).position for number in range(4)}
    learn(a, "two")
    learn(b, "two")
    claims = [claim for c in (a, b) for claim in c.member.claims.values() if claim.tp.topic == TOPIC]
    cluster.run(1)
    assert not any(c.may(claim) for c in (a, b) for claim in c.member.claims.values() if claim.tp.topic == TOPIC)
    cluster.run(2 * TRIP)
    assert parked(cluster) == dict.fromkeys(range(4), RECREATED)
    assert {number: cluster.partition(number).position for number in range(4)} == positions, "for an admin to look at"
    cluster.run(4 * I)
    assert parked(cluster) == dict.fromkeys(range(4), RECREATED)
    assert not [r for _, r in cluster.records(ClaimingPartition, cluster.verdicts[-1].offset) if r.topic == TOPIC]
    assert {claim.epoch for c in (a, b) for claim in c.member.claims.values()} == others
    assert all(c.may(claim) for c in (a, b) for claim in c.member.claims.values())
    texts = [advisory.text for c in (a, b) for _, advisory in c.advised("parked")]
    assert len(texts) == 4
    assert all(text.startswith(RECREATED) and "marshal set-position" in text for text in texts), "and what to do"
    assert len(claims) == 4
    assert topic_of(cluster) == ("one", 4, 4), "nobody accepts it unasked"


def test_an_owner_parks_what_its_handlers_still_hold() -> None:
    """D10, T12: after an interval at most; what is finished is reported with it."""
    cluster, (a,) = team("a")
    run = a.deliver(a.claim(0), *range(4))
    run.finish(0)
    run.finish(2)
    learn(a, "two")
    cluster.run(THIRD_MS)
    assert parked(cluster) == dict.fromkeys((1, 2, 3), RECREATED)
    cluster.run(I)
    assert parked(cluster) == dict.fromkeys(range(4), RECREATED)
    assert (cluster.partition(0).position, cluster.partition(0).progress) == (1, b"\x01\x01\x00")


def test_an_owner_parks_at_most_once() -> None:
    """D10, F6.3: it gives back what it was granted; nothing of the old topic is delivered any more."""
    cluster, (a,) = team("a", mode=AT_MOST_ONCE)
    claim = a.claim(0)
    granted(cluster, a, claim, (0, 10))
    assert a.take(claim) == 0
    claim.tracker.returned()  # type: ignore[union-attr]
    learn(a, "two")
    cluster.run(1)
    assert a.take(claim) is None
    cluster.run(2 * TRIP)
    assert (cluster.partition(0).position, cluster.partition(0).parked) == (1, RECREATED)


def test_free_partitions_with_a_position_are_parked() -> None:
    """D10: claimed and released so; one that has none is left alone, for nothing is lost there."""
    cluster = VirtualCluster(partitions=4)
    a = cluster.add("a", topics=(TOPIC,), counts={}, claims_max=2)
    learn(a, "one")
    cluster.run(3 * I)
    had = set(a.owned)
    a.member.leave(a.now, "bye", 0)
    cluster.run(I)
    assert not cluster.owners()
    b = cluster.add("b", topics=(TOPIC,), counts={})
    learn(b, "two")
    cluster.run(4 * I)
    assert parked(cluster) == dict.fromkeys(had, RECREATED)
    assert {record.partition for _, record in b.sends(ClaimingPartition)} == had
    assert {tuple(claim.tp) for _, claim in b.claimed} == set(), "the user never hears of a claim"
    assert {record.parked for _, record in b.sends(ReleasingPartition)} == {RECREATED}
    assert b.alive


@pytest.mark.parametrize("by_config", [True, False])
def test_members_accept_the_new_topic_where_they_may(by_config: bool) -> None:
    """D10, F9.10: `earliest` in the config, or in the option where the config is silent: all begin at the beginning."""
    cluster, (a, b) = team("a", "b", on_topic_recreated="fail" if by_config else "earliest")
    if by_config:
        cluster.must(GroupConfig(-1, on_topic_recreated="earliest"))
    before = cluster.partition(0).generation
    for client in (a, b):
        client.resolved.clear()
        client.starts = {TopicPartition(TOPIC, number): 77 for number in range(9)}
        learn(client, "two", 6)
    cluster.run(3 * I)
    assert topic_of(cluster) == ("two", 6, 0)
    assert not parked(cluster)
    assert open_of(a, TOPIC) | open_of(b, TOPIC) == set(range(6))
    assert {cluster.partition(number).generation for number in range(4)} == {before + 1}
    wanted = {wanted for c in (a, b) for wanted in c.resolved if wanted.tp.topic == TOPIC}
    assert wanted == {Wanted(TopicPartition(TOPIC, number), True) for number in range(6)}, "D5"
    assert len([v for v, r in cluster.records(Topology) if v.accepted and r.topic_id == "two"]) == 1


@pytest.mark.parametrize("said", ["fail", "latest of the future"])
def test_the_groups_settings_override_the_option(said: str) -> None:
    """D10: what the group says counts, also where a consumer's option says `earliest`."""
    cluster, (a,) = team("a", on_topic_recreated="earliest")
    if said == "fail":
        cluster.must(GroupConfig(-1, on_topic_recreated="fail"))
    learn(a, "two")
    cluster.run(3 * I)
    assert topic_of(cluster)[0] == ("one" if said == "fail" else "two")


def test_the_first_in_rank_accepts() -> None:
    """D10: in rank order, a third of an interval apart, once all partitions of the topic are free."""
    cluster, (a, b) = team("a", "b", on_topic_recreated="earliest")
    learn(a, "two")
    cluster.run(I)
    mine = [record for _, record in a.sends(Topology) if record.topic_id == "two"]
    assert not mine, "the other one still owns some of it"
    learn(b, "two")
    cluster.run_until(lambda: topic_of(cluster)[0] == "two")
    assert len([record for _, record in a.sends(Topology) if record.topic_id == "two"]) == 1
    assert not [record for _, record in b.sends(Topology) if record.topic_id == "two"]
    # The first one hangs: the next does it a third later.
    cluster, (a, b) = team("a", "b", on_topic_recreated="earliest")
    learn(a, "two")
    learn(b, "two")
    cluster.run(TRIP)
    a.hold_writes()
    cluster.run(I + STEP)
    assert topic_of(cluster)[0] == "two"
    assert [record for _, record in b.sends(Topology) if record.topic_id == "two"]


def asked(client: Client) -> list[int]:
    """Returns when the client asks for its topics from now on. Nobody answers."""
    looks: list[int] = []
    tick = client.tick

    def watched() -> object:
        out = tick()
        if out.look_at_topics:
            looks.append(client.cluster.now_ms)
        return out

    client.tick = watched  # type: ignore[method-assign,assignment]
    return looks


def test_a_stale_id_does_not_park_again() -> None:
    """D10: a member that knows the old topic and reads that the new one was accepted asks for new metadata at once."""
    cluster, (a, b) = team("a", "b", on_topic_recreated="earliest")
    learn(a, "two")
    cluster.run(THIRD_MS)
    # b has not refreshed: it continues until its partitions are taken from it by an admin's pause.
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
    cluster.run(I)
    at = cluster.group.topics[TOPIC].offset
    cluster.must(Topology(TOPIC, 4, at, token, "an admin", "two"))
    cluster.must(ReleaseGroup(token, token, 0))
    looks = asked(b)
    cluster.run(3 * I)
    assert len(looks) > 3, "it asks again as long as it is not answered"
    assert TOPIC not in b.member.topics.ids
    assert topic_of(cluster) == ("two", 4, 0)
    assert not parked(cluster)
    assert open_of(b, TOPIC) == set(), "it has not compared the id"
    released = [r for _, r in b.sends(ReleasingPartition)]
    assert not [r for r in released if r.parked]
    learn(b, "two")
    looks.clear()
    cluster.run(I)
    assert looks == []
    assert not parked(cluster)
    assert open_of(a, TOPIC) | open_of(b, TOPIC) == set(range(4))
    # What was accepted is the older one, for b knows better by now: then it parks.
    learn(b, "three")
    cluster.run(I)
    assert parked(cluster)


def test_an_id_from_a_broker_that_lags_behind_is_not_believed() -> None:
    """D10: the topic was created again twice. Who has heard the newest id compares it before it claims anything, also
    if somebody has accepted the one before: it once delivered messages of the third topic as those of the second.
    """
    cluster, (a,) = team("a")
    learn(a, "three")
    cluster.run(I)
    assert parked(cluster)
    cluster.must(Topology(TOPIC, 4, cluster.group.topics[TOPIC].offset, -1, "who has heard another id", "two"))
    looks = asked(a)
    cluster.run(TRIP)
    assert looks, "at once"
    cluster.run(2 * I)
    assert open_of(a, TOPIC) == set()
    learn(a, "two")
    cluster.run(I)
    assert open_of(a, TOPIC) == set(range(4))


def test_what_the_cluster_goes_on_telling_is_believed() -> None:
    """D10: the log has replaced the newest id, because another member had asked a broker that lags behind."""
    cluster, (a,) = team("a", on_topic_recreated="earliest")
    learn(a, "three")
    cluster.run(I)
    assert topic_of(cluster)[0] == "three"
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
    cluster.run(I)
    cluster.must(Topology(TOPIC, 4, cluster.group.topics[TOPIC].offset, token, "who has heard another id", "two"))
    cluster.must(ReleaseGroup(token, token, 0))
    looks = asked(a)
    for waited_ms in range(0, 2 * BELIEVED_MS, I):
        learn(a, "three")
        cluster.run(I)
        if waited_ms < BELIEVED_MS - I:
            assert topic_of(cluster)[0] == "two", "the broker that tells it may lag behind"
    assert looks
    assert topic_of(cluster)[0] == "three"
    assert open_of(a, TOPIC) == set(range(4))


def test_a_start_that_was_looked_up_in_the_old_topic_is_not_used() -> None:
    """D5, D10: it is forgotten when another id is accepted, however fresh it is."""
    cluster, (a,) = team("a", on_topic_recreated="earliest")
    a.resolves = False
    for number in range(4):
        a.member.start_resolved(TopicPartition(TOPIC, number), 500, 500, a.now)
    learn(a, "two")
    a.resolves, a.starts = True, {}
    cluster.run(I)
    assert topic_of(cluster)[0] == "two"
    assert {cluster.partition(number).position for number in range(4)} == {0}


def test_an_admin_moves_what_was_parked() -> None:
    """D10, F9.10, F6.5: the new id first, then the positions; then members claim, and none parks it again."""
    cluster, (a, b) = team("a", "b")
    learn(a, "two")
    learn(b, "two")
    cluster.run(I)
    token = cluster.must(ReleaseGroup(cluster.group.pause_change, -1, 20 * I))
    cluster.run(TRIP)
    cluster.must(Topology(TOPIC, 4, cluster.group.topics[TOPIC].offset, token, "tool", "two"))
    moves = tuple(Move(TOPIC, number, cluster.partition(number).version, 40 + number) for number in range(4))
    cluster.must(SetPosition(token, moves, True))
    cluster.run(3 * I)
    assert not parked(cluster)
    assert open_of(a, TOPIC) | open_of(b, TOPIC) == set(range(4))
    assert [cluster.partition(number).position for number in range(4)] == [40, 41, 42, 43]
    released = [r for c in (a, b) for _, r in c.sends(ReleasingPartition) if r.parked]
    assert len(released) == 4


def test_a_parked_partition_is_not_mirrored() -> None:
    """D7, D10: the old position means nothing in a recreated topic."""
    cluster, (a,) = team("a")
    a.deliver(a.claim(0), *range(10)).finish_range(0, 10)
    a.mirrored.clear()
    learn(a, "two")
    cluster.run(3 * I)
    assert cluster.partition(0).position == 10
    assert all(tp.topic == OTHER for _, what in a.mirrored for tp in what)


def test_a_member_leaves_with_parked_partitions() -> None:
    """D10, T16: the Release that parks is one like the others; the Leave follows."""
    cluster, (a,) = team("a")
    a.hold_writes()
    learn(a, "two")
    cluster.run(1)
    a.member.leave(a.now, "bye", 0)
    a.release_writes()
    cluster.run(THIRD_MS)
    assert not a.alive
    assert cluster.records(Leave)
    assert parked(cluster) == dict.fromkeys(range(4), RECREATED)


def test_what_was_fetched_ahead_is_dropped_where_the_log_is_read_again() -> None:
    """N11: the member that joins again knows nothing of it, and it would stay assigned."""
    cluster = VirtualCluster(partitions=4)
    cluster.team("a")
    b = cluster.add("b")
    b.prefetch_succeeds = False
    cluster.run(2 * INTERVAL_MS)
    ahead = [at for at, _ in b.prefetched]
    assert len(ahead) == 2
    assert b.member.detach().stop_prefetch == ahead
