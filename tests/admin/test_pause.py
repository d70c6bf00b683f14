"""Pausing a live group and ending the pause: PROTOCOL.md 14 on plans in virtual time, beside real members."""

from __future__ import annotations

import pytest

from marshal_py.admin.errand import Scene
from marshal_py.admin.pause import PausePlan, ResumePlan
from marshal_py.errors import AdminBusy, GroupDeleted, InvalidOption, PauseNotDrained
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.records import Evict, GroupConfig, ReleaseGroup
from tests.admin.theatre import Tool, finish, hire, play_copies
from tests.support.stage import INTERVAL_MS, Stage

I = INTERVAL_MS  # noqa: E741  the protocol calls an interval so


def start(
    stage: Stage, name: str = "tool", who: str = "alice@desk", crash_after: int = 10**9, **options: object
) -> Tool:
    def make(scene: Scene) -> PausePlan:
        return PausePlan(scene, **options)  # type: ignore[arg-type]

    return hire(stage, make, name, who, crash_after=crash_after)


def resume(stage: Stage, name: str = "resumer", who: str = "alice@desk", **options: object) -> Tool:
    def make(scene: Scene) -> ResumePlan:
        return ResumePlan(scene, **options)  # type: ignore[arg-type]

    return finish(stage, hire(stage, make, name, who))


def test_a_pause_ends_when_everybody_has_let_go() -> None:
    """M4: all partitions >= 0; the token is the pause's, nobody was evicted, and the group comes back by itself."""
    stage = Stage(partitions=6)
    stage.team("a", "b")
    assert len(stage.owners()) == 6
    tool = finish(stage, start(stage, reason="deploy"))
    plan = tool.errand
    assert isinstance(plan, PausePlan)
    assert plan.error is None
    assert stage.owners() == {}
    assert stage.group.paused
    assert plan.token == stage.group.pause_change
    assert len(plan.drain.released) == 6
    assert plan.drain.evicted == []
    assert tool.kinds.count("released") == 6
    assert tool.kinds[-1] == "drained"
    assert not list(stage.records(Evict))
    ended = resume(stage)
    assert ended.errand.error is None
    assert ended.kinds == ["resumed"]
    stage.run(2 * I)
    assert len(stage.owners()) == 6


def test_a_record_says_who_wrote_it() -> None:
    """M1: person, machine, tool and run; two runs of one person at one moment are told apart."""
    stage = Stage(partitions=2)
    stage.team("a")
    one, two = start(stage, "one"), start(stage, "two")
    finish(stage, one)
    finish(stage, two)
    texts = {record.by for _, record in stage.records(ReleaseGroup)}
    assert len(texts) == 2
    assert all(text.startswith("alice@desk test 1 run ") for text in texts)
    assert sum(tool.errand.error is None for tool in (one, two)) >= 1


def test_a_dead_owner_is_waited_out() -> None:
    """M4: evicted by the tool's own wait of two intervals, which needs proof by probes."""
    stage = Stage(partitions=4)
    (victim,) = stage.team("victim")
    stage.kill(victim)
    begun = stage.now_ms
    tool = start(stage)
    stage.run(I)
    tool.hold_writes()  # T3: what it does not prove, it does not wait
    stage.run(4 * I)
    assert not list(stage.records(Evict))
    tool.release_writes(lose=True)
    stage.run(I)
    assert not list(stage.records(Evict)), "the wait began anew"
    finish(stage, tool)
    (evict,) = [record for verdict, record in stage.records(Evict) if verdict.accepted]
    assert evict.waited_ms >= 2 * I
    assert evict.by.startswith("alice@desk")
    assert stage.now_ms - begun >= 7 * I
    assert tool.errand.error is None
    assert isinstance(tool.errand, PausePlan)
    assert tool.errand.drain.evicted == [evict.session]


def test_a_stuck_handler_holds_no_pause_open() -> None:
    stage = Stage(partitions=1)
    (owner,) = stage.team("owner")
    owner.deliver(owner.claim(0), 0, 1, 2)
    tool = finish(stage, start(stage))
    assert tool.errand.error is None
    assert not stage.owners()
    assert stage.partition(0).position == 0


