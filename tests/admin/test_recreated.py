"""A move accepts a topic that was created again before it moves anything: PROTOCOL.md M16, on plans in virtual time.

What every test of this file must not see: a new topic under the positions of the old one, a position of the new topic
that the tool denies, a group that cannot be helped by the same command again.
"""

from __future__ import annotations

from typing import Any

import pytest

from marshal_py.admin.plans.impact import preview
from marshal_py.admin.plans.operation import Author, GroupContext, Terms
from marshal_py.admin.plans.position import MOVED, NOT_MOVED, PositionPlan
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.admin.views.recreated_topics import RecreatedTopic, find_recreated
from marshal_py.errors import AdminFailed, GroupMissing
from marshal_py.protocol.member.waiting import standstills
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import RECREATED, GroupConfig, Record, ReleaseGroup, SetPosition, Topology
from marshal_py.transport.ports import TopicInfo
from tests.admin.virtual_admin import NEVER, Tool, finish, play_copies, start_tool
from tests.support.virtual_cluster import GROUP, INTERVAL_MS, TOPIC, WRITE_MS, Client, VirtualCluster, tp

OLD, NEW = "old-id", "new-id"


def company(config: str = "", parked: bool = True, partitions: int = 2) -> tuple[VirtualCluster, list[Client]]:
    """Two consumers whose topic, of 3 partitions, was created again with `partitions`, parked or not."""
    cluster = VirtualCluster(partitions=3)
    team = cluster.team("a", "b")
    tell(team, 3, OLD)
    cluster.run_until(lambda: all(client.group.topics[TOPIC].id == OLD for client in team))
    if config:
        cluster.must(GroupConfig(cluster.group.config_offset, on_topic_recreated=config))
    if parked:
        tell(team, partitions, NEW)
        cluster.run_until(lambda: all(cluster.partition(number).parked == RECREATED for number in range(3)))
    return cluster, team


def tell(team: list[Client], partitions: int, topic_id: str) -> None:
    """The clients look at the cluster's metadata."""
    for client in team:
        client.member.learn_topic(TOPIC, partitions, topic_id)


def move(
    cluster: VirtualCluster,
    name: str = "tool",
    positions: dict[int, int] | None = None,
    partitions: int = 2,
    crash_after: int = NEVER,
    topic_id: str = NEW,
    stay_paused: bool = False,
    **options: Any,
) -> Tool:
    wanted = {tp(number): position for number, position in (positions or {0: 5, 1: 7}).items()}

    def make(context: GroupContext) -> PositionPlan:
        assert context.group is not None
        recreated = find_recreated(context.group, {TOPIC: TopicInfo(partitions, topic_id)})
        return PositionPlan(context, list(wanted), Terms(**options), recreated=recreated, stay_paused=stay_paused)

    return start_tool(cluster, make, name, "alice@desk", wanted, crash_after)


def plan_of(tool: Tool) -> PositionPlan:
    assert isinstance(tool.operation, PositionPlan)
    return tool.operation


def kinds(tool: Tool) -> list[type[Record]]:
    return list(dict.fromkeys(type(record) for record in tool.records))


@pytest.mark.parametrize("config", ["", "fail", "earliest"])
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "unnoticed"])
def test_the_new_topic_is_accepted_in_the_pause_before_the_move(config: str, parked: bool) -> None:
    """M16: in the pause and with its token, once all partitions of the topic are free, also those that do not move."""
    cluster, team = company("" if parked and config == "earliest" else config, parked)
    generations = [cluster.partition(number).generation for number in range(3)]
    tool = finish(cluster, move(cluster, positions={0: 5}))
    assert plan_of(tool).error is None
    assert plan_of(tool).outcome == MOVED
    assert kinds(tool) == [ReleaseGroup, Topology, SetPosition]
    topic = cluster.group.topics[TOPIC]
    assert (topic.id, topic.count, topic.first_count) == (NEW, 2, 0)
    ((_, accepted),) = [(v, r) for v, r in cluster.records(Topology) if v.accepted and r.topic_id == NEW]
    assert accepted.token != NONE
    assert plan_of(tool).before == {tp(0): NONE}, "what was before is of another topic"
    assert (cluster.partition(0).position, cluster.partition(0).parked) == (5, "")
    assert [cluster.partition(number).generation - generations[number] for number in (0, 1, 2)] == [2, 1, 1]
    assert cluster.partition(2).position == NONE
    tell(team, 2, NEW)
    cluster.run_until(lambda: set(cluster.owners()) == {0, 1})
    assert cluster.partition(1).parked == ""
    assert play_copies(cluster, tool) == []
    assert tool.kinds[-2:] == ["moving", "moved"]
    assert "accepted" in tool.kinds


