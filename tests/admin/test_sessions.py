"""Step down, evict, delete: PROTOCOL.md M4, M11 and rule 9 on plans in virtual time, beside real members."""

from __future__ import annotations

import pytest

from marshal_py.admin.plans.change import ConfigPlan, DeletionPlan, with_members, without_members
from marshal_py.admin.plans.operation import Terms
from marshal_py.admin.plans.sessions import EvictPlan, RemovePlan, StepDownPlan
from marshal_py.errors import AdminGaveUp, GroupDeleted, GroupMissing, MembersAlive
from marshal_py.protocol.fold.policies import PRIORITY
from marshal_py.protocol.wire.records import Evict, GroupConfig, StepDown
from tests.admin.virtual_admin import finish, start_tool
from tests.support.virtual_cluster import INTERVAL_MS, VirtualCluster

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so


def test_a_session_steps_down_and_stays() -> None:
    cluster = VirtualCluster(partitions=4)
    a, b = cluster.team("a", "b")
    tool = finish(cluster, start_tool(cluster, lambda context: StepDownPlan(context, a.session, Terms("slow disk"))))
    assert tool.operation.error is None
    assert cluster.group.sessions[a.session].mark == tool.operation.mark  # type: ignore[attr-defined]
    again = finish(cluster, start_tool(cluster, lambda context: StepDownPlan(context, a.session), "again"))
    assert cluster.group.sessions[a.session].mark == again.operation.mark > tool.operation.mark  # type: ignore[attr-defined]
    ((_, record),) = [(v, r) for v, r in cluster.records(StepDown) if r.reason]
    assert record.by.startswith("alice@desk")
    assert {a.session, b.session} == set(cluster.group.sessions)


def test_a_session_has_three_names() -> None:
    """Its number, its client id and its member name, wherever one is asked for; not where two have the same."""
    cluster = VirtualCluster(partitions=2)
    cluster.must(GroupConfig(-1, policy="members", max_members=2, members=("m1", "m2")))
    a, b = cluster.add("a", member="m1"), cluster.add("b", member="m2")
    also = cluster.add("b2", member="m2")
    cluster.run(3 * I)
    for given in (a.session, str(a.session), "a", "m1"):
        tool = finish(cluster, start_tool(cluster, lambda context, given=given: StepDownPlan(context, given)))
        assert tool.operation.session == a.session  # type: ignore[attr-defined]
    there = rf"there is {a.session} \(a\), {b.session} \(b\), {also.session} \(b2\)"
    for given, says in (
        (99_999, "no live session 99999"),
        ("c", "no live session 'c'"),
        ("m2", "2 live sessions 'm2'"),
    ):
        with pytest.raises(GroupMissing, match=f"{says}; {there}"):
            start_tool(cluster, lambda context, given=given: StepDownPlan(context, given))


def test_an_empty_name_is_nobody() -> None:
    """A consumer without a member name has none."""
    cluster = VirtualCluster(partitions=1)
    cluster.team("a")
    with pytest.raises(GroupMissing, match="no live session ''"):
        start_tool(cluster, lambda context: StepDownPlan(context, ""))


def test_a_step_down_whose_record_is_lost_is_sent_again_and_ends_in_bounded_time() -> None:
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    tool = start_tool(cluster, lambda context: StepDownPlan(context, a.session, Terms(patience_ms=5_000)))
    tool.cut()
    finish(cluster, tool)
    assert isinstance(tool.operation.error, AdminGaveUp)
    assert len(tool.held_back) > 2


def test_a_silent_session_is_evicted_after_the_tools_own_wait() -> None:
    """M4: never sooner than twice its interval, whatever the log's age says."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    cluster.kill(a)
    cluster.run(100 * I)
    begun = cluster.now_ms
    tool = finish(cluster, start_tool(cluster, lambda context: EvictPlan(context, {a.session})))
    assert tool.operation.error is None
    assert cluster.now_ms - begun >= 2 * I
    (evict,) = [record for verdict, record in cluster.records(Evict) if verdict.accepted]
    assert tool.operation.ended_by == {a.session: evict.by}  # type: ignore[attr-defined]


def test_a_live_session_cannot_be_ended_from_outside() -> None:
    """M11: one sign of life, and the tool ends with nothing done."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b")
    tool = finish(cluster, start_tool(cluster, lambda context: EvictPlan(context, {a.session})))
    assert isinstance(tool.operation.error, MembersAlive)
    assert tool.operation.error.members == (f"a (session {a.session})",)
    assert tool.records == []
    rm = finish(cluster, start_tool(cluster, RemovePlan, "rm"))
    assert isinstance(rm.operation.error, MembersAlive)
    assert rm.records == []
    assert {a.session, b.session} == set(cluster.group.sessions)


