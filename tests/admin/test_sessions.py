"""Step down, evict, delete: PROTOCOL.md M4, M11 and rule 9 on plans in virtual time, beside real members."""

from __future__ import annotations

import pytest

from marshal_py.admin import change
from marshal_py.admin.change import ConfigPlan
from marshal_py.admin.sessions import EvictPlan, RemovePlan, StepDownPlan
from marshal_py.errors import AdminGaveUp, GroupMissing, MembersAlive, ModeMismatch
from marshal_py.protocol.records import Evict, GroupConfig, StepDown
from tests.admin.theatre import finish, hire
from tests.support.stage import INTERVAL_MS, Stage

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so


def test_a_session_steps_down_and_stays() -> None:
    stage = Stage(partitions=4)
    a, b = stage.team("a", "b")
    tool = finish(stage, hire(stage, lambda scene: StepDownPlan(scene, a.session, "slow disk")))
    assert tool.errand.error is None
    assert stage.group.sessions[a.session].mark == tool.errand.mark  # type: ignore[attr-defined]
    again = finish(stage, hire(stage, lambda scene: StepDownPlan(scene, a.session), "again"))
    assert stage.group.sessions[a.session].mark == again.errand.mark > tool.errand.mark  # type: ignore[attr-defined]
    ((_, record),) = [(v, r) for v, r in stage.records(StepDown) if r.reason]
    assert record.by.startswith("alice@desk")
    assert {a.session, b.session} == set(stage.group.sessions)
    with pytest.raises(GroupMissing, match="no live session 99999"):
        hire(stage, lambda scene: StepDownPlan(scene, 99_999))


def test_a_step_down_whose_record_is_lost_is_sent_again_and_ends_in_bounded_time() -> None:
    stage = Stage(partitions=1)
    (a,) = stage.team("a")
    tool = hire(stage, lambda scene: StepDownPlan(scene, a.session, patience_ms=5_000))
    tool.cut()
    finish(stage, tool)
    assert isinstance(tool.errand.error, AdminGaveUp)
    assert len(tool.held_back) > 2


def test_a_silent_session_is_evicted_after_the_tools_own_wait() -> None:
    """M4: never sooner than twice its interval, whatever the log's age says."""
    stage = Stage(partitions=2)
    (a,) = stage.team("a")
    stage.kill(a)
    stage.run(100 * I)
    begun = stage.now_ms
    tool = finish(stage, hire(stage, lambda scene: EvictPlan(scene, {a.session})))
    assert tool.errand.error is None
    assert stage.now_ms - begun >= 2 * I
    (evict,) = [record for verdict, record in stage.records(Evict) if verdict.accepted]
    assert tool.errand.ended_by == {a.session: evict.by}  # type: ignore[attr-defined]


def test_a_live_session_cannot_be_ended_from_outside() -> None:
    """M11: one sign of life, and the tool ends with nothing done."""
    stage = Stage(partitions=2)
    a, b = stage.team("a", "b")
    tool = finish(stage, hire(stage, lambda scene: EvictPlan(scene, {a.session})))
    assert isinstance(tool.errand.error, MembersAlive)
    assert tool.errand.error.members == (f"a (session {a.session})",)
    assert tool.records == []
    rm = finish(stage, hire(stage, RemovePlan, "rm"))
    assert isinstance(rm.errand.error, MembersAlive)
    assert rm.records == []
    assert {a.session, b.session} == set(stage.group.sessions)


def test_a_group_is_deleted_when_nobody_lives() -> None:
    """M11: sessions that died without a word are waited out; one that joins meanwhile stops it."""
    stage = Stage(partitions=2)
    (a,) = stage.team("a")
    stage.kill(a)
    tool = hire(stage, RemovePlan)
    stage.run(I)
    late = stage.add("late")
    finish(stage, tool)
    assert isinstance(tool.errand.error, MembersAlive)
    assert not stage.group.deleted
    stage.run(5 * I)
    stage.kill(late)
    rm = finish(stage, hire(stage, RemovePlan, "rm"))
    assert rm.errand.error is None
    assert stage.group.deleted
    assert rm.errand.deleted_at == stage.group.config_offset  # type: ignore[attr-defined]
    assert [r for r in rm.records if isinstance(r, GroupConfig)] == [stage.group.config], "once, not again afterwards"
    twice = finish(stage, hire(stage, RemovePlan, "twice"))
    assert twice.errand.error is None
    assert len(list(stage.records(GroupConfig))) == 1


def test_a_forced_deletion_ends_who_lives_and_whom_it_meets() -> None:
    """M15: a change of mode ends every session and keeps its consumers out; then the group is deleted."""
    stage = Stage(partitions=2)
    a, b = stage.team("a", "b")
    assert change.others_mode(stage.group) == "at_most_once"
    first = finish(stage, hire(stage, lambda scene: ConfigPlan(scene, {"delivery": "at_most_once"}), "force"))
    assert first.errand.error is None
    assert stage.group.sessions == {}
    assert not stage.group.paused
    assert change.others_mode(stage.group) is None, "nobody is left to be ended"
    stage.run(3 * I)
    late = stage.add("late")
    stage.run(3 * I)
    assert stage.group.sessions == {}, "no consumer of the old mode joins"
    rm = finish(stage, hire(stage, RemovePlan, "rm"))
    assert rm.errand.error is None
    assert stage.group.deleted
    stage.run(3 * I)
    assert isinstance(a.member.error, ModeMismatch)
    assert isinstance(b.member.error, ModeMismatch)
    assert isinstance(late.member.error, ModeMismatch)


def test_a_session_that_leaves_is_no_eviction() -> None:
    stage = Stage(partitions=1)
    (a,) = stage.team("a")
    tool = hire(stage, lambda scene: EvictPlan(scene, {a.session}))
    a.member.leave(a.now, "bye", 0)
    a.due_ms = stage.now_ms
    finish(stage, tool)
    assert tool.errand.error is None
    assert tool.kinds == ["left"]