@pytest.mark.parametrize("config", ["", "fail"])
@pytest.mark.parametrize("records", [1, 2, 3])
def test_a_run_that_is_killed_between_the_records_is_mended_by_the_next(config: str, records: int) -> None:
    """M16: after the pause, after the new topic was accepted, after the move itself."""
    cluster, team = company(config)
    finish_or_die(cluster, move(cluster, "killed", crash_after=records))
    accepted = cluster.group.topics[TOPIC].id == NEW
    assert accepted == (records > 1)
    if accepted and records == 2:
        assert {cluster.partition(number).position for number in range(3)} == {NONE}
    again = finish(cluster, move(cluster, "again", take_over=True))
    assert plan_of(again).outcome == MOVED
    assert (Topology in kinds(again)) == (not accepted)
    assert [cluster.partition(number).position for number in (0, 1)] == [5, 7]
    tell(team, 2, NEW)
    cluster.run_until(lambda: set(cluster.owners()) == {0, 1})


def finish_or_die(cluster: VirtualCluster, tool: Tool) -> None:
    cluster.run_until(lambda: not tool.alive)
    cluster.run(2 * INTERVAL_MS)


@pytest.mark.parametrize("config", ["", "fail"])
def test_a_run_that_gives_up_in_between_says_what_is_true_of_the_topic(config: str) -> None:
    """M16, M7: nothing moved, but the positions of the old topic are forgotten."""
    cluster, team = company(config)
    tool = move(cluster)
    cluster.run_until(lambda: plan_of(tool).accepted)
    tool.give_up()
    finish(cluster, tool)
    plan = plan_of(tool)
    assert isinstance(plan.error, AdminFailed)
    assert plan.error.outcome == plan.outcome == NOT_MOVED
    assert str(plan.error) == (
        f"no position of group {GROUP!r} moved: it was interrupted; topic {TOPIC!r} is the new "
        "one for the group now, and its partitions start at their beginnings"
    )
    assert not cluster.group.paused
    assert play_copies(cluster, tool) == []
    tell(team, 2, NEW)
    cluster.run_until(lambda: set(cluster.owners()) == {0, 1})


@pytest.mark.parametrize(("config", "may"), [("", True), ("fail", False)])
def test_a_record_that_was_not_read_is_named_if_it_may_still_be_accepted(config: str, may: bool) -> None:
    """M16: where the config says `fail` it dies with the pause (F9.10); else a late copy does what the user wanted."""
    cluster, _ = company(config)
    tool = move(cluster)
    cluster.run_until(
        lambda: (
            any(isinstance(record, SetPosition | Topology) for record in tool.records)
            or (cluster.group.paused and not cluster.owners())
        )
    )
    tool.hold_writes()
    cluster.run_until(lambda: any(isinstance(record, Topology) for record in tool.records))
    cluster.run(2 * WRITE_MS)
    tool.release_writes(lose=True)
    tool.give_up()
    finish(cluster, tool)
    plan = plan_of(tool)
    assert plan.outcome == NOT_MOVED
    assert (f"the new topic {TOPIC!r} may still be accepted" in str(plan.error)) == may
    assert ("Topology" in play_copies(cluster, tool)) == may


def test_a_topic_that_is_made_anew_once_more_meanwhile() -> None:
    """M13, M16: somebody else has accepted a third topic; positions of the second one are not set in it."""
    cluster, _ = company("fail")
    first = move(cluster, "first")
    cluster.run_until(lambda: cluster.group.paused)
    first.suspend()
    other = finish(cluster, move(cluster, "other", topic_id="third-id", take_over=True))
    assert plan_of(other).outcome == MOVED
    first.resume()
    finish(cluster, first)
    assert plan_of(first).outcome == NOT_MOVED
    assert cluster.group.topics[TOPIC].id == "third-id"


