"""Step down, evict, delete: PROTOCOL.md M4, M11 and rule 9 on plans in virtual time, beside real members."""

from __future__ import annotations

import pytest

from marshal_py.admin import change
from marshal_py.admin.change import ConfigPlan
from marshal_py.admin.sessions import EvictPlan, RemovePlan, StepDownPlan
from marshal_py.errors import AdminGaveUp, GroupMissing, MembersAlive, ModeMismatch
from marshal_py.protocol.records import Evict, GroupConfig, StepDown
from tests.admin.virtual_admin import finish, start_tool
from tests.support.virtual_cluster import INTERVAL_MS, VirtualCluster

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so


def test_a_session_steps_down_and_stays() -> None:
    cluster = VirtualCluster(partitions=4)
    a, b = cluster.team("a", "b")
    tool = finish(cluster, start_tool(cluster, lambda context: StepDownPlan(context, a.session, "slow disk")))
    assert tool.operation.error is None
    assert cluster.group.sessions[a.session].mark == tool.operation.mark  # type: ignore[attr-defined]
    again = finish(cluster, start_tool(cluster, lambda context: StepDownPlan(context, a.session), "again"))
    assert cluster.group.sessions[a.session].mark == again.operation.mark > tool.operation.mark  # type: ignore[attr-defined]
    ((_, record),) = [(v, r) for v, r in cluster.records(StepDown) if r.reason]
    assert record.by.startswith("alice@desk")
    assert {a.session, b.session} == set(cluster.group.sessions)
    with pytest.raises(GroupMissing, match="no live session 99999"):
        start_tool(cluster, lambda context: StepDownPlan(context, 99_999))


def test_a_step_down_whose_record_is_lost_is_sent_again_and_ends_in_bounded_time() -> None:
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    tool = start_tool(cluster, lambda context: StepDownPlan(context, a.session, patience_ms=5_000))
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


def test_a_forced_deletion_ends_who_lives_and_whom_it_meets() -> None:
    """M15: a change of mode ends every session and keeps its consumers out; then the group is deleted."""
    cluster = VirtualCluster(partitions=2)
    a, b = cluster.team("a", "b")
    assert change.others_mode(cluster.group) == "at_most_once"
    first = finish(
        cluster, start_tool(cluster, lambda context: ConfigPlan(context, {"delivery": "at_most_once"}), "force")
    )
    assert first.operation.error is None
    assert cluster.group.sessions == {}
    assert not cluster.group.paused
    assert change.others_mode(cluster.group) is None, "nobody is left to be ended"
    cluster.run(3 * I)
    late = cluster.add("late")
    cluster.run(3 * I)
    assert cluster.group.sessions == {}, "no consumer of the old mode joins"
    rm = finish(cluster, start_tool(cluster, RemovePlan, "rm"))
    assert rm.operation.error is None
    assert cluster.group.deleted
    cluster.run(3 * I)
    assert isinstance(a.member.error, ModeMismatch)
    assert isinstance(b.member.error, ModeMismatch)
    assert isinstance(late.member.error, ModeMismatch)


def test_a_session_that_leaves_is_no_eviction() -> None:
    cluster = VirtualCluster(partitions=1)
    (a,) = cluster.team("a")
    tool = start_tool(cluster, lambda context: EvictPlan(context, {a.session}))
    a.member.leave(a.now, "bye", 0)
    a.due_ms = cluster.now_ms
    finish(cluster, tool)
    assert tool.operation.error is None
    assert tool.kinds == ["left"]