def test_a_group_is_deleted_when_nobody_lives() -> None:
    """M11: silent sessions are evicted; one that joins meanwhile stops it."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    cluster.kill(a)
    tool = start_tool(cluster, RemovePlan)
    cluster.run(I)
    late = cluster.add("late")
    finish(cluster, tool)
    assert isinstance(tool.operation.error, MembersAlive)
    assert not cluster.group.deleted
    cluster.run(5 * I)
    cluster.kill(late)
    rm = finish(cluster, start_tool(cluster, RemovePlan, "rm"))
    assert rm.operation.error is None
    assert cluster.group.deleted
    assert rm.operation.deleted_at == cluster.group.config_offset  # type: ignore[attr-defined]
    assert [r for r in rm.records if isinstance(r, GroupConfig)] == [cluster.group.config], "once, not again afterwards"
    twice = finish(cluster, start_tool(cluster, RemovePlan, "twice"))
    assert twice.operation.error is None
    assert len(list(cluster.records(GroupConfig))) == 1


@pytest.mark.parametrize("policy", ["", "topic", "prioritized", "pinned", "overflow"])
def test_a_forced_deletion_ends_who_lives_and_whom_it_meets(policy: str) -> None:
    """M15, F9.5: under every policy, by one record in a pause; whoever lives or comes then ends with GroupDeleted."""
    cluster = VirtualCluster(partitions=2)
    jobs = ("jobs",) if policy in PRIORITY else ()
    cluster.must(GroupConfig(-1, policy=policy, priority_groups=jobs))
    a, b = cluster.team("a", "b", priority_group="".join(jobs))
    cluster.run(3 * I)
    begun = len(cluster.values)
    first = start_tool(cluster, DeletionPlan, "force")
    late = cluster.add("late", priority_group="".join(jobs))
    finish(cluster, first)
    assert first.operation.error is None
    assert first.operation.changed_at == cluster.group.config_offset  # type: ignore[attr-defined]
    assert (cluster.group.deleted, cluster.group.sessions, cluster.group.paused) == (True, {}, False)
    assert [r for _, r in cluster.records(GroupConfig, begun)] == [cluster.group.config], "one record is the deletion"
    later = cluster.add("later", member="m1", group_config=GroupConfig(-1, policy="members", max_members=2))
    cluster.run(3 * I)
    for client in (a, b, late, later):
        assert isinstance(client.member.error, GroupDeleted), client.member.error
    twice = finish(cluster, start_tool(cluster, DeletionPlan, "twice"))
    assert (twice.operation.error, twice.operation.changed_at) == (None, -1)  # type: ignore[attr-defined]


def test_two_admins_add_different_members() -> None:
    """M13: the slower one adds to what it finds; who finds all there writes nothing."""
    cluster = VirtualCluster(partitions=2)
    cluster.must(GroupConfig(-1, policy="members", max_members=4, members=("m1",)))
    tools = [
        start_tool(cluster, lambda context, name=name: ConfigPlan(context, with_members([name])), name)
        for name in ("m2", "m3")
    ]
    for tool in tools:
        finish(cluster, tool)
        assert tool.operation.error is None
    assert cluster.group.config is not None
    assert cluster.group.config.members == ("m1", "m2", "m3")
    written = len(list(cluster.records(GroupConfig)))
    tool = finish(
        cluster, start_tool(cluster, lambda context: ConfigPlan(context, with_members(["m1", "m2"])), "again")
    )
    assert tool.operation.error is None
    assert tool.operation.changed_at == cluster.group.config_offset  # type: ignore[attr-defined]
    assert "changed" not in tool.kinds
    tool = finish(
        cluster, start_tool(cluster, lambda context: ConfigPlan(context, without_members(["nobody"])), "drop")
    )
    assert (tool.operation.error, tool.operation.changed_at) == (None, cluster.group.config_offset)  # type: ignore[attr-defined]
    assert len(list(cluster.records(GroupConfig))) == written


def test_a_forced_deletion_of_a_silent_group() -> None:
    """M4, M15: an owner that is dead is evicted in the pause, before the deletion."""
    cluster = VirtualCluster(partitions=2)
    (a,) = cluster.team("a")
    cluster.kill(a)
    tool = finish(cluster, start_tool(cluster, DeletionPlan, "force"))
    assert tool.operation.error is None
    assert cluster.group.deleted
    assert len(list(cluster.records(Evict))) >= 1


def test_a_session_that_leaves_is_no_eviction() -> None:
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    tool = start_tool(cluster, lambda context: EvictPlan(context, {a.session}))
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    finish(cluster, tool)
    assert tool.operation.error is None
    assert tool.kinds == ["left"]