def test_a_consumer_may_accept_it_first() -> None:
    """D10, M16: then the move sends no Topology."""
    cluster, _ = company()
    recreated = find_recreated(cluster.group, {TOPIC: TopicInfo(2, NEW)})
    cluster.must(Topology(TOPIC, 2, cluster.group.topology_offset(TOPIC), topic_id=NEW))
    wanted = {tp(0): 1, tp(1): 2}
    tool = finish(
        cluster,
        start_tool(cluster, lambda context: PositionPlan(context, list(wanted), recreated=recreated), positions=wanted),
    )
    assert plan_of(tool).outcome == MOVED
    assert kinds(tool) == [ReleaseGroup, SetPosition]


def test_a_pause_in_which_positions_were_forgotten_says_how_to_set_them() -> None:
    """M16: whoever ended the pause of a run that died would begin at the beginning of the new topic."""
    cluster, _ = company()
    move(cluster)
    cluster.run_until(lambda: cluster.group.topics[TOPIC].id == NEW)
    (paused,) = [one for one in standstills(cluster.group) if one.cause == "paused"]
    assert f"consumers begin at the beginning of {TOPIC}, " in paused.advice
    assert f"to set them first: marshal set-position {GROUP} {TOPIC} --to PLACE --take-over; " in paused.advice


def test_partitions_are_those_of_the_new_topic() -> None:
    """M3: one that only the old topic had is refused before the pause; one that only the new one has is not."""
    cluster, _ = company(partitions=2)
    with pytest.raises(GroupMissing, match="knows 2 partitions"):
        move(cluster, positions={2: 0})
    cluster, team = company(partitions=5)
    tool = finish(cluster, move(cluster, positions={number: 0 for number in range(5)}, partitions=5))
    assert plan_of(tool).outcome == MOVED
    tell(team, 5, NEW)
    cluster.run_until(lambda: len(cluster.owners()) == 5)


def test_the_dry_run_shows_it_and_writes_nothing() -> None:
    """M12: by the fold itself, on a copy."""
    cluster, (a, _) = company("fail")
    context = GroupContext(
        a.world, GROUP, PauseHistory(GROUP), Author.of("alice", "desk", "test", b"1234"), a.rng.randbytes
    )
    digest, values = a.group.digest(), len(cluster.values)
    recreated = find_recreated(a.group, {TOPIC: TopicInfo(2, NEW)})
    assert recreated == {TOPIC: RecreatedTopic(TOPIC, OLD, NEW, 2, 3)}
    rows = preview(context, {tp(0): 4, tp(1): 0}, {tp(0): 1, tp(1): 0}, recreated)
    assert [(row.partition, row.position, row.target, row.skipped, row.repeated) for row in rows] == [
        (0, NONE, 4, 3, 0),
        (1, NONE, 0, 0, 0),
    ]
    assert (a.group.digest(), len(cluster.values)) == (digest, values)
    with pytest.raises(AdminFailed, match=r"would not be changed: positions move.*there is no such partition"):
        preview(context, {tp(2): 0}, {}, recreated)


def test_what_the_cluster_says_of_topics() -> None:
    """D10: where an id is not known, or the topic is unknown to the group, nobody can say."""
    cluster, _ = company(parked=False)
    assert find_recreated(cluster.group, {TOPIC: TopicInfo(3, OLD), "other": TopicInfo(1, NEW)}) == {}
    assert find_recreated(cluster.group, {TOPIC: TopicInfo(3, "")}) == {}


def test_a_broker_that_is_behind_does_not_bring_the_old_topic_back() -> None:
    """D10: no id is ever given twice, so what the log has replaced is gone for good."""
    cluster, team = company()
    finish(cluster, move(cluster))
    tell(team, 3, OLD)
    cluster.run(3 * INTERVAL_MS)
    assert [cluster.partition(number).parked for number in range(3)] == ["", "", ""]
    assert cluster.group.topics[TOPIC].id == NEW