def test_another_admins_pause_is_left_alone() -> None:
    """M2: the refusal names who, why and how long; nothing is written."""
    stage = Stage(partitions=2)
    stage.team("a")
    finish(stage, start(stage, "first", "bob@office", reason="disk", duration_ms=60_000))
    token = stage.group.pause_change
    tool = finish(stage, start(stage))
    error = tool.errand.error
    assert isinstance(error, AdminBusy)
    assert error.by.startswith("bob@office")
    assert error.reason == "disk"
    assert 55 < error.left_s <= 60
    assert error.token == token
    assert tool.records == []
    ended = resume(stage)
    assert isinstance(ended.errand.error, AdminBusy)
    assert ended.records == []
    assert stage.group.pause_change == token


@pytest.mark.parametrize("right", ["token", "take_over", "adopt"])
def test_a_pause_can_be_replaced_by_right(right: str) -> None:
    """M2: by its token, on demand, or as the same person who says so; the old token is dead then."""
    stage = Stage(partitions=2)
    stage.team("a")
    who = "alice@desk" if right == "adopt" else "bob@office"
    finish(stage, start(stage, "first", who))
    token = stage.group.pause_change
    options = {"token": {"token": token}, "take_over": {"take_over": True}, "adopt": {"adopt": True}}[right]
    tool = finish(stage, start(stage, **options))
    assert tool.errand.error is None
    assert stage.group.pause_change > token
    assert isinstance(tool.errand, PausePlan)
    assert tool.errand.token == stage.group.pause_change
    assert stage.inject(ReleaseGroup(token, token, 0)).reason == "observed"


@pytest.mark.parametrize("adopt", [False, True])
def test_a_pause_of_ones_own_is_not_replaced_without_a_word(adopt: bool) -> None:
    """M2: everybody on a bastion or in CI is the same person; and `adopt` means one's own, nobody else's."""
    stage = Stage(partitions=2)
    stage.team("a")
    finish(stage, start(stage, "first", "bob@office" if adopt else "alice@desk", reason="disk"))
    token = stage.group.pause_change
    error = finish(stage, start(stage, adopt=adopt)).errand.error
    assert isinstance(error, AdminBusy)
    assert error.own is not adopt
    assert f"--token {token}" in str(error)
    assert ("--take-over" if adopt else "--adopt") in str(error)
    assert "disk" in str(error)
    assert stage.group.pause_change == token


def test_a_wrong_token_opens_nothing() -> None:
    stage = Stage(partitions=2)
    stage.team("a")
    finish(stage, start(stage, "first"))
    tool = finish(stage, start(stage, token=stage.group.pause_change - 1))
    assert isinstance(tool.errand.error, AdminBusy), "not even for the same person: it asked for another pause"


def test_two_admins_do_not_quarrel() -> None:
    """M2: who lost its pause to another does not take it back; who had it ended by another's will neither."""
    stage = Stage(partitions=2)
    (owner,) = stage.team("a")
    owner.deliver(owner.claim(0), 0)  # the drain lasts
    slow = start(stage, "slow", keep=True)
    stage.run(I // 3)
    taken = finish(stage, start(stage, "other", "bob@office", take_over=True))
    assert taken.errand.error is None
    finish(stage, slow)
    assert isinstance(slow.errand.error, AdminBusy)
    assert slow.errand.error.by.startswith("bob@office")
    assert stage.group.pause_change == taken.errand.token  # type: ignore[attr-defined]

    kept = start(stage, "kept", "bob@office", keep=True, adopt=True)
    stage.run(I)
    resume(stage, "bobs second shell", "bob@office")
    finish(stage, kept)
    assert kept.errand.error is not None
    assert "was ended by bob@office" in str(kept.errand.error)
    stage.run(20 * I)
    assert not stage.group.paused


def test_a_kept_pause_is_renewed_and_ends_with_its_tool() -> None:
    """M3: after a third of its duration, with its own token; without the tool the members end it."""
    stage = Stage(partitions=2)
    (a,) = stage.team("a")
    tool = start(stage, keep=True, duration_ms=9_000)
    stage.run(30_000)
    assert stage.group.paused
    asked = [record for verdict, record in stage.records(ReleaseGroup) if verdict.accepted]
    assert len(asked) >= 9
    assert all(record.token == record.observed for record in asked[1:])
    stage.kill(tool)
    stage.run(9_000 + 2 * I)
    assert not stage.group.paused
    assert len(a.owned) == 2


def test_a_kept_pause_ends_when_its_user_has_had_enough() -> None:
    stage = Stage(partitions=2)
    stage.team("a")
    tool = start(stage, keep=True)
    stage.run(I)
    tool.give_up()
    finish(stage, tool)
    assert not stage.group.paused
    assert play_copies(stage, tool) == []


def test_the_default_duration() -> None:
    """M3: a minute, and twice the longest interval; more than a day is refused."""
    stage = Stage(partitions=2)
    stage.team("a")
    stage.team("b", interval_ms=10_000)
    finish(stage, start(stage))
    assert stage.group.pause_duration_ms == 80_000
    with pytest.raises(InvalidOption, match="24 h"):
        start(stage, duration_ms=86_400_001)
    with pytest.raises(InvalidOption):
        start(stage, duration_ms=0)


def test_a_pause_that_is_not_drained_in_time_is_taken_back() -> None:
    """M9: the pause is read over before the tool ends, and nothing of it can come later."""
    stage = Stage(partitions=2)
    (owner,) = stage.team("owner")
    owner.cut()  # it neither reads the pause nor can be waited out in this patience
    tool = finish(stage, start(stage, patience_ms=I))
    error = tool.errand.error
    assert isinstance(error, PauseNotDrained)
    assert error.holders == (f"owner (session {owner.session})",)
    assert not stage.group.paused
    assert play_copies(stage, tool) == []
    assert not stage.group.paused


@pytest.mark.parametrize("after_ms", [*range(0, 40, 2), 100, 400, 1_000, 2_990, 3_000, 3_004, 3_008, 3_012, 6_010])
def test_a_tool_that_gives_up_leaves_nothing_behind(after_ms: int) -> None:
    """M9: at whatever moment, its renewals on their way: X42. Its last act is read before it ends."""
    stage = Stage(partitions=2)
    (owner,) = stage.team("owner")
    owner.deliver(owner.claim(0), 0)
    tool = start(stage, keep=True, duration_ms=9_000)
    tool.write_ms = 15
    stage.run(after_ms)
    tool.give_up()
    finish(stage, tool)
    stage.run(100)
    assert not stage.group.paused
    assert play_copies(stage, tool) == []
    assert not stage.group.paused


def test_a_renewal_that_comes_before_the_end_is_ended_too() -> None:
    """M9: X42 to the letter: the end is rejected by `observed`, and written again with the new token."""
    stage = Stage(partitions=2)
    stage.team("owner")
    tool = start(stage, keep=True, duration_ms=9_000)
    stage.run(1_000)
    tool.write_ms = 50
    stage.run_until(lambda: sum(isinstance(r, ReleaseGroup) for r in tool.records) == 2)
    tool.give_up()
    finish(stage, tool)
    fates = [(record.duration_ms > 0, verdict.reason) for verdict, record in stage.records(ReleaseGroup)]
    assert fates[:4] == [(True, ""), (True, ""), (False, "observed"), (False, "")]
    assert not stage.group.paused


def test_the_token_that_is_told_is_final() -> None:
    """M10: a tool that leaves its pause behind waits for the fate of its renewals first."""
    stage = Stage(partitions=1)
    (owner,) = stage.team("owner")
    owner.deliver(owner.claim(0), 0)
    # The drain lasts one interval; a renewal is on its way when it ends.
    tool = start(stage, duration_ms=3 * (I - 30))
    tool.write_ms = 60
    finish(stage, tool)
    assert isinstance(tool.errand, PausePlan)
    assert tool.errand.error is None
    renewed = [r for r in tool.records if isinstance(r, ReleaseGroup)]
    assert len(renewed) >= 2, "a renewal was sent: the test is about one"
    token = tool.errand.token
    stage.run(1_000)
    assert stage.group.pause_change == token
    assert play_copies(stage, tool) == []
    assert stage.group.pause_change == token


def test_a_deleted_group_ends_the_tool() -> None:
    stage = Stage(partitions=1)
    stage.team("a")
    tool = start(stage, keep=True)
    stage.run(I)
    for client in stage.clients[:1]:
        client.member.leave(client.now, "bye", 0)
    stage.run(I)
    stage.must(GroupConfig(-1, deleted=True))
    finish(stage, tool)
    assert isinstance(tool.errand.error, GroupDeleted)


def test_resuming_a_running_group_is_no_error() -> None:
    stage = Stage(partitions=1)
    (owner,) = stage.team("a")
    tool = resume(stage)
    assert tool.errand.error is None
    assert tool.kinds == ["running"]
    assert tool.records == []
    assert isinstance(owner.claim(0).tracker, AtLeastOnce)
